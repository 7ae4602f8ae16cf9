"""Makes a task of a user's model and arrays, and checks that they fit before anything trains."""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.torch import Loss, initialise
from flwr_privacy.clients.torch.computing import one_thread
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.tasks.lookup import check_own_task
from flwr_privacy.simulations.tasks.own_data import own_records
from flwr_privacy.simulations.tasks.records import Dataset
from flwr_privacy.simulations.tasks.task_list import Task

__all__ = ["digests", "own_task"]

HELD_OUT = 5  # one record in so many is a test record where there are none
_PROBE = 8  # records on which a model and a loss are tried
_DIGEST = 8  # hexadecimal digits in the name of a task

_FORM = "(features, labels), or a list with (features, labels) of each client"

Pair = tuple[NDArray[Any], NDArray[Any]]


def own_task(
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    *,
    test: Any = None,
    loss: Loss | None = None,
    name: str = "own",
) -> Task:
    """Return the task of a model and data; its name ends with their digest.

    Parameters
    ----------
    model, data, test, loss, name
        As of `flwr_privacy.simulate`.

    Raises
    ------
    InvalidParameterError
        If the data is no pair of arrays of equal length with finite features and whole labels from
        0 on, a client has no record, the model does not take the records or has too few outputs
        for the labels, or the loss of its output is no finite number.
    """
    if not isinstance(name, str) or not name or not name.replace("-", "").isalnum():
        raise InvalidParameterError("name", name, "letters, digits and hyphens")
    parts = _clients_of(data)
    if test is None:
        parts, held = _held_out(parts, by_class=not isinstance(data, list))
    else:
        held = _pair("test", test)
    features, labels = _joined(parts)
    task = Task(
        name=name,
        model=_factory(model),
        loss=functional.cross_entropy if loss is None else loss,
        data=(features, labels),
        test=held,
        sizes=tuple(len(own) for _, own in parts) if isinstance(data, list) else None,
        description="a model and data of simulate",
    )
    check_own_task(task, None)
    together = hashlib.sha256("".join(digests(task).values()).encode()).hexdigest()
    return Task(**{**vars(task), "name": f"{name}-{together[:_DIGEST]}"})


def digests(task: Task) -> dict[str, str]:
    """Return what tells a task from others, by part: its data, its model and its loss.

    Those of model and loss are of what they return for the first records, in three digits: code
    has no identity of its own.
    """
    records = own_records(task)
    model = initialise(task.model, 0)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    output, labels = _output(model, records)
    probe = [f"{value:.2e}" for value in output.flatten().tolist()]
    return {
        "data": _digest(records.features, records.labels, repr(task.sizes)),
        "test": _digest(records.test_features, records.test_labels),
        "model": _digest(repr(model), repr(shapes), repr(probe)),
        "loss": _digest(f"{float(task.loss(output, labels)):.2e}"),
    }


def _clients_of(data: Any) -> list[Pair]:
    if not isinstance(data, list):
        return [_pair("data", data)]
    if not data:
        raise InvalidParameterError("data", data, "at least one client")
    parts: list[Pair] = []
    for client, own in enumerate(data):
        if not isinstance(own, tuple | list | torch.utils.data.Dataset):
            raise InvalidParameterError("data", f"a list of {type(own).__name__}", _FORM)
        part = _pair(f"data of client {client}", own)
        if part[0].shape[1:] != (first := parts[0][0] if parts else part[0]).shape[1:]:
            allowed = f"records of the shape {first.shape[1:]} of those of client 0"
            shape = f"records of shape {part[0].shape[1:]}"
            raise InvalidParameterError(f"data of client {client}", shape, allowed)
        parts.append(part)
    return parts


def _pair(name: str, value: Any) -> Pair:
    """Return features and labels as arrays of equal length, from arrays, tensors or a data set."""
    if isinstance(value, torch.utils.data.Dataset):
        items = [value[index] for index in range(len(value))]  # type: ignore[arg-type]
        value = tuple(
            np.stack([np.asarray(item[place]) for item in items]) if items else np.empty(0)
            for place in (0, 1)
        )
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidParameterError(name, type(value).__name__, _FORM)
    arrays = []
    for part, array in zip(("features", "labels"), value, strict=True):
        if isinstance(array, torch.Tensor):
            array = array.detach().cpu().numpy()
        try:
            arrays.append(np.asarray(array))
        except ValueError as error:  # rows of several lengths
            allowed = f"an array ({error})"
            raise InvalidParameterError(f"{name}: {part}", type(array).__name__, allowed) from error
        if arrays[-1].dtype.kind not in "biuf":
            allowed = "an array or a tensor of numbers"
            raise InvalidParameterError(f"{name}: {part}", type(array).__name__, allowed)
    features, labels = arrays
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if features.ndim < 2 or labels.ndim != 1 or not len(features) == len(labels) > 0:
        found = f"features of shape {features.shape} and labels of shape {labels.shape}"
        allowed = "(n, ...) features and (n,) labels, with n of at least 1"
        raise InvalidParameterError(name, found, allowed)
    if features.dtype.kind == "f" and (bad := np.argwhere(~np.isfinite(features))).size:
        value = f"{features[tuple(bad[0])]} in record {bad[0][0]}"
        raise InvalidParameterError(f"{name}: features", value, "finite numbers")
    return features, labels


def _held_out(parts: list[Pair], *, by_class: bool) -> tuple[list[Pair], Pair]:
    """Take a fifth of each class, or of each client, for the test."""
    rng = np.random.default_rng(0)  # the same for all seeds, whose accuracies are compared
    kept, held = [], []
    for features, labels in parts:
        group = np.unique(labels, return_inverse=True)[1] if by_class else np.zeros(len(labels))
        order = rng.permutation(len(labels))
        taken = [
            own[: len(own) // HELD_OUT]
            for one in np.unique(group)
            if len(own := order[group[order] == one]) >= HELD_OUT
        ]
        out = np.isin(np.arange(len(labels)), np.concatenate([*taken, np.empty(0, dtype=int)]))
        kept.append((features[~out], labels[~out]))
        held.append((features[out], labels[out]))
    test = _joined(held)
    if len(test[1]) == 0:
        allowed = f"test records: no class or client has {HELD_OUT} records to hold one out"
        raise InvalidParameterError("test", None, allowed)
    return kept, test


def _joined(parts: list[Pair]) -> Pair:
    if len(parts) == 1:
        return parts[0]
    features, labels = zip(*parts, strict=True)
    return np.concatenate(features), np.concatenate(labels)


def _factory(model: Any) -> Callable[[], nn.Module]:
    """Return what makes the model; a module that is given is copied, with its weights."""
    if isinstance(model, nn.Module):
        original = copy.deepcopy(model).cpu()
        return lambda: copy.deepcopy(original)
    if not callable(model):
        allowed = "a torch module, or a function or class that makes one"
        raise InvalidParameterError("model", type(model).__name__, allowed)
    return model  # type: ignore[no-any-return]


def _output(model: nn.Module, records: Dataset) -> tuple[Any, torch.Tensor]:
    model.eval()
    with one_thread(), torch.no_grad():  # a digest is of it
        output = model(torch.tensor(records.features[:_PROBE]))
    return output, torch.tensor(records.labels[:_PROBE])


def _digest(*parts: NDArray[Any] | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
        else:
            digest.update(f"{part.dtype}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()
