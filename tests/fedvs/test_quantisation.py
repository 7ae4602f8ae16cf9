"""Real numbers as elements of a field: roundings, scales, the proof of no wrap-around, errors."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.errors import FieldRangeError, InvalidParameterError
from flwr_privacy.fedvs.quantisation import (
    Scales,
    check_partial_sum,
    dequantise,
    equal_share,
    quantise,
    quantise_stochastic,
    round_half_up,
    round_stochastic,
)
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.paper.conditions import max_scale_bits

FIELD = PrimeField()
WIDTHS = {  # of all clients' expanded data
    "Parkinson": 1508,
    "Credit card": 46,
    "HandWritten": 1298,
    "Caltech-7": 7532,
    "EMNIST": 1568,
    "FashionMNIST": 784,
}
SECRET = 0.8125  # no message may show it


def stream(*purpose: str | int) -> SecureRandom:
    return SecureRandom.insecure(0, "quantisation tests", *purpose)


# Rounding


def test_F9_halves_are_rounded_up() -> None:
    z = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert round_half_up(z).tolist() == [-2, -1, 0, 1, 2, 3]


def test_what_lies_just_below_a_half_is_rounded_down() -> None:
    below = np.nextafter([0.5, 2**40 + 0.5, -0.5], -np.inf)
    assert round_half_up(below).tolist() == [0, 2**40, -1]


@given(st.floats(-(2.0**50), 2.0**50))
def test_rounding_agrees_with_exact_fractions(z: float) -> None:
    assert round_half_up(np.array([z]))[0] == math.floor(Fraction(z) + Fraction(1, 2))


def test_F9_stochastic_rounding_has_the_right_mean() -> None:
    draws = 100_000
    mean = round_stochastic(np.full(draws, 0.3), stream("mean")).mean()
    assert abs(mean - 0.3) < 4 * math.sqrt(0.21 / draws)
    negative = round_stochastic(np.full(draws, -2.7), stream("negative")).mean()
    assert abs(negative + 2.7) < 4 * math.sqrt(0.21 / draws)


class Words(SecureRandom):
    """A source of given words."""

    def __init__(self, words: list[int]) -> None:
        super().__init__()
        self._words = np.array(words, np.uint64)

    def uint64(self, size: int) -> NDArray[np.uint64]:
        assert size == len(self._words)
        return self._words


@pytest.mark.parametrize(("z", "numerator"), [(0.25, 2**51), (-0.75, 2**51), (5.625, 5 * 2**50)])
def test_exactly_the_right_part_of_all_uniform_words_is_rounded_up(
    z: float, numerator: int
) -> None:
    # The words' upper 53 bits below the numerator are the fractional part of all of them.
    words = Words([0, (numerator << 11) - 1, numerator << 11, 2**64 - 1])
    up, down = math.ceil(z), math.floor(z)
    assert round_stochastic(np.full(4, z), words).tolist() == [up, up, down, down]


@given(st.floats(-1e6, 1e6))
def test_stochastic_rounding_goes_to_a_neighbouring_integer(z: float) -> None:
    rounded = round_stochastic(np.full(8, z), stream("neighbours"))
    assert set(rounded.tolist()) <= {math.floor(z), math.ceil(z)}


def test_F9_integers_stay_what_they_are() -> None:
    z = np.arange(-5000, 5000, dtype=float)
    np.testing.assert_array_equal(round_stochastic(z, stream("integers")), z)


def test_stochastic_rounding_keeps_the_shape_and_draws_for_each_entry() -> None:
    rounded = round_stochastic(np.full((40, 50), 0.5), stream("shape"))
    assert rounded.shape == (40, 50)
    assert 800 < rounded.sum() < 1200  # 2000 fair coins: nine standard deviations
    assert len({tuple(row) for row in rounded.tolist()}) == 40


# Into the field and out of it


def test_F9_data_as_elements() -> None:
    x = np.array([-1.3, -0.5, 0.25, 0.49609375, 0.498046875, 0.5])
    expected = [2147483481, 2147483583, 32, 64, 64, 64]
    assert quantise(x, 7, FIELD).tolist() == expected


def test_F10_the_signs_of_a_small_field_and_a_wrapped_sum() -> None:
    small = PrimeField(101)
    elements = np.array([49, 50, 51, 100])
    assert dequantise(elements, scale_bits=0, field=small).tolist() == [49, 50, -50, -1]
    assert dequantise(np.array([60 % 101]), scale_bits=0, field=small).tolist() == [-41]


def test_a_value_comes_back_within_half_a_step() -> None:
    x = np.random.default_rng(1).uniform(-3, 3, (50, 7))
    back = dequantise(quantise(x, 9, FIELD), scale_bits=9, field=FIELD)
    assert np.abs(back - x).max() <= 2.0**-10
    weights = dequantise(
        quantise_stochastic(x, 9, FIELD, stream("back")), scale_bits=9, field=FIELD
    )
    assert 2.0**-10 < np.abs(weights - x).max() < 2.0**-9


def test_a_mean_is_divided_by_the_number_of_clients() -> None:
    assert dequantise(np.array([3 << 4]), scale_bits=4, field=FIELD, divisor=6).tolist() == [0.5]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**30, -(2.0**30)])
def test_values_that_the_field_has_no_room_for_are_refused(value: float) -> None:
    values = np.array([SECRET, value])
    for make in (
        lambda: quantise(values, 0, FIELD),
        lambda: quantise_stochastic(values, 0, FIELD, stream("refused")),
    ):
        with pytest.raises(FieldRangeError) as raised:
            make()
        assert str(SECRET) not in str(raised.value)


def test_the_largest_values_of_the_field_are_taken() -> None:
    largest = float((FIELD.p - 1) // 2)
    elements = quantise(np.array([largest, -largest]), 0, FIELD)
    assert dequantise(elements, scale_bits=0, field=FIELD).tolist() == [largest, -largest]


# Range


def test_F10_the_simple_bound_of_the_six_data_sets() -> None:
    bits = [max_scale_bits(E, 1, 2, FIELD.p) for E in WIDTHS.values()]
    assert bits == [18, 23, 18, 16, 18, 19]


def test_F10_eight_and_eight_bits_fit_all_six_data_sets() -> None:
    for width in WIDTHS.values():
        Scales(data_bits=8, weight_bits=8, x_max=1, w_max=2).check([width], FIELD)


def test_F10_larger_weights_do_not_fit_and_the_error_says_what_does() -> None:
    with pytest.raises(InvalidParameterError, match=r"sum of at most 8, such as \(4, 4\)"):
        Scales(data_bits=8, weight_bits=8, x_max=1, w_max=512).check([7532], FIELD)


@pytest.mark.parametrize("E", [1, 46, 512, 784, 2**29])
def test_the_simple_bound_is_the_largest_that_holds(E: int) -> None:
    bits = max_scale_bits(E, 1, 2, FIELD.p)
    half = (FIELD.p - 1) // 2
    assert Fraction(2) ** bits * 2 * E <= half < Fraction(2) ** (bits + 1) * 2 * E


def test_a_width_that_is_a_power_of_two_leaves_room_for_zero() -> None:
    # 2**30 / (2 * 512) is 2**20, but the largest positive element is 2**30 - 1.
    assert max_scale_bits(512, 1, 2, FIELD.p) == 19


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0.1, 1.0, 2.5]),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([101, 65521, 4194301, 2**31 - 1]),
)
def test_scales_that_pass_never_wrap_and_those_that_fail_name_the_largest_that_pass(
    data_bits: int, weight_bits: int, x_max: float, w_max: float, widths: list[int], p: int
) -> None:
    scales = Scales(data_bits=data_bits, weight_bits=weight_bits, x_max=x_max, w_max=w_max)
    field = PrimeField(p)
    half = (p - 1) // 2
    # The worst data and weights: all at their bounds, each rounded away from zero.
    data = math.floor(Fraction(x_max) * 2**data_bits + Fraction(1, 2))
    weight = math.ceil(Fraction(w_max) * 2**weight_bits)
    worst = sum(widths) * data * weight

    def fits(x_bits: int, w_bits: int) -> bool:
        bound = (Fraction(x_max) * 2**x_bits + Fraction(1, 2)) * (Fraction(w_max) * 2**w_bits + 1)
        return math.floor(sum(widths) * bound) <= half

    if fits(data_bits, weight_bits):
        scales.check(widths, field)
        assert worst <= half
        assert sum(scales.owners_share(width) for width in widths) <= half
    else:
        sums = [x + w for x in range(31) for w in range(31) if fits(x, w)]
        named = rf"a sum of at most {max(sums)}, such as \(" if sums else "no scales fit"
        with pytest.raises(InvalidParameterError, match=named):
            scales.check(widths, field)
    assert worst <= scales.owners_share(sum(widths))


def test_the_range_ends_at_half_the_field() -> None:
    scales = Scales(data_bits=0, weight_bits=0, x_max=1, w_max=1)  # 1.5 times 2 for each column
    field = PrimeField(101)
    scales.check([10, 6], field)
    with pytest.raises(InvalidParameterError, match="no scales fit 17 columns"):
        scales.check([10, 7], field)


def test_owners_shares_are_what_each_can_reach_at_most() -> None:
    scales = Scales(data_bits=3, weight_bits=2, x_max=1, w_max=2)
    assert scales.owners_share(10) == math.floor(10 * 8.5 * 9)
    assert scales.owners_share(10 + 4) == math.floor(14 * 8.5 * 9)


def test_a_partial_sum_is_refused_as_soon_as_it_passes_the_limit() -> None:
    data, weights = np.array([[3, -4], [1, 1]]), np.array([[5], [-2]])  # products 23 and 3
    check_partial_sum(data, weights, 23)
    with pytest.raises(FieldRangeError, match="beyond 22"):
        check_partial_sum(data, weights, 22)
    with pytest.raises(FieldRangeError):
        check_partial_sum(-data, weights, 22)


def test_a_partial_sum_that_float64_cannot_add_exactly_is_refused() -> None:
    data = np.array([[2**30, 2**30]])
    weights = np.array([[2**30], [-(2**30)]])  # the sum is 0, but not for certain
    with pytest.raises(FieldRangeError):
        check_partial_sum(data, weights, 2**30)


def test_equal_shares_add_up_to_no_more_than_half_the_field() -> None:
    for owners in (1, 3, 10, 28):
        assert equal_share(owners, FIELD) * owners <= (FIELD.p - 1) // 2
        assert (equal_share(owners, FIELD) + 1) * owners > (FIELD.p - 1) // 2


# Parameters


@pytest.mark.parametrize(
    "change", [{"data_bits": -1}, {"weight_bits": 31}, {"x_max": 0}, {"w_max": math.inf}]
)
def test_scales_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(InvalidParameterError, match=next(iter(change))):
        Scales(**change)  # type: ignore[arg-type]
