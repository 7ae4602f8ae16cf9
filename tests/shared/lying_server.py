"""What a server that lies may tell the clients of a secure sum, and what it can open then."""

import itertools


def stories(client: int, clients: int, threshold: int) -> list[tuple[frozenset, frozenset]]:
    """Return all dealers and survivors that a client accepts."""
    everybody = frozenset(range(clients))
    accepted = []
    for size in range(threshold, clients + 1):
        for dealers in map(frozenset, itertools.combinations(everybody, size)):
            for count in range(threshold, size + 1):
                for survivors in map(frozenset, itertools.combinations(sorted(dealers), count)):
                    if client in survivors:
                        accepted.append((dealers, survivors))
    return accepted


def groups_of(told: tuple[tuple[frozenset, frozenset], ...], threshold: int) -> list[set[int]]:
    """Return the groups of clients whose sums the server can open."""
    clients = range(len(told))
    seeds = {u for u in clients if sum(u in s for d, s in told) >= threshold}
    keys = {u for u in clients if sum(u in d - s for d, s in told) >= threshold}
    assert not seeds & keys
    opened, rest = [], set(seeds)
    while rest:
        group, new = set(), {rest.pop()}
        while new:
            group |= new
            # A mask that the server does not know ties two clients together, seen from either.
            ties = {
                v
                for u in new
                for v in clients
                if v != u and (v in told[u][0] or u in told[v][0]) and v not in keys
            }
            new = ties - group
        rest -= group
        if group <= seeds:  # otherwise the seed of somebody hides the sum
            opened.append(group)
    return opened


def laid_open(
    told: dict[int, tuple[frozenset, frozenset]], threshold: int, colluding: set[int]
) -> set[int]:
    """Return the honest clients both of whose secrets the server can open, and so their vectors.

    Parameters
    ----------
    told : dict
        Dealers and survivors that each honest client is told of. Colluders reveal both secrets.
    threshold : int
        Shares that open a secret.
    colluding : set of int
        The other clients.
    """
    most = threshold - len(colluding)
    return {
        u
        for u in told
        if sum(u in s for _, s in told.values()) >= most
        and sum(u in d - s for d, s in told.values()) >= most
    }
