"""Encodes named arrays as the bytes that Flower sends (NumPy's npy format), and decodes them."""

import ast
import hashlib
import io
import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

__all__ = [
    "Arrays",
    "HashedArrays",
    "array_digest",
    "decode_npy",
    "digest_of",
    "encode_npy",
    "is_finite",
    "npy_size",
    "sum_of_squares",
    "zeros_like",
]

Arrays = Mapping[str, NDArray[np.generic]]
"""A model or an update: arrays by name, in a fixed order."""

_LONGEST_HEADER = 10_000  # bytes; an array of 32 dimensions has under 1,000


def array_digest(array: NDArray[Any]) -> bytes:
    """Return the SHA-256 of an array's type, shape and values, whatever its order in memory.

    Examples
    --------
    >>> a = np.arange(6.0).reshape(2, 3)
    >>> array_digest(a) == array_digest(np.asfortranarray(a))
    True
    >>> array_digest(a) == array_digest(a.astype(np.float32))
    False
    """
    # A type and a shape have no line break, so no two arrays have the same bytes.
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


class HashedArrays(Mapping[str, NDArray[np.generic]]):
    """Arrays that cache their digests, because all clients of a cohort get the same model."""

    @abstractmethod
    def digest(self, name: str) -> bytes:
        """Return `array_digest` of an array."""


def digest_of(arrays: Arrays, name: str) -> bytes:
    """Return `array_digest` of one of some arrays."""
    return arrays.digest(name) if isinstance(arrays, HashedArrays) else array_digest(arrays[name])


def encode_npy(array: NDArray[np.generic]) -> bytes:
    """Return the npy bytes of an array, with one copy of its values; `np.save` makes three."""
    array = np.asarray(array)
    ordered = np.ascontiguousarray(array.T if _is_fortran(array) else array)
    head = _head(array.dtype, array.shape, _is_fortran(array))
    return b"".join([head, ordered.reshape(-1).view(np.uint8).data])


def npy_size(array: NDArray[np.generic]) -> int:
    """Return the number of npy bytes of an array, without making them.

    Examples
    --------
    >>> npy_size(np.arange(3)) == len(encode_npy(np.arange(3)))
    True
    """
    return len(_head(array.dtype, array.shape, _is_fortran(array))) + array.nbytes


def _is_fortran(array: NDArray[np.generic]) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous


@lru_cache(maxsize=256)
def _head(dtype: np.dtype[np.generic], shape: tuple[int, ...], fortran_order: bool) -> bytes:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": fortran_order, "shape": shape}
    buffer = io.BytesIO()
    npy.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def decode_npy(data: bytes) -> NDArray[np.generic]:
    """Return the array in npy bytes as a read-only view, without a copy.

    The bytes may come from an adversary: nothing of them is evaluated but a literal, and no array
    is larger than they are.

    Raises
    ------
    ValueError
        If the bytes are no complete npy document of numbers or booleans.

    Examples
    --------
    >>> decode_npy(encode_npy(np.arange(3)))
    array([0, 1, 2])
    """
    if len(data) < 10 or data[:6] != npy.MAGIC_PREFIX or data[6] not in (1, 2, 3):
        raise ValueError("no npy document")
    width = 2 if data[6] == 1 else 4
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    dtype, fortran_order, shape = _header(data[8 + width : start])
    size = math.prod(shape)
    if len(data) != start + size * dtype.itemsize:
        raise ValueError(f"{len(data) - start} bytes for shape {shape} of {dtype}")
    flat = np.frombuffer(data, dtype=dtype, count=size, offset=start)
    return flat.reshape(shape, order="F" if fortran_order else "C")


@lru_cache(maxsize=256)  # parsing takes longer than summing a small array
def _header(text: bytes) -> tuple[np.dtype[np.generic], bool, tuple[int, ...]]:
    if len(text) > _LONGEST_HEADER:
        raise ValueError(f"a header of {len(text)} bytes")
    try:
        header = ast.literal_eval(text.decode("latin1").strip())
        if set(header) != {"descr", "fortran_order", "shape"}:
            raise ValueError("other entries than an npy header has")
        descr, fortran_order, shape = header["descr"], header["fortran_order"], header["shape"]
        dtype: np.dtype[np.generic] = np.dtype(descr) if isinstance(descr, str) else np.dtype("O")
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"a damaged header ({type(error).__name__})") from error
    if dtype.kind not in "biuf" or not isinstance(fortran_order, bool):
        raise ValueError(f"dtype {dtype} is no real number")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a shape that is none")
    return dtype, fortran_order, shape


def is_finite(array: NDArray[np.generic]) -> bool:
    """Tell whether an array has neither NaN nor infinity; integers always pass.

    Examples
    --------
    >>> is_finite(np.array([1.0, np.nan])), is_finite(np.array([3e38, 3e38], np.float32))
    (False, True)
    """
    if not np.issubdtype(array.dtype, np.inexact):
        return True
    # Finite squares that add up to a finite sum prove finite terms, at a fraction of the cost; an
    # overflow proves nothing.
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        total = sum_of_squares(flat) if array.dtype.itemsize >= 4 else array.sum()
    return bool(np.isfinite(total) or np.isfinite(array).all())


def zeros_like(arrays: Arrays) -> dict[str, NDArray[np.generic]]:
    """Return arrays of zeros with the names, shapes and dtypes of some arrays."""
    return {name: np.zeros_like(array) for name, array in arrays.items()}


def sum_of_squares(vector: NDArray[Any]) -> float:
    """Return the sum of the squares of a vector of floats, in its own precision.

    Not by ``dot``: its second thread waits busily after each call, and takes the time of another
    client.

    Examples
    --------
    >>> sum_of_squares(np.array([3.0, 4.0]))
    25.0
    """
    return float(np.einsum("i,i->", vector, vector))
