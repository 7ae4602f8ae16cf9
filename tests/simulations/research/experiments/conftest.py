"""A small experiment with two curves."""

from pathlib import Path

import pytest
from experiment_files import STEPS, SWEEP

from flwr_privacy.simulations.research.experiments import files
from flwr_privacy.simulations.research.experiments.description import ExperimentDescription


@pytest.fixture
def steps(tmp_path: Path) -> ExperimentDescription:
    path = tmp_path / "steps.toml"
    path.write_text(STEPS)
    return files.read(path, "papers/steps")


@pytest.fixture
def sweep(tmp_path: Path) -> ExperimentDescription:
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    return files.read(path, "papers/sweep")
