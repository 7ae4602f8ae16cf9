"""Small vertical federations: columns of digits over some clients, and a linear server model."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from apps import make, record, run_strategy
from flwr.app import ArrayRecord, Context, Message, RecordDict
from sklearn.datasets import load_digits

from flwr_privacy.clients import VerticalData, fedvs_client_app, split_vfl_client_app
from flwr_privacy.clients.vertical.fedvs import FedVSClient
from flwr_privacy.fedvs.terms import Chunk, CodeTerms, DealRequest, Evaluation
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import FedVS, SplitVFL
from flwr_privacy.strategies.vertical.fedvs import CODE, DEAL
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import decode_npy
from flwr_privacy.wire.documents import loads
from flwr_privacy.wire.files import read_checksummed
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import RECORD

Array = np.ndarray

ROWS, TEST_ROWS = 41, 13
EMBEDDING, CLASSES = 4, 3


@cache
def _images() -> tuple[Array, Array]:
    """Return pixels and labels: to read them takes longer than a round, and each client asks."""
    images, labels = load_digits(n_class=CLASSES, return_X_y=True)
    return images[:, 20:44] / 16, labels


def digits(clients: int, rows: int = ROWS, test_rows: int = TEST_ROWS) -> tuple[Any, ...]:
    """Return the columns of each client for training and tests, and both labels."""
    pixels, labels = (whole[: rows + test_rows].copy() for whole in _images())
    return (
        np.array_split(pixels[:rows], clients, axis=1),
        np.array_split(pixels[rows:], clients, axis=1),
        labels[:rows],
        labels[rows:],
    )


class LinearServerModel:
    """Softmax of ``H A + c``, by hand."""

    def initial(self) -> dict[str, Array]:
        draws = np.random.default_rng(3)
        return {
            "A": draws.normal(0, 0.5, (EMBEDDING, CLASSES)).astype(np.float32),
            "c": np.zeros(CLASSES, np.float32),
        }

    def scores(self, arrays: Mapping[str, Array], embedding: Array) -> Array:
        return (embedding @ arrays["A"] + arrays["c"]).astype(np.float32)

    def _shares(self, arrays: Mapping[str, Array], embedding: Array) -> Array:
        scores = self.scores(arrays, embedding).astype(np.float64)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def step(
        self, arrays: Mapping[str, Array], embedding: Array, labels: Array, learning_rate: float
    ) -> tuple[dict[str, Array], Array, float]:
        shares = self._shares(arrays, embedding)
        rows = np.arange(len(labels))
        loss = -float(np.mean(np.log(np.maximum(shares[rows, labels], 1e-300))))
        back = shares.copy()
        back[rows, labels] -= 1
        back /= len(labels)
        gradient = (back @ arrays["A"].T).astype(np.float32)
        renewed = {
            "A": arrays["A"] - learning_rate * (embedding.T @ back),
            "c": arrays["c"] - learning_rate * back.sum(axis=0),
        }
        return {k: v.astype(np.float32) for k, v in renewed.items()}, gradient, loss

    def metrics(
        self, arrays: Mapping[str, Array], embedding: Array, labels: Array
    ) -> dict[str, float]:
        shares = self._shares(arrays, embedding)
        chosen = shares[np.arange(len(labels)), labels]
        return {
            "loss": -float(np.mean(np.log(np.maximum(chosen, 1e-300)))),
            "accuracy": float(np.mean(shares.argmax(axis=1) == labels)),
        }


def place(context: Context, names: list[str] | None) -> int:
    client = client_id_from(context.node_config)
    return int(client) if names is None else names.index(client)


Given = Callable[[int, dict[str, Any]], dict[str, Any]]
"""What a client gives in place of its digits: its number and its two parts go in."""


def app(
    clients: int = 4,
    *,
    names: list[str] | None = None,
    given: Given | None = None,
    make: Any = fedvs_client_app,
    **options: Any,
) -> Any:
    train, test, _, _ = digits(clients)

    def data_fn(context: Context) -> VerticalData:
        index = place(context, names)
        parts = {"train": train[index].copy(), "test": test[index].copy()}
        return VerticalData(**(parts if given is None else given(index, parts)))

    return make(data_fn, **options)


def options(clients: int = 4, **changes: Any) -> dict[str, Any]:
    """Return parameters of a strategy for such clients."""
    _, _, labels, test_labels = digits(clients)
    usual = {
        "labels": labels,
        "test_labels": test_labels,
        "server_model": LinearServerModel(),
        "embedding": EMBEDDING,
        "batch_size": 8,
        "learning_rate": 0.5,
        "client_learning_rate": 4.0,
        "seed": 3,
        "K": 1,
        "T": 1,
    }
    return {**usual, **changes}


def arrays() -> ArrayRecord:
    return record(LinearServerModel().initial())


def train(
    clients: int = 4, *, strategy: Any = None, app_options: Any = None, **changes: Any
) -> Any:
    """Train FedVS inline; keys of the engine and of `start` are told apart from the strategy's."""
    engine = {
        key: changes.pop(key)
        for key in (
            *("nodes", "faults", "num_rounds", "evaluate_fn", "before", "serialise"),
            *("state", "insecure_seed", "timeout", "workers"),
        )
        if key in changes
    }
    engine = {"insecure_seed": 5, "nodes": clients, **engine}
    if "least_dealers" in changes:  # clients allow sums without some of them only if they say so
        app_options = {"partial_sums": True, **(app_options or {})}
    made = make(FedVS, **options(clients, **changes)) if strategy is None else strategy
    made_app = app(clients, **(app_options or {}))
    return run_strategy(made, made_app, arrays=arrays(), **engine)


# -- Who is late, what is said, what is kept -----------------------------------------------------


class _Late(StragglerModel):
    when: Mapping[Any, Iterable[str]] = {}

    def race(self, clients: Any, *, server_round: int, phase: str, **_: Any) -> Any:
        late = self.when.get((phase, server_round), ())
        if phase == "train":
            late = self.when.get(server_round, late)
        return set(clients).intersection(late), 1.0


def late(when: Mapping[Any, Iterable[str]]) -> StragglerModel:
    """Return stragglers that are late with answers of some rounds, or of some (phase, round)."""
    return type("Late", (_Late,), {"when": when})()


class Wire:
    """Everything that crosses a grid; to be passed as ``before``.

    Parameters
    ----------
    change : callable, optional
        Takes and returns each reply, None where it is lost.
    ask : callable, optional
        Takes each question before it goes, to change it in place.
    """

    def __init__(
        self,
        change: Callable[[Message], Message | None] | None = None,
        ask: Callable[[Message], None] | None = None,
    ) -> None:
        self.asked: list[Message] = []
        self.said: list[Message] = []
        self.grid: Any = None
        self._change, self._ask = change, ask
        self._names: dict[int, str] = {}  # of nodes, those that have gone too

    def __call__(self, grid: Any) -> None:
        self.grid = grid
        push, pull = grid.push_messages, grid.pull_messages

        def push_messages(messages: list[Message]) -> Any:
            messages = list(messages)
            for message in messages:
                self.name(message)
                if self._ask is not None:
                    self._ask(message)
            self.asked.extend(messages)
            return push(messages)

        def pull_messages(ids: list[str]) -> Any:
            replies = list(pull(ids))
            if self._change is not None:
                changed = (self._change(reply) for reply in replies)
                replies = [reply for reply in changed if reply is not None]
            self.said.extend(replies)
            return replies

        grid.push_messages, grid.pull_messages = push_messages, pull_messages

    def name(self, message: Message) -> str:
        """Return the client to or from whom a message goes."""
        for node, context in self.grid._contexts.items():
            self._names[node] = client_id_from(context.node_config)
        meta = message.metadata
        node = meta.dst_node_id if meta.dst_node_id in self._names else meta.src_node_id
        return self._names.get(node, "")

    def of(self, messages: list[Message], phase: str, server_round: int | None = None) -> Any:
        """Return the messages of a phase, as pairs of the client and the message."""
        return [
            (self.name(message), message)
            for message in messages
            if message.has_content()
            and message.content[RECORD]["phase"] == phase
            and server_round in (None, message.content[RECORD]["round"])
        ]


def arrays_in(message: Message) -> dict[str, Array]:
    """Return the arrays of a message."""
    found: dict[str, Array] = {}
    for entry in message.content.array_records.values():
        found |= {name: np.array(decode_npy(array.data)) for name, array in entry.items()}
    return found


def replace_array(message: Message, name: str, values: Array) -> None:
    """Put other values in place of an array of a message."""
    content = RecordDict(dict(message.content))
    for key, entry in message.content.array_records.items():
        if name in entry:
            content[key] = ArrayRecord({**entry, name: record({name: values})[name]})
    message.content = content


def bytes_of(message: Message) -> bytes:
    """Return all bytes of a message's content."""
    found = []
    for entry in message.content.array_records.values():
        found += [array.data for array in entry.values()]
    for fields in message.content.config_records.values():
        for value in fields.values():
            for part in value if isinstance(value, list) else [value]:
                found.append(part if isinstance(part, bytes) else str(part).encode())
    return b"|".join(found)


def states(folder: Path, scheme: str = "fedvs") -> dict[str, dict[str, Any]]:
    """Return what each client remembers, from the folder of its node."""
    found = {}
    for path in sorted(Path(folder).glob(f"*.{scheme}/*/state")):
        client = path.parent.parent.name.removesuffix(f".{scheme}")
        found[client] = loads(read_checksummed(path, b"flwr-privacy vertical state\n"))
    return found


def weights(folder: Path) -> dict[str, Array]:
    """Return the weights of each client."""
    return {client: state["weights"] for client, state in states(folder).items()}


def coding_fields(terms: CodeTerms, chunk: Chunk, **changes: Any) -> dict[str, Any]:
    """Return the fields of a question of phase ``code``, at the beginning of a training."""
    training = {"training": "t1", "update": 0}
    return {**records.write(terms), **records.write(chunk), **training, **changes}


# -- Clients asked directly ----------------------------------------------------------------------


class Node:
    """One client, asked directly, with what its node keeps of it."""

    def __init__(
        self, folder: Path, client: str, data: VerticalData, *, policy: str = "", **options: Any
    ) -> None:
        self.folder, self.client, self._data, self._options = folder, client, data, options
        folder.mkdir(exist_ok=True)
        (folder / f"{client}.toml").write_text(policy)
        self.config: dict[str, Any] = {
            "client-id": client,
            "privacy-state": str(folder),
            "privacy-policy": str(folder / f"{client}.toml"),
        }

    def ask(self, phase: str, arrays: Any = None, fields: Any = None, **place: Any) -> Any:
        where = {"experiment-id": "e", "request": 0, "summed": 0, "code-limit": 1, "round": 0}
        client = FedVSClient(
            self._data, Context(1, 1, self.config, RecordDict(), {}), **self._options
        )
        given = {**where, **(fields or {}), **place}
        return client.handle(phase, arrays or {}, given, None)  # type: ignore[arg-type]


class Circle:
    """A few nodes without a server: whoever asks passes the shares on itself."""

    def __init__(self, folder: Path, clients: int = 3, **changes: Any) -> None:
        train, test, _, _ = digits(clients)
        self.names = [str(i) for i in range(clients)]
        names = ("policy", "paper", "partial_sums")
        options = {key: changes.pop(key) for key in names if key in changes}
        options = {"partial_sums": True, **options}
        self.nodes = {
            name: Node(folder, name, VerticalData(train=train[i], test=test[i]), **options)
            for i, name in enumerate(self.names)
        }
        coding = {"generation": "g1"}
        told = {name: node.ask("enrol", None, coding)[1] for name, node in self.nodes.items()}
        usual: dict[str, Any] = {
            "generation": "g1",
            "members": self.names,
            "keys": [told[name]["key"] for name in self.names],
            "signatures": [b""] * clients,
            "columns": [told[name]["columns"] for name in self.names],
            "orders": [2] * clients,
            "parts": ["train", "test"],
            "rows": [ROWS, TEST_ROWS],
            "partitions": 1,
            "privacy": 1,
            "least": 3,
            "prime": 2**31 - 1,
            "data_bits": 8,
            "weight_bits": 8,
            "x_max": 1.0,
            "w_max": 2.0,
            "embedding": EMBEDDING,
            "bias": False,
            "mean": True,
            "zero_mask": True,
            "project": True,
            "paper": False,
        }
        self.terms = CodeTerms(**{**usual, **changes})

    def code(self) -> None:
        """Have everybody's data coded, each part at once."""
        passing: dict[str, Array] = {}
        chunks = [
            Chunk(part=part, first=0, count=self.terms.segments(part).length)
            for part in self.terms.parts
        ]
        for step, chunk in enumerate([*chunks, Chunk(part="train", first=0, count=0)]):
            fields = coding_fields(self.terms, chunk)
            dealt = {
                name: node.ask(CODE, self.passed_on(passing, name), fields, request=step)[0]
                for name, node in self.nodes.items()
            }
            passing = {name: arrays["sealed"] for name, arrays in dealt.items() if arrays}

    def passed_on(
        self, dealt: Mapping[str, Array], receiver: str, senders: list[str] | None = None
    ) -> dict[str, Array]:
        """Return what of all sealed shares one client gets."""
        if not dealt:
            return {}
        place = self.names.index(receiver)
        pieces = [
            dealt[name][place - (place > self.names.index(name))]
            for name in senders or self.names
            if name != receiver
        ]
        return {"sealed": np.concatenate(pieces)}

    def dealing(self, share_set: str = "s1", **changes: Any) -> DealRequest:
        usual = {
            "generation": self.terms.generation,
            "session": "r1",
            "update": 0,
            "learning_rate": 0.1,
            "trained_rows": [],
            "trained_dealers": [],
            "deals": True,
            "share_set": share_set,
            "part": "train",
            "evaluated_rows": [0, 3, 7],
            "maskers": self.names if self.terms.zero_mask else [],
        }
        return DealRequest(**{**usual, **changes})

    def deal(self, dealing: DealRequest, *, server_round: int = 1, arrays: Any = None) -> Any:
        """Return everybody's sealed shares of weights."""
        fields = records.write(dealing)
        return {
            name: node.ask(DEAL, arrays, fields, round=server_round)[0]["sealed"]
            for name, node in self.nodes.items()
        }

    def evaluate(
        self,
        name: str,
        dealt: Mapping[str, Array],
        share_set: str = "s1",
        *,
        dealers: list[str] | None = None,
        server_round: int = 1,
    ) -> Any:
        """Return one client's answer to the shares that were dealt."""
        dealers = dealers or self.names
        question = Evaluation(
            generation=self.terms.generation, share_set=share_set, dealers=dealers
        )
        arrays = self.passed_on(dealt, name, dealers)
        fields = records.write(question)
        return self.nodes[name].ask("train", arrays, fields, round=server_round)[0]["answer"]


def train_split(clients: int = 4, **changes: Any) -> Any:
    """Train a rival of FedVS inline, with the same parameters."""
    mine = {k: changes.pop(k) for k in ("method", "fast", "epsilon", "clip") if k in changes}
    engine = {
        key: changes.pop(key)
        for key in (
            "nodes",
            "faults",
            "num_rounds",
            "serialise",
            "state",
            "insecure_seed",
            "before",
        )
        if key in changes
    }
    engine = {"insecure_seed": 5, "nodes": clients, **engine}
    parameters = {k: v for k, v in options(clients, **changes).items() if k not in ("K", "T")}
    return run_strategy(
        make(SplitVFL, **parameters, **mine),
        app(clients, make=split_vfl_client_app),
        arrays=arrays(),
        **engine,
    )
