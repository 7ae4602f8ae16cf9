"""Checkpoints: a state in one file that is whole or refused.

The state is a nested dict of numbers, strings, bytes, lists and arrays. The file is an npz archive
behind a SHA-256 of its bytes; it is written beside the old one and put in its place in one step.
"""

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from flwr_privacy.errors import CheckpointError

__all__ = ["load", "save"]

_MAGIC = b"flwr-privacy checkpoint 1\n"
_DIGEST_SIZE = hashlib.sha256().digest_size
_ARRAY, _BYTES, _DOCUMENT = "__array__", "__bytes__", "document"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state; a crash at any moment leaves the old file or the new one.

    Tuples come back as lists.

    Raises
    ------
    TypeError
        If the state holds something else than the above.
    """
    arrays: dict[str, Any] = {}
    document = json.dumps(_take_arrays(state, arrays))
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{_DOCUMENT: np.array(document), **arrays})
    payload = buffer.getvalue()
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Read a state.

    Raises
    ------
    CheckpointError
        If the file is missing or damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    start = len(_MAGIC) + _DIGEST_SIZE
    digest, payload = content[len(_MAGIC) : start], content[start:]
    if not content.startswith(_MAGIC) or hashlib.sha256(payload).digest() != digest:
        raise CheckpointError(
            f"the checkpoint {path} is damaged: its checksum does not fit its content"
        )
    with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files if name != _DOCUMENT}
        document = json.loads(str(archive[_DOCUMENT]))
    restored: dict[str, Any] = _put_arrays(document, arrays)
    return restored


def _take_arrays(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, np.ndarray):
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
        return {key: _take_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_take_arrays(item, arrays) for item in value]
    return value


def _put_arrays(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return arrays[value[_ARRAY]]
        if set(value) == {_BYTES}:
            return bytes.fromhex(value[_BYTES])
        return {key: _put_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_arrays(item, arrays) for item in value]
    return value
