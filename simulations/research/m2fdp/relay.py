"""What a server finds in the messages that it passes on between M2FDP's nodes.

A training with aggregators that are nodes of their own runs inline, with clean events, and every
byte that crosses the server is noted, as Flower sends it. What the devices computed is known here,
and is looked for in these bytes; beside it stands a simulation, in which the server simulates the
aggregators. What a server gets that forges messages is in `forgery` beside this file.
"""

import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from scipy.stats import chi2

from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.errors import check_integer
from flwr_privacy.m2fdp import CLOUD, EventSchedule, TierTree
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.engines.inline.pinned_nodes import tree_nodes
from flwr_privacy.simulations.engines.quiet import quiet
from flwr_privacy.strategies import M2FDP, DeviceNoise, WorstDrift
from flwr_privacy.wire.identity import client_id_from, stream
from flwr_privacy.wire.message import RECORD

__all__ = [
    "DIMENSION",
    "ROUNDS",
    "TREE",
    "Computed",
    "Passage",
    "Tapped",
    "TappedGrid",
    "Training",
    "tap",
]

ROUNDS = 2
DIMENSION = 500
TREE = TierTree(
    parents={
        **dict.fromkeys(("hospital", "clinic"), CLOUD),
        **dict.fromkeys(("east", "west"), "hospital"),
        "room": "clinic",
        **dict.fromkeys(("0", "1", "2"), "east"),
        **dict.fromkeys(("3", "4"), "west"),
        **dict.fromkeys(("5", "6"), "room"),
    },
    devices=("0", "1", "2", "3", "4", "5", "6"),
    trusted=frozenset({"hospital", "east", "west"}),
)
"""A hospital with two wards, all trusted, and a clinic that is not."""

_SCHEDULE = EventSchedule(steps=4, events={2: [2]})  # a clean event in the wards
_PLACES, _WIDTH = 16, 4  # stretches of a vector that are looked for, and entries of each
_DTYPES = {np.int64: ("<i4", "<i8"), np.float64: ("<f4", "<f8")}

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Computed:
    """The model that a device started from, and the one that it trained.

    Parameters
    ----------
    device : str
        Which device.
    start, trained : ndarray of float64, shape (d,)
        The model that it trained from, and the one that it made.
    """

    device: str
    start: Vector
    trained: Vector


@dataclass(frozen=True, kw_only=True, eq=False)
class Passage:
    """A request that crosses the server.

    Parameters
    ----------
    client : str
        Who is asked.
    message : Message
        The request.
    """

    client: str
    message: Message

    @property
    def fields(self) -> dict[str, Any]:
        """The scheme's own fields."""
        return dict(self.message.content.config_records.get(RECORD, {}))


@dataclass(frozen=True, kw_only=True)
class Tapped:
    """What was found in the bytes that crossed the server.

    Parameters
    ----------
    name : str
        What ran.
    crossed : int
        Bytes that crossed.
    places, found : int
        Stretches of what the devices of the zone computed, and how many of them crossed.
    answered : int
        Bytes of what they and their aggregators sealed, or of what they sent in the open.
    entropy : float
        Bits of entropy in such a byte, by their frequencies.
    p_value : float
        Chance of frequencies that uneven among random bytes.
    """

    name: str
    crossed: int
    places: int
    found: int
    answered: int
    entropy: float
    p_value: float


class Training:
    """A training whose messages are recorded.

    Parameters
    ----------
    relay : bool, default True
        Whether trusted aggregators are nodes of their own; else the server simulates them.
    seed : int, default 0
        Root of what the devices compute.
    trusted : mapping, optional
        For some nodes, the aggregators that their policies trust in place of their parents.
    """

    def __init__(
        self,
        *,
        relay: bool = True,
        seed: int = 0,
        trusted: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        check_integer("seed", seed, minimum=0)
        self.computed: list[Computed] = []
        self._seed = seed
        self._relay = relay
        self._trusted = trusted
        nodes = len(TREE.devices) + len(TREE.trusted) * relay
        self.strategy = M2FDP(
            tree=TREE,
            privacy=DeviceNoise(clean_events=WorstDrift()),
            schedule=_SCHEDULE,
            relay=relay,
            min_train_nodes=len(TREE.devices),
            min_available_nodes=nodes,
        )

    @contextmanager
    def run(self, rounds: int = ROUNDS) -> Iterator["TappedGrid"]:
        """Train; return the grid, over which more may be asked until it is closed."""
        with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as folder:
            nodes: int | list[dict[str, Any]] = len(TREE.devices)
            if self._relay:
                nodes = tree_nodes(Path(folder), TREE, trusted=self._trusted)
            self.strategy.experiment.leave_no_card()
            grid = TappedGrid(self._app(), nodes)
            try:
                with quiet(logging.ERROR), acting_as_server(grid.run_id):
                    start = ArrayRecord({"w": Array(np.zeros(DIMENSION))})
                    result = self.strategy.start(grid, start, num_rounds=rounds)
                    self.model = np.asarray(result.arrays["w"].numpy())
                    yield grid
            finally:
                grid.close()

    def _app(self) -> ClientApp:
        app = ClientApp(mods=[as_mod(M2FDPClient)])

        @app.train()
        def train(message: Message, context: Context) -> Message:
            device = client_id_from(context.node_config)
            start = np.asarray(message.content.array_records["arrays"]["w"].numpy(), np.float64)
            trained = start + self._move(device, len(self.computed))
            self.computed.append(Computed(device=device, start=start, trained=trained))
            arrays = ArrayRecord({"w": Array(trained)})
            metrics = MetricRecord({"num-examples": 1})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        return app

    def _move(self, device: str, count: int) -> Vector:
        """Return an update that is not clipped, another one each time."""
        move = stream(self._seed, "move", device, count).normal(size=DIMENSION)
        return move / np.linalg.norm(move)


class TappedGrid(InlineGrid):
    """Notes all bytes that cross, and can be asked to ask something else.

    Parameters
    ----------
    client_app, nodes
        As of `InlineGrid`.
    """

    def __init__(self, client_app: ClientApp, nodes: int | list[dict[str, Any]]) -> None:
        super().__init__(client_app, nodes)
        self.crossed: list[bytes] = []
        self.requests: list[Passage] = []
        self.answers: list[Passage] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Note requests and pass them on, after those that somebody asks in between."""
        requests = list(messages)
        for request in requests:
            client = self._client(request.metadata.dst_node_id)
            self.requests.append(Passage(client=client, message=request))
            self.crossed += wire_bytes(request.content)
        return super().push_messages(requests)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Note answers and pass them on."""
        answers = list(super().pull_messages(message_ids))
        for answer in answers:
            if not answer.has_error():
                client = self._client(answer.metadata.src_node_id)
                self.answers.append(Passage(client=client, message=answer))
                self.crossed += wire_bytes(answer.content)
        return answers

    def ask(self, passage: Passage, fields: Mapping[str, Any]) -> Message:
        """Ask the node of a request with other fields; return its answer."""
        content = RecordDict(dict(passage.message.content))
        content[RECORD] = ConfigRecord(dict(fields))
        request = Message(
            content,
            dst_node_id=passage.message.metadata.dst_node_id,
            message_type=passage.message.metadata.message_type,
        )
        (name,) = super().push_messages([request])
        (answer,) = super().pull_messages([name])
        return answer

    def ledger(self, client: str) -> int:
        """Return how many charges the ledger of a client has."""
        config = next(c.node_config for c in self._contexts.values() if _id(c) == client)
        path = Path(str(config["privacy-state"]), f"{client}.ledger")
        return len(Ledger(path, data_set=client).entries())

    def forget(self) -> None:
        """Take from all nodes what lasts as long as a run of Flower, as a new run does."""
        for context in self._contexts.values():
            context.state = RecordDict()

    def _client(self, node: int) -> str:
        return _id(self._contexts[node])


def _id(context: Context) -> str:
    return client_id_from(context.node_config)


def wire_bytes(content: Any) -> list[bytes]:
    """Return a record and all that is in it as Flower sends it, object by object."""
    objects = [content.deflate()]
    for child in (content.children or {}).values():
        objects += wire_bytes(child)
    return objects


def tap(*, seed: int = 0) -> list[Tapped]:
    """Look for what devices of a trusted zone computed in the bytes that cross.

    Parameters
    ----------
    seed : int, default 0
        Root of what the devices compute.

    Returns
    -------
    list of Tapped
        With an aggregator that is a node, and where the server simulates it.

    Raises
    ------
    InvalidParameterError
        If the seed is out of range.
    """
    return [_tapped(Training(relay=relay, seed=seed)) for relay in (True, False)]


def _tapped(training: Training) -> Tapped:
    with training.run() as grid:
        crossed = b"\n".join(grid.crossed)
        sealed, plain = _answers_of_the_zone(grid)
        (exponent,) = {
            int(str(record["grid"]))
            for passage in grid.requests
            for record in passage.message.content.config_records.values()
            if "grid" in record
        }
    places = list(_places(training, CodeGrid(exponent)))
    answered = b"".join(dict.fromkeys(sealed or plain))  # each once, however often it crossed
    entropy, p_value = _evenness(answered)
    return Tapped(
        name="sealed, passed on by the server" if sealed else "simulated by the server",
        crossed=len(crossed),
        places=len(places),
        found=sum(any(word in crossed for word in words) for words in places),
        answered=len(answered),
        entropy=entropy,
        p_value=p_value,
    )


def _answers_of_the_zone(grid: TappedGrid) -> tuple[list[bytes], list[bytes]]:
    """Return what was sealed, and the arrays that devices of trusted zones sent in the open."""
    sealed: list[bytes] = []
    for passage in (*grid.requests, *grid.answers):
        for name, value in passage.fields.items():
            if name.endswith("sealed") and not isinstance(value, bool):
                sealed += value if isinstance(value, list) else [value]
    plain = [
        array.data
        for passage in grid.answers
        if passage.client in TREE.devices and TREE.secure(TREE.parent(passage.client))
        for record in passage.message.content.array_records.values()
        for array in record.values()
    ]
    return sealed, plain


def _places(training: Training, grid: CodeGrid) -> Iterator[list[bytes]]:
    """Return stretches of all that was computed in trusted zones, each in several encodings."""
    for one in training.computed:
        if not TREE.secure(TREE.parent(one.device)):
            continue
        update = one.trained - one.start
        codes = grid.encode(update)
        vectors: list[NDArray[Any]] = [update, codes, one.trained]
        for vector in vectors:
            step = (DIMENSION - _WIDTH) // _PLACES
            for first in range(0, step * _PLACES, step):
                part = vector[first : first + _WIDTH]
                dtypes = _DTYPES[np.int64 if vector is codes else np.float64]
                yield [part.astype(dtype).tobytes() for dtype in dtypes]


def _evenness(data: bytes) -> tuple[float, float]:
    """Return the entropy of a byte by the frequencies, and the p-value of their evenness."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    shares = counts[counts > 0] / len(data)
    entropy = -float((shares * np.log2(shares)).sum())
    expected = len(data) / 256
    return entropy, float(chi2.sf(((counts - expected) ** 2 / expected).sum(), 255))
