"""Answers what a node asks of its ledger, without reading all of its charges."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import LedgerError

from .chain import Head
from .entries import Entry, Question
from .journal import Journal, Kind, Segment, read_kind
from .lines import (
    ANSWER,
    CHARGE,
    LOSS,
    PREFIX,
    ChargeLine,
    answer_text,
    question_key,
    read_answer,
)
from .loss import Loss

__all__ = ["LedgerView", "Totals", "merged"]

_MOST = 2**53  # releases in one charge


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What some of a ledger's charges come to.

    Parameters
    ----------
    count : int
        Number of charges.
    schemes, units : frozenset of str
        Their schemes and units.
    charges : tuple of Charge
        What they cost, in the order of the oldest of each kind; equal ones are merged.
    """

    count: int
    schemes: frozenset[str]
    units: frozenset[str]
    charges: tuple[Charge, ...]


class LedgerView:
    """The content of a ledger as it was read; the first charge has number 0.

    Every method raises `LedgerError` where a line is malformed although its checksum fits.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    @property
    def count(self) -> int:
        """Number of charges."""
        return self._journal.count

    @property
    def content(self) -> bytes:
        """The lines of the file."""
        return bytes(self._journal.content)

    def head(self, experiment_id: str) -> Head:
        """Return the head of an experiment's chain of charges."""
        return self._journal.head(experiment_id)

    def charges_of(self, question: Question) -> tuple[int, ...]:
        """Return the numbers of the charges of a question, oldest first."""
        experiment = self._journal.number_of(question.experiment_id)
        if experiment is None:
            return ()
        key = question_key(experiment, question.phase, question.server_round, question.request)
        content, found, place = self._journal.content, [], 0
        while (place := content.find(key, place)) >= 0:
            found.append(self._charge_at(content.rfind(b"\n", 0, place) + 1).number)
            place += len(key)
        return tuple(found)

    def entry(self, number: int) -> Entry:
        """Return a charge by its number."""
        begin = b"%b%d," % (CHARGE, number)
        segment = self._segment(number)
        place = self._journal.content.find(begin, segment.start, segment.end)
        if place < 0:
            raise self._journal.error(f"is damaged: it has no charge {number}")
        return self._entry(self._charge_at(place - PREFIX))

    def is_answered(self, number: int) -> bool:
        """Tell whether a charge has its answer."""
        answer = answer_text(number)
        return self._journal.content.find(answer, self._segment(number).start) >= 0

    def totals(self, experiment_id: str | None = None) -> Totals:
        """Return what the charges of an experiment come to, or all charges."""
        wanted = None if experiment_id is None else self._journal.number_of(experiment_id)
        if wanted is None and experiment_id is not None:
            return Totals(count=0, schemes=frozenset(), units=frozenset(), charges=())
        counts: dict[int, int] = {}
        for segment in self._segments():
            for (experiment, kind), count in segment.totals.counts.items():
                if wanted in (None, experiment):
                    counts[kind] = counts.get(kind, 0) + count
        mine = [(self._kind(kind), count) for kind, count in counts.items()]
        return Totals(
            count=sum(counts.values()),
            schemes=frozenset(kind.scheme for kind, _ in mine),
            units=frozenset(kind.unit for kind, _ in mine),
            charges=merged((kind.charge, count) for kind, count in mine),
        )

    def charged_since(self, time: datetime) -> int:
        """Return the number of charges after a time."""
        begin = time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        found = 0
        for segment in self._segments():
            if segment.totals.first > begin:
                found += segment.totals.charges
            elif segment.totals.last > begin:
                found += sum(
                    self._read(body).time > begin for body in self._bodies(segment, CHARGE)
                )
        return found

    def experiments(self) -> tuple[str, ...]:
        """Return the experiments that were charged, in the order of their first charges."""
        return tuple(self._journal.experiments)

    def entries(self) -> tuple[Entry, ...]:
        """Return every charge: for people and tests, since it takes long."""
        return tuple(record for record in self.records(CHARGE) if isinstance(record, Entry))

    def answered(self) -> frozenset[int]:
        """Return the numbers of the charges that have an answer."""
        return frozenset(record for record in self.records(ANSWER) if isinstance(record, int))

    def unanswered(self) -> tuple[Entry, ...]:
        """Return the charges without an answer."""
        answered = self.answered()
        return tuple(entry for n, entry in enumerate(self.entries()) if n not in answered)

    def losses(self) -> tuple[Loss, ...]:
        """Return the losses that the operator has accepted, oldest first."""
        return tuple(record for record in self.records(LOSS) if isinstance(record, Loss))

    def records(self, *names: bytes) -> Iterator[Entry | int | Loss]:
        """Yield all charges, numbers of charges that were answered, and losses, in order.

        Parameters
        ----------
        *names : bytes
            How the records begin that are wanted; by default all.
        """
        wanted = names or (CHARGE, ANSWER, LOSS)
        for line in self._journal.content.split(b"\n"):
            body = bytes(line[PREFIX:])
            if not body.startswith(wanted):
                continue
            if body.startswith(CHARGE):
                yield self._entry(self._read(body))
                continue
            try:
                yield read_answer(body) if body.startswith(ANSWER) else Loss.read(body)
            except ValueError as error:
                raise self._malformed() from error

    def _segments(self) -> Iterator[Segment]:
        yield from self._journal.segments
        yield self._journal.open

    def _segment(self, number: int) -> Segment:
        """Return the segment with a charge."""
        if number not in range(self.count):
            raise ValueError(f"there is no charge {number}")
        return next(s for s in self._segments() if number < s.number + s.totals.charges)

    def _bodies(self, segment: Segment, name: bytes) -> Iterator[bytes]:
        """Yield the records of a segment that begin so, in order."""
        for line in self._journal.content[segment.start : segment.end].split(b"\n"):
            if line.startswith(name, PREFIX):
                yield bytes(line[PREFIX:])

    def _charge_at(self, place: int) -> ChargeLine:
        content = self._journal.content
        return self._read(bytes(content[place + PREFIX : content.find(b"\n", place)]))

    def _read(self, body: bytes) -> ChargeLine:
        try:
            return ChargeLine.read(body)
        except ValueError as error:
            raise self._malformed() from error

    def _entry(self, line: ChargeLine) -> Entry:
        kind = self._kind(line.kind)
        try:
            return Entry(
                question=Question(
                    experiment_id=self._journal.experiments[line.experiment],
                    phase=line.phase,
                    server_round=line.server_round,
                    request=line.request,
                ),
                scheme=kind.scheme,
                unit=kind.unit,
                charge=kind.charge,
                digest=line.digest,
                time=line.time,
            )
        except (ValueError, IndexError) as error:
            raise self._malformed() from error

    def _kind(self, number: int) -> Kind:
        try:
            return read_kind(self._journal.kinds[number])
        except (ValueError, IndexError) as error:
            raise self._malformed() from error

    def _malformed(self) -> LedgerError:
        # Without the error's text: it has the values, and they stay here.
        return self._journal.error("is damaged: a line whose checksum fits is malformed")


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
        found += [single if part == 1 else replace(single, count=part) for part in parts if part]
    return tuple(found)
