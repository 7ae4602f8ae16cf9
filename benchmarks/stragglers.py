"""The row of ACFL: virtual time until a model is good, with a deadline and without.

MNIST where the environment variable FLWR_PRIVACY_DATA names a folder that has it, otherwise
scikit-learn's digits.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_privacy.clients import ACFLClient, own_client_app
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.settings.flat_options import keywords_of
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.simulations.tasks.data import available
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import ACFL

from .report import Comparison

__all__ = ["stragglers"]

CLIENTS, ROUNDS = 20, 150
STRAGGLERS = StragglerModel(kind="lognormal", spread=0.5, slow_fraction=0.2, slowdown=10.0)
DEADLINE = 3.0  # virtual seconds; most answers take about one
PAPER = {"noise": "paper", "mi_epsilon": 20.0}
SIDES: dict[str, dict[str, Any]] = {
    "ACFL": {**PAPER, "deadline": DEADLINE},
    "alpha = 0": {**PAPER, "alpha": 0, "deadline": DEADLINE},
    "stragglers ignored": {**PAPER, "alpha": 0, "straggler_rate": 0, "deadline": DEADLINE},
    "NA, alpha = 0.5": {**PAPER, "alpha": 0.5, "deadline": DEADLINE},
}
WAITING: dict[str, Any] = {**PAPER, "alpha": 0}


@dataclass(frozen=True)
class _Scene:
    """What is trained: until the accuracy is at a level, with steps and seeds alike."""

    settings: Settings
    level: float
    step: float  # on the mean loss
    ridge: float  # of NA, whose model diverges without
    seeds: tuple[int, ...]


def stragglers() -> Iterator[Comparison]:
    """Compare the virtual seconds to a level with those of waiting for everybody."""
    data = _data()
    waiting = _seconds(data, WAITING)
    for name, options in SIDES.items():
        if name.startswith("NA"):
            options = {**options, "ridge": data.ridge}
        yield Comparison(
            what=f"virtual time to {data.level:.0%}, {name}",
            rival=f"waiting for all {CLIENTS}: {data.settings.task}, no setup, no noise",
            ours=_seconds(data, options),
            theirs=waiting,
            at_least=3.0 if name == "ACFL" else None,
        )


def _data() -> _Scene:
    root = os.environ.get("FLWR_PRIVACY_DATA")
    if available(root)["mnist"] == "found":
        some = Settings(task="mnist-rff", data_root=root, train_records=10_000)
        return _Scene(some, level=0.9, step=8.0, ridge=25.0, seeds=(0,))
    digits = Settings(task="digits-rff")
    return _Scene(digits, level=0.93, step=2.0, ridge=15.0, seeds=(0, 1, 2))


def _records(settings: Settings) -> int:
    return len(tasks.dataset(tasks.task(settings.task), settings).labels)


def _seconds(data: _Scene, options: dict[str, Any]) -> list[float]:
    """Return the virtual seconds of a training with each seed."""
    return [_to_level(data, replace(data.settings, seed=seed), options) for seed in data.seeds]


class _UntilGood(ACFL):
    """Stops at a level of the accuracy on the test records."""

    def __init__(self, level: float, **options: Any) -> None:
        super().__init__(**options)
        self.level, self.accuracy = level, 0.0

    def stop(self) -> str:
        return "the level is reached" if self.accuracy >= self.level else ""


def _to_level(data: _Scene, settings: Settings, options: dict[str, Any]) -> float:
    task = tasks.task(settings.task)
    parameters = tasks.regression_parameters(task, settings)
    parameters["learning_rate"] = data.step / _records(settings)
    chosen = {"seed": settings.seed, "stragglers": STRAGGLERS, **parameters, **options}
    strategy = _UntilGood(data.level, **keywords_of(ACFL, chosen))
    start = tasks.initial_arrays(task, settings.seed)["weights"].astype(np.float64)
    server_app = ServerApp()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = {"weights": arrays["weights"].numpy()}
        found = tasks.evaluate_server(task, settings, model)
        strategy.accuracy = found["accuracy"]
        return MetricRecord(dict(found))

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(
            grid, ArrayRecord({"weights": Array(start)}), num_rounds=ROUNDS, evaluate_fn=evaluate
        )

    with tempfile.TemporaryDirectory() as state:
        run_inline(
            server_app,
            _client_app(task, settings),
            nodes=CLIENTS,
            state=state,
            insecure_seed=settings.seed,
        )
    if strategy.accuracy < data.level:
        raise RuntimeError(f"{options}: accuracy {strategy.accuracy:.3f} after {ROUNDS} rounds")
    return strategy.messenger.virtual_seconds


def _client_app(task: tasks.Task, settings: Settings) -> ClientApp:
    def data_fn(context: Context) -> Any:
        index = int(context.node_config["partition-id"])
        return partial(tasks.regression_data, task, settings, index, CLIENTS)

    client = partial(ACFLClient, features=tasks.feature_map(task), excess="clip")
    return own_client_app(client, data_fn)
