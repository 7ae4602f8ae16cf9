"""Types of a function of an experiment: the points that it gets and the values it returns."""

from collections.abc import Mapping
from typing import Any

__all__ = ["Point", "Values"]

Point = Mapping[str, Any]
"""A curve's settings, with the value of the sweep among them."""

Values = Mapping[str, float]
"""What a point came to, by measure."""
