"""One step with the gradients of single records clipped: equal to a loop, and its sensitivity."""

import numpy as np
import pytest
import torch
from record_models import (
    CASES,
    Branches,
    difference,
    norm_of,
    penalised_loss,
    records,
    squared_error,
    trained,
)
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.per_record_steps import (
    ROUNDING,
    PerRecordPlan,
    PerRecordStep,
)
from flwr_privacy.clients.torch import get_arrays, initialise, linear, train_per_record
from flwr_privacy.clients.torch.record_gradients import RecordGradients
from flwr_privacy.errors import InvalidParameterError


def gradients_one_by_one(model, features, labels, loss=functional.cross_entropy):
    """Each record's gradient by an ordinary backward pass: dicts of float64 arrays."""
    rows = []
    for feature, label in zip(torch.tensor(features), torch.tensor(labels), strict=True):
        model.zero_grad()
        loss(model(feature[None]), label[None]).sum().backward()
        rows.append(
            {
                name: np.zeros(p.shape) if p.grad is None else p.grad.double().numpy().copy()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )
    model.zero_grad()
    return rows


def state_norm(model, row):
    """The norm over the arrays of the state_dict, where a tied weight is there twice."""
    names = {id(p): name for name, p in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    return norm_of({key: row[names[id(p)]] for key, p in state.items() if p.requires_grad})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_step_equals_clipped_backward_passes(case, chunk_size):
    factory, shape, loss = CASES[case]
    features, labels = records(shape=shape)
    model = initialise(factory, 1)
    rows = gradients_one_by_one(model, features, labels, loss)
    norms = np.array([state_norm(model, row) for row in rows])
    clipping_norm = float(np.median(norms))  # half of the records are clipped
    before = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    train_per_record(
        model,
        features,
        labels,
        clipping_norm=clipping_norm,
        learning_rate=0.5,
        loss=loss,
        chunk_size=chunk_size,
    )
    after = dict(model.named_parameters())
    assert before
    for name in before:
        expected = before[name]
        if name in rows[0]:
            scales = np.minimum(1, clipping_norm / norms)
            expected = expected - 0.5 * np.mean(
                [scale * row[name] for scale, row in zip(scales, rows, strict=True)], axis=0
            )
        np.testing.assert_allclose(after[name].detach().numpy(), expected, atol=2e-6, rtol=2e-6)


def test_a_layer_s_input_may_be_changed_in_place_afterwards():
    settings = {"clipping_norm": 1.0, "learning_rate": 1.0, "loss": penalised_loss}
    copied, _ = trained(Branches, *records(), **settings)
    in_place, _ = trained(lambda: Branches(in_place=True), *records(), **settings)
    assert difference(copied, in_place) < 1e-6


def test_only_weights_with_one_plain_use_are_kept_as_outer_products():
    def forms(case):
        factory, shape, loss = CASES[case]
        features, labels = (torch.tensor(part) for part in records(shape=shape))
        found = RecordGradients(factory(), loss, features[0], labels[0])
        return found.outer, found.whole

    assert forms("branches")[0] == ["free.weight"]
    assert forms("mlp") == (["1.weight", "3.weight"], [])
    assert forms("single layer") == (["weight"], [])
    assert forms("biases") == (["0.weight", "1.weight"], ["0.bias"])
    assert forms("cnn")[0] == ["7.weight", "9.weight", "11.weight"]


@pytest.mark.parametrize("case", CASES)
def test_F20_clip_property(case):
    factory, shape, loss = CASES[case]
    features, labels = records(shape=shape)
    oracle = initialise(factory, 2)
    rows = gradients_one_by_one(oracle, features, labels, loss)
    norms = np.array([state_norm(oracle, row) for row in rows])
    clipping_norm = float(np.median(norms))
    start = get_arrays(oracle)
    settings = {"clipping_norm": clipping_norm, "learning_rate": 1.0, "loss": loss}
    # A step on a single record shows that record's clipped gradient.
    for index, norm in enumerate(norms):
        part = slice(index, index + 1)
        end, step = trained(factory, features[part], labels[part], seed=2, **settings)
        moved = difference(end, start)
        assert moved <= clipping_norm + step.rounding
        assert moved == pytest.approx(min(norm, clipping_norm), abs=1e-5, rel=1e-5)
    assert (norms < clipping_norm * 0.99).any()
    assert (norms > clipping_norm * 1.01).any()
    end, step = trained(factory, features, labels, seed=2, **settings)
    assert difference(end, start) <= clipping_norm * (1 + ROUNDING) + step.rounding


@pytest.mark.parametrize("case", CASES)
def test_F19_one_replaced_record_moves_the_step_by_at_most_the_sensitivity(case):
    factory, shape, loss = CASES[case]
    rng = np.random.default_rng(3)
    shares = []
    for seed in range(8):
        features, labels = records(n=5, shape=shape, seed=seed)
        other, other_labels = features.copy(), labels.copy()
        index = rng.integers(5)
        other[index] = rng.normal(size=shape) * 10 ** rng.uniform(-2, 3)
        other_labels[index] = rng.integers(3)
        settings = {"clipping_norm": 0.3, "learning_rate": 0.7, "loss": loss}
        first, step = trained(factory, features, labels, seed=seed, **settings)
        second, _ = trained(factory, other, other_labels, seed=seed, **settings)
        shares.append(difference(first, second) / step.sensitivity())
    assert max(shares) <= 1
    assert max(shares) > 0.3  # the bound is of the right size


@pytest.mark.parametrize(("learning_rate", "n"), [(1.0, 800), (0.02, 800), (1e-4, 3)])
def test_F19_opposite_saturated_gradients_attain_the_sensitivity(learning_rate, n):
    # With two classes, the gradients of the same record under the two labels are opposite.
    features, labels = records(n=n, classes=2)
    features[0] = 1e4
    other = labels.copy()
    other[0] = 1 - labels[0]

    def factory():
        model = linear(6, 2)
        nn.init.zeros_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        return model

    settings = {"clipping_norm": 1.8, "learning_rate": learning_rate}
    first, step = trained(factory, features, labels, **settings)
    second, _ = trained(factory, features, other, **settings)
    exact = 2 * learning_rate * 1.8 / n
    assert difference(first, second) == pytest.approx(exact, rel=0.01)
    assert difference(first, second) <= step.sensitivity() <= exact * 1.01


def test_rounding_to_the_type_of_the_weights_is_in_the_sensitivity():
    # With large weights and a small step, rounding moves the result by more than the step can.
    def factory():
        model = linear(6, 2)
        nn.init.constant_(model[1].weight, 1e4)
        return model

    worst = 0.0
    for seed in range(20):
        features, labels = records(n=50, classes=2, seed=seed)
        other = np.concatenate([-features[:1], features[1:]])
        settings = {"clipping_norm": 1.0, "learning_rate": 0.02}
        first, step = trained(factory, features, labels, **settings)
        second, _ = trained(factory, other, labels, **settings)
        worst = max(worst, difference(first, second))
        assert difference(first, second) <= step.sensitivity()
    assert worst > 2 * 0.02 * 1.0 / 50


def test_sensitivity_formula():
    def sensitivity(**settings):
        return PerRecordStep(plan=PerRecordPlan(**settings), records=800, before=(), after=())

    full = sensitivity(clipping_norm=1.0, learning_rate=1.0).sensitivity()
    assert full == pytest.approx(0.0025 * (1 + ROUNDING))
    rated = sensitivity(clipping_norm=1.8, learning_rate=0.02, sampling_rate=0.1).sensitivity()
    assert rated == pytest.approx(9e-4 * (1 + ROUNDING))


def test_zero_gradients_do_not_move_the_model():
    features, labels = records()
    model = initialise(lambda: linear(6, 3), 0)
    before = get_arrays(model)
    settings = {"clipping_norm": 1.0, "learning_rate": 1.0}
    train_per_record(model, features, labels, loss=lambda o, _: 0 * o.sum(), **settings)
    after = get_arrays(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_huge_gradients_are_clipped_too():
    features, labels = records(n=1)
    start, settings = get_arrays(initialise(lambda: linear(6, 3), 0)), {"learning_rate": 1.0}
    for loss, factor in [(squared_error, 1e18), (functional.cross_entropy, 1e30)]:
        label = labels if loss is squared_error else [linear_argmin(start, features)]
        end, step = trained(
            lambda: linear(6, 3),
            features * np.float32(factor),
            np.array(label),
            clipping_norm=1.0,
            loss=loss,
            **settings,
        )
        assert difference(end, start) == pytest.approx(1.0, abs=step.rounding + 1e-6)


def linear_argmin(arrays, features):
    """The class that a linear model thinks least likely, so that the loss is large."""
    return (features @ arrays["1.weight"].T)[0].argmin()


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(8),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.InstanceNorm1d(8, track_running_stats=True),
    ],
)
def test_running_statistics_are_refused(layer):
    model = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3))
    with pytest.raises(InvalidParameterError, match=r"the layers \['1'\].*GroupNorm"):
        train_per_record(model, *records(), clipping_norm=1.0, learning_rate=1.0)


def test_the_advice_is_not_cut_off_where_many_layers_are_refused():
    layers = [layer for _ in range(20) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6))]
    with pytest.raises(
        InvalidParameterError, match=r"\['1', '3', '5'\] and 17 more.*Group"
    ) as error:
        train_per_record(nn.Sequential(*layers), *records(), clipping_norm=1.0, learning_rate=1.0)
    assert len(str(error.value)) < 250  # strategies/requests/request_log.py cuts at 300


def test_a_record_has_no_part_in_the_gradient_of_another():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            return self.out(x - 0.5 * x.mean(dim=0, keepdim=True))

    features, labels = records()
    settings = {"clipping_norm": 1.0, "learning_rate": 1.0}
    mixed, _ = trained(Centred, features, labels, **settings)
    alone, _ = trained(lambda: nn.Linear(6, 3), features / 2, labels, **settings)
    for name, array in alone.items():
        np.testing.assert_allclose(mixed[f"out.{name}"], array, atol=1e-6)
