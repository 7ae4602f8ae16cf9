"""Answers what a node asks of its ledger before and after a release, without all of its entries."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import datetime

from flwr_privacy.accounting import Charge

from .chain import Head, head_of
from .entries import Entry, Question

__all__ = ["LedgerView", "Totals", "merged"]

_MOST = 2**53  # releases in one charge


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What some of a ledger's entries come to.

    Parameters
    ----------
    count : int
        Number of entries.
    schemes, units : frozenset of str
        Their schemes and units.
    charges : tuple of Charge
        Their charges, in the order of the oldest of each kind; equal ones are merged.
    """

    count: int
    schemes: frozenset[str]
    units: frozenset[str]
    charges: tuple[Charge, ...]


class LedgerView:
    """The content of a ledger as it was read; the first charge has number 0."""

    def __init__(self, entries: Sequence[Entry], answered: AbstractSet[int]) -> None:
        self._entries = list(entries)
        self._answered = set(answered)

    @property
    def count(self) -> int:
        """Number of charges."""
        return len(self._entries)

    def charges_of(self, question: Question) -> tuple[int, ...]:
        """Return the numbers of the charges of a question, oldest first."""
        return tuple(n for n, entry in enumerate(self._entries) if entry.question == question)

    def entry(self, number: int) -> Entry:
        """Return a charge by its number."""
        return self._entries[number]

    def is_answered(self, number: int) -> bool:
        """Tell whether a charge has its answer."""
        return number in self._answered

    def totals(self, experiment_id: str | None = None) -> Totals:
        """Return what the charges of an experiment come to, or all charges."""
        mine = [
            entry
            for entry in self._entries
            if experiment_id in (None, entry.question.experiment_id)
        ]
        return Totals(
            count=len(mine),
            schemes=frozenset(entry.scheme for entry in mine),
            units=frozenset(entry.unit for entry in mine),
            charges=merged((entry.charge, 1) for entry in mine),
        )

    def charged_since(self, time: datetime) -> int:
        """Return the number of charges after a time."""
        return sum(datetime.fromisoformat(entry.time) > time for entry in self._entries)

    def head(self, experiment_id: str) -> Head:
        """Return the head of an experiment's chain of charges."""
        return head_of(
            experiment_id,
            (
                (e.question.phase, e.question.server_round, e.question.request, e.charge)
                for e in self._entries
                if e.question.experiment_id == experiment_id
            ),
        )


def merged(charges: Iterable[tuple[Charge, int]]) -> tuple[Charge, ...]:
    """Add up equal charges, each with the number of times that it was made, oldest first.

    Examples
    --------
    >>> one = Charge(neighbours="replace_one", noise_multiplier=1.0)
    >>> two = Charge(neighbours="replace_one", noise_multiplier=2.0, count=3)
    >>> [charge.count for charge in merged([(one, 2), (two, 1), (one, 1)])]
    [3, 3]
    """
    counts: dict[Charge, int] = {}
    for charge, times in charges:
        single = charge if charge.count == 1 else replace(charge, count=1)
        counts[single] = counts.get(single, 0) + times * charge.count
    found = []
    for single, count in counts.items():
        # A charge has at most so many releases; the sum of several may have more.
        parts = [_MOST] * (count // _MOST) + [count % _MOST]
        found += [replace(single, count=part) for part in parts if part]
    return tuple(found)
