"""Samples discrete noise for values on a grid exactly, and bounds what the grid costs.

A float sample of a continuous law lies on a sparse lattice of floats, and which lattice shows what
it was added to (tests/shared/lattice.py is the attack); rounding the sum does not help. So values
are put on a grid first, as integers, and integer noise is added.
`flwr_privacy.privacy.rejection_sampler` has the sampler and the proof that it is exact.

Sources: Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS
2020; Mironov, "On Significance of the Least Significant Bits For Differential Privacy", CCS 2012.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.wire.parts import PART, in_parts

from .randomness import SecureRandom
from .rejection_sampler import Law, RejectionSampler

__all__ = [
    "discrete_gaussian",
    "discrete_gaussian_around",
    "discrete_laplace",
    "discretisation_gap",
]

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-20, 2.0**40
MOST_FRACTION_BITS, LARGEST_CENTRE = 16, 2**60
SMALLEST_AROUND = 1.0  # below it, far more proposals are rejected
SMALLEST_GAP_SIGMA = 4.0

_TAIL = 1e-30

_Number = TypeVar("_Number", float, NDArray[np.float64])


def discrete_gaussian(size: int, sigma: float, random: SecureRandom) -> NDArray[np.int64]:
    r"""Sample from the discrete Gaussian, :math:`P(k) \propto \exp(-k^2 / 2 \sigma^2)`.

    Parameters
    ----------
    size : int
        Number of independent samples, >= 0.
    sigma : float
        Parameter in grid steps, from 2^-20 to 2^40; its exact binary value counts. The standard
        deviation is a little less, and equal to it to 9 digits from sigma = 1.2 on.
    random : SecureRandom
        Where the random bits come from.

    Returns
    -------
    ndarray of int64, shape (size,)
        A value beyond int64 would have a probability below 2^-(10^13) and raises OverflowError.
        More than 2^18 samples are drawn in parts, by several threads
        (`flwr_privacy.wire.parts.in_parts`).

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range or `random` is another kind of generator.

    Notes
    -----
    **Guarantee.** *Protected*: integer vectors that differ by at most D in L2 norm (in grid steps),
    each released once with a sample of its own added to every coordinate. *Against*: whoever sees
    the sum and knows everything but the stream's key. *Covered*: (D^2 / 2 sigma^2)-concentrated
    differential privacy, as for the continuous Gaussian, hence its Renyi curve (Canonne, Kamath,
    Steinke, Theorem 4, and Renyi divergences of independent coordinates add up); for guarantees
    proven in another way see `discretisation_gap`. *Not
    covered*: reals that are rounded to the grid after their norm was bounded (rounding may add
    sqrt(d) / 2 steps); sums of several parties' noise, which are not discrete Gaussian; sums that
    overflow; the time that sampling takes; streams that are not `secure`.

    Examples
    --------
    >>> noise = discrete_gaussian(5, 100.0, SecureRandom.insecure(0))
    >>> noise.dtype, noise.shape
    (dtype('int64'), (5,))
    """
    sampler = _sampler(_Gaussian(_checked("sigma", size, sigma, random)))
    if size <= PART:
        return sampler.sample(size, random)
    values = np.empty(size, np.int64)
    streams = random.spawn(-(-size // PART))  # so it does not depend on the number of threads

    def fill(start: int) -> None:
        part = values[start : start + PART]
        part[:] = sampler.sample(part.size, streams[start // PART])

    in_parts(fill, size)
    return values


def discrete_gaussian_around(
    centres: NDArray[np.int64], fraction_bits: int, sigma: float, random: SecureRandom
) -> NDArray[np.int64]:
    r"""Sample integers around centres between them, :math:`P(k) \propto \exp(-(k-c)^2/2\sigma^2)`.

    Use it where the sum that is released, and not the noise, must be on the grid: noise that is
    correlated over rounds. Around integers it is the centre plus `discrete_gaussian`.

    Parameters
    ----------
    centres : ndarray of int64, shape (d,)
        The centres in steps of ``2**-fraction_bits``, from -2^60 to 2^60.
    fraction_bits : int
        F, from 0 to 16.
    sigma : float
        Parameter in integers, from 1 to 2^40; its exact binary value counts.
    random : SecureRandom
        Where the random bits come from.

    Returns
    -------
    ndarray of int64, shape (d,)
        Independent samples. A value beyond int64 would have a probability below 2^-(10^13) and
        raises OverflowError.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range, `centres` has another type or shape, or `random` is another
        kind of generator.

    Notes
    -----
    **Guarantee.** *Protected*: vectors on the lattice of multiples of 2^-F that differ by at most D
    in L2 norm, each released once, as samples around its coordinates. *Against*: whoever sees the
    samples and knows everything but the stream's key. *Covered*: privacy as with continuous
    Gaussian noise of the same sigma, up to `discretisation_gap`. *Not covered*: the concentrated
    differential privacy of `discrete_gaussian` to the last digit, which holds for vectors that
    differ by integers; reals that are rounded to the lattice after their norm was bounded; sums of
    several parties' samples (see `flwr_privacy.privacy.distributed_noise.log_ratio_bound`); the
    time that sampling takes; streams that are not `secure`.

    Examples
    --------
    >>> halves = np.array([1, 3, -1], dtype=np.int64)  # 0.5, 1.5, -0.5
    >>> discrete_gaussian_around(halves, 1, 100.0, SecureRandom.insecure(0)).dtype
    dtype('int64')
    """
    # Centres may be as secret as the noise: no message shows one.
    if not (isinstance(centres, np.ndarray) and centres.dtype == np.int64 and centres.ndim == 1):
        raise InvalidParameterError("centres", type(centres), "a one-dimensional array of int64")
    check_integer("fraction_bits", fraction_bits, minimum=0, maximum=MOST_FRACTION_BITS)
    _check_random(random)
    check_number("sigma", sigma, minimum=SMALLEST_AROUND, maximum=LARGEST_SCALE)
    if max(centres.max(initial=0), -int(centres.min(initial=0))) > LARGEST_CENTRE:
        raise InvalidParameterError("centres", "larger ones", "steps from -2^60 to 2^60")
    return _sampler(_Gaussian(float(sigma)), fraction_bits).sample(centres.size, random, centres)


def discrete_laplace(size: int, scale: float, random: SecureRandom) -> NDArray[np.int64]:
    r"""Sample from the discrete Laplace law, :math:`P(k) \propto \exp(-|k| / \mathrm{scale})`.

    Parameters
    ----------
    size : int
        Number of independent samples, >= 0.
    scale : float
        Scale in grid steps, from 2^-20 to 2^40; its exact binary value counts.
    random : SecureRandom
        Where the random bits come from.

    Returns
    -------
    ndarray of int64, shape (size,)
        A value beyond int64 would have a probability below 2^-(10^7) and raises OverflowError.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range or `random` is another kind of generator.

    Notes
    -----
    **Guarantee.** *Protected*: integer vectors that differ by at most D in L1 norm (in grid steps),
    each released once with a sample of its own added to every coordinate. *Against*: whoever sees
    the sum and knows everything but the stream's key. *Covered*: (D / scale)-differential privacy,
    because P(k) / P(k + j) <= exp(|j| / scale). *Not covered*: reals that are rounded to the grid
    after their norm was bounded (rounding may add d / 2 steps); sums that overflow; the time that
    sampling takes; streams that are not `secure`.

    Examples
    --------
    >>> discrete_laplace(0, 3.5, SecureRandom()).size
    0
    """
    return _sampler(_Laplace(_checked("scale", size, scale, random))).sample(size, random)


def discretisation_gap(dimension: int, sigma: float) -> float:
    r"""Return the epsilon that discrete Gaussian noise may cost beyond that of continuous noise.

    Take any algorithm that, T times, adds a vector of continuous Gaussian noise N(0, sigma^2) to an
    integer vector and uses only the sum (composition, subsampling and post-processing included). If
    it is (epsilon, delta)-differentially private, then with discrete Gaussian noise in its place it
    is so with

        epsilon + T gap   and   exp(T gap) (delta + T exp(epsilon) 1e-30).

    The same holds for real vectors v, if the sum is replaced by ``Y + u``: here u is any vector
    that follows from what the algorithm used before, and Y are integers from the discrete Gaussian
    around v - u (`discrete_gaussian_around`).

    An accountant of Renyi or concentrated privacy without subsampling needs no gap for integer
    vectors: see `discrete_gaussian`.

    Parameters
    ----------
    dimension : int
        Length d of the vector, >= 1.
    sigma : float
        Parameter of the noise in grid steps, at least 4.

    Returns
    -------
    float
        The gap of one vector of noise: about ``(1.4 sqrt(d) + 6) / sigma**2`` while ``sqrt(d)`` is
        well below ``sigma**2``.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Notes
    -----
    Let X be the continuous sum less u, rounded to the nearest integers. As u is known, this is
    post-processing, which keeps (epsilon, delta). It remains to compare X, which is N(mu, sigma^2)
    rounded, with Y, which is discrete Gaussian around mu, for mu = v - u. (For integer vectors and
    u = 0, both are v plus noise around 0.) Write h = 1 / (24 sigma^2), and k for the distance of a
    value to mu: it runs over the integers less mu.

    *One coordinate.* Let phi be the density of N(0, sigma^2), and t uniform on [-1/2, 1/2], with
    E t^2 = 1/12 and E t^4 = 1/80. Then P_X(k) = phi(k) A(k) with

        A(k) = E[exp(-t^2 / 2 sigma^2) cosh(c t)],   c = k / sigma^2,

    and P_Y(k) = phi(k) / Z with Z = 1 + 2 sum_{j >= 1} cos(2 pi j mu) exp(-2 pi^2 sigma^2 j^2), by
    Poisson's summation formula. So |Z - 1| < 1e-136, and |Z - 1| < 1e-67 with sigma / sqrt(2) in
    place of sigma: r = 1e-66 bounds the logarithm of any ratio of such Z. The first factor falls in
    |t| and the second grows, so (Chebyshev) A(k) <= E[exp(-t^2 / 2 sigma^2)] E[cosh(c t)], where
    exp(-w) <= 1 - w + w^2 / 2, and E cosh(c t) = sinh(c / 2) / (c / 2) <= exp(c^2 / 24), term by
    term. From below, Jensen's inequality with ln cosh(z) >= max(0, z^2 / 2 - z^4 / 12). Together

        -h + max(0, c^2 / 24 - c^4 / 960) <= ln A(k) <= -h + c^2 / 24 + 1 / (640 sigma^4).

    *The vector.* Let S(k) = sum k_i^2 / sigma^2; note that c^2 / 24 = h k^2 / sigma^2. Where every
    |k_i| <= K with K^2 = 2 sigma^2 (x + ln 2d), c^4 / 960 <= b k^2 / sigma^2 with
    b = (x + ln 2d) / (480 sigma^4). Hence

        ln P_Y(k) / P_X(k) <= d r + h d - max(0, h - b) S(k),                        (1)
        ln P_X(k) / P_Y(k) <= d r + h (S(k) - d) + d / (640 sigma^4).                (2)

    *Tails.* S(Y) has the moment generating function of the chi-square law up to exp(d r):
    E exp(q S) = (1 - 2q)^(-d/2) times ratios of Z with sigma / sqrt(1 - 2q) and with sigma, for
    -1/2 <= q < 1/2. So the bounds of Laurent and Massart (2000, Lemma 1) hold for it. And with
    Y_i for the distance to mu_i, P(|Y_i| > K) is at most 2 exp(r - K^2 / 2 sigma^2) by Chernoff:
    E exp(q Y_i) is exp(q^2 sigma^2 / 2) times a ratio of Z, around mu_i + q sigma^2 and around
    mu_i. Except with probability exp(2 d r - x) each,

    - S(Y) >= d - 2 sqrt(d x), used where d >= 4x (so that q = -sqrt(x / d) >= -1/2), otherwise 0;
    - all |Y_i| <= K;
    - S(X) <= s = d + 2 sqrt(d y) + 2 y. For every p >= 0, P(S(X) > s) is at most
      E[(P_X / P_Y)(Y) exp(p (S(Y) - s))], whose logarithm is, by (2) and with q = p + h, at most
      2 d r + d / (640 sigma^4) + h (s - d) - q s - (d / 2) ln(1 - 2q). The last two
      terms have a minimum of at most -y, at q = (s - d) / 2s. So it is enough that
      y = x + d / (640 sigma^4) + h (2 sqrt(d y) + 2 y), a quadratic equation for sqrt(y).
      It gives sqrt(y / d) >= 2h, hence q >= h and p >= 0 as needed.

    Put into (1) and (2), these give e_1 and e_2 with P_Y(B) <= exp(e_1) P_X(B) + 2 exp(-x) and
    P_X(B) <= exp(e_2) P_Y(B) + exp(-x) for every event B and every centre mu. For an algorithm that
    draws T such vectors, one after the other, this holds with T e and T exp(-x). The claim follows
    with gap = e_1 + e_2 and 3 exp(-x) <= 1e-30. The terms d r (below 1e-46 for d <= 2^63) and the
    rounding are covered by a factor of 1 + 1e-9, and exp(2 d r) by 3.001 in place of 3.

    Examples
    --------
    >>> round(discretisation_gap(10**6, 2.0**12), 6)
    8.4e-05
    """
    d = check_integer("dimension", dimension, minimum=1, maximum=2**63)
    sigma = check_number("sigma", sigma, minimum=SMALLEST_GAP_SIGMA, maximum=LARGEST_SCALE)
    h = 1 / (24 * sigma**2)
    x = math.log(3.001 / _TAIL)
    missing = 2 * math.sqrt(d * x) if d >= 4 * x else d  # d minus the least S(Y)
    b = (x + math.log(2 * d)) / (480 * sigma**4)
    e_1 = h * missing + min(h, b) * (d - missing)

    constant = d / (640 * sigma**4)
    root = h * math.sqrt(d) + math.sqrt(h**2 * d + (1 - 2 * h) * (x + constant))
    y = (root / (1 - 2 * h)) ** 2
    e_2 = h * (2 * math.sqrt(d * y) + 2 * y) + constant
    return (e_1 + e_2) * (1 + 1e-9)


@dataclass(frozen=True)
class _Gaussian:
    scale: float

    def energy(self, magnitude: _Number) -> _Number:
        ratio = magnitude / self.scale
        return ratio * ratio * 0.5

    def exact_energy(self, k: Fraction) -> Fraction:
        return (k / Fraction(self.scale)) ** 2 / 2


@dataclass(frozen=True)
class _Laplace:
    scale: float

    def energy(self, magnitude: _Number) -> _Number:
        return magnitude / self.scale

    def exact_energy(self, k: Fraction) -> Fraction:
        return abs(k) / Fraction(self.scale)


@lru_cache(maxsize=64)  # 48 kB each
def _sampler(law: Law, fraction_bits: int = 0) -> RejectionSampler:
    return RejectionSampler(law, fraction_bits)


def _checked(name: str, size: int, scale: float, random: SecureRandom) -> float:
    check_integer("size", size, minimum=0)
    _check_random(random)
    return check_number(name, scale, minimum=SMALLEST_SCALE, maximum=LARGEST_SCALE)


def _check_random(random: SecureRandom) -> None:
    if not isinstance(random, SecureRandom):
        raise InvalidParameterError(
            "random", random, "a flwr_privacy.privacy.randomness.SecureRandom"
        )
