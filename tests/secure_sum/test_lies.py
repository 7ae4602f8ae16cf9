"""A server that tells every client another story, against the bound on what it can open."""

import itertools

import pytest
from lying_server import groups_of, stories

from flwr_privacy.secure_sum import SecureSum


def smallest_group(told: tuple[tuple[frozenset, frozenset], ...], threshold: int) -> int:
    """Return the size of the smallest group of clients whose sum the server can open."""
    return min(map(len, groups_of(told, threshold)), default=len(told))


@pytest.mark.parametrize(("clients", "threshold"), [(3, 2), (3, 3), (4, 3), (4, 4), (5, 4)])
def test_no_story_opens_less_than_the_bound(clients: int, threshold: int) -> None:
    settings = SecureSum(threshold=threshold, colluders=0)
    bound = settings.honest_in_sums(clients, lying=True)
    options = [stories(client, clients, threshold) for client in range(clients)]
    # Everybody is told something: who is asked nothing opens nothing.
    smallest = min(smallest_group(told, threshold) for told in itertools.product(*options))
    assert bound <= smallest
    if threshold == clients:  # nobody can be said to be missing
        assert bound == smallest == clients


def test_with_a_bare_majority_a_lying_server_singles_a_client_out() -> None:
    """Client 0 shares masks with half of the others, who are then said to be missing."""
    clients, threshold = 10, 6
    near = frozenset(range(threshold))  # the dealers that client 0 is told of
    told = []
    for client in range(clients):
        far = frozenset(range(clients)) - near
        survivors = far | {0, client}
        while len(survivors) < threshold:
            survivors |= {max(near - survivors)}
        told.append((near if client == 0 else survivors | near, survivors))
    assert SecureSum(threshold=6, colluders=0).honest_in_sums(clients, lying=True) == 1
    seeds = sum(0 in survivors for _, survivors in told)
    assert seeds >= threshold
    missing = [sum(v in d - s for d, s in told) for v in range(1, threshold)]
    assert sum(count >= threshold for count in missing) >= threshold - 2


def test_more_colluders_leave_fewer_honest_clients() -> None:
    bounds = [
        SecureSum(threshold=16, colluders=t).honest_in_sums(20, lying=True) for t in range(12)
    ]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] == 16 - 20 * 4 // 16
    assert SecureSum(threshold=16, colluders=12).honest_in_sums(20, lying=True) == 1
    thresholds = [
        SecureSum(threshold=t, colluders=0).honest_in_sums(20, lying=True) for t in (11, 13, 14, 16)
    ]
    assert thresholds == [1, 3, 6, 11]
