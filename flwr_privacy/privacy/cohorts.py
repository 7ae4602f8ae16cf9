"""Names the ways to draw the cohort of a round, and how often each lets a client take part.

``fixed``
    A fixed number of clients, a random set in every round.
``balanced``
    A fixed number of clients, those that have waited longest: everybody takes part equally often.
``poisson``
    Each client by itself, with the same probability in every round.
``cyclic_poisson``
    The clients are in groups that take turns. In a round each client of one group is drawn by
    itself, with as large a probability as brings the same number of clients.

Symbols: T is the number of rounds, q the fraction of the clients that a round asks.
"""

import math

import numpy as np

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

__all__ = [
    "BALANCED",
    "COHORTS",
    "CYCLIC_POISSON",
    "FIXED",
    "POISSON",
    "drawn_alone",
    "participations",
    "planned_participations",
    "rest",
]

FIXED, BALANCED, POISSON, CYCLIC_POISSON = "fixed", "balanced", "poisson", "cyclic_poisson"

COHORTS = (FIXED, BALANCED, POISSON, CYCLIC_POISSON)
"""Ways to draw a cohort."""

_ROUNDING = 1e-9  # q is a quotient


def drawn_alone(cohorts: str) -> bool:
    """Return whether each client is drawn by itself, so that the size of a cohort varies."""
    return cohorts in (POISSON, CYCLIC_POISSON)


def rest(q: float) -> int:
    """Return the least number of rounds from one turn of a client to its next, balanced cohorts.

    Examples
    --------
    >>> rest(0.1), rest(0.4)
    (10, 2)
    """
    return math.floor(1 / q + _ROUNDING)


def planned_participations(cohorts: str, *, rounds: int, q: float, groups: int = 1) -> int:
    """Return for how many rounds of a client its budget has to suffice.

    Parameters
    ----------
    cohorts : {"fixed", "balanced", "poisson", "cyclic_poisson"}
        How cohorts are drawn.
    rounds : int
        Rounds of the training.
    q : float
        Fraction of the clients that is asked in a round.
    groups : int, default 1
        Number of groups that take turns, for ``cyclic_poisson``.

    Returns
    -------
    int
        With ``fixed`` and ``poisson`` as many as 99 % of the clients take part in at most. With
        ``balanced`` what is everybody's share of the rounds; with ``cyclic_poisson`` the rounds in
        which a client may be drawn. No client takes part in more of them.

    Examples
    --------
    >>> [planned_participations(c, rounds=100, q=0.1, groups=4) for c in COHORTS]
    [18, 10, 18, 25]
    """
    check_choice("cohorts", cohorts, COHORTS)
    if cohorts == BALANCED:
        return max(1, math.ceil(rounds * q - _ROUNDING))
    if cohorts == CYCLIC_POISSON:
        return math.ceil(rounds / groups)
    return participations(rounds, q)


def participations(rounds: int, q: float, *, quantile: float = 0.99) -> int:
    """Return the most rounds that a client takes part in, except with probability ``1 - quantile``.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> participations(200, 1.0), participations(200, 0.6)
    (200, 136)
    """
    check_integer("rounds", rounds, minimum=1)
    if not 0 < check_number("q", q) <= 1:
        raise InvalidParameterError("q", q, "a number above 0 and of at most 1")
    # Imported late: only servers ask, and a deployed client has a process for each message.
    from scipy.special import bdtr

    shares = bdtr(np.arange(rounds + 1), rounds, q)  # of the clients, by number of participations
    return max(1, int(np.searchsorted(shares, quantile)))
