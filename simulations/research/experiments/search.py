"""Picks the best of several runs: the value that a parameter search would have chosen."""

import math
from collections.abc import Sequence
from dataclasses import replace

from .curves import Searched, TrainedRun

__all__ = ["chosen"]


def chosen(runs: Sequence[TrainedRun], *, delta: float) -> list[TrainedRun]:
    """Return a run for each seed: the one with the value that has the least loss for other seeds.

    So a seed's result has no part in the choice; a seed that is alone chooses for itself.

    Parameters
    ----------
    runs : Sequence of TrainedRun
        Those of one point of a curve: for each seed one per candidate.
    delta : float
        That of their budget.
    """
    last = {(run.seed, run.candidate): _last_loss(run) for run in runs}
    seeds = sorted({run.seed for run in runs})
    candidates = list(dict.fromkeys(run.candidate for run in runs))
    found = []
    for seed in seeds:
        others = [other for other in seeds if other != seed] or [seed]
        best = min(candidates, key=lambda value: sum(last[other, value] for other in others))
        own = [run for run in runs if run.seed == seed]
        (run,) = [run for run in own if run.candidate == best]
        assert best is not None  # what is searched has values
        searched = Searched(
            value=best,
            rounds=[int(one.values["rounds"][-1]) for one in own],
            epsilon=max(one.values["epsilon"][-1] for one in own),
            delta=delta,
        )
        seconds = sum(one.seconds for one in own)
        found.append(replace(run, candidate=None, searched=searched, seconds=seconds))
    return found


def _last_loss(run: TrainedRun) -> float:
    return math.inf if run.diverged else run.values["loss"][-1]
