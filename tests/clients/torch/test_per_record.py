import math
import threading

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.torch import (
    cnn,
    get_arrays,
    initialise,
    linear,
    mlp,
    set_arrays,
    train,
    train_per_record,
)
from flwr_privacy.clients.torch.gradients import RecordGradients
from flwr_privacy.clients.training.per_record import (
    ROUNDING,
    PerRecordPlan,
    PerRecordStep,
    asked,
    certify,
    current_plan,
    digests,
    in_step,
)
from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom

PLAN = PerRecordPlan(clipping_norm=1.0, learning_rate=0.5)


def records(n=20, shape=(6,), classes=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, classes, n)


class Branches(nn.Module):
    """Linear layers in every role: ordinary, shared, used twice, in a sequence, in a penalty."""

    def __init__(self, in_place=False):
        super().__init__()
        self.in_place = in_place
        self.first = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.free = nn.Linear(6, 6, bias=False)
        self.free.register_forward_hook(lambda layer, inputs, output: output.tanh())
        self.sequence = nn.Linear(3, 3)
        self.penalised = nn.Linear(6, 3)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.twice(torch.tanh(self.twice(self.first(x))))
        y = self.free(input=x)
        x = x.add_(y) if self.in_place else x + y
        x = self.norm(self.frozen(self.tied(x)))
        x = self.sequence(x.reshape(-1, 2, 3)).reshape(-1, 6)
        return self.penalised(x), self.penalised.weight.square().sum()


def penalised_loss(outputs, labels):
    logits, penalty = outputs
    return functional.cross_entropy(logits, labels) + 0.1 * penalty


def squared_error(outputs, labels):
    return (outputs - (labels[:, None] == torch.arange(3)).float()).square().sum(dim=1)


class Biases(nn.Sequential):
    """Biases in other roles: one in a penalty, one frozen."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Linear(6, 3))
        self[1].bias.requires_grad_(False)

    def forward(self, x):
        return super().forward(x), self[0].bias.square().sum()


CASES = {
    "mlp": (lambda: mlp([6, 8, 3]), (6,), functional.cross_entropy),
    "cnn": (lambda: cnn(3), (1, 28, 28), functional.cross_entropy),
    "single layer": (lambda: nn.Linear(6, 3), (6,), functional.cross_entropy),
    "custom loss": (lambda: mlp([6, 8, 3]), (6,), squared_error),
    "branches": (Branches, (6,), penalised_loss),
    "biases": (Biases, (6,), penalised_loss),
}


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


def norm_of(arrays):
    return math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in arrays.values()))


def state_norm(model, row):
    """The norm over the arrays of the state_dict, where a tied weight is there twice."""
    names = {id(p): name for name, p in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    return norm_of({key: row[names[id(p)]] for key, p in state.items() if p.requires_grad})


def difference(first, second):
    return norm_of({name: first[name].astype(np.float64) - second[name] for name in first})


def trained(factory, features, labels, seed=0, **settings):
    model = initialise(factory, seed)
    step = train_per_record(model, features, labels, **settings)
    return get_arrays(model), step


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


def test_chunks_bound_how_many_records_the_model_sees(monkeypatch):
    sizes = []
    whole = RecordGradients.__call__

    def counted(self, parameters, features, labels):
        sizes.append(len(features))
        return whole(self, parameters, features, labels)

    monkeypatch.setattr(RecordGradients, "__call__", counted)
    settings = {"clipping_norm": 1.0, "learning_rate": 1.0}
    trained(lambda: mlp([6, 3]), *records(n=2500), **settings)
    trained(lambda: mlp([6, 3]), *records(n=20), **settings, chunk_size=8)
    assert sizes == [834, 833, 833, 7, 7, 6]
    sizes.clear()
    # 2.6 million weights of a convolution in 4 bytes each: at most 24 records in 256 MB.
    wide = nn.Sequential(nn.Conv2d(1, 2500, 32), nn.Flatten(), nn.Linear(2500, 3))
    train_per_record(wide, *records(n=40, shape=(1, 32, 32)), **settings)
    assert sizes == [20, 20]


def test_what_a_model_keeps_for_its_gradients_counts_as_memory():
    features, labels = (torch.tensor(part[0]) for part in records(shape=(1, 28, 28)))

    def kept(width):
        model = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(784 * width, 3)
        )
        return RecordGradients(model, functional.cross_entropy, features, labels).bytes_per_record

    # Each further channel keeps at least its 784 outputs after the ReLU and as input of the layer.
    assert kept(8) - kept(4) >= 4 * 2 * 784 * 4


def test_arguments_come_from_the_scheme():
    features, labels = records()
    model = initialise(lambda: linear(6, 3), 0)
    start = get_arrays(model)
    with asked(PLAN) as request:
        train_per_record(model, features, labels)
    expected, _ = trained(
        lambda: linear(6, 3), features, labels, clipping_norm=1.0, learning_rate=0.5
    )
    end = get_arrays(model)
    assert all(np.array_equal(end[name], expected[name]) for name in end)
    assert request.step.plan == PLAN
    assert request.step.records == 20
    request.step.check(start.values(), end.values())


def test_arguments_equal_to_the_scheme_pass_and_others_do_not():
    model = linear(6, 3)
    with asked(PLAN) as request:
        with pytest.raises(
            InvalidParameterError, match=r"learning_rate = 0.4: expected 0.5, as the"
        ):
            train_per_record(model, *records(), learning_rate=0.4)
        with pytest.raises(InvalidParameterError, match=r"sampling_rate = 0.5: expected 1.0, as"):
            train_per_record(model, *records(), sampling_rate=0.5)
        train_per_record(model, *records(), learning_rate=0.5, clipping_norm=1, sampling_rate=1)
    assert request.step.plan == PLAN


@pytest.mark.parametrize("missing", ["clipping_norm", "learning_rate"])
def test_outside_of_a_scheme_the_settings_are_required(missing):
    settings = {"clipping_norm": 1.0, "learning_rate": 1.0}
    del settings[missing]
    with pytest.raises(InvalidParameterError, match=f"{missing} = None.*no scheme"):
        train_per_record(linear(6, 3), *records(), **settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clipping_norm", 0.0),
        ("clipping_norm", math.inf),
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("sampling_rate", 0.0),
        ("sampling_rate", 1.5),
        ("chunk_size", 0),
    ],
)
def test_bad_settings(name, value):
    settings = {"clipping_norm": 1.0, "learning_rate": 1.0, name: value}
    with pytest.raises(InvalidParameterError, match=f"{name} = {value}"):
        train_per_record(linear(6, 3), *records(), **settings)


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_bad_records_and_models():
    settings = {"clipping_norm": 1.0, "learning_rate": 1.0}
    features, labels = records()
    with pytest.raises(DataError, match="no records"):
        train_per_record(linear(6, 3), features[:0], labels[:0], **settings)
    with pytest.raises(DataError, match="20 records but 19 labels"):
        train_per_record(linear(6, 3), features, labels[:19], **settings)
    with pytest.raises(InvalidParameterError, match="expected a model to train"):
        train_per_record(linear(6, 3).requires_grad_(False), features, labels, **settings)
    for dtype in (torch.bfloat16, torch.complex64):
        with pytest.raises(InvalidParameterError, match=f"the type of 1.weight = {dtype}"):
            train_per_record(linear(6, 3).to(dtype), features, labels, **settings)
    with pytest.raises(InvalidParameterError, match=r"shape \(3,\)'?: expected one number"):
        train_per_record(linear(6, 3), features, labels, loss=lambda o, _: o, **settings)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_model_that_changes_a_buffer_is_refused(in_place, dtype):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("calls", torch.zeros(1, dtype=dtype))

        def forward(self, x):
            if in_place:
                self.calls += 1
            else:
                self.calls = self.calls + 1
            return super().forward(x)

    model = Counting()
    with (
        asked(PLAN) as request,
        pytest.raises(InvalidParameterError, match=r"changes \['calls'\]"),
    ):
        train_per_record(model, *records())
    assert model.calls == 0
    with pytest.raises(ProtocolError):
        _ = request.step


@pytest.mark.parametrize("rounds", [1, 2])
def test_only_one_step_is_certified(rounds):
    features, labels = records()
    model = linear(6, 3)
    with asked(PLAN) as request:
        train_per_record(model, features, labels)
        middle = get_arrays(model)
        for _ in range(rounds):
            with pytest.raises(ProtocolError, match=r"per-record trainer \d times: the noise"):
                train_per_record(model, features, labels)
        after = get_arrays(model)
    assert all(np.array_equal(middle[name], after[name]) for name in middle)
    with pytest.raises(ProtocolError, match=f"a per-record trainer {rounds + 1} times"):
        _ = request.step


def test_a_step_by_another_plan_is_not_certified():
    other = PerRecordPlan(clipping_norm=2.0, learning_rate=0.5)
    with asked(PLAN) as request, pytest.raises(ProtocolError, match=r"clipping_norm=2\.0"):
        certify(PerRecordStep(plan=other, records=1, before=(), after=()))
    with pytest.raises(ProtocolError, match="the scheme asks for"):
        _ = request.step


def test_training_without_the_trainer_is_noticed():
    with asked(PLAN) as request:
        train(linear(6, 3), *records(), seed=0)
    with pytest.raises(ProtocolError, match=r"train_per_record, once"):
        _ = request.step


def certified():
    model = initialise(lambda: mlp([6, 8, 3]), 0)
    start = get_arrays(model)
    with asked(PLAN) as request:
        train_per_record(model, *records())
    return model, start, request.step


def test_training_on_is_noticed():
    model, start, step = certified()
    step.check(start.values(), get_arrays(model).values())
    train(model, *records(), seed=0)
    with pytest.raises(ProtocolError, match=r"returned other arrays \(4 of 4\)"):
        step.check(start.values(), get_arrays(model).values())


def test_another_start_is_noticed():
    model, start, step = certified()
    end = get_arrays(model)
    other = {**start, "1.bias": start["1.bias"] + 1}
    with pytest.raises(ProtocolError, match=r"given other arrays \(1 of 4\) than .* started at"):
        step.check(other.values(), end.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: [a.astype(np.float64) for a in arrays],
        lambda arrays: arrays[::-1],
        lambda arrays: [a.ravel() for a in arrays],
        lambda arrays: arrays[:-1],
        lambda arrays: [*arrays, np.zeros(1)],
    ],
)
def test_arrays_in_another_form_are_noticed(change):
    model, start, step = certified()
    end = list(get_arrays(model).values())
    with pytest.raises(ProtocolError, match="returned other arrays"):
        step.check(start.values(), change(end))


def test_only_floating_point_arrays_count():
    model, start, step = certified()
    end = [a.copy(order="F") for a in get_arrays(model).values()]
    step.check([np.array(7), *start.values()], [np.array(8), *end])


def test_frozen_and_floating_buffers_are_certified():
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
    model[1].requires_grad_(False)
    model.register_buffer("scale", torch.ones(()))
    start = get_arrays(model)
    step = train_per_record(model, *records(), clipping_norm=1.0, learning_rate=1.0)
    end = get_arrays(model)
    step.check(start.values(), end.values())
    assert len(step.before) == 5
    assert np.array_equal(end["1.weight"], start["1.weight"])
    with pytest.raises(ProtocolError, match=r"\(1 of 5\)"):
        step.check(start.values(), {**end, "scale": np.float32(2)}.values())


def test_a_certificate_does_not_show_its_digests():
    _, _, step = certified()
    assert repr(step.after[0]) not in repr(step)


def test_scopes_nest_and_end():
    inner = PerRecordPlan(clipping_norm=2.0, learning_rate=0.5)
    with asked(PLAN):
        with asked(inner) as request:
            assert current_plan() == inner
            with pytest.raises(DataError):
                train_per_record(linear(6, 3), *records(n=0))
            train_per_record(linear(6, 3), *records())
        assert request.step.plan == inner
        assert current_plan() == PLAN
    assert current_plan() is None


def test_scopes_of_threads_are_apart():
    seen = []
    with asked(PLAN):
        thread = threading.Thread(target=lambda: seen.append(current_plan()))
        thread.start()
        thread.join()
    assert seen == [None]


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


def test_digests_tell_types_shapes_and_values_apart():
    arrays = [
        np.zeros(2, np.float32),
        np.zeros(1, np.float64),
        np.zeros((2, 1), np.float32),
        np.zeros((), np.float32),
        np.zeros(1, np.float32),
        np.full(2, 1e-45, np.float32),
        np.zeros(2, ">f4"),
        np.zeros(0, np.float32),
    ]
    assert len(set(digests(arrays))) == len(arrays)
