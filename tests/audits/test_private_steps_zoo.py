"""Planted bugs of DP-SGD are refuted or refused. As it is, it passes: `test_correct_schemes.py`."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from planted import Bug, check_refuted, noise, scaled, tiled, uncharged

from flwr_privacy.clients.certificates import private_steps as certificates
from flwr_privacy.clients.certificates.request import TrainingCertificate
from flwr_privacy.clients.torch import record_gradients
from flwr_privacy.clients.torch.dp_sgd import private_loop
from flwr_privacy.clients.torch.dp_sgd.private_optimizer import PrivateOptimizer
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.audits import udp_steps
from flwr_privacy.simulations.research.audits.udp import NORM
from flwr_privacy.simulations.research.audits.verdicts import REFUTED, audited
from flwr_privacy.udp import private_steps as terms

_chosen = certificates.chosen


def clipped_after_the_noise(patch: pytest.MonkeyPatch) -> None:
    """Clip the noised sum in place of the gradients."""
    noised = terms.PrivateStepsTerms.noised

    def clipped(self: Any, total: np.ndarray, random: SecureRandom) -> np.ndarray:
        made = noised(self, total, random)
        return made * min(1.0, 5 * NORM / float(np.linalg.norm(made)))

    patch.setattr(terms.PrivateStepsTerms, "noised", clipped)
    patch.setattr(
        record_gradients.Gradients,
        "scales",
        lambda self, copies, clipping_norm: torch.ones_like(self.norms(copies)),
    )


def of_arrays(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    """Noise for each array, as if it had its share of the clipping norm alone."""
    real = terms_noise(size, sigma, random).astype(np.float64)
    shares = np.repeat([np.sqrt(400 / 460), np.sqrt(60 / 460)], [400, 60])
    return np.rint(real * shares).astype(np.int64)


terms_noise = terms.discrete_gaussian


def clipped_too_weakly(patch: pytest.MonkeyPatch) -> None:
    real = record_gradients.Gradients.scales
    patch.setattr(
        record_gradients.Gradients,
        "scales",
        lambda self, copies, clipping_norm: real(self, copies, 2 * clipping_norm),
    )


def twice_the_steps(patch: pytest.MonkeyPatch) -> None:
    """Take twice as many steps as are charged: the loader goes on."""
    begun = private_loop.PrivateLoop.__init__

    def begin(self: Any, *given: Any, **named: Any) -> None:
        begun(self, *given, **named)
        self.steps *= 2

    patch.setattr(private_loop.PrivateLoop, "__init__", begin)
    length = udp_steps.private_training

    def longer(*given: Any, **named: Any) -> Any:
        model, optimizer, batches = length(*given, **named)
        batches.passes *= 2
        return model, optimizer, batches

    patch.setattr(udp_steps, "private_training", longer)


def never_counted(patch: pytest.MonkeyPatch) -> None:
    noised = certificates.PrivateStepsRequest.noised

    def uncounted(self: Any, total: np.ndarray, records: int) -> np.ndarray:
        self.taken = 0
        return noised(self, total, records)

    patch.setattr(certificates.PrivateStepsRequest, "noised", uncounted)


def extra_steps(patch: pytest.MonkeyPatch) -> None:
    twice_the_steps(patch)
    never_counted(patch)


def chosen_by_validation(patch: pytest.MonkeyPatch) -> None:
    """Have the app return the weights after the step that its own data liked best."""
    kept: dict[int, list[dict[str, torch.Tensor]]] = {}
    step = PrivateOptimizer.step

    def keep(self: Any, closure: Any = None) -> None:
        step(self, closure)
        kept.setdefault(id(self), []).append(copy.deepcopy(self._loop._model.state_dict()))

    patch.setattr(PrivateOptimizer, "step", keep)
    arrays = udp_steps.get_arrays

    def best(model: torch.nn.Module) -> Any:
        if kept:
            steps = kept.popitem()[1]
            records = torch.ones(3, 460)
            losses = []
            for state in steps:
                model.load_state_dict(state)
                losses.append(float(-model(records).abs().mean().detach()))
            model.load_state_dict(steps[int(np.argmax(losses))])
        return arrays(model)

    patch.setattr(udp_steps, "get_arrays", best)


def chosen_and_not_checked(patch: pytest.MonkeyPatch) -> None:
    chosen_by_validation(patch)
    patch.setattr(TrainingCertificate, "check", lambda self, before, after: None)


def sampled(draw: Any) -> Any:
    """Have records sampled in another way."""
    return lambda patch: patch.setattr(certificates, "chosen", draw)


def shuffled(n: int, rate: float, random: SecureRandom) -> np.ndarray:
    """Each record once in a pass, as a loader that shuffles has them: so many in every batch."""
    places = np.random.default_rng().permutation(n)[: int(rate * n)]
    return np.isin(np.arange(n), places)


CASES: dict[str, Bug] = {
    "clipped after the noise": Bug(udp_steps.udp_steps, clipped_after_the_noise),
    "clipped too weakly": Bug(udp_steps.udp_steps, clipped_too_weakly),
    "noise per array": Bug(udp_steps.udp_steps, noise(terms, of_arrays)),
    "noise x 0.9": Bug(udp_steps.udp_steps, noise(terms, scaled(0.9))),
    "noise tiled": Bug(udp_steps.udp_steps, noise(terms, tiled)),
    "a training not charged": Bug(udp_steps.udp_steps, uncharged, "not charged"),
    "extra steps": Bug(udp_steps.udp_steps, extra_steps),
    "weights chosen by validation": Bug(udp_steps.udp_steps, chosen_and_not_checked),
    "a loader that shuffles": Bug(udp_steps.udp_steps_sampled, sampled(shuffled), "fixed size"),
    "twice the rate": Bug(
        udp_steps.udp_steps_sampled,
        sampled(lambda n, rate, random: _chosen(n, 2 * rate, random)),
        "sampled",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_bug_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refuted(CASES[name], monkeypatch)


@pytest.mark.parametrize("cheat", [twice_the_steps, chosen_by_validation])
def test_what_an_app_does_beside_its_steps_gets_no_answer(
    cheat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheat(monkeypatch)
    session = udp_steps.udp_steps(rounds=1)
    assert not session.releases


def test_private_steps_as_they_are_pass_with_a_bound_below_the_ledger() -> None:
    audit = audited("steps", [udp_steps.udp_steps(insecure_seed=1)])
    assert audit.verdict != REFUTED
    assert 500 < audit.bound < audit.claimed <= 1000
