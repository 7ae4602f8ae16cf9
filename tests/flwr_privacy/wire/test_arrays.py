import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays, floating_dtypes, integer_dtypes

from flwr_privacy.wire.arrays import decode_npy, encode_npy, is_finite


@given(arrays(floating_dtypes(sizes=(32, 64)) | integer_dtypes(), array_shapes(min_dims=0)))
def test_round_trip_and_agreement_with_numpy(array):
    data = encode_npy(array)
    np.testing.assert_array_equal(decode_npy(data), array)
    np.testing.assert_array_equal(np.load(io.BytesIO(data)), array)
    assert decode_npy(data).dtype == array.dtype


def test_fortran_order():
    array = np.asfortranarray(np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(decode_npy(encode_npy(array)), array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(12.0).reshape(3, 4)[::2, 1:],
        np.arange(3, dtype=">f4"),
        np.array(True),
        np.zeros((0, 4), np.int8),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.array(["a", "bc"]),
    ],
)
def test_the_bytes_are_those_of_numpy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    assert encode_npy(array) == buffer.getvalue()


def test_python_objects_are_never_written():
    with pytest.raises(TypeError, match="array of references"):
        encode_npy(np.array([{}], dtype=object))


def test_decoding_makes_no_copy():
    data = encode_npy(np.arange(4.0))
    view = decode_npy(data)
    assert not view.flags.owndata
    assert not view.flags.writeable


def npy_with(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin1")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense" * 4,
        encode_npy(np.arange(9.0))[:-1],
        encode_npy(np.arange(9.0)) + b"x",
        npy_with("{1: 2, 'a': 3}"),
        npy_with("{[]: 1}"),
        npy_with("(((("),
        npy_with("(" * 5000),
        npy_with("{'descr': ('f4',), 'fortran_order': False, 'shape': (0,)}"),
        encode_npy(np.zeros(2, complex)),
        npy_with("{'descr': '|S4', 'fortran_order': False, 'shape': (0,)}"),
        npy_with("{'descr': 'f99', 'fortran_order': False, 'shape': (0,)}"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2**60,)}"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (10**30,)}"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': [0]}"),
        npy_with("{'descr': '<f4', 'fortran_order': 0, 'shape': (0,)}"),
        npy_with("__import__('os')"),
    ],
)
def test_what_is_no_array_is_a_value_error(data):
    with pytest.raises(ValueError, match=r".+"):
        decode_npy(data)


def test_python_objects_are_never_loaded():
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="is no real number"):
        decode_npy(buffer.getvalue())


def test_an_overflowing_sum_is_not_taken_for_infinity():
    assert is_finite(np.full(10, 3e38, np.float32))
    assert not is_finite(np.array([np.inf, -np.inf]))
    assert is_finite(np.array([1, 2]))
    assert is_finite(np.array([], np.float32))
