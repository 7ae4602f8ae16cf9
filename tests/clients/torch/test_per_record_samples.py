"""Poisson batches of the trainer that clips per record, and that its steps repeat."""

import math

import numpy as np
import pytest
import torch
from record_models import CASES, difference, norm_of, records, trained
from scipy import stats
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.per_record_steps import PerRecordPlan, asked, in_step
from flwr_privacy.clients.torch import (
    get_arrays,
    initialise,
    linear,
    mlp,
    set_arrays,
    train_per_record,
)
from flwr_privacy.clients.torch.record_gradients import RecordGradients
from flwr_privacy.privacy.randomness import SecureRandom


def poisson_steps(rate, repetitions, n=40):
    """Sizes of the batch of many sampled steps, read off the length of the step."""
    features, labels = np.ones((n, 2), np.float32), np.zeros(n, np.int64)
    plan = PerRecordPlan(clipping_norm=0.1, learning_rate=1.0, sampling_rate=rate)
    random = SecureRandom.insecure(0, "test")
    model = initialise(lambda: linear(2, 2), 0)
    start = get_arrays(model)
    sizes = []
    for _ in range(repetitions):
        set_arrays(model, start)
        with asked(plan, random):
            train_per_record(model, features, labels)
        # All gradients are the same and saturated: the step is 0.1 * size / (rate * n) long.
        sizes.append(difference(get_arrays(model), start) * rate * n / 0.1)
    return np.array(sizes)


def test_poisson_batches_are_binomial_over_a_fixed_denominator():
    sizes = poisson_steps(0.3, 300)
    assert np.abs(sizes - sizes.round()).max() < 1e-3
    mean, variance = 40 * 0.3, 40 * 0.3 * 0.7
    assert abs(sizes.mean() - mean) < 4 * math.sqrt(variance / 300)
    assert abs(sizes.var() - variance) < 4 * variance * math.sqrt(2 / 300)


def test_an_empty_batch_changes_nothing():
    sizes = poisson_steps(0.01, 20)
    assert (sizes == 0).any()


def test_each_record_is_in_the_step_with_the_rate():
    plan = PerRecordPlan(clipping_norm=1.0, learning_rate=1.0, sampling_rate=0.2)
    with asked(plan, SecureRandom.insecure(1, "test")):
        chosen = np.array([in_step(plan, 50) for _ in range(2000)])
    # One chi-square test over the records, one over pairs of neighbours for independence.
    counts = chosen.sum(axis=0)
    statistic = ((counts - 400) ** 2 / (2000 * 0.2 * 0.8)).sum()
    assert 1e-4 < stats.chi2.sf(statistic, 50) < 1 - 1e-4
    pairs = (chosen[:, 1:] & chosen[:, :-1]).mean()
    assert abs(pairs - 0.04) < 4 * math.sqrt(0.04 * 0.96 * 1.4 / (2000 * 49))


def test_outside_of_a_test_every_sample_is_another():
    plan = PerRecordPlan(clipping_norm=1.0, learning_rate=1.0, sampling_rate=0.5)
    assert not np.array_equal(in_step(plan, 128), in_step(plan, 128))
    with asked(plan):
        first = in_step(plan, 128)
    with asked(plan):
        assert not np.array_equal(first, in_step(plan, 128))


def test_a_seeded_sample_repeats():
    plan = PerRecordPlan(clipping_norm=1.0, learning_rate=1.0, sampling_rate=0.5)
    samples = []
    for seed in (1, 1, 2):
        with asked(plan, SecureRandom.insecure(seed, "test")):
            samples.append(in_step(plan, 128))
    assert np.array_equal(samples[0], samples[1])
    assert not np.array_equal(samples[0], samples[2])


def test_dropout_draws_for_each_record():
    features, labels = np.ones((2, 6), np.float32), np.zeros(2, np.int64)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2, bias=False))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = RecordGradients(
            model, functional.cross_entropy, torch.tensor(features[0]), torch.tensor(labels[0])
        )({}, torch.tensor(features), torch.tensor(labels))
    _, inputs = found.outer["1.weight"]
    assert not torch.equal(inputs[0], inputs[1])
    assert set(inputs.unique().tolist()) == {0.0, 2.0}


def test_the_step_is_taken_on_one_thread():
    threads = torch.get_num_threads()
    seen = []

    def loss(outputs, labels):
        seen.append(torch.get_num_threads())
        return functional.cross_entropy(outputs, labels)

    settings = {"clipping_norm": 1.0, "learning_rate": 1.0, "loss": loss}
    try:
        torch.set_num_threads(3)
        train_per_record(linear(6, 3), *records(), **settings)
        train_per_record(linear(6, 3), records()[0], records()[1] + 7, **settings)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {1}


def test_a_step_repeats_bit_for_bit():
    for case in CASES:
        factory, shape, loss = CASES[case]
        settings = {"clipping_norm": 1.0, "learning_rate": 1.0, "loss": loss}
        steps = [trained(factory, *records(shape=shape), **settings)[1] for _ in range(2)]
        assert steps[0].after == steps[1].after


def test_half_precision_counts_its_rounding():
    features, labels = records(n=5)
    model = initialise(lambda: mlp([6, 8, 3]), 0).half()
    start = get_arrays(model)
    step = train_per_record(
        model, features.astype(np.float16), labels, clipping_norm=1.0, learning_rate=1e-4
    )
    assert all(a.dtype == np.float16 for a in get_arrays(model).values())
    norm = norm_of(start)
    assert step.rounding == pytest.approx(norm * 2**-11, rel=0.01)
