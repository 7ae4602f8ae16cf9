"""Planted bugs of UDP are refuted. The scheme as it is passes: `test_correct_schemes.py`."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from planted import (
    Bug,
    EverySecond,
    always_the_same,
    check_refuted,
    clip_each_array,
    clip_entries,
    clip_not,
    clip_the_mean,
    clip_too_weakly,
    clip_without_numbers,
    clips,
    cut,
    even,
    half_sensitivity,
    laplace,
    noise,
    numbered,
    once_for_all,
    only_arrays,
    partly,
    partly_less,
    public,
    scaled,
    smooth,
    tiled,
    uncharged,
    without_the_end,
)

from flwr_privacy.clients.certificates import per_record_steps
from flwr_privacy.clients.torch import record_gradients
from flwr_privacy.pipeline.planned_release import PlannedRelease
from flwr_privacy.privacy import updates
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.audits import udp, udp_records
from flwr_privacy.udp import terms as udp_terms
from flwr_privacy.udp.schedule import UDPNoisePlan


def nan_passes(patch: pytest.MonkeyPatch) -> None:
    """Let a length that is no number pass for a short one, and send zeros for what is none."""

    def between(start: Any, trained: Any, names: Any, *, clipping_norm: Any = None) -> Any:
        names = list(names)
        difference = [np.asarray(trained[n], float) - start[n] for n in names]
        vector = np.concatenate([part.reshape(-1) for part in difference])
        length = float(np.sqrt(vector @ vector))
        # As Flower clips: min(1, norm / nan) is 1.
        with np.errstate(invalid="ignore"):
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
    noise(udp_terms, only_arrays)(patch)


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
        # Before the codes take the place of the vector.
        still = {n: part == 0 for n, part in measured[0].arrays(measured[0].vector).items()}
        arrays, own = real(self, measured, plan, random)
        for name, none in still.items():
            arrays[name] = np.where(none, 0, arrays[name]).astype(np.int32)
        return arrays, own

    patch.setattr(udp_terms.UDPTerms, "noise", noised)


def cheap(patch: pytest.MonkeyPatch) -> None:
    """Charge for twice the noise that is added."""
    real = udp_terms.UDPTerms.charge

    def charge(self: Any) -> Any:
        found = real(self)
        return replace(found, noise_multiplier=2 * found.noise_multiplier)

    patch.setattr(udp_terms.UDPTerms, "charge", charge)


def rounds_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Spread the budget over a round less, and let the node allow the last one."""
    real = UDPNoisePlan.__init__

    def planned(self: Any, **named: Any) -> None:
        real(self, **{**named, "rounds": max(1, named["rounds"] - 1)})

    patch.setattr(UDPNoisePlan, "__init__", planned)
    patch.setattr(PlannedRelease, "check_affordable", lambda self, entries: None)


def a_budget_for_each_round(patch: pytest.MonkeyPatch) -> None:
    """Spend the whole budget in every round."""
    real = UDPNoisePlan.__init__
    patch.setattr(
        UDPNoisePlan, "__init__", lambda self, **named: real(self, **{**named, "rounds": 1})
    )
    patch.setattr(PlannedRelease, "check_affordable", lambda self, entries: None)


def records_clipped_too_weakly(patch: pytest.MonkeyPatch) -> None:
    real = record_gradients.Gradients.scales
    patch.setattr(
        record_gradients.Gradients,
        "scales",
        lambda self, copies, clipping_norm: real(self, copies, 4 * clipping_norm),
    )


def sampled(draw: Any) -> Any:
    """Have records sampled in another way."""
    return lambda patch: patch.setattr(per_record_steps, "chosen", draw)


_chosen = per_record_steps.chosen

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
    "a public generator": Bug(udp.udp_users, noise(udp_terms, public), "again", sessions=2),
    "a public seed": Bug(udp.udp_users, noise(udp_terms, numbered()), "again", sessions=2),
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
    # Records
    "records clipped too weakly": Bug(udp_records.udp_records, records_clipped_too_weakly),
    "records: the wrong sensitivity": Bug(
        udp_records.udp_records, half_sensitivity(per_record_steps)
    ),
    "records: noise x 0.9": Bug(udp_records.udp_records, noise(udp_terms, scaled(0.9))),
    "records: noise reused": Bug(udp_records.udp_records, noise(udp_terms, EverySecond("reused"))),
    "records: a release not charged": Bug(udp_records.udp_records, uncharged, "not charged"),
    "twice the rate": Bug(
        udp_records.udp_sampled,
        sampled(lambda n, rate, random: _chosen(n, 2 * rate, random)),
        "sampled",
    ),
    "a sample of a fixed size": Bug(
        udp_records.udp_sampled,
        sampled(lambda n, rate, random: np.random.default_rng().permutation(n)[: int(rate * n)]),
        "fixed size",
    ),
    "the same sample": Bug(
        udp_records.udp_sampled,
        sampled(lambda n, rate, random: _chosen(n, rate, SecureRandom.insecure(1))),
        "depend",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_bug_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refuted(CASES[name], monkeypatch)
