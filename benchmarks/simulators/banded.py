"""The row `banded-mf`: central DP with banded matrix factorisation, ours beside pfl-research's."""

import json
import logging
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.central_dp.correlated.options import BandedMF
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.simulations.app.server_app import app
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.tasks.partition import partition
from flwr_privacy.simulations.tasks.tasks import dataset, initial_arrays, task

from ..report import Comparison
from .environment import pfl_environment

__all__ = ["banded_mf"]

SIDE = Path(__file__).parent / "pfl_banded_side.py"
SEEDS = (0, 1, 2)
CLIENTS, COHORT, ROUNDS = 200, 20, 100
SEPARATION = CLIENTS // COHORT
EPSILON, DELTA, NORM = 8.0, 1e-5, 0.3
EPOCHS, BATCH, LEARNING_RATE = 2, 8, 0.2
TIMEOUT = 900.0
RIVAL = "pfl-research's BandedMatrixFactorization"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What came of a training: the accuracy on test records, and the seconds of its rounds."""

    accuracy: float
    seconds: list[float]


def banded_mf() -> Iterator[Comparison]:
    """Compare noise, accuracy and time: same task, budget, rounds, cohorts and separation."""
    logging.getLogger("flwr.privacy").setLevel(logging.ERROR)
    ours: list[Training] = []
    theirs: list[Training] = []
    multiplier, factor = 0.0, np.eye(ROUNDS)
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        for seed in SEEDS:
            ours.append(_ours(Path(name, f"ours-{seed}"), seed))
            report = _pfl(Path(name, f"pfl-{seed}"), seed)
            theirs.append(Training(accuracy=report["accuracy"], seconds=report["seconds"]))
            multiplier, factor = report["multiplier"], np.array(report["factor"])
    plan = CentralDPNoisePlan(
        noise="server",
        sampling="balanced",
        epsilon=EPSILON,
        delta=DELTA,
        rounds=ROUNDS,
        q=COHORT / CLIENTS,
        neighbours="zero_out",  # pfl's: the noise is for a distance of one clipping norm
        correlated=BandedMF(),
    )
    most = math.ceil(ROUNDS / SEPARATION)
    spent = epsilon_of(_joint(factor) / multiplier, DELTA)
    print(
        f"(pfl-research: noise multiplier {multiplier:.4g} for {most} participations, whose joint "
        f"sensitivity by its factor is {_joint(factor):.4g} and not sqrt({most}): epsilon "
        f"{spent:.4g} at delta {DELTA:g}, where {EPSILON:g} was asked for. Ours: "
        f"{plan.noise_multiplier:.4g} for a joint sensitivity in it)"
    )
    yield Comparison(
        what="banded MF: multiplier of independent noise with",
        rival=RIVAL,
        ours=[plan.effective_multiplier],
        theirs=[multiplier * _error(factor)],
        unit="1",
    )
    yield Comparison(
        what="banded MF: wrong on test records",
        rival=RIVAL,
        ours=[1 - training.accuracy for training in ours],
        theirs=[1 - training.accuracy for training in theirs],
        unit="1",
    )
    yield Comparison(
        what="banded MF: a round",
        rival=RIVAL,
        ours=[second for training in ours for second in training.seconds],
        theirs=[second for training in theirs for second in training.seconds],
    )


def _settings(seed: int) -> Settings:
    values = {
        "scheme": "central-dp",
        "task": "digits-mlp",
        "clients": CLIENTS,
        "per_round": COHORT,
        "rounds": ROUNDS,
        "partition.kind": "iid",
        "training.epochs": EPOCHS,
        "training.batch_size": BATCH,
        "training.learning_rate": LEARNING_RATE,
        "training.decay": 0.0,
        "strategy.noise": "server",
        "strategy.sampling": "balanced",
        "strategy.correlated": BandedMF.name,
        "strategy.neighbours": "zero_out",
        "strategy.epsilon": EPSILON,
        "strategy.delta": DELTA,
        "strategy.clipping_norm": NORM,
        "seed": seed,
    }
    return Settings().with_values(values)


def _ours(path: Path, seed: int) -> Training:
    """Train with this library on its inline engine."""
    folder = RunFolder.create(path, _settings(seed), engine="inline", nodes=CLIENTS, test_seed=None)
    (folder.path / "clients").mkdir()
    run_inline(
        app,
        "flwr_privacy.simulations.app.client_app:app",
        nodes=CLIENTS,
        run_config=folder.app_config(resume=False, accept_lost_rounds=False),
        state=folder.path / "clients",
    )
    lines = folder.rounds()
    seconds = np.diff([line["seconds"] for line in lines[1:]])  # since the start
    return Training(accuracy=lines[-1]["server"]["accuracy"], seconds=seconds.tolist())


def _pfl(path: Path, seed: int) -> dict[str, Any]:
    """Train with pfl-research on the same records, from the same weights."""
    path.mkdir()
    settings = _settings(seed)
    data = dataset(task(settings.task), settings)
    holders = np.full(len(data.labels), -1)
    parts = partition(data.labels, clients=CLIENTS, settings=settings.partition, seed=seed)
    for client, part in enumerate(parts):
        holders[part] = client
    model = initial_arrays(task(settings.task), seed)
    np.savez(
        path / "data.npz",
        features=data.features,
        labels=data.labels,
        test_features=data.test_features,
        test_labels=data.test_labels,
        holders=holders,
        **{f"model {place}": array for place, array in enumerate(model.values())},
    )
    asked = {
        "seed": seed,
        "clients": CLIENTS,
        "cohort": COHORT,
        "rounds": ROUNDS,
        "separation": SEPARATION,
        "epsilon": EPSILON,
        "delta": DELTA,
        "clipping_norm": NORM,
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "learning_rate": LEARNING_RATE,
    }
    python = str(pfl_environment() / "bin" / "python")
    told = {"data": path / "data.npz", "out": path / "report.json", "asked": json.dumps(asked)}
    done = subprocess.run(
        [python, str(SIDE), *(f"--{name}={value}" for name, value in told.items())],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"pfl-research failed: {done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads((path / "report.json").read_text(encoding="utf-8"))
    return report


def _joint(factor: NDArray[np.float64]) -> float:
    """Return how far a client with updates of norm 1 moves C x, where its rounds are orthogonal."""
    squares = (factor**2).sum(axis=0)
    return float(np.sqrt(max(squares[first::SEPARATION].sum() for first in range(SEPARATION))))


def _error(factor: NDArray[np.float64]) -> float:
    """Return the error of the models over that of independent noise as large as z."""
    sums = np.tril(np.ones((ROUNDS, ROUNDS))) @ np.linalg.inv(factor)
    return float(np.linalg.norm(sums) / math.sqrt(ROUNDS * (ROUNDS + 1) / 2))
