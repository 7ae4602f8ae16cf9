import errno
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.accounting.charges import LAPLACE
from flwr_privacy.errors import InvalidParameterError, LedgerError
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.privacy.ledger.lines import MAGIC, line_of
from flwr_privacy.wire import files

CRASH = Path(__file__).with_name("ledger_crash.py")
FIRST = {"data_set": "ward-7"}
CHARGE = Charge(
    neighbours="replace_one",
    noise_multiplier=1.5,
    mechanism=LAPLACE,
    sampling=0.01,
    gap=1e-9,
    count=3,
)


def entry(server_round: int = 1, **values) -> Entry:
    question = Question(experiment_id="exp-1", phase="train", server_round=server_round)
    defaults = {"question": question, "scheme": "udp", "unit": "user", "charge": CHARGE}
    return Entry(**{**defaults, **values})


def charge(ledger: Ledger, *entries: Entry) -> None:
    with ledger.locked() as locked:
        for one in entries:
            locked.charge(one)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ward.ledger", data_set="ward-7")


def test_what_was_charged_is_read_again_in_order(ledger):
    entries = tuple(entry(server_round) for server_round in (3, 1, 2, 1))
    assert ledger.entries() == ()
    charge(ledger, *entries[:2])
    charge(ledger, *entries[2:])
    assert Ledger(str(ledger.path), data_set="ward-7").entries() == entries


def test_nothing_is_written_before_the_first_charge(ledger):
    with ledger.locked() as locked:
        assert locked.count == 0
    assert ledger.entries() == ()
    assert not ledger.path.exists()


def test_a_charge_is_on_the_disk_when_it_returns_and_seen_in_the_book(ledger):
    with ledger.locked() as locked:
        for count in range(1, 4):
            locked.charge(entry(count))
            assert locked.count == len(ledger.entries()) == count


def test_what_was_never_answered_is_told_for_ever(ledger):
    charge(ledger, *map(entry, range(4)))
    with ledger.locked() as locked:
        locked.answer(2)
        locked.answer(2)  # sent again
        assert [locked.is_answered(n) for n in range(4)] == [False, False, True, False]
        assert locked.charge(entry(4)) == 4
        locked.answer(4)
        locked.answer(0)
    content = ledger.path.read_bytes()
    with ledger.locked() as locked:
        locked.answer(0)
    assert ledger.path.read_bytes() == content
    assert [one.question.server_round for one in ledger.unanswered()] == [1, 3]
    assert len(ledger.entries()) == 5
    for number in (5, -1):
        with (
            ledger.locked() as locked,
            pytest.raises(ValueError, match=f"there is no charge {number}"),
        ):
            locked.answer(number)


def test_the_time_of_an_entry_is_now_in_utc_to_the_second():
    before = datetime.now(UTC).replace(microsecond=0)
    time = datetime.fromisoformat(entry().time)
    assert before <= time <= datetime.now(UTC)
    assert entry().time.endswith("Z")


@pytest.mark.parametrize("loss", ["nothing", "content", "names"])
def test_no_crash_or_power_cut_leaves_a_release_without_a_charge(tmp_path, loss):
    check_steps(tmp_path, loss)


def test_without_flushing_no_killed_process_leaves_a_release_without_a_charge(tmp_path):
    check_steps(tmp_path, "unflushed")


def test_only_a_durable_ledger_waits_for_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    for durable, expected in ((False, 0), (True, 2)):
        path = tmp_path / f"{durable}.ledger"
        charge(Ledger(path, data_set="ward-7", durable=durable), entry())
        assert len(flushed) == expected
        assert len(Ledger(path, data_set="ward-7").entries()) == 1


def check_steps(tmp_path, loss):
    released = start("steps", tmp_path, loss)
    assert released[-1] == 2  # the last process survived
    assert {0, 1} == set(released[:-1])
    least = 20 if loss == "unflushed" else 30  # two charges of at least 11 or 16 steps each
    assert len(released) > least
    for k, count in enumerate(released, start=1):
        ledger = Ledger(tmp_path / f"{k}.ledger", data_set="ward-7")
        charged = len(ledger.entries())
        assert count <= charged <= count + 1, f"step {k}"
        charge(ledger, entry())  # what the dead process left behind is in nobody's way
        assert len(ledger.entries()) == charged + 1


def test_a_process_killed_at_a_random_time_loses_no_charge(tmp_path):
    lives = start("random", tmp_path)
    for before, released, after in lives:
        assert released > 0
        assert released <= after - before <= released + 1


@pytest.mark.parametrize(("cap", "expected"), [(1000, 100), (60, 60)])
def test_two_processes_lose_no_charge_and_pass_no_cap(tmp_path, cap, expected):
    start("together", tmp_path, str(cap))
    entries = Ledger(tmp_path / "0.ledger", data_set="ward-7").entries()
    assert len({one.question for one in entries}) == len(entries) == expected


def start(what: str, folder: Path, *more: str) -> list:
    command = [sys.executable, str(CRASH), what, str(folder), *more]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_held_ledger_is_named_after_the_timeout(ledger):
    with (
        ledger.locked(),
        pytest.raises(LedgerError, match=r"ward\.ledger .* is locked by another process"),
        Ledger(ledger.path, data_set="ward-7").locked(timeout=0.01),
    ):
        pass
    charge(ledger, entry())


def test_a_platform_without_locks_is_named(ledger, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with pytest.raises(LedgerError, match=r"ward\.ledger .* has no fcntl"), ledger.locked():
        pass


def test_a_book_cannot_be_charged_after_its_transaction(ledger):
    with ledger.locked() as locked:
        locked.charge(entry())
    with pytest.raises(RuntimeError, match="not held"):
        locked.charge(entry())
    with pytest.raises(RuntimeError, match="not held"):
        locked.answer(0)
    assert len(ledger.entries()) == 1


def test_an_error_inside_a_transaction_frees_the_ledger_and_keeps_its_charges(ledger):
    def fails_after_a_charge():
        with ledger.locked() as locked:
            locked.charge(entry())
            raise TimeoutError("of the user")

    with pytest.raises(TimeoutError, match="of the user"):
        fails_after_a_charge()
    with ledger.locked(timeout=0) as locked:
        assert locked.count == 1


def test_a_charge_that_cannot_be_written_is_refused_and_leaves_the_rest(ledger, monkeypatch):
    charge(ledger, entry(1))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ledger.locked() as locked:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(LedgerError, match=r"ward\.ledger cannot be written: No space"):
                locked.charge(entry(2))
        assert locked.count == len(ledger.entries()) == 1
        locked.charge(entry(3))
    assert [one.question.server_round for one in ledger.entries()] == [1, 3]


def test_a_missing_folder_starts_no_ledger(tmp_path):
    ledger = Ledger(tmp_path / "tpyo" / "ward.ledger", data_set="ward-7")
    for attempt in (ledger.entries, lambda: charge(ledger, entry())):
        with pytest.raises(LedgerError, match=r"ward\.ledger .* no folder .*tpyo"):
            attempt()
    assert list(tmp_path.iterdir()) == []


def sealed(*records: object, end: bytes = b"\n") -> bytes:
    """Return a file of records whose checksums fit."""
    lines, checksum = b"", 0
    for record in records:
        body = record if isinstance(record, bytes) else json.dumps(record, separators=(",", ":"))
        line, checksum = line_of(body if isinstance(body, bytes) else body.encode(), checksum)
        lines += line
    return MAGIC + lines[:-1] + end


EXPERIMENT = {"experiment": "exp-1"}
KIND = {"kind": ["udp", "user", CHARGE.to_dict()]}
LINE = [0, 0, "train", 1, 0, 0, "", "2025-12-31T23:59:59Z", "ab" * 32]
DEFINED = (FIRST, EXPERIMENT, KIND)
ANSWERED = {"answer": 0}
GOOD = (*DEFINED, {"charge": LINE})


def changed(place: int, value: object) -> dict:
    return {"charge": [*LINE[:place], value, *LINE[place + 1 :]]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[budget]\nepsilon = 1\n", "does not begin with 'flwr-privacy ledger 3'"),
        (b"flwr-privacy ledger 3 \n", "does not begin with"),
        (b"flwr-privacy ledger\n" + b"x" * 40, "has version 2, which this library does not write"),
        (b"flwr-privacy ledger 4\n", "has version 4: this library reads version 3"),
        (sealed(b"no json", ANSWERED), "its second line is malformed"),
        (sealed(b"\xff\xfe\xff", ANSWERED), "its second line is malformed"),
        (sealed([1], ANSWERED), "its second line is malformed"),
        (sealed(b"[" * 99_999, ANSWERED), "its second line is malformed"),
        (sealed({"data_set": 3}, ANSWERED), "its second line is malformed"),
        (sealed({"data_set": "ward-8"}, *GOOD[1:]), "the data set 'ward-8', not 'ward-7'"),
        *(
            (sealed(*DEFINED, line), f"the line at byte {len(sealed(*DEFINED))} is malformed")
            for line in (
                b"",
                b"{",
                [],
                {"charge": LINE[:-1]},
                {"charge": [*LINE, 1]},
                changed(0, 1),
                changed(0, -1),
                changed(0, "0"),
                changed(1, 1),
                changed(2, None),
                changed(2, "\n"),
                changed(3, -1),
                changed(3, "1"),
                changed(3, 1.0),
                changed(3, 10**19),
                changed(4, True),
                changed(5, 1),
                changed(6, "0" * 31),
                changed(7, "2025-12-31"),
                changed(8, "ab" * 31),
                changed(8, "AB" * 32),
                ANSWERED,
                {"else": 0},
                {"loss": []},
                {"loss": ["2025-12-31T23:59:59Z", -1, 0]},
                {"loss": ["now", 0, 0]},
                b'{"loss":[' + b"[" * 99_999,
                json.dumps({"charge": LINE}).encode(),  # with spaces
            )
        ),
        *(
            (sealed(*GOOD, line), f"the line at byte {len(sealed(*GOOD))} is malformed")
            for line in [{"answer": number} for number in (1, -1, "0", None, True, 0.0)]
        ),
        (sealed(*GOOD, ANSWERED, ANSWERED), "is malformed"),
        (sealed(*GOOD, EXPERIMENT, ANSWERED), "is malformed"),
        (sealed(*GOOD, KIND, ANSWERED), "is malformed"),
        (sealed(*GOOD, {"experiment": "\x1b"}, ANSWERED), "is malformed"),
        (sealed(*GOOD, {"experiment": 1}, ANSWERED), "is malformed"),
        (sealed(*GOOD, b'{"experiment":' + b"[" * 99_999, ANSWERED), "is malformed"),
        (sealed(*GOOD, {"mark": [0]}, ANSWERED), "is malformed"),
        (sealed(*GOOD).replace(b'"train"', b'"trail"'), "is malformed"),  # its checksum is not
        (sealed(*GOOD, ANSWERED)[:-3] + b"\n", "is malformed"),
    ],
)
def test_a_ledger_that_is_malformed_or_anothers_is_refused(ledger, content, why):
    ledger.path.write_bytes(content)
    for attempt in (ledger.view, ledger.entries, lambda: charge(ledger, entry())):
        with pytest.raises(LedgerError, match=re.escape(why)) as refusal:
            attempt()
        assert str(ledger.path) in str(refusal.value)
    assert ledger.path.read_bytes() == content


def test_the_rows_above_start_from_a_good_ledger(ledger):
    ledger.path.write_bytes(sealed(*GOOD, ANSWERED))
    assert ledger.entries() == (entry(time=LINE[7]),)
    assert ledger.unanswered() == ()


@pytest.mark.parametrize("line", [changed(7, "2025-02-30T00:00:00Z"), changed(2, "x" * 129)])
def test_what_a_charge_means_is_checked_when_it_is_read(ledger, line):
    ledger.path.write_bytes(sealed(*DEFINED, line))
    for attempt in (ledger.entries, lambda: ledger.view().entry(0)):
        with pytest.raises(LedgerError, match="a line whose checksum fits is malformed"):
            attempt()


@pytest.mark.parametrize(
    "kind",
    [
        [],
        ["udp", "user", [1.0]],
        ["udp", "client", CHARGE.to_dict()],
        ["", "user", CHARGE.to_dict()],
        ["udp", "user", {"noise_multiplier": 1.0}],
        ["udp", "user", {**CHARGE.to_dict(), "noise_multiplier": 0}],
        b'{"kind":[' + b"[" * 99_999,
    ],
)
def test_a_malformed_kind_of_charge_is_refused(ledger, kind):
    record = kind if isinstance(kind, bytes) else {"kind": kind}
    ledger.path.write_bytes(sealed(FIRST, EXPERIMENT, record, {"charge": LINE}))
    for attempt in (ledger.entries, lambda: ledger.view().totals("exp-1")):
        with pytest.raises(LedgerError, match="a line whose checksum fits is malformed"):
            attempt()


def test_damage_anywhere_is_refused_and_the_file_not_touched(ledger):
    charge(ledger, entry(1), entry(2))
    whole = ledger.path.read_bytes()
    for place in range(len(whole) - 1):
        content = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        ledger.path.write_bytes(content)
        with pytest.raises(LedgerError, match=r"ward\.ledger "):
            ledger.view()
        assert ledger.path.read_bytes() == content


def test_the_beginning_of_a_write_that_never_returned_is_no_damage(ledger):
    charge(ledger, entry(1))
    one = len(ledger.path.read_bytes())
    charge(ledger, entry(2, question=Question(experiment_id="two", phase="train", server_round=2)))
    whole = ledger.path.read_bytes()
    for end in range(len(whole)):
        ledger.path.write_bytes(whole[:end])
        assert len(ledger.entries()) == (end >= one), end
    for end in (0, 5, 40, one - 1, one, one + 30, len(whole) - 1):
        ledger.path.write_bytes(whole[:end])
        charge(ledger, entry(3))
        assert [e.question.server_round for e in ledger.entries()] == [1, 3][end < one :]
    ledger.path.write_bytes(whole[:-1])
    with ledger.locked() as locked:
        locked.answer(0)  # less than what the write has left, which has ends of lines
    assert ledger.unanswered() == ()
    assert ledger.path.read_bytes().startswith(whole[:one])


def test_somebody_who_writes_without_the_lock_is_found(ledger):
    found = pytest.raises(LedgerError, match="was changed by somebody who does not hold its lock")
    with ledger.locked() as locked:
        locked.charge(entry(1))
        content = ledger.path.read_bytes()
        ledger.path.write_bytes(content + b"x")
        with found:
            locked.charge(entry(2))
        ledger.path.unlink()
        with found:
            locked.charge(entry(2))
        ledger.path.write_bytes(content)
        with found:
            locked.charge(entry(2))
    assert ledger.path.read_bytes() == content


def test_a_folder_in_the_place_of_the_ledger_is_refused(ledger):
    ledger.path.mkdir()
    with pytest.raises(LedgerError, match=r"ward\.ledger cannot be read: Is a directory"):
        ledger.entries()


def test_a_file_that_cannot_be_read_is_refused(ledger, monkeypatch):
    charge(ledger, entry())

    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(LedgerError, match=r"ward\.ledger cannot be read: Permission denied"):
        ledger.entries()
    monkeypatch.setattr(os, "pread", forbidden)
    with pytest.raises(LedgerError, match=r"ward\.ledger cannot be read: Permission denied"):
        charge(ledger, entry())


def test_a_link_to_a_ledger_is_the_same_ledger(ledger, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(ledger.path)
    linked = Ledger(link, data_set="ward-7")
    charge(ledger, entry(1))
    charge(linked, entry(2))
    assert link.is_symlink()
    assert len(ledger.entries()) == len(linked.entries()) == 2
    with (
        ledger.locked(),
        pytest.raises(LedgerError, match="locked"),
        linked.locked(timeout=0),
    ):
        pass


def test_only_the_owner_may_read_a_ledger(ledger):
    charge(ledger, entry())
    assert ledger.path.stat().st_mode & 0o077 == 0
    assert list(ledger.path.parent.iterdir()) == [ledger.path]


def test_what_a_ledger_holds_is_in_no_repr_and_no_error(ledger):
    charge(ledger, entry())
    assert repr(ledger) == f"Ledger({str(ledger.path)!r})"
    ledger.path.write_bytes(sealed(*DEFINED, changed(2, "unspeakable\n")))
    with pytest.raises(LedgerError) as refusal:
        ledger.entries()
    assert "unspeakable" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"experiment_id": ""}, "experiment_id = '': expected 1 to 128 printable ASCII"),
        ({"experiment_id": "x" * 129}, "experiment_id = 'xxx"),
        ({"experiment_id": "x" * 10**6}, "experiment_id = 'xxx"),
        ({"experiment_id": "a\nb"}, r"experiment_id = 'a\nb'"),
        ({"experiment_id": "\x1b[2J"}, "experiment_id = "),
        ({"experiment_id": "ü"}, "experiment_id = 'ü'"),
        ({"experiment_id": b"e"}, "experiment_id = 'bytes'"),
        ({"phase": None}, "phase = 'NoneType'"),
        ({"phase": "\x00"}, "phase = "),
        ({"server_round": -1}, "server_round = -1: expected an integer from 0 to"),
        ({"server_round": 2**63}, "server_round = 9223372036854775808"),
        ({"server_round": True}, "server_round = True"),
        ({"server_round": 1.0}, "server_round = 1.0"),
        ({"request": -1}, "request = -1"),
        ({"request": "0"}, "request = '0'"),
    ],
)
def test_a_hostile_question_is_refused(changes, text):
    good = {"experiment_id": "e", "phase": "train", "server_round": 0, "request": 0}
    Question(**good)
    with pytest.raises(InvalidParameterError, match=re.escape(text)) as refusal:
        Question(**{**good, **changes})
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"scheme": ""}, "scheme"),
        ({"unit": "client"}, "unit"),
        ({"scheme": 3}, "scheme"),
        ({"time": "2025-12-31"}, "time"),
        ({"time": "2025-12-31T23:59:59+01:00"}, "time"),
        ({"time": "2025-13-31T23:59:59Z"}, "time"),
        ({"time": None}, "time"),
    ],
)
def test_a_malformed_entry_is_refused(changes, parameter):
    with pytest.raises(InvalidParameterError) as refusal:
        entry(**changes)
    assert refusal.value.parameter == parameter


@pytest.mark.parametrize("data_set", ["", "x" * 129, "a\n", None])
def test_a_data_set_has_a_name(tmp_path, data_set):
    with pytest.raises(InvalidParameterError, match="data_set = "):
        Ledger(tmp_path / "ward.ledger", data_set=data_set)


def test_a_negative_timeout_is_refused(ledger):
    with pytest.raises(InvalidParameterError, match="timeout = -1"), ledger.locked(timeout=-1):
        pass
