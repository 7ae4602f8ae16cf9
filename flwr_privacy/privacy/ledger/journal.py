"""The content of a ledger's file: verified when it is read, and composed where it grows.

A journal says which lines a charge or an answer adds; whoever keeps the file writes them and then
extends the journal by them. So what is written is read by the same code as an old file.
"""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import LedgerError, check_choice
from flwr_privacy.privacy.policy import UNITS

from .chain import Head, begun, extended
from .entries import Entry, check_name
from .lines import (
    ANSWER,
    CHARGE,
    EXPERIMENT,
    KIND,
    MAGIC,
    MARK,
    PREFIX,
    ChargeLine,
    SegmentTotals,
    answer_text,
    body_of,
    line_of,
    read_answer,
    record_text,
)
from .loss import Loss

__all__ = ["Journal", "Kind", "Segment", "read_kind"]

SEGMENT = 128
"""Records between two marks."""

_FORMAT = re.compile(rb"flwr-privacy ledger(?: ([0-9]{1,9}))?\n")
_BEFORE_OTHERS = (EXPERIMENT, KIND, MARK)  # no write ends with one of these


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The lines from a mark, or the file's beginning, to the next mark.

    Parameters
    ----------
    start, end : int
        Where they are in the file.
    number : int
        Number of charges before it.
    totals : SegmentTotals
        What they come to.
    value : bytes, default b""
        The hash over everything up to its end, once a mark ends it.
    """

    start: int
    end: int
    number: int
    totals: SegmentTotals
    value: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of charge: its scheme, its unit of protection and what it costs."""

    scheme: str
    unit: str
    charge: Charge


@lru_cache(maxsize=2**12)  # most charges of all the ledgers of a process are of few kinds
def read_kind(body: bytes) -> Kind:
    """Read the record of a kind of charge.

    Raises
    ------
    ValueError
        If it is none.
    """
    try:
        scheme, unit, charge = json.loads(body)["kind"]
        check_name("scheme", scheme)
        check_choice("unit", unit, UNITS)
        return Kind(scheme=scheme, unit=unit, charge=Charge.from_dict(charge))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError("no kind of charge") from error


class Journal:
    """The content of a ledger's file.

    Parameters
    ----------
    path : Path
        The file, which errors name.
    data_set : str
        Name of the data set.
    content : bytearray, optional
        The file, which becomes the journal's own; by default a new one. A write that never returned
        is left out: a line without its end, and what is for a line that is not there.

    Attributes
    ----------
    content : bytearray
        The lines.
    torn : int
        Bytes of the file that were left out.
    segments : list of Segment
        Those that a mark ends.
    experiments : list of str
        The experiments, by their numbers.
    kinds : list of bytes
        The records of the kinds of charge, by their numbers.

    Raises
    ------
    LedgerError
        If the content is no ledger, another's, or damaged.
    """

    def __init__(self, path: Path, data_set: str, content: bytearray | None = None) -> None:
        self._path = path
        self._data_set = data_set
        self._begun, self._first_checksum = _begun(data_set)
        self.content = bytearray()
        self.segments = list[Segment]()
        self.experiments, self.kinds = list[str](), list[bytes]()
        self._numbers = dict[str | bytes, int]()  # of both
        self._totals = SegmentTotals()
        self._records = self._checksum = 0
        self._open(0, self._first_checksum)
        content = bytearray() if content is None else content
        self._check_begun(content)
        end = _whole(content, len(self._begun))
        self.torn = len(content) - end
        if end:
            del content[end:]
            self._read(content)

    @property
    def count(self) -> int:
        """Number of charges."""
        return self._before + self._totals.charges

    @property
    def open(self) -> Segment:
        """The segment that no mark ends yet."""
        return Segment(
            start=self._start,
            end=len(self.content),
            number=self._before,
            totals=self._totals,
        )

    def charged(self, entry: Entry) -> bytes:
        """Return the lines that a charge adds."""
        question, records = entry.question, list[bytes]()
        experiment = self._numbers.get(question.experiment_id)
        if experiment is None:
            experiment = len(self.experiments)
            records.append(record_text("experiment", question.experiment_id))
        body = record_text("kind", [entry.scheme, entry.unit, entry.charge.to_dict()])
        kind = self._numbers.get(body)
        if kind is None:
            kind = len(self.kinds)
            records.append(body)
        head = extended(
            self.head(question.experiment_id),
            entry.charge,
            phase=question.phase,
            server_round=question.server_round,
            request=question.request,
        )
        line = ChargeLine(
            number=self.count,
            experiment=experiment,
            phase=question.phase,
            server_round=question.server_round,
            request=question.request,
            kind=kind,
            digest=entry.digest,
            time=entry.time,
            head=head.value.hex(),
        )
        return self._lines(*records, line.text())

    def answered(self, number: int) -> bytes:
        """Return the lines that an answer adds."""
        return self._lines(answer_text(number))

    def lost(self, loss: Loss) -> bytes:
        """Return the lines that an accepted loss adds."""
        return self._lines(loss.text())

    def number_of(self, experiment_id: str) -> int | None:
        """Return the number of an experiment; None if it has no charge."""
        return self._numbers.get(experiment_id)

    def head(self, experiment_id: str) -> Head:
        """Return the head of an experiment's chain."""
        number = self._numbers.get(experiment_id)
        head = None if number is None else self._head(number)
        if head is None:
            return begun(experiment_id)
        return Head(count=head[0], value=bytes.fromhex(head[1]))

    def chain(self, length: int | None = None) -> bytes:
        """Return the hash over the content, or over so many bytes of its beginning."""
        length = len(self.content) if length is None else length
        # From the last mark whose line is within that length: it has the hash of what is before.
        for segment in reversed(self.segments):
            if self.content.find(b"\n", segment.end) < length:
                return _linked(segment.value, self.content, segment.end, length)
        return _linked(b"", self.content, 0, length)

    def extend(self, lines: bytes | bytearray) -> None:
        """Add lines that were written.

        Raises
        ------
        LedgerError
            If a line does not follow from those before it.
        """
        if not self.content:
            self.content += self._begun
            lines = lines[len(self._begun) :]
        for line in bytes(lines).split(b"\n")[:-1]:
            try:
                self._add(line)
            # Without the error's text: it may have values, and they stay here.
            except (ValueError, RecursionError) as error:
                raise self.error(
                    f"is damaged: the line at byte {len(self.content)} is malformed"
                ) from error
            self.content += line + b"\n"

    def error(self, text: str) -> LedgerError:
        """Return an error about the file."""
        return LedgerError(f"the privacy ledger {self._path} {text}")

    def _lines(self, *records: bytes) -> bytes:
        """Return the lines of records, after what must come before them."""
        lines, checksum = list[bytes](), self._checksum
        if not self.content:
            lines.append(self._begun)
        elif self._records >= SEGMENT:
            line, checksum = line_of(self._mark(), 0)
            lines.append(line)
        for record in records:
            line, checksum = line_of(record, checksum)
            lines.append(line)
        return b"".join(lines)

    def _mark(self) -> bytes:
        return self._totals.mark(self._start, self.chain())

    def _add(self, line: bytes) -> None:
        """Take up a line behind the content."""
        if line.startswith(MARK, PREFIX):
            body, checksum = body_of(line, 0)
            if body != self._mark():
                raise ValueError("another mark is due")
            self.segments.append(replace(self.open, value=self.chain()))
            self._open(len(self.content), checksum)
            return
        body, checksum = body_of(line, self._checksum)
        if body.startswith(CHARGE):
            self._add_charge(ChargeLine.read(body))
        elif body.startswith(ANSWER):
            self._add_answer(body)
        elif body.startswith((EXPERIMENT, KIND)):
            self._define(body)
            self._totals.definitions += 1
        else:
            Loss.read(body)
        self._records += 1
        self._checksum = checksum

    def _add_charge(self, line: ChargeLine) -> None:
        known = line.experiment < len(self.experiments) and line.kind < len(self.kinds)
        if line.number != self.count or not known:
            raise ValueError("another number is due")
        head = self._head(line.experiment)
        self._totals.add(line, 1 if head is None else head[0] + 1)

    def _add_answer(self, body: bytes) -> None:
        number = read_answer(body)
        if number >= self.count or number in self._answered:
            raise ValueError("no charge before it, or answered before")
        self._answered.add(number)

    def _define(self, body: bytes) -> None:
        """Give an experiment or a kind of charge its number."""
        if body.startswith(KIND):
            self._add_number(body, self.kinds)
        else:
            experiment: str = json.loads(body)["experiment"]
            check_name("experiment", experiment)
            self._add_number(experiment, self.experiments)

    def _add_number(self, name: Any, names: list[Any]) -> None:
        if name in self._numbers:
            raise ValueError("defined before")
        self._numbers[name] = len(names)
        names.append(name)

    def _head(self, experiment: int) -> tuple[int, str] | None:
        if (head := self._totals.heads.get(experiment)) is not None:
            return head
        for segment in reversed(self.segments):
            if (head := segment.totals.heads.get(experiment)) is not None:
                return head
        return None

    def _open(self, start: int, checksum: int) -> None:
        """Begin a segment."""
        last = self.segments[-1] if self.segments else None
        self._before = 0 if last is None else last.number + last.totals.charges
        self._start = start
        self._checksum = checksum
        self._records = 0
        self._totals = SegmentTotals()
        self._answered = set[int]()

    def _read(self, content: bytearray) -> None:
        """Take up a file: hash the segments that a mark ends, and read the last one."""
        marks = list[tuple[int, int, bytes, SegmentTotals]]()
        start = place = max(0, content.rfind(MARK) - PREFIX)
        while place:
            try:
                body = body_of(_line_at(content, place), 0)[0]
                previous, value, totals = SegmentTotals.read_mark(body)
            except ValueError as error:
                raise self.error(f"is damaged: the mark at {place} is malformed") from error
            if previous >= place:
                raise self.error(f"is damaged: the mark at {place} is malformed")
            marks.append((previous, place, value, totals))
            place = previous
        chain, number = b"", 0
        for begin, end, value, totals in reversed(marks):
            chain = _linked(chain, content, begin, end)
            if chain != value:
                raise self.error(
                    f"is damaged: the bytes from {begin} to {end} are not what its mark says"
                )
            self._read_definitions(content, begin, end, totals)
            self.segments.append(
                Segment(start=begin, end=end, number=number, totals=totals, value=value)
            )
            number += totals.charges
        rest = content[start:]
        if start:
            line = _line_at(content, start)
            del content[start + len(line) + 1 :]
            self.content = content
            self._open(start, body_of(line, 0)[1])
            rest = rest[len(line) + 1 :]
        self.extend(rest)

    def _read_definitions(
        self, content: bytearray, begin: int, end: int, totals: SegmentTotals
    ) -> None:
        found = 0
        for name in (EXPERIMENT, KIND) if totals.definitions else ():
            place = content.find(name, begin, end)
            while place >= 0:
                body = _line_at(content, place)
                try:
                    self._define(body)
                except (ValueError, RecursionError) as error:
                    text = f"is damaged: the line at byte {place - PREFIX} is malformed"
                    raise self.error(text) from error
                found += 1
                place = content.find(name, place + len(body), end)
        if found != totals.definitions:
            raise self.error(f"is damaged: the mark at {end} counts other definitions")

    def _check_begun(self, content: bytearray) -> None:
        """Refuse a file that begins otherwise; a beginning that was not written whole is none."""
        if content.startswith(self._begun) or self._begun.startswith(content):
            return
        format_line = _FORMAT.match(content)
        if format_line is None:
            raise self.error(f"does not begin with {MAGIC.decode().rstrip()!r}")
        version = int(format_line[1] or 2)
        if version == 2:
            raise self.error(
                "has version 2, which this library does not write: "
                "`flwr-privacy ledger convert --state FOLDER` makes version 3 of it"
            )
        if version != 3:
            raise self.error(f"has version {version}: this library reads version 3")
        try:
            found = json.loads(body_of(_line_at(content, len(MAGIC)), 0)[0])
            check_name("data_set", found["data_set"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self.error("is damaged: its second line is malformed") from error
        other = found["data_set"]
        raise self.error(f"is about the data set {other!r}, not {self._data_set!r}")


@lru_cache
def _begun(data_set: str) -> tuple[bytes, int]:
    """Return the lines with which a file begins, and the checksum after them."""
    first, checksum = line_of(record_text("data_set", data_set), 0)
    return MAGIC + first, checksum


def _whole(content: bytearray, begun: int) -> int:
    """Return the length of a file without a write at its end that never returned."""
    end = content.rfind(b"\n") + 1
    while end > begun:
        start = content.rfind(b"\n", 0, end - 1) + 1
        if not content.startswith(_BEFORE_OTHERS, start + PREFIX):
            return end
        end = start
    return 0


def _line_at(content: bytearray, place: int) -> bytes:
    """Return a line, or the rest of it, without its end."""
    end = content.find(b"\n", place)
    return bytes(content[place : None if end < 0 else end])


def _linked(value: bytes, content: bytearray, start: int, end: int) -> bytes:
    """Return the hash over a part of the content, and over what comes before it."""
    found = hashlib.sha256(value)
    with memoryview(content)[start:end] as part:
        found.update(part)
    return found.digest()
