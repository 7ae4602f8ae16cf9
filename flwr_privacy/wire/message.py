"""Defines the record ``flwr-privacy`` of a message: its header, and names that schemes share.

A record is a flat mapping of names to numbers, strings, bytes or lists of one of them (Flower's
ConfigRecord). Empty strings and lists are left out: some of Flower's own tools fail on them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr_privacy.errors import ProtocolError

__all__ = [
    "COHORT",
    "DECLINED_CODE",
    "ERROR_CODE",
    "EVALUATE",
    "FAILED_CODE",
    "HELLO",
    "INSECURE",
    "METRICS",
    "RECORD",
    "REFUSED_PEERS_CODE",
    "TRAIN",
    "VERSION",
    "Fields",
    "Header",
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

REFUSED_PEERS_CODE = 1005  # what lies between are codes of the server's own
"""Code with which a client of a secure sum names the others that it refuses, as its reason."""

METRICS = "metrics"
"""Key under which a client half hands its metrics to the message's MetricRecord."""

INSECURE = "insecure-noise"
"""Metric of this library: the client's noise comes from a seed, and so is not secret."""

Fields = dict[str, Any]
"""The scheme's own values in a message."""


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
        own = own or {}
        if reserved := sorted(set(own) & set(_HEADER)):
            raise ProtocolError(f"the names {reserved} are the header's: name the fields otherwise")
        record = {key: getattr(self, name) for key, (name, _) in _HEADER.items()}
        if not self.client_id:
            del record["client-id"]
        return record | {key: value for key, value in own.items() if value not in ("", [])}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> tuple["Header", Fields]:
        """Split a record into its header and the scheme's own fields.

        Raises
        ------
        ProtocolError
            If an entry of the header is missing or has another type.
        """
        values: dict[str, Any] = {}
        for key, (name, kind) in _HEADER.items():
            value = record.get(key, "" if key == "client-id" else None)
            if type(value) is not kind:
                raise ProtocolError(
                    f"{RECORD}: the entry '{key}' is {repr(value)[:64]}, not of type "
                    f"{kind.__name__}"
                )
            values[name] = value
        return cls(**values), {key: value for key, value in record.items() if key not in _HEADER}

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


_HEADER: dict[str, tuple[str, type]] = {
    "scheme": ("scheme", str),
    "version": ("version", int),
    "experiment-id": ("experiment_id", str),
    "phase": ("phase", str),
    "round": ("server_round", int),
    "request": ("request", int),
    "client-id": ("client_id", str),
}
"""Entries of a record that are the header's, with their names in `Header` and their types."""
