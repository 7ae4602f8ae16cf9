"""Aggregates the clients' metrics itself, and keeps every model."""

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()
results = []
models = []


class Keeping(FedAvg):
    """FedAvg that keeps the model of every round."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rounds = []

    def aggregate_train(self, server_round, replies):
        """Average, and keep the model."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            models.append(arrays)
        return arrays, metrics


def worst(contents, weighted_by):
    """Return the largest distance."""
    return MetricRecord({"worst": max(c["metrics"]["distance"] for c in contents)})


def spread(contents, weighted_by):
    """Return how far the targets are apart."""
    targets = [c["metrics"]["target"] for c in contents]
    return MetricRecord({"spread": max(targets) - min(targets)})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train."""
    strategy = Keeping(
        min_available_nodes=4,
        weighted_by_key="records",
        train_metrics_aggr_fn=worst,  # the app's own
        evaluate_metrics_aggr_fn=spread,
    )
    arrays = ArrayRecord([np.zeros((3, 2), np.float32), np.ones(2, np.float32)])
    result = strategy.start(grid, arrays, num_rounds=context.run_config["num-server-rounds"])
    results.append(result.arrays.to_numpy_ndarrays())
