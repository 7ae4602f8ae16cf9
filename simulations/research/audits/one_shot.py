"""Estimates user-level epsilon from one training, by canary clients in random directions.

Every canary is a client whose update is a random direction of the full length. Random directions of
many dimensions are nearly at right angles, so the cosines between the sum of all releases and the
directions that took part are compared with those of directions that did not, whose law is known:
normal with variance one over the dimension.

It is an estimate and no bound: it takes both laws for normal, it is about an adversary who sees
this sum alone, and other clients who pull in the same direction would move it.

Source: Andrew, Kairouz, Oh, Oprea, McMahan and Suriyakumar, "One-shot Empirical Privacy Estimation
for Federated Learning", ICLR 2024 (arXiv 2302.03098), section 3.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from flwr_privacy.errors import InvalidParameterError

__all__ = ["OneShot", "normal_epsilon", "one_shot"]

Vector = NDArray[np.float64]

_HALVINGS = 60
_HIGHEST = 1e6


@dataclass(frozen=True, kw_only=True)
class OneShot:
    """An estimate from one training.

    Parameters
    ----------
    canaries, dimension : int
        How many there were, in how many dimensions.
    mean, deviation : float
        Of their cosines, times the root of the dimension; without any influence 0 and 1.
    epsilon, delta : float
        The estimate: for a client that is there or not.
    """

    canaries: int
    dimension: int
    mean: float
    deviation: float
    epsilon: float
    delta: float


def one_shot(total: Vector, directions: Vector, *, delta: float) -> OneShot:
    """Return the estimate.

    Parameters
    ----------
    total : (d,) float64
        The sum of all releases.
    directions : (k, d) float64
        Directions of the canaries, of length 1; two at least.
    delta : float
        Strictly between 0 and 1.

    Raises
    ------
    InvalidParameterError
        If there are too few canaries.

    Examples
    --------
    >>> draws = np.random.default_rng(0)
    >>> directions = draws.normal(size=(40, 1000))
    >>> directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    >>> noise = draws.normal(size=1000)
    >>> round(one_shot(noise, directions, delta=1e-5).epsilon, 1)
    2.8
    >>> round(one_shot(noise + 4 * directions.sum(axis=0), directions, delta=1e-5).epsilon, 1)
    18.9
    """
    count, dimension = directions.shape
    if count < 2:
        raise InvalidParameterError("directions", count, "two canaries at least")
    cosines = directions @ total / np.linalg.norm(total) * math.sqrt(dimension)
    mean, deviation = float(cosines.mean()), float(cosines.std(ddof=1))
    return OneShot(
        canaries=count,
        dimension=dimension,
        mean=mean,
        deviation=deviation,
        epsilon=normal_epsilon(mean, deviation, delta),
        delta=delta,
    )


def normal_epsilon(mean: float, deviation: float, delta: float) -> float:
    """Return epsilon between N(0, 1) and N(mean, deviation^2) at delta, either way.

    Examples
    --------
    >>> round(normal_epsilon(1.0, 1.0, 1e-5), 3)  # that of a Gaussian mechanism with mu = 1
    4.377
    """
    low, high = 0.0, 1.0
    while _delta(mean, deviation, high) > delta and high < _HIGHEST:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(mean, deviation, middle) > delta else (low, middle)
    return high


def _delta(mean: float, deviation: float, epsilon: float) -> float:
    """Return the larger one of both deltas at epsilon."""
    there, not_there = (mean, deviation), (0.0, 1.0)
    return max(_one_way(there, not_there, epsilon), _one_way(not_there, there, epsilon))


def _one_way(p: tuple[float, float], q: tuple[float, float], epsilon: float) -> float:
    """Return how much more likely p is than e^epsilon times q, where it is."""
    (m, s), (n, t) = p, q
    # ln p / q = a x^2 + b x + c
    a = 1 / (2 * t**2) - 1 / (2 * s**2)
    b = m / s**2 - n / t**2
    c = n**2 / (2 * t**2) - m**2 / (2 * s**2) + math.log(t / s) - epsilon
    if abs(a) < 1e-12:
        if b == 0:
            return max(0.0, 1 - math.exp(min(epsilon, 700.0))) if c > 0 else 0.0
        root = -c / b
        inside = [(root, math.inf)] if b > 0 else [(-math.inf, root)]
    else:
        square = b**2 - 4 * a * c
        if square <= 0:
            inside = [(-math.inf, math.inf)] if a > 0 else []
        else:
            first, second = sorted((-b + sign * math.sqrt(square)) / (2 * a) for sign in (-1, 1))
            outer = [(-math.inf, first), (second, math.inf)]
            inside = outer if a > 0 else [(first, second)]
    return sum(
        _mass(m, s, low, high) - math.exp(min(epsilon, 700.0)) * _mass(n, t, low, high)
        for low, high in inside
    )


def _mass(mean: float, deviation: float, low: float, high: float) -> float:
    first, last = (low - mean) / deviation, (high - mean) / deviation
    if first > 0:  # in the tail that floats have digits for
        first, last = -last, -first
    return float(ndtr(last) - ndtr(first))
