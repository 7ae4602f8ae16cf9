"""Stochastic coded learning, which the paper compares with: projected data with noise.

"Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv, 2024)
says of it: a random projection and noise on the local data, an unbiased gradient, equal weights.
The formulas below fill that in and are not in the paper.

Symbols: c coded rows, s variance of the noise on the projected features, N devices. With c = d an
upload is as large as ACFL's.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting.gaussian import check_delta, delta_of
from flwr_privacy.accounting.roots import root
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

__all__ = [
    "eps_projected",
    "features_epsilon",
    "projected_gradient",
    "sigma2_for_eps_projected",
]

_SMALLEST = math.ulp(0.0)
_BINS = 512
_TAIL = 2.0**-20  # share of delta that rows of the projection may be longer with

Array = NDArray[np.float64]


def projected_gradient(Xt: Array, Yt: Array, W: Array, *, devices: int, s: float) -> Array:
    """Return the gradient that the summed projected data give.

    ``Xt^T (Xt W - Yt) / c - N s W``. The square of the noise adds ``N s W`` in expectation.

    Parameters
    ----------
    Xt, Yt : ndarray
        Sums over the devices, shapes (c, d) and (c, o).
    W : ndarray
        Model, shape (d, o).
    devices : int
        Number of devices in the sums, N.
    s : float
        Variance of the noise on the projected features, at least 0.
    """
    check_integer("devices", devices, minimum=1)
    check_number("s", s, minimum=0)
    result: Array = Xt.T @ (Xt @ W - Yt) / len(Xt)
    return result - devices * s * W


def eps_projected(c: int, s: float, *, B_X: float = 1.0) -> float:
    """Return the nats that an encoding tells of one feature: ``ln(1 + c B_X^2 / s) / 2``, at most.

    For features in [-B_X, B_X], and even for somebody who knows the projection. It is no bound for
    an entry of the labels, which get no noise.

    Examples
    --------
    >>> round(eps_projected(10, sigma2_for_eps_projected(1.0, 10)), 12)
    1.0
    """
    check_integer("c", c, minimum=1)
    check_number("B_X", B_X, minimum=0)
    if check_number("s", s, minimum=0) == 0:
        return math.inf
    return math.log1p(c * B_X**2 / s) / 2


def sigma2_for_eps_projected(eps: float, c: int, *, B_X: float = 1.0) -> float:
    """Return the variance at which an encoding tells of a feature at most `eps` nats.

    ``c B_X^2 / (exp(2 eps) - 1)``.

    Parameters
    ----------
    eps : float
        The level in nats, above 0.
    c : int
        Coded rows, at least 1.
    B_X : float, default 1.0
        Bound of the features' absolute values, above 0.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or `eps` so large that the variance rounds to 0.

    Examples
    --------
    >>> round(sigma2_for_eps_projected(0.1, 10), 2)
    45.17
    """
    check_integer("c", c, minimum=1)
    check_number("B_X", B_X, minimum=_SMALLEST)
    twice = 2 * check_number("eps", eps, minimum=_SMALLEST)
    s = c * B_X**2 * math.exp(-twice) / -math.expm1(-twice)
    if not 0 < s < math.inf:
        raise InvalidParameterError("eps", eps, "a level that some variance gives")
    return s


@lru_cache
def features_epsilon(c: int, s: float, *, distance: float, delta: float) -> float:
    """Return the epsilon of the features of one record in an encoding, where labels are known.

    Somebody who knows the projection sees a Gaussian mechanism: the record's column of it, whose
    squared length is chi-squared with c degrees of freedom, scales the record. This is the worst
    case, and it occurs: where nobody else has the record's label, ``Gamma Y`` gives its column
    away. For records whose label may differ no epsilon holds, as labels have no noise: whether a
    label occurs at all is told with certainty.

    Parameters
    ----------
    c : int
        Coded rows, at least 1.
    s : float
        Variance of the noise on the projected features, at least 0.
    distance : float
        Largest L2 distance of two records' features.
    delta : float
        Between 0 and 1.

    Examples
    --------
    >>> round(features_epsilon(10, 10.0, distance=2.0, delta=1e-5), 1)
    15.2
    """
    from scipy.special import gammainc, gammaincc, gammainccinv  # late: SciPy is not for nodes

    check_integer("c", c, minimum=1)
    check_delta(delta)
    check_number("distance", distance, minimum=0)
    if check_number("s", s, minimum=0) == 0:
        return math.inf if distance > 0 else 0.0
    longest = math.sqrt(2 * float(gammainccinv(c / 2, _TAIL * delta)))
    edges = np.linspace(0, longest, _BINS + 1)  # each bin at its far end: never too little
    shares = np.diff(gammainc(c / 2, edges**2 / 2))
    tail = float(gammaincc(c / 2, longest**2 / 2))
    mus = [edge * distance / math.sqrt(s) for edge in edges[1:].tolist()]

    def excess(epsilon: float) -> float:
        spread = math.fsum(w * delta_of(mu, epsilon) for w, mu in zip(shares, mus, strict=True))
        return math.log((spread + tail) / delta)

    if excess(0.0) <= 0:
        return 0.0
    highest = mus[-1] * (mus[-1] / 2 + math.sqrt(-2 * math.log(delta / 2)))
    return root(excess, 0.0, highest, absolute=1e-9)
