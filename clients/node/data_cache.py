"""Caches validated client data in bounded memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import Moments, moments

__all__ = ["DataCache", "PreparedData"]

_ROOM = 2**31  # bytes that a process remembers, of all its clients together


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Validated features and labels of a client.

    Parameters
    ----------
    features : (m, d) float64
        X.
    labels : (m, o) float64
        Y.
    """

    features: NDArray[np.float64]
    labels: NDArray[np.float64]

    @cached_property
    def moments(self) -> Moments:
        """X^T X and X^T Y, cached after the first use."""
        return moments(self.features, self.labels)

    @property
    def _is_tall(self) -> bool:
        records, features = self.features.shape
        return bool(features <= records)

    def take_moments(self) -> Moments:
        """Return X^T X and X^T Y; cache them only if they are not larger than the data."""
        return self.moments if self._is_tall else moments(self.features, self.labels)

    def gradient(self, model: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gradient ``X^T (X W - Y)`` (ACFL, (7)), computed in the cheaper way.

        Examples
        --------
        >>> data = PreparedData(np.array([[1.0], [2.0]]), np.array([[1.0], [0.0]]))
        >>> data.gradient(np.array([[1.0]]))
        array([[4.]])
        """
        if self._is_tall:
            own = self.moments
            return own.features @ model - own.labels
        return self.features.T @ (self.features @ model - self.labels)

    @property
    def size(self) -> int:
        """Bytes that the data and their moments take."""
        features, labels = int(self.features.shape[1]), int(self.labels.shape[1])
        own = 8 * features * (features + labels) if self._is_tall else 0
        return self.features.nbytes + self.labels.nbytes + own


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
