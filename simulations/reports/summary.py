"""The top of a report: one sentence, one chart, and a table of at most five runs."""

from collections.abc import Sequence

from markupsafe import Markup

from .page import rendered
from .pieces import Drawn, best_run, by_task, number_text, over_rounds, score_text
from .privacy import Guaranteed, baseline_of, comparable, epsilon_chart, guaranteed
from .reported import ReportedRun

__all__ = ["summary"]

MOST_ROWS = 5
MB = 1e6


def summary(runs: Sequence[ReportedRun]) -> Markup:
    """Return what came out of the runs, for who reads no more than that."""
    groups = comparable(guaranteed(runs), any_adversary=True)
    # The most runs whose neighbours are the same, beside one without privacy if there is one.
    group = max(
        groups,
        key=lambda group: (baseline_of(runs, group[0][0].task) is not None, len(group)),
        default=[],
    )
    chosen = _chosen(runs)
    return rendered(
        "summary.html",
        sentence=_sentence(runs, group),
        charts=[epsilon_chart(group, runs, name="summary")] if group else _accuracies(runs),
        rows=[_row(run, _relations(chosen)) for run in chosen],
        numbers=["Accuracy", *map(_column, _relations(chosen)), "MB"],
        left=len(runs) - len(chosen),
    )


def _sentence(runs: Sequence[ReportedRun], group: Sequence[Guaranteed]) -> str:
    """Return the outcome in one sentence: what privacy costs, or else the best run."""
    private = best_run([run for run, guarantee in group if not guarantee.void])
    if private is not None and private.guarantee is not None:
        epsilon = private.guarantee.spent
        plain = baseline_of(runs, private.task)
        beside = f", without privacy {score_text(plain.results.accuracy)}" if plain else ""
        return (
            f"With epsilon {epsilon or 0.0:.3g} ({private.guarantee.neighbours}) "
            f"{private.label} reaches accuracy {score_text(private.results.accuracy)} on "
            f"{private.task}{beside}."
        )
    best = best_run(runs)
    if best is None:
        return "No run has measured an accuracy yet."
    who = f"The best of {len(runs)} runs is {best.label} with" if len(runs) > 1 else "The run has"
    return (
        f"{who} accuracy {score_text(best.results.accuracy)} on {best.task}, after "
        f"{best.results.rounds} of {best.results.planned} rounds."
    )


def _accuracies(runs: Sequence[ReportedRun]) -> list[Drawn]:
    """Return accuracy over the rounds of the largest task, where no run spends epsilon."""
    group = max(by_task(runs).values(), key=len)
    series = [
        run.series([line["round"] for line, _ in scores], [value for _, value in scores])
        for run in group
        if (scores := run.scores("accuracy"))
    ]
    caption = f"Accuracy over rounds, {group[0].task}"
    return over_rounds(series, name="summary", ylabel="Accuracy", caption=caption, legend=True)


def _chosen(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Return at most five runs: the best of each scheme, then the others in their order."""
    schemes: dict[str, list[ReportedRun]] = {}
    for run in runs:
        schemes.setdefault(run.scheme, []).append(run)
    first = [best_run(group) or group[0] for group in schemes.values()]
    # A scheme that protects somebody says more than one that does not.
    first.sort(key=lambda run: run.guarantee is None or run.guarantee.adversary == "nobody")
    rest = [run for run in runs if run not in first]
    kept = [*first, *rest][:MOST_ROWS]
    return [run for run in runs if run in kept]


def _relations(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the relations of neighbours for which these runs have spent epsilon."""
    found = [r.neighbours for r in runs if r.guarantee and r.guarantee.spent is not None]
    return list(dict.fromkeys(found))


def _column(neighbours: str) -> str:
    return f"Epsilon, where {neighbours}"


def _row(run: ReportedRun, relations: Sequence[str]) -> dict[str, object]:
    guarantee = run.guarantee
    epsilons = {
        _column(one): f"{guarantee.spent:.3g}"
        if guarantee and guarantee.spent is not None and run.neighbours == one
        else None
        for one in relations
    }
    return {
        "Run": run,
        "Task": run.task,
        "Accuracy": score_text(run.results.accuracy),
        **epsilons,
        "Protects": guarantee.protects if guarantee else None,
        "MB": number_text((run.results.bytes_up + run.results.bytes_down) / MB),
    }
