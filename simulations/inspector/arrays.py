"""Finds the arrays that an app starts from, by running its server up to the first round.

The app's modules are imported in a process of its own, for a limited time and without a network.
Its `main` runs until it calls the strategy's `start` or sends a message: nothing is trained.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from flwr_privacy.privacy.running_statistics import is_statistic

from .app_folder import AppFolder

__all__ = ["Arrays", "InitialArray", "arrays_of"]

_ADAPTERS = ("*.lora_*", "*.modules_to_save.*")
"""Patterns of the names that peft gives to what it trains."""

SECONDS = 120.0
"""How long the app's server may take to its first round; importing torch takes some of them."""


@dataclass(frozen=True)
class InitialArray:
    """An array of the model.

    Parameters
    ----------
    name : str
        Its name.
    shape : tuple of int
        Its shape.
    dtype : str
        Its type.
    suspected : bool
        Whether it looks like a running statistic, where names do not tell.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    suspected: bool

    @property
    def size(self) -> int:
        """Its number of entries."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_statistic(self) -> bool:
        """Whether its name is that of a running statistic."""
        return is_statistic(self.name)

    @property
    def is_float(self) -> bool:
        """Whether it has floating-point numbers: others are never sent."""
        return np.issubdtype(np.dtype(self.dtype), np.floating)


@dataclass(frozen=True)
class Arrays:
    """What the server of an app starts from.

    Parameters
    ----------
    arrays : tuple of InitialArray
        The model.
    rounds : int
        The rounds of the training.
    fraction_train : float
        Share of the clients in a round.
    min_train_nodes : int
        The fewest clients in a round.
    min_available_nodes : int
        The fewest clients with which a round begins.
    """

    arrays: tuple[InitialArray, ...]
    rounds: int
    fraction_train: float
    min_train_nodes: int
    min_available_nodes: int = 2

    def released(self, *, keeps_statistics: bool) -> list[InitialArray]:
        """Return the arrays whose updates leave the nodes."""
        return [a for a in self.arrays if a not in self.kept(keeps_statistics=keeps_statistics)]

    def kept(self, *, keeps_statistics: bool) -> list[InitialArray]:
        """Return the arrays that stay as the server has them."""
        return [
            a
            for a in self.arrays
            if not a.is_float or (keeps_statistics and (a.is_statistic or a.suspected))
        ]

    @property
    def suspected(self) -> list[str]:
        """The names of the arrays that look like running statistics."""
        return [a.name for a in self.arrays if a.suspected]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Patterns of the adapters of peft; none if there are none, or nothing else."""
        fitting = tuple(p for p in _ADAPTERS if any(fnmatchcase(a.name, p) for a in self.arrays))
        return fitting if len(self.part(fitting).arrays) < len(self.arrays) else ()

    def part(self, patterns: Collection[str]) -> "Arrays":
        """Return the arrays that fit one of some patterns."""
        part = (a for a in self.arrays if any(fnmatchcase(a.name, p) for p in patterns))
        return replace(self, arrays=tuple(part))


def arrays_of(app: AppFolder, *, seconds: float = SECONDS) -> "Arrays | str":
    """Return what an app's server starts from, or why that is not known.

    Parameters
    ----------
    app : AppFolder
        The app.
    seconds : float, default SECONDS
        How long its server may take to the first round.
    """
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-check-") as folder:
        found = Path(folder, "arrays.json")
        asked = {"server": app.server, "config": dict(app.config), "out": str(found)}
        paths = [str(app.path.resolve()), str(app.path.resolve() / "src")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",  # nothing is left in the app's folder
            "FLWR_TELEMETRY_ENABLED": "0",
        }
        command = [sys.executable, "-m", "flwr_privacy.simulations.inspector.first_round"]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(asked),
                cwd=folder,  # what the app writes is removed
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"the server did not come to its first round within {seconds:g} s"
        if not found.exists():
            lines = done.stderr.strip().splitlines() or ["it ended without an error"]
            return f"the server did not come to its first round: {lines[-1]}"
        values = json.loads(found.read_text())
    return Arrays(
        tuple(
            InitialArray(a["name"], tuple(a["shape"]), a["dtype"], a["suspected"])
            for a in values["arrays"]
        ),
        rounds=values["rounds"],
        fraction_train=values["fraction_train"],
        min_train_nodes=values["min_train_nodes"],
        min_available_nodes=values["min_available_nodes"],
    )
