"""What Gram matrices say of records, against the records: scikit-learn's digits and random ones."""

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.gram_matrix import (
    integer_records,
    leaked_records,
    leverage,
    span_distance,
)
from flwr_privacy.simulations.research.attacks.membership import evaluate

Matrix = NDArray[np.float64]

IMAGES, CLASSES = load_digits(return_X_y=True)
PIXELS = IMAGES / 16
ORDER = np.random.default_rng(0).permutation(len(PIXELS))


def digits(m: int) -> tuple[Matrix, Matrix]:
    """Return pixels and one-hot labels of the first m digits of the order."""
    return PIXELS[ORDER[:m]], np.eye(10)[CLASSES[ORDER[:m]]]


def same_rows(found: Matrix, truth: Matrix) -> bool:
    return np.array_equal(found[np.lexsort(found.T)], truth[np.lexsort(truth.T)])


@pytest.mark.parametrize("m", [1, 7, 30])
def test_the_rank_is_the_number_of_records_and_the_counts_those_of_the_classes(m: int) -> None:
    X, Y = digits(m)
    leak = leaked_records(X.T @ X, X.T @ Y, one_hot=True)
    assert leak.rank == m
    assert leak.counts is not None
    np.testing.assert_array_equal(leak.counts, Y.sum(axis=0))
    np.testing.assert_allclose(leak.class_sums, Y.T @ X)


def test_of_more_records_than_features_the_counts_are_not_told() -> None:
    X, Y = digits(200)
    leak = leaked_records(X.T @ X, X.T @ Y, one_hot=True)
    assert leak.rank < 64
    assert leak.counts is None
    assert leak.records.shape == (0, 64)
    assert leak.labels.shape == (0, 10)


def test_labels_that_are_not_one_hot_have_no_counts() -> None:
    X, _ = digits(8)
    Y = np.random.default_rng(1).normal(size=(8, 3))
    assert leaked_records(X.T @ X, X.T @ Y, one_hot=True).counts is None


def test_who_is_alone_in_a_class_is_read_off() -> None:
    places = [int(np.flatnonzero(c == CLASSES)[0]) for c in (0, 3, 3, 7)]
    places[2] = int(np.flatnonzero(CLASSES == 3)[1])
    X, Y = PIXELS[places], np.eye(10)[CLASSES[places]]
    leak = leaked_records(X.T @ X, X.T @ Y, one_hot=True)
    np.testing.assert_allclose(leak.records, X[[0, 3]], atol=1e-12)
    np.testing.assert_array_equal(leak.labels, np.eye(10)[[0, 7]])


def test_a_single_record_is_known_to_its_sign_and_with_a_class_with_it() -> None:
    x, y = np.array([[0.5, -2.0, 0.25]]), np.array([[0.0, 1.0]])
    leak = leaked_records(x.T @ x, x.T @ y, one_hot=True)
    np.testing.assert_allclose(leak.records, x, atol=1e-12)
    np.testing.assert_allclose(leak.labels, y, atol=1e-12)
    blind = leaked_records(x.T @ x, x.T @ y)
    np.testing.assert_allclose(blind.records, -x, atol=1e-12)  # its sum is negative
    np.testing.assert_allclose(blind.labels, -y, atol=1e-12)
    np.testing.assert_allclose(blind.records.T @ blind.labels, x.T @ y, atol=1e-12)


def test_nothing_is_found_in_nothing() -> None:
    leak = leaked_records(np.zeros((3, 3)), np.zeros((3, 2)), one_hot=True)
    assert (leak.rank, leak.records.shape, leak.labels.shape) == (0, (0, 3), (0, 2))
    np.testing.assert_array_equal(span_distance(np.zeros((3, 3)), np.eye(3)), np.ones(3))


def test_own_records_lie_in_the_row_space_and_others_do_not() -> None:
    X, _ = digits(20)
    others = PIXELS[ORDER[20:220]]
    distances = span_distance(X.T @ X, np.concatenate([X, others]))
    assert distances[:20].max() < 1e-9
    assert distances[20:].min() > 0.1
    mixed = np.random.default_rng(2).permutation(220)
    found = evaluate(-distances[mixed], (np.arange(220) < 20)[mixed], delta=0.0)
    assert found.auc == 1.0


def test_distance_is_the_sine_of_the_angle() -> None:
    X = np.array([[1.0, 0.0, 0.0]])
    candidates = [[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, -3.0], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(
        span_distance(X.T @ X, candidates), [0.0, np.sqrt(0.5), 1.0, 0.0], atol=1e-15
    )


@pytest.mark.parametrize("m", [10, 40, 500])
def test_no_own_record_has_a_leverage_above_1_and_they_sum_up_to_the_rank(m: int) -> None:
    X, _ = digits(m)
    values = leverage(X.T @ X, X)
    rank = np.linalg.matrix_rank(X)
    assert values.max() < 1 + 1e-9
    assert values.sum() == pytest.approx(rank)
    if m == rank:
        np.testing.assert_allclose(values, 1, atol=1e-9)


def test_with_more_records_than_features_a_leverage_above_1_still_proves_absence() -> None:
    X, _ = digits(100)
    others = leverage(X.T @ X, PIXELS[ORDER[100:]])
    assert (others > 1).mean() > 0.3
    hat = X @ np.linalg.pinv(X)
    np.testing.assert_allclose(leverage(X.T @ X, X), np.diagonal(hat), atol=1e-9)


@pytest.mark.parametrize("m", [1, 2, 5, 12, 25])
def test_images_are_found_one_by_one_and_exactly(m: int) -> None:
    X, Y = digits(m)
    found = integer_records(X.T @ X, step=1 / 16)
    assert same_rows(found, X)
    leak = leaked_records(X.T @ X, X.T @ Y, one_hot=True, step=1 / 16)
    assert same_rows(np.hstack([leak.records, np.rint(leak.labels)]), np.hstack([X, Y]))
    np.testing.assert_allclose(leak.labels, np.rint(leak.labels), atol=1e-6)


def test_images_of_one_class_are_as_well() -> None:
    X = PIXELS[np.flatnonzero(CLASSES == 3)[:15]]
    assert same_rows(integer_records(X.T @ X, step=1 / 16), X)


def test_records_with_both_signs_are_found_to_their_sign() -> None:
    X = np.random.default_rng(3).integers(-5, 6, (8, 30)).astype(np.float64)
    found = integer_records(X.T @ X, step=1.0)
    signs = np.where(X.sum(axis=1) < 0, -1.0, 1.0)[:, None]
    assert same_rows(np.abs(found), np.abs(X))
    assert same_rows(found, X * signs) or (X.sum(axis=1) == 0).any()
    Y = np.eye(3)[np.arange(8) % 3]
    leak = leaked_records(X.T @ X, X.T @ Y, one_hot=True, step=1.0)
    assert same_rows(leak.records, X)  # the labels say which sign


def test_an_error_in_the_gram_matrix_does_no_harm_until_it_reaches_the_squared_step() -> None:
    X, _ = digits(10)
    error = np.random.default_rng(4).uniform(-1, 1, (64, 64)) / 16**2
    error = (error + error.T) / 2
    assert same_rows(integer_records(X.T @ X + 0.09 * error, step=1 / 16), X)
    assert integer_records(X.T @ X + error, step=1 / 16).shape == (0, 64)


def test_what_is_on_no_grid_or_too_much_is_not_found() -> None:
    X = np.random.default_rng(5).uniform(size=(6, 20))
    assert integer_records(X.T @ X, step=1 / 16).shape == (0, 20)
    many, _ = digits(30)
    assert integer_records(many.T @ many, step=1 / 16, most=29).shape == (0, 64)
    repeated = np.concatenate([many[:4], many[:1]])  # linearly dependent
    found = integer_records(repeated.T @ repeated, step=1 / 16)
    assert {tuple(x) for x in found} <= {tuple(x) for x in many[:4]}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: span_distance(np.zeros((2, 3)), np.zeros((1, 2))), "features"),
        (lambda: span_distance(np.full((2, 2), np.nan), np.zeros((1, 2))), "features"),
        (lambda: leverage(np.eye(2), np.zeros((1, 3))), "candidates"),
        (lambda: leaked_records(np.eye(2), np.zeros((3, 1))), "labels"),
        (lambda: integer_records(np.eye(2), step=0), "step"),
        (lambda: integer_records(np.eye(2), step=1e-9), "step"),
    ],
    ids=["shape", "nan", "features", "labels", "no-step", "fine-step"],
)
def test_what_does_not_fit_is_named(call, name: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidParameterError) as error:
        call()
    assert error.value.parameter == name
