"""Several steps: epochs and mini-batches with gradients clipped per record."""

import math

import numpy as np
import pytest
import torch
from record_models import difference, logistic, records, trained
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.per_record_steps import (
    ROUNDING,
    PerRecordPlan,
    PerRecordStep,
    asked,
)
from flwr_privacy.clients.torch import get_arrays, initialise, linear, mlp, train_per_record
from flwr_privacy.clients.torch.record_gradients import RecordGradients
from flwr_privacy.errors import InvalidParameterError

N = 10


def factory():
    return mlp([6, 8, 3])


def reference(features, labels, *, clipping_norm, learning_rate, epochs, batch_size):
    """One backward pass per record; the sum is divided by the batch size, also of fewer."""
    model = initialise(factory, 0)
    size = batch_size or len(labels)
    for _ in range(epochs):
        for start in range(0, len(labels), size):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for m in range(start, min(start + size, len(labels))):
                model.zero_grad()
                x, y = torch.tensor(features[m : m + 1]), torch.tensor(labels[m : m + 1])
                functional.cross_entropy(model(x), y).backward()
                norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
                for part, p in zip(total, model.parameters(), strict=True):
                    part += p.grad * min(1, clipping_norm / norm)
            with torch.no_grad():
                for p, part in zip(model.parameters(), total, strict=True):
                    p -= learning_rate / size * part
    return get_arrays(model)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 1, 4, N])
def test_steps_equal_a_loop_over_batches_in_the_given_order(epochs, batch_size):
    settings = {"clipping_norm": 1.0, "learning_rate": 0.5, "epochs": epochs}
    settings["batch_size"] = batch_size
    found, step = trained(factory, *records(N), **settings, chunk_size=3)
    expected = reference(*records(N), **settings)
    assert difference(found, expected) < 3e-6
    assert step.plan == PerRecordPlan(**settings)
    order = np.arange(N)[::-1]
    other, _ = trained(factory, *(part[order] for part in records(N)), **settings)
    if batch_size in (1, 4):
        assert difference(found, other) > 1e-3


def test_a_batch_of_all_records_is_the_full_batch():
    settings = {"clipping_norm": 1.0, "learning_rate": 0.5, "epochs": 2}
    full, one = trained(factory, *records(N), **settings)
    batch, other = trained(factory, *records(N), **settings, batch_size=N)
    assert difference(full, batch) == 0
    assert one.sensitivity() == other.sensitivity()


@pytest.mark.parametrize("options", [{}, {"epochs": 3}, {"batch_size": 4}])
def test_F14_a_huge_clipping_norm_gives_plain_gradient_descent(options):
    features, labels = records(N)
    found, _ = trained(factory, features, labels, clipping_norm=1e6, learning_rate=0.5, **options)
    model = initialise(factory, 0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    size = options.get("batch_size", N)
    for _ in range(options.get("epochs", 1)):
        for start in range(0, N, size):
            part = slice(start, start + size)
            logits = model(torch.tensor(features[part]))
            loss = functional.cross_entropy(logits, torch.tensor(labels[part]), reduction="sum")
            optimiser.zero_grad()
            (loss / size).backward()
            optimiser.step()
    assert difference(found, get_arrays(model)) < 2e-6


def test_F19_replaced_records_stay_within_the_general_bound():
    rng = np.random.default_rng(1)
    shares = []
    for seed in range(20):
        features, labels = records(n=5, seed=seed)
        other = features.copy()
        other[rng.integers(5)] *= -(10 ** rng.uniform(-1, 3))
        settings = {"clipping_norm": 1.0, "learning_rate": 2.0, "epochs": 2, "batch_size": 2}
        first, step = trained(factory, features, labels, seed=seed, **settings)
        second, _ = trained(factory, other, labels, seed=seed, **settings)
        shares.append(difference(first, second) / step.sensitivity())
    assert max(shares) <= 1
    # More than what one step could do, so that the further steps are needed in the bound.
    assert max(shares) > 1 / (1 + 2 * 5)


def convex_settings(features):
    smooth = float((features**2).sum(axis=1).max()) / 4
    return {
        "clipping_norm": 0.5,
        "learning_rate": 2 / smooth,
        "epochs": 4,
        "batch_size": 2,
        "bound": "convex",
        "smoothness": smooth,
        "loss": logistic,
    }


def test_F19_replaced_records_stay_within_the_convex_bound():
    rng = np.random.default_rng(2)
    shares = []
    for seed in range(20):
        features, labels = records(n=5, seed=seed)
        labels = (labels > 1).astype(np.float32)
        other, other_labels = features.copy(), labels.copy()
        index = rng.integers(5)
        other[index], other_labels[index] = rng.normal(size=6), rng.integers(2)
        settings = convex_settings(np.concatenate([features, other]))

        def factory():
            return nn.Linear(6, 1, bias=False)

        first, step = trained(factory, features, labels, seed, **settings)
        second, _ = trained(factory, other, other_labels, seed, **settings)
        shares.append(difference(first, second) / step.sensitivity())
    assert max(shares) <= 1
    assert max(shares) > 0.3
    general = PerRecordPlan(
        **{k: v for k, v in settings.items() if k not in ("loss", "smoothness")}
        | {"bound": "general"}
    )
    assert general.sensitivity(5) > 5 * step.sensitivity()


def test_the_convex_bound_is_for_exact_gradients(monkeypatch):
    seen = set()
    whole = RecordGradients.__call__

    def watched(self, parameters, features, labels):
        seen.update(t.dtype for t in (*parameters.values(), features, labels))
        return whole(self, parameters, features, labels)

    monkeypatch.setattr(RecordGradients, "__call__", watched)
    features, labels = records(N)
    settings = convex_settings(features)
    arrays, _ = trained(
        lambda: nn.Linear(6, 1), features, (labels > 1).astype(np.float32), **settings
    )
    assert seen == {torch.float64}
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "factory",
    [
        lambda: linear(6, 3),
        lambda: mlp([6, 8, 1]),
        lambda: nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(6, 1)),
        lambda: nn.Bilinear(6, 6, 1),
    ],
)
def test_the_convex_bound_is_refused_for_other_models(factory):
    settings = convex_settings(records(N)[0])
    with pytest.raises(InvalidParameterError, match=r"bound = 'convex': expected 'general' for"):
        train_per_record(factory(), *records(N), **settings)


def test_a_frozen_body_with_one_linear_output_is_convex():
    model = nn.Sequential(nn.Linear(6, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 1))
    before = get_arrays(model)
    features, labels = records(N)
    settings = convex_settings(features)
    train_per_record(model, features, (labels > 1).astype(np.float32), **settings)
    changed = {n for n, a in get_arrays(model).items() if not np.array_equal(a, before[n])}
    assert changed == {"2.weight", "2.bias"}


def test_sensitivity_of_a_certificate_is_the_formula_and_the_rounding():
    plan = PerRecordPlan(clipping_norm=1.8, learning_rate=0.02, epochs=3, batch_size=128)
    step = PerRecordStep(plan=plan, records=800, before=(), after=(), rounding=1e-3)
    exact = 2 * 0.02 * 1.8 * (1 / 128 + 3 * 7 - 1)
    assert step.sensitivity() == pytest.approx((exact + 2e-3) * (1 + ROUNDING))
    assert plan.steps(800) == 21
    # In a sample a record is apart from none by half of it, and both of them are rounded.
    plan = PerRecordPlan(clipping_norm=1.8, learning_rate=0.02, sampling_rate=0.5)
    step = PerRecordStep(plan=plan, records=800, before=(), after=(), rounding=1e-3)
    exact = 2 * 0.02 * 1.8 / (0.5 * 800)
    assert step.sensitivity() == pytest.approx((exact + 4e-3) * (1 + ROUNDING))


def test_rounding_counts_all_steps():
    # In float64 every step is rounded; in float32 only the end is, but its reach is longer.
    def rounding(dtype, epochs):
        model = initialise(factory, 0).to(dtype)
        features, labels = records(N)
        settings = {"clipping_norm": 1e3, "learning_rate": 1.0, "epochs": epochs}
        step = train_per_record(model, features.astype(f"f{dtype.itemsize}"), labels, **settings)
        return step.rounding

    for dtype, at_least in ((torch.float64, 50), (torch.float32, 9.9)):
        assert rounding(dtype, 10) > at_least * rounding(dtype, 1)


def test_one_call_does_all_steps_of_the_scheme():
    plan = PerRecordPlan(clipping_norm=1.0, learning_rate=0.5, epochs=2, batch_size=4)
    model = initialise(factory, 0)
    start = get_arrays(model)
    with asked(plan) as request:
        train_per_record(model, *records(N))
    end = get_arrays(model)
    request.certificate.check(start.values(), end.values())
    settings = {"clipping_norm": 1.0, "learning_rate": 0.5, "epochs": 2, "batch_size": 4}
    expected, _ = trained(factory, *records(N), **settings)
    assert difference(end, expected) == 0


@pytest.mark.parametrize(("name", "value"), [("epochs", 1), ("batch_size", 3), ("bound", "convex")])
def test_other_steps_than_the_scheme_asks_are_refused(name, value):
    plan = PerRecordPlan(clipping_norm=1.0, learning_rate=0.5, epochs=2, batch_size=4)
    model = initialise(factory, 0)
    with asked(plan):
        with pytest.raises(InvalidParameterError, match=rf"{name} = .*, as the scheme asks"):
            train_per_record(model, *records(N), **{name: value})
        train_per_record(model, *records(N), epochs=2, batch_size=4, bound="general")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": N + 1}, f"batch_size = {N + 1}: expected at most the number of records"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"epochs": 0}, "epochs = 0"),
        ({"bound": "good"}, "bound = 'good'"),
        ({"epochs": 2, "sampling_rate": 0.5}, "epochs = 2: expected 1 with sampling_rate"),
    ],
)
def test_bad_steps(options, text):
    model = initialise(factory, 0)
    before = get_arrays(model)
    with pytest.raises(InvalidParameterError, match=text):
        train_per_record(model, *records(N), clipping_norm=1.0, learning_rate=1.0, **options)
    assert difference(before, get_arrays(model)) == 0


def test_a_bad_record_in_a_late_batch_leaves_the_other_steps():
    features, labels = records(N)
    features[-1] = np.nan
    settings = {"clipping_norm": 1.0, "learning_rate": 1.0, "batch_size": 2}
    found, _ = trained(factory, features, labels, **settings)
    expected, _ = trained(factory, features[:-1], labels[:-1], **settings)
    assert difference(found, expected) < 1e-6


def test_steps_are_taken_from_the_weights_at_hand():
    settings = {"clipping_norm": 1.0, "learning_rate": 0.5}
    model = initialise(factory, 0)
    for _ in range(3):
        train_per_record(model, *records(N), **settings)
    at_once, _ = trained(factory, *records(N), **settings, epochs=3)
    # Apart by the rounding to float32 between the calls.
    assert difference(get_arrays(model), at_once) < 1e-6
