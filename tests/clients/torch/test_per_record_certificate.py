"""The certificate of a step that is clipped per record: what it notices."""

import threading

import numpy as np
import pytest
import torch
from record_models import PLAN, records
from torch import nn

from flwr_privacy.clients.certificates.per_record_steps import (
    PerRecordPlan,
    PerRecordStep,
    asked,
    certify,
    current_plan,
)
from flwr_privacy.clients.certificates.request import digests
from flwr_privacy.clients.torch import get_arrays, initialise, linear, mlp, train, train_per_record
from flwr_privacy.errors import DataError, ProtocolError


def test_a_step_by_another_plan_is_not_certified():
    other = PerRecordPlan(clipping_norm=2.0, learning_rate=0.5)
    with asked(PLAN) as request, pytest.raises(ProtocolError, match=r"clipping_norm=2\.0"):
        certify(PerRecordStep(plan=other, records=1, before=(), after=()))
    with pytest.raises(ProtocolError, match="the scheme asks for"):
        _ = request.certificate


def test_training_without_the_trainer_is_noticed():
    with asked(PLAN) as request:
        train(linear(6, 3), *records(), seed=0)
    with pytest.raises(ProtocolError, match=r"train_per_record, once"):
        _ = request.certificate


def certified():
    model = initialise(lambda: mlp([6, 8, 3]), 0)
    start = get_arrays(model)
    with asked(PLAN) as request:
        train_per_record(model, *records())
    return model, start, request.certificate


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
        assert request.certificate.plan == inner
        assert current_plan() == PLAN
    assert current_plan() is None


def test_scopes_of_threads_are_apart():
    seen = []
    with asked(PLAN):
        thread = threading.Thread(target=lambda: seen.append(current_plan()))
        thread.start()
        thread.join()
    assert seen == [None]


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
