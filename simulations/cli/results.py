"""The commands `report` and `compare`, which read runs, and `demo`, which makes its own."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.card_run import opened
from flwr_privacy.simulations.settings.run_folder import RunFolder

from .demo_runs import TITLE, demo_runs
from .operator_options import RUNS, check_can_write, write_or_print

__all__ = ["compare", "demo", "report"]


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of the runs, or of the cards that they left.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report; by default runs/report, for one run its own folder."
        ),
    ] = None,
) -> None:
    """Write an HTML report on one or more runs, with the numbers as JSON beside it."""
    from flwr_privacy.simulations.reports.report import write_report

    where = out or (runs[0] if len(runs) == 1 else RUNS / "report")
    typer.echo(f"report: {write_report([opened(run) for run in runs], where)}")


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of completed runs of one task, with any seeds.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the charts.")] = RUNS / "comparison",
    csv: Annotated[
        Path | None, typer.Option(help="File for a row of each round of each run.")
    ] = None,
) -> None:
    """Compare runs over their seeds: means with standard errors, accuracy over what it cost.

    Runs that differ in their seed alone are one line.
    """
    from rich.console import Console

    from flwr_privacy.simulations.reports.comparison.comparison import as_csv, draw_charts, table
    from flwr_privacy.simulations.reports.comparison.seeds import over_seeds

    check_can_write(out, folder=True)
    groups = over_seeds([RunFolder.open(run) for run in runs])
    pictures = draw_charts(groups, out)
    Console().print(table(groups))
    for picture in pictures:
        typer.echo(f"picture: {picture}")
    if csv is not None:
        write_or_print(as_csv(groups), csv)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path(
        "runs/demo"
    ),
    engine: Annotated[str, typer.Option(help="ray or inline.")] = "ray",
) -> None:
    """Train on real data under each scheme, and report what privacy costs."""
    from flwr_privacy.simulations.reports.report import write_report

    where = Engine(name=engine)
    parent = out
    number = 2
    while parent.exists():
        parent, number = out.with_name(f"{out.name}-{number}"), number + 1
    runs = demo_runs()
    folders = [
        RunFolder.create(
            parent / name, run.settings, engine=engine, nodes=where.nodes(run.settings)
        )
        for name, run in runs.items()
    ]
    about = {name: run.about for name, run in runs.items()}
    for name, text in about.items():
        typer.echo(f"{name}: {text}")
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(folder.alone())
        carry_out(folders, where)
    typer.echo(f"report: {write_report(folders, parent, title=TITLE, about=about)}")
