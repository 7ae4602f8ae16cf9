"""The command `check`: what a scheme changes in an app, what it takes from it, and the forecast."""

import logging
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["check"]

DEFAULT_CLIENTS = 4


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
    no_run: Annotated[
        bool,
        typer.Option("--no-run", help="Only read the files: no list of arrays and no forecast."),
    ] = False,
    clients: Annotated[
        int | None,
        typer.Option(
            help="Number of clients, for the forecast and m2fdp's tree; by default "
            f"{DEFAULT_CLIENTS}."
        ),
    ] = None,
) -> None:
    """Show or make the change that puts a scheme into an app; its training is not run.

    Exit code 8: the scheme does not fit the app, with the reason and what to change by hand.
    """
    from flwr_privacy.simulations.inspector.app_folder import AppFolder
    from flwr_privacy.simulations.inspector.arrays import Arrays, arrays_of
    from flwr_privacy.simulations.inspector.change import change_of
    from flwr_privacy.simulations.inspector.findings import described, losses, of_arrays
    from flwr_privacy.simulations.inspector.foresight import forecast_of
    from flwr_privacy.simulations.inspector.unfit import UnfitError, check_fits
    from flwr_privacy.simulations.inspector.wraps import BRING_THEIR_CLIENT, Options, wrap_of

    logging.getLogger("flwr.privacy").setLevel(logging.ERROR)  # the forecast is printed once
    number = DEFAULT_CLIENTS if clients is None else clients
    options = Options(secure_sum=secure_sum, epsilon=epsilon, delta=delta, clients=number)
    inspected = AppFolder.read(app)
    wrap = None if scheme in BRING_THEIR_CLIENT else wrap_of(scheme, options)
    for line in described(inspected):
        typer.echo(line)
    if wrap is None:
        raise UnfitError(BRING_THEIR_CLIENT[scheme])
    check_fits(inspected, wrap)
    found: Arrays | str = "--no-run: nothing of the app was run" if no_run else arrays_of(inspected)
    if isinstance(found, Arrays):
        wrap = wrap.keeping_back(found.suspected)
    for line in of_arrays(found, wrap):
        typer.echo(line)
    change = change_of(inspected, wrap)
    typer.echo(f"\nwith {scheme}:")
    for line in losses(inspected, wrap):
        typer.echo(f"- {line}")
    if isinstance(found, Arrays) and (forecast := forecast_of(wrap, found, clients=number)):
        said = "" if clients is not None else f" (with {number} clients; --clients changes that)"
        typer.echo(f"- {forecast}{said}")
    if change.empty:
        typer.echo(f"\nthe app has {scheme} already: nothing to change")
        return
    typer.echo(f"\n{change.diff()}")
    if apply:
        change.apply()
        typer.echo(f"applied: {len(change.texts)} files are changed")
    else:
        typer.echo("nothing is changed yet: --apply makes this change")
