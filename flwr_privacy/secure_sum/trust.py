"""Checks a server's claims about a secure sum; only what the client can verify is believed.

A client sees the roster with which it shares masks. Everything else that a server says of a sum may
be made up: the size of the cohort, the threshold, who does not collude with it.
"""

from dataclasses import dataclass

from flwr_privacy.errors import ProtocolError

from .graph import is_safe

__all__ = ["BelievedSum", "believed_sum", "withstood_colluders"]


@dataclass(frozen=True, kw_only=True)
class BelievedSum:
    """Least number of clients in any sum that a server can open with a client's vector in it.

    Parameters
    ----------
    clients : int
        Clients that are not made up, at least 1: the client itself.
    honest : int
        Those of them that do not collude with the server, if at most a fifth of them do; 0 where
        the client can count on nobody.
    certain : int
        The same from the client's own roster alone: what is left if the server makes up the rest of
        a sparse graph. In a complete graph there is no rest.
    """

    clients: int
    honest: int
    certain: int


def believed_sum(
    *,
    cohort: int,
    threshold: int,
    roster: int,
    local_threshold: int,
    pinned: int | None = None,
    max_cohort: int | None = None,
) -> BelievedSum:
    """Return the bounds that a client can believe about the sums of a server.

    Parameters
    ----------
    cohort, threshold : int
        Clients that were drawn, and least number of them in a sum: the server's word.
    roster : int
        With how many clients the client shares masks, itself included.
    local_threshold : int
        How many clients of the roster are at least in any sum: the client sees to that itself.
    pinned : int, optional
        How many clients the node knows by their keys, its own included; None where it must not
        care, as in a simulation.
    max_cohort : int, optional
        Largest cohort that the node's operator believes.

    Raises
    ------
    ProtocolError
        If the server contradicts itself: a threshold or a roster beyond the cohort, or a threshold
        of half the cohort or less.

    Notes
    -----
    The cohort that is believed is the least of `cohort`, `pinned` and `max_cohort`. A fifth of it
    counts as colluding, whatever the server says, and so does everybody beyond it.

    A threshold beyond `local_threshold` is believed only of a sparse graph: one in which the
    roster's share of it is `local_threshold`, and which protects everybody with a fifth of the
    cohort colluding and all that the threshold allows missing (`is_safe`). Otherwise the client
    counts on its roster alone.

    Examples
    --------
    >>> believed_sum(cohort=5, threshold=3, roster=5, local_threshold=3, pinned=5)
    BelievedSum(clients=3, honest=2, certain=2)

    A large cohort around a small roster:

    >>> believed_sum(cohort=1000, threshold=1000, roster=5, local_threshold=5, pinned=5)
    BelievedSum(clients=5, honest=4, certain=4)

    The sparse graph of an honest server:

    >>> believed_sum(cohort=1000, threshold=501, roster=119, local_threshold=60, pinned=1000)
    BelievedSum(clients=501, honest=301, certain=37)
    """
    if not max(threshold, roster) <= cohort < 2 * threshold:
        raise ProtocolError(
            f"a secure sum of at least {threshold} of {cohort} clients, {roster} of them in the "
            "roster: such a sum there is not"
        )
    limits = [limit for limit in (pinned, max_cohort) if limit is not None]
    known = min([cohort, *limits])
    strangers = max(0, roster - known)
    clients = min(threshold, local_threshold)
    certain = clients - strangers - min(known, roster) // 5
    if threshold > local_threshold and _fits(cohort, threshold, roster, local_threshold):
        clients, strangers = threshold, cohort - known
    honest = max(0, clients - strangers - known // 5)
    return BelievedSum(
        clients=max(1, clients - strangers), honest=honest, certain=max(0, min(honest, certain))
    )


def withstood_colluders(
    *,
    threshold: int,
    roster: int,
    local_threshold: int,
    needed: int = 0,
    pinned: int | None = None,
    max_cohort: int | None = None,
) -> int:
    """Return how many of those whom a sum needs may collude with a server that lies.

    It tells some clients that another one survived, and some that it is missing. Both secrets are
    opened only if ``2 * threshold - roster`` or more of the roster collude with it. The graph has
    to be complete, so that the roster is all there is.

    Parameters
    ----------
    threshold, roster, local_threshold, pinned, max_cohort
        As in `believed_sum`: a fifth of those whom the client knows counts as colluding beside
        those who are needed, and so does everybody whom it does not know.
    needed : int, default 0
        Clients without whom the sum is not opened. They do not count in that fifth.

    Returns
    -------
    int
        At least 0; also where it withstands nobody, or the graph is sparse.

    Examples
    --------
    A bare majority of 25 clients withstands none, two thirds do:

    >>> told = {"roster": 25, "needed": 5}
    >>> [withstood_colluders(threshold=t, local_threshold=t, **told) for t in (13, 15, 16, 17)]
    [0, 0, 2, 4]
    """
    if threshold != local_threshold:
        return 0
    limits = [limit for limit in (pinned, max_cohort) if limit is not None]
    known = min([roster, *limits])
    beside = roster - known + max(0, known - needed) // 5
    return max(0, 2 * threshold - roster - 1 - beside)


def _fits(cohort: int, threshold: int, roster: int, local_threshold: int) -> bool:
    """Tell whether a roster fits a sparse graph that protects everybody in a cohort."""
    share = roster * threshold <= cohort * local_threshold
    return share and is_safe(cohort, roster, threshold)
