"""The report of one or more runs: one HTML file with everything in it, and the same as JSON.

A report is a list of sections; a section is a function from the runs to a piece of HTML, or to
none where it has nothing to say. To add one, write the function and put it into `SECTIONS`.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.figures import Series, Style, chart, swatch
from flwr_privacy.simulations.page import (
    Html,
    definitions,
    figure,
    html,
    joined,
    page,
    section,
    table,
)
from flwr_privacy.simulations.runs import (
    RunFolder,
    differing_settings,
    flat_settings,
    labels,
    score,
    write_text,
)
from flwr_privacy.simulations.settings import Settings

__all__ = ["SECTIONS", "ReportedRun", "Results", "Section", "write_report"]

MB = 1e6

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a run came to, in total or at its end.

    Parameters
    ----------
    rounds, planned : int
        Learning rounds done and planned.
    accuracy, best_accuracy, loss : float or None
        At the last evaluation, and the best of all; None where there was none. A loss may be NaN.
    evaluated_by : {"server", "clients"} or None
        Whose evaluation that is: the server's if there is any, else the clients' own.
    bytes_up, bytes_down : int
        Payload bytes of all messages from and to the nodes.
    virtual_seconds, seconds : float
        Simulated and real time.
    asked, answered, folded, late, refused : int
        Clients asked; replies that came, went into the model, came too late, were refused.
    skipped : int
        Rounds that left the model as it was.
    """

    rounds: int
    planned: int
    accuracy: float | None
    best_accuracy: float | None
    loss: float | None
    evaluated_by: str | None
    bytes_up: int
    bytes_down: int
    virtual_seconds: float
    seconds: float
    asked: int
    answered: int
    folded: int
    late: int
    refused: int
    skipped: int


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """A run as the sections see it.

    Parameters
    ----------
    name : str
        Name of its folder.
    label : str
        What tells it from the other runs, in words.
    style : Style
        Its look in every figure.
    settings : Settings
        What it was told.
    differing : Mapping
        The settings, with dotted keys, that the runs do not share.
    summary, rounds
        As in the run folder.
    results : Results
        What it came to.
    """

    name: str
    label: str
    style: Style
    settings: Settings
    differing: Mapping[str, Any]
    summary: Mapping[str, Any]
    rounds: Sequence[Line]
    results: Results

    def scores(self, metric: str) -> list[tuple[Line, float]]:
        """Return the lines of the rounds that were evaluated, with the values of a metric."""
        source = {"server": "server", "clients": "evaluate"}.get(self.results.evaluated_by or "")
        return _scores(self.rounds, metric, source)


Section = Callable[[Sequence[ReportedRun]], Html]


def write_report(
    runs: Sequence[RunFolder], out: Path, title: str = "Federated learning runs"
) -> Path:
    """Write ``report.html`` and ``report.json`` into a folder.

    Parameters
    ----------
    runs : Sequence of RunFolder
        At least one. Runs that go on or did not complete are shown as such.
    out : Path
        The folder; it is made if need be.
    title : str, default "Federated learning runs"
        Title of the page.

    Returns
    -------
    Path
        The page. It refers to nothing outside of it.

    Raises
    ------
    InvalidParameterError
        If there is no run or the folder cannot be written.
    DataError
        If a run folder is damaged.
    """
    if not runs:
        raise InvalidParameterError("runs", [], "at least one run folder")
    reported = _read(runs)
    path = out / "report.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "report.json", _as_json(title, reported))
        write_text(path, page(title, joined(one(reported) for one in SECTIONS)))
    except OSError as error:
        allowed = f"a folder that can be written ({error.strerror})"
        raise InvalidParameterError("out", str(out), allowed) from error
    return path


# From run folders to numbers


def _read(folders: Sequence[RunFolder]) -> list[ReportedRun]:
    runs = []
    told_apart = zip(folders, labels(folders), differing_settings(folders), strict=True)
    for index, (folder, label, differing) in enumerate(told_apart):
        settings, rounds = folder.settings, folder.rounds()
        run = ReportedRun(
            name=folder.path.resolve().name,
            label=label,
            style=Style(index),
            settings=settings,
            differing=differing,
            summary=folder.summary,
            rounds=rounds,
            results=_results(rounds, planned=settings.rounds),
        )
        runs.append(run)
    return runs


def _results(rounds: Sequence[Line], *, planned: int) -> Results:
    def total(key: str) -> int:
        return sum(line.get(key, 0) for line in rounds)

    sources = {"server": "server", "evaluate": "clients"}
    used = [s for s in sources if any(line.get(s) for line in rounds)]
    source = used[0] if used else None
    accuracies = [value for _, value in _scores(rounds, "accuracy", source)]
    losses = [value for _, value in _scores(rounds, "loss", source)]
    last: Line = rounds[-1] if rounds else {}
    return Results(
        rounds=last.get("round", 0),
        planned=last.get("rounds", planned),
        accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(filter(math.isfinite, accuracies), default=None),
        loss=losses[-1] if losses else None,
        evaluated_by=sources[source] if source else None,
        bytes_up=last.get("total_bytes_up", 0),
        bytes_down=last.get("total_bytes_down", 0),
        virtual_seconds=last.get("virtual_seconds", 0.0),
        seconds=last.get("seconds", 0.0),
        asked=total("asked"),
        answered=total("answered"),
        folded=total("folded"),
        late=total("late"),
        refused=sum(_refused(rounds).values()),
        skipped=total("skipped"),
    )


def _scores(rounds: Sequence[Line], metric: str, source: str | None) -> list[tuple[Line, float]]:
    sources = [source] if source else []
    values = [(line, score(line, metric, sources=sources)) for line in rounds]
    return [(line, value) for line, value in values if value is not None]


def _refused(rounds: Sequence[Line]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in rounds:
        for reason, count in (line.get("refused") or {}).items():
            counts[reason] = counts.get(reason, 0) + count
    return counts


def _by_task(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault(run.settings.task, []).append(run)
    return groups


def _as_json(title: str, runs: Sequence[ReportedRun]) -> str:
    keys = ("name", "label", "settings", "summary", "rounds", "results")
    entries = []
    for run in runs:
        entry = {key: getattr(run, key) for key in keys}
        entry |= {"settings": asdict(run.settings), "results": asdict(run.results)}
        entries.append(entry)
    return json.dumps(_finite({"title": title, "runs": entries}), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    # JSON knows neither NaN nor infinity: null stands for them.
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# Sections


def overview(runs: Sequence[ReportedRun]) -> Html:
    """Return one paragraph that says what was run and how it ended."""
    count = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    schemes = _listed(run.settings.scheme for run in runs)
    sentences = [f"{count} of {schemes} on {_listed(run.settings.task for run in runs)}"]
    endings = [run.summary["status"] for run in runs]
    if len(runs) == 1:
        sentences[0] += f": {endings[0]}"
    elif len(set(endings)) == 1:
        sentences[0] += f", all {endings[0]}"
    else:
        counts = _listed(f"{endings.count(ending)} {ending}" for ending in endings)
        sentences[0] += f": {counts}"
    groups = _by_task(runs)
    for task, group in groups.items():
        scored = [run for run in group if _is_finite(run.results.accuracy)]
        if not scored:
            continue
        best = max(scored, key=lambda run: run.results.accuracy or 0.0)
        rank = "The best final accuracy" if len(group) > 1 else "The final accuracy"
        rank += f" on {task}" if len(groups) > 1 else ""
        whose = f" ({best.label})" if len(group) > 1 else ""
        payload = _number((best.results.bytes_up + best.results.bytes_down) / MB)
        sentences.append(
            f"{rank} is {_score(best.results.accuracy)}{whose}, after {best.results.rounds}"
            f" of {best.results.planned} rounds and {payload} MB of payload up and down"
        )
    return Html(f'<p class="lead">{html(". ".join(sentences))}.</p>\n')


def table_of_runs(runs: Sequence[ReportedRun]) -> Html:
    """Return one row of results per run; scheme and task where they differ."""
    differing = {name for name in _what(runs[0]) if len({_what(run)[name] for run in runs}) > 1}
    rows = [
        {
            "Run": _swatched(run, place="runs"),
            "Status": Html(f'<span class="{run.summary["status"]}">{run.summary["status"]}</span>'),
            **{name: value for name, value in _what(run).items() if name in differing},
            "Clients": run.settings.clients or run.summary.get("nodes"),
            "Rounds": f"{run.results.rounds}/{run.results.planned}",
            "Accuracy": _score(run.results.accuracy),
            "Best": _score(run.results.best_accuracy),
            "Loss": _score(run.results.loss),
            "MB up": _number(run.results.bytes_up / MB),
            "MB down": _number(run.results.bytes_down / MB),
            "Virtual s": _number(run.results.virtual_seconds),
            "Real s": _number(run.results.seconds),
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
    parts = [_table(rows, numbers=numbers), Html(f'<p class="note">{html(notes)}</p>\n')]
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
    """Return accuracy and loss over rounds, payload bytes and virtual time, for each task."""
    groups = _by_task(runs)
    parts = []
    for number, (task, group) in enumerate(groups.items()):
        if len(groups) > 1:
            parts.append(Html(f"<h3>Task {html(task)}</h3>\n"))
        charts = [
            _curve(group, metric, xlabel, name=f"task{number}-{metric}-{place}")
            for place, xlabel in enumerate(ACROSS)
            for metric in ("accuracy", "loss")
        ]
        if any(charts):
            parts += [_legend(group, place=f"task{number}"), _grid(charts)]
        else:
            parts.append(Html("<p>The model was not evaluated yet.</p>\n"))
    return section("Accuracy and loss", parts)


ACROSS: Mapping[str, Callable[[Line], float]] = {
    "Round": lambda line: line["round"],
    "Payload up and down so far (MB)": lambda line: line["total_bytes"] / MB,
    "Virtual time (s)": lambda line: line.get("virtual_seconds", 0.0),
}


def _curve(runs: Sequence[ReportedRun], metric: str, xlabel: str, *, name: str) -> Html:
    series = []
    for run in runs:
        scores = run.scores(metric)
        xs = [ACROSS[xlabel](line) for line, _ in scores]
        if xs:
            ys = [value for _, value in scores]
            series.append(Series(label=run.label, style=run.style, xs=xs, ys=ys))
    whole = xlabel == "Round"
    if not any(one.ys for one in series) or not (whole or any(max(one.xs) > 0 for one in series)):
        return Html()
    ylabel = metric.capitalize()
    svg = chart(series, name=name, xlabel=xlabel, ylabel=ylabel, whole_xs=whole)
    over = {"Round": "rounds", "Virtual time (s)": "virtual time"}.get(xlabel, "payload")
    return figure(Html(svg), f"{ylabel} over {over}")


def answers(runs: Sequence[ReportedRun]) -> Html:
    """Return how many of the clients asked had a say, if any reply was late or refused."""
    if not any(run.results.late or run.results.refused for run in runs):
        return Html()
    charts = []
    for key, title in (("answered", "Answered"), ("folded", "Folded in")):
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
    reasons = list(dict.fromkeys(reason for run in runs for reason in _refused(run.rounds)))
    rows = [
        {
            "Run": _swatched(run, place="answers"),
            "Asked": run.results.asked,
            "Answered": run.results.answered,
            "Folded in": run.results.folded,
            "Late": run.results.late,
            **{f"Refused: {r}": _refused(run.rounds).get(r, 0) for r in reasons},
        }
        for run in runs
    ]
    parts = [_legend(runs, place="shares"), _grid(charts), _table(rows, numbers=list(rows[0])[1:])]
    return section("Answers", parts)


def guarantees(runs: Sequence[ReportedRun]) -> Html:
    """Return what each run states about privacy, if any does."""
    parts = []
    for run in runs:
        guarantee = run.summary.get("guarantee")
        if isinstance(guarantee, Mapping):
            parts.append(Html(f"<h3>{html(run.label)}</h3>\n{definitions(guarantee)}"))
    return section("Guarantees", parts)


def configurations(runs: Sequence[ReportedRun]) -> Html:
    """Return the settings in which the runs differ, and those that they share."""
    differing = runs[0].differing
    shared = {k: v for k, v in flat_settings(runs[0].settings).items() if k not in differing}
    parts = []
    if differing:
        rows = [{"Run": _swatched(run, place="settings"), **run.differing} for run in runs]
        parts += [Html("<h3>Where the runs differ</h3>\n"), _table(rows)]
    if len(runs) > 1:
        parts.append(Html("<h3>The same in all runs</h3>\n"))
    return section("Configuration", [*parts, definitions(shared)])


def provenance(runs: Sequence[ReportedRun]) -> Html:
    """Return where and when the runs took place, and with which versions."""
    packages = dict.fromkeys(p for run in runs for p in run.summary.get("versions") or {})
    rows = [
        {
            "Run": _swatched(run, place="versions"),
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
    return section("Versions", [_table(rows, numbers=["Nodes"])])


SECTIONS: tuple[Section, ...] = (
    overview,
    table_of_runs,
    problems,
    curves,
    answers,
    guarantees,
    configurations,
    provenance,
)


# Words and pieces that several sections use


def _table(rows: Sequence[Mapping[str, object]], *, numbers: Sequence[str] = ()) -> Html:
    return table(list(rows[0]), [list(row.values()) for row in rows], numbers=numbers)


def _grid(charts: Iterable[Html]) -> Html:
    return Html(f'<div class="figures">\n{joined(charts)}</div>\n')


def _swatched(run: ReportedRun, *, place: str) -> Html:
    line = swatch(run.style, name=f"{place}-{run.style.index}")
    return Html(f'<span class="run">{line}<span>{html(run.label)}</span></span>')


def _legend(runs: Sequence[ReportedRun], *, place: str) -> Html:
    items = joined(Html(f"<li>{_swatched(run, place=place)}</li>\n") for run in runs)
    return Html(f'<ul class="legend">\n{items}</ul>\n')


def _what(run: ReportedRun) -> dict[str, str]:
    return {"Scheme": run.settings.scheme, "Task": run.settings.task}


def _judges(runs: Sequence[ReportedRun]) -> str:
    judged = [run for run in runs if run.results.evaluated_by == "clients"]
    if not judged:
        return ""
    if len(judged) == len(runs):
        return " The clients evaluated the model, each on its own data."
    return f" In {_listed(run.label for run in judged)} the clients evaluated it on their own data."


def _listed(words: Iterable[str]) -> str:
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} and {last}" if others else last


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _score(value: float | None) -> str | None:
    if value is None:
        return None
    if math.isnan(value):
        return "NaN"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.3e}"


def _number(value: float) -> str:
    # Three digits that count, and no exponent where none is needed.
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(digits, 0), 6)}f}"


def _time(text: str | None) -> str | None:
    if text is None:
        return None
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
