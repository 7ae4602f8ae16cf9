"""ACFL in NumPy: the grid of its Figure 3, beside the inline engine.

One setting and seed is trained inline too, for a few rounds by the real strategy and clients; both
models are equal, and the time of a round is multiplied up.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from flwr_privacy.clients import acfl_client_app
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.research.acfl.numpy_simulation import (
    MODEL,
    SimulatedACFL,
    of_seed,
)
from flwr_privacy.simulations.research.acfl.synthetic_data import ACFLSyntheticData, paper_data
from flwr_privacy.strategies import ACFL, DataBounds, Exact, SetupVariances, Weighting

from .report import Comparison

__all__ = ["numpy_simulation"]

SEEDS, ROUNDS, INLINE_ROUNDS = 10, 1000, 10
BUDGET = 300.0  # seconds
LARGEST_DIFFERENCE = 1e-9


def numpy_simulation() -> Iterator[Comparison]:
    """Compare the seconds of the grid with the budget for it, and with the inline engine."""
    data = [paper_data(seed) for seed in range(SEEDS)]
    settings = _grid()
    began = time.perf_counter()
    for seed in range(SEEDS):
        for p, setting in settings:
            training = SimulatedACFL(**setting, **of_seed(seed, rate=p))
            training.simulate(data[seed], rounds=ROUNDS)
    ours = time.perf_counter() - began
    p, setting = settings[0]
    one = {**setting, **of_seed(0, rate=p)}
    trained = SimulatedACFL(**one).simulate(data[0], rounds=INLINE_ROUNDS)
    model, seconds = _inline(data[0], ACFL(**one))
    apart = np.linalg.norm(trained.model - model) / np.linalg.norm(model)
    if apart > LARGEST_DIFFERENCE:
        raise RuntimeError(f"the models differ by {apart:.2g} of their norm")
    what = f"ACFL Fig. 3: {len(settings)} settings, {SEEDS} seeds"
    yield Comparison(
        what=what,
        rival=f"{BUDGET:g} s, the budget for it",
        ours=[ours],
        theirs=[BUDGET],
        at_most=1.0,
    )
    yield Comparison(
        what=what,
        rival="inline engine, rounds of one setting and seed measured and scaled",
        ours=[ours],
        theirs=[seconds * ROUNDS * len(settings) * SEEDS],
    )


def _grid() -> list[tuple[float, dict[str, Any]]]:
    """Return ACFL and what it is compared with, for two rates and five noises, by rate."""
    steps = {"learning_rate": 1e-4, "schedule": "inverse", "data": DataBounds(max_records=100)}
    found: list[tuple[float, dict[str, Any]]] = []
    for p in (0.2, 0.4):
        for s in (0.01, 0.1, 1.0, 10.0, 100.0):
            privacy = SetupVariances(sigma1_sq=s, sigma2_sq=s)
            for alpha in ("estimated", 0.5, 1.0):
                weighting = Weighting(alpha=alpha, straggler_rate=p)
                found.append((p, {"privacy": privacy, "weighting": weighting, **steps}))
        for assumed in (p, 0.0):
            weighting = Weighting(alpha=0.0, straggler_rate=assumed)
            found.append((p, {"privacy": Exact(), "weighting": weighting, **steps}))
    return found


def _inline(data: ACFLSyntheticData, strategy: ACFL) -> tuple[NDArray[np.float64], float]:
    """Train by messages; return the model, and the seconds of a round."""
    ends: list[float] = []
    models: list[NDArray[np.float64]] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        start = ArrayRecord({MODEL: Array(data.start)})
        result = strategy.start(
            grid,
            start,
            num_rounds=INLINE_ROUNDS,
            evaluate_fn=lambda *_: ends.append(time.perf_counter()),
        )
        models.append(result.arrays[MODEL].numpy())

    def data_of(context: Context) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        row = int(str(context.node_config["partition-id"]))
        return data.features[row], data.labels[row]

    run_inline(server_app, acfl_client_app(data_of), nodes=data.devices, insecure_seed=0)
    return models[0], float(np.median(np.diff(ends)))
