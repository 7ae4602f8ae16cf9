"""A small federation for each scheme in which faults are tried; no torch, no data sets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_privacy.clients import (
    ACFLClient,
    CentralDPClient,
    FedAvgClient,
    FedVSClient,
    M2FDPClient,
    MSPDQClient,
    SchemeClient,
    SecureSumClient,
    UDPClient,
    VerticalData,
    as_mod,
    own_client_app,
)
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline.pinned_nodes import pinned_nodes, tree_nodes
from flwr_privacy.simulations.settings.flat_options import strategy_of
from flwr_privacy.strategies import (
    ACFL,
    M2FDP,
    MSPDQ,
    UDP,
    CentralDP,
    FedAvg,
    FedVS,
    SchemeStrategy,
)
from flwr_privacy.wire.identity import client_id_from

__all__ = ["CLIENTS", "FEDERATIONS", "ROUNDS", "SEED", "SmallFederation", "Spot"]

CLIENTS, ROUNDS, SEED = 4, 3, 5

Values = dict[str, NDArray[Any]]
Watch = Callable[[type[SchemeClient]], type[SchemeClient]]
"""Makes a client half say what it answers."""


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A phase in which a fault is injected.

    Parameters
    ----------
    phase : str
        The phase on the wire.
    server_round : int, default 2
        In which round.
    client : str, default "2"
        Whose request it is.
    nth : int, default 1
        Which of the phase's requests to that client in the round.
    name : str, default ""
        What it is called in the table; by default as the phase.
    """

    phase: str
    server_round: int = 2
    client: str = "2"
    nth: int = 1
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class SmallFederation:
    """A scheme in a small federation.

    Parameters
    ----------
    title : str
        What the table says of it.
    strategy : type
        The server half; built with `options`.
    client : type
        The client half.
    spots : tuple of Spot
        Its phases.
    start : callable
        Returns the arrays to start from.
    app : callable
        Returns the app of a client half.
    nodes : callable
        Returns the configurations of the nodes; what they need lies in the folder that goes in.
    options : dict
        Parameters of the strategy.
    charged : dict
        Phases on the wire by the first word of what the ledger calls them, where it is another.
    within : tuple of str
        Phases whose sealed answers stay among the nodes and cost nothing by themselves.
    once : tuple of str
        Phases that cost a client once, whenever they are: the ledger has them under round 0.
    """

    title: str
    strategy: type[SchemeStrategy]
    client: type[SchemeClient]
    spots: tuple[Spot, ...]
    start: Callable[[], Values] = field(default=lambda: {n: a.copy() for n, a in _MODEL.items()})
    app: Callable[[type[SchemeClient]], ClientApp] = field(default=lambda client: _app(client))
    nodes: Callable[[Path], list[dict[str, Any]]] = field(default=lambda folder: _nodes(folder))
    options: Mapping[str, Any] = field(default_factory=dict)
    charged: Mapping[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()
    once: tuple[str, ...] = ()

    def arrays(self) -> ArrayRecord:
        """Return the arrays to start from, as a record."""
        return ArrayRecord({name: Array(array) for name, array in self.start().items()})

    def build(self, **more: Any) -> SchemeStrategy:
        """Return the server half, with the parameters of the federation and others."""
        values = {"seed": 3, "experiment_id": "e", **self.options, **more}
        return strategy_of(_quick(self.strategy), values)


@cache
def _quick(strategy: type[SchemeStrategy]) -> type[SchemeStrategy]:
    """Return a strategy whose last card has one accountant's epsilon; by all takes seconds."""

    def card(self: SchemeStrategy, *, final: bool = False) -> Any:
        return strategy.card(self)

    return type(strategy.__name__, (strategy,), {"card": card})


# -- Schemes that go around an app ---------------------------------------------------------------

# t1-0 is trusted, with t2-0 and t2-1; of the others t2-2 is. The devices 6 and 7 trust nobody.
_TREE = TierTree.of_fanouts((2, 2, 2), p=(0.5, 0.5))

_NAMES = [str(index) for index in range(CLIENTS)]

_MODEL: Values = {
    "weights": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "bias": np.linspace(-1, 1, 5, dtype=np.float32),
}


def _nodes(folder: Path) -> list[dict[str, Any]]:
    # They stand for deployed ones: the key is the operator's file, which is not lost with theirs.
    nodes = pinned_nodes(folder, _NAMES)
    return [{key: node[key] for key in node if key != "privacy-pins"} for node in nodes]


def _app(client: type[SchemeClient]) -> ClientApp:
    """Return an app whose local training moves every client elsewhere."""
    app = ClientApp(mods=[as_mod(client)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        place = int(context.node_config["partition-id"])
        arrays = {
            name: array.numpy() for name, array in message.content.array_records["arrays"].items()
        }
        moved = {
            name: Array((array * (1 + place / 100) + place**2 / 90).astype(array.dtype))
            for name, array in arrays.items()
        }
        metrics = MetricRecord({"num-examples": place + 1, "loss": place / 2})
        return Message(
            RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        place = int(context.node_config["partition-id"])
        metrics = MetricRecord(
            {"num-examples": place + 1, "accuracy": place**2 / 10, "loss": 1 / (place + 1)}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


# -- Schemes that bring their own client ---------------------------------------------------------


def _draws(place: int) -> np.random.Generator:
    return np.random.default_rng(place + 10)


def _regression(context: Context) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return records that no two clients share, and their labels."""
    draws = _draws(int(client_id_from(context.node_config)))
    return draws.uniform(-1, 1, (12, 3)), draws.uniform(-1, 1, (12, 2))


_ROWS, _TEST_ROWS, _EMBEDDING, _CLASSES = 21, 9, 4, 3


def _columns(context: Context) -> VerticalData:
    """Return a client's columns of rows that all clients have."""
    draws = _draws(int(client_id_from(context.node_config)))
    return VerticalData(
        train=draws.uniform(0, 1, (_ROWS, 3)), test=draws.uniform(0, 1, (_TEST_ROWS, 3))
    )


class _Softmax:
    """A linear server model: the softmax of ``H A``."""

    def initial(self) -> Values:
        draws = np.random.default_rng(3)
        return {"A": draws.normal(0, 0.5, (_EMBEDDING, _CLASSES)).astype(np.float32)}

    def scores(
        self, arrays: Mapping[str, NDArray[Any]], embedding: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        return np.asarray(embedding @ arrays["A"], np.float32)

    def step(
        self,
        arrays: Mapping[str, NDArray[Any]],
        embedding: NDArray[np.float32],
        labels: NDArray[Any],
        learning_rate: float,
    ) -> tuple[Values, NDArray[np.float32], float]:
        shares = self._shares(arrays, embedding)
        rows = np.arange(len(labels))
        loss = -float(np.mean(np.log(shares[rows, labels])))
        back = shares.copy()
        back[rows, labels] -= 1
        back /= len(labels)
        moved = arrays["A"] - learning_rate * (embedding.T @ back)
        return {"A": moved.astype(np.float32)}, (back @ arrays["A"].T).astype(np.float32), loss

    def metrics(
        self,
        arrays: Mapping[str, NDArray[Any]],
        embedding: NDArray[np.float32],
        labels: NDArray[Any],
    ) -> dict[str, float]:
        shares = self._shares(arrays, embedding)
        chosen = shares[np.arange(len(labels)), labels]
        return {
            "loss": -float(np.mean(np.log(chosen))),
            "accuracy": float(np.mean(shares.argmax(axis=1) == labels)),
        }

    def _shares(
        self, arrays: Mapping[str, NDArray[Any]], embedding: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        scores = self.scores(arrays, embedding).astype(np.float64)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _vertical(**more: Any) -> dict[str, Any]:
    labels = np.random.default_rng(7).integers(0, _CLASSES, _ROWS + _TEST_ROWS)
    return {
        "labels": labels[:_ROWS],
        "test_labels": labels[_ROWS:],
        "server_model": _Softmax(),
        "embedding": _EMBEDDING,
        "batch_size": 8,
        "learning_rate": 0.5,
        "client_learning_rate": 4.0,
        "K": 1,
        "T": 1,
        **more,
    }


# -- All of them ---------------------------------------------------------------------------------


def _spots(*phases: str | Spot) -> tuple[Spot, ...]:
    return tuple(Spot(phase=p) if isinstance(p, str) else p for p in phases)


_HELLO = Spot(phase="hello", server_round=0)
_KEYS = Spot(phase="keys", server_round=1)
_SETUP = Spot(phase="setup", server_round=0)

FEDERATIONS = {
    "fedavg": SmallFederation(
        title="FedAvg",
        strategy=FedAvg,
        client=FedAvgClient,
        spots=_spots(_HELLO, "train", "evaluate"),
    ),
    "fedavg-sum": SmallFederation(
        title="FedAvg under a secure sum",
        strategy=FedAvg,
        client=SecureSumClient,
        spots=_spots(_HELLO, _KEYS, "train", "shares"),
        # The training never comes to rest, and over hundreds of rounds its steps grow.
        options={"secure_sum": SecureSum(value_range=2.0**20, bits=31)},
    ),
    "udp": SmallFederation(
        title="UDP, all data of a client protected",
        strategy=UDP,
        client=UDPClient,
        spots=_spots(_HELLO, "train"),
        options={"unit": "user", "rounds": ROUNDS, "epsilon": 100.0},
    ),
    "udp-losses": SmallFederation(
        title="UDP with discounted rounds, validated by the clients' losses",
        strategy=UDP,
        client=UDPClient,
        spots=_spots(_HELLO, "train", "evaluate"),
        options={
            "unit": "user",
            "rounds": ROUNDS,
            "epsilon": 100.0,
            "schedule": "discounting",
            "validation": "clients",
        },
    ),
    "central-dp": SmallFederation(
        title="Central DP, noise in shares of the clients",
        strategy=CentralDP,
        nodes=lambda folder: pinned_nodes(folder, _NAMES),
        client=CentralDPClient,
        spots=_spots(_HELLO, _KEYS, "train", "shares"),
        options={"rounds": ROUNDS, "epsilon": 100.0},
    ),
    "mspdq": SmallFederation(
        title="MSPDQ under a secure sum",
        strategy=MSPDQ,
        client=MSPDQClient,
        spots=_spots(_HELLO, _KEYS, "train", "mix", "shares"),
        options={"mixing_rounds": 3, "secure_sum": SecureSum()},
    ),
    "acfl": SmallFederation(
        title="ACFL",
        strategy=ACFL,
        client=ACFLClient,
        spots=_spots(_HELLO, _SETUP, "train"),
        start=lambda: {"W": np.zeros((3, 2))},
        app=lambda client: own_client_app(client, lambda context: partial(_regression, context)),
        options={"max_records": 20, "epsilon": 100.0},
        once=("setup",),
    ),
    "acfl-sum": SmallFederation(
        title="ACFL under a secure sum",
        strategy=ACFL,
        nodes=lambda folder: pinned_nodes(folder, _NAMES),
        client=ACFLClient,
        spots=_spots(_HELLO, Spot(phase="keys", server_round=0), _SETUP, "train", "shares"),
        start=lambda: {"W": np.zeros((3, 2))},
        app=lambda client: own_client_app(client, lambda context: partial(_regression, context)),
        options={"max_records": 20, "epsilon": 100.0, "secure_sum": SecureSum()},
        once=("setup",),
    ),
    "m2fdp": SmallFederation(
        title="M2FDP, with aggregators that are nodes",
        strategy=M2FDP,
        client=M2FDPClient,
        spots=_spots(
            _HELLO,
            Spot(phase="train", client="6", name="train (noised)"),
            Spot(phase="train", name="train (sealed)"),
            Spot(phase="aggregate", client="t2-1", name="aggregate (below)"),
            Spot(phase="aggregate", client="t1-0", name="aggregate (top)"),
            Spot(phase="aggregate", client="t1-0", nth=2, name="aggregate (noised)"),
            Spot(phase="deliver", client="t2-1"),
        ),
        nodes=lambda folder: tree_nodes(folder, _TREE),
        options={
            "tree": _TREE,
            "relay": True,
            "steps": 4,
            "events": {1: [2]},
            "unit": "device",
            "clean_events": "worst",
            "min_children": 1,
            "clipping_norm": 0.5,
            "epsilon": 200.0,
        },
        charged={"sealed": "train", "event": "aggregate"},
        within=("aggregate", "deliver"),
    ),
    "fedvs": SmallFederation(
        title="FedVS",
        strategy=FedVS,
        client=FedVSClient,
        spots=_spots(
            _HELLO,
            Spot(phase="enrol", server_round=0),
            Spot(phase="code", server_round=0),
            "weights",
            "train",
            Spot(phase="weights-evaluation", server_round=ROUNDS),
            Spot(phase="embed-evaluation", server_round=ROUNDS),
        ),
        start=lambda: _Softmax().initial(),
        app=lambda client: own_client_app(client, lambda context: partial(_columns, context)),
        options=_vertical(),
    ),
}
