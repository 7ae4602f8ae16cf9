"""Computes the Rényi divergence of a Poisson-sampled Gaussian release whose element is replaced.

dp-accounting has no such curve. The divergence is that of the pair P, Q in
`flwr_privacy.accounting.neighbours`, which bounds that of every two neighbours.
"""

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["replaced_divergence"]

_LOG_ERROR = 40.0  # the sum is off by a relative 2 exp(-40)
_REACH = 12.0  # standard deviations, beyond which the integrand is left out: 1e-32 of it
_MOST_POINTS = 2**16
_ROUNDING = 1e-14  # relative; of float64 in such a sum


def replaced_divergence(
    orders: NDArray[np.float64], noise_multiplier: float, sampling: float
) -> NDArray[np.float64]:
    """Return the divergence at each order, or an upper bound of it.

    Parameters
    ----------
    orders : (n,) float64
        Rényi orders, above 1.
    noise_multiplier : float
        Noise over the distance of two elements.
    sampling : float
        Rate of the Poisson sample, above 0 and below 1.

    Notes
    -----
    In units of the noise the elements are at s and -s, with ``s = 1 / (2 noise_multiplier)``. The
    divergence of order l is ``log(integral of P^l Q^(1 - l)) / (l - 1)``. It is at most that
    without a sample, ``l / (2 noise_multiplier^2)`` (joint quasi-convexity), which stands in where
    a sum would need more than 2^16 points: for large orders with little noise.

    *Where it is summed.* For x < 0 the integrand is at most P, as P <= Q there; below -12 that is
    less than 1e-32, and the integral is at least 1. The logarithm of the integrand has a derivative
    of at most ``(2 l - 1) s - x``, so beyond ``(2 l - 1) s + 12`` it is negligible as well.

    *The step.* On a strip of half-width w about the real line, ``s w < pi``, the integrand is
    analytic, and at most ``exp(w^2 / 2) cos(s w / 2)^(1 - l)`` times what it is on the real line:
    the first is of the normal density, the second of the sum in Q, whose terms are no more than
    ``s w`` apart in angle. So the trapezoidal sum of step h is off by a relative
    ``2 exp(w^2 / 2) cos(s w / 2)^(1 - l) / (exp(2 pi w / h) - 1)`` at most (Trefethen & Weideman,
    *The exponentially convergent trapezoidal rule*, SIAM Review 2014, theorem 5.1). With
    ``-log cos(z) <= 4 z^2 / 7`` for z up to pi / 4 this gives h.

    Examples
    --------
    >>> replaced_divergence(np.array([2.0]), 1.0, 0.5).round(6)
    array([0.235519])
    """
    return np.array([_divergence(float(order), noise_multiplier, sampling) for order in orders])


def _divergence(order: float, noise_multiplier: float, sampling: float) -> float:
    shift = 1 / (2 * noise_multiplier)
    without_sample = order / (2 * noise_multiplier**2)
    growth = 0.5 + (order - 1) * shift**2 / 7
    width = min(math.sqrt(_LOG_ERROR / growth), math.pi / (2 * shift))
    step = 2 * math.pi * width / (growth * width**2 + _LOG_ERROR)
    top = (2 * order - 1) * shift + _REACH
    points = math.ceil((top + _REACH) / step) + 1
    if points > _MOST_POINTS:
        return without_sample
    x = -_REACH + step * np.arange(points, dtype=np.float64)
    ratio = _log_density(x, shift, sampling) - _log_density(x, -shift, sampling)
    exponent = _log_density(x, shift, sampling) + (order - 1) * ratio
    largest = float(exponent.max())
    total = float(np.exp(exponent - largest).sum()) * step * (1 + _ROUNDING * math.sqrt(points))
    logarithm = largest + math.log(total)
    # What is added is for the rounding of the exponents.
    slack = _ROUNDING * (1 + abs(largest))
    return min(without_sample, max(0.0, logarithm + slack) / (order - 1))


def _log_density(x: NDArray[np.float64], shift: float, sampling: float) -> NDArray[np.float64]:
    """Return the logarithm of the density of N(0, 1), sampled with N(shift, 1)."""
    moved = math.log(sampling) + shift * x - shift**2 / 2
    normal = -x * x / 2 - math.log(2 * math.pi) / 2
    return normal + np.logaddexp(math.log1p(-sampling), moved)
