"""Named arrays, and the bytes that carry them on Flower's wire (NumPy's npy format)."""

import io
from collections.abc import Mapping

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

__all__ = ["Arrays", "decode_npy", "encode_npy", "is_finite"]

Arrays = Mapping[str, NDArray[np.generic]]
"""A model or an update: arrays by name, in a fixed order."""


def encode_npy(array: NDArray[np.generic]) -> bytes:
    """Return the npy bytes of an array."""
    buffer = io.BytesIO()
    npy.write_array(buffer, np.asarray(array), allow_pickle=False)
    return buffer.getvalue()


def decode_npy(data: bytes) -> NDArray[np.generic]:
    """Return the array in npy bytes as a read-only view, without a copy.

    Raises
    ------
    ValueError
        If the bytes are no complete npy document, or hold Python objects.

    Examples
    --------
    >>> decode_npy(encode_npy(np.arange(3)))
    array([0, 1, 2])
    """
    header = io.BytesIO(data)
    version = npy.read_magic(header)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran_order, dtype = read_header(header)
    if dtype.hasobject:
        raise ValueError("the array holds Python objects")
    size = int(np.prod(shape, dtype=np.int64))
    flat = np.frombuffer(data, dtype=dtype, count=size, offset=header.tell())
    return flat.reshape(shape, order="F" if fortran_order else "C")


def is_finite(array: NDArray[np.generic]) -> bool:
    """Tell whether an array has neither NaN nor infinity; integers always pass.

    Examples
    --------
    >>> is_finite(np.array([1.0, np.nan])), is_finite(np.array([3e38, 3e38], np.float32))
    (False, True)
    """
    if not np.issubdtype(array.dtype, np.inexact):
        return True
    # A finite sum proves finite terms at a third of the cost; an overflowing sum proves nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum()
    return bool(np.isfinite(total) or np.isfinite(array).all())
