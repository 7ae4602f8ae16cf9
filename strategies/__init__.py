"""The server half of each scheme: Flower strategies on one shared loop."""

from .accounting import FlowerAccountant
from .base import SchemeStrategy
from .central_dp import CentralDP
from .experiment import SchemeResult
from .fedavg import FedAvg
from .udp import UDP

__all__ = ["UDP", "CentralDP", "FedAvg", "FlowerAccountant", "SchemeResult", "SchemeStrategy"]
