"""Finds a task by its name: a built-in one, an installed one, or a function of the user's.

A task of the user's is ``module:function``: a function without arguments that returns a `Task`.
A package installs tasks with an entry point of the group ``flwr_privacy.tasks``, of the same form.
"""

import hashlib
import re
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.clients.torch import get_arrays, initialise
from flwr_privacy.errors import CheckpointError, InvalidParameterError, check_choice
from flwr_privacy.simulations.settings.own_code import call_own, is_reference, own_function

from .data import load
from .offered import offered_task
from .own_data import own_records
from .records import Dataset
from .task_list import TASKS, Task
from .vertical_tasks import VERTICAL_TASKS, VerticalTask

__all__ = [
    "ALLOWED_VARIABLE",
    "GROUP",
    "all_records",
    "check_own_task",
    "check_same_task",
    "installed_tasks",
    "task",
    "task_digest",
]

GROUP = "flwr_privacy.tasks"
"""Group of the entry points with which packages install tasks."""

ALLOWED_VARIABLE = "FLWR_PRIVACY_ALLOWED_TASK"
"""Environment variable of a deployed node: the one ``module:function`` that a server may name."""

_PROBED = 8  # records that are put through a model before a run


def installed_tasks() -> dict[str, EntryPoint]:
    """Return the tasks that packages install, by name; none of them is imported.

    Raises
    ------
    InvalidParameterError
        If two have one name, or one has the name of a built-in task.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.get(entry.name, entry)
        if entry.name in {**TASKS, **VERTICAL_TASKS} or other.value != entry.value:
            allowed = f"a name of its own for {entry.value} ({GROUP}): another task has that name"
            raise InvalidParameterError("task", entry.name, allowed)
        found[entry.name] = entry
    return found


def task(name: str) -> Task:
    """Return the task of that name; a process calls a user's function once.

    Parameters
    ----------
    name : str
        Name of a built-in or installed task, ``module:function``, or the name of a task that is
        offered to this process.

    Raises
    ------
    InvalidParameterError
        If there is none; the message puts the nearest names first. Also if the function is not
        there, raises, or returns something else than a `Task`.

    Examples
    --------
    >>> task("digits-mlp").dataset
    'digits'
    """
    if name in TASKS:
        return TASKS[name]
    if (offered := offered_task(name)) is not None:
        return offered
    if is_reference(name):
        return _called(name, name)
    installed = installed_tasks()
    return _called(installed[check_choice("task", name, [*TASKS, *installed])].value, name)


def all_records(task: Task, data_root: str | Path | None) -> Dataset:
    """Return all records of a task; see `load` and `own_records` for the errors.

    Parameters
    ----------
    task : Task
        What is trained.
    data_root : str or Path or None
        Folder with the files of a task that does not bring its records.
    """
    return own_records(task) if task.dataset is None else load(task.dataset, data_root=data_root)


def check_own_task(task: Task | VerticalTask, data_root: str | Path | None) -> None:
    """Put some records through a user's model and loss, so that a run is refused before it starts.

    Built-in tasks need no such check.

    Parameters
    ----------
    task, data_root
        As of `all_records`; the records of the largest class are among those that are tried.

    Raises
    ------
    InvalidParameterError
        If the model is none, cannot take the records, or has no output for a class, or the loss is
        no finite number that depends on the weights; also as `own_records`.
    """
    if isinstance(task, VerticalTask) or task.name in TASKS:
        return
    data = all_records(task, data_root)
    features, labels = _some(data.features, data.labels, data.classes)
    if len(data.test_labels):
        more = _some(data.test_features, data.test_labels, data.classes)
        features, labels = np.concatenate([features, more[0]]), np.concatenate([labels, more[1]])
    if task.features is not None:
        features = task.features()(features).astype(np.float32)
    model = call_own("task", task.name, "its model", lambda: initialise(task.model, 0))
    if not isinstance(model, nn.Module) or not list(model.parameters()):
        allowed = "a model that is a torch.nn.Module with weights: a class, or a function"
        raise InvalidParameterError(f"task {task.name}: model", type(model).__name__, allowed)
    inputs, targets = torch.tensor(features), torch.tensor(labels)
    outputs = call_own("task", task.name, "its model", lambda: model(inputs))
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
        shape = tuple(getattr(outputs, "shape", ())) or type(outputs).__name__
        allowed = "scores of each class for a batch, (batch, classes)"
        raise InvalidParameterError(f"task {task.name}: outputs of the model", shape, allowed)
    # The accuracy takes the largest score: without one for each class it would say nothing.
    if data.classes > (width := outputs.shape[1]):
        allowed = f"classes below {width}, the number of outputs of the model"
        raise InvalidParameterError(f"task {task.name}: labels", data.classes - 1, allowed)
    loss = call_own("task", task.name, "its loss", lambda: task.loss(outputs, targets))
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        allowed = "the mean loss of a batch: a tensor without axes that depends on the weights"
        raise InvalidParameterError(f"task {task.name}: loss", type(loss).__name__, allowed)
    if not torch.isfinite(loss):
        allowed = "a finite loss of the untrained model"
        raise InvalidParameterError(f"task {task.name}: loss", loss.item(), allowed)


def task_digest(name: str) -> str:
    """Return what tells one task of a user from another: digests of its data and of its model.

    That is ``data-model``, 16 hexadecimal digits each. The model's is of the weights with which it
    starts under seed 0, of its layers as torch prints them, and of the names of loss and features.
    A built-in task has none: ``""``.

    Parameters
    ----------
    name : str
        As of `task`; so are the errors.
    """
    return "" if name in TASKS or name in VERTICAL_TASKS else _digest(task(name))


def check_same_task(name: str, digest: str) -> None:
    """Refuse a task that is not the one with which a run has begun.

    Parameters
    ----------
    name, digest : str
        The task, and what `task_digest` said of it; ``""`` where it was not noted.

    Raises
    ------
    CheckpointError
        If data or model differ; it says which.
    """
    if not digest or digest == (found := task_digest(name)):
        return
    before, now = digest.split("-"), found.split("-")
    changed = [what for what, a, b in zip(("data", "model"), before, now, strict=True) if a != b]
    raise CheckpointError(
        f"the task '{name}' is not the one with which the run has begun: other "
        f"{' and other '.join(changed)}. Restore it, or start a new run. (What a task draws at "
        "random needs a seed.)"
    )


@lru_cache(maxsize=8)
def _called(reference: str, name: str) -> Task:
    """Return what the function of a reference returns."""
    function = own_function("task" if name == reference else f"task {name}", reference)
    found = call_own("task", name, f"{reference.partition(':')[2]}()", function)
    if not isinstance(found, Task):
        it = "None" if found is None else type(found).__name__
        allowed = f"a function that returns a {Task.__module__}.Task (it returns {it})"
        raise InvalidParameterError("task", name, allowed)
    about = found.description or (function.__doc__ or "").strip().partition("\n")[0]
    return replace(found, name=name, description=about)


def _some(features: Any, labels: Any, classes: int) -> tuple[Any, Any]:
    """Return the first records, and one of the largest class if there is one."""
    places = [*range(min(len(labels), _PROBED)), *np.flatnonzero(labels == classes - 1)[:1]]
    return features[places], labels[places]


def _update(digest: Any, name: str, array: NDArray[Any]) -> None:
    digest.update(f"{name} {array.dtype} {array.shape};".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


@lru_cache(maxsize=8)
def _digest(task: Task) -> str:
    data, model = hashlib.sha256(), hashlib.sha256()
    if task.dataset is None:
        records = own_records(task)
        for name in ("features", "labels", "test_features", "test_labels"):
            _update(data, name, getattr(records, name))
    else:
        data.update(task.dataset.encode())  # whose files have known checksums
    made = initialise(task.model, 0)
    loss = getattr(task.loss, "__qualname__", type(task.loss).__name__)
    features = "" if task.features is None else task.features().identity
    # Without the addresses of objects, which differ from process to process.
    text = re.sub(" at 0x[0-9a-f]+", "", repr(made))
    model.update(f"{text} {loss} {features}".encode())
    for name, array in get_arrays(made).items():
        _update(model, name, array)
    return f"{data.hexdigest()[:16]}-{model.hexdigest()[:16]}"
