"""The server app: trains and writes down the seconds of each round."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Strategy

__all__ = ["app"]

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train by the scheme of the run; the clock starts when the model is first evaluated."""
    config = context.run_config
    ends: list[float] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.monotonic())

    model = {"w": np.ones((64, 64), np.float32)}
    nodes, rounds = int(config["nodes"]), int(config["rounds"])
    _strategy(str(config["scheme"]), nodes).start(
        grid,
        ArrayRecord({name: Array(array) for name, array in model.items()}),
        num_rounds=rounds,
        evaluate_fn=evaluate,
    )
    seconds = [end - start for start, end in pairwise(ends)]
    Path(str(config["out"])).write_text(json.dumps(seconds), encoding="utf-8")


def _strategy(scheme: str, nodes: int) -> Strategy:
    options: dict[str, Any] = {
        **{"fraction_evaluate": 0.0, "min_evaluate_nodes": 0},
        **{"min_train_nodes": nodes, "min_available_nodes": nodes},
    }
    if scheme == "flower":
        return FlowerFedAvg(**options)
    from flwr_privacy.strategies import UDP, CentralDP, FedAvg, UserLevel

    if scheme == "udp":
        return UDP(privacy=UserLevel(epsilon=8.0), **options)
    return CentralDP(**options) if scheme == "central-dp" else FedAvg(**options)
