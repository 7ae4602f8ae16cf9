import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.coding import quantize
from flwr_privacy.coding.packing import pack, packed_bytes
from flwr_privacy.coding.quantize import CodeSum, Knobs, float32_above, span
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.randomness import SecureRandom


class Chosen:
    """Random bits of a test's own: an integer below 2^15 for each value."""

    def __init__(self, integers: np.ndarray) -> None:
        self._left = integers.astype(np.uint16) << 1

    def fill(self, out: np.ndarray) -> None:
        out[:] = self._left[: out.size]
        self._left = self._left[out.size :]


def test_F10_the_quantizer_on_five_knobs():
    knobs, draws, random = Knobs(width=2.0, levels=5), 100_000, SecureRandom.insecure(10)
    assert (knobs.step, knobs.bits) == (0.5, 3)
    for x, low, share in ((0.3, 0.0, 0.6), (-0.3, -0.5, 0.4)):
        codes, saturated = knobs.encode(np.full(draws, x), 0.0, random)
        values = knobs.decode(codes, 0.0)
        assert saturated == 0
        assert set(values) == {low, low + 0.5}
        # Three standard errors of a share, and of a mean with the variance p (1 - p) step^2.
        assert abs((values > low).mean() - share) < 3 * math.sqrt(share * (1 - share) / draws)
        assert abs(values.mean() - x) < 3 * math.sqrt(0.06 / draws)
        assert values.var() == pytest.approx(0.06, rel=0.01)
        assert values.var() <= knobs.step**2 / 4
    ends, _ = knobs.encode(np.tile([-1.0, 1.0], draws), 0.0, random)
    assert (ends.reshape(-1, 2) == [0, 4]).all()


@pytest.mark.parametrize("levels", [4, 256, 257, 2**16])
@pytest.mark.parametrize("centre", [0.0, 1.1, -7e3])
@pytest.mark.parametrize("fraction", [0.0, 2.0**-15, 0.1, 0.3, 0.5, 0.9999])
def test_the_expectation_over_all_random_bits(fraction, centre, levels):
    knobs = Knobs(width=levels - 1.0, levels=levels)  # a step of 1
    place = levels - 2 + fraction  # in the last cell, where floats are coarsest
    values = np.full(2**15, centre - knobs.width / 2 + place)
    codes, saturated = knobs.encode(values, centre, Chosen(np.arange(2**15)))
    assert saturated == 0
    assert abs(codes.mean() - place) < 2.0**-14
    assert codes.max() - codes.min() <= 1
    centres = np.full(2**15, centre)
    np.testing.assert_array_equal(knobs.encode(values, centres, Chosen(np.arange(2**15)))[0], codes)


@pytest.mark.parametrize("centre", [0.0, 0.1, 100_000.1])
def test_the_expectation_of_float32_values(centre):
    knobs = Knobs(width=3.0, levels=4)
    values = np.full(2**15, centre + 0.7, np.float32)
    codes, _ = knobs.encode(values, centre, Chosen(np.arange(2**15)))
    assert abs(codes.mean() - (float(values[0]) - centre + 1.5)) < 2.0**-14


@pytest.mark.parametrize("levels", [2, 3, 255, 256, 257, 2**15 + 1, 2**16])
@pytest.mark.parametrize("bits", [0, 2**15 - 1])
def test_knobs_come_back_whatever_the_random_bits_are(levels, bits):
    knobs = Knobs(width=(levels - 1) / 4, levels=levels)  # all knobs are floats
    centre = 8.0 + (levels - 1) / 8
    values = 8.0 + np.arange(levels) / 4
    codes, saturated = knobs.encode(values, centre, Chosen(np.full(levels, bits)))
    assert saturated == 0
    assert codes.dtype == (np.uint8 if levels <= 256 else np.uint16)
    np.testing.assert_array_equal(codes, np.arange(levels))
    np.testing.assert_array_equal(knobs.decode(codes, centre), values)


@pytest.mark.parametrize("bits", [0, 2**15 - 1])
@pytest.mark.parametrize("levels", [2, 100, 256, 1000, 2**16])
def test_the_ends_stay_the_ends_and_never_saturate(levels, bits):
    draws = np.random.default_rng(levels)
    for _ in range(200):
        centre, width = 10 * draws.normal(), 10.0 ** draws.uniform(-3, 3)
        values = centre + width * np.array([-0.5, 0.5])
        codes, saturated = Knobs(width=width, levels=levels).encode(
            values, centre, Chosen(np.full(2, bits))
        )
        assert codes.tolist() == [0, levels - 1]
        assert saturated == 0


@settings(max_examples=60)
@given(
    levels=st.integers(2, 2**16),
    width=st.floats(1e-6, 1e6),
    centre=st.floats(-1e3, 1e3),
    seed=st.integers(0, 2**32),
)
def test_no_value_moves_further_than_a_step(levels, width, centre, seed):
    knobs = Knobs(width=width, levels=levels)
    draws = np.random.default_rng(seed)
    centres = centre + width * draws.normal(size=300)
    values = centres + width * draws.uniform(-0.5, 0.5, 300)
    codes, saturated = knobs.encode(values, centres, SecureRandom.insecure(seed))
    moved = np.abs(knobs.decode(codes, centres) - values)
    # Besides the step there are rounding errors of what is subtracted and added.
    assert moved.max() <= knobs.step * (1 + 2.0**-15) + 8 * np.abs(centres).max() * 2.0**-52
    assert saturated == 0 or width / levels < np.abs(centres).max() * 2.0**-30


def test_blocks_do_not_show(monkeypatch):
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    centres = np.random.default_rng(2).normal(size=1000)
    knobs, per_value = (
        Knobs(width=4.0, levels=1000),
        np.random.default_rng(3).integers(2**15, size=1000),
    )
    whole = knobs.encode(values, centres, Chosen(per_value))
    monkeypatch.setattr(quantize, "_BLOCK", 64)
    parts = knobs.encode(values, centres, Chosen(per_value))
    np.testing.assert_array_equal(whole[0], parts[0])
    assert whole[1] == parts[1] > 0


def test_values_outside_are_clipped_and_counted():
    knobs = Knobs(width=2.0, levels=16)
    values = np.array([-1.001, -1.0, 0.0, 1.0, 1.001, 1e38, -1e300])
    codes, saturated = knobs.encode(values, 0.0, SecureRandom.insecure(5))
    assert saturated == 4
    assert codes[[0, 1, 3, 4, 5, 6]].tolist() == [0, 0, 15, 15, 15, 0]


def test_a_width_of_zero_has_the_centre_as_its_only_knob():
    knobs = Knobs(width=0.0, levels=16)
    codes, saturated = knobs.encode(np.array([1.0, 2.0]), 1.0, SecureRandom())
    assert saturated == 1
    assert not codes.any()
    np.testing.assert_array_equal(knobs.decode(codes, np.array([1.0, 2.0])), [1.0, 2.0])


def test_equal_seeds_round_alike_and_streams_do_not():
    knobs, values = Knobs(width=2.0, levels=8), np.random.default_rng(0).uniform(-1, 1, 500)
    first, again = (knobs.encode(values, 0.0, SecureRandom.insecure(7))[0] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (knobs.encode(values, 0.0, SecureRandom())[0] != first).any()


@pytest.mark.parametrize("levels", [256, 257])
@pytest.mark.parametrize("width", [quantize.SMALLEST_WIDTH, quantize.LARGEST_WIDTH])
def test_the_extreme_widths_work(width, levels):
    knobs = Knobs(width=width, levels=levels)
    values = width * np.array([-0.5, -0.25, 0.0, 0.5, 1e6, -1e250])
    codes, saturated = knobs.encode(values, 0.0, SecureRandom.insecure(6))
    assert saturated == 2
    assert np.abs(knobs.decode(codes, 0.0)[:4] - values[:4]).max() <= 1.001 * knobs.step


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(InvalidParameterError, match="NaN or infinity"):
        Knobs(width=1.0, levels=4).encode(np.array([0.0, bad]), 0.0, SecureRandom())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"width": -1.0}, r"width = -1.0: expected 0, or a number from 2"),
        ({"width": math.nan}, "width = nan"),
        ({"width": math.inf}, "width = inf"),
        ({"width": 1e-31}, "width = 1e-31"),
        ({"width": 1e31}, r"width = 1e\+31"),
        ({"levels": 1}, "levels = 1: expected an integer from 2 to 65536"),
        ({"levels": 2**16 + 1}, "levels = 65537"),
        ({"levels": 4.0}, "levels = 4.0"),
    ],
)
def test_what_no_knobs_can_be(change, text):
    with pytest.raises(InvalidParameterError, match=text):
        Knobs(**{"width": 1.0, "levels": 4, **change})


def test_codes_without_a_knob_are_refused():
    with pytest.raises(InvalidParameterError, match="numbers from 0 to 4"):
        Knobs(width=1.0, levels=5).decode(np.array([5], np.uint8), 0.0)
    with pytest.raises(InvalidParameterError, match="unsigned"):
        Knobs(width=1.0, levels=5).decode(np.array([-1]), 0.0)


@pytest.mark.parametrize("levels", [2, 5, 8, 256, 2**12, 2**16])
def test_a_sum_of_packed_codes_is_the_sum_of_the_codes(levels):
    bits, size = (levels - 1).bit_length(), 300_003  # beyond a block, and no whole bytes
    draws = np.random.default_rng(levels)
    codes = draws.integers(levels, size=(3, size)).astype(np.uint64)
    codes[:, 0] = levels - 1
    weights = (1, 7, 2)
    total = CodeSum(size=size, levels=levels, weights=sum(weights))
    for row, weight in zip(codes, weights, strict=True):
        packed = pack(row, bits)
        assert packed.size == packed_bytes(size, bits) == -(-bits * size // 8)
        total.add(packed, weight=weight)
    np.testing.assert_array_equal(total.total, np.array(weights, np.uint64) @ codes)
    with pytest.raises(InvalidParameterError, match="weight = 1: expected an integer"):
        total.add(packed)


@pytest.mark.parametrize(
    ("levels", "packed", "error"),
    [
        (8, np.zeros(3, np.uint8), ValueError),
        (8, np.zeros(2, np.uint16), ValueError),
        (8, np.zeros((1, 2), np.uint8), ValueError),
        (8, np.array([0xFF, 0xFF], np.uint8), ValueError),  # bits after the last code
        (5, np.array([0, 0x0E], np.uint8), InvalidParameterError),  # a 7 where 4 is the last
    ],
)
def test_packed_codes_that_are_none_leave_no_trace(levels, packed, error):
    total = CodeSum(size=4, levels=levels, weights=2)
    total.add(np.array([0x23, 0], np.uint8))
    before = total.total.copy()
    with pytest.raises(error):
        total.add(packed)
    np.testing.assert_array_equal(total.total, before)
    total.add(np.array([0x01, 0], np.uint8))  # the weight that was refused was not spent


@pytest.mark.parametrize("weights", [0, 2**40 + 1])
def test_a_sum_of_weights_that_no_integer_has_room_for_is_refused(weights):
    with pytest.raises(InvalidParameterError, match=f"weights = {weights}: expected an integer"):
        CodeSum(size=1, levels=2, weights=weights)


def test_bits_after_the_last_code_are_found_before_anything_is_added(monkeypatch):
    monkeypatch.setattr(quantize, "_BLOCK", 64)
    total = CodeSum(size=100, levels=8, weights=1)
    with pytest.raises(ValueError, match="bits after the last value"):
        total.add(np.full(packed_bytes(100, 3), 0xFF, np.uint8))
    assert not total.total.any()


@pytest.mark.parametrize("place", [0, 63, 64, 99])
def test_a_code_without_a_knob_is_found_before_anything_is_added(monkeypatch, place):
    monkeypatch.setattr(quantize, "_BLOCK", 64)
    total = CodeSum(size=100, levels=7, weights=1)
    codes = np.ones(100, np.uint8)
    codes[place] = 7
    with pytest.raises(InvalidParameterError, match="numbers from 0 to 6"):
        total.add(pack(codes, 3))
    assert not total.total.any()


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=20))
def test_a_span_is_in_float32_and_holds_all_values(values):
    low, high = span(np.array(values))
    assert low <= min(values)
    assert high >= max(values)
    for end, value in ((high, max(values)), (-low, -min(values))):
        assert float(np.float32(end)) == end
        assert float(np.nextafter(np.float32(end), np.float32(-math.inf))) < value


def test_what_float32_cannot_hold_has_no_number_above_it():
    for value in (1e39, math.inf, math.nan):
        with pytest.raises(InvalidParameterError, match="that float32 can hold"):
            float32_above(value)
    with pytest.raises(InvalidParameterError, match="an empty array"):
        span(np.array([]))
