"""Hashes requests and plain values, so that no two different ones have the same digest."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from .message import COHORT

__all__ = ["request_digest", "values_digest"]

_PLAIN = (bool, int, float, str, bytes)


def request_digest(content: Mapping[str, Any], *, without: Mapping[str, Iterable[str]]) -> bytes:
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
    kind = type(value)
    if kind not in _PLAIN:
        # What travels are the plain types: NumPy's floats and their like become these on the way.
        kind = next(kind for kind in _PLAIN if isinstance(value, kind))
    plain: Any = kind(value)
    octets = plain if kind is bytes else repr(plain).encode()
    digest.update(kind.__name__.encode() + b":" + len(octets).to_bytes(8, "big"))
    digest.update(octets)  # apart: it may be a model, and joining would copy it
