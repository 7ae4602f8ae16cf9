"""Words and pieces that several sections of a report use."""

import math
from collections.abc import Iterable, Sequence

from flwr_privacy.simulations.figures import swatch
from flwr_privacy.simulations.page import Html, html, joined
from flwr_privacy.simulations.reported import ReportedRun

__all__ = ["best_run", "by_task", "legend", "listed", "number_text", "score_text", "swatched"]


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


def _accuracy(run: ReportedRun) -> float:
    return math.nan if run.results.accuracy is None else run.results.accuracy
