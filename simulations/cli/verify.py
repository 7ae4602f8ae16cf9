"""The command `verify`. It is an app of its own, too: neither Flower nor torch is imported."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.accounting.charges import RELATIONS
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.verification.findings import FAILED, PASSED, UNKNOWN
from flwr_privacy.simulations.verification.verify import (
    MEANINGFUL,
    Verification,
    Wanted,
)

from .exit_codes import VERIFY_EXIT_CODES
from .operator_options import RUNS, AsJSON

__all__ = ["add_verify", "app"]

_MARKS = {PASSED: "ok", FAILED: "fail", UNKNOWN: "-"}


def add_verify(group: typer.Typer) -> None:
    """Add the command to an app."""
    group.command(epilog=VERIFY_EXIT_CODES)(verify)


def verify(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a run, or a privacy card alone; by default the folder of the newest "
            "card in flwr-privacy-runs and runs."
        ),
    ] = None,
    pins: Annotated[
        Path | None,
        typer.Option(help="TOML file with the clients' public keys, from the nodes' operators."),
    ] = None,
    head: Annotated[
        list[Path] | None,
        typer.Option(help="File of signed heads that came from nodes, past the server."),
    ] = None,
    ledger: Annotated[
        list[str] | None,
        typer.Option(
            help="Ledger of a node, FILE or CLIENT=FILE; without CLIENT the file is named for it."
        ),
    ] = None,
    max_epsilon: Annotated[
        float, typer.Option(help="Largest epsilon that is accepted, promised or spent.")
    ] = MEANINGFUL,
    neighbours: Annotated[
        str | None,
        typer.Option(help=f"Relation that is accepted: {', '.join(RELATIONS)}; by default any."),
    ] = None,
    as_json: AsJSON = False,
    html: Annotated[Path | None, typer.Option(help="File for the findings as a page.")] = None,
) -> None:
    """Check a run's privacy card: its sums, its run folder, and what the nodes say."""
    from flwr_privacy.privacy.card.folder import newest_card
    from flwr_privacy.simulations.operations.tables import json_text
    from flwr_privacy.simulations.verification.evidence import NodeEvidence, gather
    from flwr_privacy.simulations.verification.page import page
    from flwr_privacy.simulations.verification.verify import verify as verified

    wanted = Wanted(max_epsilon=max_epsilon, neighbours=neighbours)
    nodes = NodeEvidence.read(pins=pins, heads=head or (), ledgers=ledger or ())
    place = newest_card(RUNS).parent if run is None else run
    found = verified(gather(place, nodes), wanted)
    if html is not None:
        _write(html, page(found))
    if as_json:
        typer.echo(json_text(found.to_dict()), nl=False)
    else:
        _print(place, found)
    if found.outcome.exit_code:
        raise typer.Exit(found.outcome.exit_code)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
add_verify(app)


@app.callback()
def alone() -> None:
    """Keep `verify` the name of a command where it is the only one."""


def _print(place: Path, found: Verification) -> None:
    typer.echo(f"card: {place}")
    typer.echo(_shown(found.card.guarantee.text()))
    for accountant, (stated, computed) in found.numbers.items():
        typer.echo(f"epsilon ({accountant}): stated {stated:.6g}, recomputed {computed:.6g}")
    for name, text in found.card.attacker.lines() if found.card.attacker else ():
        typer.echo(f"{name.lower()}: {text}")
    typer.echo(f"answers: {found.card.answers()}")
    for finding in found.findings:
        typer.echo(_shown(f"{_MARKS[finding.result]:4}  {finding.check}: {finding.detail}"))
    typer.echo(_shown(found.sentence()))


def _shown(text: str) -> str:
    """Return a text of the card as one line: it may try to look like lines of this command."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        allowed = f"a file that can be written ({error.strerror})"
        raise InvalidParameterError("--html", str(path), allowed) from error
