"""A report's section on privacy: guarantees, epsilon spent, and what it cost in accuracy."""

import math
from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from flwr_privacy.privacy.guarantee import Guarantee

from .figures import Reference, chart
from .page import rendered
from .pieces import Drawn, best_run, listed, score_text
from .reported import Line, ReportedRun

__all__ = [
    "BASELINE",
    "Guaranteed",
    "baseline_of",
    "comparable",
    "epsilon_chart",
    "guaranteed",
    "privacy",
    "void_guarantees",
]

BASELINE = "fedavg"
"""The scheme without privacy that the others are compared with."""

Guaranteed = tuple[ReportedRun, Guarantee]


def void_guarantees(runs: Sequence[ReportedRun]) -> Markup:
    """Return a warning for each run whose guarantee does not hold."""
    void = [run for run, guarantee in guaranteed(runs) if guarantee.void]
    return rendered("void.html", runs=void) if void else Markup()


def privacy(runs: Sequence[ReportedRun]) -> Markup:
    """Return accuracy over epsilon spent and the guarantee of each run that has one yet."""
    known = guaranteed(runs)
    if not known:
        return Markup()
    charts = [
        epsilon_chart(group, runs, name=f"privacy{number}")
        for number, group in enumerate(comparable(known))
    ]
    # What is said of the scheme is said once, for all budgets.
    schemes: dict[Guarantee, dict[Guarantee, list[ReportedRun]]] = {}
    for run, guarantee in known:
        common = replace(guarantee, epsilon=None, delta=None, spent=None, accountant="")
        schemes.setdefault(common, {}).setdefault(guarantee, []).append(run)
    # An epsilon means something else where other data sets are neighbours: a table of its own.
    tables: dict[str, list[dict[str, object]]] = {}
    for run, guarantee in known:
        tables.setdefault(run.neighbours, []).append(_row(run, guarantee))
    return rendered("privacy.html", charts=charts, tables=tables, schemes=schemes, text=_text)


def guaranteed(runs: Sequence[ReportedRun]) -> list[Guaranteed]:
    """Return the runs that have a privacy card, with their guarantees."""
    return [(run, run.guarantee) for run in runs if run.guarantee is not None]


# Accuracy over epsilon


def comparable(
    guaranteed: Sequence[Guaranteed], *, any_adversary: bool = False
) -> list[list[Guaranteed]]:
    """Return the runs that spent epsilon, those together whose epsilon means the same.

    Parameters
    ----------
    guaranteed : sequence of (ReportedRun, Guarantee)
        The runs.
    any_adversary : bool, default False
        Whether it may hold against one adversary in one run, and another in the next.
    """
    groups: dict[tuple[object, ...], list[Guaranteed]] = {}
    for run, guarantee in guaranteed:
        if any(epsilon > 0 for epsilon, _ in _spending(run)):
            meaning = (
                *(run.task, guarantee.protects, run.neighbours, guarantee.delta),
                "" if any_adversary else guarantee.adversary,
            )
            groups.setdefault(meaning, []).append((run, guarantee))
    return list(groups.values())


def epsilon_chart(group: Sequence[Guaranteed], runs: Sequence[ReportedRun], *, name: str) -> Drawn:
    """Draw accuracy over epsilon for runs whose epsilons mean the same."""
    first, guarantee = group[0]
    task = first.task
    series = []
    for run, _ in group:
        xs, ys = zip(*_spending(run), strict=True)
        series.append(run.series(xs, ys))
    adversaries = {one.adversary for _, one in group}
    on_plot = [
        f"unit: {guarantee.protects}; delta {_digits(guarantee.delta)}",
        f"neighbours: {first.neighbours}",
        f"adversary: {guarantee.adversary}"
        if len(adversaries) == 1
        else "adversaries: not the same for all runs, see Privacy below",
    ]
    if void := [run.label for run, one in group if one.void]:
        on_plot.append(f"VOID: no protection by {listed(void)}")
    baseline, reference, note = baseline_of(runs, task), None, ""
    if baseline is not None and baseline.results.accuracy is not None:
        accuracy = baseline.results.accuracy
        reference = Reference(f"best without privacy: {score_text(accuracy)}", accuracy)
        note = f"The dotted line is the final accuracy of {baseline.label}."
    svg = chart(
        series,
        name=name,
        xlabel="Epsilon spent",
        ylabel="Accuracy",
        limits=(0.0, 1.0),
        reference=reference,
        notes=on_plot,
    )
    caption = f"Accuracy over epsilon spent, {task}"
    lines = [run for run, _ in group]
    return Drawn(name=name, caption=caption, svg=svg, lines=lines, note=note)


def baseline_of(runs: Sequence[ReportedRun], task: str) -> ReportedRun | None:
    """Return the best whole run without privacy on a task."""
    # A run that was broken off would make the others look better than they are.
    return best_run(
        run
        for run in runs
        if run.scheme == BASELINE and run.task == task and run.summary["status"] == "completed"
    )


def _spending(run: ReportedRun) -> list[tuple[float, float]]:
    """Return epsilon and accuracy after each round that tells both."""
    pairs = [(_number(line, "scheme", "epsilon"), score) for line, score in run.scores("accuracy")]
    return [(epsilon, accuracy) for epsilon, accuracy in pairs if epsilon is not None]


def _number(line: Line, kind: str, key: str) -> float | None:
    value = (line.get(kind) or {}).get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


# What is guaranteed


def _row(run: ReportedRun, guarantee: Guarantee) -> dict[str, object]:
    answers = run.answers if run.answers and run.answers.charged else None
    sigmas = [_number(line, "train", "sigma") for line in run.rounds]
    valid: object = None if guarantee.epsilon is None else "yes"
    return {
        "Run": run,
        "Protects": guarantee.protects,
        "Against": guarantee.adversary,
        "Guarantee valid": Markup('<strong class="void">VOID</strong>')
        if guarantee.void
        else valid,
        "Epsilon guaranteed": _digits(guarantee.epsilon),
        "Delta": _digits(guarantee.delta),
        "Epsilon spent": _digits(guarantee.spent),
        "Charged": answers and answers.charged,
        "Never answered": answers and ("secret" if answers.untold else answers.unanswered),
        "Sigma": _digits(next((s for s in reversed(sigmas) if s is not None), None)),
        "Accuracy": score_text(run.results.accuracy),
    }


def _text(guarantee: Guarantee) -> str:
    """Return what holds if nothing makes the guarantee void, without the lists below it."""
    return replace(guarantee, void="", not_protected=(), assumptions=(), evidence=()).text()


def _digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"
