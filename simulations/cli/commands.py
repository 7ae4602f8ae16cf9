"""The command line: `flwr-privacy` and its commands, by name."""

import os
import sys
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from flwr_privacy import __version__
from flwr_privacy.errors import FlwrPrivacyError, check_choice

from .check import check
from .deployed import deploy
from .ledger import ledger
from .listing import ListingCommand
from .nodes import doctor, executor, key, node
from .research import attack, best_rounds, calibrate, experiment, reliability, replication
from .results import demo, report, verify
from .state import state
from .training import run

__all__ = ["app", "main"]


class Commands(TyperGroup):
    """The commands by name: an unknown one is told once, with the nearest name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called.

        Raises
        ------
        InvalidParameterError
            If there is none of that name.
        """
        if not args[0].startswith("-"):
            check_choice("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    help="Federated learning schemes for Flower: train, report and check them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EXIT_CODES = """Exit codes: 0 done, 2 wrong parameter, 3 data missing or damaged, 4 the engine or
the app failed, 5 checkpoint unfit, 6 the two ends disagree, 7 ledger unfit, 8 declined, 9 charged
without an answer, 10 no round gave a model, 11 too few clients train, 12 every answer was refused,
130 interrupted."""

for command in (
    *(
        check,
        run,
        deploy,
        report,
        demo,
        calibrate,
        best_rounds,
        attack,
        experiment,
        replication,
        verify,
    ),
    *(executor, key, doctor, reliability),
):
    listed = command in (run, deploy)
    app.command(epilog=EXIT_CODES, cls=ListingCommand if listed else None)(command)
for name, group in (("ledger", ledger), ("state", state), ("node", node)):
    app.add_typer(group, name=name, cls=Commands)


def main() -> None:
    """Run the command line; a mistake of the user prints one line and sets the exit code."""
    # Pictures are drawn into files. Matplotlib refuses to start where a notebook's backend, which
    # is not needed for that, is set and not installed.
    os.environ["MPLBACKEND"] = "agg"
    try:
        app(prog_name="flwr-privacy")
    except FlwrPrivacyError as error:
        typer.echo(f"error: {error}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        sys.exit(error.exit_code)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning schemes for Flower: train, report and check them."""
    if show:
        typer.echo(__version__)
        raise typer.Exit
