"""Shared by all attacks: clients with a few records each, and rounds that are recorded."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from rich.table import Table

from flwr_privacy.clients import SchemeClient, as_mod
from flwr_privacy.clients.torch import get_arrays, initialise, set_arrays, train
from flwr_privacy.errors import check_integer
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.engines.quiet import quiet
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.strategies import SchemeStrategy
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.identity import derive_seed, stream
from flwr_privacy.wire.message import RECORD, Fields, Header

from .inversion import Matches, best_matches

__all__ = ["AttackOptions", "AttackSetup", "HeardExchange", "Report", "listen"]


@dataclass(frozen=True, kw_only=True)
class AttackOptions:
    """The options of an attack; None stands for the default of the attack.

    Parameters
    ----------
    task : str, optional
        What is trained: one of the attack's tasks.
    clients : int, optional
        Clients of the round or training.
    records : int, optional
        Records of each client; under FedVS rows that all clients share.
    seed : int, default 0
        Root of the draws, except those that are secret in the scheme: noise, masks, keys.
    data_root : Path, optional
        Folder with the data sets that no library brings.
    out : Path
        Folder for the pictures.
    """

    task: str | None = None
    clients: int | None = None
    records: int | None = None
    seed: int = 0
    data_root: Path | None = None
    out: Path

    def chosen(self, *, task: str, clients: int, records: int) -> tuple[str, int, int]:
        """Return task, clients and records, with an attack's defaults for what is None."""
        return (
            task if self.task is None else self.task,
            clients if self.clients is None else self.clients,
            records if self.records is None else self.records,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackSetup:
    """Clients with a few records each, and what anybody knows beforehand.

    Parameters
    ----------
    task : Task
        What is trained.
    seed : int
        Root of all draws.
    start : dict of str to ndarray
        The model that the server sends.
    features : ndarray, shape (clients, records, ...)
        Records of each client.
    labels : ndarray, shape (clients, records)
        Their classes.
    known : ndarray, shape (features,)
        Mean of the test records.
    span : tuple of float
        Least and largest entry of the test records.
    guesses : ndarray, shape (guesses, features)
        The mean test record of each class, in their order, and some test records.
    """

    task: tasks.Task
    seed: int
    start: dict[str, NDArray[Any]]
    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    known: NDArray[np.float64]
    span: tuple[float, float]
    guesses: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        task: tasks.Task,
        *,
        clients: int,
        records: int,
        seed: int,
        data_root: str | Path | None,
        candidates: int,
    ) -> "AttackSetup":
        """Draw the records of the clients from a task's training data.

        Parameters
        ----------
        task, clients, records, seed, data_root
            What is trained, with how many clients and records of each.
        candidates : int
            Test records among the guesses: at least as many as the attack has candidates.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        DataError
            If the data set is missing or damaged.
        """
        check_integer("seed", seed, minimum=0)
        data = tasks.all_records(task, data_root)
        check_integer("clients", clients, minimum=2, maximum=len(data.labels))
        check_integer("records", records, minimum=1, maximum=len(data.labels) // clients)
        draws = stream(seed, "attack")
        own = draws.permutation(len(data.labels))[: clients * records].reshape(clients, records)
        public = data.test_features.reshape(len(data.test_labels), -1).astype(np.float64)
        means = [public[data.test_labels == label].mean(axis=0) for label in range(data.classes)]
        return cls(
            task=task,
            seed=seed,
            start=tasks.initial_arrays(task, seed),
            features=data.features[own],
            labels=data.labels[own],
            known=public.mean(axis=0),
            span=(float(public.min()), float(public.max())),
            guesses=np.concatenate([means, public[draws.permutation(len(public))[:candidates]]]),
        )

    def records(self, first: int, end: int) -> NDArray[np.float64]:
        """Return the records of the clients from `first` to `end` (exclusive), (records, features).

        They are in the order of the clients.
        """
        features = self.features[first:end]
        return features.reshape(features.shape[0] * features.shape[1], -1).astype(np.float64)

    def matches(self, candidates: NDArray[np.float64], first: int, end: int) -> Matches:
        """Compare candidates with the records of some clients."""
        return best_matches(candidates, self.records(first, end), known=self.known)

    def train(self, index: int, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return a model after one step on all records of a client."""
        features, labels = self.features[index], self.labels[index]
        model = initialise(self.task.model, self.seed)
        set_arrays(model, arrays)
        train(
            model,
            features,
            labels,
            batch_size=len(labels),
            learning_rate=self.task.training.learning_rate,
            seed=derive_seed(self.seed, "train", index),
        )
        return get_arrays(model)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeardExchange:
    """A request to a client and its reply, as the server sees them.

    Parameters
    ----------
    phase : str
        Phase of the round.
    asked, told : dict
        The scheme's fields in the request and in the reply.
    sent, arrays : dict of str to ndarray
        The arrays in the request and in the reply.
    """

    phase: str
    asked: Fields
    told: Fields
    sent: dict[str, NDArray[Any]]
    arrays: dict[str, NDArray[Any]]


def listen(
    setup: AttackSetup, strategy: SchemeStrategy, client: type[SchemeClient], *, clients: int
) -> tuple[list[list[HeardExchange]], dict[str, NDArray[Any]]]:
    """Run a round with the first clients, inline.

    Parameters
    ----------
    setup : AttackSetup
        The clients.
    strategy : SchemeStrategy
        The server half.
    client : type
        The client half.
    clients : int
        How many take part.

    Returns
    -------
    exchanges : list of list of HeardExchange
        Those with each client, in the order of the clients and of time.
    model : dict of str to ndarray
        The new model.
    """
    start = ArrayRecord({name: Array(array) for name, array in setup.start.items()})
    strategy.experiment.leave_no_card()
    grid = _ListeningGrid(_client_app(setup, client), clients)
    try:
        with quiet(logging.ERROR), acting_as_server(grid.run_id):
            model = strategy.start(grid, start, num_rounds=1).arrays
    finally:
        grid.close()
    return [grid.exchanges[str(index)] for index in range(clients)], _arrays(model)


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """The results of an attack, for the command line.

    Parameters
    ----------
    tables : list of Table
        The numbers.
    legend : str
        What the columns are.
    pictures : list of Path
        What was drawn.
    verdict : str
        The result in plain words.
    """

    tables: list[Table]
    legend: str
    pictures: list[Path] = field(default_factory=list)
    verdict: str


class _ListeningGrid(InlineGrid):
    """Keeps the exchanges with each client."""

    def __init__(self, client_app: ClientApp, nodes: int) -> None:
        super().__init__(client_app, nodes)
        self.exchanges: dict[str, list[HeardExchange]] = {}
        self._asked: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        requests = list(messages)
        names = list(super().push_messages(requests))
        self._asked.update(zip(names, requests, strict=True))
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        messages = list(super().pull_messages(message_ids))
        for message in messages:
            if not message.has_error():  # the strategy says what becomes of errors
                request = self._asked.pop(message.metadata.reply_to_message_id)
                header, told = _own(message)
                exchange = HeardExchange(
                    phase=header.phase,
                    asked=_own(request)[1],
                    told=told,
                    sent=_all_arrays(request),
                    arrays=_all_arrays(message),
                )
                self.exchanges.setdefault(header.client_id, []).append(exchange)
        return messages


def _own(message: Message) -> tuple[Header, Fields]:
    return Header.read(message.content.config_records[RECORD])


def _all_arrays(message: Message) -> dict[str, NDArray[Any]]:
    records = message.content.array_records.values()
    return {name: array for record in records for name, array in _arrays(record).items()}


def _client_app(setup: AttackSetup, client: type[SchemeClient]) -> ClientApp:
    app = ClientApp(mods=[as_mod(client)])

    @app.train()
    def train_one_step(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        trained = setup.train(index, _arrays(message.content.array_records["arrays"]))
        arrays = ArrayRecord({name: Array(array) for name, array in trained.items()})
        metrics = MetricRecord({"num-examples": setup.labels.shape[1]})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def _arrays(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    return {name: array.numpy() for name, array in record.items()}
