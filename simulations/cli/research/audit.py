"""The command `audit`."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["audit"]


def audit(
    app: Annotated[Path, typer.Argument(help="Folder of the Flower app, with a pyproject.toml.")],
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds after which the app is stopped; by default it ends by itself."),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(help="Clients; by default those of the app's federation, or 10."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for everything.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Root of all random draws.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            help="module:function that returns the app's torch module; by default it is the one "
            "that a client trained."
        ),
    ] = None,
    claims: Annotated[
        str | None,
        typer.Option(
            help="What the app is said to keep, as epsilon=1,delta=1e-5,unit=user,view=model; by "
            "default what it says by itself."
        ),
    ] = None,
    canaries: Annotated[
        str | None,
        typer.Option(
            help="module:function of the app's function that returns a client's records, for "
            "claims about single records; by default its DataLoaders have them."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the audit, by default runs/audit-NAME; it goes on there."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="File for JUnit's XML: leaks are failures.")
    ] = None,
) -> None:
    """Say what a server learns from a Flower app: run it, attack what left its nodes, report."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from flwr_privacy.simulations.research.app_audit.audit import audit as audited
    from flwr_privacy.simulations.research.app_audit.findings import PARTS

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=1.0)
        report = audited(
            app,
            out=out,
            rounds=rounds,
            clients=clients,
            minutes=minutes,
            seed=seed,
            model=model,
            claims=claims,
            canaries=canaries,
            tell=lambda step, done: progress.update(bar, description=step, completed=done),
        )
        progress.update(bar, description="done", completed=1.0)
    for part, heading in PARTS.items():
        found = [f for f in report.findings if f.part == part]
        if found:
            typer.echo(f"\n{heading}")
        for one in found:
            typer.echo(f"- {one.verdict}: {one.name}. {one.said}")
    if junit is not None:
        report.write_junit(junit)
    typer.echo(f"\n{report.page}")
