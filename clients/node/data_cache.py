"""Caches validated client data in bounded memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

__all__ = ["DataCache"]

_ROOM = 2**31  # bytes that a process remembers, of all its clients together


class Sized(Protocol):
    """An object that knows its size in bytes."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...


_Data = TypeVar("_Data", bound=Sized)


class DataCache(Generic[_Data]):
    """A bounded cache of the prepared data of a process's clients, least recently used first out.

    It only saves work: deployed, every message has a process of its own and finds it empty.
    """

    def __init__(self, room: int = _ROOM) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Data] = OrderedDict()

    def get(self, key: Hashable, prepare: Callable[[], _Data]) -> _Data:
        """Return the data under a key; prepare them if they are not in the cache."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        data = prepare()
        with self._lock:
            self._kept[key] = data
            while len(self._kept) > 1 and sum(d.size for d in self._kept.values()) > self._room:
                self._kept.popitem(last=False)
        return data
