"""Trainings under M2FDP in which the server plays the aggregators, and whose steps are known."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, model_of, record, run_strategy
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from grid_tap import tapped
from numpy.typing import NDArray

from flwr_privacy.accounting import Charge, fitting, spent
from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.strategies import M2FDP
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import RECORD

Array = NDArray[np.float64]
Model = dict[str, Any]
Train = Callable[[str, Model, dict[str, Any]], Model]
MIXED = TierTree.of_edges(
    [("cloud", "A"), ("cloud", "B"), ("A", "1"), ("A", "3"), ("B", "5"), ("B", "7")], trusted={"A"}
)
HALF = TierTree.of_fanouts((2, 2), p=0.5)
DEEP = TierTree.of_fanouts((2, 2, 2), p=(0.5, 0.5))
DEEP_EVENTS = {"steps": 7, "events": {1: [5], 2: [2]}}


def app_of(train: Train) -> ClientApp:
    """Return an app that trains by a function of the device's name, model and configuration."""
    app = ClientApp(mods=[as_mod(M2FDPClient)])

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        name = client_id_from(context.node_config)
        config = dict(message.content["config"])
        trained = train(name, model_of(message.content["arrays"]), config)
        content = {"arrays": record(trained), "metrics": MetricRecord({"num-examples": 7})}
        return Message(RecordDict(content), reply_to=message)

    return app


def nodes_of(tree: TierTree) -> list[dict[str, Any]]:
    """Return nodes that are simulated, one for each device."""
    count = len(tree.devices)
    return [
        {"client-id": name, "partition-id": i, "num-partitions": count, "privacy-simulated": True}
        for i, name in enumerate(tree.devices)
    ]


def run(
    tree: TierTree | None,
    train: Train,
    *,
    size: int = 3,
    start: Model | None = None,
    num_rounds: int = 1,
    engine: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, M2FDP]:
    """Train a model "w" of zeros; return the result and the strategy."""
    if tree is not None:
        options["tree"] = tree
    nodes = nodes_of(tree) if tree is not None else 4
    strategy = make(M2FDP, **{"experiment_id": "e", "seed": 1, **options})
    result = run_strategy(
        strategy,
        app_of(train),
        arrays=record({"w": np.zeros(size)} if start is None else start),
        num_rounds=num_rounds,
        **{"nodes": nodes, **(engine or {})},
    )
    return result, strategy


def w_of(result: Any) -> Array:
    return np.asarray(result.arrays["w"].numpy())


def stay(name: str, model: Model, config: dict[str, Any]) -> Model:
    return model


def to(targets: Mapping[str, float]) -> Train:
    return lambda name, model, config: {"w": np.full_like(model["w"], targets[name])}


def affine(name: str, w: Array) -> Array:
    """One local step: every device has a fixed point of its own."""
    place = int(name) + 1
    return (1 - 0.1 / place) * w + 0.05 * place * np.arange(1, w.size + 1)


def descend(name: str, model: Model, config: dict[str, Any]) -> Model:
    w = model["w"]
    for _ in range(config["local-steps"]):
        w = affine(name, w)
    return {"w": w}


def charges_of(strategy: M2FDP) -> dict[str, list[Charge]]:
    return strategy.card().charges()


def entries_of(folder: Path, name: str) -> list[Any]:
    return list(Ledger(folder / f"{name}.ledger", data_set=name).entries())


class Spy:
    """Keeps the noise that was drawn, in the units of the weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noise: list[Array] = []
        self.sigmas: list[float] = []
        self.steps: list[float] = []
        from flwr_privacy.m2fdp import zone_average

        own = zone_average.noised

        def noised(codes: Any, *, sigma: float, grid: CodeGrid, random: Any) -> Any:
            before = codes.copy()
            out = own(codes, sigma=sigma, grid=grid, random=random)
            self.noise.append(grid.step * (out - before))
            self.sigmas.append(sigma)
            self.steps.append(grid.step)
            return out

        for module in ("m2fdp.release", "strategies.m2fdp.simulated_aggregators"):
            monkeypatch.setattr(f"flwr_privacy.{module}.noised", noised)


class Tap:
    """Keeps the messages that cross a grid."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.said: list[Message] = []

    def __call__(self, grid: Any) -> None:
        tapped(self.asked.append, self.said.append)(grid)

    def answers(self) -> list[tuple[str, Model]]:
        """Return who answered, and the update that the codes stand for."""
        questions = [m for m in self.asked if m.content[RECORD]["phase"] == "train"]
        grids = {
            (m.metadata.dst_node_id, *asked_of(m)): m.content[RECORD]["grid"] for m in questions
        }
        found = []
        for reply in self.said:
            if reply.has_content() and reply.content[RECORD]["phase"] == "train":
                grid = CodeGrid(grids[reply.metadata.src_node_id, *asked_of(reply)])
                codes = model_of(reply.content["arrays"])
                assert {array.dtype for array in codes.values()} == {np.dtype(np.int32)}
                update = {name: grid.step * array for name, array in codes.items()}
                found.append((reply.content[RECORD]["client-id"], update))
        return found


def asked_of(message: Message) -> tuple[Any, Any]:
    return message.content[RECORD]["round"], message.content[RECORD]["request"]


SIZE = 20_000  # coordinates; a variance has a relative standard error of sqrt(2 / SIZE) = 1 %
BOUND = 5 * math.sqrt(2 / SIZE)  # five of them: fails by chance once in two million


def spent_of(strategy: M2FDP) -> dict[str, float]:
    """Return what each device spent, by the card."""
    return {
        name: spent(charges, delta=1e-5, accountant=fitting(charges))
        for name, charges in charges_of(strategy).items()
    }


def check_ledgers(strategy: M2FDP, folder: Path) -> None:
    """Check that every node's ledger has what the card has."""
    for name, charges in charges_of(strategy).items():
        kept = [entry.charge for entry in entries_of(folder, name)]
        assert sorted(kept, key=repr) == sorted(charges, key=repr)


TRIPLES = TierTree.of_edges(
    [
        *[("cloud", name) for name in ("A", "B", "C")],
        *[("A", name) for name in "012"],
        *[("B", name) for name in "345"],
        *[("C", name) for name in "67"],
    ],
    trusted={"A", "B"},
)


def gone(*names: str, then: Train = stay) -> Train:
    """Return a training in which some devices always fail."""

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name in names:
            raise RuntimeError("no data today")
        return then(name, model, config)

    return train


def change_all(name: str, model: Model, config: dict[str, Any]) -> Model:
    return {key: (array + 1).astype(array.dtype) for key, array in model.items()}
