import math

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attacks.inversion import (
    Recovery,
    best_matches,
    invert_linear,
)


class TwoLayers:
    """A perceptron with ReLU and cross entropy, its gradients by hand."""

    def __init__(self, seed: int, features: int = 12, units: int = 30, classes: int = 4) -> None:
        draws = np.random.default_rng(seed)
        self.first = draws.normal(size=(units, features))
        self.bias = draws.normal(size=units)
        self.second = draws.normal(size=(classes, units))

    def first_gradient(self, record, label):
        hidden = np.maximum(self.first @ record + self.bias, 0)
        logits = self.second @ hidden
        errors = np.exp(logits - logits.max())
        errors /= errors.sum()
        errors[label] -= 1
        delta = (self.second.T @ errors) * (hidden > 0)
        return np.outer(delta, record), delta

    def step(self, record, label, rate):
        weight, bias = self.first_gradient(record, label)
        self.first -= rate * weight
        self.bias -= rate * bias


def some_records(count, features=12, seed=1):
    return np.random.default_rng(seed).normal(size=(count, features))


def test_the_gradient_of_one_record_gives_it_away_at_every_unit_with_a_signal():
    record = some_records(1)[0]
    weight, bias = TwoLayers(seed=0).first_gradient(record, label=2)
    candidates = invert_linear(weight, bias, signal=1e-9)
    assert 0 < len(candidates) == np.count_nonzero(bias) < 30
    np.testing.assert_allclose(candidates, np.tile(record, (len(candidates), 1)), rtol=1e-9)


def test_so_does_the_difference_after_many_steps_on_it_in_any_unit():
    record = some_records(1)[0]
    network = TwoLayers(seed=0)
    first, bias = network.first.copy(), network.bias.copy()
    for _ in range(20):
        network.step(record, label=1, rate=0.05)
    candidates = invert_linear(-7 * (network.first - first), -7 * (network.bias - bias))
    assert len(candidates) > 0
    np.testing.assert_allclose(candidates, np.tile(record, (len(candidates), 1)), rtol=1e-6)


def test_of_many_records_it_is_their_mixture_and_a_unit_of_one_record_gives_that_one_away():
    deltas = np.array([[0.5, 0.1, 0.0], [0.25, 0.0, 0.0], [-0.05, 0.0, 0.2]])  # record, unit
    records = some_records(3)
    candidates = invert_linear(deltas.T @ records, deltas.sum(axis=0))
    mixture = (0.5 * records[0] + 0.25 * records[1] - 0.05 * records[2]) / 0.7
    np.testing.assert_allclose(candidates, [mixture, records[0], records[2]], rtol=1e-12)
    similarities = best_matches(candidates, records).similarities
    assert similarities[[0, 2]] == pytest.approx(1.0, abs=1e-12)
    assert similarities[1] < 0.999


def test_units_without_enough_signal_are_left_out():
    bias = np.array([0.0, -2.0, 0.0019, 0.0021])
    weight = np.outer(bias, [1.0, 2.0])
    assert len(invert_linear(weight, bias)) == 2
    assert len(invert_linear(weight, bias, signal=0.0)) == 3
    assert invert_linear(np.ones((4, 2)), np.zeros(4)).shape == (0, 2)


def test_matches_are_those_of_a_search_over_all_pairs():
    draws = np.random.default_rng(2)
    candidates, records, known = (draws.normal(size=size) for size in ((7, 5), (9, 5), 5))
    matches = best_matches(candidates, records, known=known)
    for record, similarity, found in zip(records, matches.similarities, matches.found, strict=True):
        cosines = [
            (c - known) @ (record - known) / math.dist(c, known) / math.dist(record, known)
            for c in candidates
        ]
        best = max(range(7), key=lambda k: abs(cosines[k]))
        assert similarity == pytest.approx(abs(cosines[best]))
        np.testing.assert_array_equal(found, candidates[best])


def test_scale_and_sign_of_a_candidate_do_not_matter_and_what_is_known_is_no_find():
    record, known = some_records(2)
    away = record - known
    for factor in (1e-150, -3.0, 1e150):
        matches = best_matches([factor * away], [away])
        assert matches.similarities == pytest.approx(1.0)
    assert best_matches([known], [record], known=known).similarities == [0.0]
    assert best_matches([record], [known], known=known).similarities == [0.0]


def test_without_candidates_nothing_is_found_but_what_was_known():
    matches = best_matches(np.empty((0, 12)), some_records(3), known=np.arange(12.0))
    np.testing.assert_array_equal(matches.similarities, np.zeros(3))
    np.testing.assert_array_equal(matches.found, np.tile(np.arange(12.0), (3, 1)))


def test_a_random_candidate_has_the_similarity_of_a_random_direction():
    count, features = 4000, 20
    similarities = best_matches(
        some_records(1, features, seed=3), some_records(count, features, seed=4)
    ).similarities
    # Squares are Beta(1/2, (features - 1)/2): mean 1/features, variance below 2/features^2.
    error = math.sqrt(2 / count) / features
    assert abs(np.mean(similarities**2) - 1 / features) < 4 * error


def test_a_record_is_recovered_from_the_level_on_and_only_above_the_guess():
    attack = np.array([0.9, 0.8999, 0.95, 0.95, 0.96])
    guess = np.array([0.1, 0.1, 0.95, 0.97, 0.95])
    recovery = Recovery(similarities=attack, guessed=guess, level=0.9)
    assert recovery.recovered.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("weight", "bias", "options", "text"),
    [
        (np.ones((2, 3)), np.ones(3), {}, r"weight_update = \(2, 3\): expected one row for each"),
        (np.ones(3), np.ones(3), {}, r"weight_update = \(3,\): expected an array with 2 axes"),
        (np.ones((3, 1)), np.ones((3, 1)), {}, r"bias_update = \(3, 1\): expected an array with 1"),
        (np.full((3, 1), np.nan), np.ones(3), {}, "weight_update = 'an array with NaN or inf"),
        (np.ones((3, 1)), np.full(3, np.inf), {}, "bias_update = 'an array with NaN or infinity'"),
        (np.ones((3, 1)), np.ones(3), {"signal": -0.1}, "signal = -0.1: expected a finite number"),
    ],
)
def test_updates_that_do_not_fit_are_refused(weight, bias, options, text):
    with pytest.raises(InvalidParameterError, match=text):
        invert_linear(weight, bias, **options)


def test_candidates_with_other_features_are_refused():
    with pytest.raises(InvalidParameterError, match="expected 12 features, as the records have"):
        best_matches(np.ones((2, 11)), some_records(3))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"level": 1.5}, "level = 1.5"),
        ({"guessed": np.ones(3)}, r"guessed = \(3,\): expected the shape \(2,\)"),
        ({"similarities": np.ones(0)}, r"similarities = \(0,\): expected one axis"),
    ],
)
def test_a_recovery_that_cannot_be_is_refused(change, text):
    with pytest.raises(InvalidParameterError, match=text):
        Recovery(**{"similarities": np.ones(2), "guessed": np.ones(2), **change})
