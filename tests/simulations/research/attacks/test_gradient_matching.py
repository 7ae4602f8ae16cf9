import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attacks.gradient_matching import (
    infer_label,
    match_gradient,
    observed_gradient,
)


def softmax_gradient(weight, records, labels):
    """Gradient of logistic regression's mean cross entropy, by hand."""
    logits = records @ weight.T
    errors = np.exp(logits - logits.max(axis=1, keepdims=True))
    errors /= errors.sum(axis=1, keepdims=True)
    errors[np.arange(len(labels)), labels] -= 1
    return errors.T @ records / len(labels)


def numeric_loss(weight, seen, labels):
    """The matching loss of logistic regression, with its derivative by central differences."""

    def value(records):
        return float(((softmax_gradient(weight, records, labels) - seen) ** 2).sum())

    def loss(records):
        slope = np.empty_like(records)
        for place in np.ndindex(records.shape):
            up, down = records.copy(), records.copy()
            up[place] += 1e-5
            down[place] -= 1e-5
            slope[place] = (value(up) - value(down)) / 2e-5
        return value(records), slope

    return loss


def test_the_label_of_one_record_shows_in_the_gradient_of_the_last_layer():
    draws = np.random.default_rng(0)
    for _ in range(200):
        inputs = draws.uniform(0, 1, size=(1, 12))  # as behind a sigmoid
        label = int(draws.integers(5))
        weight = draws.normal(size=(5, 12))
        gradient = softmax_gradient(weight, inputs, np.array([label]))
        assert infer_label(gradient) == label
        assert infer_label(1e-6 * gradient) == label  # in any unit
        assert (gradient.sum(axis=1) < 0).sum() == 1


def test_the_gradient_of_a_step_is_the_step_over_its_rate():
    draws = np.random.default_rng(1)
    weight, records, labels = draws.normal(size=(3, 4)), draws.normal(size=(2, 4)), np.array([0, 2])
    gradient = softmax_gradient(weight, records, labels)
    stepped = weight - 0.1 * gradient
    np.testing.assert_allclose(
        observed_gradient(weight, stepped, learning_rate=0.1), gradient, atol=1e-14
    )


def test_the_record_of_a_linear_model_is_found():
    draws = np.random.default_rng(2)
    weight, record, label = draws.normal(size=(5, 8)), draws.normal(size=(1, 8)), np.array([3])
    seen = softmax_gradient(weight, record, label)
    found = match_gradient(
        numeric_loss(weight, seen, label), draws.normal(size=(1, 8)), tolerance=1e-12
    )
    assert found.records.shape == (1, 8)
    assert found.loss < 1e-12
    np.testing.assert_allclose(found.records, record, atol=1e-4)


def test_the_search_stops_at_its_tolerance_and_at_its_number_of_steps():
    calls = []

    def loss(x):
        calls.append(float((x**4).sum()))
        return calls[-1], 4 * x**3

    rough = match_gradient(loss, np.full(3, 2.0), tolerance=1.0)
    assert 1e-3 < rough.loss < 1.0
    taken = len(calls)
    fine = match_gradient(loss, np.full(3, 2.0), tolerance=1e-9)
    assert fine.loss < 1e-9
    assert len(calls) - taken > taken
    short = match_gradient(loss, np.full(3, 2.0), iterations=1, tolerance=1e-9)
    assert short.loss > rough.loss
    assert short.loss == float((short.records**4).sum())


def test_a_gradient_with_noise_is_matched_better_by_something_else_than_the_record():
    draws = np.random.default_rng(3)
    weight, record, label = draws.normal(size=(5, 8)), draws.normal(size=(1, 8)), np.array([1])
    seen = softmax_gradient(weight, record, label) + draws.normal(size=(5, 8))
    loss = numeric_loss(weight, seen, label)
    found = match_gradient(loss, draws.normal(size=(1, 8)))
    assert found.loss < loss(record)[0]  # so no search for this minimum returns the record
    assert np.abs(found.records - record).max() > 0.5


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (lambda: observed_gradient([1.0], [2.0], learning_rate=0.0), "learning_rate"),
        (lambda: infer_label(np.ones(3)), "weight_gradient"),
        (lambda: infer_label(np.ones((0, 3))), "weight_gradient"),
        (lambda: infer_label([[np.nan, 1.0]]), "weight_gradient"),
        (lambda: match_gradient(lambda x: (0.0, x), [1.0], iterations=0), "iterations"),
        (lambda: match_gradient(lambda x: (0.0, x), [1.0], tolerance=-1.0), "tolerance"),
    ],
)
def test_bad_input_is_refused_by_name(call, parameter):
    with pytest.raises(InvalidParameterError, match=parameter):
        call()
