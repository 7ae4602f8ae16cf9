"""The options that an operator's commands share, and how they print what they find."""

import os
from collections.abc import Sequence
from errno import EACCES, EISDIR, ENOTDIR
from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.operations.checks import FAIL, Check
from flwr_privacy.wire.files import PRIVATE, write_text

__all__ = [
    "RUNS",
    "AsCSV",
    "AsJSON",
    "PolicyFile",
    "StateFolder",
    "StateFolderOrNone",
    "WitnessFolder",
    "check_can_write",
    "print_checks",
    "write_or_print",
]

RUNS = Path("runs")
"""Where the commands put runs without `--out`."""

# As a node reads them (`flwr_privacy.clients.node.context_store`, which imports SciPy).
PolicyFile = Annotated[
    Path | None,
    typer.Option(envvar="FLWR_PRIVACY_POLICY", help="TOML file with the node's policy."),
]
_STATE = typer.Option(
    "--state", envvar="FLWR_PRIVACY_STATE", help="The node's privacy-state folder."
)
StateFolder = Annotated[Path, _STATE]
StateFolderOrNone = Annotated[Path | None, _STATE]
WitnessFolder = Annotated[
    Path | None,
    typer.Option("--witness", envvar="FLWR_PRIVACY_WITNESS", help="The privacy-witness folder."),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCSV = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


def print_checks(checks: Sequence[Check]) -> None:
    """Print a line for each check; end with exit code 1 if one of them fails."""
    for check in checks:
        typer.echo(f"{check.status:4}  {check.name}: {check.detail}")
    if any(check.status == FAIL for check in checks):
        raise typer.Exit(1)


def write_or_print(text: str, out: Path | None, *, mode: int = PRIVATE) -> None:
    """Write a text to a file at once, or else to the terminal.

    Parameters
    ----------
    text : str
        The text.
    out : Path, optional
        The file; a reader sees the old text or the new one.
    mode : int, default PRIVATE
        Its rights, whatever the umask.

    Raises
    ------
    InvalidParameterError
        If the file cannot be written.
    """
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        write_text(out, text, mode=mode)
    except OSError as error:
        allowed = f"a file that can be written ({error.strerror})"
        raise InvalidParameterError("--out", str(out), allowed) from error
    typer.echo(f"written: {out}", err=True)


def check_can_write(out: Path, *, folder: bool = False) -> None:
    """Refuse a place where results could not be written, before the work that they come from.

    Raises
    ------
    InvalidParameterError
        If it is one.
    """
    place = out if folder else out.parent
    while not place.exists() and place != place.parent:
        place = place.parent
    wrong = 0
    if not folder and out.is_dir():
        wrong = EISDIR
    elif not place.is_dir():
        wrong = ENOTDIR
    elif not os.access(place, os.W_OK | os.X_OK):
        wrong = EACCES
    if wrong:
        allowed = f"a {'folder' if folder else 'file'} that can be written ({os.strerror(wrong)})"
        raise InvalidParameterError("--out", str(out), allowed)
