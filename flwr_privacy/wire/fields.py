"""Converts messages between dataclasses and flat records.

An entry has the name of its field with dashes. Empty strings and lists are left out, see
`flwr_privacy.wire.message`, and so is None, for a field that is a value or None.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from flwr_privacy.errors import ProtocolError

__all__ = ["read", "read_terms", "write"]

_Message = TypeVar("_Message")

_TYPES: dict[type, dict[str, Any]] = {}
"""Types of the fields of each message: finding them takes longer than reading one."""


def write(message: Any) -> dict[str, Any]:
    """Return a message (a dataclass) as a record.

    Examples
    --------
    >>> from flwr_privacy.secure_sum.messages import Opening
    >>> write(Opening(session="s", survivors=["a", "b"]))
    {'session': 's', 'survivors': ['a', 'b']}
    """
    values = {entry.name: getattr(message, entry.name) for entry in fields(message)}
    return {
        key.replace("_", "-"): value for key, value in values.items() if value not in ("", [], None)
    }


def read(kind: type[_Message], record: Mapping[str, Any]) -> _Message:
    """Read a message; it may come from an adversary.

    Raises
    ------
    ProtocolError
        If an entry is missing or has another type. Entries that the message does not have are
        left alone.
    """
    return kind(**_values(kind, record))


def read_terms(kind: type[_Message], record: Mapping[str, Any]) -> _Message:
    """Read a message that all clients of a round get alike; it is made once for them.

    Parameters
    ----------
    kind : type
        A frozen dataclass, of which nobody changes a list either. What it holds is no secret: it
        is kept.
    record : Mapping
        As of `read`.

    Raises
    ------
    ProtocolError
        As `read`.
    """
    values = _values(kind, record)
    given = (tuple(v) if type(v) is list else v for v in values.values())
    make: Any = _made  # mypy takes types for unhashable
    made: _Message = make(kind, tuple(values), tuple(given))
    return made


@lru_cache(maxsize=64)
def _made(kind: type, names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    lists = (list(value) if type(value) is tuple else value for value in values)
    return kind(**dict(zip(names, lists, strict=True)))


def _values(kind: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a message's fields, whose types are right."""
    values: dict[str, Any] = {}
    if kind not in _TYPES:
        _TYPES[kind] = get_type_hints(kind)
    for field, expected in _TYPES[kind].items():
        name = field.replace("_", "-")
        items = get_args(expected)  # of a list, or of a value or None
        optional = NoneType in items
        value = record.get(name, None if optional or not items else [])
        if optional:
            fits = name not in record or type(value) is items[0]
        elif items:
            fits = type(value) is list and all(type(item) is items[0] for item in value)
        else:
            fits = type(value) is expected
        if not fits:
            raise ProtocolError(f"the entry '{name}' of {kind.__name__} is no {expected}")
        values[field] = value
    return values
