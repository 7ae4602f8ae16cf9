"""Converts budgets to noise and back, by the paper's formulas and by sound ones.

Symbols: q is the fraction of the clients that is asked in a round, T the number of rounds, Dl the
L2 sensitivity of one release.
"""

import math

import numpy as np
from scipy.special import bdtr

from flwr_privacy.accounting.gaussian import check_delta, mu_of
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

__all__ = [
    "budget",
    "check_budget",
    "participations",
    "sigma_paper",
]


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


def budget(mode: str, *, epsilon: float, delta: float) -> float:
    """Return B, the largest allowed sum of squares of sensitivity over noise.

    Parameters
    ----------
    mode : {"paper", "zcdp", "gdp"}
        ``paper``: ``epsilon**2 / (2 ln(1/delta))``, equation (10) solved for it, where the sum is
        over the expected participations; ``zcdp``: what its own moments prove; ``gdp``: the
        square of `mu_of`, which is exact.
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
