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
from flwr_privacy.wire import files
from flwr_privacy.wire.files import write_checksummed

CRASH = Path(__file__).with_name("ledger_crash.py")
MAGIC = b"flwr-privacy ledger\n"
FIRST = {"version": 2, "data_set": "ward-7"}
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
    least = 30 if loss == "unflushed" else 40  # two charges of more than 15 or 20 steps each
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


def sealed(*lines: object, end: bytes = b"\n") -> bytes:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return b"\n".join(texts) + end


def values(**changes) -> dict:
    plain = {**entry().to_dict(), **changes}
    return {key: value for key, value in plain.items() if value is not ...}


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "its first line is malformed"),
        (sealed(b"no json"), "its first line is malformed"),
        (sealed(b"\xff\xfe\xff"), "its first line is malformed"),
        (sealed([1]), "its first line is malformed"),
        (sealed({**FIRST, "version": 1}), "has version 1: this library reads version 2"),
        (sealed({"data_set": "ward-7"}), "has version None"),
        (sealed({**FIRST, "data_set": "ward-8"}), "the data set 'ward-8', not 'ward-7'"),
        (sealed(FIRST, values(), end=b""), "its last line has no end"),
        (sealed(FIRST, values(), b"{"), "its line 3 is malformed"),
        (sealed(FIRST, b""), "its line 2 is malformed"),
        (sealed(FIRST, []), "its line 2 is malformed"),
        (sealed(FIRST, values(time=...)), "its line 2 is malformed"),
        (sealed(FIRST, values(more=1)), "its line 2 is malformed"),
        (sealed(FIRST, values(server_round=-1)), "its line 2 is malformed"),
        (sealed(FIRST, values(server_round="1")), "its line 2 is malformed"),
        (sealed(FIRST, values(experiment_id=None)), "its line 2 is malformed"),
        (sealed(FIRST, values(charge=[1.0])), "its line 2 is malformed"),
        (sealed(FIRST, values(charge={"noise_multiplier": 1.0})), "its line 2 is malformed"),
        (
            sealed(FIRST, values(charge={**CHARGE.to_dict(), "noise_multiplier": 0})),
            "its line 2 is malformed",
        ),
        (sealed(FIRST, values(time="2025-02-30T00:00:00Z")), "its line 2 is malformed"),
        *(
            (sealed(FIRST, values(), {"answered": number}), "its line 3 is malformed")
            for number in (1, -1, "0", None, True, 0.0)
        ),
        (sealed(FIRST, {"answered": 0}, values()), "its line 2 is malformed"),
        (sealed(FIRST, values(), *[{"answered": 0}] * 2), "its line 4 is malformed"),
    ],
)
def test_a_ledger_that_is_malformed_or_anothers_is_refused(ledger, payload, why):
    write_checksummed(ledger.path, MAGIC, payload, durable=False)
    before = ledger.path.read_bytes()
    for attempt in (ledger.entries, lambda: charge(ledger, entry())):
        with pytest.raises(LedgerError, match=re.escape(why)) as refusal:
            attempt()
        assert str(ledger.path) in str(refusal.value)
    assert ledger.path.read_bytes() == before


def test_the_rows_above_start_from_a_good_ledger(ledger):
    write_checksummed(ledger.path, MAGIC, sealed(FIRST, values()), durable=False)
    assert ledger.entries() == (Entry.from_dict(values()),)


def test_a_damaged_or_foreign_file_is_refused_and_not_touched(ledger):
    charge(ledger, entry(1), entry(2))
    whole = ledger.path.read_bytes()
    flipped = whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:]
    for content, why in [
        (flipped, "checksum does not fit"),
        (whole[:-1], "checksum does not fit"),
        (whole + b"\n", "checksum does not fit"),
        (b"", "does not begin with"),
        (b"[budget]\nepsilon = 1\n", "does not begin with 'flwr-privacy ledger'"),
    ]:
        ledger.path.write_bytes(content)
        for attempt in (ledger.entries, lambda: charge(ledger, entry())):
            with pytest.raises(LedgerError, match=rf"ward\.ledger .*{why}"):
                attempt()
        assert ledger.path.read_bytes() == content


def test_a_folder_in_the_place_of_the_ledger_is_refused(ledger):
    ledger.path.mkdir()
    with pytest.raises(LedgerError, match=r"ward\.ledger cannot be read: Is a directory"):
        ledger.entries()


def test_a_file_that_cannot_be_read_is_refused(ledger, monkeypatch):
    charge(ledger, entry())

    def forbidden(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
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
    for path in (ledger.path, ledger.path.with_name("ward.ledger.lock")):
        assert path.stat().st_mode & 0o077 == 0


def test_what_a_ledger_holds_is_in_no_repr_and_no_error(ledger):
    charge(ledger, entry())
    assert repr(ledger) == f"Ledger({str(ledger.path)!r})"
    malformed = values(scheme="unspeakable\n")
    write_checksummed(ledger.path, MAGIC, sealed(FIRST, malformed), durable=False)
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
