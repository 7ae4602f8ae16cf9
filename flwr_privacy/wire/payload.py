"""Counts the bytes of a message's payload on the wire, without making them where it can."""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["payload_bytes", "record_bytes"]


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
            total += record_bytes(type(record).__name__, record, record.deflate)
    return total


def record_bytes(kind: str, values: Mapping[str, Any], deflate: Callable[[], bytes]) -> int:
    """Return the size in bytes of a record of values.

    It depends on names, types and lengths alone, and most records of a training are alike in these:
    so it is measured once for them.

    Parameters
    ----------
    kind : str
        Name of the record's type.
    values : Mapping
        What is in it.
    deflate : callable
        Returns its bytes.
    """
    entries = [(name, *_length_of(value)) for name, value in values.items()]
    # Names are kept: those of an adversary must not fill the memory.
    if any(entry[1] is list for entry in entries) or sum(map(len, values)) > _MOST_NAMED:
        return len(deflate())
    lengths = (kind, *entries)
    if lengths not in _SIZES:
        while len(_SIZES) >= _MOST_SIZES:
            _SIZES.popitem()
        _SIZES[lengths] = len(deflate())
    return _SIZES[lengths]


_SIZES: dict[tuple[Any, ...], int] = {}
"""Sizes of records by what they depend on."""

_MOST_SIZES = 1024
_MOST_NAMED = 4096  # characters of the names of a record


def _length_of(value: Any) -> tuple[Any, ...]:
    """Return the type of a value and what its length on the wire depends on."""
    if isinstance(value, bool | float):
        return (type(value),)
    if isinstance(value, int):  # zigzag: 2 n for n from 0 on, otherwise -2 n - 1
        return int, value < 0, (-2 * value - 1 if value < 0 else 2 * value).bit_length()
    if isinstance(value, str):
        return str, len(value.encode())
    if isinstance(value, bytes):
        return bytes, len(value)
    return (list,)
