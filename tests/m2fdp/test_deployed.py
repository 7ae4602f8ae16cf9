"""Mode R on a real SuperLink with real SuperNodes: an aggregator and the devices of two edges."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import run_strategy
from deployment import Deployment
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from zones import zone_nodes

from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.m2fdp import EventSchedule, TierTree
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.strategies import M2FDP, DeviceNoise, LoopOptions, WorstDrift

APP = Path(__file__).parents[1] / "deployed"
TREE = TierTree.of_fanouts((2, 2), p=0.5)
SEED = 7
INITIAL = [np.array([[0.0, 1.0], [2.0, 3.0]], np.float32), np.full(3, 0.5, np.float32)]


def shift_of(index: int) -> float:
    return 1.0 + index / 2


def simulated() -> tuple[Any, list[bytes]]:
    """Train the same with aggregators that the server plays; return also what it saw of devices."""
    app = ClientApp(mods=[as_mod(M2FDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        shift = shift_of(int(context.node_config["partition-id"]))
        arrays = {
            name: Array(np.asarray(2 * array.numpy() + shift, np.float32))
            for name, array in message.content.array_records["arrays"].items()
        }
        metrics = MetricRecord({"num-examples": 1})
        return Message(
            RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message
        )

    seen: list[bytes] = []

    def tap(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(ids: list[str]) -> list[Message]:
            replies = list(pull(ids))
            for reply in replies:
                fields = reply.content["flwr-privacy"]
                if fields["client-id"] in TREE.leaves("t1-0") and "arrays" in reply.content:
                    seen.extend(a.numpy().tobytes() for a in reply.content["arrays"].values())
            return replies

        grid.pull_messages = pull_messages

    strategy = M2FDP(
        tree=TREE,
        privacy=DeviceNoise(epsilon=200.0, clipping_norm=4.0, clean_events=WorstDrift()),
        schedule=EventSchedule(steps=2, events={1: 1}),
        loop=LoopOptions(experiment_id="tiers", seed=1),
        insecure_seed=SEED,
    )
    result = run_strategy(
        strategy,
        app,
        arrays=ArrayRecord([array.copy() for array in INITIAL]),
        insecure_seed=SEED,
        num_rounds=1,
        before=tap,
    )
    return result, seen


@pytest.mark.deployed
def test_relayed_by_a_superlink_the_model_is_that_of_the_simulation_and_nothing_is_readable(
    tmp_path: Path,
) -> None:
    nodes = zone_nodes(TREE, tmp_path, **{"insecure-seed": SEED, "examples": 1})
    for index, node in enumerate(nodes):
        state = tmp_path / f"state-{node['client-id']}"
        state.mkdir()
        node |= {"privacy-state": str(state), "shift": shift_of(index)}
    out = tmp_path / "out.json"
    with Deployment(nodes=nodes, folder=tmp_path) as deployment:
        deployment.run(
            APP,
            run_config={"scheme": "m2fdp", "nodes": len(nodes), "rounds": 1, "out": str(out)},
        )
    deployed = json.loads(out.read_text())
    expected, codes = simulated()
    assert deployed["arrays"] == [a.tolist() for a in expected.arrays.to_numpy_ndarrays()]
    # A clean event inside the trusted zone, and a noised one: 2 exchanges with devices and as many
    # with the aggregator, and the hello.
    (line,) = deployed["history"][1:]
    assert (line["accumulated"], line["refused"], line["exchanges"]) == (4, {}, 4)
    # What the trusted devices sent in the open there is nowhere to be read here.
    overheard = Path(f"{out}.seen").read_bytes()
    assert len(codes) == 2 * 2 * len(INITIAL)
    assert len(overheard) > 1000
    assert not any(code in overheard for code in codes)
    for name, releases in (("0", 1), ("1", 1), ("2", 2), ("3", 2), ("t1-0", 1)):
        ledger = Ledger(tmp_path / f"state-{name}" / f"{name}.ledger", data_set=name)
        assert len(ledger.entries()) == releases, name
