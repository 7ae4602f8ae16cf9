"""Conditions on the paper's parameters: scales that fit the field, and what the server may see.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), sections 4.2 and 5.1. The conditions are not in the paper.
"""

import math
from fractions import Fraction

from flwr_privacy.errors import check_integer, check_number
from flwr_privacy.fedvs.privacy import slack

__all__ = ["max_scale_bits", "server_view_is_tight"]

_SMALLEST = math.ulp(0.0)


def max_scale_bits(E: int, x_max: float, w_max: float, p: int) -> int:
    """Return the largest sum of both scales' bits by the simple bound, without rounding errors.

    Parameters
    ----------
    E : int
        Columns of all owners' expanded data together, at least 1.
    x_max, w_max : float
        Bounds of the absolute values of data and weights, above 0.
    p : int
        The prime, at least 3.

    Returns
    -------
    int
        The largest l with ``E * x_max * w_max * 2**l <= (p - 1) / 2``; it is negative where no
        scale fits. `Scales.check` is stricter: it allows for the rounding of both factors.

    Examples
    --------
    >>> max_scale_bits(784, 1, 2, 2**31 - 1)
    19
    """
    check_integer("E", E, minimum=1)
    check_number("x_max", x_max, minimum=_SMALLEST)
    check_number("w_max", w_max, minimum=_SMALLEST)
    check_integer("p", p, minimum=3)
    ratio = Fraction((p - 1) // 2) / (E * Fraction(x_max) * Fraction(w_max))
    bits = ratio.numerator.bit_length() - ratio.denominator.bit_length()
    return bits if ratio >= Fraction(2) ** bits else bits - 1


def server_view_is_tight(b: int, K: int, T: int, E: int) -> bool:
    """Return whether a batch is small enough for the server to see the sums and nothing more.

    It is a necessary condition for answers without masks that vanish. It is not sufficient: rows
    that repeat, are zero, or depend on one another otherwise break the condition, whatever E is.

    Parameters
    ----------
    b, K, T, E
        As of `flwr_privacy.fedvs.privacy.slack`.

    Examples
    --------
    >>> server_view_is_tight(43, 6, 1, 784), server_view_is_tight(256, 6, 1, 784)
    (True, False)
    """
    return slack(b, K, T, E) >= 0
