"""Federated averaging on the shared loop: the baseline, and the proof of the loop."""

from typing import ClassVar

from flwr_privacy.guarantee import Guarantee

from .base import SchemeStrategy

__all__ = ["FedAvg"]


class FedAvg(SchemeStrategy):
    """Federated averaging (McMahan et al. 2017, algorithm 1); replaces Flower's FedAvg in place.

    The clients' app is wrapped in `flwr_privacy.clients.FedAvgClient`.

    Guarantee
    ---------
    None: the server sees the arrays and the metrics of every client.

    Examples
    --------
    >>> from flwr_privacy.strategies import FedAvg
    >>> strategy = FedAvg(fraction_train=0.5, seed=1)
    """

    scheme: ClassVar[str] = "fedavg"

    def guarantee(self) -> Guarantee:
        """Return that nothing is promised."""
        return Guarantee(scheme=self.scheme, protects="nothing", adversary="nobody")
