"""The commands of `ledger`: show, check, export, head, witness, accept-loss and convert."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.privacy.policy import Policy
from flwr_privacy.simulations.operations.tables import csv_text, json_text

from .operator_options import (
    AsCSV,
    AsJSON,
    PolicyFile,
    StateFolder,
    WitnessFolder,
    print_checks,
    write_or_print,
)

__all__ = ["ledger"]

ledger = typer.Typer(
    help="Read a node's ledgers: what was released, what is left, what a witness misses.",
    no_args_is_help=True,
)

DataSet = Annotated[
    str | None, typer.Option(help="Data set of one ledger, <data set>.ledger; by default all.")
]
NamedDataSet = Annotated[str, typer.Option(help="Data set of the ledger, <data set>.ledger.")]
RequiredWitness = Annotated[
    Path, typer.Option(envvar="FLWR_PRIVACY_WITNESS", help="The privacy-witness folder.")
]
# What follows imports late: SciPy takes half a second, which `--help` need not wait for.


@ledger.command()
def show(
    state: StateFolder,
    data_set: DataSet = None,
    policy: PolicyFile = None,
    witness: WitnessFolder = None,
    as_json: AsJSON = False,
    as_csv: AsCSV = False,
) -> None:
    """Print what was charged for each experiment, and what the policy leaves."""
    from flwr_privacy.simulations.operations.ledger_text import COLUMNS, ledger_lines, row_of
    from flwr_privacy.simulations.operations.ledgers import ledger_files, summary_of

    limits = None if policy is None else Policy.read(policy)
    summaries = [summary_of(file, limits, witness) for file in ledger_files(state, data_set)]
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
def check(
    state: StateFolder,
    data_set: DataSet = None,
    policy: PolicyFile = None,
    witness: WitnessFolder = None,
) -> None:
    """Check lines, witness, rights, clock and budget of ledgers; exit code 1 if one is wrong."""
    from flwr_privacy.simulations.operations.ledger_checks import check_ledgers

    limits = None if policy is None else Policy.read(policy)
    print_checks(check_ledgers(state, limits, data_set, witness))


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


@ledger.command()
def head(
    state: StateFolder,
    data_set: DataSet = None,
    experiment: Annotated[
        str | None, typer.Option(help="Experiment of the head; by default all.")
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="The node's client-id; by default the data set's name.")
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(
            envvar="FLWR_PRIVACY_IDENTITY",
            help="The client's long-term key (PEM); by default the one that the node made, if any.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; by default the terminal.")
    ] = None,
) -> None:
    """Print the heads of a ledger's experiments, signed, for `flwr-privacy verify --head`."""
    from flwr_privacy.privacy.ledger.signed_head import heads_to_json
    from flwr_privacy.simulations.operations.ledger_heads import signed_heads
    from flwr_privacy.simulations.operations.ledgers import ledger_files

    heads = [
        one
        for file in ledger_files(state, data_set)
        for one in signed_heads(file, client or file.stem, identity, experiment)
    ]
    write_or_print(heads_to_json(heads), out, mode=0o644)


@ledger.command()
def witness(state: StateFolder, witness: RequiredWitness, data_set: DataSet = None) -> None:
    """Begin a witness of ledgers that have charges already, before a node is given its folder."""
    from flwr_privacy.privacy.ledger import Ledger
    from flwr_privacy.simulations.operations.ledgers import ledger_files

    for file in ledger_files(state, data_set):
        count = Ledger(file, data_set=file.stem, witness=witness).begin_witness()
        typer.echo(f"{file.stem}: the witness begins with {count} charges")


@ledger.command("accept-loss")
def accept_loss(state: StateFolder, witness: RequiredWitness, data_set: NamedDataSet) -> None:
    """Go on with a ledger that lacks charges which its witness has seen; the ledger notes it."""
    from flwr_privacy.privacy.ledger import Ledger
    from flwr_privacy.simulations.operations.ledger_text import loss_text

    # The file may be gone: so it is not looked for.
    ledger = Ledger(state / f"{data_set}.ledger", data_set=data_set, witness=witness)
    typer.echo(f"{data_set}: {loss_text(ledger.accept_loss())}")


@ledger.command()
def convert(state: StateFolder, data_set: DataSet = None) -> None:
    """Convert ledgers of version 2 while no node runs; the old ones stay beside them as .v2."""
    from flwr_privacy.simulations.operations.ledger_rebuild import OLD, convert
    from flwr_privacy.simulations.operations.ledgers import ledger_files

    for file in ledger_files(state, data_set):
        typer.echo(f"{file.stem}: {convert(file)} charges; the old file is {file.name}{OLD}")
