"""The command `check`: what a scheme changes in an app, what it takes from it, and the forecast."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["check"]


def check(
    app: Annotated[Path, typer.Argument(help="Folder of the Flower app, with a pyproject.toml.")],
    scheme: Annotated[
        str,
        typer.Option(
            help="Scheme: fedavg, udp, central-dp, mspdq, msp or m2fdp; acfl and fedvs "
            "bring their own client."
        ),
    ],
    secure_sum: Annotated[
        bool, typer.Option("--secure-sum", help="The server learns only sums of the updates.")
    ] = False,
    unit: Annotated[
        str | None,
        typer.Option(
            help="What is protected: user (all data of a client), record, or dp-sgd (a record, in "
            "the app's own loop) with udp; device or record with m2fdp; by default not the record."
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Change the app's files, where they are.")
    ] = False,
    epsilon: Annotated[float, typer.Option(help="Budget of a client, over all rounds.")] = 8.0,
    delta: Annotated[float, typer.Option(help="Its delta.")] = 1e-5,
    no_run: Annotated[
        bool,
        typer.Option("--no-run", help="Only read the files: no list of arrays and no forecast."),
    ] = False,
    clients: Annotated[
        int | None,
        typer.Option(
            help="Number of clients, for the forecast and m2fdp's tree; by default that of the "
            "app's federation, or the fewest with which its server begins."
        ),
    ] = None,
) -> None:
    """Show or make the change that puts a scheme into an app; its training is not run.

    Exit code 8: the scheme does not fit the app, with the reason and what to change by hand.
    """
    from flwr_privacy.simulations.inspector.app_folder import AppFolder
    from flwr_privacy.simulations.inspector.findings import described, of_arrays
    from flwr_privacy.simulations.inspector.inspection import inspect_app
    from flwr_privacy.simulations.inspector.wraps import Options, check_scheme

    options = Options(
        secure_sum=secure_sum, epsilon=epsilon, delta=delta, clients=clients, unit=unit
    )
    check_scheme(scheme, options)
    read = AppFolder.read(app)
    for line in described(read):
        typer.echo(line)
    found = inspect_app(read, scheme, options, run=not no_run)
    for line in of_arrays(found.found, found.wrap):
        typer.echo(line)
    typer.echo(f"\nwith {scheme} and {found.clients} clients:")
    for line in (*found.losses, *([found.forecast] if found.forecast else ())):
        typer.echo(f"- {line}")
    if found.change.empty:
        typer.echo(f"\nthe app has {scheme} already: nothing to change")
        return
    typer.echo(f"\n{found.change.diff()}")
    if apply:
        found.change.apply()
        typer.echo(f"applied: {len(found.change.texts)} files are changed")
    else:
        typer.echo("nothing is changed yet: --apply makes this change")
