"""Federated averaging on the client, with updates that go into a secure sum."""

from typing import Any, ClassVar

import numpy as np

from flwr_privacy.clients.node.base import SchemeClient, Train
from flwr_privacy.clients.node.client_app import SchemeClientApp
from flwr_privacy.errors import ProtocolError
from flwr_privacy.pipeline.mechanism import Answer, Unprotected
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.grid import GridMean
from flwr_privacy.privacy.updates import Update
from flwr_privacy.secure_sum.fedavg_terms import FedAvgSumTerms
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS, TRAIN, Fields

__all__ = ["SecureSumClient", "SecureSumClientApp"]

_WEIGHT = "num-examples"


class SecureSumClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.FedAvg` under a secure sum.

    Put it around any training. Its update goes, weighted by its number of examples, into a sum that
    the server opens as a whole. Metrics of the training are not sent.

    Guarantee
    ---------
    That of `flwr_privacy.secure_sum.Participant`; it answers nothing outside of a secure sum. Keys
    of the others are believed to be what the server says they are, unless the node pins them
    (``privacy-pins`` in its configuration).
    """

    scheme: ClassVar[str] = "fedavg"
    sums: ClassVar[str] = "only"

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Unprotected:
        """Return the release of an update as codes, and of its weight."""
        return Unprotected(lambda _: self._codes(FedAvgSumTerms.read(fields), dict(arrays), train))

    def _codes(self, terms: FedAvgSumTerms, start: Arrays, train: Train) -> Answer:
        """Train; return the update as codes, and the weight.

        Raises
        ------
        DataError
            If the update is not finite or goes beyond the range that was agreed on.
        ProtocolError
            If the weight is no whole number.
        """
        names = terms.names(start)
        trained = train(start)
        weight = 1
        if terms.weighted_by:
            examples: Any = trained.metrics.get(terms.weighted_by)
            number = isinstance(examples, int | float | np.number)
            if not number or not float(examples).is_integer():
                raise ProtocolError(
                    f"the metric '{terms.weighted_by}' is no whole number: a secure sum needs "
                    "whole weights"
                )
            weight = int(examples)
        update = Update.between(start, trained.arrays, names)
        codes = terms.codes(update.vector, "the update")
        return update.arrays(codes), {METRICS: {_WEIGHT: weight}}

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of codes for a training."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        terms = FedAvgSumTerms.read(fields)
        return GridMean(arrays, terms.grid, terms.names(arrays))


class SecureSumClientApp(SchemeClientApp):
    """Flower's ClientApp with `SecureSumClient` around it; see `SchemeClientApp`."""

    scheme_client = SecureSumClient
