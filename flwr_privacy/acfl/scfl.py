"""Stochastic coded learning, which the paper compares with: projected data with noise.

"Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv, 2024)
says of it: a random projection and noise on the local data, an unbiased gradient, equal weights.
The formulas below fill that in and are not in the paper.

Symbols: c coded rows, s variance of the noise on the projected features, N devices. With c = d an
upload is as large as ACFL's.
"""

import math

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

__all__ = [
    "projected_gradient",
    "sigma2_for_eps_projected",
]

_SMALLEST = math.ulp(0.0)

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
