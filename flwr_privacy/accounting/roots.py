"""Finds a root of a function."""

from collections.abc import Callable

__all__ = ["root"]

_RELATIVE = 2.0**-50  # the least that `brentq` takes
_STEPS = 1000


def root(
    function: Callable[[float], float],
    low: float,
    high: float,
    *,
    absolute: float,
    relative: float = _RELATIVE,
) -> float:
    """Return a root of a continuous function between `low` and `high` (Brent's method).

    Parameters
    ----------
    function : callable
        The function; its values at `low` and `high` have different signs, or one of them is 0.
    low, high : float
        Ends of the interval.
    absolute, relative : float
        How far off the result may be; `relative` is 2**-50 by default.

    Raises
    ------
    ValueError
        If the values at the ends have the same sign.

    Examples
    --------
    >>> round(root(lambda x: x * x - 2, 0, 2, absolute=1e-12), 6)
    1.414214
    """
    # Imported late: it takes half a second, and a deployed client has a process for each message.
    from scipy.optimize import brentq

    return float(brentq(function, low, high, xtol=absolute, rtol=relative, maxiter=_STEPS))
