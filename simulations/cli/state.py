"""The commands `state show` and `state prune`."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from flwr_privacy.simulations.operations.tables import json_text, table

from .operator_options import AsJSON, StateFolder

__all__ = ["state"]

state = typer.Typer(
    help="Look at a node's state folder, and delete what is not needed any more.",
    no_args_is_help=True,
)


@state.command()
def show(folder: StateFolder, as_json: AsJSON = False) -> None:
    """Print the sizes of a state folder by client and kind, and what may be deleted."""
    from flwr_privacy.simulations.operations.state_files import (
        KINDS,
        known_experiments,
        names_of,
        state_files,
    )

    files = state_files(folder)
    order = {kind: place for place, kind in enumerate(KINDS)}
    groups = _grouped(files, lambda file: (file.client, order[file.kind]))
    kinds = [
        [client, own[0].kind, len(own), sum(f.size for f in own), KINDS[own[0].kind][0]]
        for (client, _), own in sorted(groups.items())
    ]
    experiments: list[list[Any]] = []
    named = _grouped(files, lambda file: file.name)
    rest = set(named) - {""}
    for experiment in known_experiments(files):
        names = names_of(experiment, files)
        experiments.append([experiment, *_totals([f for name in names for f in named[name]])])
        rest -= names
    if rest:
        unnamed = [file for name in rest for file in named[name]]
        experiments.append(["(without a known id)", *_totals(unnamed)])
    columns = ["client", "kind", "files", "bytes", "may be deleted"]
    of_experiments = ["experiment", "files", "bytes", "last written"]
    if as_json:
        document = {
            "files": [dict(zip(columns, row, strict=True)) for row in kinds],
            "experiments": [dict(zip(of_experiments, row, strict=True)) for row in experiments],
        }
        typer.echo(json_text(document), nl=False)
        return
    typer.echo(table(columns, kinds) + "\n")
    for kind in [kind for kind in KINDS if any(file.kind == kind for file in files)]:
        typer.echo(f"{kind}: {KINDS[kind][1]}")
    if experiments:
        typer.echo("\n" + table(of_experiments, experiments))
        typer.echo(
            f"\nIf one of them is over: flwr-privacy state prune --state {folder} --over EXPERIMENT"
        )


@state.command()
def prune(
    folder: StateFolder,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPERIMENT",
            help="Id of an experiment that is over, as often as needed: the node answers nothing "
            "more of it.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; by default only list.")] = False,
) -> None:
    """List, or with --yes delete, what a node does not need any more; never a ledger or a note."""
    from flwr_privacy.simulations.operations.prune import prune as pruned
    from flwr_privacy.simulations.operations.prune import removable

    files = (pruned if yes else removable)(folder, over or [])
    for file in files:
        typer.echo(f"{'deleted' if yes else 'would delete'}: {file.path} ({file.size} bytes)")
    total = f"{len(files)} files, {sum(file.size for file in files)} bytes"
    typer.echo(f"{total} deleted" if yes else f"{total}; nothing was deleted (--yes deletes)")


def _grouped(files: Sequence[Any], key: Callable[[Any], Any]) -> defaultdict[Any, list[Any]]:
    groups = defaultdict[Any, list[Any]](list)
    for file in files:
        groups[key(file)].append(file)
    return groups


def _totals(files: Sequence[Any]) -> list[Any]:
    last = max((file.modified for file in files), default=None)
    written = None if last is None else last.strftime("%Y-%m-%dT%H:%M:%SZ")
    return [len(files), sum(file.size for file in files), written]
