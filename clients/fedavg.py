"""Federated averaging on the client: everything goes to the server as it is."""

from typing import ClassVar

from flwr_privacy.clients.node.base import Evaluate, SchemeClient, Train
from flwr_privacy.clients.node.client_app import SchemeClientApp
from flwr_privacy.pipeline.mechanism import Answer, Unprotected
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS, Fields

__all__ = ["FedAvgClient", "FedAvgClientApp"]


class FedAvgClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.FedAvg` (McMahan et al. 2017, algorithm 1).

    It passes everything through and protects nothing.

    Guarantee
    ---------
    None: the server sees the arrays and the metrics of every client. A node's policy binds it like
    every scheme: ``schemes`` must name it, and a node with ``max_epsilon``, ``units``, a least
    noise or ``min_summed`` declines.
    """

    scheme: ClassVar[str] = "fedavg"
    bare: ClassVar[bool] = True

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Unprotected:
        """Return the release of a training's result."""

        def work(_: object) -> Answer:
            trained = train(arrays)
            return trained.arrays, {METRICS: trained.metrics}

        return Unprotected(work)

    def release_of_evaluation(
        self, arrays: Arrays, fields: Fields, evaluate: Evaluate
    ) -> Unprotected:
        """Return all metrics of an evaluation."""
        return Unprotected(lambda _: ({}, {METRICS: evaluate()}))


class FedAvgClientApp(SchemeClientApp):
    """Flower's ClientApp with `FedAvgClient` around it; see `SchemeClientApp`."""

    scheme_client = FedAvgClient
