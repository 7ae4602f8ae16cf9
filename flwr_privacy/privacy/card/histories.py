"""What each client was charged, kept up as releases come: once for all clients that share it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from flwr_privacy.accounting import Charge

if TYPE_CHECKING:
    from .card import CardRelease

__all__ = ["Histories"]

Counts = dict[Charge, int]
"""How often a client was charged for each kind of release."""


class Histories:
    """The histories of charges of all clients.

    A history is a number: that of another one, with one charge more. So a round costs a look into
    two tables for each client that was charged in it, and nothing for the rounds before.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._followed: list[CardRelease] = []
        self._longer: dict[tuple[int, Charge], int] = {}  # the number of a history after a charge
        self._steps: list[tuple[int, Charge]] = []  # the same by that number, less one
        self._of: dict[str, int] = {}
        self._shared = Counter[int]()  # clients by history

    @property
    def clients(self) -> int:
        """Number of clients that were charged."""
        return len(self._of)

    def follow(self, releases: "Sequence[CardRelease]") -> None:
        """Take up releases: those that are new, or all if an earlier one has changed."""
        before = self._followed
        if len(releases) < len(before) or not all(map(_alike, before, releases)):
            self._begin()
        for release in releases[len(self._followed) :]:
            self._add(release)

    def _add(self, release: "CardRelease") -> None:
        """Charge the clients of a release."""
        self._followed.append(release)
        after: dict[int, int] = {}
        for client in release.clients:
            before = self._of.get(client, 0)
            if before not in after:
                after[before] = self._next(before, release.charge)
            self._of[client] = after[before]
            self._shared[after[before]] += 1
            if before:
                self._shared[before] -= 1
        for before in after.keys() - {0}:
            if not self._shared[before]:
                del self._shared[before]

    def lengths(self) -> Counter[int]:
        """Return how many clients have so many charges."""
        lengths = Counter[int]()
        for history, clients in self._shared.items():
            lengths[sum(1 for _ in self._back(history))] += clients
        return lengths

    def longest(self) -> list[Counts]:
        """Return the counts of the distinct histories.

        Those are left out that another one includes which has the same kinds of charge.
        """
        alike: dict[frozenset[Charge], list[Counts]] = {}
        for history in self._shared:
            counts: Counts = Counter(self._back(history))
            alike.setdefault(frozenset(counts), []).append(counts)
        return [counts for found in alike.values() for counts in _not_included(found)]

    def _next(self, before: int, charge: Charge) -> int:
        number = self._longer.get((before, charge))
        if number is None:
            self._steps.append((before, charge))
            number = self._longer[before, charge] = len(self._steps)
        return number

    def _back(self, history: int) -> Iterator[Charge]:
        while history:
            history, charge = self._steps[history - 1]
            yield charge


def _alike(one: "CardRelease", other: "CardRelease") -> bool:
    """Tell whether two releases charge the same; who has answered makes no difference."""
    return one.clients is other.clients and one.charge is other.charge


def _not_included(found: list[Counts]) -> list[Counts]:
    """Leave out counts of the same kinds of charge that are nowhere above others."""
    left: list[Counts] = []
    for counts in sorted(found, key=lambda counts: -sum(counts.values())):
        if not any(all(other[kind] >= n for kind, n in counts.items()) for other in left):
            left.append(counts)
    return left
