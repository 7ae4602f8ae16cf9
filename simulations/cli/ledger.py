"""The commands `ledger show`, `ledger check` and `ledger export`."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.privacy.policy import Policy
from flwr_privacy.simulations.operations.tables import csv_text, json_text

from .operator_options import AsCSV, AsJSON, PolicyFile, StateFolder, print_checks, write_or_print

__all__ = ["ledger"]

ledger = typer.Typer(
    help="Read a node's ledgers: what was released, and what is left of its budget.",
    no_args_is_help=True,
)

DataSet = Annotated[
    str | None, typer.Option(help="Data set of one ledger, <data set>.ledger; by default all.")
]
# What follows imports late: SciPy takes half a second, which `--help` need not wait for.


@ledger.command()
def show(
    state: StateFolder,
    data_set: DataSet = None,
    policy: PolicyFile = None,
    as_json: AsJSON = False,
    as_csv: AsCSV = False,
) -> None:
    """Print what was charged for each experiment, and what the policy leaves."""
    from flwr_privacy.simulations.operations.ledger_text import COLUMNS, ledger_lines, row_of
    from flwr_privacy.simulations.operations.ledgers import ledger_files, summary_of

    limits = None if policy is None else Policy.read(policy)
    summaries = [summary_of(file, limits) for file in ledger_files(state, data_set)]
    if as_json:
        typer.echo(json_text([summary.to_dict() for summary in summaries]), nl=False)
    elif as_csv:
        rows = [[s.data_set, *row_of(one)] for s in summaries for one in s.experiments]
        typer.echo(csv_text(["data_set", *COLUMNS], rows), nl=False)
    else:
        for summary in summaries:
            for line in ledger_lines(summary, limits):
                typer.echo(line)


@ledger.command()
def check(state: StateFolder, data_set: DataSet = None, policy: PolicyFile = None) -> None:
    """Check format, rights, clock and budget of ledgers; exit code 1 if something is wrong."""
    from flwr_privacy.simulations.operations.ledger_checks import check_ledgers

    limits = None if policy is None else Policy.read(policy)
    print_checks(check_ledgers(state, limits, data_set))


@ledger.command()
def export(
    state: StateFolder,
    data_set: DataSet = None,
    as_json: AsJSON = False,
    out: Annotated[
        Path | None, typer.Option(help="File to write; by default the terminal.")
    ] = None,
) -> None:
    """Print every charge as CSV, or with --json as JSON."""
    from flwr_privacy.simulations.operations.ledgers import CHARGE_COLUMNS, charges, ledger_files

    rows = [row for file in ledger_files(state, data_set) for row in charges(file)]
    if as_json:
        text = json_text(rows)
    else:
        text = csv_text(CHARGE_COLUMNS, [list(row.values()) for row in rows])
    write_or_print(text, out)
