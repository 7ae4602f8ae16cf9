"""A rehearsal: the number of records, and whether the model runs, without a look at a record."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.per_record_loss import asked_loss
from flwr_privacy.clients.certificates.per_record_steps import PerRecordPlan, asked
from flwr_privacy.clients.certificates.poisson_steps import PoissonPlan, asked_steps
from flwr_privacy.clients.node.rehearsal import RehearsedError, counted
from flwr_privacy.clients.torch import (
    evaluate_per_record,
    get_arrays,
    initialise,
    mlp,
    train_per_record,
    train_poisson,
)
from flwr_privacy.errors import InvalidParameterError, ProtocolError

PLAN = PerRecordPlan(clipping_norm=1.0, learning_rate=0.5, epochs=2, batch_size=8)
POISSON = PoissonPlan(sampling_rate=0.2, steps=3)


class Unread(np.ndarray):
    """Records whose values nobody may look at."""

    def __getitem__(self, key):
        raise AssertionError("a record was read")

    def __array_ufunc__(self, *args, **kwargs):
        raise AssertionError("a record was read")

    def __array_function__(self, *args, **kwargs):
        raise AssertionError("a record was read")


def unread(n=20, dtype=np.float32):
    return np.zeros((n, 6), dtype).view(Unread), np.zeros(n, np.int64).view(Unread)


def scope(trainer):
    return {
        train_per_record: lambda: asked(PLAN),
        train_poisson: lambda: asked_steps(POISSON),
        evaluate_per_record: lambda: asked_loss(1.0),
    }[trainer]()


def call(trainer, model, features, labels, **more):
    if trainer is train_poisson:
        more["learning_rate"] = 0.1
    return trainer(model, features, labels, **more)


TRAINERS = [train_per_record, train_poisson, evaluate_per_record]


def kind_of(trainer):
    return "evaluate" if trainer is evaluate_per_record else "train"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_it_tells_the_number_of_records_and_reads_none(trainer):
    model = initialise(lambda: mlp([6, 8, 3]), 0)
    before = get_arrays(model)
    seen = []

    def loss(outputs, labels):
        seen.append(labels.shape)
        return functional.cross_entropy(outputs, labels)

    with scope(trainer) as request, counted(kind_of(trainer)) as rehearsal:
        call(trainer, model, *unread(), loss=loss)
        raise AssertionError("the user's function went on")
    assert rehearsal.called
    assert rehearsal.records == 20
    assert rehearsal.layout == (((6,), np.dtype(np.float32)), ((), np.dtype(np.int64)))
    assert rehearsal.error is None
    assert seen
    for name, array in get_arrays(model).items():
        assert array.tobytes() == before[name].tobytes()
    with pytest.raises(ProtocolError, match=r"did no|measured no"):
        _ = request.certificate


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_the_model_or_the_loss_raises_is_told(trainer):
    def loss(outputs, labels):
        raise ValueError("a loss of no use")

    with scope(trainer), counted(kind_of(trainer)) as rehearsal:
        call(trainer, initialise(lambda: mlp([6, 8, 3]), 0), *unread(), loss=loss)
    assert str(rehearsal.error) == "a loss of no use"
    with scope(trainer), counted(kind_of(trainer)) as rehearsal:
        call(trainer, initialise(lambda: mlp([5, 8, 3]), 0), *unread())  # another width
    assert isinstance(rehearsal.error, RuntimeError)
    assert rehearsal.records == 20


def test_a_model_that_does_not_run_on_batches_of_records_is_told():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum().item() > 0 else -x)

    with asked(PLAN), counted() as rehearsal:
        train_per_record(Branching(6, 3), *unread())
    assert "vmap" in str(rehearsal.error)


def test_settings_and_models_that_do_not_fit_are_told():
    with asked(PLAN), counted() as rehearsal:
        train_per_record(mlp([6, 8, 3]), *unread(), learning_rate=0.4)
    assert isinstance(rehearsal.error, InvalidParameterError)
    with asked(PLAN), counted() as rehearsal:
        train_per_record(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), *unread())
    assert "GroupNorm" in str(rehearsal.error)
    with asked(PLAN), counted() as rehearsal:
        train_per_record(mlp([6, 8, 3]), *unread(5))
    assert "batch_size = 8" in str(rehearsal.error)
    assert rehearsal.records == 5


def test_generated_features_have_the_type_of_the_user_s():
    seen = []

    class Seeing(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            seen.append(x.dtype)
            return self.out(x.float())

    for dtype in (np.float32, np.int64, np.uint8, np.bool_):
        with asked(PLAN), counted() as rehearsal:
            train_per_record(Seeing(), *unread(dtype=dtype))
        assert rehearsal.error is None
    assert set(seen) == {torch.float32, torch.int64, torch.uint8, torch.bool}


def test_a_function_that_never_calls_the_trainer_is_noticed():
    with counted() as rehearsal:
        pass
    assert not rehearsal.called
    assert rehearsal.records is None
    with pytest.raises(ValueError, match="its own"), counted() as rehearsal:
        raise ValueError("its own")
    assert not rehearsal.called


@pytest.mark.parametrize("caught", [RehearsedError, BaseException])
def test_who_catches_what_ends_the_function_cannot_hide_the_rehearsal(caught):
    def stubborn():
        try:
            train_per_record(initialise(lambda: mlp([6, 8, 3]), 0), *unread())
        except caught as error:
            raise RuntimeError("it failed") from error

    with asked(PLAN), counted() as rehearsal:
        stubborn()
    assert rehearsal.records == 20


def test_a_broad_except_does_not_let_the_function_go_on():
    went_on = []

    def careful():
        try:
            train_per_record(initialise(lambda: mlp([6, 8, 3]), 0), *unread())
        except Exception:  # noqa: BLE001
            went_on.append(1)

    with asked(PLAN), counted() as rehearsal:
        careful()
    assert rehearsal.records == 20
    assert not went_on


def test_the_first_call_counts_and_the_other_kind_works_as_always():
    data = np.zeros((7, 6), np.float32), np.zeros(7, np.int64)
    model = initialise(lambda: mlp([6, 8, 3]), 0)
    with asked(PLAN), counted() as rehearsal:
        assert evaluate_per_record(model, *data, loss_cap=1.0).records == 7
        for n in (20, 30):
            with pytest.raises(RehearsedError):
                train_per_record(model, *unread(n))
    assert rehearsal.records == 20
    train_per_record(model, *data, clipping_norm=1.0, learning_rate=1.0)  # the scope has ended


def test_generated_batches_are_as_large_as_those_of_the_training():
    sizes = []

    class Sized(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    from flwr_privacy.clients.torch.record_gradients import RecordGradients

    whole = RecordGradients.__call__

    def watched(self, parameters, features, labels):
        sizes.append(len(labels))
        return whole(self, parameters, features, labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordGradients, "__call__", watched)
        for plan, n, chunk_size in ((PLAN, 20, None), (PLAN, 20, 3), (None, 5000, None)):
            plan = plan or PerRecordPlan(clipping_norm=1.0, learning_rate=0.5)
            with asked(plan), counted() as rehearsal:
                train_per_record(Sized(6, 3), *unread(n), chunk_size=chunk_size)
            assert rehearsal.error is None
    assert sizes == [8, 3, 1024]


def test_no_records_are_told():
    for trainer in TRAINERS:
        with scope(trainer), counted(kind_of(trainer)) as rehearsal:
            call(trainer, mlp([6, 8, 3]), *unread(0))
        assert rehearsal.records == 0
        assert "no records" in str(rehearsal.error)


def test_another_kind_is_refused():
    with pytest.raises(InvalidParameterError, match="kind = 'test'"), counted("test"):
        pass
