"""What travels beside the arrays: the record ``flwr-privacy`` of every message, both ways.

The record is a flat mapping of names to numbers, strings, bytes or lists of one of them (Flower's
ConfigRecord). The names of `Header` are reserved; all others are the scheme's own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ProtocolError

__all__ = ["HELLO", "METRICS", "RECORD", "VERSION", "Fields", "Header", "payload_bytes"]

RECORD = "flwr-privacy"
"""Name of the record in a message."""

VERSION = 1
"""Version of the protocol that this library speaks."""

HELLO = "hello"
"""Phase in which a node tells who it is."""

METRICS = "metrics"
"""Key under which a client half hands its metrics to the message's MetricRecord."""

Fields = dict[str, Any]
"""The scheme's own values in a message."""

_KEYS: dict[str, type] = {
    "scheme": str,
    "version": int,
    "experiment-id": str,
    "phase": str,
    "round": int,
    "client-id": str,
}


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
    client_id : str, default ""
        In a reply, who answers. Empty in a question.
    version : int
        Version of the protocol.

    Examples
    --------
    >>> header = Header(scheme="fedavg", experiment_id="e", phase="train", server_round=1)
    >>> read, own = Header.read({**header.write(), "bits": 4})
    >>> read == header, own
    (True, {'bits': 4})
    """

    scheme: str
    experiment_id: str
    phase: str
    server_round: int
    client_id: str = ""
    version: int = VERSION

    def write(self) -> Fields:
        """Return the header as the reserved entries of a record."""
        return {
            "scheme": self.scheme,
            "version": self.version,
            "experiment-id": self.experiment_id,
            "phase": self.phase,
            "round": self.server_round,
            "client-id": self.client_id,
        }

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> tuple["Header", Fields]:
        """Split a record into its header and the scheme's own fields.

        Raises
        ------
        ProtocolError
            If a reserved entry is missing or has another type.
        """
        for key, kind in _KEYS.items():
            if type(record.get(key)) is not kind:
                raise ProtocolError(
                    f"{RECORD}: the entry '{key}' is {record.get(key)!r}, not of type "
                    f"{kind.__name__}"
                )
        header = cls(
            scheme=record["scheme"],
            version=record["version"],
            experiment_id=record["experiment-id"],
            phase=record["phase"],
            server_round=record["round"],
            client_id=record["client-id"],
        )
        return header, {key: value for key, value in record.items() if key not in _KEYS}

    def check(self, *, scheme: str, phases: Iterable[str]) -> None:
        """Check that this message is for a given scheme and one of its phases.

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
            raise ProtocolError(f"scheme '{self.scheme}': this end speaks '{scheme}'")
        known = sorted({HELLO, *phases})
        if self.phase not in known:
            raise ProtocolError(
                f"phase '{self.phase}' is not known: scheme '{scheme}' has "
                + ", ".join(f"'{phase}'" for phase in known)
            )


def payload_bytes(content: Mapping[str, Any]) -> int:
    """Return the payload of a message in bytes, as it goes over the wire.

    Parameters
    ----------
    content : Mapping
        Flower's RecordDict: records of arrays (each with its serialised ``data``), of metrics and
        of configuration values (each with a ``deflate`` method).

    Returns
    -------
    int
        Serialised arrays plus serialised records. Flower's own envelope (ids, hashes, about a
        hundred bytes per array) is not counted.
    """
    total = 0
    for record in content.values():
        values = list(record.values())
        if values and hasattr(values[0], "data"):
            total += sum(len(array.data) for array in values)
        else:
            total += len(record.deflate())
    return total
