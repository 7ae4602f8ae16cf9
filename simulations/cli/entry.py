"""Runs the command line."""

import os
import sys

import typer

from flwr_privacy.errors import FlwrPrivacyError

__all__ = ["main"]


def main() -> None:
    """Run the command line; a mistake of the user prints one line and sets the exit code."""
    # Pictures are drawn into files. Matplotlib refuses to start where a notebook's backend, which
    # is not needed for that, is set and not installed.
    os.environ["MPLBACKEND"] = "agg"
    try:
        _app()(prog_name="flwr-privacy")
    except FlwrPrivacyError as error:
        typer.echo(f"error: {error}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        sys.exit(error.exit_code)


def _app() -> typer.Typer:
    # Whoever verifies a card need not be able to train: the other commands import Flower.
    if sys.argv[1:2] == ["verify"]:
        from .verify import app
    else:
        from .commands import app
    return app
