"""What the two sides of a secure sum tell each other, as records of a message.

A record is a flat mapping; empty strings and lists are left out, see `flwr_privacy.wire`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args, get_type_hints

from flwr_privacy.errors import ProtocolError

__all__ = ["DEAL", "JOIN", "KEYS", "OPEN", "SHARES", "Opening", "Revealed", "read", "write"]

KEYS, SHARES = "keys", "shares"
"""Phases: telling the public key; dealing shares for a round, revealing shares of another."""

JOIN, DEAL, OPEN = "flwr-privacy.join", "flwr-privacy.deal", "flwr-privacy.open"
"""Records of a question that asks for a masked vector, for shares, or to open a sum; the answers
to the last two have the same names."""

_Message = TypeVar("_Message")


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The question to reveal shares of a session.

    Parameters
    ----------
    session : str
        Name of the session.
    survivors : list of str
        Dealers of the client's roster whose vectors are in the sum.
    """

    session: str
    survivors: list[str]


@dataclass(frozen=True, kw_only=True)
class Revealed:
    """What a client reveals: see `Participant.reveal`.

    Parameters
    ----------
    keys, seeds : list of bytes
        Shares of the keys of the missing, and of the seeds of the survivors.
    """

    keys: list[bytes]
    seeds: list[bytes]


def write(message: Any) -> dict[str, Any]:
    """Return a message (a dataclass) as a record.

    Examples
    --------
    >>> write(Opening(session="s", survivors=["a", "b"]))
    {'session': 's', 'survivors': ['a', 'b']}
    """
    values = {entry.name: getattr(message, entry.name) for entry in fields(message)}
    return {key.replace("_", "-"): value for key, value in values.items() if value not in ("", [])}


def read(kind: type[_Message], record: Mapping[str, Any]) -> _Message:
    """Read a message; it may come from an adversary.

    Raises
    ------
    ProtocolError
        If an entry is missing or has another type. Entries that the message does not have are
        left alone.
    """
    values: dict[str, Any] = {}
    for field, expected in get_type_hints(kind).items():
        name = field.replace("_", "-")
        items = get_args(expected)  # of a list
        value = record.get(name, [] if items else None)
        fits = (
            type(value) is list and all(type(item) is items[0] for item in value)
            if items
            else type(value) is expected
        )
        if not fits:
            raise ProtocolError(f"the entry '{name}' of {kind.__name__} is no {expected}")
        values[field] = value
    return kind(**values)
