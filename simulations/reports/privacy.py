"""A report's section on privacy: guarantees, epsilon spent, and what it cost in accuracy."""

import math
from collections.abc import Sequence
from dataclasses import replace

from flwr_privacy.privacy.guarantee import Guarantee

from .figures import Reference, Series, chart
from .page import Html, figure, grid, html, joined, section, table, terms
from .pieces import best_run, legend, listed, score_text, swatched
from .reported import Line, ReportedRun

__all__ = ["privacy", "void_guarantees"]

BASELINE = "fedavg"
"""The scheme without privacy that the others are compared with."""

Promised = tuple[ReportedRun, Guarantee]


def void_guarantees(runs: Sequence[ReportedRun]) -> Html:
    """Return a warning for each run whose guarantee does not hold."""
    return joined(
        Html(
            f'<p class="alert"><strong class="void">VOID</strong> The guarantee of '
            f"{html(run.label)} does not hold: {html(guarantee.void)}.</p>\n"
        )
        for run, guarantee in _promised(runs)
        if guarantee.void
    )


def privacy(runs: Sequence[ReportedRun]) -> Html:
    """Return accuracy over epsilon spent, and what each run promises, if any says so yet."""
    promised = _promised(runs)
    if not promised:
        return Html()
    parts = [_trade_offs(promised, runs), _table(promised), _texts(promised)]
    return section("Privacy", parts)


def _promised(runs: Sequence[ReportedRun]) -> list[Promised]:
    return [(run, run.guarantee) for run in runs if run.guarantee is not None]


# Accuracy over epsilon


def _trade_offs(promised: Sequence[Promised], runs: Sequence[ReportedRun]) -> Html:
    charts = [
        _chart(group, runs, place=f"privacy{number}")
        for number, group in enumerate(_comparable(promised))
    ]
    if not charts:
        return Html()
    note = "Epsilon spent is that of the client that had spent most when a round ended."
    return joined([grid(charts), _note(note)])


def _comparable(promised: Sequence[Promised]) -> list[list[Promised]]:
    """Return the runs that spent epsilon, those together whose epsilon means the same."""
    groups: dict[tuple[object, ...], list[Promised]] = {}
    for run, guarantee in promised:
        if any(epsilon > 0 for epsilon, _ in _spending(run)):
            meaning = (run.settings.task, guarantee.protects, guarantee.adversary, guarantee.delta)
            groups.setdefault(meaning, []).append((run, guarantee))
    return list(groups.values())


def _chart(group: Sequence[Promised], runs: Sequence[ReportedRun], *, place: str) -> Html:
    first, guarantee = group[0]
    task = first.settings.task
    series = []
    for run, _ in group:
        xs, ys = zip(*_spending(run), strict=True)
        series.append(Series(label=run.label, style=run.style, xs=xs, ys=ys))
    on_plot = [
        f"unit: {guarantee.protects}; delta {_digits(guarantee.delta)}",
        f"adversary: {guarantee.adversary}",
    ]
    if void := [run.label for run, one in group if one.void]:
        on_plot.append(f"VOID: no protection by {listed(void)}")
    baseline, reference, note = _baseline(runs, task), None, Html()
    if baseline is not None and baseline.results.accuracy is not None:
        accuracy = baseline.results.accuracy
        reference = Reference(f"best without privacy: {score_text(accuracy)}", accuracy)
        note = _note(f"The dotted line is the final accuracy of {baseline.label}.")
    svg = chart(
        series,
        name=place,
        xlabel="Epsilon spent",
        ylabel="Accuracy",
        limits=(0.0, 1.0),
        reference=reference,
        notes=on_plot,
    )
    drawn = figure(Html(svg), f"Accuracy over epsilon spent, {task}")
    named = legend((run for run, _ in group), place=place)
    return Html(f"<div>\n{named}{drawn}{note}</div>\n")


def _baseline(runs: Sequence[ReportedRun], task: str) -> ReportedRun | None:
    # A run that was broken off would make the others look better than they are.
    return best_run(
        run
        for run in runs
        if run.settings.scheme == BASELINE
        and run.settings.task == task
        and run.summary["status"] == "completed"
    )


def _spending(run: ReportedRun) -> list[tuple[float, float]]:
    """Return epsilon and accuracy after each round that tells both."""
    pairs = [(_number(line, "scheme", "epsilon"), score) for line, score in run.scores("accuracy")]
    return [(epsilon, accuracy) for epsilon, accuracy in pairs if epsilon is not None]


def _number(line: Line, kind: str, key: str) -> float | None:
    value = (line.get(kind) or {}).get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


# What is promised


def _table(promised: Sequence[Promised]) -> Html:
    rows = [
        {
            "Run": swatched(run, place="promises"),
            "Protects": guarantee.protects,
            "Against": guarantee.adversary,
            "Guarantee valid": _valid(guarantee),
            "Epsilon promised": _digits(guarantee.epsilon),
            "Delta": _digits(guarantee.delta),
            "Epsilon spent": _digits(guarantee.spent),
            **_answers(run),
            "Sigma": _digits(_sigma(run)),
            "Accuracy": score_text(run.results.accuracy),
        }
        for run, guarantee in promised
    ]
    numbers = list(rows[0])[list(rows[0]).index("Epsilon promised") :]
    note = (
        "Epsilon and delta hold for every client over the whole training; spent is what the client "
        "that spent most had spent by the last finished round. Sigma is the standard deviation of "
        "the noise on each released value in that round. Charged are the releases of all clients; "
        "never answered those to whose question no reply came. Where who was asked is a secret, so "
        "is that."
    )
    return joined([table(rows, numbers=numbers), _note(note)])


def _valid(guarantee: Guarantee) -> object:
    if guarantee.void:
        return Html('<strong class="void">VOID</strong>')
    return None if guarantee.epsilon is None else "yes"


def _answers(run: ReportedRun) -> dict[str, object]:
    found = run.answers
    if found is None or not found.charged:
        return {"Charged": None, "Never answered": None}
    missing = "secret" if found.untold else found.unanswered
    return {"Charged": found.charged, "Never answered": missing}


def _sigma(run: ReportedRun) -> float | None:
    sigmas = [_number(line, "train", "sigma") for line in run.rounds]
    return next((sigma for sigma in reversed(sigmas) if sigma is not None), None)


def _texts(promised: Sequence[Promised]) -> Html:
    # What is said of the scheme is said once, for all budgets.
    schemes: dict[Guarantee, dict[Guarantee, list[ReportedRun]]] = {}
    for run, guarantee in promised:
        common = replace(guarantee, epsilon=None, delta=None, spent=None, accountant="")
        schemes.setdefault(common, {}).setdefault(guarantee, []).append(run)
    parts = [Html("<h3>What is promised, and what is not</h3>\n")]
    for number, (common, promises) in enumerate(schemes.items()):
        parts.append(Html('<div class="guarantee">\n'))
        for index, (guarantee, runs) in enumerate(promises.items()):
            parts += [legend(runs, place=f"guarantee{number}-{index}"), _text(guarantee)]
        limits = {
            "Not protected": common.not_protected,
            "Assumed": common.assumptions,
            "Checked by": common.evidence,
        }
        parts += [terms(limits), Html("</div>\n")]
    verify = Html(
        '<p class="note">To recompute epsilon from a run\'s privacy card alone: '
        "<code>flwr-privacy verify RUN</code>, with the folder of the run. The card has every "
        "charge; it lies there as <code>privacy-card.html</code> and "
        "<code>privacy-card.json</code>.</p>\n"
    )
    return joined([*parts, verify])


def _text(guarantee: Guarantee) -> Html:
    void = f'<strong class="void">VOID: {html(guarantee.void)}.</strong> Without that: '
    words = replace(guarantee, void="", not_protected=(), assumptions=(), evidence=()).text()
    return Html(f"<p>{void if guarantee.void else ''}{html(words)}</p>\n")


def _digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _note(text: str) -> Html:
    return Html(f'<p class="note">{html(text)}</p>\n')
