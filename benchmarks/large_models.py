"""Rounds of large models: central DP in shares beside FedAvg, in time and memory.

A side is a process of its own, in which all clients and the server run one after the other; its
trainings add a constant. Seconds are those of the second round. Memory is what the process held at
most, less what it held before the run.
"""

import argparse
import json
import logging
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .own_process import measured
from .report import Comparison

__all__ = ["large_models"]

SIZES = [(10_000_000, 8, 3), (100_000_000, 4, 1)]
"""Values of the model, clients, and turns."""

ROUNDS = 2
MOST_TIME, MOST_MEMORY = 3.0, 1.3  # in units of FedAvg's
RIVAL = "our FedAvg"


def large_models() -> Iterator[Comparison]:
    """Compare a secure sum with noise in shares with plain FedAvg."""
    for values, clients, turns in SIZES:
        plain, shares = [], []
        for _ in range(turns):
            plain.append(_side("fedavg", values, clients))
            shares.append(_side("shares", values, clients))
        what = f"central-dp in shares, {values:.0e} x {clients} clients"
        for name, key, unit, at_most in (
            ("time", "seconds", "s", MOST_TIME),
            ("memory", "bytes", "B", MOST_MEMORY),
        ):
            yield Comparison(
                what=f"{what}, {name}",
                rival=RIVAL,
                ours=[side[key] for side in shares],
                theirs=[side[key] for side in plain],
                unit=unit,
                at_most=at_most,
            )


def _side(name: str, values: int, clients: int) -> dict[str, float]:
    return measured(__spec__.name, name, str(values), str(clients))


def main() -> None:
    """Run one side, and print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["fedavg", "shares"])
    parser.add_argument("values", type=int)
    parser.add_argument("clients", type=int)
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print(json.dumps(_measured(asked.side, asked.values, asked.clients)))


def _measured(side: str, values: int, clients: int) -> dict[str, float]:
    # Not above: the process that compares has no use for it.
    import numpy as np
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid, ServerApp

    from flwr_privacy.clients import CentralDPClientApp
    from flwr_privacy.clients.fedavg import FedAvgClientApp
    from flwr_privacy.secure_sum import SecureSum
    from flwr_privacy.simulations.engines.inline import run_inline
    from flwr_privacy.strategies import CentralDP, DistributedNoise, FedAvg, LoopOptions

    client_app: Any = CentralDPClientApp() if side == "shares" else FedAvgClientApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        [model] = message.content["arrays"].to_numpy_ndarrays()
        model += np.float32(1e-6)
        records = {
            "arrays": ArrayRecord([model]),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(records), reply_to=message)

    asked: dict[str, Any] = {
        "fraction_train": 1.0,
        "fraction_evaluate": 0.0,
        "min_available_nodes": clients,
        "loop": LoopOptions(write_card=False),
    }
    if side == "shares":
        strategy: Any = CentralDP(
            privacy=DistributedNoise(epsilon=8.0),
            secure_sum=SecureSum(threshold=clients - 1),
            **asked,
        )
    else:
        strategy = FedAvg(**asked)

    ends: list[float] = []
    server_app = ServerApp()

    @server_app.main()
    def run(grid: Grid, context: Context) -> None:
        model = ArrayRecord([np.zeros(values, np.float32)])
        strategy.start(
            grid, model, num_rounds=ROUNDS, evaluate_fn=lambda *_: ends.append(time.perf_counter())
        )

    before = _resident("VmRSS")
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as state:
        run_inline(server_app, client_app, nodes=clients, state=state)
    return {"seconds": ends[-1] - ends[-2], "bytes": _resident("VmHWM") - before}


def _resident(name: str) -> float:
    """Return a number of bytes that the kernel keeps of this process (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024.0 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])  # type: ignore[index]


if __name__ == "__main__":
    main()
