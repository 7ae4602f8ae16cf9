import itertools
import os
from pathlib import Path

import pytest

from flwr_privacy.errors import LedgerError
from flwr_privacy.pipeline import reply_cache as module
from flwr_privacy.pipeline.reply_cache import REPLIES, ReplyCache
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.wire.files import exclusive_lock


def question(experiment_id="e", phase="train", server_round=1, request=0) -> Question:
    return Question(
        experiment_id=experiment_id, phase=phase, server_round=server_round, request=request
    )


@pytest.fixture
def replies(tmp_path):
    return ReplyCache(tmp_path / "replies")


def files(replies: ReplyCache) -> list[Path]:
    return [path for path in replies.folder.rglob("*") if path.is_file() and path.name != "lock"]


def test_the_first_reply_is_the_one_that_is_sent(replies):
    assert replies.keep(question(), b"first") == b"first"
    assert replies.keep(question(), b"second") == b"first"
    assert replies.find(question()) == b"first"


def test_every_digest_of_a_question_has_a_reply_of_its_own(replies):
    for key in ("", "a" * 32, "b" * 32):
        assert replies.keep(question(), key.encode(), key) == key.encode()
    assert replies.find(question(), "a" * 32) == b"a" * 32
    assert replies.find(question(), "c" * 32) is None


def test_a_server_that_asks_on_in_a_round_does_not_fill_the_disk(replies):
    for request in range(REPLIES + 5):
        replies.keep(question(request=request), b"noised")
        for path in files(replies):  # older by a second each time: a file system may be coarse
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1))
    found = [n for n in range(REPLIES + 5) if replies.find(question(request=n)) is not None]
    assert found == list(range(5, REPLIES + 5))


def test_replies_to_old_experiments_are_forgotten(tmp_path):
    few = ReplyCache(tmp_path / "few", experiments=3)
    every = ReplyCache(tmp_path / "all")
    for number in range(6):
        for replies in (few, every):
            replies.keep(question(f"e{number}"), b"noised")
        for path in files(few):  # older by a second each time: a file system may be coarse
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1))
    found = [n for n in range(6) if few.find(question(f"e{n}")) is not None]
    assert found == [3, 4, 5]
    assert all(every.find(question(f"e{number}")) for number in range(6))


def test_a_question_that_comes_again_gets_the_same_bytes(replies):
    noised = bytes(range(256)) * 100
    assert replies.find(question()) is None
    replies.keep(question(), noised)
    assert replies.find(question()) == noised
    assert ReplyCache(str(replies.folder)).find(question()) == noised


@pytest.mark.parametrize("reply", [b"", b"\n", b'["e", "train", 1, 0]\n'])
def test_any_bytes_are_a_reply(replies, reply):
    replies.keep(question(), reply)
    assert replies.find(question()) == reply


def test_every_question_has_a_reply_of_its_own(replies):
    # Names that run together where they are joined without care.
    names = ["a", "aa", "a-1", "1", "11", "../a", "a/b", '"', '", "', ".."]
    asked = [
        question(experiment, phase, 1, request)
        for experiment, phase, request in itertools.product(names, names, [0, 1, 11])
    ]
    for number, one in enumerate(asked):
        replies.keep(one, str(number).encode())
    assert [replies.find(one) for one in asked] == [str(i).encode() for i in range(len(asked))]
    assert replies.find(question("a", "a", 2)) is None


def test_replies_to_earlier_rounds_of_the_same_experiment_are_removed(replies):
    old = [question(server_round=1), question(server_round=9)]
    stay = [
        question(server_round=10),
        question(server_round=10, request=1),
        question(phase="share", server_round=10),
        question(experiment_id="other", server_round=1),
    ]
    for one in [*old, *stay]:
        replies.keep(one, b"noised")
    assert [replies.find(one) for one in old] == [None, None]
    assert [replies.find(one) for one in stay] == [b"noised"] * 4
    assert len(files(replies)) == 4


def test_what_is_asked_out_of_order_is_kept_and_removes_no_later_round(replies):
    for server_round in (10, 3):
        replies.keep(question(server_round=server_round), b"noised")
    assert replies.find(question(server_round=10)) == replies.find(question(server_round=3))
    replies.keep(question(server_round=4), b"noised")
    assert replies.find(question(server_round=3)) is None
    assert replies.find(question(server_round=10)) == b"noised"


def test_what_a_crash_left_is_removed_with_its_round_and_other_files_are_not(replies, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            replies.keep(question(server_round=1), b"noised")
    assert replies.find(question(server_round=1)) is None
    (left,) = files(replies)
    own = left.with_name("0-notes.txt")
    own.touch()
    replies.keep(question(server_round=2), b"noised")
    assert not left.exists()
    assert own.exists()


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "..", "a/b\\c", "CON", "x" * 128, "%00"])
def test_no_name_leads_out_of_the_folder(replies, tmp_path, name):
    replies.keep(question(experiment_id=name, phase=name), b"noised")
    assert replies.find(question(experiment_id=name, phase=name)) == b"noised"
    assert [path.name for path in tmp_path.iterdir()] == ["replies"]
    (path,) = files(replies)
    assert path.parent == replies.folder
    assert name not in path.name


def test_a_damaged_reply_counts_as_none_and_can_be_kept_again(replies):
    replies.keep(question(), b"noised")
    (path,) = files(replies)
    whole = path.read_bytes()
    flips = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for content in [*flips, *(whole[:length] for length in range(len(whole))), whole + b"x"]:
        path.write_bytes(content)
        assert replies.find(question()) is None
    assert replies.keep(question(), b"anew") == b"anew"
    assert replies.find(question()) == b"anew"


def test_a_reply_under_the_name_of_another_question_is_not_found(replies):
    replies.keep(question(server_round=1, phase="train"), b"noised")
    (first,) = files(replies)
    content = first.read_bytes()
    replies.keep(question(server_round=1, phase="share"), b"other")
    (second,) = set(files(replies)) - {first}
    second.write_bytes(content)
    assert replies.find(question(server_round=1, phase="train")) == b"noised"
    assert replies.find(question(server_round=1, phase="share")) is None


def test_a_reply_that_is_there_but_cannot_be_read_is_an_error(replies):
    replies.keep(question(), b"noised")
    (path,) = files(replies)
    path.unlink()
    path.mkdir()
    with pytest.raises(LedgerError, match=r"replies cannot be read: Is a directory"):
        replies.find(question())


def test_a_reply_that_cannot_be_kept_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(LedgerError, match=r"tpyo/replies cannot be written: No such file"):
        ReplyCache(tmp_path / "tpyo" / "replies").keep(question(), b"noised")
    replies = ReplyCache(tmp_path)
    monkeypatch.setattr(module, "_LOCK_TIMEOUT", 0.01)
    with (
        exclusive_lock(tmp_path / "lock", timeout=0),
        pytest.raises(LedgerError, match="cannot be written: it is locked by another process"),
    ):
        replies.keep(question(), b"noised")


def test_only_the_owner_may_read_the_replies(replies):
    replies.keep(question(), b"noised")
    for path in [replies.folder, *replies.folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0
