"""Sums the answers of ACFL's clients: coded data sets, and gradients with their size."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.privacy.averaging import EvenWeights, WeightedMean
from flwr_privacy.privacy.grid import CodeGrid, EvenMean
from flwr_privacy.wire.arrays import Arrays

from .encoding import Moments, mirrored
from .terms import NORM_SHARE, RECORD, DataTerms, GradientTerms, SetupTerms

__all__ = [
    "FEATURES",
    "GRADIENT",
    "LABELS",
    "SIZE",
    "RoundSums",
    "coded_sum",
    "entry_bound",
    "gradient_sum",
    "moments_of",
    "round_sums",
    "size_of",
    "sums_of",
]

FEATURES, LABELS = "features", "labels"
"""Names of the arrays of a setup."""

GRADIENT, SIZE = "gradient", "size"
"""Names of the arrays of a gradient: itself, and what tells how large it is."""

_PARTS = 2.0**30  # of a step of the grid, in which the rest of a square is counted


class RoundSums(NamedTuple):
    """The sums of a round's answers.

    Parameters
    ----------
    answered : int
        How many there were.
    gradient : (d, o) float64
        Sum of their gradients.
    squares : float
        Sum of the squared norms of their gradients; where these have noise an estimate of it.
    """

    answered: int
    gradient: NDArray[np.float64]
    squares: float


def sums_of(
    mean: WeightedMean, terms: SetupTerms | GradientTerms
) -> dict[str, NDArray[np.float64]]:
    """Return the sums of the answers as float64; zeros before the first."""
    step = CodeGrid(terms.grid).step if terms.coded else 1.0
    shapes = {name: shape for name, (shape, _) in mean.template.items()}
    found = mean.sums
    return {
        name: step * found[name].reshape(shape) if name in found else np.zeros(shape)
        for name, shape in shapes.items()
    }


def coded_sum(terms: SetupTerms) -> WeightedMean:
    """Return an empty sum of local coded data sets (4)."""
    size = terms.features
    shape: tuple[int, ...] = (size * (size + 1) // 2,) if terms.symmetric else (size, size)
    return _empty({FEATURES: shape, LABELS: (size, terms.labels)}, terms)


def moments_of(sums: Arrays, terms: SetupTerms) -> Moments:
    """Return the global coded data set that some sums are."""
    features = np.asarray(sums[FEATURES], np.float64)
    if terms.symmetric:
        features = mirrored(features, terms.features)
    return Moments(features, np.asarray(sums[LABELS], np.float64))


def gradient_sum(terms: GradientTerms) -> WeightedMean:
    """Return an empty sum of gradients and of their sizes."""
    return _empty({GRADIENT: (terms.features, terms.labels), SIZE: (terms.sizes,)}, terms)


def size_of(gradient: NDArray[np.float64], terms: GradientTerms) -> NDArray[np.float64]:
    """Return what tells how large a gradient is: values that are added up beside it.

    Exact gradients have the square of the norm; in a secure sum it is scaled to the range of an
    entry, in whole codes and a second value for what is between two codes. A gradient that gets
    noise has a share of the norm, which a record moves by no more than it moves the gradient.
    """
    norm = float(np.linalg.norm(gradient))
    if terms.noise == RECORD:
        return np.array([NORM_SHARE * norm])
    if not terms.parties:
        return np.array([norm**2])
    step = CodeGrid(terms.grid).step
    between, codes = math.modf(norm**2 / _square_unit(terms) / step)
    return np.array([codes * step, between * _PARTS * step])


def round_sums(
    sums: Arrays, answered: int, terms: GradientTerms, *, size_noise: float | None = None
) -> RoundSums:
    """Return what a round's answers came to.

    Parameters
    ----------
    sums : Mapping of str to ndarray
        The sums of the arrays of the answers.
    answered : int
        How many answers there are.
    terms : GradientTerms
        What was asked.
    size_noise : float, optional
        Variance of the noise in the sum of the sizes, where these were scaled before.

    Notes
    -----
    A mini-batch is as large as its rate says, so gradients are scaled up by its inverse. The
    squares of noised gradients follow from the square of the mean of the norms, less what the noise
    adds to it: without noise that is never more than the mean square, and a little less where
    devices differ.
    """
    sizes = np.asarray(sums[SIZE], np.float64).reshape(-1)
    if terms.noise == RECORD:
        noise = answered * terms.share_of(terms.sigma) ** 2 if size_noise is None else size_noise
        squares = max(0.0, sizes[0] ** 2 - noise) / (NORM_SHARE**2 * max(1, answered))
    elif terms.parties:
        squares = max(0.0, (sizes[0] + sizes[1] / _PARTS) * _square_unit(terms))
    else:
        squares = max(0.0, float(sizes[0]))
    fraction = terms.batch_fraction
    gradient = np.asarray(sums[GRADIENT], np.float64)
    return RoundSums(answered, gradient / fraction, float(squares) / fraction**2)


def _square_unit(terms: GradientTerms) -> float:
    # A squared norm is at most the number of entries times the square of their bound.
    return terms.features * terms.labels * terms.gradient_bound if terms.parties else 1.0


def _empty(shapes: dict[str, tuple[int, ...]], terms: SetupTerms | GradientTerms) -> WeightedMean:
    start = {name: np.broadcast_to(np.zeros(()), shape) for name, shape in shapes.items()}
    if terms.coded:
        return EvenMean(start, CodeGrid(terms.grid), list(start))
    return EvenWeights(start)


def entry_bound(terms: DataTerms, model: NDArray[np.float64]) -> float:
    """Return a bound of every entry of a gradient of a client at a model.

    ``|sum_n x_nj (x_n W_k - y_nk)| <= m B_X (R_X |W_k| + B_Y)``, with R_X the bound of a row.
    """
    column = float(np.sqrt((model**2).sum(axis=0)).max(initial=0.0))
    residual = terms.feature_norm * column + terms.label_bound
    return terms.max_records * terms.feature_bound * residual
