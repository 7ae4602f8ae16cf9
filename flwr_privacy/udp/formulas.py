"""Converts budgets to noise and back, by the paper's formulas and by sound ones.

Symbols: q is the fraction of the clients that is asked in a round, T the number of rounds, Dl the
L2 sensitivity of one release, a the sum of the squares of Dl / sigma.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import bdtr

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.accounting.gaussian import check_delta, epsilon_of, mu_of
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

__all__ = [
    "budget",
    "check_budget",
    "eps_paper",
    "eps_spent",
    "eps_zcdp",
    "mu_star",
    "participations",
    "rounds_paper",
    "sigma_crd",
    "sigma_gdp",
    "sigma_paper",
    "sigma_zcdp",
]

_SMALLEST = math.ulp(0.0)

mu_star = mu_of
"""The largest mu for which mu-GDP is (epsilon, delta)-DP."""


def sigma_paper(*, rounds: int, q: float, epsilon: float, delta: float, Dl: float = 1.0) -> float:
    """Return the paper's noise, equation (10): ``Dl * sqrt(2 q T ln(1/delta)) / epsilon``.

    It claims (epsilon, delta) for the whole training and does not give it: the proof uses an
    inequality backwards, and counts the expected number of participations, which the server sees.

    Examples
    --------
    >>> round(sigma_paper(rounds=200, q=1.0, epsilon=8.0, delta=1e-3), 6)
    6.570652
    """
    check_budget(rounds=rounds, q=q, epsilon=epsilon, delta=delta)
    return Dl * math.sqrt(2 * q * rounds * math.log(1 / delta)) / epsilon


def eps_paper(*, sigma: float, rounds: int, q: float, delta: float, Dl: float = 1.0) -> float:
    """Return the epsilon that equation (10) claims for a given noise."""
    check_number("sigma", sigma, minimum=_SMALLEST)
    check_budget(rounds=rounds, q=q, delta=delta)
    return Dl * math.sqrt(2 * q * rounds * math.log(1 / delta)) / sigma


def rounds_paper(*, sigma: float, q: float, epsilon: float, delta: float, Dl: float = 1.0) -> float:
    """Return the number of rounds for which equation (10) has a given noise."""
    check_number("sigma", sigma, minimum=_SMALLEST)
    check_budget(q=q, epsilon=epsilon, delta=delta)
    return (sigma * epsilon / Dl) ** 2 / (2 * q * math.log(1 / delta))


def eps_zcdp(*, a: float, delta: float) -> float:
    """Return ``a/2 + sqrt(2 a ln(1/delta))``: what Theorem 1's own moments give.

    Parameters
    ----------
    a : float
        Sum of ``(Dl / sigma)**2`` over the releases, at least 0.
    delta : float
        Between 0 and 1.
    """
    check_number("a", a, minimum=0)
    check_budget(delta=delta)
    return a / 2 + math.sqrt(2 * a * math.log(1 / delta))


def sigma_zcdp(*, rounds: int, q: float, epsilon: float, delta: float, Dl: float = 1.0) -> float:
    """Return the noise at which `eps_zcdp` over the expected participations is `epsilon`."""
    check_budget(rounds=rounds, q=q, epsilon=epsilon, delta=delta)
    log = math.log(1 / delta)
    return Dl * math.sqrt(q * rounds / 2) / (math.sqrt(log + epsilon) - math.sqrt(log))


def sigma_gdp(*, releases: int, epsilon: float, delta: float, Dl: float = 1.0) -> float:
    """Return the noise at which so many releases together are exactly (epsilon, delta).

    Gaussian differential privacy (Dong, Roth, Su 2022): ``Dl * sqrt(releases) / mu``, with mu of
    `flwr_privacy.accounting.gaussian.mu_of`.

    Examples
    --------
    >>> round(sigma_gdp(releases=200, epsilon=8.0, delta=1e-3), 3)
    6.788
    """
    check_integer("releases", releases, minimum=1)
    check_budget(epsilon=epsilon, delta=delta)
    return Dl * math.sqrt(releases) / mu_of(epsilon, delta)


def sigma_crd(
    *, T: int, t: int, spent: float, q: float, epsilon: float, delta: float, Dl: float = 1.0
) -> float:
    """Return the paper's noise of round t after the number of rounds was changed, equation (25).

    Parameters
    ----------
    T : int
        Number of rounds planned now.
    t : int
        Rounds done, at least 0 and less than `T`.
    spent : float
        Sum of ``1 / sigma**2`` over the rounds done, whether the client took part or not.
    q, epsilon, delta, Dl : float
        As in `sigma_paper`.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or nothing is left of the budget.

    Examples
    --------
    >>> spent = 10 / 6.570652**2
    >>> round(sigma_crd(T=180, t=10, spent=spent, q=1.0, epsilon=8.0, delta=1e-3), 6)
    6.215215
    """
    check_integer("t", t, minimum=0)
    check_integer("T", T, minimum=t + 1)
    check_number("spent", spent, minimum=0)
    check_number("Dl", Dl, minimum=_SMALLEST)
    check_budget(q=q, epsilon=epsilon, delta=delta)
    left = budget("paper", epsilon=epsilon, delta=delta) / (q * Dl**2) - spent
    if left <= 0:
        raise InvalidParameterError("spent", spent, f"less than {left + spent}, the whole budget")
    return math.sqrt((T - t) / left)


def budget(mode: str, *, epsilon: float, delta: float) -> float:
    """Return B, the largest allowed sum of squares of sensitivity over noise.

    Parameters
    ----------
    mode : {"paper", "zcdp", "gdp"}
        ``paper``: ``epsilon**2 / (2 ln(1/delta))``, equation (10) solved for it, where the sum is
        over the expected participations; ``zcdp``: what its own moments prove; ``gdp``: the
        square of `mu_star`, which is exact.
    epsilon, delta : float
        The budget.

    Examples
    --------
    >>> [round(budget(mode, epsilon=8, delta=1e-3), 5) for mode in ("paper", "zcdp", "gdp")]
    [4.63247, 3.03957, 4.34003]
    """
    check_choice("mode", mode, ("paper", "zcdp", "gdp"))
    check_budget(epsilon=epsilon, delta=delta)
    log = math.log(1 / delta)
    if mode == "paper":
        return epsilon**2 / (2 * log)
    if mode == "zcdp":
        return 2 * (epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))) ** 2
    return mu_of(epsilon, delta) ** 2


def eps_spent(mode: str, multipliers: Sequence[float], *, delta: float, q: float = 1.0) -> float:
    """Return the epsilon of some rounds, as a mode of accounting has it.

    Parameters
    ----------
    mode : {"paper", "zcdp", "gdp", "pld_secret"}
        ``paper``: what equation (10) claims, of all rounds; ``zcdp`` and ``gdp``: of the rounds in
        which a client took part; ``pld_secret``: of all rounds, against somebody who does not learn
        who takes part.
    multipliers : sequence of float
        Noise over the sensitivity in each of the rounds.
    delta : float
        Between 0 and 1.
    q : float, default 1.0
        Fraction of the clients that is asked in a round; for ``paper`` and ``pld_secret``.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> z = [6.570652] * 200
    >>> [round(eps_spent(mode, z, delta=1e-3), 2) for mode in ("paper", "zcdp", "gdp")]
    [8.0, 10.32, 8.35]
    """
    check_choice("mode", mode, ("paper", "zcdp", "gdp", "pld_secret"))
    check_budget(q=q, delta=delta)
    for z in multipliers:
        check_number("multipliers", z, minimum=_SMALLEST)
    if mode == "pld_secret":
        charges = [Charge(noise_multiplier=z, sampling=q) for z in multipliers]
        return spent(charges, delta=delta, accountant="pld")
    a = math.fsum(z**-2 for z in multipliers)
    if mode == "paper":
        return math.sqrt(2 * q * a * math.log(1 / delta))
    return eps_zcdp(a=a, delta=delta) if mode == "zcdp" else epsilon_of(math.sqrt(a), delta)


def participations(rounds: int, q: float, *, quantile: float = 0.99) -> int:
    """Return the most rounds that a client takes part in, except with probability ``1 - quantile``.

    Examples
    --------
    >>> participations(200, 1.0), participations(200, 0.6)
    (200, 136)
    """
    check_budget(rounds=rounds, q=q)
    shares = bdtr(np.arange(rounds + 1), rounds, q)  # of the clients, by number of participations
    return max(1, int(np.searchsorted(shares, quantile)))


def check_budget(
    *,
    rounds: int | None = None,
    q: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> None:
    """Check what is given.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """
    if rounds is not None:
        check_integer("rounds", rounds, minimum=1)
    if q is not None and not 0 < check_number("q", q) <= 1:
        raise InvalidParameterError("q", q, "a number above 0 and of at most 1")
    if epsilon is not None and not check_number("epsilon", epsilon) > 0:
        raise InvalidParameterError("epsilon", epsilon, "a number above 0")
    if delta is not None:
        check_delta(delta)
