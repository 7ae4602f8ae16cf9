"""The server half: trains the initial numbers and writes what happened as JSON."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import MSPDQ, UDP, CentralDP, FedAvg, SchemeStrategy

STRATEGIES: dict[str, Callable[..., SchemeStrategy]] = {
    "fedavg": FedAvg,
    "secure-sum": partial(FedAvg, secure_sum=SecureSum(threshold=2, value_range=64.0)),
    "mspdq": partial(
        MSPDQ,
        secure_sum=SecureSum(threshold=2),
        mixing_rounds=2,
        gamma=0.3,
        bits=16,
        bound=16.0,
    ),
    "udp": partial(UDP, epsilon=8.0, delta=1e-5),
    "central-dp": partial(CentralDP, epsilon=8.0, delta=1e-5),
}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    strategy = STRATEGIES[str(config["scheme"])](
        min_train_nodes=nodes,
        min_available_nodes=nodes,
        fraction_evaluate=0.0,
        min_evaluate_nodes=0,
    )
    initial = [np.array([[0.0, 1.0], [2.0, 3.0]], np.float32), np.full(3, 0.5, np.float32)]
    result = strategy.start(
        grid, ArrayRecord(initial), num_rounds=int(config["rounds"]), timeout=240
    )
    out = {
        "history": result.history,
        "arrays": [array.tolist() for array in result.arrays.to_numpy_ndarrays()],
        "card": strategy.card(final=True).to_json(),
    }
    Path(str(config["out"])).write_text(json.dumps(out))
