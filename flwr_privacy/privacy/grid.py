"""The grid of all noised values: multiples of a power of two, int32 codes, exact sums.

A value is a multiple of the grid's step. Noise is added to the integer code, never to a float, and
a sum of codes is the same in any order.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.wire.arrays import Arrays

from .averaging import EvenWeights, ReplyRefusedError, WeightedMean
from .failures import FAILED_NAME

__all__ = [
    "CODE_LIMIT",
    "MOST_WEIGHT",
    "CodeGrid",
    "EvenMean",
    "GridMean",
    "check_codes",
    "check_gap",
    "saturated",
]

CODE_LIMIT = 2**31 - 1
"""Codes lie between minus this and this."""

MOST_WEIGHT = 2**62 // CODE_LIMIT
"""Largest sum of weights: times `CODE_LIMIT` it is half of what int64 holds."""

_BLOCK = 1 << 14  # elements; their scratch stays in the cache, and needs no fresh pages

_Code = TypeVar("_Code", np.int32, np.int64)


@dataclass(frozen=True)
class CodeGrid:
    """The multiples of a power of two; a value on the grid is an integer code times the step.

    Parameters
    ----------
    exponent : int
        The step is ``2.0 ** exponent``; from -500 to 500.

    Examples
    --------
    >>> grid = CodeGrid(-2)
    >>> codes = grid.encode(np.array([0.99, -0.99]))
    >>> codes, grid.step * codes
    (array([ 3, -3]), array([ 0.75, -0.75]))
    """

    exponent: int

    def __post_init__(self) -> None:
        check_integer("grid", self.exponent, minimum=-500, maximum=500)

    @classmethod
    def below(cls, bound: float, *, bits: int) -> "CodeGrid":
        """Return the coarsest grid with at least ``2**bits`` steps up to `bound`.

        Examples
        --------
        >>> CodeGrid.below(1.5, bits=8)
        CodeGrid(exponent=-8)
        """
        return cls(math.frexp(bound)[1] - 1 - bits)

    @classmethod
    def holding(cls, reach: float) -> "CodeGrid":
        """Return the finest grid that has codes for all values up to `reach`.

        Examples
        --------
        >>> CodeGrid.holding(1.0)
        CodeGrid(exponent=-30)
        """
        # A code less for what rounding may add to a value at the end.
        return cls(math.frexp(reach / (CODE_LIMIT - 1))[1])

    @property
    def step(self) -> float:
        """Distance of two neighbours."""
        return 2.0**self.exponent

    @overload
    def encode(self, vector: NDArray[np.float64]) -> NDArray[np.int64]: ...

    @overload
    def encode(self, vector: NDArray[np.float64], out: NDArray[_Code]) -> NDArray[_Code]: ...

    def encode(self, vector: NDArray[np.float64], out: Any = None) -> Any:
        """Return the codes of a vector, truncated towards zero: its norm does not grow.

        Two vectors of d entries may come apart by up to ``step * sqrt(d)`` in L2.

        Parameters
        ----------
        vector : (d,) float64
            The vector.
        out : (d,) int32 or int64, optional
            Where the codes are written, by default a new array of int64. With
            ``vector.view(np.int64)`` they take the vector's place.

        Raises
        ------
        InvalidParameterError
            If a value is beyond `CODE_LIMIT` steps; `out` has some codes then.
        """
        codes = np.empty(vector.size, np.int64) if out is None else out
        scratch = np.empty(min(_BLOCK, vector.size), np.float64)
        for begin in range(0, vector.size, _BLOCK):
            part = vector[begin : begin + _BLOCK]
            # Exact: a power of two.
            steps = np.multiply(part, 2.0**-self.exponent, out=scratch[: part.size])
            if not -CODE_LIMIT <= steps.min() <= steps.max() <= CODE_LIMIT:
                raise InvalidParameterError(
                    "grid",
                    self.exponent,
                    f"a step that is not below the largest value / {CODE_LIMIT}",
                )
            np.copyto(codes[begin : begin + _BLOCK], steps, casting="unsafe")  # C's cast truncates
        return codes


def saturated(codes: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return noised codes as they travel; what is beyond `CODE_LIMIT` becomes `CODE_LIMIT`.

    A function of the noised value alone, so it costs no privacy.
    """
    return np.clip(codes, -CODE_LIMIT, CODE_LIMIT, out=codes).astype(np.int32)


class GridMean(WeightedMean):
    """Weighted mean of updates given as codes: int64 sums, the same in any order.

    Parameters
    ----------
    start : Mapping of str to ndarray
        The model that the updates start from.
    grid : CodeGrid
        What the codes mean.
    names : list of str
        Which arrays of the model the updates are of. `finish` returns the others unchanged.
    failed_code : int, default 0
        Code of a training that failed (`flwr_privacy.privacy.failures`), where these are counted.

    Notes
    -----
    Weights are integers, and a reply is refused if the weights of all replies together times
    `CODE_LIMIT` could leave int64; so no sum ever overflows.

    Examples
    --------
    >>> mean = GridMean({"w": np.ones(2), "n": np.array(7)}, CodeGrid(-1), ["w"])
    >>> mean.accumulate("a", {"w": np.array([2, 4], np.int32)}, weight=1)
    >>> mean.accumulate("b", {"w": np.array([-2, 0], np.int32)}, weight=3)
    >>> mean.finish()
    {'w': array([0.5, 1.5]), 'n': array(7)}
    """

    sum_dtype = np.dtype(np.int64)

    def __init__(
        self, start: Arrays, grid: CodeGrid, names: list[str], *, failed_code: int = 0
    ) -> None:
        code = np.zeros((), np.int32)
        super().__init__({name: np.broadcast_to(code, np.shape(start[name])) for name in names})
        self._start = dict(start)
        self._grid = grid
        self._failed_code = failed_code
        if failed_code:
            self.template[FAILED_NAME] = ((1,), np.dtype(np.int32))

    @property
    def failed(self) -> float:
        """The noised number of failed trainings; 0 where they are not counted."""
        if not self._failed_code or not self.clients:
            return 0.0
        return float(self._sums[FAILED_NAME][0]) / self._failed_code

    def finish(self) -> dict[str, NDArray[np.generic]]:
        """Return the start plus the mean update, with the start's names and dtypes.

        Raises
        ------
        ZeroDivisionError
            If all weights are zero.
        """
        if self.weight == 0:
            raise ZeroDivisionError("the weights of all replies are zero")
        mean = {name: np.array(array, order="C") for name, array in self._start.items()}
        for name, sums in self._sums.items():
            if self._failed_code and name == FAILED_NAME:
                continue
            values: NDArray[Any] = mean[name].reshape(-1)
            total = sums.reshape(-1)
            for begin in range(0, total.size, _BLOCK):
                part = values[begin : begin + _BLOCK]
                update = np.asarray(total[begin : begin + _BLOCK] / self.weight)
                update *= self._grid.step  # exact: a power of two
                update += part
                part[:] = update
        return mean

    def _check_total(self, weight: float, clients: int) -> None:
        self._check_weight(weight)

    def _check_weight(self, weight: float) -> None:
        if not (weight >= 0 and float(weight).is_integer()):
            raise ReplyRefusedError("weight", f"{weight} is no whole number of at least 0")
        if self.weight + weight > MOST_WEIGHT:
            raise ReplyRefusedError("range", f"with weight {weight} the sum could leave 64 bits")


class EvenMean(EvenWeights, GridMean):
    """A `GridMean` in which every reply weighs 1, because its noise is scaled for that."""


def check_gap(grid: int, gap: float, *, charged: float) -> None:
    """Refuse a grid on which the noise of a release costs more than is charged for it.

    Raises
    ------
    InvalidParameterError
        If it does.
    """
    if gap > charged:
        allowed = (
            f"a finer grid (more grid_bits): epsilon {gap:.3g} of a release would be lost to it"
        )
        raise InvalidParameterError("grid", grid, allowed)


def check_codes(grid: int, largest: float) -> None:
    """Refuse a grid on which codes leave 32 bits.

    Raises
    ------
    InvalidParameterError
        If they do.
    """
    if largest > CODE_LIMIT:
        allowed = f"a coarser grid (less grid_bits): codes up to {largest:.3g} leave 32 bits"
        raise InvalidParameterError("grid", grid, allowed)
