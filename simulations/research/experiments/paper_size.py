"""Estimates the machine-hours of experiments that NumPy simulates, at the paper's size.

Each curve is trained for one and for two rounds with the paper's clients, records and model; what
the second round adds is taken for every round. The hours are CPU time of one core, so that other
work on the machine moves them little.
"""

import json
import math
import time
from pathlib import Path

from flwr_privacy.simulations.research.points import Point

from .description import ExperimentDescription
from .functions import FUNCTIONS
from .runs import function_points

__all__ = ["SEEDS", "simulated_hours"]

SEEDS = 5
_READ = ("round", "seconds", "target")  # where a curve is read, not what is trained
_HOUR = 3600


def simulated_hours(
    chosen: ExperimentDescription, *, data_root: Path | None = None, seeds: int = SEEDS
) -> float:
    """Return the estimated hours of an experiment whose function trains round by round.

    Parameters
    ----------
    chosen : ExperimentDescription
        An experiment of a function whose points have ``rounds``.
    data_root : Path, optional
        Folder with data sets that no library brings.
    seeds : int, default 5
        Number of seeds.
    """
    trainings: dict[str, Point] = {}
    for _, _, point in function_points(chosen, full=True):
        own = {key: value for key, value in point.items() if key not in _READ}
        trainings.setdefault(json.dumps(own, sort_keys=True), point)
    _seconds(chosen, next(iter(trainings.values())), 1, data_root)  # reads the data
    total = 0.0
    for training in trainings.values():
        one, two = (_seconds(chosen, training, rounds, data_root) for rounds in (1, 2))
        total += one + max(0.0, two - one) * (training["rounds"] - 1)
    return seeds * total / _HOUR


def _seconds(
    chosen: ExperimentDescription, point: Point, rounds: int, data_root: Path | None
) -> float:
    """Return the CPU time of a training of so many rounds."""
    short = {key: value for key, value in point.items() if key not in ("round", "seconds")}
    short["rounds"] = rounds
    if {"round", "seconds"} & set(point):
        short["round"] = rounds
    if chosen.function.startswith("m2fdp"):
        # The noise of a round is that of the whole training, whose budget this is a part of.
        short["epsilon"] = point["epsilon"] * math.sqrt(rounds / point["rounds"])
    started = time.process_time()
    FUNCTIONS[chosen.function].of([short], 0, data_root)
    return time.process_time() - started
