"""Runs Flower's server optimisers behind a scheme: they get the aggregate as a single reply."""

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, strategy
from flwr.serverapp.strategy import FedAvg

from flwr_privacy.errors import InvalidParameterError

__all__ = ["InnerStrategy"]

_NUMPY = (np.ndarray, np.generic)
_NODE = 1  # the one node that an inner strategy sees


_NEED_EVERY_REPLY = (
    strategy.Bulyan,
    strategy.FedMedian,
    strategy.FedTrimmedAvg,
    strategy.Krum,
    strategy.MultiKrum,
    strategy.QFedAvg,
)


class InnerStrategy:
    """Runs a Flower strategy (FedAdam, FedProx, ...) on the scheme's aggregate as one reply.

    Parameters
    ----------
    inner : flwr.serverapp.strategy.FedAvg
        A server optimiser of FedAvg's family. Its sampling is not used.

    Raises
    ------
    InvalidParameterError
        If it needs to see every client's reply: it would do nothing.
    """

    def __init__(self, inner: FedAvg) -> None:
        if not isinstance(inner, FedAvg) or isinstance(inner, _NEED_EVERY_REPLY):
            raise InvalidParameterError(
                "inner",
                type(inner).__name__,
                "a strategy that works on the aggregate, like FedAvgM, FedAdagrad, FedAdam, "
                "FedYogi or FedProx",
            )
        self.strategy = inner
        inner.fraction_train = 1.0
        inner.min_train_nodes = inner.min_available_nodes = 1
        self._given = set(inspect.signature(type(inner).__init__).parameters)
        self._question: Message | None = None

    def configure(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord, ConfigRecord]:
        """Return the arrays and the configuration that the strategy would send."""
        (self._question,) = self.strategy.configure_train(server_round, arrays, config, _OneNode())
        content = self._question.content
        return (
            content.array_records[self.strategy.arrayrecord_key],
            content.config_records[self.strategy.configrecord_key],
        )

    def aggregate(
        self, server_round: int, arrays: ArrayRecord, metrics: MetricRecord, weight: float
    ) -> ArrayRecord:
        """Return the strategy's arrays after one reply with the scheme's aggregate."""
        if self._question is None:
            raise RuntimeError("configure was not called before aggregate")
        content = RecordDict(
            {
                self.strategy.arrayrecord_key: arrays,
                "metrics": MetricRecord({**metrics, self.strategy.weighted_by_key: weight}),
            }
        )
        reply = Message(content, reply_to=self._question)
        stepped, _ = self.strategy.aggregate_train(server_round, [reply])
        if stepped is None:
            raise RuntimeError(f"{type(self.strategy).__name__} returned no arrays")
        return stepped

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy's own state: arrays and numbers that are no constructor arguments."""
        return {
            name: _as_arrays(value)
            for name, value in vars(self.strategy).items()
            if name not in self._given and _is_state(value)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        vars(self.strategy).update(state)


def _is_state(value: Any) -> bool:
    if isinstance(value, dict) and not isinstance(value, ArrayRecord):
        return all(isinstance(item, _NUMPY) for item in value.values())
    if isinstance(value, list):
        return all(isinstance(item, _NUMPY) for item in value)
    return isinstance(value, int | float | np.ndarray)


def _as_arrays(value: Any) -> Any:
    # Arithmetic on arrays without dimensions leaves NumPy scalars, whose dtype must last as well.
    if isinstance(value, dict):
        return {name: np.asarray(item) for name, item in value.items()}
    if isinstance(value, list):
        return [np.asarray(item) for item in value]
    return value


class _OneNode(Grid):
    """A Flower grid with one node, from which an inner strategy samples; it sends nothing."""

    def get_node_ids(self) -> Iterable[int]:
        return [_NODE]

    def _no(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("an inner strategy only configures and aggregates")

    run = property(_no)
    set_run = create_message = push_messages = pull_messages = send_and_receive = _no
