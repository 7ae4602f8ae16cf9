"""Writes what runs came to over their seeds: a table, charts of accuracy over costs, and CSV."""

import csv
import io
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.reports.pieces import listed
from flwr_privacy.simulations.reports.privacy import BASELINE, comparable, guaranteed
from flwr_privacy.simulations.reports.reported import Line, ReportedRun
from flwr_privacy.simulations.reports.style import INK, drawing

from .seeds import SeedGroup, epsilon_of
from .spread import spread_text

__all__ = ["as_csv", "draw_charts", "table"]

MB = 1e6
SIZE = (6.4, 4.0)  # inches
NOTE_WIDTH = 90
COLUMNS = (
    *("line", "run", "seed", "round", "accuracy", "loss", "epsilon"),
    *("bytes_up", "bytes_down", "virtual_seconds", "seconds"),
)


def table(groups: Sequence[SeedGroup]) -> Table:
    """Return what each line came to: means over its seeds, with their standard errors."""
    found = Table(title="Means over the seeds ± their standard errors", title_justify="left")
    # A run without simulated stragglers takes no virtual time.
    virtual = any(run.results.virtual_seconds > 0 for group in groups for run in group.runs)
    results = {name: of for name, of in _RESULTS.items() if virtual or name != _VIRTUAL}
    for name in ("line", "seeds"):
        found.add_column(name, overflow="fold")
    for name in results:
        found.add_column(name, no_wrap=True)
    for group in groups:
        means = [group.last(of) for of in results.values()]
        cells = ["-" if one is None else spread_text(*one) for one in means]
        found.add_row(group.label, ",".join(map(str, group.seeds)), *cells)
    return found


def _epsilon(run: ReportedRun) -> float | None:
    return epsilon_of(run.rounds[-1]) if run.rounds else None


_VIRTUAL = "virtual s"
_RESULTS: dict[str, Callable[[ReportedRun], float | None]] = {
    "accuracy": lambda run: run.results.accuracy,
    "loss": lambda run: run.results.loss,
    "epsilon": _epsilon,
    "MB": lambda run: (run.results.bytes_up + run.results.bytes_down) / MB,
    _VIRTUAL: lambda run: run.results.virtual_seconds,
    "real s": lambda run: run.results.seconds,
}


def draw_charts(groups: Sequence[SeedGroup], out: Path) -> list[Path]:
    """Draw accuracy over epsilon, over payload bytes and over time; return the pictures' paths.

    Epsilons are in one picture only where they mean the same: the same unit, neighbours, adversary
    and delta. Time is virtual where every run has some, and real otherwise.

    Parameters
    ----------
    groups : sequence of SeedGroup
        The lines.
    out : Path
        Folder for ``accuracy-epsilon.png``, ``accuracy-bytes.png`` and ``accuracy-time.png``; it is
        made if need be.

    Raises
    ------
    InvalidParameterError
        If a run has no accuracy.
    """
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        if run.results.accuracy is None:
            raise InvalidParameterError("runs", run.name, "runs whose model was evaluated")
    virtual = all(run.results.virtual_seconds > 0 for run in runs)
    time, of_time = ("Virtual time", "virtual_seconds") if virtual else ("Time", "seconds")
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    plain = [group for group in groups if group.runs[0].scheme == BASELINE]
    for number, meaning in enumerate(comparable(guaranteed([g.runs[0] for g in groups])), 1):
        first, guarantee = meaning[0]
        notes = (
            f"unit: {guarantee.protects}; delta {guarantee.delta}; neighbours: {first.neighbours}; "
            f"adversary: {guarantee.adversary}"
        )
        own = [group for group in groups if any(group.runs[0] is run for run, _ in meaning)]
        if void := [g.label for g in own if any(r.guarantee and r.guarantee.void for r in g.runs)]:
            notes += f"; VOID: no protection by {listed(void)}"
        path = out / ("accuracy-epsilon.png" if number == 1 else f"accuracy-epsilon-{number}.png")
        drawn.append(_draw(own, epsilon_of, "Epsilon spent", path, notes=notes, levels=plain))
    bytes_label = "Payload up and down so far (MB)"
    drawn.append(_draw(groups, _megabytes, bytes_label, out / "accuracy-bytes.png"))
    seconds = _number_of(of_time)
    drawn.append(_draw(groups, seconds, f"{time} (s)", out / "accuracy-time.png"))
    return drawn


def _megabytes(line: Line) -> float:
    return float(line["total_bytes"]) / MB


def _number_of(key: str) -> Callable[[Line], float]:
    return lambda line: float(line.get(key, 0.0))


@drawing()
def _draw(
    groups: Sequence[SeedGroup],
    cost: Callable[[Line], float | None],
    xlabel: str,
    path: Path,
    *,
    notes: str = "",
    levels: Sequence[SeedGroup] = (),
) -> Path:
    figure = Figure(figsize=SIZE)
    axes = figure.add_subplot()
    axes.set_title("\n".join(textwrap.wrap(notes, NOTE_WIDTH)), loc="left")
    for group in groups:
        xs, ys, errors = group.accuracies(cost)
        line = group.style.line(xs, ys)
        line.set_label(f"{group.label} ({len(group.runs)} seeds)")
        axes.add_line(line)
        if len(group.runs) > 1:
            low = [y - error for y, error in zip(ys, errors, strict=True)]
            high = [y + error for y, error in zip(ys, errors, strict=True)]
            axes.fill_between(xs, low, high, color=group.style.colour, alpha=0.2, linewidth=0)
    for group in levels:  # which have no such cost
        if (last := group.last(lambda run: run.results.accuracy)) is not None:
            label = f"{group.label}, in the end"
            axes.axhline(last[0], color=INK, alpha=0.7, linewidth=1, linestyle=":", label=label)
    axes.relim()
    axes.autoscale_view()
    axes.set_xlabel(xlabel)
    axes.set_ylabel("Accuracy, mean ± standard error")
    axes.legend()
    figure.savefig(path)
    return path


def as_csv(groups: Sequence[SeedGroup]) -> str:
    """Return a row for every round of every run, with the bytes and seconds up to it."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for group in groups:
        for run, seed in zip(group.runs, group.seeds, strict=True):
            accuracies, losses = ({id(line): y for line, y in run.scores(m)} for m in _SCORES)
            for line in run.rounds:
                numbers = [
                    accuracies.get(id(line)),
                    losses.get(id(line)),
                    epsilon_of(line),
                    line["total_bytes_up"],
                    line["total_bytes_down"],
                    line.get("virtual_seconds"),
                    line.get("seconds"),
                ]
                rows.writerow([group.label, run.name, seed, line["round"], *map(_cell, numbers)])
    return text.getvalue()


_SCORES = ("accuracy", "loss")


def _cell(value: float | None) -> float | str:
    """Return what CSV has for a value: nothing for one that is not there, and ``nan``."""
    if value is None:
        return ""
    return "nan" if math.isnan(value) else value
