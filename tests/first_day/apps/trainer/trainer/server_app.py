"""Trains with one of Flower's server optimisers."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam

from trainer.task import LitNet

app = ServerApp()
results = []


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the module."""
    torch.manual_seed(0)
    arrays = ArrayRecord(LitNet().state_dict())

    strategy = FedAdam(fraction_evaluate=0.0, min_available_nodes=4, eta=0.01)
    result = strategy.start(
        grid=grid, initial_arrays=arrays, num_rounds=context.run_config["num-server-rounds"]
    )
    results.append(result.arrays.to_numpy_ndarrays())
