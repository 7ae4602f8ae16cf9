"""Decides what follows if clients of a secure sum contradict each other.

A client is in conflict with another one if it refuses that one's key, if it says that it cannot
open the share that the other sealed for it, or if it reveals another share than the other
announced. Two clients that follow the protocol, with the same pins and their own memory, are never
in conflict, so one of the two lies or has lost its files. Nobody else can tell which: the receiver
could prove its word only with the key of the seal, and a server that had sent it the wrong bytes
would then open the right ones. Hence two rules, for a server that follows the protocol:

- **Two clients in conflict are in no further sum together** (`apart`), so a lie ends one sum at
  most. Who is in conflict with most others stays away, and of two equals one that is drawn anew in
  each round. So one liar keeps one other client away at a time, in every second round.
- **Who is in conflict, in one sum, with more others than may lie together is a liar** (`liars`)
  and is left out of the run. As many may lie as may be missing, or as collude: whoever could frame
  an honest client could end every sum by staying away. In a sparse graph it is those around a
  client that count, of whom fewer than can open its secrets lie (`Session.liars_around`).

Nodes that lie together can keep honest ones away for good: if two contradict a third client, that
one is in most conflicts. To choose otherwise would let one liar keep many away.

Privacy does not depend on either. A client that cannot open a share has sent no vector and is
missing in the sum, like one that is lost. Clients do not know of conflicts: whatever a server makes
up, it only chooses its cohort, and each client still reveals one secret of each dealer at most.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

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
    needed: Collection[str] = (),
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
    needed : collection of str
        Clients without whom there is no sum: whoever contradicts one of them stays away.

    Examples
    --------
    >>> lie = Conflict({"a", "b"})
    >>> sorted({"".join(apart("abc", [lie], seed=1, server_round=r)) for r in range(9)})
    ['ac', 'bc']
    """
    members = sorted(clients)
    there = set(members)
    found = [pair for pair in conflicts if pair <= there]
    out = {client for pair in found if pair & set(needed) for client in pair - set(needed)}
    there -= out
    present = [pair for pair in found if pair <= there]
    order = stream(seed, "secure-sum-conflicts", server_round).permutation(len(members))
    away = _most_conflicting(present, lambda client: 0, [members[place] for place in order])
    return [client for client in members if client not in out and client not in away]


def liars(conflicts: Collection[Conflict], most: Callable[[str], int]) -> list[str]:
    """Return the clients that are in conflict with more others than may lie together.

    Whoever is furthest above its limit is taken first, and its conflicts no longer count against
    the others: a liar that contradicts everybody frames nobody.

    Parameters
    ----------
    conflicts : collection of Conflict
        Conflicts between the clients of a sum.
    most : callable
        From a client to the number of those around it that may lie together
        (`Session.liars_around`). If no more do, honest clients are never returned.

    Examples
    --------
    >>> liars([Conflict({"a", other}) for other in "bcd"], lambda client: 2)
    ['a']
    """
    return sorted(_most_conflicting(conflicts, most, sorted(set[str]().union(*conflicts))))


def _most_conflicting(
    conflicts: Iterable[Conflict], most: Callable[[str], int], order: Sequence[str]
) -> list[str]:
    """Take out who is furthest above its limit, of equals the first, until nobody is above."""
    others: dict[str, set[str]] = {client: set() for client in order}
    for one, other in map(sorted, conflicts):
        others[one].add(other)
        others[other].add(one)
    above = {client: len(peers) - most(client) for client, peers in others.items()}
    found = list[str]()
    while above:
        client = max(above, key=above.__getitem__)
        if above.pop(client) <= 0:
            break
        found.append(client)
        for peer in others[client].intersection(above):
            above[peer] -= 1
    return found
