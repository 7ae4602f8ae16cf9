"""Replies of simulated clients, which share a folder."""

import errno
import itertools
import multiprocessing
import os
import threading
from pathlib import Path
from typing import IO

import pytest

from flwr_privacy.errors import LedgerError
from flwr_privacy.pipeline import shared_reply_cache as common_replies
from flwr_privacy.pipeline.shared_reply_cache import SharedReplyCache
from flwr_privacy.privacy.ledger import Question


def question(experiment_id="e", phase="train", server_round=1, request=0) -> Question:
    return Question(
        experiment_id=experiment_id, phase=phase, server_round=server_round, request=request
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "replies"


def of(folder: Path, client: str = "7") -> SharedReplyCache:
    return SharedReplyCache(folder, client)


def test_a_question_that_comes_again_gets_the_same_bytes(folder):
    noised = bytes(range(256)) * 100
    assert of(folder).find(question()) is None
    of(folder).keep(question(), noised)
    assert of(folder).find(question()) == noised
    assert of(str(folder)).find(question()) == noised


def test_every_client_and_question_has_a_reply_of_its_own(folder):
    names = ["a", "aa", "a-1", "1", "11", "../a", "a/b", '"', '", "', ".."]
    asked = [
        (client, question(experiment, phase, 1, request))
        for client, experiment, phase, request in itertools.product(
            ["1", "11", "a"], names[:4], names, [0, 1]
        )
    ]
    for number, (client, one) in enumerate(asked):
        of(folder, client).keep(one, str(number).encode())
    found = [of(folder, client).find(one) for client, one in asked]
    assert found == [str(i).encode() for i in range(len(asked))]
    assert of(folder, "b").find(question("a", "a")) is None
    assert [path.name for path in folder.parent.iterdir()] == ["replies"]


def test_the_clients_of_a_round_share_a_file_and_take_those_of_earlier_rounds_away(folder):
    for server_round, client in [(1, "a"), (1, "b"), (2, "c"), (2, "a")]:
        of(folder, client).keep(question(server_round=server_round), client.encode())
        of(folder, client).keep(question("other", server_round=1), client.encode())
    assert len(os.listdir(folder)) == 2  # one for each experiment
    assert of(folder, "b").find(question(server_round=1)) is None
    assert of(folder, "a").find(question(server_round=2)) == b"a"
    assert of(folder, "b").find(question("other")) == b"b"
    of(folder, "b").keep(question(server_round=1), b"out of order")
    assert of(folder, "c").find(question(server_round=2)) == b"c"


def test_the_last_reply_to_a_question_counts_and_an_empty_one_is_one(folder):
    for reply in (b"first", b"second", b""):
        of(folder).keep(question(), reply)
        of(folder, "other").keep(question(), b"another's")
        assert of(folder).find(question()) == reply


def test_replies_to_old_experiments_are_forgotten(folder):
    for number in range(6):
        of(folder).keep(question(f"e{number}"), b"noised")
        for path in folder.iterdir():  # older by a second: a file system may be coarse
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1))
    found = [n for n in range(6) if of(folder).find(question(f"e{n}")) is not None]
    assert found == [2, 3, 4, 5]


def test_a_file_that_goes_while_it_is_looked_for_has_no_reply(folder, monkeypatch):
    of(folder).keep(question(), b"noised")
    names = os.listdir(folder)
    of(folder).keep(question(server_round=2), b"noised")  # takes the first away
    monkeypatch.setattr(os, "listdir", lambda _: names)
    assert of(folder).find(question()) is None
    of(folder).keep(question(server_round=3), b"noised")  # somebody else was faster


def keep_many(folder: Path, client: str) -> None:
    for request in range(200):
        of(folder, client).keep(question(request=request), client.encode() * 1000)


def test_processes_and_threads_do_not_write_into_each_other_s_replies(folder):
    context = multiprocessing.get_context("fork")
    of(folder, "here").keep(question(), b"here")
    writers = [
        *(context.Process(target=keep_many, args=(folder, f"p{i}")) for i in range(2)),
        *(threading.Thread(target=keep_many, args=(folder, f"t{i}")) for i in range(2)),
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(os.listdir(folder)) == 5
    for client, request in itertools.product(["p0", "p1", "t0", "t1"], [0, 100, 199]):
        kept = of(folder, client).find(question(request=request))
        assert kept == client.encode() * 1000


def test_a_reply_that_is_not_whole_counts_as_none_and_those_before_it_stay(folder):
    of(folder, "a").keep(question(), b"first")
    (path,) = folder.iterdir()
    start = path.stat().st_size
    of(folder, "b").keep(question(), b"second")
    whole = path.read_bytes()
    flips = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(start, len(whole))]
    for content in [*flips, *(whole[:length] for length in range(start, len(whole)))]:
        path.write_bytes(content)
        assert of(folder, "a").find(question()) == b"first"
        assert of(folder, "b").find(question()) is None


def test_a_reply_that_cannot_be_written_is_an_error_and_leaves_no_part(folder, monkeypatch):
    of(folder, "a").keep(question(), b"first")

    def full(file: IO[bytes], content: bytes) -> None:
        file.write(content[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(common_replies, "write_all", full)
        with pytest.raises(LedgerError, match="cannot be written: No space left"):
            of(folder, "b").keep(question(), b"second")
    of(folder, "c").keep(question(), b"third")
    assert [of(folder, c).find(question()) for c in "abc"] == [b"first", None, b"third"]


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(LedgerError, match=r"tpyo/replies cannot be written: No such file"):
        of(tmp_path / "tpyo" / "replies").keep(question(), b"noised")
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="cannot be read: Not a directory"):
        of(tmp_path / "file").find(question())


def test_only_the_owner_may_read_the_replies(folder):
    of(folder).keep(question(), b"noised")
    for path in [folder, *folder.iterdir()]:
        assert path.stat().st_mode & 0o077 == 0
