"""Converts named arrays to one float64 vector and back."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError, ProtocolError

from .arrays import Arrays, is_finite

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The places of a model's arrays in one vector.

    Parameters
    ----------
    parts : dict
        Shape and dtype of each array, in their order.

    Examples
    --------
    >>> model = {"w": np.ones((2, 2), np.float32), "b": np.zeros(1, np.float32), "n": np.array(3)}
    >>> layout = Layout.of(model, ["w", "b"])
    >>> vector = layout.vector(model)
    >>> vector, layout.arrays(2 * vector)["b"]
    (array([1., 1., 1., 1., 0.]), array([0.], dtype=float32))
    """

    parts: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]

    @classmethod
    def of(cls, arrays: Arrays, names: Iterable[str]) -> "Layout":
        """Return the layout of some of the arrays."""
        return cls({name: (np.shape(arrays[name]), arrays[name].dtype) for name in names})

    @property
    def size(self) -> int:
        """Entries of the vector."""
        return sum(math.prod(shape) for shape, _ in self.parts.values())

    @property
    def largest(self) -> float:
        """The largest number that all of the arrays can hold."""
        return min(float(np.finfo(dtype.name).max) for _, dtype in self.parts.values())

    def vector(self, arrays: Arrays) -> NDArray[np.float64]:
        """Concatenate the arrays of the layout; other arrays are left out.

        Raises
        ------
        ProtocolError
            If one is missing, has another shape or is not of floats.
        DataError
            If one has NaN or infinity.
        """
        vector, place = np.empty(self.size, np.float64), 0
        for name, (shape, _) in self.parts.items():
            if name not in arrays:
                raise ProtocolError(f"there is no array '{name}'")
            array = np.asarray(arrays[name])
            if array.shape != shape or not np.issubdtype(array.dtype, np.floating):
                raise ProtocolError(
                    f"'{name}' is {array.dtype} of shape {array.shape}, not floats of shape {shape}"
                )
            part = vector[place : place + array.size]
            part[:] = array.reshape(-1)
            if not is_finite(part):
                raise DataError(f"'{name}' has NaN or infinity: it is not released")
            place += array.size
        return vector

    def arrays(self, vector: NDArray[np.floating]) -> dict[str, NDArray[np.generic]]:
        """Return the arrays of a vector, with the shapes and dtypes of the layout (copies)."""
        arrays, place = {}, 0
        for name, (shape, dtype) in self.parts.items():
            part = vector[place : place + math.prod(shape)]
            with np.errstate(over="ignore"):
                arrays[name] = part.astype(dtype).reshape(shape)
            place += part.size
        return arrays
