"""What `flwr-privacy ledger` says of a node's ledgers."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError, LedgerError
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.simulations.cli import app


def run(path: Path) -> list[str]:
    result = CliRunner().invoke(app, ["ledger", str(path)], catch_exceptions=False)
    return result.stdout.splitlines()


def charge(ledger: Ledger, experiment: str, server_round: int, *, answered: bool) -> None:
    question = Question(experiment_id=experiment, phase="train", server_round=server_round)
    entry = Entry(
        question=question,
        scheme="udp",
        unit="user",
        charge=Charge(noise_multiplier=2.0),
        time="2025-12-31T23:59:59Z",
    )
    with ledger.locked() as locked:
        number = locked.charge(entry)
        if answered:
            locked.answer(number)


def test_charges_that_were_never_answered_are_counted_and_named(tmp_path: Path) -> None:
    ward = Ledger(tmp_path / "ward-7.ledger", data_set="ward-7")
    for server_round in range(1, 11):
        charge(ward, "one", server_round, answered=server_round > 7)
    charge(ward, "two", 1, answered=True)
    charge(Ledger(tmp_path / "ward-8.ledger", data_set="ward-8"), "one", 3, answered=False)
    named = "; ".join(f"train of round {r}, 2025-12-31T23:59:59Z" for r in range(1, 6))
    lines = [
        "ward-7: 11 charged, 4 answered, 7 never answered",
        f"  experiment one, udp, user: 10 charged, 3 answered, 7 never answered ({named}; ...)",
        "  experiment two, udp, user: 1 charged, 1 answered, 0 never answered",
    ]
    assert run(ward.path) == lines
    assert run(tmp_path) == [
        *lines,
        "ward-8: 1 charged, 0 answered, 1 never answered",
        "  experiment one, udp, user: 1 charged, 0 answered, 1 never answered "
        "(train of round 3, 2025-12-31T23:59:59Z)",
    ]


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "ward-7.ledger"):
        with pytest.raises(InvalidParameterError, match="a ledger, or a folder with ledgers"):
            run(path)
    (tmp_path / "ward-7.ledger").write_bytes(b"damaged")
    with pytest.raises(LedgerError, match="does not begin with"):
        run(tmp_path)
