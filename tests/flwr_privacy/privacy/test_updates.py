import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.updates import SMALLEST_NORM, Update, clip, released_names

MODEL = {
    "conv.weight": np.zeros((2, 3), np.float32),
    "bn.weight": np.ones(3, np.float64),
    "bn.running_mean": np.zeros(3, np.float32),
    "bn.running_var": np.ones(3, np.float32),
    "bn.num_batches_tracked": np.array(7),
    "half": np.zeros((), np.float16),
    "mask": np.array([True]),
    "steps": np.arange(2, dtype=np.uint8),
    "my_running_mean": np.zeros(1, np.float32),
}


def square(vector: np.ndarray) -> Fraction:
    """Return the exact square of the L2 norm."""
    return sum((Fraction(float(value)) ** 2 for value in vector.reshape(-1)), Fraction(0))


def test_floating_point_weights_are_released_in_the_order_of_the_model():
    assert released_names(MODEL) == ["conv.weight", "bn.weight", "half", "my_running_mean"]


@pytest.mark.parametrize("name", ["running_mean", "running_var", "num_batches_tracked"])
@pytest.mark.parametrize("prefix", ["", "bn.", "block.0.bn."])
def test_statistics_are_kept_back_wherever_the_layer_sits(prefix, name):
    model = {prefix + name: np.zeros(2, np.float32), "w": np.zeros(2, np.float32)}
    assert released_names(model) == ["w"]


def test_further_names_can_be_kept_back_also_those_that_are_kept_back_anyway():
    names = released_names(MODEL, ("half", "steps", "bn.weight"))
    assert names == ["conv.weight", "my_running_mean"]


def test_a_name_to_keep_back_that_the_model_has_not_is_refused():
    with pytest.raises(InvalidParameterError, match=r"keep_back = \['a', 'b'\]: expected names of"):
        released_names(MODEL, ("b", "half", "a"))


@pytest.mark.parametrize(
    ("model", "keep_back"),
    [
        ({}, ()),
        ({"n": np.arange(3)}, ()),
        ({"bn.running_mean": np.zeros(3)}, ()),
        ({"w": np.zeros(3)}, ("w",)),
    ],
)
def test_a_model_of_which_nothing_is_left_is_refused(model, keep_back):
    with pytest.raises(InvalidParameterError, match="floating-point weights that are not kept"):
        released_names(model, keep_back)


singles = st.floats(-(2.0**120), 2.0**120, width=32)


@given(
    st.data(),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.lists(array_shapes(), min_size=1, max_size=3),
)
@settings(max_examples=60)
def test_an_update_is_the_difference_in_float64_array_after_array(data, dtype, shapes):
    def draw(shape):
        if dtype == np.float16:
            return data.draw(arrays(np.float16, shape, elements=st.floats(-999, 999, width=16)))
        return data.draw(arrays(np.float32, shape, elements=singles)).astype(dtype)

    start = {str(i): draw(shape) for i, shape in enumerate(shapes)}
    trained = {name: draw(array.shape) for name, array in start.items()}
    names = list(start)[::-1]
    update = Update.between(start, trained, names)
    expected = [
        float(t) - float(s)
        for name in names
        for t, s in zip(trained[name].flat, start[name].flat, strict=True)
    ]
    assert update.vector.dtype == np.float64
    np.testing.assert_array_equal(update.vector, expected)
    assert list(update.shapes.items()) == [(name, start[name].shape) for name in names]


def test_memory_order_and_single_numbers_make_no_difference():
    start = {"w": np.asfortranarray(np.zeros((2, 3))), "s": np.array(1.0), "none": np.zeros((0, 2))}
    trained = {"none": np.zeros((0, 2)), "s": np.array(3.5), "w": np.arange(6.0).reshape(2, 3)}
    update = Update.between(start, trained, ["w", "none", "s"])
    np.testing.assert_array_equal(update.vector, [0, 1, 2, 3, 4, 5, 2.5])
    other = {**trained, "w": np.asfortranarray(trained["w"])}
    np.testing.assert_array_equal(Update.between(start, other, start).vector[:6], np.arange(6))


def test_what_was_trained_may_have_another_width_and_further_arrays():
    start = {"w": np.ones(2, np.float32)}
    trained = {"w": np.array([1 + 2.0**-40, 2.0]), "extra": np.zeros(9)}
    update = Update.between(start, trained, ["w"])
    np.testing.assert_array_equal(update.vector, [2.0**-40, 1.0])


def test_the_vector_is_a_copy():
    start, trained = {"w": np.zeros(2)}, {"w": np.ones(2)}
    update = Update.between(start, trained, ["w"])
    update.vector[:] = 5
    np.testing.assert_array_equal(start["w"], [0, 0])
    np.testing.assert_array_equal(trained["w"], [1, 1])


@pytest.mark.parametrize(
    ("trained", "text"),
    [
        ({}, "the training returned no array 'w'"),
        ({"0": np.zeros(3)}, "the training returned no array 'w'"),
        ({"w": np.zeros(4)}, r"'w' as float64 of shape \(4,\), not as floats of shape \(3,\)"),
        ({"w": np.zeros((3, 1))}, r"of shape \(3, 1\)"),
        ({"w": np.array(0.0)}, r"of shape \(\)"),
        ({"w": np.zeros(3, int)}, "'w' as int64"),
        ({"w": np.zeros(3, bool)}, "'w' as bool"),
        ({"w": np.zeros(3, complex)}, "'w' as complex128"),
    ],
)
def test_another_model_than_the_one_that_was_given_is_refused(trained, text):
    with pytest.raises(ProtocolError, match=text):
        Update.between({"w": np.zeros(3)}, trained, ["w"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_value_that_is_not_finite_is_refused_by_name(value, dtype):
    model = {"a": np.zeros(2, dtype), "b": np.zeros(3, dtype)}
    bad = {**model, "b": np.array([0, value, 0], dtype)}
    for start, trained in ((model, bad), (bad, model), (bad, bad)):
        with pytest.raises(DataError, match="the update of 'b' has NaN or infinity"):
            Update.between(start, trained, model)


def test_a_difference_beyond_float64_is_refused_and_one_whose_square_is_is_not():
    start, trained = {"w": np.array([-1.7e308])}, {"w": np.array([1.7e308])}
    with pytest.raises(DataError, match="NaN or infinity"):
        Update.between(start, trained, ["w"])
    assert Update.between({"w": np.zeros(1)}, trained, ["w"]).vector == [1.7e308]


def test_a_vector_comes_apart_into_views_by_name():
    start = {"w": np.zeros((2, 2), np.float32), "s": np.array(0.0), "none": np.zeros((0, 5))}
    update = Update.between(start, start, ["s", "w", "none"])
    codes = np.array([5, 1, 2, 3, 4], np.int32)
    parts = update.arrays(codes)
    assert list(parts) == ["s", "w", "none"]
    assert {name: part.shape for name, part in parts.items()} == {
        name: array.shape for name, array in start.items()
    }
    np.testing.assert_array_equal(parts["w"], [[1, 2], [3, 4]])
    assert parts["s"] == 5
    codes[0] = 9
    assert parts["s"] == 9
    assert parts["w"].dtype == np.int32


def test_one_array_comes_back_whole():
    update = Update.between({"w": np.zeros((2, 3))}, {"w": np.ones((2, 3))}, ["w"])
    np.testing.assert_array_equal(update.arrays(update.vector)["w"], np.ones((2, 3)))


@given(
    arrays(
        np.float64,
        st.integers(0, 40),
        elements=st.floats(-1e290, 1e290) | st.floats(-3, 3) | st.floats(-1e-300, 1e-300),
    ),
    st.floats(1e-12, 1e12) | st.just(SMALLEST_NORM),
)
@example(np.full(40, 5e-324), 1.0)
@example(np.array([1e290, 5e-324, -1.0]), 1e-12)
@settings(max_examples=400)
def test_clipped_a_vector_is_within_the_bound_exactly_and_not_shorter_than_it_must_be(vector, norm):
    clipped = vector.copy()
    factor = clip(clipped, norm)
    assert square(clipped) <= Fraction(norm) ** 2
    if factor > 1e-290:  # else it has few digits; the vector has all of them
        np.testing.assert_allclose(clipped, vector * factor, rtol=1e-14, atol=1e-300)
    assert 0 <= factor <= 1
    if factor < 1:
        slack = Fraction(1) - Fraction(2 * vector.size + 8, 2**52)
        assert square(vector) > (Fraction(norm) * slack) ** 2
        # What is lost to denormals is at most half the smallest one per entry.
        lost = Fraction(vector.size, 2**1070)
        assert square(clipped) >= (Fraction(norm) * slack - lost) ** 2


def test_the_bound_is_strict_where_rounding_uses_most_of_what_is_taken_off():
    """With half as much taken off, 1 in 150 vectors of two entries is beyond the bound."""
    draws = np.random.default_rng(0)
    for norm, vector in zip(
        draws.uniform(0.5, 2, 2000), draws.normal(0, 10, (2000, 2)), strict=True
    ):
        clip(vector, norm)
        assert square(vector) <= Fraction(norm) ** 2


@given(st.integers(1, 30), st.integers(-8, 8), st.integers(0, 2**32), st.floats(-60, 60))
@settings(max_examples=400)
def test_the_bound_is_strict_for_vectors_that_are_a_few_roundings_from_it(size, ulps, seed, scale):
    direction = np.random.default_rng(seed).normal(size=size)
    norm = 2.0**scale
    vector = direction / np.linalg.norm(direction) * norm * (1 + ulps * 2.0**-53)
    clip(vector, norm)
    assert square(vector) <= Fraction(norm) ** 2


@pytest.mark.parametrize("size", [1, 2, 1000, 200_000])
def test_the_bound_is_strict_for_long_vectors(size):
    draws = np.random.default_rng(size)
    for vector in (np.full(size, 0.1), draws.normal(size=size), draws.standard_cauchy(size)):
        length = math.sqrt(math.fsum(vector**2))
        clip(vector, 0.7)
        if length > 0.7:
            # A sum of many exact squares takes long; fsum of squares is off by 2**-52 at most.
            assert math.fsum(vector**2) <= 0.49 * (1 + 2.0**-51)
            assert math.fsum(vector**2) >= 0.49 * (1 - 4 * size * 2.0**-52 - 1e-15)


@pytest.mark.parametrize(
    ("vector", "norm"),
    [
        (np.zeros(0), 1.0),
        (np.zeros(5), SMALLEST_NORM),
        (np.array([3.0, -4.0]), 5.00001),
        (np.array([-2.0]), 2.00001),
        (np.full(3, 5e-324), SMALLEST_NORM),
        (np.full(4, 1e300), 2.1e300),
        (np.full(1, 1.6e308), 1.7e308),
        (np.array([1e300, 5e-324]), 1.1e300),
    ],
)
def test_what_is_within_the_bound_is_left_as_it_is(vector, norm):
    same = vector.copy()
    assert clip(same, norm) == 1.0
    np.testing.assert_array_equal(same, vector)


@pytest.mark.parametrize(
    ("vector", "norm", "expected"),
    [
        (np.full(4, 1e300), 1.0, 0.5),
        (np.full(4, 1.7e308), 1.0, 0.5),  # the norm is beyond float64
        (np.full(4, -1.7e308), 1e308, -0.5e308),
        (np.array([1e200]), 2.0, 2.0),
        (np.full(4, 1e-99), SMALLEST_NORM, SMALLEST_NORM / 2),
        # The factor would be a denormal, which has few digits.
        (np.full(1, 1e308), 2.6e-16, 2.6e-16),
        (np.full(4, 1e308), 5.2e-16, 2.6e-16),
        (np.full(4, 1.7e308), SMALLEST_NORM, SMALLEST_NORM / 2),
    ],
)
def test_norms_whose_squares_are_beyond_float64_are_clipped_all_the_same(vector, norm, expected):
    clip(vector, norm)
    np.testing.assert_allclose(vector, expected, rtol=1e-12)
    assert square(vector) <= Fraction(norm) ** 2


@pytest.mark.parametrize("norm", [0.0, -1.0, 5e-324, 1e-101, math.inf, math.nan])
def test_a_norm_that_cannot_be_kept_strictly_is_refused(norm):
    vector = np.ones(2)
    with pytest.raises(InvalidParameterError, match="clipping_norm = "):
        clip(vector, norm)
    np.testing.assert_array_equal(vector, np.ones(2))
