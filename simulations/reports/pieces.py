"""What several sections of a report use: figures over rounds, groups of runs, numbers as text."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .figures import Series, chart
from .reported import ReportedRun

__all__ = [
    "Drawn",
    "best_run",
    "by_task",
    "listed",
    "noted",
    "number_text",
    "over_rounds",
    "score_text",
    "series_of",
    "span_text",
]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure of the page.

    Parameters
    ----------
    name : str
        Its name, unique in the page.
    caption : str
        Stands above it.
    svg : Markup
        The drawing.
    lines : sequence of ReportedRun or Series, default ()
        Its own legend, where it does not share that of other figures.
    note : str, default ""
        Stands below it.
    """

    name: str
    caption: str
    svg: Markup
    lines: Sequence[ReportedRun | Series] = ()
    note: str = ""


def over_rounds(
    series: Sequence[Series],
    *,
    name: str,
    ylabel: str,
    caption: str,
    limits: tuple[float, float] | None = None,
    legend: bool = False,
) -> list[Drawn]:
    """Draw lines over the rounds, with a legend of their own or without; no lines, no figure."""
    if not series:
        return []
    svg = chart(series, name=name, xlabel="Round", ylabel=ylabel, whole_xs=True, limits=limits)
    return [Drawn(name=name, caption=caption, svg=svg, lines=series if legend else ())]


def series_of(runs: Iterable[ReportedRun], key: str) -> list[Series]:
    """Return a line for each run whose scheme noted a number of that name."""
    found = [(run, *noted(run, key)) for run in runs]
    return [run.series(xs, ys) for run, xs, ys in found if xs]


def noted(run: ReportedRun, key: str) -> tuple[list[int], list[float]]:
    """Return the rounds in which a scheme noted a number of that name, and the numbers."""
    found = [
        (line["round"], value)
        for line in run.rounds
        if isinstance(value := (line.get("scheme") or {}).get(key), int | float)
    ]
    return [number for number, _ in found], [value for _, value in found]


def by_task(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """Return the runs of each task."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault(run.task, []).append(run)
    return groups


def best_run(runs: Iterable[ReportedRun]) -> ReportedRun | None:
    """Return the run with the best final accuracy; None where no run has one."""
    scored = [run for run in runs if math.isfinite(_accuracy(run))]
    return max(scored, key=_accuracy, default=None)


def listed(words: Iterable[str]) -> str:
    """Return words as a list in a sentence, each once.

    Examples
    --------
    >>> listed(["udp", "fedavg", "udp", "mspdq"])
    'udp, fedavg and mspdq'
    """
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} and {last}" if others else last


def score_text(value: float | None) -> str | None:
    """Return an accuracy or a loss with four decimals."""
    if value is None:
        return None
    if math.isnan(value):
        return "NaN"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.3e}"


def number_text(value: float) -> str:
    """Return a number with the three digits that count, and no exponent where none is needed.

    Examples
    --------
    >>> number_text(1234.5), number_text(0.01234)
    ('1234', '0.0123')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(digits, 0), 6)}f}"


def span_text(values: Sequence[float]) -> str:
    """Return the least and the largest of some numbers with the digits that count.

    Examples
    --------
    >>> span_text([0.8581, 0.8583]), span_text([1, 2.5])
    ('0.858', '1\N{EN DASH}2.5')
    """
    least, most = (f"{value:.3g}" for value in (min(values), max(values)))
    return least if least == most else f"{least}\N{EN DASH}{most}"


def _accuracy(run: ReportedRun) -> float:
    return math.nan if run.results.accuracy is None else run.results.accuracy
