"""Writes the summary of a ledger as lines for a terminal and rows for a table."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from flwr_privacy.privacy.ledger import Loss
from flwr_privacy.privacy.policy import Policy

from .ledgers import Budget, ExperimentTotals, LedgerSummary
from .tables import table

__all__ = ["COLUMNS", "ledger_lines", "loss_text", "row_of"]

COLUMNS = (
    *("experiment", "scheme", "unit", "neighbours", "charged", "unanswered", "epsilon"),
    *("first", "last"),
)
SHOWN = 5
"""Requests that are named of those that were never answered."""


def ledger_lines(summary: LedgerSummary, limits: Policy | None) -> Iterator[str]:
    """Yield what a ledger holds, and what a policy leaves of its budget."""
    unanswered = summary.unanswered
    charged = sum(one.charged for one in summary.experiments)
    yield f"{summary.data_set}: {charged} charged, {len(unanswered)} never answered"
    if summary.experiments:
        rows = [row_of(one) for one in summary.experiments]
        yield from (f"  {line}" for line in table(COLUMNS, rows).splitlines())
    for entry in unanswered[:SHOWN]:
        own = entry.question
        yield (
            f"  never answered: {own.phase} of round {own.server_round} of {own.experiment_id}, "
            f"{entry.time}"
        )
    if len(unanswered) > SHOWN:
        yield f"  never answered: {len(unanswered) - SHOWN} more (ledger export has all)"
    yield from (f"  {line}" for line in map(loss_text, summary.losses))
    yield from (f"  {line}" for line in _budget_lines(summary.budget, limits))


def _budget_lines(budget: Budget, limits: Policy | None) -> Iterator[str]:
    spent = (
        f"epsilon {_number(budget.epsilon)} at delta {budget.delta:g} for the neighbours "
        f"{budget.neighbours}"
    )
    if len(budget.epsilon_by_unit) > 1:
        units = ", ".join(f"{u} {_number(e)}" for u, e in budget.epsilon_by_unit.items())
        spent += f" ({units})"
    if limits is None:
        yield f"{spent}; no policy given: --policy FILE says what is left"
        return
    if budget.max_epsilon is None:
        yield f"{spent}; the policy has no max_epsilon"
    elif not budget.proven:
        yield f"{spent}; nothing is left: the cost of some charges is not proven"
    else:
        yield f"{spent}; {_number(budget.epsilon_left)} left of {budget.max_epsilon:g}"
    if budget.releases_left is not None:
        yield f"releases: {budget.releases_left} left of {limits.max_releases}"
    if budget.releases_left_today is not None:
        yield (
            f"releases within 24 hours: {budget.releases_left_today} left of "
            f"{limits.max_releases_per_day}"
        )


def loss_text(loss: Loss) -> str:
    """Return what an accepted loss says."""
    return (
        f"loss accepted at {loss.time}: the witness had seen {loss.witnessed} charges, the ledger "
        f"went on with {loss.charges}; what is missing is in no total"
    )


def row_of(totals: ExperimentTotals) -> list[Any]:
    """Return an experiment's totals in the order of `COLUMNS`."""
    values = {**asdict(totals), "experiment": totals.experiment_id, "unanswered": totals.unanswered}
    return [values[column] for column in COLUMNS]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
