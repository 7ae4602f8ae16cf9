"""Exact discrete Gaussian noise: time to noise ten million values, and time per exact sample."""

import importlib.util
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import SystemRandom

import numpy as np
from flwr.supercore.differential_privacy import add_gaussian_noise_inplace

from flwr_privacy.privacy.noise import discrete_gaussian, discrete_gaussian_around
from flwr_privacy.privacy.randomness import SecureRandom

from .report import Comparison

__all__ = ["noise"]

VALUES = 10_000_000
REPETITIONS = 9
SIGMAS = (100.0, 1e5)
SIGMAS_AROUND = ((3.0, 4.0), (10.0, 2.5), (100.0, 2.0), (1e5, 2.0))  # and what is allowed
FRACTION_BITS = 16
EXACT_SAMPLES = 3_000  # of the exact rival, which is slow

OPENDP = "OpenDP's discrete Gaussian"
PLAIN = "CKS 2020 in plain Python, in this file (OpenDP is not installed)"


def noise() -> Iterator[Comparison]:
    """Compare `discrete_gaussian` with float noise, an exact sampler, and itself at fractions."""
    for sigma in SIGMAS:
        yield _against_floats(sigma)
    for sigma in SIGMAS:
        yield _against_exact(sigma)
    for sigma, at_most in SIGMAS_AROUND:
        yield _around(sigma, at_most)


def _against_floats(sigma: float) -> Comparison:
    random = SecureRandom()
    integers = np.zeros(VALUES, np.int64)
    floats = [np.zeros(VALUES, np.float32)]

    def ours() -> None:
        np.add(integers, discrete_gaussian(VALUES, sigma, random), out=integers)

    def theirs() -> None:
        add_gaussian_noise_inplace(floats, sigma)

    seconds: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for repetition in range(REPETITIONS):
        for side in (ours, theirs)[:: 1 if repetition % 2 else -1]:
            seconds[side].append(_seconds(side))
    return Comparison(
        what=f"noise {VALUES:.0e} values, sigma {sigma:g} steps",
        rival="Flower's add_gaussian_noise_inplace (float32, not exact, not secret)",
        ours=seconds[ours],
        theirs=seconds[theirs],
        at_most=2.0,
    )


def _against_exact(sigma: float) -> Comparison:
    random = SecureRandom()
    installed = importlib.util.find_spec("opendp") is not None
    rival = _opendp(sigma) if installed else _plain(sigma)
    ours, theirs = [], []
    for _ in range(REPETITIONS):
        ours.append(_seconds(lambda: discrete_gaussian(VALUES, sigma, random)) / VALUES)
        theirs.append(_seconds(rival) / EXACT_SAMPLES)
    return Comparison(
        what=f"one exact sample, sigma {sigma:g} steps",
        rival=OPENDP if installed else PLAIN,
        ours=ours,
        theirs=theirs,
        at_least=50.0,
    )


def _around(sigma: float, at_most: float) -> Comparison:
    random = SecureRandom()
    far = int(20 * sigma) << FRACTION_BITS
    centres = np.random.default_rng(0).integers(-far, far, VALUES)
    ours, theirs = [], []
    for _ in range(REPETITIONS):
        ours.append(
            _seconds(lambda: discrete_gaussian_around(centres, FRACTION_BITS, sigma, random))
        )
        theirs.append(_seconds(lambda: discrete_gaussian(VALUES, sigma, random)))
    return Comparison(
        what=f"{VALUES:.0e} values around fractions, sigma {sigma:g}",
        rival="discrete_gaussian, around 0",
        ours=ours,
        theirs=theirs,
        at_most=at_most,
    )


def _seconds(side: Callable[[], object]) -> float:
    began = time.perf_counter()
    side()
    return time.perf_counter() - began


def _opendp(sigma: float) -> Callable[[], object]:
    dp = importlib.import_module("opendp.prelude")
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
    measurement = dp.m.make_gaussian(*space, scale=sigma)
    zeros = [0] * EXACT_SAMPLES
    return lambda: measurement(zeros)


def _plain(sigma: float) -> Callable[[], object]:
    sampler = _PlainSampler(Fraction(sigma))
    return lambda: [sampler.gaussian() for _ in range(EXACT_SAMPLES)]


class _PlainSampler:
    """Algorithms 1 to 3 of Canonne, Kamath and Steinke (2020), one sample at a time."""

    def __init__(self, sigma: Fraction) -> None:
        self._variance = sigma**2
        self._scale = sigma.numerator // sigma.denominator + 1
        self._below = SystemRandom().randrange

    def gaussian(self) -> int:
        while True:
            k = self._laplace()
            excess = abs(k) - self._variance / self._scale
            if self._exp(excess**2 / (2 * self._variance)):
                return k

    def _laplace(self) -> int:
        while True:
            rest = self._below(self._scale)
            if not self._exp(Fraction(rest, self._scale)):
                continue
            whole = 0
            while self._exp(Fraction(1)):
                whole += 1
            magnitude = rest + self._scale * whole
            negative = self._below(2) == 1
            if magnitude or not negative:
                return -magnitude if negative else magnitude

    def _exp(self, gamma: Fraction) -> bool:
        """Return true with probability exp(-gamma)."""
        while gamma > 1:
            if not self._exp(Fraction(1)):
                return False
            gamma -= 1
        k = 1
        while self._below(gamma.denominator * k) < gamma.numerator:
            k += 1
        return k % 2 == 1
