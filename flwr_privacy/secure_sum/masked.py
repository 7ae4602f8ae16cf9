"""Builds masked vectors of codes and a weight, and adds them up."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from flwr_privacy.coding.packing import pack, packed_bytes, unpack_into
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.averaging import (
    EvenWeights,
    Metrics,
    ReplyRefusedError,
    StateFields,
    WeightedMean,
)
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.parts import PART, in_parts

from .settings import Bounds

__all__ = ["MASKED", "MaskedSum", "Residues", "add_masks", "residues", "values_of", "vector_size"]

MASKED = "masked"
"""Name of the array in a client's reply."""

Residues = NDArray[np.unsignedinteger[Any]]

_ZEROS = memoryview(bytes(1 << 16))  # what is encrypted; small enough to stay in the cache
_BLOCK = 1 << 14  # codes at a time, likewise
_CIPHER_BLOCK = 16  # bytes


def word(bits: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that holds residues modulo ``2**bits``."""
    return np.dtype(next(f"<u{size}" for size in (1, 2, 4, 8) if bits <= 8 * size))


def vector_size(mean: WeightedMean) -> int:
    """Return the length of the vectors that are summed in place of replies.

    These are the codes of all arrays of the template, and the weight.
    """
    return 1 + sum(math.prod(shape) for shape, _ in mean.template.values())


def residues(arrays: Mapping[str, NDArray[np.generic]], weight: int, bounds: Bounds) -> Residues:
    """Return the vector that a client will mask: its codes times its weight, then the weight.

    Parameters
    ----------
    arrays : Mapping of str to ndarray
        Codes, int32 or int64; the arrays follow one another in their order.
    weight : int
        The client's weight.
    bounds : Bounds
        What codes and weight must keep to.

    Returns
    -------
    ndarray of `word`, shape (d,)
        Residues modulo ``2**bounds.modulus_bits``.

    Raises
    ------
    InvalidParameterError
        If they do not: a sum never wraps or clips silently. The message does not have the value,
        which is private.
    """
    if type(weight) is not int or not 0 <= weight <= bounds.largest_weight:
        raise InvalidParameterError(
            "weight",
            "a value outside",
            f"a whole number from 0 to largest_weight = {bounds.largest_weight}",
        )
    kind = word(bounds.modulus_bits)
    vector = np.empty(1 + sum(codes.size for codes in arrays.values()), kind)
    place = 0
    for name, codes in arrays.items():
        if not np.issubdtype(codes.dtype, np.signedinteger):
            raise InvalidParameterError(name, str(codes.dtype), "codes on a grid (integers)")
        flat = codes.reshape(-1)
        if flat.size and not -bounds.code_limit <= flat.min() <= flat.max() <= bounds.code_limit:
            raise InvalidParameterError(
                name, "a value outside", f"codes from -{bounds.code_limit} to {bounds.code_limit}"
            )
        _weigh(flat, weight, vector[place : place + flat.size])
        place += flat.size
    vector[-1] = weight
    vector &= kind.type(2**bounds.modulus_bits - 1)
    return vector


def _weigh(codes: NDArray[Any], weight: int, out: Residues) -> None:
    """Write codes times a weight, modulo what a word holds."""

    def weigh(begin: int) -> None:
        scratch = np.empty(min(_BLOCK, codes.size), np.int64)
        for start in range(begin, min(begin + PART, codes.size), _BLOCK):
            part = codes[start : start + _BLOCK]
            block = scratch[: part.size]  # fresh memory takes longer than the product
            np.multiply(part, np.int64(weight), out=block)
            np.copyto(out[start : start + part.size], block, casting="unsafe")  # C's cast wraps

    in_parts(weigh, codes.size)


def add_masks(vector: Residues, bits: int, masks: Iterable[tuple[bytes, int]]) -> Residues:
    """Return a vector plus or minus some masks, modulo ``2**bits``.

    Parameters
    ----------
    vector : ndarray of unsigned integers, shape (d,)
        Residues. They are changed in place if their dtype is `word` of the bits.
    bits : int
        Bits of the modulus.
    masks : iterable of (bytes, int)
        Seed of 32 bytes and sign, 1 or -1. A mask is the keystream of AES-256 in counter mode
        (NIST SP 800-38A, section 6.5) under its seed, cut into words; so equal seeds belong to
        equal masks, and a seed must be used for one vector only.

    Examples
    --------
    >>> vector = np.array([1, 2, 3], np.uint8)
    >>> masked = add_masks(vector, 5, [(b"k" * 32, 1)])
    >>> add_masks(masked, 5, [(b"k" * 32, -1)])
    array([1, 2, 3], dtype=uint8)
    """
    kind = word(bits)
    total = vector.astype(kind, copy=False)  # wraps modulo a multiple of the modulus
    seeds = list(masks)

    def add(begin: int) -> None:
        counter = (begin * kind.itemsize // _CIPHER_BLOCK).to_bytes(_CIPHER_BLOCK)
        octets = np.empty(len(_ZEROS), np.uint8)
        words = octets.view(kind)
        streams = [
            (
                Cipher(algorithms.AES256(seed), modes.CTR(counter)).encryptor(),
                np.add if sign > 0 else np.subtract,
            )
            for seed, sign in seeds
        ]
        for start in range(begin, min(begin + PART, total.size), words.size):
            block = total[start : start + words.size]  # stays in the cache for all masks
            zeros, written = _ZEROS[: block.nbytes], octets.data[: block.nbytes]
            for cipher, combine in streams:
                cipher.update_into(zeros, written)
                combine(block, words[: block.size], out=block)
            block &= kind.type(2**bits - 1)

    in_parts(add, total.size)
    return total


def values_of(vector: Residues, bits: int) -> NDArray[np.int64]:
    """Map residues to the integers from ``-2**(bits - 1)`` to ``2**(bits - 1) - 1``."""
    shifted = vector.astype(np.uint64)
    shifted <<= np.uint64(64 - bits)
    values = shifted.view(np.int64)
    values >>= np.int64(64 - bits)
    return values


class MaskedSum(EvenWeights):
    """The sum of masked vectors modulo ``2**bits``, an accumulator that nobody can read.

    Parameters
    ----------
    size : int
        Entries of a vector.
    bits : int
        Bits of the modulus.

    Notes
    -----
    Every client counts with weight 1 here; its own weight is inside its vector.
    """

    def __init__(self, size: int, bits: int) -> None:
        self.sum_dtype = word(bits)  # wraps modulo a multiple of the modulus
        packed = np.broadcast_to(np.uint8(0), (packed_bytes(size, bits),))
        super().__init__({MASKED: packed})
        self.size = size
        self.bits = bits

    @property
    def total(self) -> Residues:
        """The sum so far; its bits beyond the modulus mean nothing."""
        return self._sums.get(MASKED, np.zeros(self.size, self.sum_dtype))

    def take(self, client_id: str, arrays: Arrays, metrics: Metrics, weighted_by: str) -> None:
        """Add one reply; all replies' metrics weigh the same."""
        self.accumulate(client_id, arrays, weight=1, metrics=metrics)

    def merge(self, other: WeightedMean) -> None:
        """Add everything that another accumulator holds.

        Raises
        ------
        ReplyRefusedError
            If a client is in both, or the sums are of another kind.
        """
        alike = isinstance(other, MaskedSum) and (other.size, other.bits) == (self.size, self.bits)
        if not alike:
            raise ReplyRefusedError("shape", "the two sums are of vectors of another kind")
        super().merge(other)

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the packed sum, and the clients whose vectors are in it."""
        residue = self.total & self.sum_dtype.type(2**self.bits - 1)
        return {MASKED: pack(residue, self.bits)}, super().state()[1]

    def from_state(self, arrays: Arrays, fields: Mapping[str, Any]) -> "MaskedSum":
        """Read a sum from the result of `state`, which may come from an adversary.

        Raises
        ------
        ReplyRefusedError
            If it is no such state.
        """
        entries = StateFields.read(fields)
        if entries.weight != len(set(entries.clients)):
            raise ReplyRefusedError(
                "weight", f"{entries.weight} for {len(entries.clients)} vectors"
            )
        other = MaskedSum(self.size, self.bits)
        other._begin_from(entries)
        other.weight = entries.weight
        if other.clients:
            other._sums = self._fitting(arrays)
        return other

    def _fitting(
        self, arrays: Arrays, dtype: np.dtype[np.generic] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the vector of a reply, or refuse it."""
        packed: Any = super()._fitting(arrays)[MASKED]
        vector = np.empty(self.size, self.sum_dtype)
        try:
            unpack_into(packed, self.bits, vector)
        except ValueError as error:
            raise ReplyRefusedError("malformed", str(error)) from error
        return {MASKED: vector}
