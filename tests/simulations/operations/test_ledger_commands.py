"""`flwr-privacy ledger` head, witness, accept-loss and convert, and the check of every line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import LedgerError
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.privacy.ledger.lines import line_of, record_text
from flwr_privacy.privacy.ledger.signed_head import heads_from_json
from flwr_privacy.simulations.cli import app
from flwr_privacy.simulations.operations.ledger_rebuild import check_lines
from flwr_privacy.wire.files import write_checksummed
from flwr_privacy.wire.pins import Identity

TIME = "2025-12-31T23:59:59Z"


def run(command: str, state: Path, *options: str | Path) -> Result:
    command_line = ["ledger", command, "--state", str(state), *map(str, options)]
    return CliRunner().invoke(app, command_line)


def entry(server_round: int, experiment: str = "one") -> Entry:
    question = Question(experiment_id=experiment, phase="train", server_round=server_round)
    charge = Charge(neighbours="replace_one", noise_multiplier=2.0)
    return Entry(question=question, scheme="udp", unit="user", charge=charge, time=TIME)


def charged(state: Path, *entries: Entry) -> Ledger:
    state.chmod(0o700)
    ledger = Ledger(state / "ward-7.ledger", data_set="ward-7", durable=False)
    with ledger.locked() as locked:
        for one in entries:
            locked.answer(locked.charge(one))
    return ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Return a ledger with two experiments, three marks and a key beside it."""
    (tmp_path / "witness").mkdir()
    state = tmp_path / "state"
    state.mkdir()
    return charged(state, *(entry(n, "two" if n % 3 else "one") for n in range(100)))


# -- Heads ---------------------------------------------------------------------------------------


def test_head_prints_the_heads_of_all_experiments_or_of_one(ledger: Ledger) -> None:
    state = ledger.path.parent
    unsigned = heads_from_json(run("head", state).stdout)
    assert [one.experiment for one in unsigned] == ["one", "two"]
    assert [one.head for one in unsigned] == [ledger.head("one"), ledger.head("two")]
    assert {(one.client, one.signature) for one in unsigned} == {("ward-7", b"")}
    identity = Identity.generate()
    identity.write(state / "ward-7.identity")  # as the node makes it
    out = state.parent / "heads.json"
    assert run("head", state, "--experiment", "two", "--out", out).exit_code == 0
    (signed,) = heads_from_json(out.read_text())
    signed.verify()
    assert (signed.key, signed.head) == (identity.public, ledger.head("two"))


def test_head_takes_the_operators_key_and_the_clients_name(ledger: Ledger, tmp_path: Path) -> None:
    identity = Identity.generate()
    identity.write(tmp_path / "key.pem")
    done = run(
        *("head", ledger.path.parent, "--client", "ward", "--identity", tmp_path / "key.pem")
    )
    for head in heads_from_json(done.stdout):
        head.verify()
        assert (head.client, head.key) == ("ward", identity.public)
    assert run("head", ledger.path.parent, "--experiment", "three").exit_code != 0


# -- Witness -------------------------------------------------------------------------------------


def test_a_loss_is_refused_accepted_and_shown(ledger: Ledger, tmp_path: Path) -> None:
    state, witness = ledger.path.parent, tmp_path / "witness"
    begun = run("witness", state, "--witness", witness)
    assert begun.stdout == "ward-7: the witness begins with 100 charges\n"
    assert run("witness", state, "--witness", witness).exit_code != 0
    assert "its witness misses none" in run("check", state, "--witness", witness).stdout
    nothing = run("accept-loss", state, "--witness", witness, "--data-set", "ward-7")
    assert "there is no loss" in str(nothing.exception)
    content = ledger.path.read_bytes()
    place = content.find(b'{"charge":[60,')
    ledger.path.write_bytes(content[: content.rfind(b"\n", 0, place) + 1])
    check = run("check", state, "--witness", witness)
    assert check.exit_code == 1
    assert "its witness saw 100 charges, it has 60" in check.stdout
    assert "no witness is named" in run("check", state).stdout
    assert run("show", state, "--witness", witness).exit_code != 0
    accepted = run("accept-loss", state, "--witness", witness, "--data-set", "ward-7")
    told = "the witness had seen 100 charges, the ledger went on with 60; what is missing"
    assert told in accepted.stdout
    assert told in run("show", state, "--witness", witness).stdout
    checked = run("check", state, "--witness", witness)
    assert (checked.exit_code, told in checked.stdout) == (0, True)
    (shown,) = json.loads(run("show", state, "--json").stdout)
    assert [(loss["charges"], loss["witnessed"]) for loss in shown["losses"]] == [(60, 100)]


def test_a_ledger_that_is_gone_is_begun_anew_by_the_operators_word(
    ledger: Ledger, tmp_path: Path
) -> None:
    state, witness = ledger.path.parent, tmp_path / "witness"
    run("witness", state, "--witness", witness)
    ledger.path.unlink()
    assert run("accept-loss", state, "--witness", witness, "--data-set", "ward-7").exit_code == 0
    again = Ledger(ledger.path, data_set="ward-7", witness=witness).view()
    assert (again.count, [loss.witnessed for loss in again.losses()]) == (0, [100])


# -- Every line ----------------------------------------------------------------------------------


def test_every_line_is_checked(ledger: Ledger) -> None:
    check_lines(ledger.path, ledger.view())


def false_head(bodies: list[bytes]) -> None:
    """Give the last charge another head."""
    place = next(n for n in reversed(range(len(bodies))) if bodies[n].startswith(b'{"charge"'))
    values = json.loads(bodies[place])["charge"]
    bodies[place] = record_text("charge", [*values[:-1], "0" * 64])


def false_totals(bodies: list[bytes]) -> None:
    """Have the last mark count one charge less of a kind."""
    place = next(n for n in reversed(range(len(bodies))) if bodies[n].startswith(b'{"mark"'))
    values = json.loads(bodies[place])["mark"]
    values[6][0][2] -= 1
    bodies[place] = record_text("mark", values)


def false_kind(bodies: list[bytes]) -> None:
    """Define a kind of charge that no charge is of, before the last answer."""
    bodies.insert(
        -1,
        record_text(
            "kind",
            ["udp", "user", Charge(neighbours="replace_one", noise_multiplier=3.0).to_dict()],
        ),
    )


@pytest.mark.parametrize("change", [false_head, false_totals, false_kind])
def test_what_a_node_does_not_read_is_found_by_the_check(
    ledger: Ledger, change: Callable[[list[bytes]], None]
) -> None:
    """Somebody mends the checksums; the node's own look finds nothing."""
    first, *lines = ledger.path.read_bytes().splitlines()
    bodies = [line[9:] for line in lines]
    change(bodies)
    content, checksum = first + b"\n", 0
    for body in bodies:
        line, checksum = line_of(body, 0 if body.startswith(b'{"mark"') else checksum)
        content += line
    ledger.path.write_bytes(content)
    assert ledger.view().count == 100
    with pytest.raises(LedgerError, match="has other lines than its charges"):
        check_lines(ledger.path, ledger.view())
    assert run("check", ledger.path.parent).exit_code == 1


# -- Version 2 -----------------------------------------------------------------------------------


def version_2(file: Path, *records: object, data_set: str = "ward-7", version: int = 2) -> None:
    lines = [{"version": version, "data_set": data_set}, *records]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_checksummed(file, b"flwr-privacy ledger\n", text.encode(), durable=False)


def old(one: Entry, **charge: object) -> dict[str, Any]:
    """Return a charge as version 2 has it: it names no neighbours."""
    values = one.to_dict()
    del values["charge"]["neighbours"]
    values["charge"] |= charge
    return values


@pytest.mark.parametrize(
    ("scheme", "unit", "phase", "neighbours"),
    [
        ("udp", "user", "train", "replace_one"),
        ("udp-unproven", "record", "train", "replace_one"),
        ("udp", "record", "evaluate", "replace_one"),
        ("central-dp", "user", "evaluate", "replace_one"),
        ("m2fdp", "user", "sealed for 0", "replace_one"),
        ("m2fdp", "record", "train", "add_remove"),
        ("acfl", "record", "setup", "add_remove"),
    ],
)
def test_an_old_charge_gets_the_neighbours_of_its_scheme(
    tmp_path: Path, scheme: str, unit: str, phase: str, neighbours: str
) -> None:
    file = tmp_path / "ward-7.ledger"
    version_2(file, {**old(entry(1)), "scheme": scheme, "unit": unit, "phase": phase})
    assert run("convert", tmp_path).exit_code == 0
    (found,) = Ledger(file, data_set="ward-7").entries()
    assert found.charge == Charge(neighbours=neighbours, noise_multiplier=2.0)
    assert (found.scheme, found.unit, found.question.phase) == (scheme, unit, phase)


@pytest.mark.parametrize(
    ("own", "charge"),
    [
        ({"scheme": "somebody's"}, {}),
        ({"scheme": "acfl", "unit": "user"}, {}),
        ({"scheme": "m2fdp", "phase": "evaluate"}, {}),
        ({}, {"sampling": 0.5}),
        ({}, {"neighbours": "zero_out"}),
    ],
)
def test_an_old_charge_of_unknown_neighbours_is_refused(
    tmp_path: Path, own: dict[str, str], charge: dict[str, Any]
) -> None:
    file = tmp_path / "ward-7.ledger"
    version_2(file, old(entry(0)), {**old(entry(1), **charge), **own})
    with pytest.raises(LedgerError, match="for which neighbours its charge 1 is"):
        raise run("convert", tmp_path).exception or AssertionError
    assert file.read_bytes().startswith(b"flwr-privacy ledger\n")


def test_a_ledger_of_version_2_is_converted_and_kept(tmp_path: Path) -> None:
    entries = [entry(n, "two" if n % 3 else "one") for n in range(100)]
    file = tmp_path / "ward-7.ledger"
    version_2(file, *map(old, entries), {"answered": 7}, {"answered": 3})
    before = file.read_bytes()
    refused = run("show", tmp_path)
    assert "flwr-privacy ledger convert --state" in str(refused.exception)
    done = run("convert", tmp_path)
    assert done.stdout == "ward-7: 100 charges; the old file is ward-7.ledger.v2\n"
    assert (tmp_path / "ward-7.ledger.v2").read_bytes() == before
    ledger = Ledger(file, data_set="ward-7")
    assert ledger.entries() == tuple(entries)
    assert ledger.view().answered() == {3, 7}
    assert ledger.path.stat().st_mode & 0o077 == 0
    check_lines(file, ledger.view())
    new = file.read_bytes()
    assert run("convert", tmp_path).exit_code != 0  # it is converted
    assert file.read_bytes() == new


@pytest.mark.parametrize(
    "records",
    [
        [{"answered": 0}],
        [{**old(entry(1)), "unit": "client"}],
        [{**old(entry(1)), "charge": {"noise_multiplier": 2.0}}],
        [{**old(entry(1)), "time": "now"}],
        [{"scheme": "udp"}],
        [old(entry(1)), {"answered": 0}, {"answered": 0}],
        [[1]],
        ["text"],
        [None],
    ],
)
def test_a_malformed_old_ledger_is_refused_and_stays(tmp_path: Path, records: list[object]) -> None:
    file = tmp_path / "ward-7.ledger"
    version_2(file, *records)
    before = file.read_bytes()
    with pytest.raises(LedgerError):
        raise run("convert", tmp_path).exception or AssertionError
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("own", [{"version": 1}, {"data_set": "ward-8"}])
def test_an_old_ledger_of_another_version_or_data_set_is_refused(
    tmp_path: Path, own: dict[str, object]
) -> None:
    version_2(tmp_path / "ward-7.ledger", old(entry(1)), **own)
    with pytest.raises(LedgerError, match="is malformed, or no ledger of version 2"):
        raise run("convert", tmp_path).exception or AssertionError


def test_an_old_file_is_never_overwritten(tmp_path: Path) -> None:
    version_2(tmp_path / "ward-7.ledger", old(entry(1)))
    (tmp_path / "ward-7.ledger.v2").write_text("kept")
    assert run("convert", tmp_path).exit_code != 0
    assert (tmp_path / "ward-7.ledger.v2").read_text() == "kept"
    assert (tmp_path / "ward-7.ledger").read_bytes().startswith(b"flwr-privacy ledger\n")
