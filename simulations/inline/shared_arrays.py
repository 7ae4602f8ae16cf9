"""Arrays between the processes of one machine: written once into a file, read where they lie.

The file is mapped into memory by whoever writes and whoever reads it, and on Linux it lies in
memory too. A message that is pickled carries no more than its name and the places of the arrays.
"""

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from flwr_privacy.clients.records import LocalArray, RecordArrays
from flwr_privacy.files import exclusive_lock

__all__ = ["SharedArrays", "folder_for_arrays"]

_PREFIX, _LOCK = "flwr-privacy-arrays-", "lock"
_SOON = 30.0  # seconds within which a folder is locked once it is made
_SMALL = 1 << 15  # bytes; a smaller array is sent with the message
_ALIGNED = 64  # bytes


@contextmanager
def folder_for_arrays() -> Iterator[Path]:
    """Make a new folder for the files, in memory where the system has a place for that.

    There, what killed processes left behind is removed on the way: it takes up memory.
    """
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
            yield Path(name)
        return
    _remove_left_behind(memory)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=memory) as name,
        exclusive_lock(Path(name, _LOCK), timeout=_SOON),
    ):
        yield Path(name)


def _remove_left_behind(parent: Path) -> None:
    for folder in parent.glob(_PREFIX + "*"):
        try:
            if time.time() - folder.stat().st_mtime < _SOON:
                continue  # it may be that its owner is about to lock it
            with exclusive_lock(folder / _LOCK, timeout=0):
                shutil.rmtree(folder)
        except OSError:  # somebody's: in use, of another user, or removed by another process
            continue


class SharedArrays:
    """The side that writes.

    Parameters
    ----------
    folder : path
        Where the files lie; all processes can reach it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._placed: dict[int, tuple[Array, _PlacedArray]] = {}  # by id: several may be sent one
        self._readers: dict[str, int] = {}  # by file: messages that are not answered yet

    def place(self, content: RecordDict) -> list[str]:
        """Put the large arrays of a message into a file, unless they are in one already.

        Parameters
        ----------
        content : RecordDict
            The message's records. Its large arrays are replaced.

        Returns
        -------
        list of str
            The files that whoever reads the message needs: until `release`.
        """
        records = [record for record in content.values() if isinstance(record, ArrayRecord)]
        large: list[tuple[ArrayRecord, str, NDArray[Any]]] = []
        for record in records:
            arrays = RecordArrays(record)
            for name, array in record.items():
                if id(array) not in self._placed and (values := _values(arrays, name)) is not None:
                    large.append((record, name, values))
        if large:
            self._write(large)
        files = set()
        for record in records:
            for name, array in list(record.items()):
                if id(array) in self._placed:
                    record[name] = placed = self._placed[id(array)][1]
                    files.add(placed.path)
        for path in files:
            self._readers[path] = self._readers.get(path, 0) + 1
        return sorted(files)

    def release(self, files: list[str]) -> None:
        """Remove the files that nobody needs any more."""
        for path in files:
            self._readers[path] -= 1
            if self._readers[path] == 0:
                del self._readers[path]
                self._placed = {k: v for k, v in self._placed.items() if v[1].path != path}
                os.unlink(path)

    def _write(self, arrays: list[tuple[ArrayRecord, str, NDArray[Any]]]) -> None:
        offsets = np.cumsum([0, *(-(-v.nbytes // _ALIGNED) * _ALIGNED for _, _, v in arrays)])
        descriptor, path = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "r+b") as file:
            file.truncate(int(offsets[-1]))
            mapping = mmap.mmap(file.fileno(), int(offsets[-1]))
        for (record, name, values), offset in zip(arrays, offsets.tolist(), strict=False):
            view = _view(mapping, values.dtype, values.shape, offset)
            np.copyto(view, values)
            self._placed[id(record[name])] = (record[name], _PlacedArray(view, path, offset))


class _PlacedArray(LocalArray):
    """An array in a file: pickled, it is the file's name and a place in it."""

    def __init__(self, values: NDArray[Any], path: str, offset: int) -> None:
        super().__init__(values)
        self.__dict__.update(path=path, offset=offset)

    @property
    def path(self) -> str:
        path: str = self.__dict__["path"]
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        values = self.__dict__["values"]
        return _opened, (self.path, self.__dict__["offset"], values.dtype.str, values.shape)


def _values(arrays: RecordArrays, name: str) -> NDArray[Any] | None:
    """Return the values of an array that is worth a place in a file; None of any other."""
    if arrays.record[name].stype != "numpy.ndarray":
        return None
    try:
        values = arrays[name]
    except ValueError:  # damaged: whoever reads it says so
        return None
    return values if values.nbytes >= _SMALL else None


def _opened(path: str, offset: int, dtype: str, shape: tuple[int, ...]) -> LocalArray:
    return LocalArray(_view(_mapped(path), np.dtype(dtype), shape, offset))


@lru_cache(maxsize=1)  # the arrays of one message come one after another
def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _view(
    mapping: mmap.mmap, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int
) -> NDArray[Any]:
    # It holds on to the mapping, which ends with the last view, wherever the file has gone.
    return np.frombuffer(mapping, dtype, prod(shape), offset).reshape(shape)
