"""Packs unsigned integers of any width into bytes without gaps.

Value i of b bits occupies the bits i b .. (i + 1) b - 1 of a stream whose bit k is bit k % 8 of
byte k // 8, least significant first.

Two neighbours are one value of 2 b bits. So values of less than a byte, each in a byte of its own,
are joined to pairs, the pairs to pairs of pairs, until they fill whole bytes.

Any w consecutive values fill exactly b words of w bits. So wider values are packed in groups of w,
many groups at a time: a block is transposed, such that value i of all groups is one contiguous row,
and the rows of words are unions of shifted rows of values.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.wire.parts import PART, in_parts

__all__ = ["MOST_BITS", "pack", "packed_bytes", "unpack", "unpack_into"]

MOST_BITS = 64
"""The widest value, in bits."""

_BLOCK = 1 << 18  # values at a time, a multiple of 64: rows longer than a call takes to start
_ROW_PAD = 64  # bytes after each row: rows a power of two apart would share few cache lines

_Words = NDArray[np.unsignedinteger[Any]]


def packed_bytes(size: int, bits: int) -> int:
    """Return the bytes that `size` packed values of `bits` bits take.

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

    def write(begin: int) -> None:
        for start in range(begin, min(begin + PART, values.size), _BLOCK):
            part = values[start : start + _BLOCK]
            block = _pack_narrow(part, bits) if bits < 8 else _pack_block(part, bits, word)
            room = packed[start * bits // 8 :][: block.size]
            room[:] = block[: room.size]

    in_parts(write, values.size)
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, size: int) -> NDArray[np.uint64]:
    """Unpack the values that `pack` packed. The bytes may come from an adversary.

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
    _check_packed(packed, bits, size)
    values = np.empty(size, np.uint64)
    _unpack(packed, bits, values)
    return values


def unpack_into(
    packed: NDArray[np.uint8], bits: int, values: NDArray[np.unsignedinteger[Any]]
) -> None:
    """Unpack the values that `pack` packed into an array. The bytes may come from an adversary.

    Parameters
    ----------
    packed : ndarray of uint8, shape (packed_bytes(size, bits),)
        What `pack` returned.
    bits : int
        Bits per value, 1 to 64.
    values : ndarray of an unsigned integer dtype of at least `bits` bits, shape (size,)
        Where they are written.

    Raises
    ------
    InvalidParameterError
        If `bits` is out of range, or `values` has another dtype or shape.
    ValueError
        As `unpack`. Nothing is written then.

    Examples
    --------
    >>> values = np.empty(3, np.uint8)
    >>> unpack_into(np.array([33, 3], np.uint8), 4, values)
    >>> values
    array([1, 2, 3], dtype=uint8)
    """
    _check_packed(packed, bits, values.size)
    if values.dtype.kind != "u" or values.dtype.itemsize * 8 < bits or values.ndim != 1:
        raise InvalidParameterError(
            "values",
            f"{values.dtype} of shape {values.shape}",
            f"one axis of unsigned integers of at least {bits} bits",
        )
    _unpack(packed, bits, values)


def _check_packed(packed: NDArray[np.uint8], bits: int, size: int) -> None:
    shape = (packed_bytes(size, bits),)
    if packed.dtype != np.uint8 or packed.shape != shape:
        raise ValueError(
            f"{packed.dtype} of shape {packed.shape}: expected uint8 of shape {shape} "
            f"for {size} values of {bits} bits"
        )
    used = size * bits % 8
    if used and packed[-1] >> used:
        raise ValueError(f"bits after the last value: expected {8 - used} zeros")


def _unpack(packed: NDArray[np.uint8], bits: int, values: _Words) -> None:
    word = _word(bits)
    if bits == 8 * word.itemsize:
        values[:] = np.ascontiguousarray(packed).view(word)
        return
    for start in range(0, values.size, _BLOCK):
        room = values[start : start + _BLOCK]
        at = start * bits // 8
        part = packed[at : at + packed_bytes(room.size, bits)]
        if bits < 8:
            room[:] = _unpack_narrow(part, bits)[: room.size]
        else:
            _unpack_block(part, bits, word, room)


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


def _joins(bits: int) -> tuple[list[tuple[np.dtype[np.unsignedinteger[Any]], int, int]], int]:
    """Return how values of less than a byte are joined until they fill whole bytes.

    Each join is a word, the bits of the values in its two halves, and how much the word loses for
    each unit of its second value when that moves down to the end of the first. Besides, the number
    of bytes that are filled after all joins, at the lower end of the last word.
    """
    joins = []
    for size in (2, 4, 8):
        joins.append((np.dtype(f"<u{size}"), bits, (1 << 4 * size) - (1 << bits)))
        bits *= 2
        if bits % 8 == 0:
            break
    return joins, bits // 8


def _pack_narrow(values: _Words, bits: int) -> NDArray[np.uint8]:
    """Return the bytes of values of less than a byte, and perhaps zeros."""
    octets = values.astype(np.uint8)
    if bits == 1:
        return np.packbits(octets, bitorder="little")
    joins, filled = _joins(bits)
    words: _Words = _groups(octets, 8).reshape(-1)
    for word, _, loss in joins:
        words = words.view(word)
        second = words >> word.type(4 * word.itemsize)
        second *= word.type(loss)
        words -= second
    if filled == 1:
        return words.astype(np.uint8)
    packed = np.empty((words.size, filled), np.uint8)
    for i in range(filled):  # a column at a time: rows are too short
        packed[:, i] = words.view(np.uint8)[i :: words.itemsize]
    return packed.reshape(-1)


def _unpack_narrow(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return the values in some bytes, and perhaps zeros."""
    if bits == 1:
        return np.unpackbits(packed, bitorder="little")
    joins, filled = _joins(bits)
    if filled == 1:
        words: _Words = packed.astype(joins[-1][0])
    else:
        groups = _groups(packed, filled)
        words = np.zeros(len(groups), joins[-1][0])
        for i in range(filled):
            words.view(np.uint8)[i :: words.itemsize] = groups[:, i]
    for word, width, loss in reversed(joins):
        words = words.view(word)
        second = words >> word.type(width)
        second *= word.type(loss)
        words += second
    return words.view(np.uint8)


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
    values: _Words,
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
