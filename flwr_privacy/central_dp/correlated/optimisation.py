r"""Finds the Toeplitz factors with the least error of the prefix sums at equal privacy.

Minimised is the product of `joint_sensitivity` and `prefix_error`, which does not change with the
scale of the column c. Both are squared norms of sequences: with n rounds, separation b and k
participations,

- :math:`\|B w\|^2` with :math:`B = A C^{-1} e_0` and :math:`w_t^2 = (n - t) / n`;
- :math:`\|M c\|^2` where M adds up the column from the rounds 0, b, ..., (k - 1) b on.

Lower-triangular Toeplitz matrices commute, so :math:`dB = -C^{-1} (dc * B)`, and the gradient takes
one more solution with the transposed factor.

Sources: Choquette-Choo et al., arXiv 2306.08153; McKenna, "Scaling up the Banded Matrix
Factorization Mechanism for Differentially Private ML", ICLR 2025, arXiv 2405.15913; McMahan, Xu and
Zhang, "A Hassle-free Algorithm for Private Learning in Practice: Don't Use Tree Aggregation, Use
BLTs", EMNLP 2024, arXiv 2408.08868.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import check_integer

from .factors import FRACTION_BITS, LARGEST_SUM, BufferedToeplitzFactor, ToeplitzFactor, rational

__all__ = ["optimal_banded", "optimal_buffered", "square_root"]

_ONE = 2**FRACTION_BITS
_WORTH_A_BUFFER = 1e-3  # least relative gain

_Vector = NDArray[np.float64]
_Solve = Callable[[_Vector], _Vector]


def square_root(bands: int) -> ToeplitzFactor:
    r"""Return the coefficients of :math:`(1 - x)^{-1/2}`, the square root of the prefix sums, cut.

    Examples
    --------
    >>> square_root(4).coefficients
    (65536, 32768, 24576, 20480)
    """
    check_integer("bands", bands, minimum=1)
    return _dyadic(_square_root(bands))


def _square_root(bands: int) -> _Vector:
    index = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * index - 1) / (2 * index)]))


@lru_cache(maxsize=64)
def optimal_banded(rounds: int, bands: int, separation: int, participations: int) -> ToeplitzFactor:
    """Return the best banded Toeplitz factor, rounded.

    Parameters
    ----------
    rounds, separation, participations : int
        As in `flwr_privacy.central_dp.correlated.sensitivity.joint_sensitivity`; no more
        participations than fit into the rounds.
    bands : int
        Number of coefficients, at most as many as rounds.

    Returns
    -------
    ToeplitzFactor

    Notes
    -----
    With bands up to the separation the search has no constraints and takes about a dozen steps. Its
    result is used if it does not increase and is not negative. Otherwise the search goes over the
    differences of neighbouring coefficients, which are kept at zero or above, and stops after 300
    steps. In all trials, more bands than the separation helped only where a participant has fewer
    participations than fit into the rounds.
    """
    setting = _Setting(rounds, separation, participations)
    return _dyadic(_banded_optimum(setting, bands))


@lru_cache(maxsize=64)
def optimal_buffered(
    rounds: int, buffers: int, separation: int, participations: int
) -> BufferedToeplitzFactor:
    """Return the best buffered Toeplitz factor, rounded.

    Parameters
    ----------
    rounds, separation, participations : int
        As in `optimal_banded`.
    buffers : int
        Largest number of buffers. There are fewer where another one makes the error less than
        0.1 % smaller.

    Returns
    -------
    BufferedToeplitzFactor
    """
    setting = _Setting(rounds, separation, participations)
    loss, scales, decays = _buffered_optimum(setting, 1)
    for more in range(2, buffers + 1):
        found = _buffered_optimum(setting, more)
        if found[0] > loss - 2 * _WORTH_A_BUFFER:  # the logarithm of a square
            break
        loss, scales, decays = found
    return _dyadic_buffers(scales, decays)


@dataclass(frozen=True)
class _Setting:
    """What is minimised, as a function of the column."""

    rounds: int
    separation: int
    participations: int

    def loss(self, column: _Vector, solve: _Solve) -> tuple[float, _Vector]:
        """Return the logarithm of squared error times squared sensitivity, and its gradient.

        Parameters
        ----------
        column : ndarray of float64, shape (bands,)
            The first column of C, without zeros at its end.
        solve : callable
            Returns the solution of C x = y for a y of shape (rounds,).
        """
        from scipy.signal import correlate

        rounds, bands = self.rounds, len(column)
        weights = np.arange(rounds, 0, -1) / rounds
        sums = solve(np.ones(rounds))
        error = weights @ sums**2
        adjoint = solve((weights * sums)[::-1])[::-1]
        overlaps = correlate(adjoint, sums, mode="full", method="fft")  # from -(rounds - 1) on
        error_slope = -2 * overlaps[rounds - 1 : rounds - 1 + bands]

        response = self._participate(np.pad(column, (0, rounds - bands)))
        sensitivity = response @ response
        sensitivity_slope = 2 * self._participate(response[::-1])[::-1][:bands]
        loss = math.log(error) + math.log(sensitivity)
        return loss, error_slope / error + sensitivity_slope / sensitivity

    def _participate(self, column: _Vector) -> _Vector:
        """Return the sum of copies of a column that begin in the rounds 0, b, 2b, ..."""
        missing = -len(column) % self.separation
        rows = np.pad(column, (0, missing)).reshape(-1, self.separation)
        forever = rows.cumsum(axis=0)
        total = forever.copy()
        total[self.participations :] -= forever[: -self.participations]
        return np.asarray(total.ravel()[: len(column)])


def _banded_optimum(setting: _Setting, bands: int) -> _Vector:
    """Return the coefficients before they are rounded, the first of them 1."""
    from scipy.signal import lfilter

    def loss(column: _Vector) -> tuple[float, _Vector]:
        return setting.loss(column, lambda y: lfilter([1.0], column, y))

    def of_tail(tail: _Vector) -> tuple[float, _Vector]:
        value, gradient = loss(np.concatenate([[1.0], tail]))
        return value, gradient[1:]

    def of_steps(steps: _Vector) -> tuple[float, _Vector]:
        value, gradient = loss(_from_steps(steps))
        return value, gradient.cumsum()

    start = _square_root(bands)
    narrow = min(bands, setting.separation)  # where the sensitivity takes no order
    tail, _ = _minimum(of_tail, start[1:narrow], ftol=1e-15, gtol=1e-9, maxiter=1000)
    best = np.concatenate([[1.0], tail])
    if narrow == bands and _ordered(best):
        return best
    found = []
    for column in (start, np.pad(np.minimum.accumulate(best.clip(0)), (0, bands - narrow))):
        steps = -np.diff(column, append=0.0)
        found.append(_minimum(of_steps, steps, least=0.0, ftol=1e-9, gtol=1e-9, maxiter=300))
    column = _from_steps(min(found, key=lambda result: result[1])[0])
    return np.asarray(column / column[0])


def _buffered_optimum(setting: _Setting, buffers: int) -> tuple[float, _Vector, _Vector]:
    """Return the least loss, and its scales and decays before they are rounded.

    The scales and a rest add up to 1: they are searched for as logarithms relative to the rest, and
    the decays as log-odds.
    """
    from scipy.signal import lfilter

    later = np.arange(setting.rounds - 1)

    def loss(point: _Vector) -> tuple[float, _Vector]:
        scales, decays = _scales_and_decays(point)
        powers = decays[:, np.newaxis] ** later
        numerator, denominator = rational(scales, decays)
        column = np.concatenate([[1.0], scales @ powers])
        value, slope = setting.loss(column, lambda y: lfilter(denominator, numerator, y))
        of_scales = powers @ slope[1:]
        of_decays = scales * ((powers[:, :-1] * later[1:]) @ slope[2:])
        by_logarithms = scales * (of_scales - scales @ of_scales)
        return value, np.concatenate([by_logarithms, of_decays * decays * (1 - decays)])

    found = []
    for memory in {setting.rounds, setting.separation}:  # rounds until the slowest has decayed
        gaps = max(memory, 2) ** -((np.arange(buffers) + 0.7) / buffers)
        scales = 0.6 * np.sqrt(gaps) / np.sqrt(gaps).sum()  # the coefficients fall as 1 / sqrt(i)
        start = np.concatenate([np.log(scales / 0.4), np.log((1 - gaps) / gaps)])
        # For a few variables, in NumPy: the other method waits long for LAPACK where CPUs are busy.
        found.append(_minimum(loss, start, method="BFGS", gtol=1e-6, maxiter=300))
    point, value = min(found, key=lambda result: result[1])
    return value, *_scales_and_decays(point)


def _minimum(
    loss: Callable[[_Vector], tuple[float, _Vector]],
    start: _Vector,
    *,
    method: str = "L-BFGS-B",
    least: float | None = None,
    **options: float,
) -> tuple[_Vector, float]:
    from scipy.optimize import minimize

    if start.size == 0:
        return start, loss(start)[0]
    bounds = None if least is None else [(least, None)] * start.size
    result = minimize(loss, start, jac=True, method=method, bounds=bounds, options=options)
    return result.x, float(result.fun)


def _from_steps(steps: _Vector) -> _Vector:
    return np.asarray(steps[::-1].cumsum()[::-1])


def _ordered(column: _Vector) -> bool:
    return bool(column[-1] >= 0 and np.all(np.diff(column) <= 0))


def _scales_and_decays(point: _Vector) -> tuple[_Vector, _Vector]:
    logarithms, odds = np.split(point, 2)
    logarithms = np.append(logarithms, 0.0) - max(0.0, logarithms.max())
    shares = np.exp(logarithms)
    return shares[:-1] / shares.sum(), 1 / (1 + np.exp(-odds))


def _dyadic(column: _Vector) -> ToeplitzFactor:
    """Return the nearest factor: rounding keeps the order of the coefficients."""
    numerators = np.rint(column / column[0] * _ONE)
    return ToeplitzFactor(coefficients=tuple(map(int, numerators)))


def _dyadic_buffers(scales: _Vector, decays: _Vector) -> BufferedToeplitzFactor:
    """Return a factor near to it that is within the bounds; scales are rounded down."""
    lower = np.minimum(np.rint(decays * _ONE), _ONE - 1)
    rest = (scales * _ONE / (_ONE - lower)).sum()
    upper = np.floor(scales * min(1.0, (LARGEST_SUM - 1) / rest) * _ONE)
    pairs = [(int(s), int(d)) for s, d in zip(upper, lower, strict=True) if s >= 1]
    new_scales, new_decays = zip(*(pairs or [(1, 0)]), strict=True)
    return BufferedToeplitzFactor(scales=new_scales, decays=new_decays)
