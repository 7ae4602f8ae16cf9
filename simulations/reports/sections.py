"""A report's sections for all runs: how they ended, curves, settings and versions."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from markupsafe import Markup

from flwr_privacy.errors import refusals

from .figures import chart
from .page import rendered
from .pieces import (
    Drawn,
    by_task,
    listed,
    number_text,
    over_rounds,
    score_text,
    series_of,
)
from .reported import Line, ReportedRun

__all__ = [
    "answers",
    "configurations",
    "curves",
    "problems",
    "provenance",
    "table_of_runs",
]

MB = 1e6
VIRTUAL = "Virtual time (s)"
UNEVEN = 3.0
"""Ratio of the virtual times of two runs from which on an axis over them is logarithmic."""


def table_of_runs(runs: Sequence[ReportedRun]) -> Markup:
    """Return one row of results per run."""
    rows = [
        {
            "Run": run,
            "Status": Markup('<span class="{0}">{0}</span>').format(run.summary["status"]),
            "Clients": run.clients,
            "Rounds": f"{run.results.rounds}/{run.results.planned}",
            "Accuracy": score_text(run.results.accuracy),
            "Best": score_text(run.results.best_accuracy),
            "Loss": score_text(run.results.loss),
            "MB up": number_text(run.results.bytes_up / MB),
            "MB down": number_text(run.results.bytes_down / MB),
            "Virtual s": number_text(run.results.virtual_seconds),
            "Real s": number_text(run.results.seconds),
            "Late": run.results.late,
            "Refused": run.results.refused,
            "Skipped": run.results.skipped,
        }
        for run in runs
    ]
    return rendered("runs.html", rows=rows, evaluated_by=_evaluated_by(runs))


def problems(runs: Sequence[ReportedRun]) -> Markup:
    """Return the errors of the runs that did not complete."""
    broken = [run for run in runs if run.summary["status"] in ("failed", "interrupted")]
    return rendered("problems.html", runs=broken) if broken else Markup()


def curves(runs: Sequence[ReportedRun]) -> Markup:
    """Return accuracy and loss over rounds, payload bytes and virtual time, for each task.

    And the rounds planned, where a scheme changes them as it goes on.
    """
    tasks = {
        task: (group, _curves(group, name=f"task{number}"))
        for number, (task, group) in enumerate(by_task(runs).items())
    }
    return rendered("curves.html", tasks=tasks)


def _curves(runs: Sequence[ReportedRun], *, name: str) -> list[Drawn]:
    drawn = [
        _curve(runs, metric, xlabel, name=f"{name}-{metric}-{place}")
        for place, xlabel in enumerate(ACROSS)
        for metric in ("accuracy", "loss")
    ]
    planned = over_rounds(
        series_of(runs, "T"),
        name=f"{name}-planned",
        ylabel="Rounds planned",
        caption="Rounds planned over rounds",
    )
    return [*filter(None, drawn), *planned]


ACROSS: Mapping[str, Callable[[Line], float]] = {
    "Round": lambda line: line["round"],
    "Payload up and down so far (MB)": lambda line: line["total_bytes"] / MB,
    VIRTUAL: lambda line: line.get("virtual_seconds", 0.0),
}


def _curve(runs: Sequence[ReportedRun], metric: str, xlabel: str, *, name: str) -> Drawn | None:
    series = []
    whole = xlabel == "Round"
    for run in runs:
        scores = run.scores(metric)
        xs = [ACROSS[xlabel](line) for line, _ in scores]
        # A run without simulated stragglers takes no virtual time, and has no line over it.
        if xs and (whole or max(xs) > 0):
            series.append(run.series(xs, [value for _, value in scores]))
    if not series:
        return None
    ylabel = metric.capitalize()
    ends = [max(one.xs) for one in series]
    uneven = xlabel == VIRTUAL and max(ends) >= UNEVEN * min(ends)
    svg = chart(series, name=name, xlabel=xlabel, ylabel=ylabel, whole_xs=whole, log_xs=uneven)
    over = {"Round": "rounds", VIRTUAL: "virtual time"}.get(xlabel, "payload")
    return Drawn(name=name, caption=f"{ylabel} over {over}", svg=svg)


def answers(runs: Sequence[ReportedRun]) -> Markup:
    """Return how many of the clients asked had a say, where that is not plainly all of them."""
    counted = [_trained(run) for run in runs]
    if not any(counted) and not any(run.results.late or run.results.refused for run in runs):
        return Markup()
    charts = []
    for key, title in (("answered", "Answered"), ("accumulated", "Accumulated")):
        series = []
        for run in runs:
            lines = [line for line in run.rounds if line.get("asked") and key in line]
            ys = [line[key] / line["asked"] for line in lines]
            if lines:
                series.append(run.series([line["round"] for line in lines], ys))
        charts += over_rounds(
            series,
            name=f"answers-{key}",
            ylabel=f"{title} / asked",
            caption=f"{title}, as a share of the clients asked",
            limits=(0.0, 1.05),
        )
    reasons = list(dict.fromkeys(reason for run in runs for reason in refusals(run.rounds)))
    rows = [
        {
            "Run": run,
            "Asked": run.results.asked,
            "Answered": run.results.answered,
            "Accumulated": run.results.accumulated,
            "Late": run.results.late,
            **({"Trained": trained} if any(counted) else {}),
            **{f"Refused: {r}": refusals(run.rounds).get(r, 0) for r in reasons},
        }
        for run, trained in zip(runs, counted, strict=True)
    ]
    return rendered("answers.html", runs=runs, charts=charts, rows=rows)


def _trained(run: ReportedRun) -> str:
    """Return how many answers came of a training that worked, where that is counted with noise."""
    lines = [line["scheme"] for line in run.rounds if "trained" in line.get("scheme", {})]
    total = sum(line["trained"] for line in lines)
    sigma = math.hypot(*(line["trained_sigma"] for line in lines))
    return f"{total:.0f} ± {sigma:.0f}" if lines else ""


def configurations(runs: Sequence[ReportedRun]) -> Markup:
    """Return the settings in which the runs differ, and those that they share."""
    differing = [{"Run": run, **run.differing} for run in runs]
    settings = runs[0].told
    shared = {key: value for key, value in settings.items() if key not in differing[0]}
    return rendered("configuration.html", differing=differing, shared=shared)


def provenance(runs: Sequence[ReportedRun]) -> Markup:
    """Return where and when the runs took place, and with which versions."""
    packages = dict.fromkeys(p for run in runs for p in run.summary.get("versions") or {})
    rows = [
        {
            "Run": run,
            "Folder": run.name,
            "Engine": run.summary.get("engine"),
            "Nodes": run.summary.get("nodes"),
            "Started (UTC)": _time(run.summary.get("started")),
            "Finished (UTC)": _time(run.summary.get("finished")),
            **{p: (run.summary.get("versions") or {}).get(p) for p in packages},
            "Experiment": run.summary.get("experiment_id"),
        }
        for run in runs
    ]
    return rendered("versions.html", rows=rows)


def _evaluated_by(runs: Sequence[ReportedRun]) -> str:
    local = [run for run in runs if run.results.evaluated_by == "clients"]
    if not local:
        return ""
    if len(local) == len(runs):
        return "The clients evaluated the model, each on its own data."
    return f"In {listed(run.label for run in local)} the clients evaluated it on their own data."


def _time(text: str | None) -> str | None:
    if text is None:
        return None
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
