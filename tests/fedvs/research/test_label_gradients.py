"""What gradients of embeddings say of labels, against a model whose gradients are known."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.fedvs.label_gradients import (
    pairs_told_apart,
    similarities,
    spread_labels,
)

LABELS = np.arange(40) % 4


def linear_gradients(confidence: float) -> np.ndarray:
    """Return gradients of the cross entropy by the embeddings, for a linear server_model model."""
    draws = np.random.default_rng(0)
    slopes = draws.normal(size=(4, 12))
    scores = confidence * draws.normal(size=(len(LABELS), 4))
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return (chances - np.eye(4)[LABELS]) @ slopes / len(LABELS)


def test_at_the_start_of_a_training_labels_are_in_the_open() -> None:
    """With equal chances the gradient of a row is one of as many as there are labels."""
    cosines = similarities(linear_gradients(0.0))
    assert pairs_told_apart(cosines, LABELS) == 1
    known = {0: 0, 1: 1, 2: 2, 3: 3}
    np.testing.assert_array_equal(spread_labels(cosines, known), LABELS)
    same = LABELS[:, None] == LABELS
    np.testing.assert_allclose(cosines[same], 1)


def test_later_most_of_them_are() -> None:
    cosines = similarities(linear_gradients(1.0))
    assert 0.9 < pairs_told_apart(cosines, LABELS) < 1
    named = spread_labels(cosines, {k: int(LABELS[k]) for k in range(8)})
    assert (named[8:] == LABELS[8:]).mean() > 0.8


def test_gradients_without_labels_say_nothing_of_them() -> None:
    draws = np.random.default_rng(1)
    cosines = similarities(draws.normal(size=(400, 12)))
    # About 20 of 400 rows each: the standard error of the area is below 0.01.
    assert abs(pairs_told_apart(cosines, np.arange(400) % 20) - 0.5) < 0.05


def test_the_area_is_that_of_an_independent_implementation() -> None:
    draws = np.random.default_rng(2)
    cosines = np.round(similarities(draws.normal(size=(30, 3))), 1)  # with ties
    labels = draws.integers(0, 3, 30)
    first, second = np.triu_indices(30, 1)
    expected = roc_auc_score(labels[first] == labels[second], cosines[first, second])
    assert pairs_told_apart(cosines, labels) == pytest.approx(expected, abs=1e-12)


def test_rounds_are_averaged_where_both_rows_were_in_the_batch() -> None:
    rounds = np.array([[[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]], [[0.0, 3.0], [1.0, 0.0], [4.0, 0.0]]])
    expected = [[1, 0.5, 0], [0.5, 1, 1], [0, 1, 1]]
    np.testing.assert_allclose(similarities(rounds), expected)
    assert not similarities(np.zeros((2, 3))).any()


def test_known_labels_stay_as_they_are() -> None:
    cosines = similarities([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    np.testing.assert_array_equal(spread_labels(cosines, {0: 5, 1: 6, 2: 7}), [5, 6, 7])


def test_what_is_not_allowed_is_named() -> None:
    cosines = np.eye(3)
    with pytest.raises(InvalidParameterError, match="gradients = "):
        similarities(np.zeros(3))
    with pytest.raises(InvalidParameterError, match="labels = "):
        pairs_told_apart(cosines, [1, 2])
    with pytest.raises(InvalidParameterError, match="pairs of one and two labels"):
        pairs_told_apart(cosines, [1, 1, 1])
    with pytest.raises(InvalidParameterError, match="known = 3"):
        spread_labels(cosines, {3: 1})
    with pytest.raises(InvalidParameterError, match="labels of one row or more"):
        spread_labels(cosines, {})
