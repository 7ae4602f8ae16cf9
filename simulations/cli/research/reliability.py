"""The command `reliability`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.simulations.cli.operator_options import check_can_write

__all__ = ["reliability"]


def reliability(
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="Scheme, as often as needed; by default all schemes of the matrix."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("docs/reliability.md"),
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds, at least 20, of a training with random faults, in place of the tables."
        ),
    ] = None,
    outage: Annotated[
        bool,
        typer.Option(
            "--outage", help="Lose each exchange with all clients, in place of the tables."
        ),
    ] = False,
    pairs: Annotated[
        int | None,
        typer.Option(help="Trainings with two random faults, such as 60, in place of the tables."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Root of the random faults.")] = 1,
) -> None:
    """Inject every fault in every phase of the schemes, whole outages, or random faults.

    An existing page keeps its entries for schemes that are not asked for.
    """
    from flwr_privacy.simulations.reliability import page as pages
    from flwr_privacy.simulations.reliability.federations import FEDERATIONS
    from flwr_privacy.simulations.reliability.matrix import DEFECT, matrix
    from flwr_privacy.wire.files import write_text

    chosen = [check_choice("scheme", name, FEDERATIONS) for name in scheme or FEDERATIONS]
    asked = {"--rounds": rounds is not None, "--outage": outage, "--pairs": pairs is not None}
    given = [name for name, there in asked.items() if there]
    if len(given) > 1:
        raise InvalidParameterError("options", given, f"one of {', '.join(asked)}")
    check_can_write(out)
    section = ""
    found_of: Callable[[str], pages.Found] | None = None
    if rounds is not None:
        section, found_of = pages.LONG, partial(pages.long_run_of, rounds=rounds, seed=seed)
    elif outage:
        section, found_of = pages.OUTAGES, pages.outages_of
    elif pairs is not None:
        section, found_of = pages.PAIRS, partial(pages.pairs_of, count=pairs, seed=seed)
    if found_of is not None:
        wrong = pages.write_rows(section, chosen, found_of, out=out, say=typer.echo)
        typer.echo(f"page: {out}")
        for line in wrong:
            typer.echo(f"defect: {line}", err=True)
        if wrong:
            raise typer.Exit(1)
        return
    order = [federation.title for federation in FEDERATIONS.values()]
    matrices = {}
    for name in chosen:
        title = FEDERATIONS[name].title
        matrices[title] = matrix(FEDERATIONS[name])
        typer.echo(f"{title}\n{pages.table(matrices[title])}\n")
        # After each: the whole takes minutes, and somebody may have enough.
        earlier = out.read_text(encoding="utf-8") if out.exists() else ""
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, pages.page(matrices, order=order, earlier=earlier))
    typer.echo(f"page: {out}")
    cells = [(title, cell) for title, found in matrices.items() for cell in found]
    defects = [(title, cell) for title, cell in cells if cell.verdict == DEFECT]
    for title, cell in defects:
        typer.echo(f"defect: {title}, {cell.fault}, phase {cell.phase}: {cell.why}", err=True)
    if defects:
        raise typer.Exit(1)
