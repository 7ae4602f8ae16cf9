"""A report's sections for all runs: how they ended, curves, settings and versions."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from flwr_privacy.simulations.settings.run_folder import flat_settings

from .figures import Series, chart
from .page import Html, definitions, figure, grid, html, section, table
from .pieces import best_run, by_task, legend, listed, noted, number_text, score_text, swatched
from .reported import Line, ReportedRun, refused

__all__ = [
    "answers",
    "configurations",
    "curves",
    "overview",
    "problems",
    "provenance",
    "table_of_runs",
]

MB = 1e6
VIRTUAL = "Virtual time (s)"
UNEVEN = 3.0
"""Ratio of the virtual times of two runs from which on an axis over them is logarithmic."""


def overview(runs: Sequence[ReportedRun]) -> Html:
    """Return one paragraph that says what was run and how it ended."""
    count = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    schemes = listed(run.settings.scheme for run in runs)
    sentences = [f"{count} of {schemes} on {listed(run.settings.task for run in runs)}"]
    endings = [run.summary["status"] for run in runs]
    if len(runs) == 1:
        sentences[0] += f": {endings[0]}"
    elif len(set(endings)) == 1:
        sentences[0] += f", all {endings[0]}"
    else:
        counts = listed(f"{endings.count(ending)} {ending}" for ending in endings)
        sentences[0] += f": {counts}"
    groups = by_task(runs)
    for task, group in groups.items():
        best = best_run(group)
        if best is None:
            continue
        rank = "The best final accuracy" if len(group) > 1 else "The final accuracy"
        rank += f" on {task}" if len(groups) > 1 else ""
        whose = f" ({best.label})" if len(group) > 1 else ""
        payload = number_text((best.results.bytes_up + best.results.bytes_down) / MB)
        sentences.append(
            f"{rank} is {score_text(best.results.accuracy)}{whose}, after {best.results.rounds}"
            f" of {best.results.planned} rounds and {payload} MB of payload up and down"
        )
    return Html(f'<p class="lead">{html(". ".join(sentences))}.</p>\n')


def table_of_runs(runs: Sequence[ReportedRun]) -> Html:
    """Return one row of results per run."""
    rows = [
        {
            "Run": swatched(run, place="runs"),
            "Status": Html(f'<span class="{run.summary["status"]}">{run.summary["status"]}</span>'),
            "Clients": run.settings.clients or run.summary.get("nodes"),
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
    numbers = list(rows[0])[list(rows[0]).index("Clients") :]
    notes = (
        "Accuracy and loss are those of the last evaluation, Best is the best accuracy of all."
        f"{_judges(runs)} MB are millions of payload bytes of all messages."
        " Late and Refused count replies, Skipped counts rounds that left the model as it was."
    )
    parts = [table(rows, numbers=numbers), Html(f'<p class="note">{html(notes)}</p>\n')]
    return section("Runs", parts)


def problems(runs: Sequence[ReportedRun]) -> Html:
    """Return the errors of the runs that did not complete."""
    parts = []
    for run in runs:
        status = run.summary["status"]
        if status in ("failed", "interrupted"):
            done = f"{status} after {run.results.rounds} of {run.results.planned} rounds"
            error = run.summary.get("error") or "No error was noted."
            parts.append(Html(f"<h3>{html(run.label)}: {done}</h3>\n<pre>{html(error)}</pre>\n"))
    return section("Runs that did not complete", parts)


def curves(runs: Sequence[ReportedRun]) -> Html:
    """Return accuracy and loss over rounds, payload bytes and virtual time, for each task.

    And the rounds planned, where a scheme changes them as it goes on.
    """
    groups = by_task(runs)
    parts = []
    for number, (task, group) in enumerate(groups.items()):
        if len(groups) > 1:
            parts.append(Html(f"<h3>Task {html(task)}</h3>\n"))
        charts = [
            _curve(group, metric, xlabel, name=f"task{number}-{metric}-{place}")
            for place, xlabel in enumerate(ACROSS)
            for metric in ("accuracy", "loss")
        ]
        charts.append(_planned(group, name=f"task{number}-planned"))
        if any(charts):
            parts += [legend(group, place=f"task{number}"), grid(charts)]
        else:
            parts.append(Html("<p>The model was not evaluated yet.</p>\n"))
    return section("Accuracy and loss", parts)


ACROSS: Mapping[str, Callable[[Line], float]] = {
    "Round": lambda line: line["round"],
    "Payload up and down so far (MB)": lambda line: line["total_bytes"] / MB,
    VIRTUAL: lambda line: line.get("virtual_seconds", 0.0),
}


def _curve(runs: Sequence[ReportedRun], metric: str, xlabel: str, *, name: str) -> Html:
    series = []
    whole = xlabel == "Round"
    for run in runs:
        scores = run.scores(metric)
        xs = [ACROSS[xlabel](line) for line, _ in scores]
        # A run without simulated stragglers takes no virtual time, and has no line over it.
        if xs and (whole or max(xs) > 0):
            ys = [value for _, value in scores]
            series.append(Series(label=run.label, style=run.style, xs=xs, ys=ys))
    if not series:
        return Html()
    ylabel = metric.capitalize()
    ends = [max(one.xs) for one in series]
    uneven = xlabel == VIRTUAL and max(ends) >= UNEVEN * min(ends)
    svg = chart(series, name=name, xlabel=xlabel, ylabel=ylabel, whole_xs=whole, log_xs=uneven)
    over = {"Round": "rounds", VIRTUAL: "virtual time"}.get(xlabel, "payload")
    return figure(Html(svg), f"{ylabel} over {over}")


def _planned(runs: Sequence[ReportedRun], *, name: str) -> Html:
    series = []
    for run in runs:
        xs, ys = noted(run, "T")
        if xs:
            series.append(Series(label=run.label, style=run.style, xs=xs, ys=ys))
    if not series:
        return Html()
    svg = chart(series, name=name, xlabel="Round", ylabel="Rounds planned", whole_xs=True)
    return figure(Html(svg), "Rounds planned over rounds")


def answers(runs: Sequence[ReportedRun]) -> Html:
    """Return how many of the clients asked had a say, where that is not plainly all of them."""
    counted = [_trained(run) for run in runs]
    if not any(counted) and not any(run.results.late or run.results.refused for run in runs):
        return Html()
    charts = []
    for key, title in (("answered", "Answered"), ("accumulated", "Folded in")):
        series = []
        for run in runs:
            lines = [line for line in run.rounds if line.get("asked") and key in line]
            xs = [line["round"] for line in lines]
            ys = [line[key] / line["asked"] for line in lines]
            if lines:
                series.append(Series(label=run.label, style=run.style, xs=xs, ys=ys))
        if series:
            svg = chart(
                series,
                name=f"answers-{key}",
                xlabel="Round",
                ylabel=f"{title} / asked",
                limits=(0.0, 1.05),
                whole_xs=True,
            )
            charts.append(figure(Html(svg), f"{title}, as a share of the clients asked"))
    reasons = list(dict.fromkeys(reason for run in runs for reason in refused(run.rounds)))
    rows = [
        {
            "Run": swatched(run, place="answers"),
            "Asked": run.results.asked,
            "Answered": run.results.answered,
            "Folded in": run.results.accumulated,
            "Late": run.results.late,
            **({"Trained": trained} if any(counted) else {}),
            **{f"Refused: {r}": refused(run.rounds).get(r, 0) for r in reasons},
        }
        for run, trained in zip(runs, counted, strict=True)
    ]
    parts = [legend(runs, place="shares"), grid(charts), table(rows, numbers=list(rows[0])[1:])]
    return section("Answers", parts)


def _trained(run: ReportedRun) -> str:
    """Return how many answers came of a training that worked, where that is counted with noise."""
    lines = [line["scheme"] for line in run.rounds if "trained" in line.get("scheme", {})]
    total = sum(line["trained"] for line in lines)
    sigma = math.hypot(*(line["trained_sigma"] for line in lines))
    return f"{total:.0f} ± {sigma:.0f}" if lines else ""


def configurations(runs: Sequence[ReportedRun]) -> Html:
    """Return the settings in which the runs differ, and those that they share."""
    differing = runs[0].differing
    shared = {k: v for k, v in flat_settings(runs[0].settings).items() if k not in differing}
    parts = []
    if differing:
        rows = [{"Run": swatched(run, place="settings"), **run.differing} for run in runs]
        parts += [Html("<h3>Where the runs differ</h3>\n"), table(rows)]
    if len(runs) > 1:
        parts.append(Html("<h3>The same in all runs</h3>\n"))
    return section("Configuration", [*parts, definitions(shared)])


def provenance(runs: Sequence[ReportedRun]) -> Html:
    """Return where and when the runs took place, and with which versions."""
    packages = dict.fromkeys(p for run in runs for p in run.summary.get("versions") or {})
    rows = [
        {
            "Run": swatched(run, place="versions"),
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
    return section("Versions", [table(rows, numbers=["Nodes"])])


def _judges(runs: Sequence[ReportedRun]) -> str:
    judged = [run for run in runs if run.results.evaluated_by == "clients"]
    if not judged:
        return ""
    if len(judged) == len(runs):
        return " The clients evaluated the model, each on its own data."
    return f" In {listed(run.label for run in judged)} the clients evaluated it on their own data."


def _time(text: str | None) -> str | None:
    if text is None:
        return None
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
