"""Gaussian differential privacy in closed form: converts mu to (epsilon, delta) and back.

A release of a value of L2 sensitivity 1 with Gaussian noise of standard deviation z is 1/z-GDP, and
releases compose to the root of the sum of their squares, exactly (Dong, Roth, Su, *Gaussian
differential privacy*, JRSS B 2022, arXiv:1905.02383, corollary 3.3).
"""

import math
from collections.abc import Callable

from scipy.special import erfcx, ndtr

from flwr_privacy.errors import InvalidParameterError, check_number

from .roots import root

__all__ = ["check_delta", "delta_of", "epsilon_of", "mu_of"]

_SMALL = 0.01  # below this mu, a series: a difference would cancel
_LEAST = math.ulp(0.0)
_ABSOLUTE = 1e-300  # to which a root is found
_ROUNDING = 2.0**-50


def check_delta(delta: float) -> float:
    """Return `delta` if it lies strictly between 0 and 1.

    Raises
    ------
    InvalidParameterError
        If it does not.
    """
    if not 0 < check_number("delta", delta) < 1:
        raise InvalidParameterError("delta", delta, "a number strictly between 0 and 1")
    return float(delta)


def delta_of(mu: float, epsilon: float) -> float:
    """Return the least delta for which mu-GDP is (epsilon, delta)-DP.

    ``Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu)`` (Balle & Wang, *Improving the
    Gaussian mechanism for differential privacy*, ICML 2018, theorem 8; Dong, Roth, Su, corollary
    2.13), to 12 digits however small it is.

    Parameters
    ----------
    mu : float
        At least 0; may be infinite.
    epsilon : float
        At least 0.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(delta_of(1.0, 0.0), 6), round(delta_of(1.0, 4.377178), 9)
    (0.382925, 1e-05)
    """
    check_number("epsilon", epsilon, minimum=0)
    _check_mu(mu)
    if mu == 0 or math.isinf(mu):
        return 0.0 if mu == 0 else 1.0
    centre, half = epsilon / mu, mu / 2
    # exp(epsilon) Phi(-x - half) is density * mills(x + half): nothing overflows, little cancels.
    distance = centre - half
    density = math.exp(-distance * distance / 2) / math.sqrt(2 * math.pi)
    if density == 0:
        return 0.0 if distance > 0 else 1.0
    if mu < _SMALL:
        return density * _mills_fall(centre, half)
    if distance > 0:
        return density * (_mills(distance) - _mills(centre + half))
    return float(ndtr(-distance)) - density * _mills(centre + half)


def epsilon_of(mu: float, delta: float) -> float:
    """Return the least epsilon for which mu-GDP is (epsilon, delta)-DP, and never less.

    Parameters
    ----------
    mu : float
        At least 0; infinite gives infinity.
    delta : float
        Strictly between 0 and 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(epsilon_of(1.0, 1e-5), 6), epsilon_of(0.1, 0.1)
    (4.377178, 0.0)
    """
    check_delta(delta)
    _check_mu(mu)
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    # Concentrated DP gives an upper bound (Bun & Steinke 2016, proposition 1.3).
    highest = mu * (mu / 2 + math.sqrt(-2 * math.log(delta)))
    if math.isinf(highest):
        return math.inf
    if delta_of(mu, highest) > delta:  # by rounding, as for a mu of 1e15
        highest *= 1 + _ROUNDING
    found = root(
        lambda epsilon: _log_delta(mu, epsilon) - math.log(delta), 0.0, highest, absolute=_ABSOLUTE
    )
    return _moved(found, 1, lambda epsilon: delta_of(mu, epsilon) <= delta)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu for which mu-GDP is (epsilon, delta)-DP, and never more.

    Parameters
    ----------
    epsilon : float
        Above 0.
    delta : float
        Strictly between 0 and 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(mu_of(8, 1e-3), 4)
    2.0833
    """
    check_number("epsilon", epsilon, minimum=_LEAST)
    check_delta(delta)
    log_term = -math.log(delta)
    # The same bound, solved for mu; from there to the first power of two that is too much.
    low = math.sqrt(2) * epsilon / (math.sqrt(log_term + epsilon) + math.sqrt(log_term))
    if delta_of(low, epsilon) > delta:  # by rounding, as for an epsilon of 1e30
        low *= 1 - _ROUNDING
    while delta_of(2 * low, epsilon) <= delta:
        low *= 2
    found = root(
        lambda mu: _log_delta(mu, epsilon) - math.log(delta), low, 2 * low, absolute=_ABSOLUTE
    )
    return _moved(found, -1, lambda mu: delta_of(mu, epsilon) <= delta)


def _check_mu(mu: float) -> None:
    if mu != math.inf:
        check_number("mu", mu, minimum=0)


def _mills(x: float) -> float:
    """Return the tail of the normal law over its density, ``(1 - Phi(x)) / phi(x)``."""
    return math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))


def _mills_fall(x: float, half: float) -> float:
    """Return ``mills(x - half) - mills(x + half)`` by its Taylor series about x."""
    derivatives = [_mills(x)]
    derivatives.append(x * derivatives[0] - 1)
    for order in range(1, 5):
        derivatives.append(x * derivatives[order] + order * derivatives[order - 1])
    odd = (derivatives[n] * half**n / math.factorial(n) for n in (5, 3, 1))
    return -2 * sum(odd)


def _log_delta(mu: float, epsilon: float) -> float:
    return math.log(max(delta_of(mu, epsilon), _LEAST))


def _moved(value: float, direction: int, holds: Callable[[float], bool]) -> float:
    """Return `value`, moved by as few units in the last place as it takes until `holds`."""
    step = direction * math.ulp(value)
    while not holds(value):
        value += step
        step *= 2
    return value
