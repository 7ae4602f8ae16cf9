"""Features that a linear regression can classify by: random Fourier features, the same everywhere.

"Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv, 2024) is
for linear regression only, and points at kernel embeddings for the rest. Classification by them,
with one-hot labels, is not in the paper.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.wire.identity import stream

__all__ = ["FeatureMap", "FourierFeatures", "accuracy", "predict"]

_SMALLEST = math.ulp(0.0)
_BLOCK = 2**20  # values of a block of records that are worked on at a time

Array = NDArray[np.float64]


class FeatureMap(Protocol):
    """What makes features of raw records: the same at all devices, and independent of the data."""

    @property
    def identity(self) -> str:
        """What names the map with all its settings; two maps with one identity are equal."""
        ...

    def __call__(self, raw: NDArray[Any]) -> Array:
        """Return the features (m, d) of m records."""
        ...


@dataclass(frozen=True)
class FourierFeatures:
    """Random Fourier features of a Gaussian kernel: ``sqrt(2 / D) cos(x Omega + b)``.

    Omega is normal with standard deviation ``1 / width``, b uniform on a full turn, both from the
    seed, which is public. The inner product of two records' features is near
    ``exp(-|x - x'|^2 / (2 width^2))``. A guarantee for an entry of the features is none for a raw
    value: one raw value moves all of them.

    Parameters
    ----------
    raw : int
        Values of a raw record, at least 1.
    features : int
        Number of features D, at least 1.
    width : float
        Width of the kernel in units of the raw values, above 0.
    seed : int
        Seed of the map.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> embed = FourierFeatures(raw=64, features=200, width=2, seed=0)
    >>> embed(np.zeros((3, 8, 8))).shape, embed.identity
    ((3, 200), 'fourier raw=64 features=200 width=2 seed=0')
    """

    raw: int
    features: int
    width: float
    seed: int

    def __post_init__(self) -> None:
        check_integer("raw", self.raw, minimum=1)
        check_integer("features", self.features, minimum=1)
        check_number("width", self.width, minimum=_SMALLEST)
        check_integer("seed", self.seed)

    @property
    def identity(self) -> str:
        """All settings as a text."""
        width = repr(float(self.width)).removesuffix(".0")
        return f"fourier raw={self.raw} features={self.features} width={width} seed={self.seed}"

    @property
    def bound(self) -> float:
        """Bound of the absolute value of a feature, ``sqrt(2 / D)``."""
        return math.sqrt(2 / self.features)

    @property
    def norm(self) -> float:
        """Bound of the L2 norm of a record's features, ``sqrt(2)``."""
        return math.sqrt(2)

    def __call__(self, raw: NDArray[Any]) -> Array:
        """Return the features of some records.

        Parameters
        ----------
        raw : ndarray
            Shape (m, ...), with as many real values in each record as the map is for.

        Returns
        -------
        ndarray
            Shape (m, D), float64.

        Raises
        ------
        InvalidParameterError
            If the records have another size.
        """
        if raw.ndim < 2 or math.prod(raw.shape[1:]) != self.raw:
            raise InvalidParameterError(
                "raw", raw.shape[1:], f"records of {self.raw} values, one after the other"
            )
        flat = raw.reshape(len(raw), self.raw)
        directions, offsets = _projection(self.raw, self.features, self.width, self.seed)
        result = np.empty((len(flat), self.features))
        step = max(1, _BLOCK // (self.raw + self.features))
        for start in range(0, len(flat), step):
            part = result[start : start + step]
            np.matmul(flat[start : start + step].astype(np.float64), directions, out=part)
            part += offsets
            np.cos(part, out=part)
        result *= self.bound
        return result


def predict(W: Array, X: Array) -> NDArray[np.int64]:
    """Return the class of each record: the column of ``X W`` that is largest, the first of equals.

    Parameters
    ----------
    W : ndarray
        Model, shape (d, classes).
    X : ndarray
        Features, shape (m, d).

    Examples
    --------
    >>> predict(np.eye(2), np.array([[0.2, 0.1], [0.0, 1.0]])).tolist()
    [0, 1]
    """
    classes: NDArray[np.int64] = np.argmax(X @ W, axis=1).astype(np.int64)
    return classes


def accuracy(W: Array, X: Array, labels: ArrayLike) -> float:
    """Return the share of records whose class is predicted.

    Parameters
    ----------
    W, X
        As in `predict`.
    labels : array_like
        The classes, integers, shape (m,), at least one.

    Raises
    ------
    InvalidParameterError
        If there is not one label for each record.
    """
    values = np.asarray(labels)
    if values.shape != (len(X),) or len(X) == 0:
        raise InvalidParameterError("labels", values.shape, "one integer for each record")
    return float(np.mean(predict(W, X) == values))


@lru_cache(maxsize=8)
def _projection(raw: int, features: int, width: float, seed: int) -> tuple[Array, Array]:
    """Return Omega (raw, features) and b (features,); both may be shared and are read-only."""
    random = stream(seed, "fourier features", raw, features)
    directions = random.standard_normal((raw, features)) / width
    offsets = random.uniform(0.0, 2 * math.pi, features)
    directions.flags.writeable = False
    offsets.flags.writeable = False
    return directions, offsets
