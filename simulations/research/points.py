"""Points that a function of an experiment gets, the values it returns, and how they are written."""

from collections.abc import Mapping
from typing import Any

__all__ = ["Point", "Values", "in_digits"]

Point = Mapping[str, Any]
"""A curve's settings, with the value of the sweep among them."""

Values = Mapping[str, float]
"""What a point came to, by measure."""


def in_digits(value: float, digits: int) -> str:
    """Return a number in so many significant digits, without an exponent.

    Examples
    --------
    >>> in_digits(35_912.0, 3), in_digits(0.0673, 2)
    ('35,900', '0.067')
    """
    return f"{float(f'{value:.{digits}g}'):,.10g}"
