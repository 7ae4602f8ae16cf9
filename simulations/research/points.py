"""What a function of an experiment is given and gives back."""

from collections.abc import Mapping
from typing import Any

__all__ = ["Point", "Values"]

Point = Mapping[str, Any]
"""A curve's settings, with the value of the sweep among them."""

Values = Mapping[str, float]
"""What a point came to, by measure."""
