"""A strategy that keeps the best model."""

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result


class KeepBest(FedAvg):
    """FedAvg with rounds of its own, and a step that shrinks."""

    def __init__(self, shrink: float, **kwargs):
        super().__init__(**kwargs)
        self.shrink = shrink
        self.models = []

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout=3600):
        """Train."""
        result, arrays, step = Result(), initial_arrays, 0.1
        for server_round in range(1, num_rounds + 1):
            config = ConfigRecord({"step": step})
            messages = self.configure_train(server_round, arrays, config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            new, _ = self.aggregate_train(server_round, replies)
            arrays = arrays if new is None else new
            self.models.append(arrays)
            step *= self.shrink
        result.arrays = arrays
        return result
