"""Chooses which clients share masks: all pairs, or the edges of a sparse random graph.

The sparse graph is a circle in random order in which everybody knows the nearest ones on both
sides (Bell et al., CCS 2020, section 4). It fails with a probability that `insecurity` bounds.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.wire.identity import stream

from .settings import COMPLETE_UP_TO, SecureSum

__all__ = ["LARGEST_INSECURITY", "degree", "insecurity", "is_safe", "local_threshold", "rosters"]

LARGEST_INSECURITY = 2.0**-40
"""Probability per round that is allowed for a graph that does not protect somebody."""

_MOST_NEIGHBOURS = 254  # with itself a client deals to 255: as many as GF(2^8) has points


def rosters(
    cohort: Sequence[str],
    settings: SecureSum,
    *,
    seed: int | str,
    server_round: int,
    drawn: int | None = None,
) -> dict[str, list[str]]:
    """Return the roster of each client: the clients that it shares masks with, and itself, sorted.

    Parameters
    ----------
    cohort : sequence of str
        The clients of a round.
    settings : SecureSum
        Has the number of neighbours, threshold and colluders.
    seed : int or str
        Root seed of the experiment.
    server_round : int
        Round; every round has another graph.
    drawn : int, optional
        How many clients were drawn, if some of them cannot take part. A graph over them all with
        as many neighbours would be safe too, because that is what the clients can check.

    Raises
    ------
    InvalidParameterError
        If a sparse graph with so few neighbours is not safe enough, or none is.
    """
    members = sorted(cohort)
    size = len(members)
    sizes = {size, size if drawn is None else drawn}
    neighbours = settings.neighbours
    if neighbours is None:
        complete = size <= COMPLETE_UP_TO
        neighbours = size - 1 if complete else max(degree(s, settings) for s in sizes)
    elif neighbours < size - 1:
        for each in sizes:
            if insecurity(each, neighbours, settings) > LARGEST_INSECURITY:
                raise InvalidParameterError(
                    "secure_sum.neighbours",
                    neighbours,
                    f"at least {degree(each, settings)} in a cohort of {each}, or fewer colluders",
                )
    if neighbours >= size - 1:
        return dict.fromkeys(members, members)
    order = stream(seed, "secure-sum-graph", server_round).permutation(size)
    circle = [members[place] for place in order]
    reach = neighbours // 2
    return {
        client: sorted({circle[(place + step) % size] for step in range(-reach, reach + 1)})
        for place, client in enumerate(circle)
    }


def local_threshold(roster: int, threshold: int, cohort: int) -> int:
    """Return how many of a roster can open its owner's secret: its share of the threshold.

    Never half or less: then two disjoint groups could be made to open the two secrets of a client.
    """
    return max(roster // 2 + 1, math.ceil(roster * threshold / cohort))


def degree(cohort: int, settings: SecureSum) -> int:
    """Return the least number of neighbours with which `insecurity` is small enough.

    Raises
    ------
    InvalidParameterError
        If 254 are too few.

    Examples
    --------
    >>> degree(1000, SecureSum(colluders=100))
    76
    """
    for neighbours in range(2, min(cohort, _MOST_NEIGHBOURS + 1), 2):
        if insecurity(cohort, neighbours, settings) <= LARGEST_INSECURITY:
            return neighbours
    if cohort <= _MOST_NEIGHBOURS + 1:
        return cohort - 1
    raise InvalidParameterError(
        "secure_sum.colluders",
        settings.colluders_of(cohort),
        f"fewer, or a higher threshold: in a cohort of {cohort} no graph with up to "
        f"{_MOST_NEIGHBOURS} neighbours is safe with a probability of 1 - 2**-40",
    )


def is_safe(cohort: int, roster: int, threshold: int) -> bool:
    """Tell whether a roster is large enough to be one of a safe sparse graph.

    A server that claims a large cohort around a small roster is not believed. Which clients collude
    a client does not know: a fifth of the cohort, and up to ``cohort - threshold`` are missing.
    """
    if cohort <= roster:
        return True
    settings = SecureSum(threshold=threshold, colluders=cohort // 5)
    return insecurity(cohort, roster - 1, settings) <= LARGEST_INSECURITY


@lru_cache(maxsize=1024)  # every client of a simulation asks the same
def insecurity(cohort: int, neighbours: int, settings: SecureSum) -> float:
    """Bound the probability that a random graph fails to protect some client.

    For colluders, and clients that drop out, that do not depend on the random order:

    - somebody has a local threshold of colluders around: these know all its secrets. At most
      `cohort` times the tail of a hypergeometric law.
    - the graph of the clients that are neither colluders nor drop out falls apart, so that their
      sum opens in parts. A circle with arcs falls apart only at two gaps in each of which half the
      neighbours in a row are missing: at most the number of pairs of places times the probability
      that so many, all the neighbours of one client, are missing.

    Parameters
    ----------
    cohort, neighbours : int
        Clients, and with how many of them each one shares masks.
    settings : SecureSum
        Has threshold and colluders; up to ``cohort - threshold`` clients drop out.
    """
    # Imported late: it takes a second, and only large cohorts need it.
    from scipy.stats import hypergeom

    threshold, colluders = settings.threshold_of(cohort), settings.colluders_of(cohort)
    enough = local_threshold(neighbours + 1, threshold, cohort)
    surrounded = float(hypergeom.sf(enough - 1, cohort - 1, colluders, neighbours))
    missing = min(cohort, colluders + cohort - threshold)
    gaps = math.prod(max(0, missing - i) / (cohort - i) for i in range(neighbours))
    return cohort * surrounded + math.comb(cohort, 2) * gaps
