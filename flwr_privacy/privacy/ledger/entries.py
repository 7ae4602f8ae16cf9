"""What a ledger has of a release: the question that was answered, and what the answer cost."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.privacy.policy import UNITS

__all__ = ["Entry", "Question", "check_name", "check_time", "now_text"]

_LARGEST_NUMBER = 2**63 - 1  # of an integer in Flower's ConfigRecord
_LONGEST_NAME = 128
_DIGEST = re.compile(r"([0-9a-f]{32})?")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


@dataclass(frozen=True, kw_only=True)
class Question:
    """The key of a server's request; a resumed round that asks again uses the same key.

    Parameters
    ----------
    experiment_id, phase : str
        Identity of the experiment and phase within the round: 1 to 128 printable ASCII characters.
    server_round, request : int
        Round, and number of the question within its round and phase: 0 to 2**63 - 1.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed; it may come from an adversary.
    """

    experiment_id: str
    phase: str
    server_round: int
    request: int = 0

    def __post_init__(self) -> None:
        check_name("experiment_id", self.experiment_id)
        check_name("phase", self.phase)
        check_integer("server_round", self.server_round, minimum=0, maximum=_LARGEST_NUMBER)
        check_integer("request", self.request, minimum=0, maximum=_LARGEST_NUMBER)


def now_text() -> str:
    """Return the time as entries have it: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One release: the answer to one question under one scheme.

    Parameters
    ----------
    question : Question
        What was answered.
    scheme : str
        Name of the scheme: 1 to 128 printable ASCII characters.
    unit : {"record", "user"}
        What the charge is for: a record of the data set, or all of it.
    charge : Charge
        What the release costs.
    digest : str, default ""
        Hash of the whole question (32 hexadecimal digits): the charge is for its answer alone.
    time : str
        When, in UTC and to the second, as ``2025-12-31T23:59:59Z``; by default now.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    question: Question
    scheme: str
    unit: str
    charge: Charge
    digest: str = ""
    time: str = field(default_factory=now_text)

    def __post_init__(self) -> None:
        check_name("scheme", self.scheme)
        check_choice("unit", self.unit, UNITS)
        if not isinstance(self.digest, str) or not _DIGEST.fullmatch(self.digest):
            raise InvalidParameterError("digest", self.digest, "32 hexadecimal digits, or none")
        check_time(self.time)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as plain values, for a file."""
        values = {**vars(self.question), **vars(self), "charge": self.charge.to_dict()}
        del values["question"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Entry":
        """Read an entry from plain values; all of them must be present.

        Raises
        ------
        InvalidParameterError
            If a value is missing, unknown or not allowed.
        """
        if set(values) != _ENTRY_KEYS:
            raise InvalidParameterError("entry", sorted(values), f"the keys {sorted(_ENTRY_KEYS)}")
        if not isinstance(values["charge"], Mapping):
            raise InvalidParameterError("charge", values["charge"], "a mapping")
        own = dict(values)
        question = Question(**{name: own.pop(name) for name in _QUESTION_KEYS})
        return cls(question=question, charge=Charge.from_dict(own.pop("charge")), **own)


_QUESTION_KEYS = {entry.name for entry in fields(Question)}
_ENTRY_KEYS = (_QUESTION_KEYS | {entry.name for entry in fields(Entry)}) - {"question"}


def check_name(parameter: str, value: Any) -> str:
    """Return a name that a ledger may hold.

    Raises
    ------
    InvalidParameterError
        If it is anything else; it may come from an adversary.
    """
    allowed = f"1 to {_LONGEST_NAME} printable ASCII characters"
    if not isinstance(value, str):
        raise InvalidParameterError(parameter, type(value).__name__, allowed)
    if not (0 < len(value) <= _LONGEST_NAME and value.isascii() and value.isprintable()):
        # A long one in part: it may come from an adversary.
        raise InvalidParameterError(parameter, value[:_LONGEST_NAME], allowed)
    return value


def check_time(value: Any) -> None:
    """Check a time of an entry.

    Raises
    ------
    InvalidParameterError
        If it is anything else.
    """
    allowed = "a time in UTC as '2025-12-31T23:59:59Z'"
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        raise InvalidParameterError("time", value, allowed)
    try:
        datetime.fromisoformat(value)
    except ValueError:
        raise InvalidParameterError("time", value, allowed) from None
