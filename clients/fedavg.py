"""Federated averaging: the scheme that passes everything through and protects nothing."""

from typing import ClassVar

from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import Metrics
from flwr_privacy.wire import METRICS, Fields

from .base import Evaluate, SchemeClient, Train

__all__ = ["FedAvgClient"]


class FedAvgClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.FedAvg` (McMahan et al. 2017, algorithm 1).

    Guarantee
    ---------
    None: the server sees the arrays and the metrics of every client. A node's policy binds it like
    every scheme: ``schemes`` must name it, and a node with ``max_epsilon``, ``units``, a least
    noise or ``min_summed`` declines.
    """

    scheme: ClassVar[str] = "fedavg"
    bare: ClassVar[bool] = True

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Train and hand on what came out.

        Raises
        ------
        DeclinedError
            If the node's policy does not allow it.
        LedgerError
            If the policy cannot be read.
        """
        self._check()
        trained = train(arrays)
        return trained.arrays, {METRICS: trained.metrics}

    def judge(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Metrics:
        """Return all metrics of the evaluation; raises what `handle` does."""
        self._check()
        return evaluate()

    def _check(self) -> None:
        self.check_unsummed()
        self.check_unaccounted()
