"""The commands `ledger show`, `ledger check` and `ledger export`."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flwr_privacy.privacy.policy import Policy
from flwr_privacy.simulations.operations.ledger_checks import check_ledgers
from flwr_privacy.simulations.operations.ledgers import (
    CHARGE_COLUMNS,
    Budget,
    ExperimentTotals,
    LedgerSummary,
    charges,
    ledger_files,
    summary_of,
)
from flwr_privacy.simulations.operations.tables import csv_text, json_text, table

from .operator_options import AsCSV, AsJSON, PolicyFile, print_checks, write_or_print

__all__ = ["ledger"]

ledger = typer.Typer(
    help="Read a node's ledgers: what was released, and what is left of its budget.",
    no_args_is_help=True,
)

LedgerPath = Annotated[
    Path, typer.Argument(help="A node's <data set>.ledger, or the folder of its state.")
]
COLUMNS = ("experiment", "scheme", "unit", "charged", "unanswered", "epsilon", "first", "last")
SHOWN = 5
"""Requests that are named of those that were never answered."""


@ledger.command()
def show(
    path: LedgerPath, policy: PolicyFile = None, as_json: AsJSON = False, as_csv: AsCSV = False
) -> None:
    """Print what was charged for each experiment, and what the policy leaves."""
    limits = None if policy is None else Policy.read(policy)
    summaries = [summary_of(file, limits) for file in ledger_files(path)]
    if as_json:
        typer.echo(json_text([summary.to_dict() for summary in summaries]), nl=False)
    elif as_csv:
        rows = [[s.data_set, *_row(one)] for s in summaries for one in s.experiments]
        typer.echo(csv_text(["data_set", *COLUMNS], rows), nl=False)
    else:
        for summary in summaries:
            for line in _lines(summary, limits):
                typer.echo(line)


@ledger.command()
def check(path: LedgerPath, policy: PolicyFile = None) -> None:
    """Check format, rights, clock and budget of ledgers; exit code 1 if something is wrong."""
    print_checks(check_ledgers(path, None if policy is None else Policy.read(policy)))


@ledger.command()
def export(
    path: LedgerPath,
    as_json: AsJSON = False,
    out: Annotated[
        Path | None, typer.Option(help="File to write; by default the terminal.")
    ] = None,
) -> None:
    """Print every charge as CSV, or with --json as JSON."""
    rows = [row for file in ledger_files(path) for row in charges(file)]
    if as_json:
        text = json_text(rows)
    else:
        text = csv_text(CHARGE_COLUMNS, [list(row.values()) for row in rows])
    write_or_print(text, out)


def _lines(summary: LedgerSummary, limits: Policy | None) -> Iterator[str]:
    unanswered = summary.unanswered
    charged = sum(one.charged for one in summary.experiments)
    yield f"{summary.data_set}: {charged} charged, {len(unanswered)} never answered"
    if summary.experiments:
        rows = [_row(one) for one in summary.experiments]
        yield from (f"  {line}" for line in table(COLUMNS, rows).splitlines())
    for entry in unanswered[:SHOWN]:
        own = entry.question
        yield (
            f"  never answered: {own.phase} of round {own.server_round} of {own.experiment_id}, "
            f"{entry.time}"
        )
    if len(unanswered) > SHOWN:
        yield f"  never answered: {len(unanswered) - SHOWN} more (ledger export has all)"
    yield from (f"  {line}" for line in _budget_lines(summary.budget, limits))


def _budget_lines(budget: Budget, limits: Policy | None) -> Iterator[str]:
    spent = f"epsilon {_number(budget.epsilon)} at delta {budget.delta:g}"
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


def _row(totals: ExperimentTotals) -> list[Any]:
    values = {**asdict(totals), "experiment": totals.experiment_id, "unanswered": totals.unanswered}
    return [values[column] for column in COLUMNS]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
