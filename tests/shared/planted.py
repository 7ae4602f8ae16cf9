"""Planted bugs that an audit has to find: clipping, noise and charges of several schemes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flwr_privacy.pipeline import answer as pipeline_answer
from flwr_privacy.privacy import updates
from flwr_privacy.privacy.noise import discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.audits.observed import Session
from flwr_privacy.simulations.research.audits.verdicts import REFUTED, audited

Plant = Callable[[pytest.MonkeyPatch], None]
Draw = Callable[[int, float, SecureRandom], np.ndarray]


@dataclass(frozen=True)
class Bug:
    """A planted bug, the training that shows it, and what the audit says first."""

    subject: Callable[[], Session]
    plant: Plant
    because: str = ""
    sessions: int = 1


def noise(module: ModuleType, draw: Draw) -> Plant:
    """Have a module draw its noise in another way."""
    return lambda patch: patch.setattr(module, "discrete_gaussian", draw)


def scaled(factor: float) -> Draw:
    return lambda size, sigma, random: discrete_gaussian(size, sigma * factor, random)


def partly(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    """Leave 5 % of the entries without noise."""
    drawn = discrete_gaussian(size, sigma, random)
    drawn[::20] = 0
    return drawn


def partly_less(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    drawn = discrete_gaussian(size, sigma, random)
    drawn[: size // 10] //= 2
    return drawn


def without_the_end(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    """Leave out the last arrays."""
    drawn = discrete_gaussian(size, sigma, random)
    drawn[960:] = 0
    return drawn


def always_the_same(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    return discrete_gaussian(size, sigma, SecureRandom.insecure(1))


def public(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    """Draw from NumPy's global generator, which the audit seeds alike each time."""
    return np.rint(np.random.normal(0, sigma, size)).astype(np.int64)  # noqa: NPY002


def numbered() -> Draw:
    """Draw from a generator whose seed is the number of the draw in the training."""
    return Numbered()


class Numbered:
    """Noise by a counter that starts again with each training."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, size: int, sigma: float, random: SecureRandom) -> np.ndarray:
        self.number += size > 1
        drawn = np.random.default_rng(self.number % 21).normal(0, sigma, size)
        return np.rint(drawn).astype(np.int64)


class EverySecond:
    """Noise that is left out, reused or mirrored every second time."""

    def __init__(self, way: str) -> None:
        self.way, self.last, self.number = way, np.zeros(0, np.int64), 0

    def __call__(self, size: int, sigma: float, random: SecureRandom) -> np.ndarray:
        drawn = discrete_gaussian(size, sigma, random)
        if size < 100:
            return drawn
        self.number += 1
        if self.number % 2 or self.last.size != size:
            self.last = drawn
            return drawn
        return {"missing": 0 * drawn, "reused": self.last, "mirrored": -self.last}[self.way]


def once_for_all(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    return np.full(size, discrete_gaussian(1, sigma, random)[0])


def tiled(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    return np.resize(discrete_gaussian(min(size, 250), sigma, random), size)


def cut(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    """Cut the tails off."""
    limit = int(2.8 * sigma)
    return np.clip(discrete_gaussian(size, sigma, random), -limit, limit)


def even(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    """Draw from the uniform law of the same variance."""
    draws = np.random.default_rng()
    return np.rint(draws.uniform(-1, 1, size) * sigma * math.sqrt(3)).astype(np.int64)


def laplace(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    draws = np.random.default_rng()
    return np.rint(draws.laplace(0, sigma / math.sqrt(2), size)).astype(np.int64)


def smooth(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    """Return noise whose neighbours are alike."""
    drawn = discrete_gaussian(size + 1, sigma, random)
    mixed: np.ndarray = np.rint((drawn[1:] + drawn[:-1]) / math.sqrt(2)).astype(np.int64)
    return mixed


def only_arrays(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    """Leave single numbers without noise."""
    return discrete_gaussian(size, sigma, random) if size > 1 else np.zeros(1, np.int64)


def clips(change: Callable[[np.ndarray, float, float], float]) -> Plant:
    """Have updates clipped in another way."""
    return lambda patch: patch.setattr(updates, "_clip", change)


def clip_too_weakly(vector: np.ndarray, norm: float, squares: float, times: float = 1e3) -> float:
    return _clip(vector, norm * times, squares)


_clip = updates._clip


def clip_not(vector: np.ndarray, norm: float, squares: float) -> float:
    return 1.0


def clip_each_array(vector: np.ndarray, norm: float, squares: float) -> float:
    for part in np.split(vector, [960, 1000]):
        _clip(part, norm, float(part @ part))
    return 1.0


def clip_without_numbers(vector: np.ndarray, norm: float, squares: float) -> float:
    return _clip(vector[:-1], norm, float(vector[:-1] @ vector[:-1])) if vector.size > 1 else 1.0


def clip_entries(vector: np.ndarray, norm: float, squares: float) -> float:
    np.clip(vector, -norm, norm, out=vector)
    return 1.0


def clip_the_mean(vector: np.ndarray, norm: float, squares: float) -> float:
    """Clip the root of the mean square, not of the sum."""
    return _clip(vector, norm * math.sqrt(vector.size) / 4, squares)


def half_sensitivity(module: ModuleType) -> Plant:
    """Take the sensitivity of a client more or less for that of data that are replaced."""
    real = module.sensitivity
    return lambda patch: patch.setattr(
        module, "sensitivity", lambda *given, **named: real(*given, **named) / 2
    )


def uncharged(patch: pytest.MonkeyPatch) -> None:
    """Charge the answers of even rounds to the round before."""
    real = pipeline_answer.charge_for

    def charge(release: Any, planned: Any) -> Any:
        question = planned.request.question
        if question.server_round % 2 == 0 and planned.store.ledger.entries():
            return len(planned.store.ledger.entries()) - 1, None
        return real(release, planned)

    patch.setattr(pipeline_answer, "charge_for", charge)
    patch.setattr(pipeline_answer, "settle", lambda release, planned, number, made: made)


def check_refuted(bug: Bug, patch: pytest.MonkeyPatch) -> None:
    """Plant a bug, audit the training that shows it, and check the verdict."""
    bug.plant(patch)
    sessions = []
    for _ in range(bug.sessions):
        np.random.seed(0)  # noqa: NPY002 - a generator that anybody can seed is public
        sessions.append(bug.subject())
    audit = audited("planted", sessions)
    assert audit.verdict == REFUTED, audit
    assert any(bug.because in one.name for one in audit.against), audit.against
