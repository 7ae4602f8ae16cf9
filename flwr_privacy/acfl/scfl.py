"""Stochastic coded learning, which the paper compares with: projected data with noise.

"Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv, 2024)
says of it: a random projection and noise on the local data, an unbiased gradient, equal weights.
The formulas below fill that in and are not in the paper.

Symbols: c coded rows, s variance of the noise on the projected features, N devices. With c = d an
upload is as large as ACFL's.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

from .encoding import gradient

__all__ = [
    "Projected",
    "encode_projected",
    "eps_projected",
    "projected_gradient",
    "projected_mse",
    "sigma2_for_eps_projected",
]

_SMALLEST = math.ulp(0.0)

Array = NDArray[np.float64]


class Projected(NamedTuple):
    """A device's projected data; those of several devices are added."""

    features: Array
    """Random combinations of the rows of X, with noise; shape (c, d)."""

    labels: Array
    """The same combinations of the rows of Y, without noise; shape (c, o)."""


def encode_projected(X: Array, Y: Array, c: int, s: float, rng: np.random.Generator) -> Projected:
    """Return ``Gamma X + E`` and ``Gamma Y``: Gamma (c, m) standard normal, E of variance s.

    For simulation: the noise is of floating point and from an ordinary generator.

    Parameters
    ----------
    X, Y : ndarray
        Features (m, d) and labels (m, o).
    c : int
        Coded rows, at least 1.
    s : float
        Variance of the noise, at least 0.
    rng : numpy.random.Generator
        Source of the projection and of the noise.
    """
    check_integer("c", c, minimum=1)
    scale = math.sqrt(check_number("s", s, minimum=0))
    projection = rng.standard_normal((c, len(X)))
    return Projected(
        projection @ X + rng.normal(0.0, scale, (c, X.shape[1])),
        projection @ Y,
    )


def projected_gradient(
    Xt: Array, Yt: Array, W: Array, *, devices: int, s: float, c: int, make_up: bool = True
) -> Array:
    """Return the gradient that the summed projected data give.

    ``Xt^T (Xt W - Yt) / c - N s W``.

    Parameters
    ----------
    Xt, Yt : ndarray
        Sums over the devices, shapes (c, d) and (c, o).
    W : ndarray
        Model, shape (d, o).
    devices : int
        Number of devices in the sums, N.
    s, c
        As in `encode_projected`.
    make_up : bool, default True
        Whether to subtract ``N s W``, which is what the square of the noise adds in expectation.
    """
    check_integer("devices", devices, minimum=1)
    check_number("s", s, minimum=0)
    check_integer("c", c, minimum=1)
    result: Array = Xt.T @ (Xt @ W - Yt) / c
    return result - devices * s * W if make_up else result


def eps_projected(c: int, s: float) -> float:
    """Return the nats that an encoding tells of one feature, ``ln(1 + c / s) / 2``, at most.

    For features in [-1, 1], and even for somebody who knows the projection. It is no bound for an
    entry of the labels, which get no noise.

    Examples
    --------
    >>> round(eps_projected(10, sigma2_for_eps_projected(1.0, 10)), 12)
    1.0
    """
    check_integer("c", c, minimum=1)
    if check_number("s", s, minimum=0) == 0:
        return math.inf
    return math.log1p(c / s) / 2


def sigma2_for_eps_projected(eps: float, c: int) -> float:
    """Return the variance at which `eps_projected` is `eps`: ``c / (exp(2 eps) - 1)``.

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
    twice = 2 * check_number("eps", eps, minimum=_SMALLEST)
    s = c * math.exp(-twice) / -math.expm1(-twice)
    if not 0 < s < math.inf:
        raise InvalidParameterError("eps", eps, "a level that some variance gives")
    return s


def projected_mse(data: Sequence[tuple[Array, Array]], W: Array, *, c: int, s: float) -> float:
    """Return the expected squared error of `projected_gradient` at a fixed model.

    ``(tr(Sx) tr(Sz) + |Sxz|_F^2) / c``, with the sums over all devices
    ``Sx = X^T X + N s I``, ``Sz = R^T R + N s W^T W`` and ``Sxz = X^T R + N s W``, where
    ``R = X W - Y``. The projection and the noise are drawn anew; the make-up term is on.

    Parameters
    ----------
    data : sequence of tuple of ndarray
        Features (m_i, d) and labels (m_i, o) of each device.
    W : ndarray
        Model, shape (d, o).
    c, s
        As in `encode_projected`.
    """
    check_integer("c", c, minimum=1)
    total = len(data) * check_number("s", s, minimum=0)
    residuals = [X @ W - Y for X, Y in data]
    trace_x = math.fsum(float(np.sum(X**2)) for X, _ in data) + total * len(W)
    trace_z = math.fsum(float(np.sum(R**2)) for R in residuals) + total * float(np.sum(W**2))
    cross = sum((gradient(X, Y, W) for X, Y in data), start=total * W)
    return (trace_x * trace_z + float(np.sum(cross**2))) / c
