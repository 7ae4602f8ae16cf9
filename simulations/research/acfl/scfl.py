"""Stochastic coded learning in simulation: an encoding, and its gradient's error.

The formulas are those of `flwr_privacy.acfl.scfl`, where the symbols are explained.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import Moments, gradient
from flwr_privacy.errors import check_integer, check_number

__all__ = ["encode_projected", "projected_mse"]

Array = NDArray[np.float64]


def encode_projected(X: Array, Y: Array, c: int, s: float, rng: np.random.Generator) -> Moments:
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
    return Moments(
        projection @ X + rng.normal(0.0, scale, (c, X.shape[1])),
        projection @ Y,
    )


def projected_mse(data: Sequence[tuple[Array, Array]], W: Array, *, c: int, s: float) -> float:
    """Return the expected squared error of the projected gradient at a fixed model.

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
