"""The server half of each scheme: Flower strategies on one shared loop."""

from .base import SchemeResult, SchemeStrategy
from .fedavg import FedAvg

__all__ = ["FedAvg", "SchemeResult", "SchemeStrategy"]
