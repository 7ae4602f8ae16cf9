"""A witness: how it begins, what it refuses, kills around it, and losses that are accepted."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import LedgerError
from flwr_privacy.privacy.ledger import Entry, Ledger, Loss, Question
from flwr_privacy.privacy.ledger.witness import Witness


def entry(server_round: int) -> Entry:
    question = Question(experiment_id="e", phase="train", server_round=server_round)
    charge = Charge(neighbours="replace_one", noise_multiplier=2.0)
    return Entry(question=question, scheme="udp", unit="user", charge=charge)


def charge(ledger: Ledger, *rounds: int) -> None:
    with ledger.locked() as locked:
        for server_round in rounds:
            locked.charge(entry(server_round))


def opened(folder: Path, *, durable: bool = False) -> Ledger:
    (folder / "witness").mkdir(exist_ok=True)
    return Ledger(folder / "a.ledger", data_set="a", durable=durable, witness=folder / "witness")


def test_a_witness_sees_every_write_and_nothing_that_the_ledger_holds(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    assert ledger.view().count == 0
    assert list((tmp_path / "witness").iterdir()) == []  # to look is not to write
    with ledger.locked() as locked:
        for n in range(3):
            locked.charge(entry(n))
            locked.answer(n)
            (file,) = (tmp_path / "witness").glob("*.witness")
            seen = json.loads(file.read_bytes().partition(b"\n")[2][32:])
            assert (seen["length"], seen["charges"]) == (os.path.getsize(ledger.path), n + 1)
            assert set(seen) == {"length", "charges", "chain"}
    assert file.name == "a.witness"
    assert file.stat().st_mode & 0o077 == 0


def test_a_ledger_with_charges_needs_its_witness(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    charge(ledger, 1, 2)
    (tmp_path / "witness" / "a.witness").unlink()
    for attempt in (ledger.view, lambda: charge(ledger, 3)):
        with pytest.raises(LedgerError, match=r"2 charges, and its witness .* is not there"):
            attempt()
    with pytest.raises(LedgerError, match="lacks nothing that a witness has seen"):
        ledger.accept_loss()
    assert ledger.begin_witness() == 2
    charge(ledger, 3)
    with pytest.raises(LedgerError, match="has a witness"):
        ledger.begin_witness()


@pytest.mark.parametrize("content", [b"", b"x", b"flwr-privacy witness 1\n" + b"0" * 32 + b"{}"])
def test_a_damaged_witness_is_refused(tmp_path: Path, content: bytes) -> None:
    ledger = opened(tmp_path)
    charge(ledger, 1)
    (tmp_path / "witness" / "a.witness").write_bytes(content)
    with pytest.raises(LedgerError, match=r"the witness .*a\.witness (is damaged|does not begin)"):
        ledger.view()


def test_a_witness_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="the witness has no folder"):
        Ledger(tmp_path / "a.ledger", data_set="a", witness=tmp_path / "tpyo")


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_an_accepted_loss_is_written_into_the_ledger(tmp_path: Path, kept: int) -> None:
    ledger = opened(tmp_path)
    older = b""
    for n in range(5):
        older = ledger.path.read_bytes() if n == kept and n else older
        charge(ledger, n)
    ledger.path.write_bytes(older)
    with pytest.raises(LedgerError, match="`flwr-privacy ledger accept-loss` goes on without"):
        charge(ledger, 7)
    loss = ledger.accept_loss()
    assert (loss.charges, loss.witnessed) == (kept, 5)
    charge(ledger, 7)
    assert ledger.view().losses() == (loss,)
    assert isinstance(loss, Loss)
    assert [e.question.server_round for e in ledger.entries()] == [*range(kept), 7]
    with pytest.raises(LedgerError, match="lacks nothing that a witness has seen"):
        ledger.accept_loss()


def test_a_charge_returns_only_when_the_witness_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path)
    charge(ledger, 1)

    def full(*_: Any, **__: Any) -> None:
        raise LedgerError("the witness cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(Witness, "write", full)
        with pytest.raises(LedgerError, match="the witness cannot be written"):
            charge(ledger, 2)
    assert ledger.view().count == 2  # a charge without a release
    charge(ledger, 3)
    assert ledger.view().count == 3


@pytest.mark.parametrize("durable", [False, True])
def test_a_kill_at_any_step_leaves_a_ledger_that_its_witness_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """Two charges, killed before and after each step that changes a file."""
    real = {name: getattr(os, name) for name in ("open", "pwrite", "fsync", "replace")}

    def run(folder: Path, kill_at: int) -> tuple[int, int]:
        """Return the number of charges that returned, and of steps."""
        steps = returned = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            if steps == kill_at:
                raise KeyboardInterrupt

        def watched(name: str) -> Any:
            def call(*arguments: Any) -> Any:
                step()
                result = real[name](*arguments)
                step()
                return result

            return call

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, watched(name))
            try:
                for n in range(2):
                    charge(opened(folder, durable=durable), n)
                    returned += 1
            except KeyboardInterrupt:
                pass
        return returned, steps

    (tmp_path / "all").mkdir()
    _, steps = run(tmp_path / "all", -1)
    assert steps >= 20
    for kill_at in range(1, steps + 1):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        returned, _ = run(folder, kill_at)
        ledger = opened(folder)
        assert returned <= ledger.view().count <= returned + 1
        charge(ledger, 5)
