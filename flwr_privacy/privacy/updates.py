"""Computes a client's update of the floating-point weights, and clips it.

Under a private scheme integer arrays and the running statistics of normalisation layers stay where
they are: they cannot be clipped and noised like weights. The aggregate has the server's values.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError, check_number
from flwr_privacy.wire.arrays import Arrays, is_finite, sum_of_squares

from .running_statistics import is_statistic

__all__ = [
    "SMALLEST_NORM",
    "Update",
    "check_names",
    "check_start",
    "clip",
    "kept_back",
    "released_names",
]

_BLOCK = 1 << 14  # elements; their scratch stays in the cache, and needs no fresh pages

SMALLEST_NORM = 1e-100
"""Least norm to clip to; below, products lose digits."""

_LEAST_SQUARES = 2.0**-800
"""Sums of squares between this and its inverse lose nothing to the range of float64."""


def check_names(arrays: Arrays, keep_back: Collection[str]) -> None:
    """Refuse names to keep back that a model has not.

    Raises
    ------
    InvalidParameterError
        If there is one.
    """
    if unknown := sorted(set(keep_back) - set(arrays)):
        raise InvalidParameterError("keep_back", unknown, f"names of the model: {list(arrays)}")


def released_names(
    arrays: Arrays, keep_back: Collection[str] = (), *, statistics: bool = False
) -> list[str]:
    """Return the names of the arrays whose updates a private scheme releases.

    Parameters
    ----------
    arrays : Mapping of str to ndarray
        A model.
    keep_back : collection of str
        Further names to leave out, e.g. statistics under names that do not tell.
    statistics : bool, default False
        Whether the running statistics of normalisation layers are released.

    Raises
    ------
    InvalidParameterError
        If nothing is left, or `keep_back` has a name that is not in the model.

    Examples
    --------
    >>> model = {"w": np.zeros(2), "bn.running_var": np.ones(2), "steps": np.array(3)}
    >>> released_names(model)
    ['w']
    """
    check_names(arrays, keep_back)
    names = [
        name
        for name, array in arrays.items()
        if np.issubdtype(np.asarray(array).dtype, np.floating)
        and (statistics or not is_statistic(name))
        and name not in keep_back
    ]
    if not names:
        raise InvalidParameterError(
            "arrays", list(arrays), "a model with floating-point weights that are not kept back"
        )
    return names


def kept_back(arrays: Arrays, keep_back: Collection[str] | None) -> list[str]:
    """Return the sorted names of the arrays of which nothing is released; none of no model.

    Examples
    --------
    >>> kept_back({"w": np.zeros(2), "bn.running_var": np.ones(2), "steps": np.array(3)}, None)
    ['bn.running_var', 'steps']
    """
    return sorted(set(arrays).difference(released_names(arrays, keep_back or ()))) if arrays else []


def check_start(start: Arrays, names: Iterable[str]) -> None:
    """Refuse a start model with NaN or infinity, before the training.

    Raises
    ------
    ProtocolError
        If an array has NaN or infinity.
    """
    for name in names:
        if not is_finite(start[name]):
            raise ProtocolError(f"the model that was sent has NaN or infinity in '{name}'")


@dataclass(frozen=True)
class Update:
    """The difference between a trained model and the one it started from, as one vector.

    Parameters
    ----------
    vector : (d,) float64
        Differences of the released arrays, one after the other.
    shapes : dict
        Shape of each released array, in that order.
    factor : float, default 1.0
        What the difference was multiplied by to clip it; 1 where nothing had to be done.
    """

    vector: NDArray[np.float64]
    shapes: dict[str, tuple[int, ...]]
    factor: float = 1.0

    @classmethod
    def between(
        cls,
        start: Arrays,
        trained: Arrays,
        names: Iterable[str],
        *,
        clipping_norm: float | None = None,
    ) -> "Update":
        """Return the update of some arrays.

        Parameters
        ----------
        start, trained : Mapping of str to ndarray
            The model before and after.
        names : iterable of str
            Which arrays.
        clipping_norm : float, optional
            Norm to clip the update to, as `clip` does.

        Raises
        ------
        ProtocolError
            If an array is missing or has another shape than at the start.
        DataError
            If the update has NaN or infinity.
        InvalidParameterError
            As `clip`.
        """
        shapes = {name: np.shape(start[name]) for name in names}
        vector = np.empty(sum(map(math.prod, shapes.values())), np.float64)
        place, squares = 0, 0.0
        for name, shape in shapes.items():
            if name not in trained:
                raise ProtocolError(f"the training returned no array '{name}'")
            array = np.asarray(trained[name])
            if array.shape != shape or not np.issubdtype(array.dtype, np.floating):
                raise ProtocolError(
                    f"the training returned '{name}' as {array.dtype} of shape {array.shape}, "
                    f"not as floats of shape {shape}"
                )
            part = vector[place : place + array.size]
            more = _subtract(array.reshape(-1), start[name].reshape(-1), part)
            # Squares with a finite sum are finite; those of large numbers may not be.
            if not (math.isfinite(more) or np.isfinite(part).all()):
                raise DataError(
                    f"the update of '{name}' has NaN or infinity: it is not released; a smaller "
                    "learning rate may help"
                )
            place, squares = place + array.size, squares + more
        factor = 1.0 if clipping_norm is None else _clip(vector, clipping_norm, squares)
        return cls(vector, shapes, factor)

    def arrays(self, vector: NDArray[np.generic]) -> dict[str, NDArray[np.generic]]:
        """Return a vector of the same length, e.g. of codes, as arrays by name (views)."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])[:-1]
        parts = np.split(vector, ends)
        return {n: p.reshape(s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}


def _subtract(
    minuend: NDArray[np.generic], subtrahend: NDArray[np.generic], out: NDArray[np.float64]
) -> float:
    """Write a difference, in float64 whatever the precision of the two; return its sum of squares.

    The sum is infinite or NaN if the squares are.
    """
    squares = 0.0
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        # In blocks that stay in the cache; `subtract(..., dtype=float64)` takes twice as long.
        scratch = np.empty(min(_BLOCK, out.size), np.float64)
        for begin in range(0, out.size, _BLOCK):
            part = out[begin : begin + _BLOCK]
            other = scratch[: part.size]
            np.copyto(part, minuend[begin : begin + _BLOCK], casting="unsafe")
            np.copyto(other, subtrahend[begin : begin + _BLOCK], casting="unsafe")
            part -= other
            squares += float(np.multiply(part, part, out=other).sum())
    return squares


def clip(vector: NDArray[np.float64], norm: float) -> float:
    """Scale a finite vector in place so that its L2 norm is at most `norm`; return the factor.

    The factor is 1 where nothing had to be done, and for the zero vector. The bound is strict: what
    rounding may add to a sum of d squares, a relative ``d * 2**-52``, is taken off.

    Raises
    ------
    InvalidParameterError
        If `norm` is no finite number of at least `SMALLEST_NORM`.

    Examples
    --------
    >>> vector = np.array([3.0, 4.0])
    >>> round(clip(vector, 1.0), 9), vector.round(9)
    (0.2, array([0.6, 0.8]))
    """
    return _clip(vector, norm, _sum_of_squares(vector))


def _clip(vector: NDArray[np.float64], norm: float, squares: float) -> float:
    """Clip as `clip` does, for a vector whose sum of squares is known."""
    check_number("clipping_norm", norm, minimum=SMALLEST_NORM)
    allowed = norm * (1 - vector.size * 2.0**-52)
    scaled, bound, exponent = vector, allowed, 0
    if not _LEAST_SQUARES < squares < 1 / _LEAST_SQUARES:  # some overflowed, or vanished
        largest = float(max(vector.max(initial=0.0), -vector.min(initial=0.0)))
        if largest == 0.0:
            return 1.0
        exponent = math.frexp(largest)[1]
        scaled = np.ldexp(vector, -exponent)
        squares = _sum_of_squares(scaled)
        try:
            bound = math.ldexp(allowed, -exponent)
        except OverflowError:  # far above the vector
            return 1.0
    length = math.sqrt(squares)
    if length <= bound:
        return 1.0
    np.multiply(scaled, allowed / length, out=vector)
    return math.ldexp(allowed / length, -exponent)


def _sum_of_squares(vector: NDArray[np.float64]) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return sum_of_squares(vector)
