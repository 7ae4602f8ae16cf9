"""The command `profile`, and what `run --profile` does."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.clients.profiling.recorder import process_age
from flwr_privacy.clients.profiling.samples import SAMPLES, check_installed
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.engines.profiling.report import profiled, write_profile

__all__ = ["PROFILE", "check_sampler", "profile", "profiled_run", "show_profile"]

PROFILE = "profile"
"""The folder of a run's profile within its own."""


def check_sampler(ray_address: str | None) -> None:
    """Refuse a profile that cannot be made, before there is a run.

    Raises
    ------
    EngineError
        If pyinstrument is not installed.
    InvalidParameterError
        If the run is on a Ray cluster that runs already.
    """
    check_installed()
    if ray_address is not None:
        allowed = "none with --ray-address: a cluster that runs has an environment of its own"
        raise InvalidParameterError("--profile", True, allowed)


def profiled_run(run: Path, engine: str, wanted: bool) -> AbstractContextManager[None]:
    """Profile a run into its folder, if that is wanted."""
    if not wanted:
        return nullcontext()
    # On Ray the server is a process of its own.
    return profiled(run / PROFILE, sample=engine == "inline", age=process_age())


def show_profile(folder: Path) -> None:
    """Print the table of a profile, and where its files are; write them anew.

    Raises
    ------
    EngineError
        If pyinstrument is not installed.
    InvalidParameterError
        If the folder has no samples, or cannot be written.
    """
    shown, files = write_profile(folder)
    typer.echo(shown.text())
    for file in files:
        typer.echo(f"profile: {file}")


def profile(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of FLWR_PRIVACY_PROFILE or run_inline(profile=), or of a run."),
    ],
) -> None:
    """Show where the time of a profiled run went, also while it goes on."""
    own = folder / PROFILE
    show_profile(own if (own / SAMPLES).is_dir() else folder)
