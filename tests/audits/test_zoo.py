"""Every planted bug of the zoo is refuted: wrong clipping, wrong noise, wrong charges, Flower's own.

A bug is a small change of the real code. The schemes as they are pass the same audits:
`test_correct_schemes.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flwr_privacy.acfl import encoding
from flwr_privacy.acfl import release as acfl_release
from flwr_privacy.central_dp import mean as central_mean
from flwr_privacy.central_dp import terms as central_terms
from flwr_privacy.clients import acfl as acfl_client
from flwr_privacy.clients.torch import per_record_training
from flwr_privacy.m2fdp import release as m2fdp_release
from flwr_privacy.m2fdp import zone_average
from flwr_privacy.pipeline import answer as pipeline_answer
from flwr_privacy.pipeline.mechanism import Mechanism
from flwr_privacy.privacy import updates
from flwr_privacy.privacy.noise import discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.audits import acfl, central, flower, m2fdp, udp
from flwr_privacy.simulations.audits.observed import Session
from flwr_privacy.simulations.audits.report import REFUTED, audited
from flwr_privacy.strategies.central_dp import strategy as central_strategy
from flwr_privacy.strategies.m2fdp import simulated_aggregators
from flwr_privacy.udp import terms as udp_terms

Plant = Callable[[pytest.MonkeyPatch], None]
Draw = Callable[[int, float, SecureRandom], np.ndarray]


@dataclass(frozen=True)
class Bug:
    """A planted bug, the training that shows it, and what the audit says first."""

    subject: Callable[[], Session]
    plant: Plant
    because: str = ""
    sessions: int = 2


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


def nan_passes(patch: pytest.MonkeyPatch) -> None:
    """Let a length that is no number pass for a short one, and send zeros for what is none."""

    def between(start: Any, trained: Any, names: Any, *, clipping_norm: Any = None) -> Any:
        names = list(names)
        difference = [np.asarray(trained[n], float) - start[n] for n in names]
        vector = np.concatenate([part.reshape(-1) for part in difference])
        length = float(np.sqrt(vector @ vector))
        # As Flower clips: min(1, norm / nan) is 1.
        vector *= min(1.0, clipping_norm / length) if length else 1.0
        vector[~np.isfinite(vector)] = 0.0
        return updates.Update(vector, {n: np.shape(start[n]) for n in names})

    patch.setattr(udp_terms.Update, "between", between)


def counter_is_released(patch: pytest.MonkeyPatch) -> None:
    """Send integers along, as they are."""
    real = udp_terms.UDPTerms.noise

    def noise_(self: Any, measured: Any, plan: Any, random: Any) -> Any:
        arrays, own = real(self, measured, plan, random)
        return {**arrays, "steps": _seen[-1]}, own

    measure = udp_terms.UDPTerms.measure
    _seen = [np.array([0])]

    def measure_(self: Any, start: Any, outcome: Any) -> Any:
        _seen.append(np.asarray(outcome["steps"]).reshape(1))
        return measure(self, start, outcome)

    patch.setattr(udp_terms.UDPTerms, "noise", noise_)
    patch.setattr(udp_terms.UDPTerms, "measure", measure_)


def length_is_told(patch: pytest.MonkeyPatch) -> None:
    """Tell how far the update was clipped, in the metrics."""
    real = udp_terms.UDPTerms.noise

    def told(self: Any, measured: Any, plan: Any, random: Any) -> Any:
        arrays, own = real(self, measured, plan, random)
        return arrays, {"metrics": {**own["metrics"], "factor": measured[0].factor}}

    patch.setattr(udp_terms.UDPTerms, "noise", told)


def failures_are_told(patch: pytest.MonkeyPatch) -> None:
    """Give the coordinate that counts failures no noise."""
    noise(udp_terms, lambda n, s, r: discrete_gaussian(n, s, r) if n > 1 else np.zeros(1, np.int64))(
        patch
    )


def failures_are_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(udp_terms.UDPTerms, "failed", lambda self, start: None)


def weights_are_examples(patch: pytest.MonkeyPatch) -> None:
    """Let a client weigh as its data are."""
    real = udp_terms.UDPTerms.measure

    def measured(self: Any, start: Any, outcome: Any) -> Any:
        weight = 1 + int(np.abs(outcome["bias"]).sum() > 0)
        return real(self, start, outcome)._replace(weight=weight)

    patch.setattr(udp_terms.UDPTerms, "measure", measured)


def multiplied(patch: pytest.MonkeyPatch) -> None:
    """Multiply the update by noise, instead of adding it."""
    real = udp_terms.UDPTerms.noise

    def noised(self: Any, measured: Any, plan: Any, random: Any) -> Any:
        arrays, own = real(self, measured, plan, random)
        for name, part in measured[0].arrays(measured[0].vector).items():
            arrays[name] = np.where(part == 0, 0, arrays[name]).astype(np.int32)
        return arrays, own

    patch.setattr(udp_terms.UDPTerms, "noise", noised)


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


def cheap(patch: pytest.MonkeyPatch) -> None:
    """Charge for twice the noise that is added."""
    real = udp_terms.UDPTerms.charge

    def charge(self: Any) -> Any:
        found = real(self)
        return replace(found, noise_multiplier=2 * found.noise_multiplier)

    patch.setattr(udp_terms.UDPTerms, "charge", charge)


def rounds_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Spread the budget over a round less, and let the node allow the last one."""
    from flwr_privacy.pipeline.planned_release import PlannedRelease
    from flwr_privacy.udp.schedule import UDPNoisePlan

    real = UDPNoisePlan.__init__

    def planned(self: Any, **named: Any) -> None:
        real(self, **{**named, "rounds": max(1, named["rounds"] - 1)})

    patch.setattr(UDPNoisePlan, "__init__", planned)
    patch.setattr(PlannedRelease, "check_affordable", lambda self, entries: None)


def a_budget_for_each_round(patch: pytest.MonkeyPatch) -> None:
    """Spend the whole budget in every round."""
    from flwr_privacy.pipeline.planned_release import PlannedRelease
    from flwr_privacy.udp.schedule import UDPNoisePlan

    real = UDPNoisePlan.__init__
    patch.setattr(
        UDPNoisePlan, "__init__", lambda self, **named: real(self, **{**named, "rounds": 1})
    )
    patch.setattr(PlannedRelease, "check_affordable", lambda self, entries: None)


CASES: dict[str, Bug] = {
    # UDP at user level: clipping
    "clipping 1000 times too weak": Bug(udp.udp_users, clips(clip_too_weakly)),
    "clipping twice too weak": Bug(udp.udp_users, clips(partial(clip_too_weakly, times=2.0))),
    "no clipping": Bug(udp.udp_users, clips(clip_not)),
    "each array clipped by itself": Bug(udp.udp_users, clips(clip_each_array)),
    "numbers not clipped": Bug(udp.udp_users, clips(clip_without_numbers)),
    "entries clipped": Bug(udp.udp_users, clips(clip_entries)),
    "mean square clipped": Bug(udp.udp_users, clips(clip_the_mean)),
    "NaN unclipped": Bug(udp.udp_users, nan_passes),
    # noise
    "noise x 0.9": Bug(udp.udp_users, noise(udp_terms, scaled(0.9))),
    "half of the noise": Bug(udp.udp_users, noise(udp_terms, scaled(0.5))),
    "5 % without noise": Bug(udp.udp_users, noise(udp_terms, partly)),
    "10 % with half of the noise": Bug(udp.udp_users, noise(udp_terms, partly_less)),
    "arrays without noise": Bug(udp.udp_users, noise(udp_terms, without_the_end)),
    "the same noise everywhere": Bug(udp.udp_users, noise(udp_terms, always_the_same)),
    "a public generator": Bug(udp.udp_users, noise(udp_terms, public), "again"),
    "a public seed": Bug(udp.udp_users, noise(udp_terms, numbered()), "again"),
    "no noise in every second answer": Bug(
        udp.udp_users, noise(udp_terms, EverySecond("missing")), "noise"
    ),
    "noise reused": Bug(udp.udp_users, noise(udp_terms, EverySecond("reused")), "same noise"),
    "noise mirrored": Bug(udp.udp_users, noise(udp_terms, EverySecond("mirrored")), "same noise"),
    "one draw for all entries": Bug(udp.udp_users, noise(udp_terms, once_for_all)),
    "noise tiled": Bug(udp.udp_users, noise(udp_terms, tiled), "repeats within"),
    "noise of neighbours alike": Bug(udp.udp_users, noise(udp_terms, smooth), "repeats within"),
    "tails cut off": Bug(udp.udp_users, noise(udp_terms, cut)),
    "uniform noise": Bug(udp.udp_users, noise(udp_terms, even)),
    "Laplace noise for Gaussian": Bug(udp.udp_users, noise(udp_terms, laplace)),
    "noise multiplied": Bug(udp.udp_users, multiplied),
    # what else is said, and what is charged
    "integers released": Bug(udp.udp_users, counter_is_released, "beside"),
    "the clipping told": Bug(udp.udp_users, length_is_told, "beside"),
    "failures told": Bug(udp.udp_users, failures_are_told),
    "failures refused": Bug(udp.udp_users, failures_are_refused, "whether there is an answer"),
    "weights by data": Bug(udp.udp_users, weights_are_examples),
    "the wrong unit": Bug(udp.udp_users, half_sensitivity(udp_terms)),
    "a release not charged": Bug(udp.udp_users, uncharged, "not charged"),
    "charged for twice the noise": Bug(udp.udp_users, cheap),
    "a round too many": Bug(udp.udp_users, rounds_off_by_one, "exceed"),
    "a budget for each round": Bug(udp.udp_users, a_budget_for_each_round, "exceed"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_bug_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = CASES[name]
    bug.plant(monkeypatch)
    sessions = []
    for _ in range(bug.sessions):
        np.random.seed(0)  # noqa: NPY002 - a generator that anybody can seed is public
        sessions.append(bug.subject())
    audit = audited(name, sessions)
    assert audit.verdict == REFUTED, audit
    assert any(bug.because in one.name for one in audit.against), audit.against
