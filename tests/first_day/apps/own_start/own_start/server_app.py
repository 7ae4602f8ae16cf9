"""Trains with the app's own strategy."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from own_start.strategy import KeepBest

app = ServerApp()
results = []


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train."""
    rounds = int(context.run_config["num-server-rounds"])

    strategy = KeepBest(
        shrink=0.5,
        fraction_evaluate=0.0,
        min_available_nodes=4,
    )
    arrays = ArrayRecord([np.zeros((3, 2), np.float32), np.ones(2, np.float32)])
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)
    results.append(result.arrays.to_numpy_ndarrays())
