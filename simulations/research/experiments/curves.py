"""Curves of an experiment from its runs: values by round, and the cost up to each round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr_privacy.simulations.settings.metrics_file import score
from flwr_privacy.simulations.settings.run_folder import RunFolder

__all__ = [
    "COSTS",
    "END",
    "MEASURES",
    "METRICS",
    "SHOWN",
    "TREE_COSTS",
    "Searched",
    "TrainedRun",
    "diverged",
    "point",
]

METRICS = ("accuracy", "loss")
_USUAL_COSTS = ("rounds", "bits", "uploads", "seconds")
TREE_COSTS = {"energy": "energy_j", "delay": "delay_s"}
"""Costs of a tree, which functions have and trainings of M2FDP, and their names in a round."""
COSTS = (*_USUAL_COSTS, *TREE_COSTS)
MEASURES = ("value", "jitter", "steps", "secure", "insecure")
"""What functions alone have, beside some of `METRICS` and `TREE_COSTS`."""
END = "end"
"""Names the last point of a curve, whatever its place: ``label @ end``."""
SHOWN = (*METRICS, "rounds", "planned")
"""What a picture of trainings may show."""
NOT_FINITE = {"not finite", "range"}  # reasons with which a server refuses such a reply


@dataclass(frozen=True, kw_only=True)
class Searched:
    """How a run was chosen among several runs of the same seed.

    Parameters
    ----------
    value : float
        Its value of the setting that was searched.
    rounds : Sequence of int
        Rounds of each run of the search.
    epsilon : float
        What one of them spent; 0 without a budget.
    delta : float
        At which delta.
    """

    value: float
    rounds: Sequence[int]
    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """One run of a curve.

    Parameters
    ----------
    curve : str
        Label of its curve.
    seed : int
        Root of its draws.
    values : dict of str to list of float
        By round, from round 0 (before training): ``accuracy`` and ``loss`` on the test records;
        ``planned``, the rounds that were planned; ``epsilon``, spent by who had spent most; the
        costs up to then, ``rounds``, ``bits`` (uplink bits per value of the model and drawn
        client), ``uploads`` (answers of clients in all exchanges), ``seconds`` (of the virtual
        clock) and, of M2FDP, ``energy`` in joules and ``delay`` in seconds. A run that diverged
        ends with its last finite loss. A point of a function has one number for each of its
        measures.
    diverged : bool
        Whether the model was not finite at some time.
    model : Path
        The final model, where there is one.
    x : float, optional
        Where on the curve it is, if that shows what runs came to over a setting.
    candidate : float, optional
        What distinguishes it in a search that is still to be decided.
    searched : Searched, optional
        How it was chosen.
    exact : bool, default False
        Whether no draw has a part in it, so that one run is all that there is to know.
    note : str, default ""
        What is to be said beside its values.
    seconds : float, default 0
        How long it took, with all runs of a search.
    """

    curve: str
    seed: int
    values: Mapping[str, list[float]]
    diverged: bool
    model: Path
    x: float | None = None
    candidate: float | None = None
    searched: Searched | None = None
    exact: bool = False
    note: str = ""
    seconds: float = 0.0

    @property
    def point(self) -> str:
        """Its curve, and where on it."""
        return point(self.curve, self.x)

    @classmethod
    def of(cls, folder: RunFolder, *, curve: str, seed: int) -> "TrainedRun":
        """Read a run from its folder."""
        settings, lines = folder.settings, folder.rounds()
        drawn = settings.per_round or settings.clients or int(folder.summary["nodes"])
        size = _model_size(settings.task)
        values: dict[str, list[float]] = {
            name: [] for name in (*METRICS, *_USUAL_COSTS, "planned", "epsilon")
        }
        of_tree = TREE_COSTS if settings.scheme == "m2fdp" else {}
        uploads, spent = 0, dict.fromkeys(of_tree, 0.0)
        for line in lines:
            if _broken(line):
                break
            # The first line has no training in it; in the others every exchange is a training's.
            if line["round"] > 0:
                uploads += line.get("answered", 0) * line.get("exchanges", 0)
            sent = line["total_bytes_up"] - lines[0]["total_bytes_up"]
            values["rounds"].append(line["round"])
            values["bits"].append(8 * sent / (size * drawn))
            values["uploads"].append(uploads)
            values["seconds"].append(line.get("virtual_seconds", 0.0))
            own = line.get("scheme") or {}
            values["planned"].append(own.get("T", settings.rounds))
            values["epsilon"].append(own.get("epsilon", 0.0))
            for cost, name in of_tree.items():
                spent[cost] += own[name] if line["round"] > 0 else 0.0
                values.setdefault(cost, []).append(spent[cost])
            for metric in METRICS:
                value = score(line, metric)
                values[metric].append(math.nan if value is None else value)
        return cls(
            curve=curve,
            seed=seed,
            values=values,
            diverged=diverged(lines),
            model=folder.model_path,
            seconds=float(lines[-1].get("seconds", 0.0)) if lines else 0.0,
        )


def point(curve: str, x: float | None) -> str:
    """Name a point of a curve.

    Examples
    --------
    >>> point("CRD", 4), point("CRD", None)
    ('CRD @ 4', 'CRD')
    """
    return curve if x is None else f"{curve} @ {x:g}"


def diverged(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a model was not finite in some round, by the lines of its run.

    Either its loss was not, or no update was: without a reply that can be used a round is skipped.

    Examples
    --------
    >>> diverged([{"round": 0, "server": {"loss": 2.3}}, {"round": 1, "server": {"loss": None}}])
    True
    """
    return any(_broken(line) for line in lines)


def _broken(line: Mapping[str, Any]) -> bool:
    loss = score(line, "loss")
    refused = line.get("refused") or {}
    nothing_finite = line.get("skipped", False) and not NOT_FINITE.isdisjoint(refused)
    return nothing_finite or (loss is not None and not math.isfinite(loss))


@lru_cache
def _model_size(name: str) -> int:
    """Return the number of values of a task's model."""
    from flwr_privacy.simulations.tasks.tasks import initial_arrays, task

    return sum(array.size for array in initial_arrays(task(name), 0).values())
