"""What a simulation trains: a model on a data set, seen from a client and from the server."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.per_record import current_cap, current_plan
from flwr_privacy.clients.torch import (
    Loss,
    cnn,
    evaluate,
    evaluate_per_record,
    get_arrays,
    initialise,
    linear,
    mlp,
    set_arrays,
    train,
    train_per_record,
)
from flwr_privacy.errors import check_choice, check_integer
from flwr_privacy.identity import derive_seed

from .data import Dataset, load
from .partition import Description, describe, partition
from .settings import PartitionSettings, Settings, TrainingSettings
from .svm import LinearSVM, hinge

__all__ = [
    "TASKS",
    "Task",
    "check_data",
    "client_data",
    "dataset",
    "evaluate_client",
    "evaluate_server",
    "initial_arrays",
    "task",
    "train_client",
    "validation_loss",
]

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and the data set that it is trained on.

    Parameters
    ----------
    name, dataset : str
        Names in `TASKS` and of `flwr_privacy.simulations.data.load`.
    model : callable
        Makes the model. Its layers draw no random numbers in training.
    description : str
        One line for the user.
    training : TrainingSettings
        Settings that suit the task with about ten clients, all of them asked in each round.
    loss : callable, default cross entropy
        From the model's output for a batch and its labels to their mean loss.
    """

    name: str
    dataset: str
    model: Callable[[], nn.Module]
    description: str
    training: TrainingSettings = field(default_factory=TrainingSettings)
    loss: Loss = functional.cross_entropy


def _wide_cnn() -> nn.Sequential:
    """Return the network of the UDP paper for CIFAR-10; its channels and pooling are our choice."""
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=5, padding=4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(10_368, 10),
    )


TASKS: dict[str, Task] = {
    entry.name: entry
    for entry in (
        Task(
            name="digits-mlp",
            dataset="digits",
            model=partial(mlp, (64, 64, 10)),
            description="8x8 handwritten digits, perceptron with 4,810 weights; needs no files",
            training=TrainingSettings(batch_size=16, learning_rate=0.3),
        ),
        Task(
            name="digits-linear",
            dataset="digits",
            model=partial(linear, 64, 10),
            description="8x8 handwritten digits, logistic regression with 650 weights; no files",
            training=TrainingSettings(batch_size=16, learning_rate=0.3),
        ),
        Task(
            name="mnist-mlp",
            dataset="mnist",
            model=partial(mlp, (784, 256, 10)),
            description="28x28 handwritten digits, perceptron with 203,530 weights",
        ),
        Task(
            name="mnist-cnn",
            dataset="mnist",
            model=partial(cnn, 10),
            description="28x28 handwritten digits, LeNet-5 with 44,426 weights",
        ),
        Task(
            name="fashion-cnn",
            dataset="fashion-mnist",
            model=partial(cnn, 10),
            description="28x28 pieces of clothing, LeNet-5 with 44,426 weights",
        ),
        Task(
            name="cifar10-cnn",
            dataset="cifar10-jpeg",
            model=partial(cnn, 10, channels=3, size=32),
            description="CIFAR-10 (JPEG), 32x32 colour images, LeNet-5 with 62,006 weights",
            training=TrainingSettings(learning_rate=0.05),
        ),
        Task(
            name="cifar10-udp-cnn",
            dataset="cifar10-jpeg",
            model=_wide_cnn,
            description="CIFAR-10 (JPEG), one convolution of 32 channels with 106,122 weights",
        ),
        Task(
            name="adult-linear",
            dataset="adult",
            model=partial(linear, 108, 2),
            description="income over 50,000 from a census, logistic regression with 218 weights",
            training=TrainingSettings(learning_rate=0.5),
        ),
        Task(
            name="adult-svm",
            dataset="adult-integers",
            model=partial(LinearSVM, 14),
            description="the same with categories as integers, support vectors with 15 weights",
            loss=hinge,
        ),
    )
}


def task(name: str) -> Task:
    """Return the task of that name.

    Raises
    ------
    InvalidParameterError
        If there is none; the message puts the nearest names first.

    Examples
    --------
    >>> task("digits-mlp").dataset
    'digits'
    """
    return TASKS[check_choice("task", name, TASKS)]


def dataset(task: Task, settings: Settings) -> Dataset:
    """Return the records that a run uses, from its data root; see `load` for the errors.

    Raises
    ------
    InvalidParameterError
        If the settings ask for more records than there are.
    """
    return _drawn(
        load(task.dataset, data_root=settings.data_root),
        settings.train_records,
        settings.test_records,
        settings.validation_records,
        settings.seed,
    )


def check_data(settings: Settings) -> Description | None:
    """Read the data set and split it, so that a run is refused before anything is started.

    Returns
    -------
    Description or None
        What the clients hold; None where ``settings.clients`` is left to the number of nodes.

    Raises
    ------
    DataError, InvalidParameterError
        As `task` and `client_data`.

    Examples
    --------
    >>> print(check_data(Settings(clients=10)))
    10 clients, 143 to 144 records of 10 to 10 classes each
    """
    data = dataset(task(settings.task), settings)
    if settings.clients is None:
        return None
    return describe(data.labels, _parts(data, settings.clients, settings.partition, settings.seed))


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
    """Return copies of a client's features and labels.

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
    part = partition(data.labels, clients=clients, settings=settings.partition, seed=settings.seed)[
        index
    ]
    return data.features[part], data.labels[part]


def train_client(
    task: Task,
    settings: Settings,
    arrays: Mapping[str, NDArray[Any]],
    index: int,
    clients: int,
    *,
    seed: int,
    server_round: int = 1,
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
    features, labels = client_data(task, settings, index, clients)
    model = _model(task, arrays)
    if current_plan() is not None:  # a scheme that protects records asks for one step of its own
        train_per_record(model, features, labels, loss=task.loss)
        return get_arrays(model), len(labels), {}
    training = settings.training
    loss = train(
        model,
        features,
        labels,
        epochs=training.epochs,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate / (1 + training.decay * (server_round - 1)),
        seed=seed,
        loss=task.loss,
    )
    return get_arrays(model), len(labels), {"loss": loss}


def evaluate_client(
    task: Task,
    settings: Settings,
    arrays: Mapping[str, NDArray[Any]],
    index: int,
    clients: int,
) -> tuple[int, dict[str, float]]:
    """Return the number of a client's records and the ``loss`` and ``accuracy`` on them.

    Parameters and errors are those of `train_client`.
    """
    features, labels = client_data(task, settings, index, clients)
    if current_cap() is not None:  # a scheme that protects records asks for their losses
        evaluate_per_record(_model(task, arrays), features, labels, loss=task.loss)
        return len(labels), {}
    return len(labels), _evaluated(task, arrays, features, labels)


def evaluate_server(
    task: Task, settings: Settings, arrays: Mapping[str, NDArray[Any]]
) -> dict[str, float]:
    """Return ``loss`` and ``accuracy`` on the test records.

    Raises
    ------
    DataError, InvalidParameterError
        As `train_client`.
    """
    data = dataset(task, settings)
    return _evaluated(task, arrays, data.test_features, data.test_labels)


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
    whole = load(task.dataset, data_root=settings.data_root)
    held = _order("train_records", len(whole.labels), settings.seed)[-count:]
    return _evaluated(task, arrays, whole.features[held], whole.labels[held])["loss"]


def _evaluated(
    task: Task,
    arrays: Mapping[str, NDArray[Any]],
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
) -> dict[str, float]:
    return evaluate(_model(task, arrays), features, labels, loss=task.loss)


def _order(name: str, records: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(derive_seed(seed, name)).permutation(records)


@lru_cache(maxsize=4)
def _drawn(
    data: Dataset, train: int | None, test: int | None, validation: int | None, seed: int
) -> Dataset:
    """Return some of the records, drawn at random; the last ones drawn are for the validation."""
    if train is None and test is None and validation is None:
        return data
    held = validation or 0
    if validation is not None:
        check_integer("validation_records", held, maximum=len(data.labels) - 1)
    kept = {}
    for name, count, records in (
        ("train_records", train, len(data.labels) - held),
        ("test_records", test, len(data.test_labels)),
    ):
        if count is not None:
            check_integer(name, count, maximum=records)
        whole = len(data.labels) if name == "train_records" else records
        kept[name] = _order(name, whole, seed)[: records if count is None else count]
    train_kept, test_kept = kept["train_records"], kept["test_records"]
    return Dataset(
        features=data.features[train_kept],
        labels=data.labels[train_kept],
        test_features=data.test_features[test_kept],
        test_labels=data.test_labels[test_kept],
        classes=data.classes,
    )


@lru_cache(maxsize=8)
def _parts(
    data: Dataset, clients: int, settings: PartitionSettings, seed: int
) -> list[NDArray[np.int64]]:
    # `partition` remembers by the content of the labels, which takes 0.15 ms to compare; a data
    # set is one object in a process.
    return partition(data.labels, clients=clients, settings=settings, seed=seed)


_models = threading.local()


def _model(task: Task, arrays: Mapping[str, NDArray[Any]]) -> nn.Module:
    # Making a model takes as long as training a small client, so each thread keeps the last one;
    # whoever asks for it sets all its weights.
    if getattr(_models, "task", None) is not task:
        _models.model = initialise(task.model, 0)
        _models.task = task
    model: nn.Module = _models.model
    set_arrays(model, arrays)
    return model
