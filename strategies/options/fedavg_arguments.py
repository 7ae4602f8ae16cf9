"""FedAvg's constructor, with Flower's names, places and defaults, checked."""

from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from flwr_privacy.errors import check_integer, check_number
from flwr_privacy.wire.message import EVALUATE, TRAIN

__all__ = ["FedAvgArguments", "MetricsFn"]

MetricsFn = Callable[[list[RecordDict], str], MetricRecord]

_FLOWERS_MEAN = FedAvg().train_metrics_aggr_fn


@dataclass(eq=False, repr=False)
class FedAvgArguments(FedAvg):
    """Base of the strategies that take FedAvg's arguments.

    Parameters
    ----------
    fraction_train, fraction_evaluate, min_train_nodes, min_evaluate_nodes, \
min_available_nodes, weighted_by_key, arrayrecord_key, configrecord_key, \
train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        As in `flwr.serverapp.strategy.FedAvg`.

    Raises
    ------
    InvalidParameterError
        If a fraction or a number of clients is out of range.
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    min_available_nodes: int = 2
    weighted_by_key: str = "num-examples"
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    # Flower says None of its parameters, not of its attributes.
    train_metrics_aggr_fn: MetricsFn | None = None  # type: ignore[assignment]
    evaluate_metrics_aggr_fn: MetricsFn | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_number("fraction_train", self.fraction_train, minimum=0, maximum=1)
        check_number("fraction_evaluate", self.fraction_evaluate, minimum=0, maximum=1)
        # In a copy (`dataclasses.replace`) there is what Flower has put in the place of None.
        if self.train_metrics_aggr_fn is _FLOWERS_MEAN:
            self.train_metrics_aggr_fn = None
        if self.evaluate_metrics_aggr_fn is _FLOWERS_MEAN:
            self.evaluate_metrics_aggr_fn = None
        fractions = self.fraction_train, self.fraction_evaluate
        fewest = self.min_train_nodes, self.min_evaluate_nodes
        self._metrics_fns = {
            TRAIN: self.train_metrics_aggr_fn,
            EVALUATE: self.evaluate_metrics_aggr_fn,
        }
        super().__init__(
            min_available_nodes=self.min_available_nodes,
            weighted_by_key=self.weighted_by_key,
            arrayrecord_key=self.arrayrecord_key,
            configrecord_key=self.configrecord_key,
            train_metrics_aggr_fn=self.train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn=self.evaluate_metrics_aggr_fn,
        )
        # Set here: FedAvg's constructor warns of a fraction of 0, which is as good as any.
        self.fraction_train, self.fraction_evaluate = fractions
        self.min_train_nodes, self.min_evaluate_nodes = fewest
        check_integer("min_train_nodes", self.min_train_nodes, minimum=0)
        check_integer("min_evaluate_nodes", self.min_evaluate_nodes, minimum=0)
