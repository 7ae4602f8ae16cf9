"""Decides what follows if clients contradict each other about a share that one dealt to the other.

A client is in conflict with a dealer if it says that it cannot open the share that the dealer
sealed for it, or if it reveals another share than the dealer announced. Two clients that follow the
protocol are never in conflict, so one of the two lies. Nobody else can tell which: the receiver
could prove its word only with the key of the seal, and a server that had sent it the wrong bytes
would then open the right ones. Hence two rules, for a server that follows the protocol:

- **Two clients in conflict are in no further sum together** (`apart`), so a lie ends one sum at
  most. Who is in conflict with most others stays away, and of two equals one that is drawn anew in
  each round. So one liar keeps one other client away at a time, in every second round.
- **Who is in conflict, in one sum, with more others than may lie together is a liar** (`liars`)
  and is left out of the run. `SecureSum.liars_of` says how many may lie: at least as many as may be
  missing, so whoever could frame an honest client could end every sum by staying away.

Privacy does not depend on either. A client that cannot open a share has sent no vector and is
missing in the sum, like one that is lost. Clients do not know of conflicts: whatever a server makes
up, it only chooses its cohort, and each client still reveals one secret of each dealer at most.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from flwr_privacy.wire.identity import stream

__all__ = ["Conflict", "apart", "liars"]

Conflict = frozenset[str]
"""Two clients, of whom at least one lies."""


def apart(
    clients: Collection[str],
    conflicts: Iterable[Conflict],
    *,
    seed: int | str,
    server_round: int,
) -> list[str]:
    """Return clients of whom no two are in conflict.

    Parameters
    ----------
    clients : collection of str
        Who was drawn.
    conflicts : iterable of Conflict
        All conflicts so far.
    seed : int or str
        Root seed of the experiment.
    server_round : int
        Round.

    Examples
    --------
    >>> lie = Conflict({"a", "b"})
    >>> sorted({"".join(apart("abc", [lie], seed=1, server_round=r)) for r in range(9)})
    ['ac', 'bc']
    """
    members = sorted(clients)
    present = [pair for pair in conflicts if pair <= set(members)]
    order = stream(seed, "secure-sum-conflicts", server_round).permutation(len(members))
    away = _most_conflicting(present, 0, [members[place] for place in order])
    return [client for client in members if client not in away]


def liars(conflicts: Collection[Conflict], most: int) -> list[str]:
    """Return the clients that are in conflict with more than `most` others.

    Whoever has most conflicts is taken first, and its conflicts no longer count against the others:
    a liar that contradicts everybody frames nobody.

    Parameters
    ----------
    conflicts : collection of Conflict
        Conflicts between the clients of a sum.
    most : int
        Number of clients that may lie together. If no more do, honest clients are never returned.

    Examples
    --------
    >>> liars([Conflict({"a", other}) for other in "bcd"], 2)
    ['a']
    """
    return sorted(_most_conflicting(conflicts, most, sorted(set[str]().union(*conflicts))))


def _most_conflicting(conflicts: Iterable[Conflict], most: int, order: Sequence[str]) -> list[str]:
    """Take out who has most conflicts, of equals the first, until nobody has more than `most`."""
    left, found = set(conflicts), list[str]()
    while left:
        counts = Counter(client for pair in left for client in pair)
        client = max(order, key=counts.__getitem__)
        if counts[client] <= most:
            break
        found.append(client)
        left = {pair for pair in left if client not in pair}
    return found
