"""The trainer that clips per record: memory, settings, and models that it refuses."""

import math

import numpy as np
import pytest
import torch
from record_models import PLAN, records, trained
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.per_record_steps import asked
from flwr_privacy.clients.torch import get_arrays, initialise, linear, mlp, train_per_record
from flwr_privacy.clients.torch.record_gradients import RecordGradients
from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError


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
    assert request.certificate.plan == PLAN
    assert request.certificate.records == 20
    request.certificate.check(start.values(), end.values())


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
    assert request.certificate.plan == PLAN


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
        _ = request.certificate


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
        _ = request.certificate
