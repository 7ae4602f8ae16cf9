"""The mathematics of flwr-privacy: NumPy in, NumPy out, no Flower and no torch."""

# Here and not in pyproject.toml: looking up metadata fails where no file can be opened.
__version__ = "0.1.0"
