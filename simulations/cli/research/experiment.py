"""The commands `experiment` and `replication`."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.cli.operator_options import check_can_write
from flwr_privacy.simulations.cli.run_options import DataRoot
from flwr_privacy.simulations.runner.jobs import Engine
from flwr_privacy.simulations.settings.own_code import search_current_folder

__all__ = ["experiment", "replication"]


def experiment(
    name: Annotated[
        str | None,
        typer.Argument(help="<scheme>/<figure>, see --list; or a TOML file of your own."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The paper's size; by default scaled down.")
    ] = False,
    engine: Annotated[str, typer.Option(help="inline (this process, default) or ray.")] = "inline",
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time; by default 2 inline, 1 on Ray.")
    ] = None,
    data_root: DataRoot = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for runs and results; by default one in runs/experiments/, for a file of "
            "your own one beside it."
        ),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(help="Seeds; a verdict takes 5, 10 or 20. Finished trainings are kept."),
    ] = "0,1,2,3,4",
) -> None:
    """Train the curves of a paper's figure, or of your own, draw them, and check the claims."""
    from flwr_privacy.simulations.research.experiments import files

    if name is None or show:
        for known in files.names():
            typer.echo(f"{known:24} {files.experiment(known).title}")
        return
    from rich.console import Console

    from flwr_privacy.simulations.research.experiments.results import ExperimentResults
    from flwr_privacy.simulations.research.experiments.runs import train
    from flwr_privacy.simulations.research.experiments.summary import save
    from flwr_privacy.simulations.research.experiments.tables import more_seeds, tables

    if files.is_own_file(name):
        search_current_folder()
        chosen, beside = files.own_experiment(Path(name), full=full), Path(name).with_suffix("")
    else:
        chosen, beside = files.experiment(name), Path("runs/experiments", name)
    folder = out or (beside.with_name(f"{beside.name}-full") if full else beside)
    numbers, where = _seeds(seeds), Engine(name=engine)
    check_can_write(folder, folder=True)
    runs = train(
        chosen,
        folder,
        seeds=numbers,
        engine=where,
        jobs=(2 if engine == "inline" else 1) if jobs is None else jobs,
        full=full,
        data_root=data_root,
    )
    results = ExperimentResults(experiment=chosen, full=full, runs=runs)
    picture, written = save(results, folder)
    for table in tables(results):
        Console().print(table)
    typer.echo(f"picture: {picture}\nnumbers: {written}")
    if more := more_seeds(results):
        typer.echo(more)


def replication(
    runs: Annotated[Path, typer.Option(help="Folder with the results of experiments.")] = Path(
        "runs/experiments"
    ),
    out: Annotated[Path, typer.Option(help="Folder of the pages and of the results they keep.")] = (
        Path("docs")
    ),
) -> None:
    """Collect the verdicts of experiments, and write their pages: one for each paper.

    Results that are new go to replication/results/ in the folder; the pages are made from there.
    """
    from flwr_privacy.simulations.research.experiments.replication import replication as write_pages

    check_can_write(out, folder=True)
    written, left = write_pages(runs, out)
    for line in left:
        typer.echo(f"left: {line}")
    for page in written:
        typer.echo(f"page: {page}")


def _seeds(text: str) -> list[int]:
    """Read seeds, whole numbers that differ."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise InvalidParameterError("--seeds", text, "whole numbers that differ, as in 0,1,2")
    return [int(part) for part in parts]
