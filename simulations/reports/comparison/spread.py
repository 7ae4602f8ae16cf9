"""Means over seeds, with their standard errors, as numbers and as text."""

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["mean_and_error", "spread_text"]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of some values and its standard error; NaN where there is none.

    Examples
    --------
    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    >>> mean_and_error([1.0])
    (1.0, nan)
    """
    count = len(values)
    mean = float(np.mean(values)) if count else math.nan
    spread = float(np.std(values, ddof=1)) if count > 1 else math.nan
    return mean, spread / math.sqrt(max(1, count))


def spread_text(mean: float, error: float, *, sign: str = "", failed: str = "diverged") -> str:
    """Return a mean with its standard error, if there is one; `failed` where the mean is none.

    Examples
    --------
    >>> spread_text(0.91234, 0.0123), spread_text(3.0, math.nan), spread_text(math.nan, 1.0)
    ('0.9123 ± 0.012', '3', 'diverged')
    """
    if math.isnan(mean):
        return failed
    return f"{mean:{sign}.4g}" + (f" ± {error:.2g}" if math.isfinite(error) else "")
