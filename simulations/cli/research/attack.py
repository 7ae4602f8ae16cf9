"""The command `attack`."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.simulations.cli.run_options import DataRoot

__all__ = ["attack"]


def attack(
    scheme: Annotated[
        str,
        typer.Argument(
            help="What to attack: secure-sum, mspdq, udp, acfl, m2fdp, fedvs; or audit; or "
            "canaries in a language model."
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task of secure-sum and m2fdp: digits-linear (default), digits-mlp, mnist-mlp; of "
            "mspdq: digits-lenet (default), mnist-lenet; of udp: digits-mlp (default), "
            "digits-linear; of acfl: digits-pixels, digits-rff (default: both); of fedvs: digits; "
            "of audit: one scheme; of canaries: one method."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            help="Clients; by default 20, of mspdq 6, of udp 2, of acfl, m2fdp 5, of fedvs 16, of "
            "an audit's crowd 150, with canaries 100."
        ),
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(
            help="Records of each client; by default 1, of udp 50, of acfl 20; of fedvs 32 rows "
            "that all share; with canaries 24 sentences."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Root of all random draws except those of the schemes.")
    ] = 0,
    seeds: Annotated[
        int, typer.Option(help="How many seeds from there on; of several, numbers are ranges.")
    ] = 1,
    data_root: DataRoot = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("runs/attack"),
) -> None:
    """Attack a scheme: show which records a server recovers, or audit the noise of all schemes."""
    from rich.console import Console

    from flwr_privacy.simulations.research.attack import ATTACKS, ONE_SEED
    from flwr_privacy.simulations.research.attacks.over_seeds import over_seeds
    from flwr_privacy.simulations.research.attacks.setup import AttackOptions

    attack = ATTACKS[check_choice("scheme", scheme, ATTACKS)]
    if check_integer("seeds", seeds, minimum=1) != 1 and scheme in ONE_SEED:
        allowed = f"1 for {scheme}: the error of its verdicts is controlled over one report"
        raise InvalidParameterError("seeds", seeds, allowed)
    options = AttackOptions(
        task=task,
        clients=clients,
        records=records,
        seed=seed,
        data_root=data_root,
        out=out,
    )
    report = over_seeds(attack, options, seeds=seeds)
    console = Console()
    for table in report.tables:
        console.print(table)
    typer.echo(report.legend)
    for picture in report.pictures:
        typer.echo(f"picture: {picture}")
    typer.echo(report.verdict)
