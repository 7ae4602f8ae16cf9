"""Converts noise to epsilon and back: what the paper claims, and what its own moments prove.

Symbols as in `flwr_privacy.udp.paper_noise`; a is the sum of the squares of Dl / sigma.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.udp.budgets import budget, check_budget
from flwr_privacy.udp.schedule import SECRET_NEIGHBOURS

__all__ = [
    "eps_paper",
    "eps_spent",
    "eps_zcdp",
    "m_t",
    "rounds_paper",
    "sigma_crd",
    "sigma_zcdp",
]

_SMALLEST = math.ulp(0.0)


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
        charges = [
            Charge(noise_multiplier=z, neighbours=SECRET_NEIGHBOURS, sampling=q)
            for z in multipliers
        ]
        return spent(charges, delta=delta, accountant="pld")
    a = math.fsum(z**-2 for z in multipliers)
    if mode == "paper":
        return math.sqrt(2 * q * a * math.log(1 / delta))
    return eps_zcdp(a=a, delta=delta) if mode == "zcdp" else epsilon_of(math.sqrt(a), delta)


def m_t(planned: Sequence[int]) -> float:
    """Return the effective number of rounds: equation (25) without what was spent before.

    ``(T_t - t) / r_t``, where r_t is the share of the budget that is left before round t. With it
    for T in equation (10), sigma is that of (25), for a client that never took part as for others.

    Parameters
    ----------
    planned : sequence of int
        The number of rounds that was planned in each round so far, round t's included.

    Raises
    ------
    InvalidParameterError
        If there is none, it grew, or the training was over before.

    Examples
    --------
    >>> round(m_t([200] * 10 + [180]), 6)
    178.947368
    """
    if not planned:
        raise InvalidParameterError("planned", planned, "a number of rounds for each round so far")
    m = Fraction(check_integer("planned", planned[0], minimum=1))
    for t, (before, now) in enumerate(pairwise(planned), start=1):
        check_integer("planned", now, minimum=t + 1, maximum=before)
        m *= Fraction(now - t, before - t)
    return float(m)
