"""A small experiment with two curves."""

from pathlib import Path

import pytest
from experiment_files import STEPS, SWEEP

from flwr_privacy.simulations.research.experiments import description as experiments


@pytest.fixture
def steps(tmp_path: Path) -> experiments.ExperimentDescription:
    path = tmp_path / "steps.toml"
    path.write_text(STEPS)
    return experiments.read(path, "papers/steps")


@pytest.fixture
def sweep(tmp_path: Path) -> experiments.ExperimentDescription:
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    return experiments.read(path, "papers/sweep")
