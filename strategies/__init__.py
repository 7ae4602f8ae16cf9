"""The server half of each scheme: Flower strategies on one shared loop."""

from .base import SchemeStrategy
from .experiment import SchemeResult
from .fedavg import FedAvg

__all__ = ["FedAvg", "SchemeResult", "SchemeStrategy"]
