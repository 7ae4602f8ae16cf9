import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.coding import packing
from flwr_privacy.coding.packing import pack, packed_bytes, unpack, unpack_into
from flwr_privacy.errors import InvalidParameterError

SIZES = (0, 1, 7, 63, 64, 65, 1000, 4096, 70001)


def draw(size: int, bits: int) -> np.ndarray:
    values = np.random.default_rng([size, bits]).integers(2**64, size=size, dtype=np.uint64)
    values >>= np.uint64(64 - bits)
    values[:1] = 2**bits - 1
    return values


def packed_bit_by_bit(values: np.ndarray, bits: int) -> np.ndarray:
    as_bytes = values.astype("<u8").view(np.uint8).reshape(-1, 8)
    each = np.unpackbits(as_bytes, axis=1, bitorder="little")[:, :bits]
    return np.packbits(each.reshape(-1), bitorder="little")


@pytest.mark.parametrize("bits", range(1, 65))
def test_every_width_and_size_is_packed_as_defined_and_comes_back(bits, monkeypatch):
    monkeypatch.setattr(packing, "_BLOCK", 1 << 12)
    for size in SIZES:
        values = draw(size, bits)
        packed = pack(values, bits)
        assert packed.dtype == np.uint8
        assert packed.shape == (packed_bytes(size, bits),)
        assert np.array_equal(packed, packed_bit_by_bit(values, bits))
        back = unpack(packed, bits, size)
        assert back.dtype == np.uint64
        assert np.array_equal(back, values)


@pytest.mark.parametrize("bits", [1, 3, 4, 7, 13])
@pytest.mark.parametrize("size", [packing._BLOCK, packing._BLOCK + 3])
def test_blocks_of_their_real_size_join_without_a_gap(bits, size):
    values = draw(size, bits)
    packed = pack(values, bits)
    assert np.array_equal(packed, packed_bit_by_bit(values, bits))
    assert np.array_equal(unpack(packed, bits, size), values)


@given(st.integers(1, 64), st.data())
def test_the_bytes_are_one_large_integer(bits, data):
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=200))
    integer = sum(value << (i * bits) for i, value in enumerate(values))
    packed = pack(np.array(values, np.uint64), bits)
    assert packed.tobytes() == integer.to_bytes(packed_bytes(len(values), bits), "little")
    assert unpack(packed, bits, len(values)).tolist() == values


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, ">u4"])
@pytest.mark.parametrize("bits", [1, 3, 4, 8, 13, 16, 20, 32, 33, 64])
def test_any_unsigned_dtype_and_layout_gives_the_same_bytes(dtype, bits):
    values = draw(300, min(bits, 8 * np.dtype(dtype).itemsize))
    assert np.array_equal(pack(values[::3].astype(dtype), bits), pack(values[::3], bits))
    assert np.array_equal(pack(values.astype(dtype)[::3], bits), pack(values[::3], bits))
    assert np.array_equal(pack(values.astype(dtype)[::-1], bits), pack(values[::-1].copy(), bits))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint64, ">u4"])
@pytest.mark.parametrize("bits", [1, 3, 4, 8, 13, 16])
def test_values_are_unpacked_into_any_dtype_and_layout_that_holds_them(dtype, bits):
    values, room = draw(300, bits), np.zeros(600, dtype)
    if 8 * room.itemsize < bits:
        with pytest.raises(InvalidParameterError, match=f"integers of at least {bits} bits"):
            unpack_into(pack(values, bits), bits, room[::2])
    else:
        unpack_into(pack(values, bits), bits, room[::2])
        assert np.array_equal(room[::2], values)
    assert not room[1::2].any()


@pytest.mark.parametrize("room", [np.zeros(3, np.int8), np.zeros(3), np.zeros((3, 1), np.uint8)])
def test_values_are_unpacked_only_into_vectors_of_unsigned_integers(room):
    with pytest.raises(InvalidParameterError, match="expected one axis of unsigned integers"):
        unpack_into(np.zeros(2, np.uint8), 4, room)


def test_bytes_that_are_refused_leave_the_array_as_it_was():
    room = np.full(3, 9, np.uint8)
    for packed in (np.zeros(3, np.uint8), np.array([0, 0x10], np.uint8)):
        with pytest.raises(ValueError, match="expected"):
            unpack_into(packed, 4, room)
    assert room.tolist() == [9, 9, 9]


@pytest.mark.parametrize("bits", [1, 3, 4, 13, 16])
def test_read_only_and_strided_bytes_are_unpacked(bits):
    values = draw(100, bits)
    packed = pack(values, bits)
    assert np.array_equal(unpack(np.frombuffer(packed.tobytes(), np.uint8), bits, 100), values)
    assert np.array_equal(unpack(np.repeat(packed, 2)[::2], bits, 100), values)


@pytest.mark.parametrize("bits", [1, 3, 4, 8, 13, 64])
def test_packing_leaves_its_input_and_shares_nothing_with_it(bits):
    values = draw(200, bits).astype(np.uint8 if bits <= 8 else np.uint64)
    before = values.copy()
    packed = pack(values, bits)
    octets = packed.copy()
    back = unpack(packed, bits, 200)
    assert np.array_equal(packed, octets)
    packed[:] = 0
    assert np.array_equal(back, before)
    assert np.array_equal(values, before)


def test_packed_bytes_rounds_up():
    assert [packed_bytes(size, 23) for size in (0, 1, 8, 9)] == [0, 3, 23, 26]


@pytest.mark.parametrize("bits", [1, 7, 8, 23, 32, 63])
@pytest.mark.parametrize("place", [0, 64, 99])
def test_a_value_that_is_too_wide_is_refused(bits, place):
    values = np.zeros(100, np.uint64)
    values[place] = 2**bits
    with pytest.raises(InvalidParameterError) as error:
        pack(values, bits)
    assert str(error.value) == (
        f"values = 'a value of {bits + 1} bits': expected at most {bits} bits"
    )


@pytest.mark.parametrize(
    "values", [np.zeros(3, np.int64), np.zeros(3), np.zeros(3, bool), np.zeros((3, 1), np.uint8)]
)
def test_only_vectors_of_unsigned_integers_are_packed(values):
    with pytest.raises(InvalidParameterError, match="expected one axis of unsigned integers"):
        pack(values, 8)


@pytest.mark.parametrize("bits", [0, 65, -1, 8.0, True])
def test_widths_beyond_64_bits_are_refused(bits):
    zeros = np.zeros(1, np.uint8)
    for call in (
        lambda: pack(zeros, bits),
        lambda: unpack(zeros, bits, 1),
        lambda: packed_bytes(1, bits),
    ):
        with pytest.raises(InvalidParameterError, match=r"bits = .* from 1 to 64"):
            call()


def test_a_negative_size_is_refused():
    with pytest.raises(InvalidParameterError, match="size = -1"):
        unpack(np.zeros(0, np.uint8), 8, -1)


@pytest.mark.parametrize(
    ("packed", "found"),
    [
        (np.zeros(3, np.uint8), r"uint8 of shape \(3,\)"),
        (np.zeros(1, np.uint8), r"uint8 of shape \(1,\)"),
        (np.zeros((2, 1), np.uint8), r"uint8 of shape \(2, 1\)"),
        (np.zeros(2, np.int8), r"int8 of shape \(2,\)"),
    ],
)
def test_bytes_of_another_length_or_dtype_are_refused(packed, found):
    with pytest.raises(ValueError, match=rf"^{found}: expected uint8 of shape \(2,\) for 3 values"):
        unpack(packed, 5, 3)


@pytest.mark.parametrize("size", range(1, 9))
def test_every_bit_of_padding_must_be_zero(size):
    for bit in range(8):
        packed = np.array([1 << bit], np.uint8)
        if bit < size:
            assert unpack(packed, 1, size).any()
        else:
            with pytest.raises(
                ValueError, match=f"after the last value: expected {8 - size} zeros"
            ):
                unpack(packed, 1, size)
