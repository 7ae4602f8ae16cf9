"""Draws an experiment: curves by rounds and by bits, or over the values of a parameter."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from flwr_privacy.simulations.reports.figures import LOG_SPAN, Style
from flwr_privacy.simulations.reports.style import drawing

from .curves import MEASURES, TREE_COSTS, TrainedRun
from .description import ExperimentDescription, Sweep
from .functions import FUNCTIONS

__all__ = ["draw"]

_ROOM_FOR_TICKS = 300  # ratio of the ends of a logarithmic axis up to which 1, 2 and 5 have room
_ROOM_FOR_TEXT = 48  # characters of an axis's ticks that stand side by side
AXES = {
    "rounds": "learning rounds",
    "bits": "uplink bits per model value and drawn client",
    "seconds": "virtual seconds",
}
WIDE = 10.0  # factor between last values from which on an axis is logarithmic
TICKS = 12  # values of a setting that are marked on its axis
NAMES = {"planned": "rounds planned", "rounds": "rounds taken"}


@drawing()
def draw(chosen: ExperimentDescription, runs: Sequence[TrainedRun], *, size: str) -> Figure:
    """Return a figure with a row for each metric and a column for each axis, or for the sweep.

    Parameters
    ----------
    chosen : ExperimentDescription
        What was trained.
    runs : Sequence of TrainedRun
        For each curve one run per seed.
    size : str
        The size of the experiment, in words.
    """
    seeds = len({run.seed for run in runs})
    columns = len(chosen.axes) if chosen.sweep is None else 1
    width, height = 5.2 * columns, 3.4 * len(chosen.metrics) + 0.3
    below = columns == 1  # the legend: beside the title there is no room
    if below:
        abreast = 1 if any(run.note for run in runs) else 2
        width, height = 6.4, height + 0.2 * math.ceil(len(chosen.curves) / abreast)
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(len(chosen.metrics), columns, squeeze=False, sharey="row")
    for row, metric in zip(grid, chosen.metrics, strict=True):
        if chosen.sweep is None:
            for axes, x in zip(row, chosen.axes, strict=True):
                _over_rounds(axes, chosen, runs, x, metric)
        else:
            _over_setting(row[0], chosen, runs, chosen.sweep, metric)
        if metric in ("loss", *TREE_COSTS, *MEASURES):
            _log_where_wide(row[0], LOG_SPAN if chosen.sweep is None else WIDE)
        for axes in row:
            axes.autoscale_view()
        label = NAMES.get(metric, f"{metric} on test records")
        if chosen.function:
            label = FUNCTIONS[chosen.function].measures[metric]
        row[0].set_ylabel(label)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    if below:
        figure.legend(handles, labels, loc="outside lower center", ncols=abreast)
    else:
        figure.legend(handles, labels, loc="outside right upper")
    over = f"\n{size}; {seeds} seeds: mean, smallest and largest"
    figure.suptitle(chosen.title + ("" if size == "computed" else over))
    return figure


def _over_rounds(
    axes: Axes, chosen: ExperimentDescription, runs: Sequence[TrainedRun], x: str, metric: str
) -> None:
    for index, curve in enumerate(chosen.curves):
        own = [run for run in runs if run.curve == curve.label]
        _line(axes, own, x, metric, Style(index))
    axes.set_xlabel(AXES[x])
    if x != "rounds":
        axes.set_xscale("log")  # bits: from tens for codes to thousands for whole sub-states
        low, high = axes.xaxis.get_data_interval()
        ticks = (1.0, 2.0, 5.0) if high < _ROOM_FOR_TICKS * low else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=ticks))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _over_setting(
    axes: Axes, chosen: ExperimentDescription, runs: Sequence[TrainedRun], sweep: Sweep, metric: str
) -> None:
    xs: list[float] = []
    for index, curve in enumerate(chosen.curves):
        own = [run for run in runs if run.curve == curve.label]
        _points(axes, own, metric, Style(index), chosen.failed)
        xs += [run.x for run in own if run.x is not None]
    axes.set_xlabel(sweep.label)
    axes.set_xscale(sweep.scale)
    if len(set(xs)) <= TICKS:
        axes.set_xticks(sorted(set(xs)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        if sum(len(f"{x:g}") for x in set(xs)) > _ROOM_FOR_TEXT:
            axes.tick_params(axis="x", labelrotation=35)


def _points(axes: Axes, runs: Sequence[TrainedRun], metric: str, style: Style, failed: str) -> None:
    """Draw the last values of a curve's runs, where they did not diverge, over the setting."""
    last: dict[float, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.x or 0.0):
        if run.x is not None and not run.diverged:
            last.setdefault(run.x, []).append(run.values[metric][-1])
    diverged = sum(run.diverged for run in runs)
    xs = list(last)
    line = style.line(xs, [float(np.mean(values)) for values in last.values()])
    line.set_markevery(1 if len(xs) <= TICKS else 10)
    label = runs[0].curve + (f" ({failed}: {diverged} of {len(runs)})" if diverged else "")
    if len({run.note for run in runs}) == 1 and runs[0].note:
        label += f": {runs[0].note}"
    line.set_label(label)
    line.set_in_layout(bool(xs))
    axes.add_line(line)
    low, high = ([of(values) for values in last.values()] for of in (min, max))
    axes.fill_between(xs, low, high, color=style.colour, alpha=0.15, linewidth=0)


def _line(axes: Axes, runs: Sequence[TrainedRun], x: str, metric: str, style: Style) -> None:
    # Where one seed has diverged, the mean over the others would be another curve: it ends there.
    # A run that ended before the others keeps what it came to.
    ends = [len(run.values[metric]) for run in runs if run.diverged]
    length = min(ends, default=max(len(run.values[metric]) for run in runs))
    diverged = sum(run.diverged for run in runs)
    first = 0 if x == "rounds" else 1  # nothing was spent before round 1: no place on a log axis

    def over_seeds(name: str, of: Callable[..., Any]) -> NDArray[np.float64]:
        rows = [run.values[name] for run in runs]
        kept = [row + row[-1:] * (length - len(row)) for row in rows]
        values = np.array([row[first:length] for row in kept])
        return np.asarray(of(values, axis=0), dtype=np.float64)

    xs = over_seeds(x, np.max if x == "rounds" else np.mean)
    ys = over_seeds(metric, np.mean)
    line = style.line(xs.tolist(), ys.tolist())
    line.set_label(runs[0].curve + (f" (diverged: {diverged} of {len(runs)})" if diverged else ""))
    line.set_in_layout(xs.size > 0)  # one without points is for the legend, and has no place
    axes.add_line(line)
    low, high = over_seeds(metric, np.min), over_seeds(metric, np.max)
    axes.fill_between(xs, low, high, color=style.colour, alpha=0.15, linewidth=0)


def _log_where_wide(axes: Axes, span: float) -> None:
    # A loss that explodes would leave no room for the others.
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    if values.size and values.min() > 0 and values.max() / values.min() >= span:
        axes.set_yscale("log")
