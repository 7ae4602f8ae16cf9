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
    apply: Annotated[
        bool, typer.Option("--apply", help="Change the app's files, where they are.")
    ] = False,
    epsilon: Annotated[float, typer.Option(help="Budget of a client, over all rounds.")] = 8.0,
    delta: Annotated[float, typer.Option(help="Its delta.")] = 1e-5,
    clients: Annotated[
        int | None,
        typer.Option(help="Number of clients, for the forecast and for m2fdp's tree."),
    ] = None,
) -> None:
    """Show or make the change that puts a scheme into an app; its training is not run.

    Exit code 8: the scheme does not fit the app, with the reason and what to change by hand.
    """
    from flwr_privacy.simulations.inspector.app_folder import AppFolder
    from flwr_privacy.simulations.inspector.change import change_of
    from flwr_privacy.simulations.inspector.findings import described, losses
    from flwr_privacy.simulations.inspector.unfit import UnfitError
    from flwr_privacy.simulations.inspector.wraps import (
        BRING_THEIR_CLIENT,
        Options,
        wrap_of,
    )

    options = Options(
        secure_sum=secure_sum,
        epsilon=epsilon,
        delta=delta,
        clients=4 if clients is None else clients,
    )
    inspected = AppFolder.read(app)
    wrap = None if scheme in BRING_THEIR_CLIENT else wrap_of(scheme, options)
    for line in described(inspected):
        typer.echo(line)
    if wrap is None:
        raise UnfitError(BRING_THEIR_CLIENT[scheme])
    change = change_of(inspected, wrap)
    found = losses(inspected, wrap)
    if found:
        typer.echo(f"\nwith {scheme}:")
    for line in found:
        typer.echo(f"- {line}")
    if change.empty:
        typer.echo(f"\nthe app has {scheme} already: nothing to change")
        return
    typer.echo(f"\n{change.diff()}")
    if apply:
        change.apply()
        typer.echo(f"applied: {len(change.texts)} files")
    else:
        typer.echo("--apply makes this change")
