"""A report's section on vertical schemes: how long a round waits, and what it costs."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from markupsafe import Markup

from flwr_privacy.fedvs.delays import expected_wait

from .figures import Series
from .page import rendered
from .pieces import Drawn, noted, number_text, over_rounds, score_text, series_of
from .reported import Line, ReportedRun

__all__ = ["columns"]

MB = 1e6

SHARE, UPLOAD = "seconds_share", "seconds_upload"
"""What a line calls the virtual seconds of a round's two exchanges under FedVS."""


def columns(runs: Sequence[ReportedRun]) -> Markup:
    """Return what rounds waited for and how many bytes they took, if clients have columns."""
    split = [run for run in runs if noted(run, "epoch")[0]]
    if not split:
        return Markup()
    rows = [_row(run) for run in split]
    shown = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return rendered(
        "vertical.html",
        runs=split,
        rows=[{key: row[key] for key in shown} for row in rows],
        charts=[*_areas(split), *_times(split), *_range(split)],
    )


def _row(run: ReportedRun) -> dict[str, Any]:
    rounds = [line for line in run.rounds if line["round"] > 0 and not line.get("skipped")]
    taken = max((line.get("virtual_seconds", 0.0) for line in rounds), default=0.0)
    waited = _mean([line.get("accumulated", 0) for line in rounds])
    asked = _mean([line.get("asked", 0) for line in rounds])
    epochs = noted(run, "epoch")[1]
    guard = noted(run, "guard")[1]
    return {
        "Run": run,
        "Answers": None if waited is None else f"{waited:.3g} of {asked:.3g}",
        "Epochs": number_text(epochs[-1]) if epochs else None,
        "Share phase (s)": _seconds(noted(run, SHARE)[1]),
        "Upload phase (s)": _seconds(noted(run, UPLOAD)[1]),
        "Round (s)": number_text(taken / len(rounds)) if taken else None,
        "Wait for all (s)": _wait_for_all(run),
        "Setup (MB)": _megabytes([line for line in run.rounds if line["round"] == 0]),
        "Round (MB)": _megabytes([line for line in rounds if not line.get("server")]),
        "With test (MB)": _megabytes([line for line in rounds if line.get("server")]),
        "AUC": score_text(_last(run, "auc")),
        "F1": score_text(_last(run, "f1")),
        "Range used": f"{max(guard):.1%}" if guard else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _seconds(values: Sequence[float]) -> str | None:
    return number_text(fmean(values)) if any(values) else None


def _megabytes(lines: Sequence[Line]) -> str | None:
    sizes = [line.get("bytes_up", 0) + line.get("bytes_down", 0) for line in lines]
    return number_text(median(sizes) / MB) if sizes else None


def _last(run: ReportedRun, metric: str) -> float | None:
    scores = run.scores(metric)
    return scores[-1][1] if scores else None


def _wait_for_all(run: ReportedRun) -> str | None:
    """Return the expected seconds of a server that waits for everybody, under FedVS's delays."""
    delays = run.settings.strategy.get("delays") if run.settings else None
    clients = run.clients
    if not delays or not clients:
        return None
    options = delays if isinstance(delays, Mapping) else {}
    seconds = expected_wait(clients, clients, stragglers=options.get("stragglers"))
    return number_text(options.get("scale", 1.0) * seconds + options.get("upload_seconds", 0.0))


# Figures


def _areas(runs: Sequence[ReportedRun]) -> list[Drawn]:
    found = [(run, run.scores("auc")) for run in runs]
    series = [
        run.series([line["round"] for line, _ in scores], [value for _, value in scores])
        for run, scores in found
        if scores
    ]
    caption = "Area under the ROC curve"
    return over_rounds(series, name="columns-auc", ylabel="AUC", caption=caption)


def _times(runs: Sequence[ReportedRun]) -> list[Drawn]:
    """Draw the virtual seconds so far of the exchanges, those of other schemes as uploads."""
    shares: list[Series] = []
    uploads: list[Series] = []
    for run in runs:
        for key, into in ((SHARE, shares), (UPLOAD, uploads)):
            xs, seconds = noted(run, key)
            if any(seconds):
                into.append(run.series([0, *xs], list(accumulate(seconds, initial=0.0))))
        lines = [line for line in run.rounds if line.get("virtual_seconds")]
        if lines and not noted(run, UPLOAD)[0]:
            xs = [0, *(line["round"] for line in lines)]
            uploads.append(run.series(xs, [0.0, *(line["virtual_seconds"] for line in lines)]))
    ylabel = "Virtual time so far (s)"
    return [
        *over_rounds(shares, name="columns-share", ylabel=ylabel, caption="Time in share phases"),
        *over_rounds(
            uploads, name="columns-upload", ylabel=ylabel, caption="Time in upload phases"
        ),
    ]


def _range(runs: Sequence[ReportedRun]) -> list[Drawn]:
    caption = "Largest share of the field's range in a sum"
    series = series_of(runs, "guard")
    return over_rounds(series, name="columns-range", ylabel="Share of the range", caption=caption)
