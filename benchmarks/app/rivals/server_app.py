"""The server app: runs the parts of a plan in order and writes down the seconds of each.

echo        every node sends 4 kB back; the seconds of one ``send_and_receive`` each
flower      Flower's FedAvg; the seconds of each round
ours        this library's FedAvg; the seconds of each round
secure      the same under a secure sum, which has two exchanges a round
udp-user    UDP at user level around the same training; the seconds of each round
udp-record  UDP at record level, one step per round; the seconds of each round
m2fdp       M2FDP over a tree of ten aggregators, half of them trusted; the same
"""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy.m2fdp import TierTree
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import (
    M2FDP,
    UDP,
    DeviceNoise,
    FedAvg,
    LoopOptions,
    RecordLevel,
    UserLevel,
)

from .client_app import SIZES

__all__ = ["app"]

ECHO_FLOATS = 1000  # 4 kB
TIMEOUT = 600.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the plan."""
    config = context.run_config
    rounds, clients = int(config["rounds"]), int(config["clients"])
    with Path(str(config["out"])).open("a", encoding="utf-8") as out:
        for part in str(config["plan"]).split():
            if part == "echo":
                seconds = [_echo(grid) for _ in range(rounds)]
            else:
                seconds = _train(grid, part, rounds, clients)
            out.write(json.dumps({"part": part, "seconds": seconds}) + "\n")


def _echo(grid: Grid) -> float:
    nodes = list(grid.get_node_ids())
    content = RecordDict({"arrays": ArrayRecord([np.zeros(ECHO_FLOATS, np.float32)])})
    messages = [Message(content, node, "query.echo") for node in nodes]
    began = time.perf_counter()
    replies = list(grid.send_and_receive(messages, timeout=TIMEOUT))
    seconds = time.perf_counter() - began
    if len(replies) != len(nodes) or any(reply.has_error() for reply in replies):
        raise RuntimeError(f"{len(replies)} replies of {len(nodes)} nodes, or errors among them")
    return seconds


def _train(grid: Grid, part: str, rounds: int, clients: int) -> list[float]:
    """Return the seconds of each round; what comes before the first is not counted."""
    nodes = len(list(grid.get_node_ids()))
    strategy = _strategy(part, nodes, clients)
    ends: list[float] = []
    models: list[ArrayRecord] = []

    def clock(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.perf_counter())
        models.append(arrays)

    strategy.start(grid, _initial_arrays(), num_rounds=rounds, timeout=TIMEOUT, evaluate_fn=clock)
    if any(after is before for before, after in pairwise(models)):
        raise RuntimeError(f"{part}: a round was skipped")
    return [end - begin for begin, end in pairwise(ends)]


def _strategy(part: str, nodes: int, clients: int) -> FlowerFedAvg:
    asked: dict[str, Any] = {
        "fraction_evaluate": 0.0,
        "min_train_nodes": clients or nodes,
        "min_available_nodes": nodes,
    }
    if part == "flower":
        return FlowerFedAvg(**asked)
    asked["loop"] = LoopOptions(clients=clients or None)
    if part == "ours":
        return FedAvg(**asked)
    if part == "secure":
        return FedAvg(secure_sum=SecureSum(), **asked)
    if part == "udp-user":
        return UDP(privacy=UserLevel(epsilon=8.0), **asked)
    if part == "udp-record":
        return UDP(privacy=RecordLevel(epsilon=8.0, learning_rate=1.0), **asked)
    if part == "m2fdp":
        tree = TierTree.of_fanouts((10, (clients or nodes) // 10), p=0.5)
        return M2FDP(tree=tree, privacy=DeviceNoise(), **asked)
    raise ValueError(f"unknown part {part!r}")


def _initial_arrays() -> ArrayRecord:
    from flwr_privacy.clients.torch import get_arrays, initialise, mlp

    arrays = get_arrays(initialise(lambda: mlp(SIZES), seed=0))
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
