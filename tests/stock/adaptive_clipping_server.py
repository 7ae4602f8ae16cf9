"""A stock server whose clients clip to an adaptive norm, with Flower's wrapper."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideAdaptiveClipping, FedAvg

app = ServerApp()
results = []


@app.main()
def main(grid: Grid, context: Context) -> None:
    arrays = ArrayRecord([np.zeros((2, 2), np.float32), np.ones(3, np.float32)])
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=4)
    strategy = DifferentialPrivacyClientSideAdaptiveClipping(
        strategy, noise_multiplier=0.1, num_sampled_clients=4
    )
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=2)
    results.append(result.arrays.to_numpy_ndarrays())
