"""Computes the new model from an average, by an inner strategy if there is one."""

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg

from flwr_privacy.strategies.state.experiment import to_record
from flwr_privacy.wire.arrays import Arrays

from .inner import InnerStrategy

__all__ = ["ModelStep"]


class ModelStep:
    """The server's step.

    Parameters
    ----------
    inner : flwr.serverapp.strategy.FedAvg, optional
        A Flower strategy that takes the average as one reply; by default it is the new model.
    """

    def __init__(self, inner: FedAvg | None) -> None:
        self._inner = None if inner is None else InnerStrategy(inner)

    def configure(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord, ConfigRecord]:
        """Return the arrays and the configuration to send: the inner strategy may change them."""
        if self._inner is None:
            return arrays, config
        return self._inner.configure(server_round, arrays, config)

    def take(
        self,
        server_round: int,
        model: Arrays,
        averaged: Arrays,
        metrics: MetricRecord,
        weight: float,
    ) -> ArrayRecord:
        """Return the new model.

        What is not in the average keeps the server's values, and all arrays keep their dtypes.
        """
        new = {name: averaged.get(name, old) for name, old in model.items()}
        arrays = to_record({n: new[n].astype(old.dtype, copy=False) for n, old in model.items()})
        if self._inner is None:
            return arrays
        stepped = self._inner.aggregate(server_round, arrays, metrics, weight)
        return to_record(
            {
                name: stepped[name].numpy().astype(like.dtype).reshape(like.shape)
                for name, like in model.items()
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the inner strategy's state between rounds."""
        return {} if self._inner is None else self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self._inner is not None:
            self._inner.load_state_dict(state)
