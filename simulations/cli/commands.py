"""The command line: `flwr-privacy` and its commands, by name."""

from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from flwr_privacy import __version__
from flwr_privacy.errors import check_choice

from .check import check
from .deployed import deploy
from .exit_codes import EXIT_CODES
from .ledger import ledger
from .listing import ListingCommand
from .nodes import doctor, executor, key, node
from .profiles import profile
from .research.attack import attack
from .research.audit import audit
from .research.calibrate import best_rounds, calibrate
from .research.experiment import experiment, replication
from .research.reliability import reliability
from .results import compare, demo, report
from .state import state
from .training import run
from .verify import add_verify

__all__ = ["app"]


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

for command in (
    *(
        check,
        audit,
        run,
        deploy,
        report,
        compare,
        profile,
        demo,
        calibrate,
        best_rounds,
        attack,
        experiment,
        replication,
    ),
    *(executor, key, doctor, reliability),
):
    listed = command in (run, deploy)
    app.command(epilog=EXIT_CODES, cls=ListingCommand if listed else None)(command)
add_verify(app)
for name, group in (("ledger", ledger), ("state", state), ("node", node)):
    app.add_typer(group, name=name, cls=Commands)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning schemes for Flower: train, report and check them."""
    if show:
        typer.echo(__version__)
        raise typer.Exit
