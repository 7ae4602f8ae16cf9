"""Encodes nested values as bytes: numbers, strings, bytes, lists, dicts, arrays."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["dumps", "loads"]

_ARRAY, _BYTES, _DICT = "__array__", "__bytes__", "__dict__"
"""Marks: the only name in a mapping that stands for an array, for bytes, or for a mapping whose
only name is a mark."""

_DOCUMENT, _ARRAYS = "document", "arrays"
_MAGIC = b"flwr-privacy arrays\n"
_NUMBERS = "biufc"  # kinds of NumPy's types


def dumps(state: dict[str, Any]) -> bytes:
    """Return a state as bytes: JSON; with arrays in it a line of JSON before their values.

    Tuples come back as lists. Whoever stores the bytes sees to it that they are whole.

    Raises
    ------
    TypeError
        If the state holds something else than the above.
    """
    arrays: dict[str, Any] = {}
    document = _take_arrays(state, arrays)
    if not arrays:
        return json.dumps(document).encode("ascii")
    kinds = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    head = json.dumps({_DOCUMENT: document, _ARRAYS: kinds}).encode("ascii")
    values = (np.ascontiguousarray(array).data for array in arrays.values())
    return b"".join([_MAGIC, head, b"\n", *values])


def loads(data: bytes) -> dict[str, Any]:
    """Return the state that `dumps` encoded; the bytes may come from an adversary.

    Raises
    ------
    ValueError
        If the bytes are no state.

    Examples
    --------
    >>> loads(dumps({"round": 3, "key": b"k", "model": {"w": np.ones(2)}}))
    {'round': 3, 'key': b'k', 'model': {'w': array([1., 1.])}}
    """
    try:
        head, arrays = _with_values(data) if data.startswith(_MAGIC) else (json.loads(data), {})
        state = _put_arrays(head, arrays)
    except (LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"the bytes are no encoded state ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise ValueError(f"the bytes encode a {type(state).__name__}: expected a mapping")
    return state


def _with_values(data: bytes) -> tuple[Any, dict[str, Any]]:
    place = data.index(b"\n", len(_MAGIC)) + 1
    head = json.loads(data[len(_MAGIC) : place])
    arrays: dict[str, Any] = {}
    for name, given, shape in head[_ARRAYS]:
        dtype = np.dtype(given)
        # An array of objects would take the bytes for addresses.
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"an array of {dtype}")
        view: NDArray[Any] = np.ndarray(shape, dtype, buffer=data, offset=place)
        arrays[name] = view.copy()
        place += view.nbytes
    return head[_DOCUMENT], arrays


def _take_arrays(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _NUMBERS:
            raise TypeError(f"an array of a state holds numbers, not {value.dtype}")
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"keys of a state are strings, not {sorted(map(repr, value))}")
        entries = {key: _take_arrays(item, arrays) for key, item in value.items()}
        return {_DICT: entries} if _is_marked(value) else entries
    if isinstance(value, list | tuple):
        return [_take_arrays(item, arrays) for item in value]
    return value


def _is_marked(value: dict[str, Any]) -> bool:
    return len(value) == 1 and not {_ARRAY, _BYTES, _DICT}.isdisjoint(value)


def _put_arrays(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return arrays[value[_ARRAY]]
        if set(value) == {_BYTES}:
            return bytes.fromhex(value[_BYTES])
        value = value[_DICT] if set(value) == {_DICT} else value
        return {key: _put_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_arrays(item, arrays) for item in value]
    return value
