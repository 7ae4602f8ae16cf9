"""Puts runs together that differ in their seed alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.reports.figures import Style
from flwr_privacy.simulations.reports.reported import Line, ReportedRun, read_runs
from flwr_privacy.simulations.settings.metrics_file import score
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_labels import labels

from .spread import mean_and_error

__all__ = ["SeedGroup", "epsilon_of", "over_seeds"]

SEED = "seed"


@dataclass(frozen=True, kw_only=True)
class SeedGroup:
    """Runs that differ in their seed alone, which are one line.

    Parameters
    ----------
    label : str
        What tells the line from the others, in words.
    style : Style
        Its look.
    runs : tuple of ReportedRun
        The runs, by seed.
    """

    label: str
    style: Style
    runs: tuple[ReportedRun, ...]

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs, in their order."""
        return [int(run.told[SEED]) for run in self.runs]

    def last(self, of: Callable[[ReportedRun], float | None]) -> tuple[float, float] | None:
        """Return the mean of what the runs came to, with its standard error.

        None if one of them has no such value.
        """
        values = [of(run) for run in self.runs]
        known = [value for value in values if value is not None]
        return mean_and_error(known) if len(known) == len(values) else None

    def accuracies(
        self, cost: Callable[[Line], float | None]
    ) -> tuple[list[float], list[float], list[float]]:
        """Return the mean cost, the mean accuracy and its standard error, by round.

        Only the rounds count after which every run has both.
        """
        by_round: dict[int, list[tuple[float, float]]] = {}
        for run in self.runs:
            for line, value in run.scores("accuracy"):
                if (spent := cost(line)) is not None:
                    by_round.setdefault(line["round"], []).append((spent, value))
        whole = [pairs for _, pairs in sorted(by_round.items()) if len(pairs) == len(self.runs)]
        means = [mean_and_error([y for _, y in pairs]) for pairs in whole]
        xs = [mean_and_error([spent for spent, _ in pairs])[0] for pairs in whole]
        return xs, [mean for mean, _ in means], [error for _, error in means]


def epsilon_of(line: Line) -> float | None:
    """Return what was spent by the client who had spent most; None without a budget."""
    return score(line, "epsilon", sources=["scheme"])


def over_seeds(folders: Sequence[RunFolder]) -> list[SeedGroup]:
    """Put runs together that differ in their seed alone, in the order of their first ones.

    Parameters
    ----------
    folders : sequence of RunFolder
        Completed runs of one task.

    Raises
    ------
    InvalidParameterError
        If there is none, one is not completed, two are of different tasks, or two are one run: the
        same settings and the same seed, which would make the spread look smaller than it is.
    DataError
        If a run folder is damaged.
    """
    if not folders:
        raise InvalidParameterError("runs", [], "at least one run folder")
    found: dict[Any, dict[int, RunFolder]] = {}
    for folder in folders:
        told = folder.told
        if SEED not in told:
            allowed = "runs of flwr-privacy run, deploy or experiment, which note their seed"
            raise InvalidParameterError("runs", str(folder.path), allowed)
        if (status := folder.summary["status"]) != "completed":
            allowed = f"completed runs: this one is {status} (flwr-privacy report shows it)"
            raise InvalidParameterError("runs", str(folder.path), allowed)
        task = (folder.settings.task, folder.task_digest)
        key = (task, *sorted((k, repr(v)) for k, v in told.items() if k != SEED))
        same = found.setdefault(key, {})
        if (seed := told[SEED]) in same:
            allowed = f"runs that differ: {same[seed].path} has the same settings and seed"
            raise InvalidParameterError("runs", str(folder.path), allowed)
        same[seed] = folder
    tasks = {key[0] for key in found}
    if len(tasks) > 1:
        names = sorted(name for name, _ in tasks)
        raise InvalidParameterError("runs", names, "runs of one task, with the same data")
    groups = [[same[seed] for seed in sorted(same)] for same in found.values()]
    names = labels([group[0] for group in groups], without=[SEED])
    return [
        SeedGroup(label=name, style=style, runs=tuple(_named(group, name, style)))
        for group, name, style in zip(groups, names, map(Style, range(len(groups))), strict=True)
    ]


def _named(group: Sequence[RunFolder], name: str, style: Style) -> list[ReportedRun]:
    return [replace(run, style=style) for run in read_runs(group, names=[name] * len(group))]
