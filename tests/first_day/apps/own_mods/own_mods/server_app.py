"""Averages the clients' models."""

import flwr as fl
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()
results = []


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train."""
    strategy = fl.serverapp.strategy.FedAvg(fraction_evaluate=0.0, min_available_nodes=4)
    arrays = ArrayRecord([np.zeros((3, 2), np.float32), np.ones(2, np.float32)])
    result = strategy.start(grid, arrays, context.run_config["num-server-rounds"])
    results.append(result.arrays.to_numpy_ndarrays())
