"""What the runs of an experiment came to: values by round, and what they had cost by then."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr_privacy.simulations.runs import RunFolder, score

__all__ = ["COSTS", "METRICS", "Trained", "diverged"]

METRICS = ("accuracy", "loss")
COSTS = ("rounds", "bits", "uploads")
NOT_FINITE = {"not finite", "range"}  # reasons with which a server refuses such a reply


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run of a curve.

    Parameters
    ----------
    curve : str
        Label of its curve.
    seed : int
        Root of its draws.
    values : dict of str to list of float
        By round, from round 0 (before training): ``accuracy`` and ``loss`` on the test records;
        the costs up to then, ``rounds``, ``bits`` (uplink bits per value of the model and drawn
        client) and ``uploads`` (answers of clients in all exchanges). A run that diverged ends
        with its last finite loss.
    diverged : bool
        Whether the model was not finite at some time.
    model : Path
        The final model, where there is one.
    """

    curve: str
    seed: int
    values: Mapping[str, list[float]]
    diverged: bool
    model: Path

    @classmethod
    def of(cls, folder: RunFolder, *, curve: str, seed: int) -> "Trained":
        """Read a run from its folder."""
        settings, lines = folder.settings, folder.rounds()
        drawn = settings.per_round or settings.clients or int(folder.summary["nodes"])
        size = _model_size(settings.task)
        values: dict[str, list[float]] = {name: [] for name in (*METRICS, *COSTS)}
        uploads = 0
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
            for metric in METRICS:
                value = score(line, metric)
                values[metric].append(math.nan if value is None else value)
        return cls(
            curve=curve,
            seed=seed,
            values=values,
            diverged=diverged(lines),
            model=folder.model_path,
        )


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
    from flwr_privacy.simulations.tasks import initial_arrays, task

    return sum(array.size for array in initial_arrays(task(name), 0).values())
