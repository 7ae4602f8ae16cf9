"""Shares arrays between the processes of one machine: writes each once, maps it everywhere.

On Linux the file lies in memory, and whoever reads it maps it. What is pickled carries no more than
its name and the places of the arrays.
"""

import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from flwr_privacy.clients.node.records import LocalArray, RecordArrays
from flwr_privacy.wire.files import exclusive_lock, write_all

__all__ = ["SharedArrays", "files_of_state", "folder_for_arrays", "place_state"]

logger = logging.getLogger("flwr.privacy")

_PREFIX, _LOCK = "flwr-privacy-arrays-", "lock"
_SOON = 30.0  # seconds within which a folder is locked once it is made
_SMALL = 1 << 15  # bytes; a smaller array is sent with the message
_ALIGNED = 64  # bytes

_Place = tuple[str, int]
"""A file, and where in it an array begins."""

_newest: dict[_Place, NDArray[Any]] = {}
"""The arrays that this process wrote last: most often it is the one that goes on with them."""


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
    """The writing side of shared arrays.

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
            The message's records. Those with large arrays are replaced; they stay if there is no
            room.

        Returns
        -------
        list of str
            The files that whoever reads the message needs: until `release`.
        """
        records = {k: r for k, r in content.items() if isinstance(r, ArrayRecord)}
        large = [
            found
            for record in records.values()
            for found in _large(record).values()
            if id(found[0]) not in self._placed
        ]
        places = _written(self._folder, [values for _, values in large])
        for (array, values), (path, offset) in zip(large, places, strict=False):
            view = _view(_mapped(path), values.dtype, values.shape, offset)
            self._placed[id(array)] = (array, _PlacedArray(view, path, offset))
        files = set()
        for key, record in records.items():
            placed = {n: self._placed[id(a)][1] for n, a in record.items() if id(a) in self._placed}
            files |= {array.path for array in placed.values()}
            content[key] = _replaced(record, {**_states_own(record), **placed})
        for path in files:
            self._readers[path] = self._readers.get(path, 0) + 1
        return sorted(files)

    def release(self, files: list[str]) -> None:
        """Remove the files that no message uses any more."""
        for path in files:
            self._readers[path] -= 1
            if self._readers[path] == 0:
                del self._readers[path]
                self._placed = {k: v for k, v in self._placed.items() if v[1].path != path}
                os.unlink(path)


def place_state(
    folder: str | Path,
    state: RecordDict,
    given: RecordDict | None = None,
    spare: list[str] | None = None,
) -> None:
    """Put the large arrays of a node's state into files, one for each record.

    What lies in a file of the state before stays there: only what is new is written. Nobody removes
    the files but the one who keeps the state: those that are no longer in `files_of_state`.

    Parameters
    ----------
    folder : path
        Where the files lie.
    state : RecordDict
        The state after an answer. Its records with new large arrays are replaced; the arrays stay
        in them if there is no room.
    given : RecordDict, optional
        The state before. Those of its arrays that the state does not have any more stay readable
        for an app that holds them.
    spare : list of str, optional
        Files that nobody reads any more, to be written again: those that are taken are removed from
        the list. The system gives out new memory page by page, which takes longer than the writing.
    """
    written: dict[_Place, NDArray[Any]] = {}
    before = RecordDict() if given is None else given
    known, kept = files_of_state(before), files_of_state(state)
    for array in _state_arrays(before):
        if array.path not in kept:
            array.hold()
    for key, record in list(state.items()):
        if not isinstance(record, ArrayRecord):
            continue
        large = _large(record, but=known)
        places = _written(Path(folder), [values for _, values in large.values()], spare)
        placed: list[Array] = [
            _StateArray(*place, values.dtype, values.shape)
            for place, (_, values) in zip(places, large.values(), strict=False)
        ]
        for place, (_, values) in zip(places, large.values(), strict=False):
            written[place] = values.view()
            written[place].flags.writeable = False
        own = {**_states_own(record, but=known), **dict(zip(large, placed, strict=False))}
        state[key] = _replaced(record, own)
    # After the loop: what was written before is still read in it.
    _newest.clear()
    _newest.update(written)


def files_of_state(state: RecordDict) -> set[str]:
    """Return the files that arrays of a state lie in."""
    return {array.path for array in _state_arrays(state)}


class _PlacedArray(LocalArray):
    """An array of a message in a file: pickled, it is the file's name and a place in it."""

    def __init__(self, values: NDArray[Any], path: str, offset: int) -> None:
        super().__init__(values)
        self.__dict__.update(path=path, offset=offset)

    @property
    def path(self) -> str:
        path: str = self.__dict__["path"]
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.path, self.__dict__["offset"], self.values.dtype, self.shape)


class _StateArray(LocalArray):
    """An array of a state in a file, which is opened when somebody reads it.

    Whoever hands the state on, and leaves it where it is, neither reads nor maps anything: there
    may be as many as there are clients.
    """

    def __init__(
        self, path: str, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        super().__init__(np.empty(0, dtype))
        self.__dict__.update(shape=shape, place=(path, offset, dtype, shape), held=None)

    @property
    def path(self) -> str:
        path: str = self.__dict__["place"][0]
        return path

    @property
    def values(self) -> NDArray[Any]:
        if self.__dict__["held"] is None:
            self.hold()
        held: NDArray[Any] = self.__dict__["held"]
        return held

    def hold(self) -> None:
        """Keep the array readable after its file is removed or written again."""
        path, offset, dtype, shape = self.__dict__["place"]
        held = _newest.get((path, offset))
        if held is None:  # a copy, as its file may be written again
            held = np.fromfile(path, dtype, prod(shape), offset=offset).reshape(shape)
            held.flags.writeable = False
        self.__dict__["held"] = held

    def __deepcopy__(self, memo: Any) -> Array:
        return Array(self.dtype, self.shape, self.stype, self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        return _StateArray, self.__dict__["place"]


def _state_arrays(content: RecordDict) -> Iterator[_StateArray]:
    for record in content.values():
        if isinstance(record, ArrayRecord):
            yield from (array for array in record.values() if isinstance(array, _StateArray))


def _states_own(record: ArrayRecord, *, but: Collection[str] = ()) -> dict[str, Array]:
    """Return the arrays of a record that lie in files of states, to travel with a message."""
    return {
        name: LocalArray(array.values)
        for name, array in record.items()
        if isinstance(array, _StateArray) and array.path not in but
    }


def _large(
    record: ArrayRecord, *, but: Collection[str] = ()
) -> dict[str, tuple[Array, NDArray[Any]]]:
    """Return the arrays of a record, with their values, that are worth a place in a file.

    Parameters
    ----------
    record : ArrayRecord
        The record.
    but : collection of str
        Files of a state: what lies there is left out.
    """
    found, arrays = {}, RecordArrays(record)
    for name, array in record.items():
        if array.stype != "numpy.ndarray" or (isinstance(array, _StateArray) and array.path in but):
            continue
        try:
            values = arrays[name]
        except ValueError:  # damaged: whoever reads it says so
            continue
        if values.nbytes >= _SMALL:
            found[name] = (array, values)
    return found


def _replaced(record: ArrayRecord, arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return a record with other arrays; the app may have the given one elsewhere too."""
    if not arrays:
        return record
    own = record.copy()
    for name, array in arrays.items():
        own[name] = array
    return own


def _written(
    folder: Path, arrays: Sequence[NDArray[Any]], spare: list[str] | None = None
) -> list[_Place]:
    """Write arrays into a new file; return where each lies, or nothing if there is no room."""
    if not arrays:
        return []
    path, places = "", []
    try:
        descriptor, path = tempfile.mkstemp(dir=folder)
        # Not through a mapping: where the memory is full, writing into one kills the process.
        if spare:  # under the new name: nobody takes it for what it was
            os.close(descriptor)
            os.replace(spare.pop(), path)
            descriptor = os.open(path, os.O_WRONLY)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for values in arrays:
                offset = file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)
                write_all(file, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
                places.append((path, offset))
            file.truncate()
    except OSError as error:
        if path:
            os.unlink(path)
        _tell_full(str(folder), str(error))
        return []
    return places


@cache
def _tell_full(folder: str, reason: str) -> None:
    logger.warning(
        "no room for arrays in %s (%s): they travel slowly, with the messages", folder, reason
    )


def _opened(path: str, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> LocalArray:
    return LocalArray(_view(_mapped(path), dtype, shape, offset))


@lru_cache(maxsize=1)  # the arrays of one message come one after another
def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _view(
    mapping: mmap.mmap, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int
) -> NDArray[Any]:
    # It holds on to the mapping, which ends with the last view, wherever the file has gone.
    return np.frombuffer(mapping, dtype, prod(shape), offset).reshape(shape)
