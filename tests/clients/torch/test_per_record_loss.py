"""The mean of losses that are clipped one by one, and its certificate."""

import math
import threading

import numpy as np
import pytest
import torch
from record_models import records
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.per_record_loss import (
    PerRecordLoss,
    asked_loss,
    certify_loss,
    current_cap,
)
from flwr_privacy.clients.certificates.per_record_steps import (
    ROUNDING,
    PerRecordPlan,
    asked,
    current_plan,
)
from flwr_privacy.clients.certificates.request import digests
from flwr_privacy.clients.torch import (
    evaluate,
    evaluate_per_record,
    get_arrays,
    initialise,
    mlp,
    train_per_record,
)
from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError


def model(seed=0):
    return initialise(lambda: mlp([6, 8, 3]), seed)


def losses_one_by_one(net, features, labels):
    net.eval()
    with torch.no_grad():
        return np.array(
            [
                float(functional.cross_entropy(net(torch.tensor(x[None])), torch.tensor(y[None])))
                for x, y in zip(features, labels, strict=True)
            ]
        )


@pytest.mark.parametrize("chunk_size", [1024, 7, 1])
def test_mean_of_losses_clipped_one_by_one(chunk_size):
    net, (features, labels) = model(), records()
    losses = losses_one_by_one(net, features, labels)
    cap = float(np.median(losses))
    found = evaluate_per_record(net, features, labels, loss_cap=cap, chunk_size=chunk_size)
    assert found.mean == pytest.approx(np.minimum(losses, cap).mean(), abs=1e-6)
    assert found.mean < min(losses.mean(), cap)  # a clip of the mean would be more
    assert found.records == 20


def test_with_a_large_cap_it_is_the_plain_mean():
    net, (features, labels) = model(), records()
    found = evaluate_per_record(net, features, labels, loss_cap=1e6)
    assert found.mean == pytest.approx(evaluate(net, features, labels)["loss"], rel=1e-6)


@pytest.mark.parametrize("value", [1e-3, 1e3, 1e30, np.nan, np.inf, -np.inf])
def test_one_replaced_record_moves_the_mean_by_at_most_the_sensitivity(value):
    net, (features, labels) = model(), records()
    first = evaluate_per_record(net, features, labels, loss_cap=2.0)
    moves = []
    for index in range(20):
        for label in range(3):
            other, other_labels = features.copy(), labels.copy()
            other[index], other_labels[index] = value, label
            second = evaluate_per_record(net, other, other_labels, loss_cap=2.0)
            moves.append(abs(first.mean - second.mean))
    assert 0 < max(moves) <= first.sensitivity()
    assert first.sensitivity() == pytest.approx(2.0 / 20 * (1 + ROUNDING))


def test_the_sensitivity_is_attained():
    features = np.zeros((8, 6), np.float32)
    labels = np.zeros(8, np.int64)
    net = nn.Linear(6, 2)

    def loss(outputs, labels):
        return 100.0 * labels.sum() + 0 * outputs.sum()

    first = evaluate_per_record(net, features, labels, loss=loss, loss_cap=2.0)
    labels[3] = 1
    second = evaluate_per_record(net, features, labels, loss=loss, loss_cap=2.0)
    assert second.mean - first.mean == 2.0 / 8


def test_losses_below_zero_count_as_zero_and_what_is_no_number_as_the_cap():
    features, labels = np.zeros((4, 6), np.float32), np.array([-1.0, 1.0, np.nan, np.inf])
    found = evaluate_per_record(
        nn.Linear(6, 1), features, labels, loss=lambda o, y: y + 0 * o[:, 0], loss_cap=2.0
    )
    assert found.mean == (0 + 1 + 2 + 2) / 4


def test_a_record_has_no_part_in_the_loss_of_another():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 3)
            self.norm = nn.BatchNorm1d(6, track_running_stats=False)

        def forward(self, x):
            return self.out(x - 0.5 * x.mean(dim=0, keepdim=True))

    net, (features, labels) = Centred(), records()
    alone = losses_one_by_one(net, features, labels)
    found = evaluate_per_record(net, features, labels, loss_cap=100.0)
    assert found.mean == pytest.approx(alone.mean(), rel=1e-6)
    with torch.no_grad():
        mixed = functional.cross_entropy(net(torch.tensor(features)), torch.tensor(labels))
    assert abs(float(mixed) - found.mean) > 1e-3


def test_batch_normalisation_uses_its_running_statistics_and_leaves_them():
    net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    net(torch.tensor(records(seed=5)[0]))
    features, labels = records()
    before = get_arrays(net)
    found = evaluate_per_record(net, features, labels, loss_cap=100.0)
    assert found.mean == pytest.approx(losses_one_by_one(net, features, labels).mean(), rel=1e-6)
    found.check(before.values())
    assert not net.training


def test_dropout_is_off():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
    means = {evaluate_per_record(net, *records(), loss_cap=9.0).mean for _ in range(3)}
    assert len(means) == 1


def test_no_gradients_are_left():
    net = model()
    evaluate_per_record(net, *records(), loss_cap=9.0)
    assert all(p.grad is None for p in net.parameters())


def test_the_scheme_gives_the_cap_and_gets_the_loss():
    net = model()
    with asked_loss(0.5) as request:
        assert current_cap() == 0.5
        found = evaluate_per_record(net, *records())
        with pytest.raises(
            InvalidParameterError, match=r"loss_cap = 0.6: expected 0.5, as the sch"
        ):
            evaluate_per_record(net, *records(), loss_cap=0.6)
    assert request.certificate == found
    assert found.cap == 0.5
    request.certificate.check(get_arrays(net).values())
    assert current_cap() is None
    with asked_loss(0.5) as request:
        evaluate_per_record(net, *records(), loss_cap=0.5)
    assert request.certificate == found


def test_evaluating_another_model_is_noticed():
    net = model()
    found = evaluate_per_record(net, *records(), loss_cap=1.0)
    with pytest.raises(ProtocolError, match=r"evaluation was given other arrays \(4 of 4\)"):
        found.check(array + 1 for array in get_arrays(net).values())
    with pytest.raises(ProtocolError, match="1 of floating point, the model has 4"):
        found.check([np.zeros(1)])


def test_an_evaluation_without_the_evaluator_is_noticed():
    with asked_loss(1.0) as request:
        evaluate(model(), *records())
    with pytest.raises(ProtocolError, match="evaluate_per_record, once"):
        _ = request.certificate


@pytest.mark.parametrize("times", [2, 3])
def test_only_one_loss_is_certified(times):
    with asked_loss(1.0) as request:
        evaluate_per_record(model(), *records())
        for _ in range(times - 1):
            with pytest.raises(ProtocolError, match="per-record losses: the noise"):
                evaluate_per_record(model(), *records())
    with pytest.raises(ProtocolError, match=f"measured {times} per-record losses"):
        _ = request.certificate


def test_a_loss_with_another_cap_is_not_certified():
    other = PerRecordLoss(cap=3.0, records=1, mean=0.5, model=())
    with asked_loss(1.0) as request, pytest.raises(ProtocolError, match=r"clipped to 1\.0.*3\.0"):
        certify_loss(other)
    with pytest.raises(ProtocolError, match="the scheme asks"):
        _ = request.certificate


def test_scopes_of_trainings_evaluations_and_threads_are_apart():
    plan = PerRecordPlan(clipping_norm=1.0, learning_rate=0.5)
    seen = []
    with asked(plan) as training, asked_loss(1.0) as evaluation:
        train_per_record(net := model(), *records())
        evaluate_per_record(net, *records())
        with asked_loss(2.0):
            assert (current_cap(), current_plan()) == (2.0, plan)
        thread = threading.Thread(target=lambda: seen.append(current_cap()))
        thread.start()
        thread.join()
    evaluation.certificate.check(get_arrays(net).values())
    assert training.certificate.after == evaluation.certificate.model
    assert seen == [None]


def test_a_certificate_does_not_show_what_it_certifies():
    found = evaluate_per_record(model(), *records(), loss_cap=1.0)
    assert repr(found) == "PerRecordLoss(cap=1.0, records=20)"


def test_the_loss_is_measured_on_one_thread():
    threads, seen = torch.get_num_threads(), []

    def loss(outputs, labels):
        seen.append(torch.get_num_threads())
        return functional.cross_entropy(outputs, labels)

    try:
        torch.set_num_threads(3)
        evaluate_per_record(model(), *records(), loss=loss, loss_cap=1.0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {1}


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan, math.inf])
def test_bad_caps(cap):
    with pytest.raises(InvalidParameterError, match=f"loss_cap = {cap}"):
        evaluate_per_record(model(), *records(), loss_cap=cap)
    with pytest.raises(InvalidParameterError, match=f"cap = {cap}"), asked_loss(cap):
        pass


def test_bad_input():
    features, labels = records()
    with pytest.raises(InvalidParameterError, match=r"loss_cap = None.*no scheme"):
        evaluate_per_record(model(), features, labels)
    with pytest.raises(InvalidParameterError, match="chunk_size = 0"):
        evaluate_per_record(model(), features, labels, loss_cap=1.0, chunk_size=0)
    with pytest.raises(DataError, match="no records"):
        evaluate_per_record(model(), features[:0], labels[:0], loss_cap=1.0)
    with pytest.raises(DataError, match="20 records but 19 labels"):
        evaluate_per_record(model(), features, labels[:19], loss_cap=1.0)
    with pytest.raises(InvalidParameterError, match=r"shape \(3,\)'?: expected one number"):
        evaluate_per_record(model(), features, labels, loss=lambda o, _: o, loss_cap=1.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"records": 0}, "records = 0"),
        ({"mean": 1.5}, "mean = 1.5"),
        ({"mean": math.nan}, "mean = nan"),
        ({"cap": 0.0}, "cap = 0.0"),
    ],
)
def test_bad_certificates(change, text):
    fields = {"cap": 1.0, "records": 1, "mean": 0.5, "model": digests([np.zeros(1)])}
    with pytest.raises(InvalidParameterError, match=text):
        PerRecordLoss(**{**fields, **change})
