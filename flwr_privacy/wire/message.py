"""Defines the records of a message: ``flwr-privacy`` and ``flwr-privacy.cohort``.

A record is a flat mapping of names to numbers, strings, bytes or lists of one of them (Flower's
ConfigRecord). Empty strings and lists are left out: some of Flower's own tools fail on them.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr_privacy.errors import ProtocolError

__all__ = [
    "COHORT",
    "DECLINED_CODE",
    "ERROR_CODE",
    "EVALUATE",
    "FAILED_CODE",
    "HELLO",
    "METRICS",
    "RECORD",
    "TRAIN",
    "VERSION",
    "Cohort",
    "CohortAnswer",
    "Fields",
    "Header",
    "payload_bytes",
    "question_digest",
    "values_digest",
]

RECORD = "flwr-privacy"
"""Name of the record in a message."""

COHORT = "flwr-privacy.cohort"
"""Name of the record in a message to or from a node that runs several clients."""

VERSION = 1
"""Version of the protocol that this library speaks."""

HELLO, TRAIN, EVALUATE = "hello", "train", "evaluate"
"""Phases that every scheme has: telling who one is, training, evaluation."""

ERROR_CODE = 1000
"""Code of the error replies of this library; the reason says what is wrong."""

DECLINED_CODE = 1001
"""Code with which a client declines: its policy does not allow it, or its budget is spent."""

FAILED_CODE = 1002
"""Code with which a client says that it was charged and cannot answer."""

METRICS = "metrics"
"""Key under which a client half hands its metrics to the message's MetricRecord."""

Fields = dict[str, Any]
"""The scheme's own values in a message."""

SUM, EACH = "sum", "each"
"""How a node answers for its clients: one accumulator, or every reply."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The part of the record that every message has.

    Parameters
    ----------
    scheme : str
        Name of the scheme.
    experiment_id : str
        Identity of the experiment; survives a resume.
    phase : str
        Step within the round, e.g. ``hello`` or ``train``.
    server_round : int
        Round, from 1; 0 before the first.
    request : int, default 0
        Number of the question within its round and phase. Experiment, round, phase and request
        together name a question, also when a resumed round asks it again.
    client_id : str, default ""
        In a reply, who answers. Empty in a question.
    version : int
        Version of the protocol.

    Examples
    --------
    >>> header = Header(scheme="fedavg", experiment_id="e", phase="train", server_round=1)
    >>> read, own = Header.read(header.write({"bits": 4}))
    >>> read == header, own
    (True, {'bits': 4})
    """

    scheme: str
    experiment_id: str
    phase: str
    server_round: int
    request: int = 0
    client_id: str = ""
    version: int = VERSION

    def write(self, own: Mapping[str, Any] | None = None) -> Fields:
        """Return the record of a message: the header and the scheme's own fields.

        Raises
        ------
        ProtocolError
            If one of the scheme's fields has a name of the header.
        """
        record: Fields = {
            "scheme": self.scheme,
            "version": self.version,
            "experiment-id": self.experiment_id,
            "phase": self.phase,
            "round": self.server_round,
            "request": self.request,
        }
        if self.client_id:
            record["client-id"] = self.client_id
        if reserved := sorted(set(own or {}) & set(_HEADER)):
            raise ProtocolError(f"the names {reserved} are the header's: name the fields otherwise")
        return {**record, **_without_empty(own or {})}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> tuple["Header", Fields]:
        """Split a record into its header and the scheme's own fields.

        Raises
        ------
        ProtocolError
            If an entry of the header is missing or has another type.
        """
        entries = {key: record.get(key) for key in _HEADER}
        entries["client-id"] = record.get("client-id", "")
        for key, kind in _HEADER.items():
            _check_type(RECORD, key, entries[key], kind)
        header = cls(
            scheme=record["scheme"],
            version=record["version"],
            experiment_id=record["experiment-id"],
            phase=record["phase"],
            server_round=record["round"],
            request=record["request"],
            client_id=str(entries["client-id"]),
        )
        return header, {key: value for key, value in record.items() if key not in _HEADER}

    def check(self, *, scheme: str, phases: Iterable[str]) -> None:
        """Check that this message is for a given scheme and one of some phases.

        Raises
        ------
        ProtocolError
            If scheme, version or phase is another one; the message names both.
        """
        if self.version != VERSION:
            raise ProtocolError(
                f"protocol version {self.version}: this end speaks version {VERSION}"
            )
        if self.scheme != scheme:
            raise ProtocolError(f"scheme {self.scheme[:64]!r}: this end speaks {scheme!r}")
        known = sorted(phases)
        if self.phase not in known:
            raise ProtocolError(
                f"phase {self.phase[:64]!r} is not known: for this type of message the scheme "
                f"{scheme!r} has " + ", ".join(map(repr, known))
            )


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The request to a node that runs several clients.

    Parameters
    ----------
    clients : list of str
        Identities to run: numbers from 0, as the partitions.
    late : list of str
        Those whose answer is computed but comes too late to be used.
    size : int
        Number of clients of the federation.
    reply : {"sum", "each"}
        Whether to answer with one accumulator or with every reply.
    weighted_by : str
        Name of the metric that is a reply's weight.
    groups : list of str, optional
        The group of each client, in a scheme that sums by groups: a record ``name@@group`` goes to
        the clients of that group.
    """

    clients: list[str]
    late: list[str]
    size: int
    reply: str
    weighted_by: str
    groups: list[str] = field(default_factory=list)

    @property
    def group_of(self) -> dict[str, str]:
        """The group of each client; empty if there are no groups."""
        return dict(zip(self.clients, self.groups, strict=False))

    def write(self) -> Fields:
        """Return the record."""
        return _without_empty(
            {
                "clients": self.clients,
                "late": self.late,
                "size": self.size,
                "reply": self.reply,
                "weighted-by": self.weighted_by,
                "groups": self.groups,
            }
        )

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Cohort":
        """Read the record.

        Raises
        ------
        ProtocolError
            If an entry is missing or ill-typed, or the clients are not distinct numbers below
            `size` in their one decimal form: a second name for a client would be a second client.
        """
        for key, kind in (("size", int), ("reply", str), ("weighted-by", str)):
            _check_type(COHORT, key, record.get(key), kind)
        clients, late = _strings(record, "clients"), _strings(record, "late")
        size = record["size"]
        distinct = len(set(clients)) == len(clients) > 0
        if not distinct or not all(_is_number_below(client, size) for client in clients):
            raise ProtocolError(
                f"{COHORT}: the clients are not distinct numbers from 0 to {size - 1}"
            )
        if record["reply"] not in (SUM, EACH) or not set(late) <= set(clients):
            raise ProtocolError(f"{COHORT}: unknown 'reply', or somebody late who is not asked")
        groups = _strings(record, "groups")
        if groups and len(groups) != len(clients):
            raise ProtocolError(f"{COHORT}: {len(groups)} groups for {len(clients)} clients")
        return cls(
            clients=clients,
            late=late,
            size=size,
            reply=record["reply"],
            weighted_by=record["weighted-by"],
            groups=groups,
        )


@dataclass(frozen=True, kw_only=True)
class CohortAnswer:
    """The outcome of each client of a cohort.

    Parameters
    ----------
    answered, late : list of str
        Clients whose reply is in the answer, and those who were too late.
    refused : list of (str, str, str)
        Client, reason and detail of each reply that is not used.
    bytes_up : int
        Payload of the clients' replies.
    keepers : list of str
        Clients whose own code keeps something on the node between messages.
    """

    answered: list[str]
    late: list[str]
    refused: list[tuple[str, str, str]]
    bytes_up: int
    keepers: list[str]

    def write(self) -> Fields:
        """Return the record."""
        return _without_empty(
            {
                "answered": self.answered,
                "late": self.late,
                "refused-clients": [client for client, _, _ in self.refused],
                "refused-reasons": [reason for _, reason, _ in self.refused],
                "refused-details": [detail for _, _, detail in self.refused],
                "bytes-up": self.bytes_up,
                "keepers": self.keepers,
            }
        )

    @classmethod
    def read(cls, record: Mapping[str, Any], *, asked: Iterable[str]) -> "CohortAnswer":
        """Read the record.

        Raises
        ------
        ProtocolError
            If an entry is missing or ill-typed, or the answer does not account for every client
            that was asked, once.
        """
        _check_type(COHORT, "bytes-up", record.get("bytes-up"), int)
        answered, late = _strings(record, "answered"), _strings(record, "late")
        keepers = _strings(record, "keepers")
        columns = [
            _strings(record, f"refused-{name}") for name in ("clients", "reasons", "details")
        ]
        if len({len(column) for column in columns}) != 1 or not (
            0 <= record["bytes-up"] < _MOST_BYTES
        ):
            raise ProtocolError(f"{COHORT}: entries that do not fit each other")
        asked = set(asked)
        told = [*answered, *late, *columns[0]]
        if len(told) != len(asked) or set(told) != asked or not asked.issuperset(keepers):
            raise ProtocolError(f"{COHORT}: the answer is not about the clients that were asked")
        return cls(
            answered=answered,
            late=late,
            refused=list(zip(*columns, strict=True)),
            bytes_up=record["bytes-up"],
            keepers=keepers,
        )


_HEADER: dict[str, type] = {
    "scheme": str,
    "version": int,
    "experiment-id": str,
    "phase": str,
    "round": int,
    "request": int,
    "client-id": str,
}


_MOST_BYTES = 2**50  # of one answer


def payload_bytes(content: Mapping[str, Any]) -> int:
    """Return the size in bytes of a message's payload on the wire.

    Parameters
    ----------
    content : Mapping
        Flower's RecordDict: records of arrays (each with its serialised ``data``, or its
        ``encoded_size`` where it is not serialised yet), of metrics and of configuration values
        (each with a ``deflate`` method).

    Returns
    -------
    int
        Serialised arrays plus serialised records. Flower's own envelope (ids, hashes, about a
        hundred bytes per array) is not counted.
    """
    total = 0
    for record in content.values():
        values = list(record.values())
        if values and hasattr(values[0], "stype"):
            total += sum(
                array.encoded_size if hasattr(array, "encoded_size") else len(array.data)
                for array in values
            )
        else:
            total += len(record.deflate())
    return total


def question_digest(content: Mapping[str, Any], *, without: Mapping[str, Iterable[str]]) -> bytes:
    """Hash the part of a request that all its clients get.

    Parameters
    ----------
    content : Mapping
        Flower's RecordDict. Records that go to one client of a cohort alone are left out.
    without : Mapping
        For some records, by their names, the entries that no two clients have alike.

    Returns
    -------
    bytes
        SHA-256, 32 bytes.
    """
    digest = hashlib.sha256()
    # In their own order, because apps take the first record of a kind, and arrays one by one.
    for name, record in content.items():
        if name == COHORT or "@" in name:
            continue
        own = set(without.get(name, ()))
        keys = [key for key in record if key not in own]
        if own:  # part of it comes to some clients with what is theirs, in another order
            keys.sort()
        _hash(digest, [type(record).__name__, name, *keys])
        for key in keys:
            value = record[key]
            if hasattr(value, "stype"):  # an array
                shape = [int(length) for length in value.shape]
                _hash(digest, ["array", value.dtype, shape, value.data])
            else:
                _hash(digest, value)
    return digest.digest()


def values_digest(*values: Any) -> bytes:
    """Hash plain values and (nested) lists of them with SHA-256 (32 bytes).

    Examples
    --------
    >>> values_digest("ab", 1) == values_digest("a", "b1")
    False
    """
    digest = hashlib.sha256()
    _hash(digest, list(values))
    return digest.digest()


def _hash(digest: Any, value: Any) -> None:
    """Add a value to a hash so that no two sequences of values give the same bytes."""
    if isinstance(value, list):
        digest.update(b"l" + len(value).to_bytes(8, "big"))
        for item in value:
            _hash(digest, item)
        return
    # What travels are the plain types: NumPy's floats and their like become these on the way.
    kind = next(kind for kind in (bool, int, float, str, bytes) if isinstance(value, kind))
    plain: Any = kind(value)
    octets = plain if kind is bytes else repr(plain).encode()
    digest.update(kind.__name__.encode() + b":" + len(octets).to_bytes(8, "big") + octets)


def _check_type(record: str, key: str, value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise ProtocolError(
            f"{record}: the entry '{key}' is {repr(value)[:64]}, not of type {kind.__name__}"
        )


def _is_number_below(text: str, size: int) -> bool:
    return re.fullmatch(r"0|[1-9][0-9]{0,8}", text) is not None and int(text) < size


def _strings(record: Mapping[str, Any], key: str) -> list[str]:
    values = record.get(key, [])
    if not isinstance(values, list) or not all(type(value) is str for value in values):
        raise ProtocolError(f"{COHORT}: the entry '{key}' is no list of str")
    return values


def _without_empty(fields: Mapping[str, Any]) -> Fields:
    return {key: value for key, value in fields.items() if value not in ("", [])}
