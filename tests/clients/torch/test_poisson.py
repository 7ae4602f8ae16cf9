"""Training on Poisson batches: which records are in a step, and the certificate."""

import math
import threading

import numpy as np
import pytest
import torch
from record_models import records
from scipy import stats
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.poisson_steps import (
    PoissonPlan,
    PoissonSteps,
    asked_steps,
    certify_steps,
    current_steps,
    poisson_batches,
)
from flwr_privacy.clients.certificates.request import digests
from flwr_privacy.clients.torch import (
    get_arrays,
    initialise,
    linear,
    mlp,
    set_arrays,
    train,
    train_poisson,
)
from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom

PLAN = PoissonPlan(sampling_rate=0.2, steps=7)


def factory():
    return mlp([6, 8, 3])


def seeded(seed=0):
    return SecureRandom.insecure(seed, "test")


def same(first, second):
    return all(np.array_equal(first[name], second[name]) for name in first)


def included(rate, steps, n):
    """Whether each record was in each step of one training, (steps, n), read off its batches."""
    features = np.arange(n, dtype=np.float32)[:, None]
    batches = []

    def loss(outputs, labels):
        batches.append(labels.numpy())
        return outputs.sum()

    with asked_steps(PoissonPlan(sampling_rate=rate, steps=steps), seeded(1)) as request:
        train_poisson(
            nn.Linear(1, 1, bias=False),
            features,
            np.arange(n),
            learning_rate=0.0,
            loss=loss,
        )
    assert request.certificate.records == n
    found = np.zeros((len(batches), n), bool)
    for step, batch in enumerate(batches):
        assert len(set(batch)) == len(batch)
        found[step, batch] = True
    return found


def test_every_record_is_in_a_step_with_the_rate_and_by_itself():
    rate, steps, n = 0.05, 2000, 200
    found = included(rate, steps, n)
    assert len(found) == steps  # an empty one among them has probability 2000 * 0.95**200: 7 %
    # Counts over the steps: binomial for every record. The bound holds for all 200 of them but
    # with probability 1e-3 (Bonferroni, normal law).
    deviations = (found.sum(axis=0) - steps * rate) / math.sqrt(steps * rate * (1 - rate))
    assert np.abs(deviations).max() < stats.norm.isf(0.5e-3 / n)
    assert 1e-4 < stats.chi2.sf(np.square(deviations).sum(), n) < 1 - 1e-4
    # Sizes of the batches: binomial too. A loader with batches of one size has no variance, one
    # that goes through shuffled passes has no variance of the counts above.
    sizes = found.sum(axis=1)
    variance = n * rate * (1 - rate)
    assert abs(sizes.mean() - n * rate) < 4 * math.sqrt(variance / steps)
    assert abs(sizes.var() / variance - 1) < 4 * math.sqrt(2 / steps)
    # Being in a step says nothing of being in the next one.
    again = (found[1:] & found[:-1]).mean()
    error = math.sqrt(rate**2 * (1 - rate**2) * (1 + 2 * rate) / (n * (steps - 1)))
    assert abs(again - rate**2) < 4 * error


def test_an_empty_batch_is_a_step_that_moves_nothing():
    features, labels = records(n=3)
    model = initialise(factory, 0)
    before = get_arrays(model)
    plan = PoissonPlan(sampling_rate=1e-9, steps=5)
    with asked_steps(plan, seeded()) as request:
        train_poisson(model, features, labels, learning_rate=1.0)
    assert same(get_arrays(model), before)
    request.certificate.check(before.values(), get_arrays(model).values())


def test_empty_batches_come_as_often_as_they_should():
    found = included(0.1, 1500, 10)
    empty, law = 1500 - len(found), 0.9**10
    assert abs(empty - 1500 * law) < 4 * math.sqrt(1500 * law * (1 - law))


def test_steps_are_those_of_torch_optim_on_the_drawn_batches():
    features, labels = records(40)
    model, oracle = (initialise(factory, 0) for _ in range(2))
    with asked_steps(PLAN, seeded()):
        train_poisson(model, features, labels, learning_rate=0.3)
    optimiser = torch.optim.SGD(oracle.parameters(), lr=0.3)
    random = seeded()
    sizes = []
    for _ in range(PLAN.steps):
        words = random.uint64(40)
        batch = np.flatnonzero(words / 2.0**64 < 0.2)
        sizes.append(len(batch))
        optimiser.zero_grad()
        outputs = oracle(torch.tensor(features[batch]))
        functional.cross_entropy(outputs, torch.tensor(labels[batch])).backward()
        optimiser.step()
    assert len(set(sizes)) > 1
    expected = get_arrays(oracle)
    for name, array in get_arrays(model).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-6)


def test_rate_one_is_gradient_descent_on_all_records():
    features, labels = records(40)
    model, oracle = (initialise(factory, 0) for _ in range(2))
    train_poisson(model, features, labels, learning_rate=0.3, sampling_rate=1, steps=4)
    train(oracle, features, labels, epochs=4, batch_size=40, learning_rate=0.3, seed=0)
    expected = get_arrays(oracle)
    for name, array in get_arrays(model).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_number_of_steps(steps):
    seen = []

    def loss(outputs, labels):
        seen.append(len(labels))
        return functional.cross_entropy(outputs, labels)

    with asked_steps(PoissonPlan(sampling_rate=1.0, steps=steps)) as request:
        train_poisson(linear(6, 3), *records(40), learning_rate=0.1, loss=loss)
    assert seen == [40] * steps
    assert request.certificate.plan.steps == steps


def trained(random, **more):
    model = initialise(factory, 0)
    with asked_steps(PLAN, random):
        train_poisson(model, *records(40), learning_rate=0.3, **more)
    return get_arrays(model)


def test_a_seeded_training_repeats_and_any_other_does_not():
    first = trained(seeded())
    assert same(first, trained(seeded()))
    assert not same(first, trained(seeded(2)))
    assert not same(trained(None), trained(None))


def test_the_perturbation_has_a_seed_and_leaves_the_batches():
    plain = trained(seeded())
    perturbed = trained(seeded(), perturbation=0.5)
    assert not same(plain, perturbed)
    assert same(perturbed, trained(seeded(), perturbation=0.5))
    assert not same(perturbed, trained(seeded(), perturbation=0.5, seed=1))
    assert same(plain, trained(seeded(), perturbation=0.0, seed=1))


def test_gradients_of_other_work_have_no_part():
    model = initialise(factory, 0)
    features, labels = records(40)
    functional.cross_entropy(model(torch.tensor(features)), torch.tensor(labels)).backward()
    with asked_steps(PLAN, seeded()):
        train_poisson(model, features, labels, learning_rate=0.3)
    assert same(get_arrays(model), trained(seeded()))


def certified(random=None):
    model = initialise(factory, 0)
    start = get_arrays(model)
    with asked_steps(PLAN, random or seeded()) as request:
        train_poisson(model, *records(40), learning_rate=0.3)
    return start, get_arrays(model), request.certificate


def changed(arrays):
    name = next(iter(arrays))
    other = arrays[name].copy()
    other.flat[0] = np.nextafter(other.flat[0], np.float32(1e9))
    return {**arrays, name: other}


def test_the_certificate_knows_the_arrays_before_and_after():
    start, end, steps = certified()
    assert (steps.plan, steps.records) == (PLAN, 40)
    steps.check(start.values(), end.values())
    with pytest.raises(ProtocolError, match=r"given other arrays \(1 of 4\) than the training on"):
        steps.check(changed(start).values(), end.values())
    with pytest.raises(ProtocolError, match=r"returned other arrays \(1 of 4\) than the training"):
        steps.check(start.values(), changed(end).values())
    with pytest.raises(ProtocolError, match=r"\(3 of floating point, the model has 4\)"):
        steps.check(start.values(), list(end.values())[1:])
    with pytest.raises(ProtocolError, match="given other arrays"):
        steps.check(end.values(), end.values())
    assert repr(steps.after[0]) not in repr(steps)


def test_frozen_parameters_and_buffers_are_certified():
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3).requires_grad_(False))
    model.register_buffer("scale", torch.ones(()))
    start = get_arrays(model)
    steps = train_poisson(model, *records(40), learning_rate=0.1, sampling_rate=0.5, steps=2)
    end = get_arrays(model)
    assert np.array_equal(start["1.weight"], end["1.weight"])
    steps.check(start.values(), end.values())
    with pytest.raises(ProtocolError, match=r"\(1 of 5\)"):
        steps.check(start.values(), {**end, "scale": np.float32(2)}.values())


def test_a_training_by_another_trainer_is_not_certified():
    with asked_steps(PLAN) as request:
        train(linear(6, 3), *records(40), steps=7, seed=0)
    with pytest.raises(ProtocolError, match=r"did no steps on Poisson batches.*train_poisson"):
        _ = request.certificate


def test_a_second_training_spoils_the_request():
    with asked_steps(PLAN) as request:
        train_poisson(linear(6, 3), *records(40), learning_rate=0.1)
        with pytest.raises(ProtocolError, match="called a trainer for Poisson batches 2 times"):
            train_poisson(linear(6, 3), *records(40), learning_rate=0.1)
    with pytest.raises(ProtocolError, match="2 times: the number of steps is a setting"):
        _ = request.certificate


def test_who_does_not_like_the_batches_cannot_draw_again():
    def picky(outputs, labels):
        if len(labels) < 12:
            raise MemoryError("too few")  # any other error is a step that is left out
        return functional.cross_entropy(outputs, labels)

    with asked_steps(PLAN, seeded()) as request:
        with pytest.raises(MemoryError, match="too few"):
            train_poisson(linear(6, 3), *records(40), learning_rate=0.1, loss=picky)
        with pytest.raises(ProtocolError, match=r"drew .* batches, the scheme asks for 7: a train"):
            train_poisson(linear(6, 3), *records(40), learning_rate=0.1)
    with pytest.raises(ProtocolError, match="cannot be begun again"):
        _ = request.certificate


def test_another_plan_is_refused():
    other = PoissonPlan(sampling_rate=0.2, steps=8)
    with asked_steps(PLAN) as request, pytest.raises(ProtocolError, match=r"asks for .*steps=7.*"):
        certify_steps(PoissonSteps(plan=other, records=40, before=(), after=()))
    with pytest.raises(ProtocolError, match=r"done was PoissonPlan\(sampling_rate=0.2, steps=8\)"):
        _ = request.certificate


def test_a_certificate_without_its_batches_is_refused():
    with asked_steps(PLAN), pytest.raises(ProtocolError, match="drew 0 batches, the scheme asks"):
        certify_steps(PoissonSteps(plan=PLAN, records=40, before=(), after=()))


def test_scopes_nest_and_end_and_belong_to_a_thread():
    inner = PoissonPlan(sampling_rate=0.5, steps=2)
    seen = []
    with asked_steps(PLAN) as outer:
        with asked_steps(inner) as request:
            assert current_steps() == inner
            train_poisson(linear(6, 3), *records(40), learning_rate=0.1)
        assert request.certificate.plan == inner
        assert current_steps() == PLAN
        thread = threading.Thread(target=lambda: seen.append(current_steps()))
        thread.start()
        thread.join()
    assert seen == [None]
    assert current_steps() is None
    with pytest.raises(ProtocolError, match="did no steps"):
        _ = outer.certificate


def test_settings_of_the_scheme_may_be_repeated_but_not_changed():
    with asked_steps(PLAN) as request:
        with pytest.raises(InvalidParameterError, match="steps = 8: expected 7, as the scheme"):
            train_poisson(linear(6, 3), *records(40), learning_rate=0.1, steps=8)
        with pytest.raises(InvalidParameterError, match=r"sampling_rate = 0.5: expected 0.2, as"):
            train_poisson(linear(6, 3), *records(40), learning_rate=0.1, sampling_rate=0.5)
        train_poisson(linear(6, 3), *records(40), learning_rate=0.1, steps=7, sampling_rate=0.2)
    assert request.certificate.plan == PLAN


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sampling_rate": None}, "sampling_rate = None: expected a number, as there is no scheme"),
        ({"steps": None}, "steps = None: expected a number, as there is no scheme"),
        ({"sampling_rate": 0.0}, "sampling_rate = 0.0: expected a number above 0 and at most 1"),
        ({"sampling_rate": 1.5}, "sampling_rate = 1.5: expected a number above 0 and at most 1"),
        ({"sampling_rate": math.nan}, "sampling_rate = nan: expected a finite number"),
        ({"steps": 0}, "steps = 0: expected an integer of at least 1"),
        ({"steps": 2.0}, "steps = 2.0: expected an integer of at least 1"),
        ({"learning_rate": -0.1}, "learning_rate = -0.1: expected a finite number of at least 0"),
        ({"perturbation": -1.0}, "perturbation = -1.0: expected a finite number of at least 0"),
    ],
)
def test_bad_settings(settings, text):
    usual = {"learning_rate": 0.1, "sampling_rate": 0.5, "steps": 2}
    with pytest.raises(InvalidParameterError, match=text):
        train_poisson(linear(6, 3), *records(40), **{**usual, **settings})


def test_bad_records_and_models():
    settings = {"learning_rate": 0.1, "sampling_rate": 0.5, "steps": 2}
    features, labels = records(40)
    with pytest.raises(DataError, match="no records"):
        train_poisson(linear(6, 3), features[:0], labels[:0], **settings)
    with pytest.raises(DataError, match="40 records but 39 labels"):
        train_poisson(linear(6, 3), features, labels[:39], **settings)
    statistics = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with pytest.raises(InvalidParameterError, match=r"the layers \['1'\].*GroupNorm"):
        train_poisson(statistics, features, labels, **settings)
    with pytest.raises(InvalidParameterError, match="expected a model to train"):
        train_poisson(linear(6, 3).requires_grad_(False), features, labels, **settings)


def test_outside_of_a_scheme_the_batches_are_drawn_too():
    plan = PoissonPlan(sampling_rate=0.5, steps=3)
    first, second = (list(poisson_batches(plan, 200)) for _ in range(2))
    assert len(first) == 3
    assert not all(map(np.array_equal, first, second))
    assert all((np.diff(batch) > 0).all() and batch.max() < 200 for batch in first)


def test_arrays_set_anew_are_where_the_training_starts():
    model = initialise(factory, 0)
    other = get_arrays(initialise(factory, 1))
    set_arrays(model, other)
    steps = train_poisson(model, *records(40), learning_rate=0.1, sampling_rate=0.5, steps=1)
    assert steps.before == digests(other.values())


# Steps that fail


def spoiled(kind):
    features, labels = records(40)
    if kind == "raises":
        labels[3] = 99
    else:
        features[3] = float(kind)
    return features, labels


@pytest.mark.parametrize("kind", ["nan", "inf", "raises"])
@pytest.mark.parametrize("perturbation", [0.0, 0.5])
def test_a_step_that_fails_is_left_out_and_the_others_are_as_without_it(kind, perturbation, caplog):
    data = spoiled(kind)
    model = initialise(factory, 0)
    start = get_arrays(model)
    with asked_steps(PLAN, seeded()) as request:
        train_poisson(model, *data, learning_rate=0.3, perturbation=perturbation)
    end = get_arrays(model)
    request.certificate.check(start.values(), end.values())
    assert all(np.isfinite(array).all() for array in end.values())
    with asked_steps(PLAN, seeded()):
        batches = list(poisson_batches(PLAN, 40))
    without = [batch for batch in batches if 3 not in batch]
    assert 0 < len(without) < 7
    assert f"train_poisson: {7 - len(without)} of 7 steps were left out" in caplog.text
    if perturbation:
        return
    oracle = initialise(factory, 0)
    optimiser = torch.optim.SGD(oracle.parameters(), lr=0.3)
    for batch in without:
        optimiser.zero_grad()
        outputs = oracle(torch.tensor(data[0][batch]))
        functional.cross_entropy(outputs, torch.tensor(data[1][batch])).backward()
        optimiser.step()
    for name, array in get_arrays(oracle).items():
        np.testing.assert_allclose(end[name], array, atol=1e-6)


def test_a_step_beyond_the_range_of_the_weights_is_left_out():
    model = initialise(factory, 0)
    start = get_arrays(model)
    settings = {"learning_rate": 1e38, "sampling_rate": 1.0, "steps": 2}
    train_poisson(model, records(40)[0] * 1e10, records(40)[1], **settings)
    assert same(get_arrays(model), start)


def test_plain_training_goes_on_to_raise():
    with pytest.raises(IndexError):
        train(initialise(factory, 0), *spoiled("raises"), seed=0)
