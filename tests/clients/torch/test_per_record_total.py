"""A record that misbehaves counts as zero, and is nothing to the others: not in one bit."""

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_models import CASES, difference, logistic, records, trained
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.per_record_loss import asked_loss
from flwr_privacy.clients.certificates.per_record_steps import PerRecordPlan, asked
from flwr_privacy.clients.torch import (
    evaluate_per_record,
    get_arrays,
    initialise,
    mlp,
    train_per_record,
)
from flwr_privacy.clients.torch.record_gradients import RecordGradients
from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom

STEP = {"clipping_norm": 0.5, "learning_rate": 0.7}
BAD = ["nan", "inf", "-inf", "raises"]


def spoiled(features, labels, index, kind):
    """Return records of which one misbehaves."""
    features, labels = features.copy(), labels.copy()
    if kind == "raises":
        labels[index] = 99  # out of range: the loss raises for the batch
    elif kind == "overflow":
        features[index] = np.finfo(features.dtype).max  # finite; what comes of it may not be
    else:
        features[index] = float(kind)
    return features, labels


def assert_same_bits(first, second):
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


def one_by_one(factory, features, labels, *, clipping_norm, learning_rate, seed=0, loss=None):
    """The step by an ordinary backward pass for each record, summed in float64 by NumPy."""
    model = initialise(factory, seed)
    loss = loss or functional.cross_entropy
    total = {n: np.zeros(p.shape) for n, p in model.named_parameters()}
    for feature, label in zip(features, labels, strict=True):
        model.zero_grad()
        try:
            loss(model(torch.tensor(feature[None])), torch.tensor(label[None])).sum().backward()
        except IndexError:
            continue
        own = {n: p.grad.double().numpy() for n, p in model.named_parameters()}
        norm = math.sqrt(sum(float(np.square(a).sum()) for a in own.values()))
        if math.isfinite(norm):
            for name, array in own.items():
                total[name] += array * min(1, clipping_norm / norm)
    rate = learning_rate / len(labels)
    return {n: p.detach().numpy() - rate * total[n] for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("chunk_size", [None, 6])
def test_a_record_that_misbehaves_counts_as_zero(kind, chunk_size):
    def factory():
        return mlp([6, 8, 3])

    for index in (0, 7, 19):
        data = spoiled(*records(), index, kind)
        found, step = trained(factory, *data, **STEP, chunk_size=chunk_size)
        expected = one_by_one(factory, *data, **STEP)
        assert all(np.isfinite(array).all() for array in found.values())
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], atol=1e-6)
        clean, _ = trained(factory, *records(), **STEP, chunk_size=chunk_size)
        assert 0 < difference(found, clean) <= step.sensitivity()


class Fragile(nn.Module):
    """Where rounding decides: the server has chosen weights that make all of the least bit."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.norm = nn.LayerNorm(40, eps=1e-30)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(40, 3)

    def forward(self, x):
        rounded = self.first(x) * 1e3
        return self.out(self.drop(self.norm(torch.sin(rounded * 1e5))))


FACTORIES = {name: (factory, shape, loss) for name, (factory, shape, loss) in CASES.items()}
FACTORIES["fragile"] = (Fragile, (6,), functional.cross_entropy)
FACTORIES["convolution with dropout"] = (
    lambda: nn.Sequential(
        nn.Conv1d(1, 5, 3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(20, 3)
    ),
    (1, 6),
    functional.cross_entropy,
)


@pytest.mark.parametrize("case", [name for name in FACTORIES if name != "custom loss"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_in_whatever_way_it_misbehaves_the_others_have_the_same_bits(case, dtype):
    factory, shape, loss = FACTORIES[case]
    ways = []
    for kind in BAD:
        features, labels = spoiled(*records(23, shape), 9, kind)
        model = initialise(factory, 1).to(torch.float64 if dtype is np.float64 else torch.float32)
        torch.manual_seed(0)
        settings = {**STEP, "epochs": 2, "batch_size": 12, "chunk_size": 5, "loss": loss}
        train_per_record(model, features.astype(dtype), labels, **settings)
        ways.append(get_arrays(model))
    for way in ways[1:]:
        assert_same_bits(ways[0], way)


def test_computed_one_by_one_the_fragile_model_would_give_the_record_away():
    # So the test above can fail: the bits of a gradient depend on the shape of the batch.
    features, labels = (torch.tensor(part) for part in records(23))
    model = initialise(Fragile, 1).eval()
    gradients = RecordGradients(model, functional.cross_entropy, features[0], labels[0])
    together = gradients({}, features, labels).outer["out.weight"][1]
    alone = torch.cat(
        [
            gradients({}, features[i : i + 1], labels[i : i + 1]).outer["out.weight"][1]
            for i in range(23)
        ]
    )
    assert not torch.equal(together, alone)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([*BAD, "overflow"]),
    data=st.data(),
    n=st.integers(1, 12),
    chunk_size=st.integers(1, 13),
    epochs=st.integers(1, 3),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_one_record_that_misbehaves_moves_the_training_by_at_most_the_sensitivity(
    kind, data, n, chunk_size, epochs, dtype
):
    index = data.draw(st.integers(0, n - 1))
    batch_size = data.draw(st.sampled_from([None, *range(1, n + 1)]))
    plan = PerRecordPlan(**STEP, epochs=epochs, batch_size=batch_size)
    features, labels = records(n, seed=data.draw(st.integers(0, 5)))
    features = features.astype(dtype)

    def work(data):
        model = initialise(lambda: mlp([6, 8, 3]), 0)
        model.to(torch.float64 if dtype is np.float64 else torch.float32)
        with asked(plan) as request:
            train_per_record(model, *data, chunk_size=chunk_size)
        return get_arrays(model), request.certificate

    first, step = work((features, labels))
    second, _ = work(spoiled(features, labels, index, kind))
    assert all(np.isfinite(array).all() for array in second.values())
    assert difference(first, second) <= step.sensitivity()
    assert not torch._C._functorch.peek_interpreter_stack()  # no transform is left open


def test_all_records_may_misbehave():
    features, labels = records()
    for bad in ((features * np.nan, labels), (features, labels + 99)):
        model = initialise(lambda: mlp([6, 8, 3]), 0)
        before = get_arrays(model)
        step = train_per_record(model, *bad, **STEP, epochs=2, batch_size=7)
        assert_same_bits(before, get_arrays(model))
        step.check(before.values(), before.values())


def test_weights_that_overflow_for_some_record_tell_no_more_than_a_clipped_gradient():
    # The free oracle of issue 23: float32 overflows only where u.x is above a threshold.
    features, labels = records(50)
    moved = []
    for value in (0.0, 5.0):
        features[3] = value
        model = initialise(lambda: mlp([6, 8, 3]), 0)
        with torch.no_grad():
            model[1].weight.fill_(3e37)
            model[1].bias.zero_()
        start = get_arrays(model)
        with asked(PerRecordPlan(**STEP)) as request:
            train_per_record(model, features, labels)
        request.certificate.check(start.values(), get_arrays(model).values())
        moved.append(get_arrays(model))
    assert difference(*moved) <= request.certificate.sensitivity()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("delta", "value"), [(1e-30, 1e30), (1e-163, 1e153), (1e-170, 1e300), (1e300, 1e-300)]
)
def test_no_gradient_is_left_unclipped_because_its_square_leaves_the_range(dtype, delta, value):
    # The gradient of the weight is delta * value in each entry, and their squares are 0 or inf.
    with np.errstate(over="ignore"):
        features = np.full((2, 6), value).astype(dtype)
    found, step = trained(
        lambda: nn.Linear(6, 2).to(torch.float64 if dtype is np.float64 else torch.float32),
        features,
        np.zeros(2, np.int64),
        clipping_norm=1e-12,
        learning_rate=1.0,
        loss=lambda outputs, labels: (outputs * delta).sum(),
    )
    start = initialise(lambda: nn.Linear(6, 2), 0)
    start.to(torch.float64 if dtype is np.float64 else torch.float32)
    assert difference(found, get_arrays(start)) <= 1e-12 * 1.001 + step.rounding


def test_weights_stay_in_the_range_of_their_type():
    features, labels = records(4)
    model = initialise(lambda: mlp([6, 8, 3]), 0).half()
    settings = {"clipping_norm": 1e9, "learning_rate": 1e6, "epochs": 3}
    step = train_per_record(
        model, features.astype(np.float16) * 100, labels, loss=huge_loss, **settings
    )
    end = get_arrays(model)
    assert all(np.isfinite(array).all() for array in end.values())
    assert max(np.abs(array).max() for array in end.values()) == np.finfo(np.float16).max
    assert math.isfinite(step.sensitivity())


def huge_loss(outputs, labels):
    return functional.cross_entropy(outputs, labels) * 1e3


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_weights_without_a_length_are_refused_before_a_record_is_looked_at(value):
    model = initialise(lambda: mlp([6, 8, 3]), 0).double()
    with torch.no_grad():
        model[1].weight[0, 0] = value**5 if math.isfinite(value) else value

    class Unread(np.ndarray):
        def __getitem__(self, key):
            raise AssertionError("a record was read")

    features, labels = records()
    with pytest.raises(InvalidParameterError, match=r"model = .*not finite, or too large"):
        train_per_record(model, features.view(Unread), labels, **STEP)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        KeyboardInterrupt(),
    ],
)
def test_lack_of_memory_or_of_a_device_is_no_record_s_fault(error):
    calls = []

    def loss(outputs, labels):
        calls.append(1)
        if len(calls) > 1:  # after the one that looks at the model
            raise error
        return functional.cross_entropy(outputs, labels)

    model = initialise(lambda: mlp([6, 8, 3]), 0)
    before = get_arrays(model)
    with pytest.raises(type(error)):
        train_per_record(model, *records(), loss=loss, **STEP)
    assert_same_bits(before, get_arrays(model))
    calls.append(1)
    with pytest.raises(type(error)):
        evaluate_per_record(model, *records(), loss=loss, loss_cap=1.0)


def test_a_model_that_only_runs_on_single_records_trains_nothing():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum().item() > 0 else -x)

    model = initialise(lambda: Branching(6, 3), 0)
    before = get_arrays(model)
    train_per_record(model, *records(), **STEP)
    assert_same_bits(before, get_arrays(model))
    assert evaluate_per_record(model, *records(), loss_cap=0.5).mean == 0.5


def test_a_model_that_changes_its_input_is_computed_anew_from_the_records():
    class Changing(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    ways = [
        trained(lambda: Changing(6, 3), *spoiled(*records(), 4, kind), **STEP)[0]
        for kind in ("nan", "raises")
    ]
    assert_same_bits(*ways)


@pytest.mark.parametrize("kind", BAD)
def test_the_node_s_log_says_once_how_many(kind, caplog):
    features, labels = spoiled(*records(), 4, kind)
    model = initialise(lambda: mlp([6, 8, 3]), 0)
    with caplog.at_level(logging.WARNING, logger="flwr.privacy"):
        train_per_record(model, features, labels, **STEP, epochs=3, chunk_size=6)
        train_per_record(model, *records(), **STEP)
    said = [r.message for r in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("train_per_record: 1 of 20 records counted as zero")


def test_the_convex_bound_holds_for_a_record_without_a_gradient():
    features, labels = records(9)
    labels = (labels > 1).astype(np.float32)
    settings = {
        "clipping_norm": 0.5, "learning_rate": 0.05, "epochs": 4, "batch_size": 2,
        "bound": "convex", "smoothness": 20.0, "loss": logistic,
    }  # fmt: skip
    first, step = trained(lambda: nn.Linear(6, 1), features, labels, **settings)
    for kind in ("nan", "inf"):
        bad = spoiled(features, labels, 5, kind)
        second, _ = trained(lambda: nn.Linear(6, 1), *bad, **settings)
        assert 0 < difference(first, second) <= step.sensitivity()


# The number of records that a node declares


def declared(data, plan, **more):
    model = initialise(lambda: mlp([6, 8, 3]), 0)
    with asked(plan, SecureRandom.insecure(0, "declared")) as request:
        train_per_record(model, *data, **more)
    return get_arrays(model), request.certificate


@pytest.mark.parametrize("batch_size", [None, 4])
def test_records_beyond_the_declared_number_are_left_out(batch_size):
    features, labels = records(20)
    plan = PerRecordPlan(**STEP, epochs=2, batch_size=batch_size, records=11)
    more, step = declared((features, labels), plan)
    fewer, _ = declared((features[:11], labels[:11]), plan)
    plain, other = trained(
        lambda: mlp([6, 8, 3]), features[:11], labels[:11], **STEP, epochs=2, batch_size=batch_size
    )
    assert_same_bits(more, fewer)
    assert_same_bits(more, plain)
    assert step.records == 11
    assert step.sensitivity() == other.sensitivity()
    assert step.sensitivity() >= plan.sensitivity()  # known before there are data


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("there", [0, 1, 7, 10])
def test_missing_records_count_as_zero(batch_size, there):
    features, labels = records(11)
    plan = PerRecordPlan(**STEP, epochs=2, batch_size=batch_size, records=11)
    found, step = declared((features[:there], labels[:there]), plan)
    features[there:] = np.nan
    expected, other = declared((features, labels), plan)
    assert_same_bits(found, expected)
    assert (step.records, step.sensitivity()) == (11, other.sensitivity())


def test_coins_are_drawn_for_the_declared_number():
    class Counted(SecureRandom):
        def uint64(self, count):
            drawn.append(count)
            return super().uint64(count)

    drawn = []
    plan = PerRecordPlan(**STEP, sampling_rate=0.5, records=15)
    for n in (3, 15, 40):
        with asked(plan, Counted()) as request:
            train_per_record(initialise(lambda: mlp([6, 8, 3]), 0), *records(n))
        assert request.certificate.records == 15
    assert drawn == [15, 15, 15]


def test_missing_records_are_not_said_to_misbehave(caplog):
    with caplog.at_level(logging.WARNING, logger="flwr.privacy"):
        declared(records(4), PerRecordPlan(**STEP, records=11))
    assert not caplog.records


def test_bad_declarations():
    for number in (0, -1, 2.5):
        with pytest.raises(InvalidParameterError, match=f"records = {number}"):
            PerRecordPlan(**STEP, records=number)
        with (
            pytest.raises(InvalidParameterError, match=f"records = {number}"),
            asked_loss(1.0, records=number),
        ):
            pass
    with pytest.raises(InvalidParameterError, match="batch_size = 12: expected at most"):
        PerRecordPlan(**STEP, batch_size=12, records=11)
    with pytest.raises(InvalidParameterError, match="records = None: expected a number"):
        PerRecordPlan(**STEP).sensitivity()
    with pytest.raises(DataError, match="no records"):
        declared(records(0), PerRecordPlan(**STEP))


def test_a_certificate_for_another_number_than_declared_is_refused():
    from flwr_privacy.clients.certificates.per_record_loss import PerRecordLoss, certify_loss
    from flwr_privacy.clients.certificates.per_record_steps import PerRecordStep, certify

    plan = PerRecordPlan(**STEP, records=11)
    with asked(plan), pytest.raises(ProtocolError, match=r"11 records are declared.* is for 12"):
        certify(PerRecordStep(plan=plan, records=12, before=(), after=()))
    with asked_loss(1.0, records=11), pytest.raises(ProtocolError, match="11 records are declared"):
        certify_loss(PerRecordLoss(cap=1.0, records=12, mean=0.5, model=()))


# Losses


def losses_of(data, **settings):
    return evaluate_per_record(initialise(lambda: mlp([6, 8, 3]), 0), *data, **settings)


@pytest.mark.parametrize("chunk_size", [1024, 7, 1])
def test_a_loss_whose_computation_raises_counts_as_the_cap(chunk_size, caplog):
    data = records()
    expected = losses_of(spoiled(*data, 4, "nan"), loss_cap=2.0, chunk_size=chunk_size)
    assert len(caplog.records) == 1
    found = losses_of(spoiled(*data, 4, "raises"), loss_cap=2.0, chunk_size=chunk_size)
    assert found.mean == expected.mean
    assert abs(found.mean - losses_of(data, loss_cap=2.0).mean) <= found.sensitivity()
    assert "1 of 20 records counted as the cap" in caplog.records[1].message
    assert losses_of((data[0], data[1] + 99), loss_cap=2.0).mean == 2.0


def test_losses_are_over_the_declared_number():
    features, labels = records()
    whole = losses_of((features[:11], labels[:11]), loss_cap=2.0).mean
    for there in (0, 7, 11, 20):
        with asked_loss(2.0, records=11) as request:
            found = losses_of((features[:there], labels[:there]), chunk_size=4)
        expected = [losses_of((features[i : i + 1], labels[i : i + 1]), loss_cap=2.0).mean
                    for i in range(min(there, 11))]  # fmt: skip
        assert found.mean == pytest.approx(math.fsum(expected) / 11, rel=1e-6)
        assert request.certificate.records == 11
        if there >= 11:
            assert found.mean == pytest.approx(whole, rel=1e-6)
    with asked_loss(2.0), pytest.raises(DataError, match="no records"):
        losses_of((features[:0], labels[:0]))
