"""How much of a change of a model is the step that each of some records asks for: a regression.

A change is taken for a sum of the records' gradients, each with a coefficient of its own, plus
noise. Gradients of records are alike, so cosines say little of one of them; the regression takes
away what the others explain. Its ridge, the noise over the coefficients' variance, is what makes
the change likeliest.

Source: MacKay, "Bayesian Interpolation", Neural Computation 1992 (the evidence for a ridge).
"""

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["shares"]

_RIDGES = np.logspace(-6, 6, 49)
_SINGULAR = 1e-10  # of the largest eigenvalue

Vector = NDArray[np.float64]


def shares(gradients: NDArray[np.floating], change: Vector) -> Vector:
    """Return the coefficient of each gradient, taken with length 1, in a change.

    Parameters
    ----------
    gradients : (n, d) float
        Of the records.
    change : (d,) float64
        Minus the change of the model.

    Examples
    --------
    >>> gradients = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    >>> shares(gradients, np.array([0.0, 3.0, 0.0])).round(1)
    array([-3. ,  4.2])
    """
    lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
    rows = gradients / np.maximum(lengths, np.finfo(lengths.dtype).tiny)
    values, axes = np.linalg.eigh((rows @ rows.T).astype(np.float64))
    kept = values > _SINGULAR * values[-1]
    values, axes = values[kept], axes[:, kept]
    along = axes.T @ (rows @ change)
    square = along**2 / values  # of the change, on each axis
    rest = max(float(change @ change - square.sum()), 1e-12 * float(change @ change))
    ridge = max(_RIDGES, key=lambda one: _evidence(one, values, square, rest, change.size))
    return np.asarray(axes @ (along / (values + ridge)), np.float64)


def _evidence(ridge: float, values: Vector, square: Vector, rest: float, size: int) -> float:
    """Return the log likelihood of a change, with the likeliest variance of its noise."""
    stretch = values / ridge + 1
    variance = (float((square / stretch).sum()) + rest) / size
    return -0.5 * float(np.log(stretch).sum()) - 0.5 * size * math.log(max(variance, 1e-300))
