r"""The file format of a ledger: a journal of lines, to which lines are only ever added.

After the first line, which names the format, a line is a checksum, a space and a record in JSON::

    flwr-privacy ledger 3
    1f0c6f6a {"data_set":"ward-7"}
    5d8a2c90 {"experiment":"e"}
    77f40b1e {"kind":["udp","user",{"noise_multiplier":2.0,...}]}
    c2d9a413 {"charge":[0,0,"train",1,0,0,"<digest>","2025-12-31T23:59:59Z","<head>"]}
    e3f7a9b2 {"answer":0}

A charge has its number, the number of its experiment, phase, round, request, the number of its
kind, the digest of the question, the time, and the head of the experiment's chain after it.
Experiments and kinds of charge are written before their first use and numbered in that order. A
``loss`` notes charges that the operator knows to be missing.

A ``mark`` ends a segment: it has the chain over all bytes before it, and the totals of the segment.
So a reader hashes old segments and reads only the marks and the last segment line by line. A
checksum is the CRC-32 of all records from the segment's start to this line: it finds accidents.
"""

import json
import re
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

__all__ = [
    "ANSWER",
    "CHARGE",
    "EXPERIMENT",
    "KIND",
    "LOSS",
    "MAGIC",
    "MARK",
    "PREFIX",
    "ChargeLine",
    "SegmentTotals",
    "answer_text",
    "body_of",
    "line_of",
    "question_key",
    "read_answer",
    "record_text",
]

MAGIC = b"flwr-privacy ledger 3\n"
CHARGE, ANSWER, LOSS, MARK = b'{"charge":[', b'{"answer":', b'{"loss":[', b'{"mark":['
EXPERIMENT, KIND = b'{"experiment":', b'{"kind":['
PREFIX = 9
"""Bytes of a line before its record: a checksum of 8 hexadecimal digits and a space."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_INTEGER = rb"(0|[1-9][0-9]{0,18})"
_TEXT = rb'("(?:[ !#-\[\]-~]|\\["\\])*")'
_UTC = rb"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"
_TIME, _TIME_OR_NONE = rb'"(' + _UTC + rb')"', rb'"((?:' + _UTC + rb')?)"'
_ANSWER = re.compile(rb'\{"answer":' + _INTEGER + rb"\}")
_HASH = rb'"([0-9a-f]{64})"'
_CHARGE = re.compile(
    rb'\{"charge":\['
    + rb",".join(
        [_INTEGER, _INTEGER, _TEXT, _INTEGER, _INTEGER, _INTEGER, rb'"((?:[0-9a-f]{32})?)"', _TIME]
    )
    + b","
    + _HASH
    + rb"\]\}"
)


def _list(*parts: bytes) -> bytes:
    """Return the pattern of a list of lists of these parts."""
    one = rb"\[" + rb",".join(parts).replace(b"(", b"(?:") + rb"\]"
    return rb"(\[(?:" + one + rb"(?:," + one + rb")*)?\])"


_MARK = re.compile(
    rb'\{"mark":\['
    + rb",".join([_INTEGER, _HASH, _INTEGER, _INTEGER, _TIME_OR_NONE, _TIME_OR_NONE])
    + rb","
    + rb",".join([_list(_INTEGER, _INTEGER, _INTEGER), _list(_INTEGER, _INTEGER, _HASH)])
    + rb"\]\}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargeLine:
    """The record of a charge; experiment and kind are the numbers of their definitions."""

    number: int
    experiment: int
    phase: str
    server_round: int
    request: int
    kind: int
    digest: str
    time: str
    head: str

    @classmethod
    @lru_cache(maxsize=2**14)  # the last lines of a ledger are read anew at every message
    def read(cls, body: bytes) -> "ChargeLine":
        """Read the record.

        Raises
        ------
        ValueError
            If it is none.
        """
        found = _CHARGE.fullmatch(body)
        if found is None:
            raise ValueError("no charge")
        number, experiment, phase, server_round, request, kind, digest, time, head = (
            text.decode() for text in found.groups()
        )
        return cls(
            number=int(number),
            experiment=int(experiment),
            phase=json.loads(phase) if "\\" in phase else phase[1:-1],
            server_round=int(server_round),
            request=int(request),
            kind=int(kind),
            digest=digest,
            time=time,
            head=head,
        )

    def text(self) -> bytes:
        """Return the record."""
        return b'{"charge":[%d,%d,%b,%d,%d,%d,"%b","%b","%b"]}' % (
            *(self.number, self.experiment, json.dumps(self.phase).encode(), self.server_round),
            *(self.request, self.kind, self.digest.encode(), self.time.encode()),
            self.head.encode(),
        )


@dataclass(kw_only=True)
class SegmentTotals:
    """What the lines between two marks come to.

    Parameters
    ----------
    charges, definitions : int
        Numbers of charges, and of definitions of experiments and kinds.
    counts : dict of (int, int) to int
        Number of charges by experiment and kind, in the order of the first one.
    heads : dict of int to (int, str)
        By experiment, the head of its chain after the segment: count, and value in hexadecimal.
    first, last : str
        The earliest and the latest time of a charge.
    """

    charges: int = 0
    definitions: int = 0
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    heads: dict[int, tuple[int, str]] = field(default_factory=dict)
    first: str = ""
    last: str = ""

    def add(self, line: ChargeLine, count: int) -> None:
        """Add a charge, after which its experiment has a number of charges."""
        key = (line.experiment, line.kind)
        self.charges += 1
        self.counts[key] = self.counts.get(key, 0) + 1
        self.heads[line.experiment] = (count, line.head)
        if line.time < self.first or not self.first:
            self.first = line.time
        if line.time > self.last:
            self.last = line.time

    def mark(self, previous: int, value: bytes) -> bytes:
        """Return the record of the mark that ends the segment.

        Parameters
        ----------
        previous : int
            Where the line of the mark before it begins; 0 for the first one.
        value : bytes
            The chain over everything before this mark.
        """
        counts = [[*key, count] for key, count in self.counts.items()]
        heads = [[number, *head] for number, head in self.heads.items()]
        own = [self.charges, self.definitions, self.first, self.last, counts, heads]
        return record_text("mark", [previous, value.hex(), *own])

    @classmethod
    def read_mark(cls, body: bytes) -> tuple[int, bytes, "SegmentTotals"]:
        """Read what `mark` wrote: where the mark before it is, the chain and the totals.

        Raises
        ------
        ValueError
            If it is anything else.
        """
        match = _MARK.fullmatch(body)
        if match is None:
            raise ValueError("no mark")
        previous, value, charges, definitions, first, last, counts, heads = match.groups()
        found = cls(
            charges=int(charges),
            definitions=int(definitions),
            first=first.decode(),
            last=last.decode(),
            counts={(number, kind): count for number, kind, count in json.loads(counts)},
            heads={number: (count, head) for number, count, head in json.loads(heads)},
        )
        return int(previous), bytes.fromhex(value.decode()), found


def question_key(experiment: int, phase: str, server_round: int, request: int) -> bytes:
    r"""Return what the charges of a question have in their lines, and no other line has.

    A text in a line has a backslash before each quotation mark, so no text contains a key.

    Examples
    --------
    >>> question_key(0, "train", 3, 0)
    b',0,"train",3,0,'
    """
    return b",%d,%b,%d,%d," % (experiment, json.dumps(phase).encode(), server_round, request)


def answer_text(number: int) -> bytes:
    """Return the record that a charge is answered."""
    return b'{"answer":%d}' % number


def read_answer(body: bytes) -> int:
    """Return which charge is answered.

    Raises
    ------
    ValueError
        If the record says anything else.
    """
    found = _ANSWER.fullmatch(body)
    if found is None:
        raise ValueError("no answer")
    return int(found[1])


def record_text(name: str, value: Any) -> bytes:
    """Return a record as it is written."""
    return _ENCODER.encode({name: value}).encode("ascii")


def line_of(body: bytes, checksum: int) -> tuple[bytes, int]:
    """Return the line of a record after a checksum, and the checksum after it."""
    checksum = zlib.crc32(body, checksum)
    return b"%08x %b\n" % (checksum, body), checksum


def body_of(line: bytes, checksum: int) -> tuple[bytes, int]:
    """Return the record of a line without its end, and the checksum after it.

    Raises
    ------
    ValueError
        If its checksum is another.
    """
    body = line[PREFIX:]
    checksum = zlib.crc32(body, checksum)
    if line[:PREFIX] != b"%08x " % checksum:
        raise ValueError("its checksum does not fit")
    return body, checksum
