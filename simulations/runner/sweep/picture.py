"""Draws what a sweep came to, over epsilon or over rounds, with the spread over the seeds."""

import io
from typing import Any

from matplotlib.figure import Figure

from flwr_privacy.simulations.reports.figures import MARKERS, Style
from flwr_privacy.simulations.reports.style import drawing

__all__ = ["over_epsilon", "over_rounds"]

SIZE = (6.0, 3.8)  # inches
_BAND = 0.18  # opacity


class ShownFigure(Figure):
    """A figure that a notebook shows, whether or not pyplot is loaded there."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return buffer.getvalue()


@drawing()
def over_epsilon(table: Any, metric: str) -> Figure:
    """Draw the means of a metric over epsilon, a line for each scheme.

    Parameters
    ----------
    table : DataFrame
        As `Results.summary` returns it.
    metric : str
        Name of the column; the one of its standard error has ``_error`` behind it.
    """
    figure, axes = _axes("epsilon", metric)
    for style, label, own in _by_line(table, "scheme", "epsilon", "seeds"):
        error = own[f"{metric}_error"].fillna(0.0)
        if own["epsilon"].isna().all():
            level, spread = own[metric].iloc[0], error.iloc[0]
            axes.axhline(level, color=style.colour, linestyle="--", label=f"{label} (no budget)")
            axes.axhspan(level - spread, level + spread, color=style.colour, alpha=_BAND, lw=0)
            continue
        own = own.sort_values("epsilon")
        axes.errorbar(
            own["epsilon"],
            own[metric],
            yerr=error.loc[own.index],
            color=style.colour,
            marker=MARKERS[style.index % len(MARKERS)],
            markersize=5,
            capsize=3,
            label=label,
        )
    axes.set_xscale("log")
    ticks = sorted(table["epsilon"].dropna().unique())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend()
    return figure


@drawing()
def over_rounds(rows: Any, metric: str) -> Figure:
    """Draw the means of a metric over rounds, a line for each scheme and its settings.

    Parameters
    ----------
    rows : DataFrame
        As `Results.to_pandas` returns it.
    metric : str
        Name of the column.
    """
    figure, axes = _axes("round", metric)
    for style, label, own in _by_line(rows.dropna(subset=[metric]), "scheme", "seed", "round"):
        groups = own.groupby("round")[metric]
        mean, error = groups.mean(), groups.sem().fillna(0.0)
        axes.plot(mean.index, mean, color=style.colour, label=label)
        low, high = mean - error, mean + error
        axes.fill_between(mean.index, low, high, color=style.colour, alpha=_BAND, lw=0)
    axes.legend()
    return figure


def _axes(xlabel: str, ylabel: str) -> tuple[Figure, Any]:
    figure = ShownFigure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def _by_line(table: Any, *points: str) -> Any:
    """Yield the rows of each line: of a scheme, with each value of the other settings swept."""
    measures = {"accuracy", "loss", "accuracy_error", "loss_error", "epsilon_spent", "megabytes"}
    measures |= {"bytes_down", "bytes_up", "seconds", "epsilon", *points}
    swept = [name for name in table.columns if name not in measures]
    groups = table.groupby(["scheme", *swept], dropna=False, sort=False)
    for index, ((label, *values), own) in enumerate(groups):
        told = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in zip(swept, values, strict=True)
            if value is not None and value == value  # NaN: the scheme does not have it
        ]
        yield Style(index), ", ".join([label, *told]), own
