"""HTML that several sections of a report use."""

import math
from collections.abc import Iterable, Sequence

from .figures import Series, swatch
from .page import Html, html, joined
from .reported import ReportedRun

__all__ = [
    "best_run",
    "by_task",
    "legend",
    "lines_legend",
    "listed",
    "noted",
    "number_text",
    "score_text",
    "span_text",
    "swatched",
]


def by_task(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """Return the runs of each task."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault(run.settings.task, []).append(run)
    return groups


def best_run(runs: Iterable[ReportedRun]) -> ReportedRun | None:
    """Return the run with the best final accuracy; None where no run has one."""
    scored = [run for run in runs if math.isfinite(_accuracy(run))]
    return max(scored, key=_accuracy, default=None)


def swatched(run: ReportedRun, *, place: str) -> Html:
    """Return a run's name after a piece of its line, and a warning if its guarantee is void.

    Parameters
    ----------
    run : ReportedRun
        The run.
    place : str
        Where on the page, which makes the ids of the drawing unique.
    """
    line = swatch(run.style, name=f"{place}-{run.style.index}")
    void = run.guarantee is not None and run.guarantee.void
    mark = Html(' <strong class="void">VOID</strong>' if void else "")
    return Html(f'<span class="run">{line}<span>{html(run.label)}{mark}</span></span>')


def legend(runs: Iterable[ReportedRun], *, place: str) -> Html:
    """Return the runs with their lines, as a list."""
    items = joined(Html(f"<li>{swatched(run, place=place)}</li>\n") for run in runs)
    return Html(f'<ul class="legend">\n{items}</ul>\n')


def lines_legend(lines: Iterable[Series], *, place: str) -> Html:
    """Return the labels of lines that are no runs, each after a piece of the line, as a list."""
    items = joined(
        Html(
            f'<li><span class="run">{swatch(line.style, name=f"{place}-{line.style.index}")}'
            f"<span>{html(line.label)}</span></span></li>\n"
        )
        for line in lines
    )
    return Html(f'<ul class="legend">\n{items}</ul>\n')


def noted(run: ReportedRun, key: str) -> tuple[list[int], list[float]]:
    """Return the rounds in which a scheme noted a number of that name, and the numbers."""
    found = [
        (line["round"], value)
        for line in run.rounds
        if isinstance(value := (line.get("scheme") or {}).get(key), int | float)
    ]
    return [number for number, _ in found], [value for _, value in found]


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
