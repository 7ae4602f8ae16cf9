r"""Defines the factors of the matrix-factorisation mechanism, as exact dyadic numbers.

The release of round t is :math:`y_t = x_t + (C^{-1} z)_t`: noise z that is independent over the
rounds, made negatively correlated by a lower-triangular factor C. What an adversary learns is what
it would learn from :math:`C x + z`, so the noise must cover the sensitivity of :math:`C x`
(`flwr_privacy.central_dp.correlated.sensitivity`). The model depends on the sums of all releases so
far, and in these most of the noise cancels (`flwr_privacy.central_dp.correlated.errors`).

Sources: Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling", ICML
2021 (DP-FTRL, the tree); Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", NeurIPS
2023, arXiv 2306.08153; Dvijotham et al., "Efficient and Near-Optimal Noise Generation for Streaming
Differential Privacy", FOCS 2024, arXiv 2404.16706 (buffered Toeplitz).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer

__all__ = [
    "FRACTION_BITS",
    "LARGEST_SUM",
    "BufferedToeplitzFactor",
    "Factor",
    "ToeplitzFactor",
    "TreeFactor",
    "inverse_column",
]

FRACTION_BITS = 16
"""Coefficients are integers over ``2**FRACTION_BITS``.

A numerator is at most 2^16, and `LARGEST_SUM` bounds the sum of a column by 127. So the weighted
sum of noise values up to 2^40 stays below 2^16 * 127 * 2^40 < 2^63, and int64 holds it exactly. A
coefficient is off by at most 2^-17, which costs less than 0.01 % of the error.
"""

LARGEST_SUM = 127
"""Largest sum of a factor's column; square-root coefficients reach it with about 12,600 bands."""

_ONE = 2**FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class ToeplitzFactor:
    """A lower-triangular Toeplitz factor: row t has ``c_0`` on the diagonal, ``c_1`` before it.

    Parameters
    ----------
    coefficients : tuple of int
        Numerators of c_0, c_1, ... over ``2**FRACTION_BITS``. They begin with
        ``2**FRACTION_BITS``, do not increase and are not negative; their sum is at most
        ``LARGEST_SUM * 2**FRACTION_BITS``.

    Raises
    ------
    InvalidParameterError
        If the coefficients are not of that kind.

    Examples
    --------
    >>> ToeplitzFactor(coefficients=(2**16, 2**15)).column(4).tolist()
    [1.0, 0.5, 0.0, 0.0]
    """

    coefficients: tuple[int, ...]

    def __post_init__(self) -> None:
        numerators = _integers("coefficients", self.coefficients, minimum=0, maximum=_ONE)
        if numerators[0] != _ONE or any(a < b for a, b in pairwise(numerators)):
            allowed = f"integers that begin with {_ONE} and do not increase"
            raise InvalidParameterError("coefficients", self.coefficients, allowed)
        if sum(numerators) > LARGEST_SUM * _ONE:
            allowed = f"a sum of at most {LARGEST_SUM * _ONE}"
            raise InvalidParameterError("coefficients", self.coefficients, allowed)

    @property
    def bands(self) -> int:
        """Number of coefficients: a release depends on the noise of the last ``bands`` rounds."""
        return len(self.coefficients)

    def column(self, rounds: int) -> NDArray[np.float64]:
        """Return the first column of C, exactly.

        Returns
        -------
        ndarray of float64, shape (rounds,)
            The coefficients, cut or filled up with zeros.
        """
        check_integer("rounds", rounds, minimum=1)
        column = np.zeros(rounds)
        numerators = self.coefficients[:rounds]
        column[: len(numerators)] = numerators
        column /= _ONE
        return column


@dataclass(frozen=True, kw_only=True)
class BufferedToeplitzFactor:
    r"""A Toeplitz factor whose coefficients are a sum of a few geometric sequences (BLT).

    :math:`c_0 = 1` and :math:`c_i = \sum_j \mathrm{scale}_j \, \mathrm{decay}_j^{i-1}` from i = 1
    on. Such a column is never negative and never increases. The noise of a round needs one buffer
    per sequence, no matter how many rounds there are.

    Parameters
    ----------
    scales : tuple of int
        Numerators over ``2**FRACTION_BITS``, above 0; their sum, which is c_1, is at most
        ``2**FRACTION_BITS``.
    decays : tuple of int
        Numerators over ``2**FRACTION_BITS``, from 0 to below ``2**FRACTION_BITS``.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, there are not as many scales as decays, or the sum of the
        infinite column is above `LARGEST_SUM`.

    Notes
    -----
    Buffers that are multiplied by their scale, ``b <- decay b + scale w``, stay below `LARGEST_SUM`
    times the largest noise value; without the scale they need not.

    Examples
    --------
    >>> BufferedToeplitzFactor(scales=(2**15,), decays=(2**14,)).column(4).tolist()
    [1.0, 0.5, 0.125, 0.03125]
    """

    scales: tuple[int, ...]
    decays: tuple[int, ...]

    def __post_init__(self) -> None:
        scales = _integers("scales", self.scales, minimum=1, maximum=_ONE)
        decays = _integers("decays", self.decays, minimum=0, maximum=_ONE - 1)
        if len(scales) != len(decays):
            raise InvalidParameterError("decays", self.decays, f"{len(scales)} values, as scales")
        if sum(scales) > _ONE:
            raise InvalidParameterError("scales", self.scales, f"a sum of at most {_ONE}")
        if self.total > LARGEST_SUM:
            allowed = f"values with which the column's sum is at most {LARGEST_SUM}"
            raise InvalidParameterError("decays", self.decays, allowed)

    @property
    def total(self) -> float:
        """Sum of the column over infinitely many rounds."""
        pairs = zip(self.scales, self.decays, strict=True)
        return math.fsum([1.0, *(scale / (_ONE - decay) for scale, decay in pairs)])

    def column(self, rounds: int) -> NDArray[np.float64]:
        """Return the first column of C, each value to a few units in the last place.

        Returns
        -------
        ndarray of float64, shape (rounds,)
        """
        check_integer("rounds", rounds, minimum=1)
        scales, decays = np.array(self.scales) / _ONE, np.array(self.decays) / _ONE
        powers = decays[:, np.newaxis] ** np.arange(rounds - 1)
        return np.concatenate([[1.0], (scales[:, np.newaxis] * powers).sum(axis=0)])


@dataclass(frozen=True, kw_only=True)
class TreeFactor:
    """The binary tree: a node per round, over the rounds that its sum adds up.

    The node that is complete after e rounds covers the last ``2**h`` of them, where ``2**h`` is the
    largest power of two that divides e. The noise of the sum of the first e rounds is that of this
    node plus the noise of the sum of the first ``e - 2**h``: one node per binary digit 1 of e.
    Right children of the usual tree are left out, since no such sum uses them.

    Parameters
    ----------
    rounds : int
        Number of rounds, >= 1.

    Raises
    ------
    InvalidParameterError
        If it is no integer or below 1.

    Examples
    --------
    >>> TreeFactor(rounds=4).matrix()
    array([[1., 0., 0., 0.],
           [1., 1., 0., 0.],
           [0., 0., 1., 0.],
           [1., 1., 1., 1.]])
    """

    rounds: int

    def __post_init__(self) -> None:
        check_integer("rounds", self.rounds, minimum=1)

    def matrix(self) -> NDArray[np.float64]:
        """Return which rounds each node covers.

        Returns
        -------
        ndarray of float64, shape (rounds, rounds)
            Row e - 1 is the node that is complete after e rounds.
        """
        after = np.arange(1, self.rounds + 1)[:, np.newaxis]
        index = np.arange(self.rounds)
        covered = (index < after) & (index >= after - (after & -after))
        return covered.astype(np.float64)


Factor = ToeplitzFactor | BufferedToeplitzFactor | TreeFactor


def inverse_column(
    factor: ToeplitzFactor | BufferedToeplitzFactor, rounds: int
) -> NDArray[np.float64]:
    r"""Return the first column of the inverse of a Toeplitz factor, which is Toeplitz too.

    It is for errors, not for noise: the values are rounded.

    Parameters
    ----------
    factor : ToeplitzFactor or BufferedToeplitzFactor
    rounds : int
        Number of rounds, >= 1.

    Returns
    -------
    ndarray of float64, shape (rounds,)

    Notes
    -----
    The sums of the column from its beginning lie in [0, 1]. As generating functions,
    :math:`(1 - x) C(x) = 1 - \sum_i (c_{i-1} - c_i) x^i`, and the :math:`c_{i-1} - c_i` are not
    negative and add up to at most 1. So they are the law of a waiting time, and the coefficients of
    :math:`1 / ((1 - x) C(x))`, which are these sums, are the probabilities of a renewal at a time.

    Examples
    --------
    >>> inverse_column(ToeplitzFactor(coefficients=(2**16, 2**15)), 4).tolist()
    [1.0, -0.5, 0.25, -0.125]
    """
    from scipy.signal import lfilter  # here: a deployed client does not need it

    start = np.zeros(check_integer("rounds", rounds, minimum=1))
    start[0] = 1.0
    numerator = np.ones(1)
    if isinstance(factor, BufferedToeplitzFactor):
        scales, decays = np.array(factor.scales) / _ONE, np.array(factor.decays) / _ONE
        denominator, numerator = rational(scales, decays)
    else:
        denominator = np.array(factor.coefficients[:rounds]) / _ONE
    return np.asarray(lfilter(numerator, denominator, start), dtype=np.float64)


def rational(
    scales: NDArray[np.float64], decays: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    r"""Return the generating function of a buffered Toeplitz column as a fraction.

    It is :math:`1 + \sum_j \mathrm{scale}_j x / (1 - \mathrm{decay}_j x)`.

    Parameters
    ----------
    scales, decays : ndarray of float64, shape (buffers,)

    Returns
    -------
    tuple of ndarray of float64, shape (buffers + 1,)
        Numerator and denominator, from the constant term on.
    """
    denominator = np.ones(1)
    for decay in decays:
        denominator = np.convolve(denominator, [1.0, -decay])
    numerator = denominator.copy()
    for j, scale in enumerate(scales):
        others = np.ones(1)
        for decay in np.delete(decays, j):
            others = np.convolve(others, [1.0, -decay])
        numerator[1:] += scale * others
    return numerator, denominator


def _integers(name: str, values: object, *, minimum: int, maximum: int) -> list[int]:
    if not isinstance(values, tuple) or not values:
        raise InvalidParameterError(name, values, "a tuple of at least one integer")
    return [check_integer(name, value, minimum=minimum, maximum=maximum) for value in values]
