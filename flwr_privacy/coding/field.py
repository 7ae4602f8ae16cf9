"""Computes modulo a prime below 2**31: exact matrix products at the speed of BLAS.

An element is an integer in ``[0, p)``, in an array of any integer dtype; what comes back is int64.

A float64 holds every integer up to 2**53. So elements are centred, at most ``h = (p - 1) / 2`` in
absolute value, one factor is split into two limbs ``a = a1 w + a0`` of at most l = about
``sqrt(h / 2)``, and ``a1 @ b`` and ``a0 @ b`` are two float products (dgemm) over parts of the
inner dimension that are so short that no sum of products, each at most ``l h``, passes 2**53, in
any order. For 2**31 - 1 a part has 360 terms. A prime whose centred elements leave room for sums of
256 products, up to about 2**23.5, needs no limbs: one product does.

``r(x) = x - p round(x (1/p))`` reduces the floats. The product with the rounded inverse is off by
at most 2**-52 of itself, so the multiple of p that is taken off is at most ``p / 2 + |x| / 2**52``
from x. Then ``|r(x)| <= h + 2``, and all of it is exact while ``|x| + 2 p <= 2**53``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_integer
from flwr_privacy.privacy.randomness import SecureRandom

from .packing import pack, packed_bytes, unpack
from .primes import is_prime, largest_prime_below

__all__ = ["MERSENNE_31", "Elements", "Operand", "PrimeField"]

MERSENNE_31 = 2**31 - 1
"""The largest prime that a field can have."""

Elements = NDArray[np.integer[Any]]
"""Integers of any width; in ``[0, p)`` where a function does not say otherwise."""

_EXACT = 2**53  # every integer up to here is a float64
_SHORTEST = 256  # terms of a sum: where fewer fit, a factor is split
_LONGEST = 2**16  # terms of a sum: keeps sums of the smallest primes far below 2**53
_BLOCK = 1 << 18  # elements at a time: they stay in a cache


@dataclass(frozen=True, eq=False, repr=False)
class Operand:
    """A matrix prepared for many products by `PrimeField.prepare`.

    It takes 8 bytes an element and limb. It is not shown: it may be secret.
    """

    p: int
    """The prime."""

    limbs: NDArray[np.float64]
    """One or two centred limbs, the high one first, shape (limbs, rows, columns)."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.limbs.shape[1], self.limbs.shape[2]


@dataclass(frozen=True)
class PrimeField:
    """The integers modulo a prime.

    Parameters
    ----------
    p : int, default 2**31 - 1
        A prime from 3 to 2**31 - 1. Products are fastest up to about 2**23.5.

    Raises
    ------
    InvalidParameterError
        If `p` is out of range or no prime.

    Examples
    --------
    >>> field = PrimeField(101)
    >>> field.matmul(np.array([[100, 2]]), np.array([[100], [50]]))
    array([[0]])
    >>> field.signed(np.array([49, 50, 51, 100]))
    array([ 49,  50, -50,  -1])
    """

    p: int = MERSENNE_31

    def __post_init__(self) -> None:
        check_integer("p", self.p, minimum=3, maximum=MERSENNE_31)
        if not is_prime(self.p):
            nearest = largest_prime_below(self.p)
            raise InvalidParameterError("p", self.p, f"a prime (the next below is {nearest})")

    @property
    def bits(self) -> int:
        """Bits of an element on the wire: 32, or fewer where 24 suffice."""
        return 32 if self.p.bit_length() > 24 else self.p.bit_length()

    def reduce(self, values: Elements) -> NDArray[np.int64]:
        """Return any integers modulo p, in ``[0, p)``.

        Raises
        ------
        InvalidParameterError
            If they are no integers.

        Examples
        --------
        >>> PrimeField(7).reduce(np.array([-1, 7, 15]))
        array([6, 0, 1])
        """
        given = _integers(values)
        if given.dtype != np.uint64:
            given = given.astype(np.int64, copy=False)
        p = given.dtype.type(self.p)
        # NumPy divides by a constant several times faster than it takes remainders.
        reduced = np.empty_like(given)
        np.floor_divide(given, p, out=reduced)
        reduced *= p  # may wrap around, and the difference back
        np.subtract(given, reduced, out=reduced)
        return reduced.astype(np.int64, copy=False)

    def signed(self, elements: Elements) -> NDArray[np.int64]:
        """Map each element to the integer nearest to zero that is congruent to it.

        Up to ``(p - 1) / 2`` an element stands for itself, beyond it for itself less p.
        """
        values = _integers(elements).astype(np.int64)
        values -= self.p * (values > self._half)
        return values

    def prepare(self, matrix: Elements) -> Operand:
        """Prepare a matrix for many products by splitting it into limbs once.

        Parameters
        ----------
        matrix : ndarray of integers, shape (rows, columns)
            Elements of the field.

        Raises
        ------
        InvalidParameterError
            If there are not two axes, or a value is no element of the field.
        """
        whole = self._centred(_matrix("matrix", matrix))
        if self._limbs == 1:
            return Operand(self.p, whole[None])
        # Two limbs of about half the bits: their products add up exactly in float64.
        limbs = np.empty((2, *whole.shape))
        np.multiply(whole, 1 / self._radix, out=limbs[0])
        np.rint(limbs[0], out=limbs[0])
        np.multiply(limbs[0], -self._radix, out=limbs[1])
        limbs[1] += whole
        return Operand(self.p, limbs)

    def matmul(self, A: Elements | Operand, B: Elements | Operand) -> NDArray[np.int64]:
        """Return the matrix product of elements, exactly.

        Parameters
        ----------
        A : ndarray of integers or Operand, shape (m, k)
        B : ndarray of integers or Operand, shape (k, n)
            Elements of the field. A matrix that many products share is faster as `prepare` returns
            it; one of two suffices.

        Returns
        -------
        ndarray of int64, shape (m, n)

        Raises
        ------
        InvalidParameterError
            If the shapes do not fit, a value is no element of the field, or an operand was made
            ready for another.
        """
        left, right = self._factor("A", A), self._factor("B", B)
        if left.shape[1] != right.shape[0]:
            raise InvalidParameterError(
                "B", f"{right.shape[0]} rows", f"{left.shape[1]}, as A has columns"
            )
        product = np.empty((left.shape[0], right.shape[1]), np.int64)
        # One factor is split into limbs, as a whole; the other is made ready block by block.
        if isinstance(left, Operand) or (
            not isinstance(right, Operand) and math.prod(left.shape) <= math.prod(right.shape)
        ):
            split = left if isinstance(left, Operand) else self.prepare(left)
            for columns in _blocks(product.shape[1], max(left.shape)):
                self._multiply(
                    split.limbs, self._whole(right, columns, 1)[None], product[:, columns]
                )
        else:
            split = right if isinstance(right, Operand) else self.prepare(right)
            for rows in _blocks(product.shape[0], max(right.shape)):
                self._multiply(self._whole(left, rows, 0)[None], split.limbs, product[rows])
        return product

    def uniform(self, shape: int | tuple[int, ...], random: SecureRandom) -> NDArray[np.int64]:
        """Return independent uniform elements.

        Parameters
        ----------
        shape : int or tuple of int
            Shape of the result.
        random : SecureRandom
            Where the bits come from. Numbers of as many bits as p has are drawn until they are
            below p.
        """
        elements = np.empty(shape, np.int64)
        flat = elements.reshape(-1)
        mask = np.uint32((1 << self.p.bit_length()) - 1)
        for start in range(0, flat.size, _BLOCK):
            room = flat[start : start + _BLOCK]
            words = np.empty(room.size, np.uint32)
            random.fill(words)
            words &= mask
            # Drawn again, not reduced: remainders of uniform words are not uniform.
            refused = np.flatnonzero(words >= self.p)
            while refused.size:
                again = np.empty(refused.size, np.uint32)
                random.fill(again)
                again &= mask
                words[refused] = again
                refused = refused[again >= self.p]
            room[:] = words
        return elements

    def to_bytes(self, elements: Elements) -> bytes:
        """Encode elements with `bits` bits each, least significant first, in C order.

        Raises
        ------
        InvalidParameterError
            If a value is no element of the field.
        """
        given = _integers(elements).reshape(-1)
        self._check(given)
        words = given.astype("<u4")
        return words.tobytes() if self.bits == 32 else pack(words, self.bits).tobytes()

    def from_bytes(self, data: bytes, size: int) -> NDArray[np.int64]:
        """Decode the elements that `to_bytes` encoded. The bytes may come from an adversary.

        Parameters
        ----------
        data : bytes
            What `to_bytes` returned.
        size : int
            Number of elements, >= 0.

        Raises
        ------
        InvalidParameterError
            If `size` is negative.
        ProtocolError
            If there are not as many bytes, or a value is no element of the field.
        """
        expected = packed_bytes(size, self.bits)
        if len(data) != expected:
            raise ProtocolError(
                f"{len(data)} bytes: expected {expected} for {size} elements of {self.bits} bits"
            )
        if self.bits == 32:
            elements = np.frombuffer(data, "<u4").astype(np.int64)
        else:
            try:
                words = unpack(np.frombuffer(data, np.uint8), self.bits, size)
            except ValueError as error:
                raise ProtocolError(str(error)) from error
            elements = words.view(np.int64)
        if elements.max(initial=0) >= self.p:
            raise ProtocolError(
                f"a value that is no element of the field: expected 0 to {self.p - 1}"
            )
        return elements

    @cached_property
    def _half(self) -> int:
        return (self.p - 1) // 2

    @cached_property
    def _limbs(self) -> int:
        return 1 if self._half**2 * _SHORTEST <= _EXACT - 2 * self.p else 2

    @cached_property
    def _radix(self) -> int:
        """The weight of the high limb, so that both limbs have about the same largest value."""
        return math.isqrt(2 * self._half)

    @cached_property
    def _length(self) -> int:
        """Return the most terms of a sum of products of a limb and a centred element.

        The reduced sums of the high limbs, times the radix, are added to those of the low limbs.
        """
        if self._limbs == 1:
            return min(_LONGEST, (_EXACT - 2 * self.p) // self._half**2)
        limb = max(self._radix // 2, (self._half + self._radix // 2) // self._radix)
        carried = self._radix * (self._half + 2)
        return min(_LONGEST, (_EXACT - 2 * self.p - carried) // (limb * self._half))

    def _check(self, elements: Elements) -> None:
        """Refuse values outside ``[0, p)``; they may be secret and are not named."""
        if elements.size and not 0 <= elements.min() <= elements.max() < self.p:
            raise InvalidParameterError(
                "elements", "a value outside", f"integers from 0 to p - 1 = {self.p - 1}"
            )

    def _centred(self, elements: Elements) -> NDArray[np.float64]:
        """Return elements between minus and plus `_half`."""
        self._check(elements)
        values = elements.astype(np.float64)
        multiples = values * (1 / self.p)
        np.rint(multiples, out=multiples)
        multiples *= self.p
        values -= multiples
        return values

    def _factor(self, parameter: str, matrix: Elements | Operand) -> Elements | Operand:
        if not isinstance(matrix, Operand):
            return _matrix(parameter, matrix)
        if matrix.p != self.p:
            raise InvalidParameterError(
                parameter, f"an operand modulo {matrix.p}", f"one modulo p = {self.p}"
            )
        return matrix

    def _whole(self, matrix: Elements | Operand, part: slice, axis: int) -> NDArray[np.float64]:
        """Return some rows (axis 0) or columns (1) of a matrix, centred and without limbs."""
        if isinstance(matrix, Operand):
            limbs = matrix.limbs[:, part] if axis == 0 else matrix.limbs[:, :, part]
            whole: NDArray[np.float64] = limbs[0]
            return whole if len(limbs) == 1 else whole * self._radix + limbs[1]
        return self._centred(matrix[part] if axis == 0 else matrix[:, part])

    def _multiply(
        self, left: NDArray[np.float64], right: NDArray[np.float64], out: NDArray[np.int64]
    ) -> None:
        """Write the product of two matrices, one of which has limbs, the other being centred."""
        inner = left.shape[2]
        parts = max(1, -(-inner // self._length))
        sums = np.empty((self._limbs, *out.shape))
        spare = np.empty(out.shape)
        total = sums[-1]
        for i in range(parts):
            part = slice(i * inner // parts, (i + 1) * inner // parts)
            if i == 1:
                total = sums[-1].copy()
            np.matmul(left[:, :, part], right[:, part], out=sums)
            low = sums[-1]
            if self._limbs == 2:
                self._reduce(sums[0], spare)
                sums[0] *= self._radix
                low += sums[0]
            self._reduce(low, spare)
            if i:
                total += low
        if parts > 1:
            self._reduce(total, spare)
        np.copyto(out, total, casting="unsafe")
        out += self.p & (out >> 63)

    def _reduce(self, values: NDArray[np.float64], spare: NDArray[np.float64]) -> None:
        """Reduce values in place to at most ``h + 2`` in absolute value, see above."""
        np.multiply(values, 1 / self.p, out=spare)
        np.rint(spare, out=spare)
        spare *= self.p
        values -= spare


def _integers(values: Elements) -> Elements:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise InvalidParameterError("elements", f"an array of {array.dtype}", "integers")
    return array


def _matrix(parameter: str, matrix: Elements) -> Elements:
    array = _integers(matrix)
    if array.ndim != 2:
        raise InvalidParameterError(parameter, f"an array of shape {array.shape}", "two axes")
    return array


def _blocks(length: int, width: int) -> Iterator[slice]:
    """Yield parts of an axis such that one times the longest other axis is about a block."""
    step = max(64, _BLOCK // max(1, width))
    for start in range(0, length, step):
        yield slice(start, start + step)
