"""The commands `key` and `doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.simulations.settings.run_settings import Settings

from .operator_options import print_checks
from .run_options import DataRoot

__all__ = ["doctor", "key"]


def key(
    path: Annotated[Path, typer.Argument(help="File for the private key; it must be new.")],
    client: Annotated[
        str | None, typer.Option(help="Identity of the client; by default the file's name.")
    ] = None,
) -> None:
    """Create a long-term key for a node; print the line with which the other nodes pin it."""
    from flwr_privacy.wire.identity import check_client_id
    from flwr_privacy.wire.pins import Identity

    name = check_client_id(client or path.stem)
    identity = Identity.generate()
    identity.write(path)
    typer.echo(f'"{name}" = "{identity.public}"')


def doctor(
    data_root: DataRoot = None,
    task: Annotated[
        str | None, typer.Option(help="Task for which to suggest a number of workers.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in a round of that task.")] = None,
    database: Annotated[
        Path | None, typer.Option(help="Database of this machine's SuperLink.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Certificate of this machine's SuperLink.")
    ] = None,
) -> None:
    """Check this machine: versions, Ray, GPUs, ports in use, data, a server's files."""
    from flwr_privacy.simulations.operations.doctor import diagnose

    settings = None
    if task is not None or clients is not None:
        chosen = {"task": task, "clients": clients}
        settings = Settings().with_values({k: v for k, v in chosen.items() if v is not None})
    print_checks(diagnose(data_root, settings, database=database, certificate=certificate))
