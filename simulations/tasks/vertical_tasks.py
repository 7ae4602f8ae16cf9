"""Tasks of vertical schemes: the clients' columns of the same rows, and the server model.

The server has the labels and the server model, each client a block of columns. The features are
brought into [0, 1] or [-1, 1], which such schemes take for granted: pixels by the least and the
largest of all pixels; columns of tables by their mean and standard deviation in the training rows,
cut off at three standard deviations and divided by three.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from flwr_privacy.clients.torch import TorchServerModel, mlp
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.fedvs.data import TEST_PART, TRAIN_PART, VerticalData
from flwr_privacy.simulations.settings.effect import changed, check_effect
from flwr_privacy.simulations.settings.run_settings import Settings, TrainingSettings
from flwr_privacy.wire.identity import derive_seed

from .data import load
from .records import Dataset, drawn, places
from .unsplit_data import MFEAT_VIEWS, MSRC_VIEWS

__all__ = [
    "VERTICAL_TASKS",
    "VerticalTask",
    "check_vertical",
    "server_model_of",
    "vertical_data",
    "vertical_labels",
    "vertical_part",
    "vertical_task",
]

LARGEST = 3.0
"""Standard deviations at which a column of a table is cut off."""


@dataclass(frozen=True, kw_only=True)
class VerticalTask:
    """Columns for clients, labels and a server model for the server.

    Parameters
    ----------
    name, dataset : str
        Names in `VERTICAL_TASKS` and of `flwr_privacy.simulations.tasks.data.load`.
    description : str
        One line for the user.
    units : tuple of int
        Numbers of columns that stay together, in their order: a row of an image, a view, a column
        of a table. Clients have blocks of them, as even as can be.
    clients : int
        Usual number of clients.
    each : bool, default False
        Whether every unit is a client's, so that there can be no other number of clients.
    pixels : bool, default False
        Whether the features are pixels, which have one range.
    order : int, default 2
        Highest power of a feature that the clients' networks take.
    embedding : int, default 64
        Width of an embedding.
    training : TrainingSettings
        Step size of the server model, and rows of a batch.
    client_rate : float, default 1.0
        By how much the clients' step is larger.
    rounds : int, default 100
        Usual number of rounds, each of which is one batch.
    server_model : callable
        Makes the server model for a width of embedding.
    """

    name: str
    dataset: str
    description: str
    units: tuple[int, ...]
    clients: int
    server_model: Callable[[int], nn.Module]
    each: bool = False
    pixels: bool = False
    order: int = 2
    embedding: int = 64
    training: TrainingSettings = field(default_factory=TrainingSettings)
    client_rate: float = 1.0
    rounds: int = 100


def _perceptron(outputs: int, embedding: int) -> nn.Sequential:
    """Return FedVS's server model but for its last function, which is part of the loss."""
    return mlp((embedding, 64, 32, outputs))


def _normalised(outputs: int, embedding: int) -> nn.Sequential:
    """Return FedVS's server model for credit cards: Linear-BN-Linear-ReLU-BN-WeightNorm-Linear."""
    return nn.Sequential(
        nn.Linear(embedding, 64),
        nn.BatchNorm1d(64),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.BatchNorm1d(32),
        weight_norm(nn.Linear(32, outputs)),
    )


# Batches and orders are the paper's where it has the data set. Its steps (0.005 to 0.05 for all
# weights) learn next to nothing in some hundred rounds: a mean over N clients shortens the clients'
# steps by N twice.
VERTICAL_TASKS: dict[str, VerticalTask] = {
    entry.name: entry
    for entry in (
        VerticalTask(
            name="digits-rows",
            dataset="digits",
            description="8x8 handwritten digits, 8 clients with a row of pixels each; no files",
            units=(8,) * 8,
            clients=8,
            pixels=True,
            training=TrainingSettings(learning_rate=0.3),
            client_rate=25.0,
            rounds=225,
            server_model=partial(_perceptron, 10),
        ),
        VerticalTask(
            name="fashion-rows",
            dataset="fashion-mnist",
            description="28x28 pieces of clothing, 28 clients with a row of pixels each",
            units=(28,) * 28,
            clients=28,
            pixels=True,
            order=1,
            training=TrainingSettings(batch_size=256, learning_rate=0.3),
            client_rate=100.0,
            rounds=235,
            server_model=partial(_perceptron, 10),
        ),
        VerticalTask(
            name="mnist-rows",
            dataset="mnist",
            description="28x28 handwritten digits, 28 clients with a row of pixels each",
            units=(28,) * 28,
            clients=28,
            pixels=True,
            training=TrainingSettings(batch_size=256, learning_rate=0.3),
            client_rate=100.0,
            rounds=235,
            server_model=partial(_perceptron, 10),
        ),
        VerticalTask(
            name="mfeat-views",
            dataset="mfeat",
            description="2,000 handwritten digits, 6 clients with a view of them each",
            units=MFEAT_VIEWS,
            clients=6,
            each=True,
            training=TrainingSettings(learning_rate=0.1),
            client_rate=50.0,
            rounds=190,
            server_model=partial(_perceptron, 10),
        ),
        VerticalTask(
            name="msrc-views",
            dataset="msrc",
            description="210 photographs of 7 classes, 5 clients with a view of them each",
            units=MSRC_VIEWS,
            clients=5,
            each=True,
            training=TrainingSettings(batch_size=8, learning_rate=0.1),
            client_rate=50.0,
            rounds=210,
            server_model=partial(_perceptron, 7),
        ),
        VerticalTask(
            name="credit",
            dataset="credit",
            description="defaults of 30,000 credit card clients, 11 clients with 23 columns",
            units=(1,) * 23,
            clients=11,
            training=TrainingSettings(learning_rate=0.05),
            client_rate=10.0,
            rounds=200,
            server_model=partial(_normalised, 1),
        ),
        VerticalTask(
            name="parkinsons",
            dataset="parkinsons",
            description="disease by 195 recordings of voices, 10 clients with 22 columns",
            units=(1,) * 22,
            clients=10,
            training=TrainingSettings(batch_size=16, learning_rate=1.0),
            client_rate=50.0,
            rounds=100,
            server_model=partial(_perceptron, 1),
        ),
        VerticalTask(
            name="breast-cancer",
            dataset="breast-cancer",
            description="tumours of 569 people, 3 clients with 10 columns each; needs no files",
            units=(1,) * 30,
            clients=3,
            training=TrainingSettings(learning_rate=0.3),
            client_rate=5.0,
            rounds=75,
            server_model=partial(_perceptron, 1),
        ),
    )
}


def vertical_task(name: str) -> VerticalTask:
    """Return the task of that name.

    Raises
    ------
    InvalidParameterError
        If there is none; the message has the names.

    Examples
    --------
    >>> vertical_task("fashion-rows").clients
    28
    """
    return VERTICAL_TASKS[check_choice("task", name, VERTICAL_TASKS)]


def check_vertical(settings: Settings) -> str:
    """Read the data of a vertical task, so that a run is refused before anything is started.

    Returns
    -------
    str
        What the clients hold.

    Raises
    ------
    DataError
        If the data set is missing or damaged.
    InvalidParameterError
        If a setting has no effect where clients have columns, or there are too many clients.

    Examples
    --------
    >>> check_vertical(Settings(task="digits-rows", clients=3))
    '3 clients, 16 to 24 columns each of 1437 training and 360 test records'
    """
    task = vertical_task(settings.task)
    usual = Settings()
    check_effect(settings, changed(settings, usual, replace(usual, training=task.training)))
    data = _drawn(task, settings)
    clients = task.clients if settings.clients is None else settings.clients
    widths = [end - start for start, end in _blocks(task, clients)]
    return (
        f"{clients} clients, {min(widths)} to {max(widths)} columns each of {len(data.labels)} "
        f"training and {len(data.test_labels)} test records"
    )


def vertical_part(
    task: VerticalTask, settings: Settings, index: int, clients: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a client's columns of the training rows and of the test rows.

    Parameters
    ----------
    task : VerticalTask
        What is trained.
    settings : Settings
        Gives the rows, the seed and the data root.
    index : int
        Position of the client, 0 to ``clients - 1``.
    clients : int
        Number of clients of the federation.

    Returns
    -------
    train : (M, d) float64
        Values from 0 to 1, or from -1 to 1 of a table.
    test : (m, d) float64
        The same, scaled as the training rows are.

    Raises
    ------
    DataError
        If the data set is missing or damaged.
    InvalidParameterError
        If there is no such client, or the task has no columns for so many.
    """
    check_integer("client", index, minimum=0, maximum=clients - 1)
    data = _drawn(task, settings)
    columns = slice(*_blocks(task, clients)[index])
    train, test = (
        features.reshape(len(features), -1)[:, columns].astype(np.float64)
        for features in (data.features, data.test_features)
    )
    if task.pixels:
        least, most = _range(data)
        scaled = [np.clip((x - least) / (most - least), 0, 1) for x in (train, test)]
    else:
        mean, deviation = train.mean(axis=0), train.std(axis=0)
        deviation[deviation == 0] = 1  # a column with one value
        scaled = [np.clip((x - mean) / (LARGEST * deviation), -1, 1) for x in (train, test)]
    return scaled[0], scaled[1]


def vertical_data(task: VerticalTask, settings: Settings, index: int, clients: int) -> VerticalData:
    """Return a client's columns with the places of the rows as their identities.

    Parameters and errors are those of `vertical_part`.
    """
    train, test = vertical_part(task, settings, index, clients)
    whole = load(task.dataset, data_root=settings.data_root)
    counts = settings.train_records, settings.test_records, None
    kept = dict(zip((TRAIN_PART, TEST_PART), places(whole, *counts, settings.seed), strict=True))
    ids = {part: [f"{part} {place}" for place in rows] for part, rows in kept.items()}
    return VerticalData(train=train, test=test, ids=ids)


def vertical_labels(
    task: VerticalTask, settings: Settings
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the labels of the training rows and of the test rows.

    Raises
    ------
    DataError
        If the data set is missing or damaged.
    """
    data = _drawn(task, settings)
    return data.labels, data.test_labels


def server_model_of(task: VerticalTask, settings: Settings) -> TorchServerModel:
    """Return the server model, with weights from the seed of the settings.

    The width of an embedding is the scheme's parameter ``embedding`` where it was chosen.
    """
    embedding = check_integer(
        "embedding", settings.strategy.get("embedding", task.embedding), minimum=1
    )
    seed = derive_seed(settings.seed, "initialise")
    return TorchServerModel(partial(task.server_model, embedding), seed=seed)


def _drawn(task: VerticalTask, settings: Settings) -> Dataset:
    data = load(task.dataset, data_root=settings.data_root)
    return drawn(data, settings.train_records, settings.test_records, None, settings.seed)


def _blocks(task: VerticalTask, clients: int) -> list[tuple[int, int]]:
    """Return where the columns of each client start and end."""
    most = len(task.units)
    check_integer("clients", clients, minimum=1)
    if clients > most or (task.each and clients < most):
        allowed = f"{'' if task.each else 'at most '}{most} for the task '{task.name}'"
        raise InvalidParameterError("clients", clients, allowed)
    edges = [0, *accumulate(task.units)]
    parts = np.array_split(np.arange(most), clients)
    return [(edges[part[0]], edges[part[-1] + 1]) for part in parts]


@lru_cache(maxsize=2)
def _range(data: Dataset) -> tuple[float, float]:
    return float(data.features.min()), float(data.features.max())
