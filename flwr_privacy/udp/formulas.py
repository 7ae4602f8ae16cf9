"""The noise that a budget asks for, and the budget that a noise gives: the paper's and the sound.

Symbols: q is the fraction of the clients that is asked in a round, T the number of rounds, Dl the
L2 sensitivity of one release, a the sum of the squares of Dl / sigma.
"""

import math

import numpy as np
from scipy.special import bdtr

from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

__all__ = [
    "check_budget",
    "eps_paper",
    "eps_zcdp",
    "participations",
    "rounds_paper",
    "sigma_gdp",
    "sigma_paper",
    "sigma_zcdp",
]

_SMALLEST = math.ulp(0.0)


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


def participations(rounds: int, q: float, *, quantile: float = 0.99) -> int:
    """Return how often a client takes part at most, in all but ``1 - quantile`` of the cases.

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
    if delta is not None and not 0 < check_number("delta", delta) < 1:
        raise InvalidParameterError("delta", delta, "a number between 0 and 1, neither of them")
