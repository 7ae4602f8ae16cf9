"""Quantises values to evenly spaced knobs of an interval by unbiased stochastic rounding.

An interval has `levels` knobs, evenly spaced, both ends among them. A value between two knobs goes
to the upper one with the probability of the share of the way that it has come, so its expectation
is the value itself. What travels is the number of the knob, the code, packed to as many bits as
there are knobs (`flwr_privacy.coding.packing`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.privacy.randomness import SecureRandom

from .packing import packed_bytes, unpack_into

__all__ = [
    "LARGEST_WIDTH",
    "MOST_LEVELS",
    "SMALLEST_WIDTH",
    "CodeSum",
    "Knobs",
    "float32_above",
    "span",
]

MOST_LEVELS = 2**16
"""The most knobs of an interval: codes of 16 bits."""

SMALLEST_WIDTH, LARGEST_WIDTH = 2.0**-100, 2.0**100
"""Between these the arithmetic stays in the range of float32."""

_BLOCK = 1 << 18  # values: larger ones leave the cache, for smaller ones the calls take too long
_FRACTION_BITS = 15  # with 16 bits of code they fill an int32
_TOLERANCE = 2.0  # in 2^-15 steps

Vectors = NDArray[np.float64]
Codes = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The knobs ``centre + width * (i / (levels - 1) - 1/2)``; the centre is given later.

    Parameters
    ----------
    width : float
        Width of the interval in the units of the values: 0, or from 2^-100 to 2^100.
    levels : int
        Number of knobs, from 2 to `MOST_LEVELS`.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    **Guarantee.** None: rounding hides a value within about a step of its code and no better. That
    the rounding is random protects nobody either, see
    `flwr_privacy.simulations.research.mspdq.theory.quantizer_delta`.

    Examples
    --------
    >>> knobs = Knobs(width=2.0, levels=5)
    >>> codes, saturated = knobs.encode(np.array([-1.0, 0.5, 7.0]), 0.0, SecureRandom())
    >>> codes, saturated, knobs.decode(codes, 0.0)
    (array([0, 3, 4], dtype=uint8), 1, array([-1. ,  0.5,  1. ]))
    """

    width: float
    levels: int

    def __post_init__(self) -> None:
        check_integer("levels", self.levels, minimum=2, maximum=MOST_LEVELS)
        width = check_number("width", self.width)
        if width != 0 and not SMALLEST_WIDTH <= width <= LARGEST_WIDTH:
            raise InvalidParameterError("width", width, "0, or a number from 2**-100 to 2**100")

    @classmethod
    def between(cls, low: float, high: float, levels: int) -> tuple["Knobs", float]:
        """Return the knobs from `low` to `high`, and their centre.

        Examples
        --------
        >>> Knobs.between(1.0, 2.0, 5)
        (Knobs(width=1.0, levels=5), 1.5)
        """
        return cls(width=high - low, levels=levels), low + (high - low) / 2

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (self.levels - 1).bit_length()

    @property
    def step(self) -> float:
        """Distance of two knobs."""
        return self.width / (self.levels - 1)

    def encode(
        self, values: NDArray[np.floating[Any]], centre: float | Vectors, random: SecureRandom
    ) -> tuple[Codes, int]:
        """Round values to knobs at random without changing their expectation.

        Parameters
        ----------
        values : ndarray of float32 or float64, shape (d,)
            What is rounded.
        centre : float or ndarray of float64, shape (d,)
            Centre of each value's interval.
        random : SecureRandom
            Where the random bits come from, 15 for each value.

        Returns
        -------
        codes : ndarray of uint8, of uint16 where there are more than 256 levels, shape (d,)
            The numbers of the knobs.
        saturated : int
            How many values lay outside of the interval. They get the knob at the end, and their
            expectation does not stay.

        Raises
        ------
        InvalidParameterError
            If a value is not finite.

        Notes
        -----
        Let y be the value's distance from the lowest knob in steps, times 2^15, rounded to an
        integer, and R uniform on the integers below 2^15. The code is ``floor((y + R) / 2^15)``,
        whose expectation is y / 2^15. y is computed in float32 for codes of 8 bits, otherwise in
        float64, and is off by at most 1.5: the expectation stays to 2^-14 of a step.
        """
        flat = np.ascontiguousarray(values).reshape(-1)
        codes: Codes = np.empty(flat.size, np.uint8 if self.levels <= 256 else np.uint16)
        if self.width == 0:
            codes.fill(0)
            return codes, int(np.count_nonzero(flat != centre))
        scale = 2.0**_FRACTION_BITS * (self.levels - 1) / self.width
        end = 2.0**_FRACTION_BITS * (self.levels - 1)
        shift = end / 2 + 0.5  # the cast rounds down
        if not isinstance(centre, np.ndarray):
            # As exactly as the values' precision has it; what is missing is made up for at the end.
            near = float(flat.dtype.type(centre))
            shift += (near - centre) * scale
            centre = near
        size = min(_BLOCK, flat.size)
        places: NDArray[Any] = np.empty(size, np.float32 if self.levels <= 256 else np.float64)
        words, noise = np.empty(size, np.int32), np.empty(size, np.uint16)
        saturated = 0
        for start in range(0, flat.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            part = flat[block]
            y, n, r = places[: part.size], words[: part.size], noise[: part.size]
            around = centre[block] if isinstance(centre, np.ndarray) else centre
            with np.errstate(over="ignore", invalid="ignore"):
                np.subtract(part, around, out=y, casting="same_kind")
                y *= scale
                y += shift
            if not 0 <= y.min() <= y.max() < end + 1:
                saturated += _clip(y, end, part)
            np.copyto(n, y, casting="unsafe")
            random.fill(r)
            r >>= 16 - _FRACTION_BITS
            n += r
            n >>= _FRACTION_BITS
            np.copyto(codes[block], n, casting="unsafe")
        return codes, saturated

    def decode(self, codes: Codes, centre: float | Vectors) -> Vectors:
        """Return the values of the knobs with some codes.

        Two parties with equal arguments get equal bits: each value is one product and two sums in
        float64, in this order.

        Parameters
        ----------
        codes : ndarray of unsigned integers, shape (d,)
            Numbers of knobs. They may come from an adversary.
        centre : float or ndarray of float64, shape (d,)
            Centre of each value's interval.

        Raises
        ------
        InvalidParameterError
            If there is no knob of such a number.
        """
        _check_codes(codes, self.levels)
        values: Vectors = codes.astype(np.float64)
        values *= self.step
        values += centre
        values -= self.width / 2
        return values


class CodeSum:
    """The weighted sum of the packed codes of several parties.

    The sum is of integers, so it is the same in any order, and the same as under a secure sum.

    Parameters
    ----------
    size : int
        Codes of a party.
    levels : int
        Number of knobs.
    weights : int
        Sum of all weights that will be added; it decides the width of the integers.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> codes = CodeSum(size=3, levels=16, weights=3)
    >>> codes.add(np.array([33, 3], np.uint8), weight=1)
    >>> codes.add(np.array([33, 3], np.uint8), weight=2)
    >>> codes.total
    array([3, 6, 9], dtype=uint8)
    """

    def __init__(self, *, size: int, levels: int, weights: int) -> None:
        check_integer("size", size, minimum=0)
        check_integer("levels", levels, minimum=2, maximum=MOST_LEVELS)
        check_integer("weights", weights, minimum=1, maximum=2**40)
        self.levels = levels
        self.bits = (levels - 1).bit_length()
        self._room = weights
        self.total: Codes = np.zeros(size, np.min_scalar_type(weights * (levels - 1)))

    def add(self, packed: NDArray[np.uint8], *, weight: int = 1) -> None:
        """Add the codes of one party.

        Parameters
        ----------
        packed : ndarray of uint8, shape (packed_bytes(size, bits),)
            What `flwr_privacy.coding.packing.pack` made of its codes. They may come from an
            adversary.
        weight : int, default 1
            How often they count.

        Raises
        ------
        InvalidParameterError
            If the weights become more than was announced, or there is no knob of such a number.
        ValueError
            If the bytes are not the packing of so many codes. The sum is unchanged then.
        """
        check_integer("weight", weight, minimum=1, maximum=self._room)
        if packed.dtype != np.uint8 or packed.shape != (packed_bytes(self.total.size, self.bits),):
            raise ValueError(
                f"{packed.dtype} of shape {packed.shape}: expected uint8, "
                f"{packed_bytes(self.total.size, self.bits)} bytes"
            )
        if self.levels < 2**self.bits:  # found half-way it would be too late
            for _, codes in self._unpacked(packed):
                _check_codes(codes, self.levels)
        for block, codes in self._unpacked(packed):
            if weight > 1:
                codes *= block.dtype.type(weight)
            block += codes
        self._room -= weight

    def _unpacked(self, packed: NDArray[np.uint8]) -> Iterator[tuple[Codes, Codes]]:
        """Yield the sum and the codes block by block."""
        scratch = np.empty(min(_BLOCK, self.total.size), self.total.dtype)
        # From the end: only the last block can still be refused, for the bits after its values.
        for start in reversed(range(0, self.total.size, _BLOCK)):
            block = self.total[start : start + _BLOCK]
            codes = scratch[: block.size]
            at = start * self.bits // 8
            unpack_into(packed[at : at + packed_bytes(block.size, self.bits)], self.bits, codes)
            yield block, codes


def span(values: NDArray[np.floating[Any]]) -> tuple[float, float]:
    """Return the least and the largest value, as float32 numbers rounded outwards.

    Raises
    ------
    InvalidParameterError
        If there are no values, or one is not finite or beyond float32.

    Examples
    --------
    >>> low, high = span(np.array([0.1, 0.5]))
    >>> low < 0.1, high
    (True, 0.5)
    """
    if values.size == 0:
        raise InvalidParameterError("values", "an empty array", "one value or more")
    return -float32_above(-float(values.min())), float32_above(float(values.max()))


def float32_above(value: float) -> float:
    """Return the least float32 that is not below a number.

    Raises
    ------
    InvalidParameterError
        If there is none, or the number is not finite.

    Examples
    --------
    >>> float32_above(0.5), float32_above(0.1) > 0.1
    (0.5, True)
    """
    with np.errstate(over="ignore"):
        nearest = np.float32(value)
        above = nearest if float(nearest) >= value else np.nextafter(nearest, np.float32(math.inf))
    if not np.isfinite(above):
        raise InvalidParameterError("value", value, "a finite number that float32 can hold")
    return float(above)


def _clip(y: NDArray[Any], end: float, values: NDArray[np.floating[Any]]) -> int:
    """Clip in place; return how many are outside by more than rounding errors."""
    if np.isnan(y).any() or not np.isfinite(values).all():
        raise InvalidParameterError("values", "an array with NaN or infinity", "finite values")
    outside = int(np.count_nonzero((y < -_TOLERANCE) | (y > end + 1 + _TOLERANCE)))
    np.clip(y, 0, end, out=y)
    return outside


def _check_codes(codes: Codes, levels: int) -> None:
    if codes.dtype.kind != "u":
        raise InvalidParameterError("codes", str(codes.dtype), "unsigned integers")
    if int(codes.max(initial=0)) >= levels:
        raise InvalidParameterError("codes", "a number beyond", f"numbers from 0 to {levels - 1}")
