"""Runs the command line."""

import os
import sys

import typer

from flwr_privacy.errors import EngineError, FlwrPrivacyError

__all__ = ["EXTRAS", "main"]

EXTRAS = {
    "simulation": (
        *("cloudpickle", "flwr_datasets", "galois", "jinja2", "matplotlib", "pandas"),
        *("PIL", "ray", "sklearn", "threadpoolctl", "torch"),
    ),
    "vision": ("torchvision",),
    "adapters": ("peft",),
    "dp-sgd": ("opacus",),
    "tensorboard": ("tensorboard",),
    "profile": ("pyinstrument",),  # also a part of "simulation"
}
"""The extras of the distribution, and the packages that Python imports from them."""


def main() -> None:
    """Run the command line; a mistake of the user prints one line and sets the exit code.

    A command that needs an extra which is not installed says which.
    """
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
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, brought in EXTRAS.items() if package in brought), None)
        if extra is None:
            raise
        advice = f"pip install 'flwr-privacy[{extra}]'"
        typer.echo(f"error: {package} is not installed: {advice}", err=True)
        sys.exit(EngineError.exit_code)


def _app() -> typer.Typer:
    # Whoever verifies a card need not be able to train: the other commands import Flower.
    if sys.argv[1:2] == ["verify"]:
        from .verify import app
    else:
        from .commands import app
    return app
