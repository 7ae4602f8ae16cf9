"""Trains crafted clients inline, through the real halves of a scheme, and keeps every message."""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_privacy.accounting import Charge
from flwr_privacy.clients.node.context_store import SIMULATED
from flwr_privacy.errors import NothingTrainedError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.privacy.ledger.shown import SHOWN
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.engines.quiet import quiet
from flwr_privacy.wire.message import RECORD, Fields, Header

__all__ = ["Heard", "Model", "Reply", "crafted_app", "listen"]

Model = dict[str, NDArray[Any]]

_SILENT = 100  # above every level that is logged


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply:
    """One answer of a client, as it left the node.

    Parameters
    ----------
    client : str
        Who answered.
    phase : str
        The phase of the question.
    round : int
        Its round.
    arrays : dict of str to ndarray
        Its arrays.
    fields : dict
        The scheme's own values of the question.
    start : dict of str to ndarray
        The arrays of the question.
    metrics : dict
        Its numbers.
    said : dict
        The scheme's own values of the answer, without the head of the client's ledger.
    """

    client: str
    phase: str
    round: int
    arrays: Model
    fields: Fields
    start: Model
    metrics: Fields
    said: Fields


@dataclass(frozen=True, kw_only=True, eq=False)
class Heard:
    """All that was heard of a training.

    Parameters
    ----------
    replies : list of Reply
        Answers without an error, in the order in which they came.
    asked : list of (int, str)
        For each question its round and its client.
    charges : dict of str to list of Charge
        The ledgers of the nodes.
    model : dict of str to ndarray
        The last model.
    """

    replies: list[Reply] = field(default_factory=list)
    asked: list[tuple[int, str]] = field(default_factory=list)
    charges: dict[str, list[Charge]] = field(default_factory=dict)
    model: Model = field(default_factory=dict)

    @property
    def unanswered(self) -> list[tuple[int, str]]:
        """The questions that got no answer."""
        answered = {(reply.round, reply.client) for reply in self.replies}
        return [asked for asked in self.asked if asked not in answered]


class _ListeningGrid(InlineGrid):
    """Keeps what passes through it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.heard = Heard()
        self._questions: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            if _is_question(message):
                client = self._client(message.metadata.dst_node_id)
                self.heard.asked.append((_round(message), client))
        ids = list(super().push_messages(messages))
        self._questions.update(zip(ids, messages, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            question = self._questions[reply.metadata.reply_to_message_id]
            if reply.has_content() and _is_question(question):
                client = self._client(question.metadata.dst_node_id)
                self.heard.replies.append(_reply(question, reply, client))
        return replies

    def _client(self, node_id: int) -> str:
        return str(self._contexts[node_id].node_config["partition-id"])


def listen(
    strategy: Strategy,
    app: ClientApp,
    *,
    clients: int,
    rounds: int,
    start: Mapping[str, NDArray[Any]],
    simulated: bool = False,
    insecure_seed: int | None = None,
) -> Heard:
    """Train inline and return all that was heard.

    Parameters
    ----------
    strategy : Strategy
        The server half.
    app : ClientApp
        The client half, around crafted data.
    clients, rounds : int
        How many there are.
    start : Mapping of str to ndarray
        The first model.
    simulated : bool, default False
        Whether the clients are simulated ones, whose answers without noise are allowed; by default
        they are as in a deployment.
    insecure_seed : int, optional
        Seed of the nodes' noise, for tests.
    """
    nodes = [
        {"partition-id": i, "num-partitions": clients, "client-id": str(i), SIMULATED: simulated}
        for i in range(clients)
    ]
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-audit-") as folder:
        grid = _ListeningGrid(app, nodes, state=folder, insecure_seed=insecure_seed)
        with closing(grid), quiet(_SILENT), acting_as_server(grid.run_id):
            try:
                result = strategy.start(grid, _record(start), num_rounds=rounds)
            except NothingTrainedError as error:  # the nodes have answered all the same
                result = error.result
        grid.heard.model.update(_model(result.arrays))
        for path in sorted(Path(folder).glob("*.ledger")):
            entries = Ledger(path, data_set=path.stem).entries()
            grid.heard.charges[path.stem] = [entry.charge for entry in entries]
    return grid.heard


def crafted_app(
    train: Callable[[str, int, Model], tuple[Model, int]], mods: Iterable[Any] = ()
) -> ClientApp:
    """Return an app whose training is a function of the client, the round and the model.

    Parameters
    ----------
    train : callable
        Returns the trained model, and the number of examples that the app announces.
    mods : iterable
        What is around it.
    """
    app = ClientApp(mods=list(mods))

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        (arrays,) = message.content.array_records.values()
        client = str(context.node_config["partition-id"])
        trained, examples = train(client, _round(message), _model(arrays))
        metrics = MetricRecord({"num-examples": examples, "loss": float(examples)})
        return Message(
            RecordDict({"arrays": _record(trained), "metrics": metrics}), reply_to=message
        )

    return app


def _is_question(message: Message) -> bool:
    """Tell whether a message asks for something about data: no greeting, no sharing of secrets."""
    if RECORD not in message.content:
        return True  # of a strategy of Flower's own
    header, _ = Header.read(message.content[RECORD])
    return header.phase not in ("hello", "keys", "shares")


def _round(message: Message) -> int:
    if RECORD in message.content:
        return Header.read(message.content[RECORD])[0].server_round
    (config,) = message.content.config_records.values()
    return int(str(config["server-round"]))


def _reply(question: Message, reply: Message, client: str) -> Reply:
    phase = "train"
    fields: Fields = {}
    said: Fields = {}
    if RECORD in question.content:
        header, fields = Header.read(question.content[RECORD])
        phase = header.phase
    if RECORD in reply.content:
        _, said = Header.read(reply.content[RECORD])
        # The server computes the head of a ledger itself and refuses an answer with another one.
        said = {name: value for name, value in said.items() if name not in SHOWN}
    metrics: Fields = {}
    for record in reply.content.metric_records.values():
        metrics.update(record)
    arrays: Model = {}
    for values in reply.content.array_records.values():
        arrays.update(_model(values))
    start: Model = {}
    for values in question.content.array_records.values():
        start.update(_model(values))
    return Reply(
        client=client,
        phase=phase,
        round=_round(question),
        arrays=arrays,
        fields=fields,
        start=start,
        metrics=metrics,
        said=said,
    )


def _model(arrays: ArrayRecord) -> Model:
    return {name: array.numpy().copy() for name, array in arrays.items()}


def _record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
