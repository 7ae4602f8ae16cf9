"""Modules that a user might have in the current folder, for tests."""

import sys
from itertools import count
from pathlib import Path

import pytest

__all__ = ["OWN_TASK", "write_module"]

OWN_TASK = """
import numpy as np
import torch

from flwr_privacy.simulations.tasks.task_list import Task


def income():
    \"\"\"Income by four columns.\"\"\"
    columns = np.random.default_rng({seed}).normal(size=(200, 4))
    classes = (columns[:, 0] > 0).astype(int)
    data, test = (columns[:150], classes[:150]), (columns[150:], classes[150:])
    return Task(model=lambda: torch.nn.Linear(4, {outputs}), data=data, test=test)
"""

_numbers = count(1)


def write_module(folder: Path, text: str) -> str:
    """Write a module of a name that no test had before; return the name."""
    name = f"own_module_{next(_numbers)}"
    (folder / f"{name}.py").write_text(text)
    return name


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an own folder, from which no module is imported any more after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    return tmp_path
