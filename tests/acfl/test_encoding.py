"""Moments, their encodings, clipped gradients, and the checks of a device's data."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import (
    Moments,
    check_data,
    clipped_gradient,
    gradient,
    mirrored,
    moments,
    moments_gradient,
    one_hot,
    symmetrise,
    upper,
)
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.theory import encode

Array = NDArray[np.float64]

SECRET = 0.8125  # an entry that no message may show


def data(seed: int = 0, m: int = 20, d: int = 3, o: int = 2) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (m, d)), rng.uniform(-1, 1, (m, o)), rng.normal(size=(d, o))


def entries(d: int) -> st.SearchStrategy[Array]:
    return arrays(np.float64, d * (d + 1) // 2, elements=st.floats(-1e6, 1e6))


# Moments and gradients


def test_the_gradient_is_that_of_half_the_sum_of_squared_residuals() -> None:
    X, Y, W = data()

    def loss(model: Array) -> float:
        return float(np.sum((X @ model - Y) ** 2)) / 2

    step = 1e-6
    expected = np.empty_like(W)
    for place in np.ndindex(W.shape):
        moved = np.zeros_like(W)
        moved[place] = step
        expected[place] = (loss(W + moved) - loss(W - moved)) / (2 * step)
    np.testing.assert_allclose(gradient(X, Y, W), expected, rtol=1e-7, atol=1e-7)


def test_moments_give_the_same_gradient_and_add_up_over_devices() -> None:
    X, Y, W = data()
    np.testing.assert_allclose(moments_gradient(moments(X, Y), W), gradient(X, Y, W), rtol=1e-12)
    parts = [moments(X[:7], Y[:7]), moments(X[7:], Y[7:])]
    total = Moments(*(sum(both) for both in zip(*parts, strict=True)))
    np.testing.assert_allclose(moments_gradient(total, W), gradient(X, Y, W), rtol=1e-12)


def test_encoding_adds_gaussian_noise_of_the_stated_variances() -> None:
    X, Y, _ = data(m=5, d=4, o=3)
    exact, draws = moments(X, Y), 4000
    rng = np.random.default_rng(1)
    coded = [encode(X, Y, 0.5, 2.0, rng) for _ in range(draws)]
    first = np.array([c.features for c in coded]) - exact.features
    second = np.array([c.labels for c in coded]) - exact.labels
    for noise, variance in ((first, 0.5), (second, 2.0)):
        pooled = noise.ravel()
        error = math.sqrt(variance / pooled.size)  # standard errors: of a mean, of a variance
        assert abs(pooled.mean()) < 4 * error
        assert abs(pooled.var() - variance) < 4 * variance * math.sqrt(2 / pooled.size)
    # The first noise is not symmetric: both triangles are drawn.
    pairs = first[:, 0, 1] * first[:, 1, 0]
    assert abs(pairs.mean()) < 4 * 0.5 / math.sqrt(draws)


def test_symmetric_noise_is_symmetric_and_has_the_same_variance() -> None:
    X, Y, _ = data(m=5, d=4, o=3)
    exact, draws = moments(X, Y), 4000
    rng = np.random.default_rng(2)
    first = np.array([encode(X, Y, 0.5, 0.0, rng, symmetric=True).features for _ in range(draws)])
    np.testing.assert_array_equal(first, first.transpose(0, 2, 1))
    variances = (first - exact.features).var(axis=0)
    assert np.abs(variances - 0.5).max() < 5 * 0.5 * math.sqrt(2 / draws)  # the largest of ten


def test_F9_without_noise_the_coded_gradient_is_the_full_one() -> None:
    rng = np.random.default_rng(3)
    devices = [data(seed)[:2] for seed in range(5)]
    coded = [encode(X, Y, 0.0, 0.0, rng) for X, Y in devices]
    total = Moments(sum(c.features for c in coded), sum(c.labels for c in coded))
    for seed in range(20):
        W = np.random.default_rng(seed).normal(scale=10.0**seed / 1e6, size=(3, 2))
        full = sum(gradient(X, Y, W) for X, Y in devices)
        bound = 1e-13 * np.abs(full).max()
        np.testing.assert_allclose(moments_gradient(total, W), full, rtol=1e-12, atol=bound)


@pytest.mark.parametrize(("s1", "s2"), [(-1.0, 1.0), (1.0, -1e-9), (math.nan, 1.0)])
def test_a_variance_that_is_none_is_refused(s1: float, s2: float) -> None:
    X, Y, _ = data()
    with pytest.raises(InvalidParameterError, match=r"s[12] = "):
        encode(X, Y, s1, s2, np.random.default_rng(0))


# Triangles


@given(st.integers(1, 7).flatmap(lambda d: st.tuples(st.just(d), entries(d))))
def test_a_symmetric_matrix_and_its_upper_triangle_are_one(case: tuple[int, Array]) -> None:
    d, vector = case
    matrix = mirrored(vector, d)
    assert matrix.shape == (d, d)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(upper(matrix), vector)
    np.testing.assert_array_equal(mirrored(upper(matrix), d), matrix)
    np.testing.assert_array_equal(symmetrise(matrix), matrix)


def test_a_triangle_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="expected 6 values"):
        mirrored(np.zeros(5), 3)


def test_symmetrising_halves_the_noise_off_the_diagonal() -> None:
    noise = np.random.default_rng(4).normal(size=(20000, 3, 3))
    halved = np.array([symmetrise(n) for n in noise])
    np.testing.assert_array_equal(halved, halved.transpose(0, 2, 1))
    variances = halved.var(axis=0)
    expected = np.where(np.eye(3) == 1, 1.0, 0.5)
    assert (np.abs(variances - expected) < 5 * expected * math.sqrt(2 / 20000)).all()


# Clipped gradients


def by_record(X: Array, Y: Array, W: Array, bound: float) -> tuple[Array, float]:
    total, clipped = np.zeros_like(W), 0
    for x, y in zip(X, Y, strict=True):
        own = np.outer(x, x @ W - y)
        norm = math.sqrt(float((own**2).sum()))
        clipped += norm > bound
        total += own * min(1.0, bound / norm) if norm > 0 else 0.0
    return total, clipped / len(X)


@pytest.mark.parametrize("bound", [1e-3, 0.5, 1.0, 3.0, 1e6])
def test_clipped_gradients_are_those_of_a_loop_over_the_records(bound: float) -> None:
    X, Y, W = data(seed=5, m=50)
    X[3] = 0.0  # a record without a gradient
    expected, share = by_record(X, Y, W, bound)
    found, found_share = clipped_gradient(X, Y, W, bound)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    assert found_share == share
    if bound == 1e6:
        np.testing.assert_allclose(found, gradient(X, Y, W), rtol=1e-12)
        assert share == 0


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3), st.floats(1e-6, 1e6))
def test_one_record_changes_the_clipped_sum_by_at_most_the_norm(
    seed: int, bound: float, scale: float
) -> None:
    X, Y, W = data(seed, m=4)
    whole, _ = clipped_gradient(X * scale, Y, W, bound)
    without, _ = clipped_gradient(X[:-1] * scale, Y[:-1], W, bound)
    assert np.linalg.norm(whole - without) <= bound * (1 + 1e-12)


def test_no_records_have_no_gradient() -> None:
    found, share = clipped_gradient(np.empty((0, 3)), np.empty((0, 2)), np.ones((3, 2)), 1.0)
    np.testing.assert_array_equal(found, np.zeros((3, 2)))
    assert share == 0


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e308])
def test_a_model_that_diverged_gives_a_clipped_gradient_of_zero(value: float) -> None:
    X, Y = np.full((2, 3), 1.0), np.zeros((2, 2))
    found, share = clipped_gradient(X, Y, np.full((3, 2), value), 1.0)
    np.testing.assert_array_equal(found, np.zeros((3, 2)))
    assert share == 1


def test_a_record_that_is_lost_does_not_take_the_others_along() -> None:
    X, Y = np.array([[1.0, 0.0], [0.0, 1.0]]), np.zeros((2, 1))
    found, share = clipped_gradient(X, Y, np.array([[5.0], [1e308]]), 1.0)
    np.testing.assert_array_equal(found, [[1.0], [0.0]])
    assert share == 1


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf])
def test_a_clipping_norm_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(InvalidParameterError, match="clipping_norm"):
        clipped_gradient(*data(), bound)


# Labels


def test_one_hot_labels() -> None:
    rows = one_hot(np.array([1, 0, 2, 1], dtype=np.uint8), 3)
    assert rows.dtype == np.float64
    assert rows.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert one_hot(np.empty(0, dtype=int), 3).shape == (0, 3)


@pytest.mark.parametrize(
    "labels",
    [[0, 3], [-1, 0], [[0, 1]], [0.0, 1.0], ["a"]],
    ids=["above", "below", "a matrix", "no integers", "text"],
)
def test_labels_that_are_no_classes_are_refused(labels: Any) -> None:
    with pytest.raises(InvalidParameterError, match="a vector of integers from 0 to 2"):
        one_hot(labels, 3)


# The checks of a device's data


def checked(X: Any, Y: Any, **changes: Any) -> tuple[Array, Array]:
    return check_data(X, Y, **{"feature_bound": 1.0, "label_bound": 1.0, **changes})


def test_data_within_the_bounds_come_back_as_copies() -> None:
    X, Y, _ = data()
    for given_X, given_Y in ((X, Y), (np.asfortranarray(X), Y.tolist()), (X.astype("f4"), Y > 0)):
        features, labels = checked(given_X, given_Y, feature_norm=9.0, label_norm=9.0)
        for found, source in ((features, given_X), (labels, given_Y)):
            np.testing.assert_array_equal(found, np.asarray(source, dtype=np.float64))
            assert found.dtype == np.float64
            assert found.flags.c_contiguous
            assert not np.shares_memory(found, np.asarray(source))


BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "features above": ([[1.0 + 1e-6]], [[0.0]], {}, "X = 'a value outside'"),
    "features below": ([[-1.5]], [[0.0]], {}, "X = 'a value outside'"),
    "features above their bound": ([[SECRET]], [[0.0]], {"feature_bound": 0.5}, "X = 'a value"),
    "labels above": ([[0.0]], [[1.5]], {}, "Y = 'a value outside'"),
    "labels above their bound": ([[0.0]], [[SECRET]], {"label_bound": 0.5}, "Y = 'a value"),
    "a long row": ([[SECRET, 0.9]], [[0.0]], {"feature_norm": 1.0}, "X = 'a row outside'"),
    "a long label": ([[0.0]], [[SECRET, 0.9]], {"label_norm": 1.0}, "Y = 'a row outside'"),
    "fewer labels": ([[0.0], [0.0]], [[0.0]], {}, "Y = 'another number of records'"),
    "more labels": ([[0.0]], [[0.0], [0.0]], {}, "Y = 'another number of records'"),
    "nan": ([[math.nan]], [[0.0]], {}, "X = 'a value that is not finite'"),
    "infinite": ([[0.0]], [[math.inf]], {}, "Y = 'a value that is not finite'"),
    "infinite to be clipped": ([[math.inf]], [[0.0]], {"excess": "clip"}, "not finite"),
    "two ones": ([[0.0]], [[1.0, 1.0]], {"one_hot": True}, "Y = 'another row'"),
    "no one": ([[0.0]], [[0.0, 0.0]], {"one_hot": True}, "Y = 'another row'"),
    "one row of two": (
        [[0.0]] * 2,
        [[0.0, 1.0], [1.0, 1.0]],
        {"one_hot": True},
        "Y = 'another row'",
    ),
    "soft labels": ([[0.0]], [[SECRET, 1 - SECRET]], {"one_hot": True}, "Y = 'another row'"),
    "a minus": ([[0.0]], [[1.0, 1.0, -1.0]], {"one_hot": True}, "Y = 'another row'"),
    "no records": (np.empty((0, 3)), np.empty((0, 1)), {}, "X = 'another kind of array'"),
    "no features": (np.empty((3, 0)), np.empty((3, 1)), {}, "X = 'another kind of array'"),
    "a vector": ([SECRET], [[0.0]], {}, "X = 'another kind of array'"),
    "a vector of labels": ([[0.0]], [SECRET], {}, "Y = 'another kind of array'"),
    "complex": ([[0.5j]], [[0.0]], {}, "X = 'another kind of array'"),
    "text": ([["a"]], [[0.0]], {}, "X = 'another kind of array'"),
    "objects": (np.array([[None]]), [[0.0]], {}, "X = 'another kind of array'"),
    "ragged": ([[0.0], [0.0, SECRET]], [[0.0]], {}, "X = 'rows that differ in length'"),
    "no such excess": ([[0.0]], [[0.0]], {"excess": "rescale"}, "excess = 'rescale'"),
    "no feature bound": ([[0.0]], [[0.0]], {"feature_bound": 0.0}, "feature_bound = 0.0"),
    "no label norm": ([[0.0]], [[0.0]], {"label_norm": -1.0}, "label_norm = -1.0"),
}


@pytest.mark.parametrize(("X", "Y", "changes", "message"), BAD.values(), ids=list(BAD))
def test_unfit_data_are_refused_and_not_shown(
    X: Any, Y: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        checked(X, Y, **changes)
    assert message in str(caught.value)
    assert str(SECRET) not in str(caught.value)


def test_clipping_cuts_entries_and_then_shortens_rows() -> None:
    X, Y = np.array([[3.0, -0.5], [0.1, 0.2]]), np.array([[-4.0], [0.5]])
    features, labels = checked(X, Y, excess="clip")
    assert features.tolist() == [[1.0, -0.5], [0.1, 0.2]]  # nothing else is touched
    assert labels.tolist() == [[-1.0], [0.5]]
    features, labels = checked(X, Y, excess="clip", feature_norm=0.75, label_norm=0.75)
    np.testing.assert_allclose(features[0], np.array([1.0, -0.5]) * 0.75 / math.sqrt(1.25))
    assert features[1].tolist() == [0.1, 0.2]
    assert labels.tolist() == [[-0.75], [0.5]]


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10), st.floats(0.1, 10))
def test_clipped_data_pass_the_check(seed: int, bound: float, norm: float) -> None:
    X, Y, _ = data(seed)
    limits = {"feature_bound": bound, "label_bound": bound, "feature_norm": norm}
    features, labels = checked(10 * X, 10 * Y, excess="clip", label_norm=norm, **limits)
    again = checked(features, labels, label_norm=norm, **limits)
    np.testing.assert_allclose(again[0], features, rtol=1e-9)
    assert np.abs(features).max() <= bound
    assert np.linalg.norm(features, axis=1).max() <= norm * (1 + 1e-12)


def test_what_rounding_put_beyond_a_bound_is_cut_to_it() -> None:
    X, Y = np.array([[1.0 + 1e-12, 0.0]]), np.array([[1.0]])
    features, _ = checked(X, Y, feature_norm=1.0)
    assert features.tolist() == [[1.0, 0.0]]


def test_one_hot_labels_pass() -> None:
    labels = one_hot([0, 2, 1], 3)
    np.testing.assert_array_equal(checked(np.zeros((3, 2)), labels, one_hot=True)[1], labels)
