"""Real numbers as elements of a prime field and back, without wrap-around.

A value is scaled by ``2**bits`` and rounded to an integer; a negative integer z stands in the field
as ``p + z``. Data are rounded to the nearest integer once. Weights are rounded at random in every
round, so that their mean is right.

A sum of products is exact in the field as long as its absolute value is at most ``(p - 1) / 2``.
A larger one wraps around, and no one would notice. `Scales` proves before a run that this cannot
happen, from bounds on the data and the weights.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), section 4.2. The paper takes a "sufficiently large" prime and has no bounds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.errors import FieldRangeError, InvalidParameterError, check_integer, check_number
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = [
    "Scales",
    "check_partial_sum",
    "dequantise",
    "equal_share",
    "quantise",
    "quantise_stochastic",
    "round_half_up",
    "round_stochastic",
]

MOST_BITS = 30
"""Of a scale: a value of 1 already fills half of the largest field."""

_SMALLEST = math.ulp(0.0)
_EXACT = 2**53  # float64 has all integers up to it

Integers = NDArray[np.int64]
Reals = NDArray[np.floating[Any]]


# Rounding


def round_half_up(z: Reals) -> Integers:
    """Round to the nearest integer, halves upwards: FedVS, section 4.2.

    NumPy's own rounding takes halves to the even neighbour.

    Examples
    --------
    >>> round_half_up(np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])).tolist()
    [-2, -1, 0, 1, 2, 3]
    """
    floor = np.floor(z)
    # Not floor(z + 0.5): that sum is itself rounded, and takes 0.49999999999999994 to 1.
    return floor.astype(np.int64) + (z - floor >= 0.5)


def round_stochastic(z: Reals, random: SecureRandom) -> Integers:
    """Round up with the probability of the fractional part, else down: FedVS, section 4.2.

    Parameters
    ----------
    z : ndarray
        Finite values, of absolute value below 2**53.
    random : SecureRandom
        Where the choices come from.

    Returns
    -------
    ndarray of int64
        In the shape of `z`. Each has the mean z up to 2**-53, and a variance of at most 1/4. An
        integer stays what it is.

    Examples
    --------
    >>> round_stochastic(np.array([-3.0, 0.0, 7.0]), SecureRandom()).tolist()
    [-3, 0, 7]
    """
    values = np.asarray(z, np.float64)
    floor = np.floor(values)
    uniform = (random.uint64(values.size) >> np.uint64(11)).reshape(values.shape)
    return floor.astype(np.int64) + (uniform < (values - floor) * _EXACT)


# Into the field and out of it


def quantise(x: Reals, bits: int, field: PrimeField) -> Integers:
    """Return data as elements of the field: ``round(2**bits * x)``, FedVS, section 4.2.

    Powers of the data are taken before, in the reals, and all have the same scale.

    Parameters
    ----------
    x : ndarray
        Finite values.
    bits : int
        Scale, 0 to 30.
    field : PrimeField
        The field.

    Returns
    -------
    ndarray of int64
        Elements from 0 to p - 1, in the shape of `x`.

    Raises
    ------
    FieldRangeError
        If a value is not finite, or beyond ``(p - 1) / 2`` when scaled. It shows no value.

    Examples
    --------
    >>> quantise(np.array([-1.3, -0.5, 0.25]), 7, PrimeField()).tolist()
    [2147483481, 2147483583, 32]
    """
    return _embed(round_half_up(_scaled(x, bits, field)), field)


def quantise_stochastic(w: Reals, bits: int, field: PrimeField, random: SecureRandom) -> Integers:
    """Return weights as elements of the field, rounded at random: FedVS, (3).

    Parameters
    ----------
    w : ndarray
        Finite values.
    bits : int
        Scale, 0 to 30.
    field : PrimeField
        The field.
    random : SecureRandom
        What the roundings come from.

    Returns
    -------
    ndarray of int64
        Elements from 0 to p - 1, in the shape of `w`.

    Raises
    ------
    FieldRangeError
        If a value is not finite, or beyond ``(p - 1) / 2`` when scaled. It shows no value.
    """
    return _embed(round_stochastic(_scaled(w, bits, field), random), field)


def dequantise(
    elements: NDArray[Any], *, scale_bits: int, field: PrimeField, divisor: int = 1
) -> NDArray[np.float64]:
    """Return the real values of elements of the field: FedVS, (7).

    Elements up to ``(p - 1) / 2`` are positive. The paper takes that largest one for negative; no
    sum within the proven range reaches it from below zero.

    Parameters
    ----------
    elements : ndarray of integers
        Elements from 0 to p - 1.
    scale_bits : int
        Scale: of a product the sum of both factors' bits, 0 to 60.
    field : PrimeField
        The field.
    divisor : int, default 1
        What the values are divided by: the number of clients where the aggregate is a mean.

    Examples
    --------
    >>> dequantise(np.array([128, 2**31 - 1 - 128]), scale_bits=7, field=PrimeField()).tolist()
    [1.0, -1.0]
    """
    check_integer("scale_bits", scale_bits, minimum=0, maximum=2 * MOST_BITS)
    check_integer("divisor", divisor, minimum=1)
    values = field.signed(elements).astype(np.float64)
    values *= math.ldexp(1.0, -scale_bits)
    values /= divisor
    return values


# Range


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The scales of data and weights, and their bounds.

    Parameters
    ----------
    data_bits, weight_bits : int, default 8
        Scales of the data and of the weights are 2 to these powers, 0 to 30.
    x_max : float, default 1.0
        Bound of the absolute value of the data and their powers, above 0.
    w_max : float, default 2.0
        Bound of the absolute value of the weights, above 0.

    Examples
    --------
    >>> Scales(data_bits=8, weight_bits=8).total_bits
    16
    """

    data_bits: int = 8
    weight_bits: int = 8
    x_max: float = 1.0
    w_max: float = 2.0

    def __post_init__(self) -> None:
        check_integer("data_bits", self.data_bits, minimum=0, maximum=MOST_BITS)
        check_integer("weight_bits", self.weight_bits, minimum=0, maximum=MOST_BITS)
        check_number("x_max", self.x_max, minimum=_SMALLEST)
        check_number("w_max", self.w_max, minimum=_SMALLEST)

    @property
    def total_bits(self) -> int:
        """Scale of a product of data and weights."""
        return self.data_bits + self.weight_bits

    def owners_share(self, width: int) -> int:
        """Return the largest absolute value of one owner's part of the sum, as an integer.

        Parameters
        ----------
        width : int
            Columns of the owner's expanded data, at least 1.

        Returns
        -------
        int
            ``width * (2**data_bits * x_max + 1/2) * (2**weight_bits * w_max + 1)``, rounded down.
            The parts of all owners add up to at most that of all columns together.
        """
        check_integer("width", width, minimum=1)
        return math.floor(width * _largest_product(self, self.data_bits, self.weight_bits))

    def check(self, widths: Iterable[int], field: PrimeField) -> None:
        """Refuse scales with which the sum over all owners could wrap around.

        Parameters
        ----------
        widths : iterable of int
            Columns of each owner's expanded data.
        field : PrimeField
            The field.

        Raises
        ------
        InvalidParameterError
            If the sum can be beyond ``(p - 1) / 2``. It names the largest sum of bits that fits.

        Examples
        --------
        >>> Scales(w_max=512).check([7532], PrimeField())
        Traceback (most recent call last):
        ...
        flwr_privacy.errors.InvalidParameterError: (data_bits, weight_bits) = (8, 8): expected a \
sum of at most 8, such as (4, 4), for 7532 columns with x_max = 1.0 and w_max = 512 modulo \
2147483647
        """
        width = sum(widths)
        if self.owners_share(width) <= (field.p - 1) // 2:
            return
        given = f"{width} columns with x_max = {self.x_max} and w_max = {self.w_max}"
        given += f" modulo {field.p}"
        fitting = self._fitting_bits(width, field.p)
        if fitting is None:
            allowed = f"smaller bounds or a larger prime: no scales fit {given}"
        else:
            allowed = f"a sum of at most {sum(fitting)}, such as {fitting}, for {given}"
        bits = (self.data_bits, self.weight_bits)
        raise InvalidParameterError("(data_bits, weight_bits)", bits, allowed)

    def _fitting_bits(self, width: int, p: int) -> tuple[int, int] | None:
        """Return the scales of the largest sum that fits; of several, the most like these."""
        difference = self.data_bits - self.weight_bits
        for total in range(2 * MOST_BITS, -1, -1):
            splits = range(max(0, total - MOST_BITS), min(total, MOST_BITS) + 1)
            for data in sorted(splits, key=lambda data: abs(2 * data - total - difference)):
                bound = width * _largest_product(self, data, total - data)
                if math.floor(bound) <= (p - 1) // 2:
                    return data, total - data
        return None


def equal_share(owners: int, field: PrimeField) -> int:
    """Return an equal part of the field's range for each owner: ``(p - 1) / (2 owners)``.

    It is what `check_partial_sum` has for a limit where no scales were proven to fit, as the
    weights are not kept within bounds.

    Parameters
    ----------
    owners : int
        Number of owners, at least 1.
    field : PrimeField
        The field.

    Examples
    --------
    >>> equal_share(10, PrimeField(101))
    5
    """
    return (field.p - 1) // (2 * check_integer("owners", owners, minimum=1))


def check_partial_sum(data: Integers, weights: Integers, limit: int) -> None:
    """Refuse rows whose products with the weights pass an owner's part of the proven sum.

    The owner does it on its own data before it deals weights, and tells no one what it found but by
    the error. With data and weights within their bounds the error cannot happen; an owner that does
    not keep its weights within them has this check alone.

    Parameters
    ----------
    data : (b, e) ndarray of int64
        Signed integers of the rows, no pads among them.
    weights : (e, h) ndarray of int64
        Signed integers.
    limit : int
        The owner's part: `Scales.owners_share` if `Scales.check` passed, else `equal_share`.

    Raises
    ------
    FieldRangeError
        If a product is larger. It shows no value.
    """
    largest = _largest(data) * _largest(weights) * len(weights)
    if largest <= limit:  # which makes the product needless
        return
    # Below 2**53 all that float64 adds is exact.
    if largest > _EXACT or _largest(data.astype(np.float64) @ weights.astype(np.float64)) > limit:
        raise FieldRangeError(
            f"an owner's part of the sum is beyond {limit}: the weights have left their bounds"
        )


def _scaled(values: Reals, bits: int, field: PrimeField) -> NDArray[np.float64]:
    """Return values times ``2**bits``, if their neighbouring integers are in the field's range."""
    check_integer("bits", bits, minimum=0, maximum=MOST_BITS)
    scaled = np.ldexp(np.asarray(values, np.float64), bits)
    if not np.all(np.abs(scaled) <= (field.p - 1) // 2):  # false of values that are no number
        raise FieldRangeError(
            f"a value is not finite, or too large for a scale of 2**{bits} modulo {field.p}"
        )
    return scaled


def _embed(integers: Integers, field: PrimeField) -> Integers:
    """Return elements for integers of absolute value up to ``(p - 1) / 2``, in place."""
    np.add(integers, field.p, out=integers, where=integers < 0)
    return integers


def _largest_product(scales: Scales, data_bits: int, weight_bits: int) -> Fraction:
    """Return a bound of one product's absolute value, with the scales' bounds but other bits."""
    data = (1 << data_bits) * Fraction(scales.x_max) + Fraction(1, 2)
    return data * ((1 << weight_bits) * Fraction(scales.w_max) + 1)


def _largest(values: NDArray[Any]) -> int:
    return int(np.abs(values).max(initial=0))
