"""What a simulation trains: a model on a data set, seen from a client and from the server."""

import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.acfl.encoding import one_hot
from flwr_privacy.clients.certificates.per_record_loss import current_cap
from flwr_privacy.clients.certificates.per_record_steps import current_plan
from flwr_privacy.clients.certificates.poisson_steps import current_steps
from flwr_privacy.clients.torch import (
    evaluate,
    evaluate_per_record,
    get_arrays,
    initialise,
    load_trainable,
    set_arrays,
    train,
    train_per_record,
    train_poisson,
)
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.simulations.settings.own_code import is_reference
from flwr_privacy.simulations.settings.run_settings import GIVEN, PartitionSettings, Settings
from flwr_privacy.simulations.settings.schemes import scheme
from flwr_privacy.wire.identity import derive_seed

from .linear_tasks import FEATURE_NORM, BoundedMap
from .lookup import all_records, task
from .partition import Description, describe, partition
from .private_descent import descend_privately
from .records import Dataset, drawn, order_of
from .task_list import TASKS, Task
from .vertical_tasks import VERTICAL_TASKS, VerticalTask, check_vertical, vertical_task

__all__ = [
    "TASKS",
    "Task",
    "all_records",
    "check_data",
    "client_data",
    "client_sizes",
    "dataset",
    "evaluate_client",
    "evaluate_server",
    "feature_map",
    "initial_arrays",
    "is_tested",
    "regression_data",
    "regression_parameters",
    "task",
    "task_of",
    "train_client",
    "validation_loss",
]

Arrays = dict[str, NDArray[Any]]


def dataset(task: Task, settings: Settings) -> Dataset:
    """Return the records that a run uses; see `all_records` for the errors.

    Raises
    ------
    InvalidParameterError
        If the settings ask for more records than there are, or for some of those of clients that
        are given.
    """
    for name in ("train_records", "validation_records"):
        if task.sizes is not None and getattr(settings, name) is not None:
            allowed = "nothing with data that is given client by client: all of it is trained on"
            raise InvalidParameterError(name, getattr(settings, name), allowed)
    return drawn(
        all_records(task, settings.data_root),
        settings.train_records,
        settings.test_records,
        settings.validation_records,
        settings.seed,
    )


def task_of(settings: Settings) -> Task | VerticalTask:
    """Return what some settings train.

    Raises
    ------
    InvalidParameterError
        If there is no such task or scheme, or one is about the columns of clients and the other
        about their records; the message has the tasks that fit.
    """
    name, vertical = settings.task, scheme(settings.scheme).vertical
    others, fitting = (TASKS, VERTICAL_TASKS) if vertical else (VERTICAL_TASKS, TASKS)
    if name in others or (vertical and is_reference(name)):
        have = "columns of the same records" if vertical else "records of their own"
        allowed = f"a task for '{settings.scheme}', whose clients have {have}: {', '.join(fitting)}"
        raise InvalidParameterError("task", name, allowed)
    return vertical_task(name) if vertical else task(name)


def check_data(settings: Settings) -> Description | str | None:
    """Read the data set and split it, so that a run is refused before anything is started.

    Returns
    -------
    Description or str or None
        What the clients hold; None where ``settings.clients`` is left to the number of nodes.

    Raises
    ------
    DataError, InvalidParameterError
        As `task_of`, `client_data` and
        `flwr_privacy.simulations.tasks.vertical_tasks.check_vertical`.

    Examples
    --------
    >>> print(check_data(Settings(clients=10)))
    10 clients, 143 to 144 records of 10 classes each
    """
    chosen = task_of(settings)
    if isinstance(chosen, VerticalTask):
        return check_vertical(settings)
    data = dataset(chosen, settings)
    if settings.clients is None:
        return None
    return describe(data.labels, _split(chosen, data, settings, settings.clients))


def is_tested(task: Task, settings: Settings) -> bool:
    """Return whether a task has test records, on which the server evaluates the model."""
    return len(dataset(task, settings).test_labels) > 0


def initial_arrays(task: Task, seed: int) -> Arrays:
    """Return the weights that the training starts from.

    Parameters
    ----------
    task : Task
        What is trained.
    seed : int
        Root of the experiment.
    """
    return get_arrays(initialise(task.model, derive_seed(seed, "initialise")))


def client_data(
    task: Task, settings: Settings, index: int, clients: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return copies of a client's records, raw, and of their labels.

    Parameters
    ----------
    task : Task
        What is trained.
    settings : Settings
        Gives the partition, the seed and the data root.
    index : int
        Position of the client, 0 to ``clients - 1``.
    clients : int
        Number of clients of the federation.

    Raises
    ------
    DataError
        If the data set is missing or damaged, or a client would have no data.
    InvalidParameterError
        If there is no such client, or the partition does not fit the data.
    """
    check_integer("clients", clients, minimum=1)
    check_integer("client", index, minimum=0, maximum=clients - 1)
    data = dataset(task, settings)
    part = _split(task, data, settings, clients)[index]
    return data.features[part], data.labels[part]


def client_sizes(task: Task, settings: Settings) -> dict[str, int]:
    """Return the number of records of each simulated client, by its name.

    Raises
    ------
    DataError
        As `client_data`.
    InvalidParameterError
        If the clients are nodes of a deployment, which have data of their own.
    """
    if settings.clients is None:
        allowed = "the number of simulated clients, whose data are known here"
        raise InvalidParameterError("clients", None, allowed)
    data = dataset(task, settings)
    parts = _split(task, data, settings, settings.clients)
    return {str(index): len(part) for index, part in enumerate(parts)}


def regression_data(
    task: Task, settings: Settings, index: int, clients: int
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return a client's records, raw, and their labels as rows with a single 1.

    Parameters and errors are those of `client_data`.
    """
    raw, labels = client_data(task, settings, index, clients)
    return raw, one_hot(labels, dataset(task, settings).classes)


def regression_parameters(task: Task, settings: Settings) -> dict[str, Any]:
    """Return the parameters of a linear-regression strategy for a task and its data.

    The step of ``settings.training`` is one on the mean loss over all records; such a strategy's,
    which may be set as ``learning_rate``, is one on their sum.

    Raises
    ------
    InvalidParameterError
        If the task is no linear regression.
    DataError
        As `dataset`.
    """
    features = feature_map(task)
    records = len(dataset(task, settings).labels)
    step = settings.strategy.get("learning_rate")
    return {
        "features": features.identity,
        "feature_bound": features.bound,
        "feature_norm": min(features.norm or FEATURE_NORM, FEATURE_NORM),
        "label_bound": 1.0,
        "label_norm": 1.0,
        "one_hot": True,
        "max_records": 2 ** (records - 1).bit_length(),  # a client has no more than all together
        "learning_rate": settings.training.learning_rate / records if step is None else step,
    }


def feature_map(task: Task) -> BoundedMap:
    """Return the map from a task's raw records to the features of its linear regression.

    Raises
    ------
    InvalidParameterError
        If the task is none; the message names those that are.
    """
    if task.features is None:
        regressions = ", ".join(name for name, other in TASKS.items() if other.features)
        allowed = f"a linear regression of features: {regressions}"
        raise InvalidParameterError("task", task.name, allowed)
    return task.features()


def train_client(
    task: Task,
    settings: Settings,
    arrays: Mapping[str, NDArray[Any]],
    index: int,
    clients: int,
    *,
    seed: int,
    server_round: int = 1,
    steps: int | None = None,
    scale: float = 1.0,
    perturbation: float = 0.0,
    context: Context | None = None,
) -> tuple[Arrays, int, dict[str, float]]:
    """Train on a client's own data, starting from `arrays`.

    Parameters
    ----------
    task, settings, index, clients
        As for `client_data`; ``settings.training`` counts.
    arrays : mapping of str to array
        Weights to start from; they stay as they are.
    seed : int
        Seed of the order of the records, e.g. ``derive_seed(root, "train", client_id, round)``.
    server_round : int, default 1
        The learning round, on which the step size depends if it is to fall.
    steps : int, optional
        Mini-batch steps, at least 1, in place of the passes that ``settings.training`` has.
    scale : float, default 1.0
        Factor, >= 0, of the step size that ``settings.training`` has.
    perturbation : float, default 0.0
        Standard deviation of the regulariser of `flwr_privacy.clients.torch.train`.
    context : Context, optional
        Flower's context of the client; a scheme that asks for private steps needs it.

    Returns
    -------
    arrays : dict of str to array
        The trained weights.
    num_examples : int
        Records of the client.
    metrics : dict of str to float
        ``loss``, the mean over the training; nothing under a scheme that protects records.

    Raises
    ------
    DataError, InvalidParameterError
        As `client_data`; also if `arrays` do not fit the model.
    """
    features, labels = _client_inputs(task, settings, index, clients)
    model = _model(task, settings, arrays)
    if current_plan() is not None:  # a scheme that protects records asks for one step of its own
        train_per_record(model, features, labels, loss=task.loss)
        return get_arrays(model), len(labels), {}
    training = settings.training
    check_number("scale", scale, minimum=0)
    step_size = scale * training.learning_rate / (1 + training.decay * (server_round - 1))
    if context is not None and descend_privately(
        model, features, labels, context, loss=task.loss, learning_rate=step_size
    ):
        return get_arrays(model), len(labels), {}
    common: dict[str, Any] = {"perturbation": perturbation, "seed": seed, "loss": task.loss}
    if current_steps() is not None:  # a scheme that counts on which records are in a step
        train_poisson(model, features, labels, learning_rate=step_size, **common)
        return get_arrays(model), len(labels), {}
    loss = train(
        model,
        features,
        labels,
        epochs=training.epochs if steps is None else 1,
        steps=steps,
        batch_size=training.batch_size,
        learning_rate=step_size,
        **common,
    )
    return get_arrays(model), len(labels), {"loss": loss}


def evaluate_client(
    task: Task,
    settings: Settings,
    arrays: Mapping[str, NDArray[Any]],
    index: int,
    clients: int,
    *,
    labels: int = 0,
) -> tuple[int, dict[str, float]]:
    """Return the number of a client's records and the ``loss`` and ``accuracy`` on them.

    Parameters
    ----------
    task, settings, arrays, index, clients
        As of `train_client`; so are the errors.
    labels : int, default 0
        Number of labels whose records are counted, too, as ``label-0``, ``label-1``, ...
    """
    features, own = _client_inputs(task, settings, index, clients)
    if current_cap() is not None:  # a scheme that protects records asks for their losses
        evaluate_per_record(_model(task, settings, arrays), features, own, loss=task.loss)
        return len(own), {}
    counts = np.bincount(own, minlength=labels).tolist() if labels else []
    counted = {f"label-{label}": count for label, count in enumerate(counts)}
    return len(own), {**_evaluated(task, settings, arrays, features, own), **counted}


def evaluate_server(
    task: Task, settings: Settings, arrays: Mapping[str, NDArray[Any]]
) -> dict[str, float]:
    """Return ``loss`` and ``accuracy`` on the test records.

    Raises
    ------
    DataError, InvalidParameterError
        As `train_client`; also if the task has no test records.
    """
    data = dataset(task, settings)
    if not len(data.test_labels):
        allowed = "a task with test records (its test), on which the server evaluates the model"
        raise InvalidParameterError("task", task.name, allowed)
    return _evaluated(task, settings, arrays, _test_inputs(task, data), data.test_labels)


def validation_loss(task: Task, settings: Settings, arrays: Mapping[str, NDArray[Any]]) -> float:
    """Return the loss on the records that the server holds to steer the training by.

    Those are ``settings.validation_records`` records that no client trains on; without that
    setting the test records, as papers do it. What is reported on them is then not independent.

    Raises
    ------
    DataError, InvalidParameterError
        As `train_client`.
    """
    count = settings.validation_records
    if count is None:
        return evaluate_server(task, settings, arrays)["loss"]
    whole = all_records(task, settings.data_root)
    held = order_of("train_records", len(whole.labels), settings.seed)[-count:]
    inputs = _inputs(task, whole.features[held])
    return _evaluated(task, settings, arrays, inputs, whole.labels[held])["loss"]


def _inputs(task: Task, raw: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what the task's model takes."""
    return raw if task.features is None else task.features()(raw).astype(np.float32)


def _client_inputs(
    task: Task, settings: Settings, index: int, clients: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    raw, labels = client_data(task, settings, index, clients)
    return _inputs(task, raw), labels


@lru_cache(maxsize=1)
def _test_inputs(task: Task, data: Dataset) -> NDArray[np.float32]:
    # Only these are kept: the same records are asked for in every round, and are few.
    return _inputs(task, data.test_features)


def _evaluated(
    task: Task,
    settings: Settings,
    arrays: Mapping[str, NDArray[Any]],
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
) -> dict[str, float]:
    return evaluate(_model(task, settings, arrays), features, labels, loss=task.loss)


def _split(task: Task, data: Dataset, settings: Settings, clients: int) -> list[NDArray[np.int64]]:
    """Return the places of each client's records: by the partition, or as the task has them."""
    given = settings.partition.kind == GIVEN
    if given != (task.sizes is not None):
        allowed = f"'{GIVEN}'" if task.sizes else "a split: the task's data is not by client"
        raise InvalidParameterError("partition", settings.partition.kind, allowed)
    if task.sizes is None:
        return _parts(data, clients, settings.partition, settings.seed)
    if clients != len(task.sizes):
        allowed = f"{len(task.sizes)}, the clients that the data is of"
        raise InvalidParameterError("clients", clients, allowed)
    ends = np.cumsum(task.sizes)
    return np.split(np.arange(ends[-1]), ends[:-1])


@lru_cache(maxsize=8)
def _parts(
    data: Dataset, clients: int, settings: PartitionSettings, seed: int
) -> list[NDArray[np.int64]]:
    # `partition` remembers by the content of the labels, which takes 0.15 ms to compare; a data
    # set is one object in a process.
    return partition(data.labels, clients=clients, settings=settings, seed=seed)


_models = threading.local()


def _model(task: Task, settings: Settings, arrays: Mapping[str, NDArray[Any]]) -> nn.Module:
    """Return the task's model with some weights; where they are a part, the others are frozen."""
    # Making a model takes as long as training a small client, so each thread keeps the last one;
    # whoever asks for it sets all its weights.
    if getattr(_models, "task", None) is not task:
        _models.model = initialise(task.model, 0)
        _models.task = task
    kept: nn.Module = _models.model
    if not arrays.keys() < kept.state_dict().keys():
        set_arrays(kept, arrays)
        return kept
    model = initialise(task.model, derive_seed(settings.seed, "initialise"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in arrays)
    load_trainable(model, arrays)
    return model
