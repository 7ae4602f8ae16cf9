"""The picture of an experiment: its curves by rounds and by bits, over the seeds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from flwr_privacy.simulations.experiment.curves import Trained
from flwr_privacy.simulations.experiment.description import Experiment
from flwr_privacy.simulations.figures import LOG_SPAN, Style

__all__ = ["draw"]

AXES = {"rounds": "learning rounds", "bits": "uplink bits per model value and drawn client"}


def draw(chosen: Experiment, runs: Sequence[Trained], *, size: str) -> Figure:
    """Return a figure with a row for each metric and a column for each axis.

    Parameters
    ----------
    chosen : Experiment
        What was trained.
    runs : Sequence of Trained
        For each curve one run per seed.
    size : str
        The size of the experiment, in words.
    """
    seeds = len({run.seed for run in runs})
    rows, columns = len(chosen.metrics), len(chosen.axes)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for row, metric in zip(grid, chosen.metrics, strict=True):
        for axes, x in zip(row, chosen.axes, strict=True):
            for index, curve in enumerate(chosen.curves):
                own = [run for run in runs if run.curve == curve.label]
                _line(axes, own, x, metric, Style(index))
            axes.set_xlabel(AXES[x])
            if x == "bits":
                axes.set_xscale("log")  # from tens for codes to thousands for whole sub-states
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.xaxis.set_minor_formatter(NullFormatter())
            else:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(visible=True, alpha=0.2)
        if metric == "loss":
            _log_where_wide(row[0])
        for axes in row:
            axes.autoscale_view()
        row[0].set_ylabel(f"{metric} on test records")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    over = f"{size}; {seeds} seeds: mean, smallest and largest"
    figure.suptitle(f"{chosen.title}\n{over}", fontsize=10)
    return figure


def _line(axes: Axes, runs: Sequence[Trained], x: str, metric: str, style: Style) -> None:
    # Where one seed has diverged, the mean over the others would be another curve: it ends there.
    length = min(len(run.values[metric]) for run in runs)
    diverged = sum(run.diverged for run in runs)
    first = 1 if x == "bits" else 0  # nothing was sent before round 1: no place on a log axis

    def over_seeds(name: str, of: Callable[..., Any]) -> NDArray[np.float64]:
        values = np.array([run.values[name][first:length] for run in runs])
        return np.asarray(of(values, axis=0), dtype=np.float64)

    xs, ys = over_seeds(x, np.mean), over_seeds(metric, np.mean)
    line = style.line(xs.tolist(), ys.tolist())
    line.set_label(runs[0].curve + (f" (diverged: {diverged} of {len(runs)})" if diverged else ""))
    line.set_in_layout(xs.size > 0)  # one without points is for the legend, and has no place
    axes.add_line(line)
    low, high = over_seeds(metric, np.min), over_seeds(metric, np.max)
    axes.fill_between(xs, low, high, color=style.colour, alpha=0.15, linewidth=0)


def _log_where_wide(axes: Axes) -> None:
    # A loss that explodes would leave no room for the others.
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    if values.size and values.min() > 0 and values.max() / values.min() >= LOG_SPAN:
        axes.set_yscale("log")
