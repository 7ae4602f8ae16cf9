"""How like two records are: PSNR, and for images SSIM."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import gaussian_filter
from scipy.optimize import linear_sum_assignment

from flwr_privacy.errors import InvalidParameterError, check_number

__all__ = ["paired", "psnr", "ssim"]

Vectors = NDArray[np.float64]
Measure = Callable[[Vectors, Vectors], float]

MOST = 100.0
"""PSNR of what is equal to rounding, in dB."""

_WIDTH = 1.5  # of the window, in pixels
_REACH = 5  # pixels to each side
_CONSTANTS = 0.01, 0.03


def psnr(record: ArrayLike, found: ArrayLike, *, span: float) -> float:
    """Return the peak signal-to-noise ratio in dB, at most 100.

    Parameters
    ----------
    record, found : array_like
        Of the same shape.
    span : float
        Largest value minus smallest, above 0.

    Examples
    --------
    >>> psnr([0.0, 1.0], [0.1, 0.9], span=1.0)
    20.0
    """
    one, two, span = _checked(record, found, span)
    error = float(np.mean((one - two) ** 2))
    return MOST if error == 0 else min(MOST, round(10 * math.log10(span**2 / error), 6))


def ssim(record: ArrayLike, found: ArrayLike, *, span: float) -> float:
    """Return the structural similarity of two images, 1 where they are equal.

    Parameters
    ----------
    record, found : array_like, shape (height, width) or (channels, height, width)
        The images.
    span : float
        Largest value minus smallest, above 0.

    Notes
    -----
    Wang, Bovik, Sheikh and Simoncelli, "Image Quality Assessment", IEEE TIP 2004, equation 13, with
    their window: a normal law of 1.5 pixels in a square of 11. It is reflected at the borders, so
    that small images have one too; the channels are averaged.

    Examples
    --------
    >>> image = np.arange(64.0).reshape(8, 8)
    >>> ssim(image, image, span=63.0), round(ssim(image, -image, span=63.0), 1)
    (1.0, -0.6)
    """
    one, two, span = _checked(record, found, span)
    if one.ndim not in (2, 3):
        raise InvalidParameterError("record", one.shape, "an image, with its channels first")
    first, second = ((constant * span) ** 2 for constant in _CONSTANTS)
    means = _windows(one), _windows(two)
    variances = [_windows(x * x) - m * m for x, m in zip((one, two), means, strict=True)]
    common = _windows(one * two) - means[0] * means[1]
    above = (2 * means[0] * means[1] + first) * (2 * common + second)
    below = (means[0] ** 2 + means[1] ** 2 + first) * (variances[0] + variances[1] + second)
    return float(np.mean(above / below))


def paired(records: Vectors, found: Vectors, measure: Measure) -> tuple[NDArray[np.intp], Vectors]:
    """Pair each record with another of those that were found, for the largest sum of a measure.

    Parameters
    ----------
    records : ndarray, shape (n, ...)
        The truth.
    found : ndarray, shape (m, ...)
        At least as many.
    measure : callable
        Of a record and what was found.

    Returns
    -------
    places : ndarray of int, shape (n,)
        The place among those found.
    measures : ndarray, shape (n,)
        What the measure gives.

    Examples
    --------
    >>> paired(np.array([1.0, 2.0]), np.array([2.1, 1.2, 9.0]), lambda a, b: -abs(a - b))[0]
    array([1, 0])
    """
    table = np.array([[measure(a, b) for b in found] for a in records])
    rows, columns = linear_sum_assignment(table, maximize=True)
    return columns, table[rows, columns]


def _windows(image: Vectors) -> Vectors:
    width = (0.0,) * (image.ndim - 2) + (_WIDTH, _WIDTH)
    found: Vectors = gaussian_filter(image, width, mode="reflect", truncate=_REACH / _WIDTH)
    return found


def _checked(record: ArrayLike, found: ArrayLike, span: float) -> tuple[Vectors, Vectors, float]:
    one, two = np.asarray(record, np.float64), np.asarray(found, np.float64)
    if one.shape != two.shape or one.size == 0:
        raise InvalidParameterError("found", two.shape, f"the shape {one.shape}, with entries")
    if not check_number("span", span) > 0:
        raise InvalidParameterError("span", span, "a number above 0")
    return one, two, span
