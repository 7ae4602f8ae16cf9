"""The mathematics of flwr-privacy: NumPy in, NumPy out, no Flower and no torch."""

from importlib.metadata import version

__version__ = version("flwr-privacy")
