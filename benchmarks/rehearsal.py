"""The rehearsal of ACFL: the grid of its Figure 3, all settings at once, and one after the other.

The rival is the algorithm written down as it is read: device by device, round by round, one setting
at a time. One setting of it is trained, with one seed, and its time is multiplied up.
"""

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import gradient, moments_gradient
from flwr_privacy.acfl.steps import StepSize
from flwr_privacy.acfl.weights import coded_energy
from flwr_privacy.simulations.research.acfl.numpy_simulation import (
    ACFLSettings,
    coded_set,
    simulate,
    stragglers,
)
from flwr_privacy.simulations.research.acfl.synthetic_data import ACFLSyntheticData, paper_data

from .report import Comparison

__all__ = ["rehearsal"]

SEEDS, ROUNDS, REPETITIONS = 10, 1000, 3
STEPS = StepSize(1e-4, "inverse")
BUDGET = 300.0  # seconds
LARGEST_DIFFERENCE = 1e-9


def rehearsal() -> Iterator[Comparison]:
    """Compare the seconds of the grid with the budget for it, and with the plain loop."""
    settings = _grid()
    ours, theirs = [], []
    for repetition in range(REPETITIONS):
        began = time.perf_counter()
        curves = [
            simulate(paper_data(seed), settings, rounds=ROUNDS, steps=STEPS, seed=seed)
            for seed in range(SEEDS)
        ]
        ours.append(time.perf_counter() - began)
        data = paper_data(repetition)
        began = time.perf_counter()
        model = _plainly(data, settings[0], seed=repetition)
        theirs.append((time.perf_counter() - began) * len(settings) * SEEDS)
        apart = np.linalg.norm(curves[repetition].models[0] - model) / np.linalg.norm(model)
        if apart > LARGEST_DIFFERENCE:
            raise RuntimeError(f"the models differ by {apart:.2g} of their norm")
    what = f"ACFL Fig. 3: {len(settings)} settings, {SEEDS} seeds"
    yield Comparison(
        what=what, rival=f"{BUDGET:g} s, the budget for it", ours=ours, theirs=[BUDGET], at_most=1.0
    )
    yield Comparison(
        what=what,
        rival="device by device, one setting and seed measured and scaled",
        ours=ours,
        theirs=theirs,
    )


def _grid() -> list[ACFLSettings]:
    """Return ACFL and what it is compared with, for two rates and five noises."""
    found = []
    for p in (0.2, 0.4):
        for s in (0.01, 0.1, 1.0, 10.0, 100.0):
            found += [
                ACFLSettings(alpha=alpha, straggler_rate=p, sigma1_sq=s, sigma2_sq=s)
                for alpha in ("estimated", 0.5, 1.0)
            ]
        found += [
            ACFLSettings(alpha=0, straggler_rate=p, assumed_rate=assumed) for assumed in (None, 0.0)
        ]
    return [*found, ACFLSettings(alpha=0, straggler_rate=0)]


def _plainly(data: ACFLSyntheticData, setting: ACFLSettings, *, seed: int) -> NDArray[np.float64]:
    """Train one setting and return its model."""
    answered = stragglers(data, setting, rounds=ROUNDS, seed=seed)
    coded = coded_set(data, setting, seed=seed)
    policy = setting.policy()
    model = data.start
    for t in range(1, ROUNDS + 1):
        came = [
            gradient(data.features[i], data.labels[i], model)
            for i in np.flatnonzero(answered[t - 1])
        ]
        energy = coded_energy(
            float(np.sum(model**2)), setting.sigma1_sq, setting.sigma2_sq, *model.shape
        )
        weights = policy.weigh(
            t=t,
            answered=len(came),
            devices=data.devices,
            squares=sum(float(np.sum(one**2)) for one in came),
            energy=energy,
        )
        if weights is not None:
            total = weights.coded * moments_gradient(coded, model) + weights.received * sum(came)
            model = model - STEPS.at(t) * total
    return model
