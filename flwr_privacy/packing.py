"""Unsigned integers of any width, packed into bytes without gaps.

Value i of b bits occupies the bits i b .. (i + 1) b - 1 of a stream whose bit k is bit k % 8 of
byte k // 8, least significant first. Any w consecutive values fill exactly b words of w bits, so
values are packed in groups of w, many groups at a time: a block is transposed, such that value i of
all groups is one contiguous row, and the rows of words are unions of shifted rows of values.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidParameterError, check_integer

__all__ = ["MOST_BITS", "pack", "packed_bytes", "unpack"]

MOST_BITS = 64
"""The widest value, in bits."""

_BLOCK = 1 << 17  # values at a time, a multiple of 64: rows longer than a call takes to start
_ROW_PAD = 64  # bytes after each row: rows a power of two apart would share few cache lines

_Words = NDArray[np.unsignedinteger[Any]]


def packed_bytes(size: int, bits: int) -> int:
    """Return how many bytes `size` values of `bits` bits take.

    Parameters
    ----------
    size : int
        Number of values, >= 0.
    bits : int
        Bits per value, 1 to 64.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Examples
    --------
    >>> packed_bytes(3, 5)
    2
    """
    check_integer("size", size, minimum=0)
    check_integer("bits", bits, minimum=1, maximum=MOST_BITS)
    return -(-size * bits // 8)


def pack(values: NDArray[np.unsignedinteger[Any]], bits: int) -> NDArray[np.uint8]:
    """Pack values of `bits` bits into bytes.

    Parameters
    ----------
    values : ndarray of an unsigned integer dtype, shape (size,)
        Values below ``2**bits``.
    bits : int
        Bits per value, 1 to 64.

    Returns
    -------
    ndarray of uint8, shape (packed_bytes(size, bits),)
        Bits after the last value are zero.

    Raises
    ------
    InvalidParameterError
        If the values have another dtype or shape, or one of them is too large, or `bits` is out of
        range.

    Examples
    --------
    >>> pack(np.array([1, 2, 3], np.uint8), 4)
    array([33,  3], dtype=uint8)
    """
    if values.dtype.kind != "u" or values.ndim != 1:
        raise InvalidParameterError(
            "values", f"{values.dtype} of shape {values.shape}", "one axis of unsigned integers"
        )
    packed = np.empty(packed_bytes(values.size, bits), np.uint8)
    largest = int(values.max(initial=0)).bit_length()
    if largest > bits:  # its length and not the value, which may be secret
        raise InvalidParameterError("values", f"a value of {largest} bits", f"at most {bits} bits")
    word = _word(bits)
    if bits == 8 * word.itemsize:
        packed.view(word)[:] = values
        return packed
    for start in range(0, values.size, _BLOCK):
        block = _pack_block(values[start : start + _BLOCK], bits, word)
        room = packed[start * bits // 8 :][: block.size]
        room[:] = block[: room.size]
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, size: int) -> NDArray[np.uint64]:
    """Return the values that `pack` packed. The bytes may come from an adversary.

    Parameters
    ----------
    packed : ndarray of uint8, shape (packed_bytes(size, bits),)
        What `pack` returned.
    bits : int
        Bits per value, 1 to 64.
    size : int
        Number of values, >= 0.

    Returns
    -------
    ndarray of uint64, shape (size,)

    Raises
    ------
    InvalidParameterError
        If `bits` or `size` is out of range.
    ValueError
        If `packed` has another dtype or shape, or bits after the last value are not zero: no two
        packings have the same values.

    Examples
    --------
    >>> unpack(np.array([33, 3], np.uint8), 4, 3)
    array([1, 2, 3], dtype=uint64)
    """
    shape = (packed_bytes(size, bits),)
    if packed.dtype != np.uint8 or packed.shape != shape:
        raise ValueError(
            f"{packed.dtype} of shape {packed.shape}: expected uint8 of shape {shape} "
            f"for {size} values of {bits} bits"
        )
    used = size * bits % 8
    if used and packed[-1] >> used:
        raise ValueError(f"bits after the last value: expected {8 - used} zeros")
    word = _word(bits)
    if bits == 8 * word.itemsize:
        return np.ascontiguousarray(packed).view(word).astype(np.uint64)
    values = np.empty(size, np.uint64)
    for start in range(0, size, _BLOCK):
        room = values[start : start + _BLOCK]
        at = start * bits // 8
        _unpack_block(packed[at : at + packed_bytes(room.size, bits)], bits, word, room)
    return values


def _word(bits: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the narrowest word that holds a value, stored as the stream is."""
    return np.dtype(next(f"<u{size}" for size in (1, 2, 4, 8) if bits <= 8 * size))


def _rows(count: int, length: int, word: np.dtype[np.unsignedinteger[Any]]) -> _Words:
    return np.empty((count, length + _ROW_PAD // word.itemsize), word)[:, :length]


def _groups(array: _Words, length: int) -> _Words:
    """Return the array as groups of `length`, the last one filled up with zeros."""
    if missing := -array.size % length:
        array = np.append(array, np.zeros(missing, array.dtype))
    return array.reshape(-1, length)


def _pack_block(
    values: _Words, bits: int, word: np.dtype[np.unsignedinteger[Any]]
) -> NDArray[np.uint8]:
    """Return the bytes of whole groups."""
    width = 8 * word.itemsize
    groups = _groups(values, width)
    by_value, by_word = _rows(width, len(groups), word), _rows(bits, len(groups), word)
    np.copyto(by_value, groups.T, casting="same_kind")
    by_word[0] = 0
    shifted = np.empty(len(groups), word)
    for i, row in enumerate(by_value):
        index, shift = divmod(i * bits, width)
        np.left_shift(row, word.type(shift), out=shifted)
        by_word[index] |= shifted
        # A value that ends with its word spills nothing: the zeros that the next word starts with.
        if shift + bits >= width and index + 1 < bits:
            np.right_shift(row, word.type(width - shift), out=by_word[index + 1])
    return np.ascontiguousarray(by_word.T).reshape(-1).view(np.uint8)


def _unpack_block(
    packed: NDArray[np.uint8],
    bits: int,
    word: np.dtype[np.unsignedinteger[Any]],
    values: NDArray[np.uint64],
) -> None:
    """Write the values in some bytes."""
    width = 8 * word.itemsize
    words = _groups(packed, bits * word.itemsize).view(word)
    by_word, by_value = _rows(bits, len(words), word), _rows(width, len(words), word)
    np.copyto(by_word, words.T)
    shifted = np.empty(len(words), word)
    for i, row in enumerate(by_value):
        index, shift = divmod(i * bits, width)
        np.right_shift(by_word[index], word.type(shift), out=row)
        if shift + bits > width:
            np.left_shift(by_word[index + 1], word.type(width - shift), out=shifted)
            row |= shifted
        row &= word.type((1 << bits) - 1)
    whole = len(values) // width
    values[: whole * width].reshape(whole, width)[:] = by_value.T[:whole]
    values[whole * width :] = by_value.T[whole:].reshape(-1)[: len(values) - whole * width]
