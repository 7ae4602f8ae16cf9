"""A task that brings its own arrays: what a run makes of them, and what is refused."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flwr_privacy.clients.torch import linear
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.simulations.tasks.task_list import Task

ROWS = np.random.default_rng(0).normal(size=(30, 4))
CLASSES = np.arange(30) % 3


def own(**changes: Any) -> Task:
    given = {"data": (ROWS, CLASSES), "test": (ROWS[:9], CLASSES[:9]), **changes}
    return Task(model=partial(linear, 4, 3), **given)


def test_a_run_uses_the_arrays_and_leaves_them_as_they_are() -> None:
    task, rows = own(), ROWS.copy()
    data = tasks.dataset(task, Settings())
    assert data.features.dtype == np.float32
    assert data.labels.dtype == np.int64
    assert np.array_equal(data.features, ROWS.astype(np.float32))
    assert data.classes == 3
    assert ROWS.flags.writeable
    assert CLASSES.flags.writeable
    parts = [tasks.client_data(task, Settings(), index, 5)[1] for index in range(5)]
    assert sorted(np.concatenate(parts)) == sorted(CLASSES)
    arrays = tasks.initial_arrays(task, 0)
    trained, examples, metrics = tasks.train_client(task, Settings(), arrays, 0, 5, seed=0)
    assert examples == 6
    assert metrics["loss"] > 0
    assert tasks.evaluate_server(task, Settings(), trained)["loss"] > 0
    assert np.array_equal(rows, ROWS)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32, np.uint8])
def test_arrays_that_need_no_copy_are_not_made_read_only(kind: Any) -> None:
    rows, labels = np.ones((6, 2), kind), np.zeros(6, np.int64)
    tasks.dataset(own(data=(rows, labels), test=None), Settings())
    rows[0] = 2
    labels[0] = 1


def test_tensors_and_lists_are_arrays_too() -> None:
    pairs = (torch.ones(6, 2), torch.zeros(6, dtype=torch.long)), ([[1, 2]] * 3, [0, 1, 1])
    kinds = [tasks.dataset(own(data=pair, test=None), Settings()).features.dtype for pair in pairs]
    assert kinds == [np.float32, np.int64]  # words by their numbers stay integers


def test_some_of_the_records_are_drawn_and_held_for_a_validation() -> None:
    settings = Settings().with_values({"train_records": 12, "validation_records": 6})
    task = own()
    assert len(tasks.dataset(task, settings).labels) == 12
    assert tasks.validation_loss(task, settings, tasks.initial_arrays(task, 0)) > 0


def test_without_test_records_the_server_evaluates_nothing() -> None:
    task = own(test=None)
    assert not tasks.is_tested(task, Settings())
    assert tasks.is_tested(own(), Settings())
    with pytest.raises(InvalidParameterError, match="a task with test records"):
        tasks.evaluate_server(task, Settings(), tasks.initial_arrays(task, 0))


BAD = ROWS.copy()
BAD[7, 2] = np.nan
HUGE = ROWS.copy()
HUGE[3, 1] = 1e300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ROWS}, "data = 'ndarray of 30': expected a pair of arrays"),
        ({"data": (ROWS,)}, "data = 'tuple of 1': expected a pair of arrays"),
        ({"data": 3}, "data = 'int': expected a pair"),
        ({"data": (ROWS, CLASSES[:5])}, "data = '5 labels for 30 records'"),
        ({"data": (ROWS[:0], CLASSES[:0])}, "data = '0 labels for 0 records'"),
        ({"data": (ROWS[:, 0], CLASSES)}, r"data: features = 'shape \(30,\)'"),
        ({"data": (ROWS, CLASSES[:, None])}, r"data: labels = 'shape \(30, 1\)'"),
        ({"data": (BAD, CLASSES)}, "data: features = 'nan in record 7': .* finite"),
        ({"data": (HUGE, CLASSES)}, r"data: features = '1e\+300 in record 3': .* finite"),
        ({"data": (ROWS, CLASSES - 1)}, "data: labels = -1: .* the number of a class"),
        ({"data": (ROWS, CLASSES + 0.5)}, r"data: labels = 0\.5: .* the number of a class"),
        ({"data": (ROWS, CLASSES * np.nan)}, "data: labels = nan: .* the number of a class"),
        ({"data": (ROWS, [str(n) for n in CLASSES])}, "data: labels = 'array of <U1'"),
        ({"data": ([[1.0], [2.0, 3.0]], [0, 1])}, "data: features = 'list': expected an array"),
        ({"test": (BAD, CLASSES)}, "test: features = 'nan in record 7'"),
        ({"test": (ROWS[:, :2], CLASSES)}, r"test = 'records of shape \(2,\)'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        tasks.dataset(own(**changes), Settings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": None, "test": None}, "data = 'neither'"),
        ({"dataset": "digits"}, "data = 'both'"),
        ({"dataset": "digits", "data": None}, "test = .*nothing with the data set 'digits'"),
    ],
)
def test_data_come_from_one_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        own(**changes)
