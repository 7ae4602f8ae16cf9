"""Caches the replies of many simulated clients in one folder, with a few files per round.

A file for each reply, in a folder for each client, is what a node with a client of its own has
(`flwr_privacy.pipeline.reply_cache`). A simulation has thousands of clients: making the files takes
longer than the noise, and the last replies of all clients that ever ran fill the disk.
"""

import hashlib
import json
import os
import re
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flwr_privacy.privacy.ledger import Question
from flwr_privacy.wire.files import write_all

from .reply_cache import EXPERIMENTS, ReplyCache, digest, superseded, unusable

__all__ = ["Replies", "SharedReplyCache"]

_FILE = re.compile(r"([0-9a-f]{32})-([0-9]{1,19})-[0-9]+-[0-9a-f]{16}\.replies")
_DIGEST_SIZE = hashlib.sha256().digest_size
_SIZE_BYTES = 8

_writer = threading.local()


class SharedReplyCache:
    """The cached replies of one of the clients that share a folder, by question.

    As `ReplyCache`, with the same order: charge, keep, note the answer, send. What differs: a
    power cut may take replies away, and of each experiment the last round is kept of all clients
    together: that of a client which ran before it is gone.

    Parameters
    ----------
    folder : str or Path
        Where they lie. It is created, readable by its owner only, if the folder that it lies in is
        there.
    client_id : str
        Whose they are.

    Notes
    -----
    Every process (and thread) appends to a file of its own. If it is killed on the way, that file
    ends with a part of a reply, which counts as none.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> replies = SharedReplyCache(Path(folder.name, "replies"), "7")
    >>> question = Question(experiment_id="e", phase="train", server_round=1)
    >>> replies.keep(question, b"noised")
    b'noised'
    >>> replies.find(question), SharedReplyCache(replies.folder, "8").find(question)
    (b'noised', None)
    >>> folder.cleanup()
    """

    def __init__(self, folder: str | Path, client_id: str) -> None:
        self.folder = Path(folder)
        self.client_id = client_id

    def find(self, question: Question, key: str = "") -> bytes | None:
        """Return the reply to a question, or None if there is none.

        Raises
        ------
        LedgerError
            If a file is there but cannot be read.
        """
        found, label = None, self._label(question, key)
        try:
            for path, experiment, server_round in self._files():
                if (experiment, server_round) == _place(question):
                    here = _found(path, label)
                    found = found if here is None else here
        except OSError as error:
            raise unusable(self.folder, "read", error) from error
        return found

    def keep(self, question: Question, reply: bytes, key: str = "") -> bytes:
        """Cache the reply to a question, and return it.

        Replies to earlier rounds of the experiment are removed, and those to old experiments. Call
        it after the charge and before the reply is sent. A simulated client has one message at a
        time: no other process keeps another reply meanwhile, and nobody looks for one.

        Raises
        ------
        LedgerError
            If it cannot be written.
        """
        label = self._label(question, key)
        experiment, server_round = _place(question)
        path = self.folder / f"{experiment}-{server_round}-{_writer_name()}.replies"
        head = _head_of(label) + label + _head_of(reply)
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(descriptor, "ab", buffering=0) as file:
                before = file.tell()
                try:
                    write_all(file, head)
                    write_all(file, reply)
                except OSError:  # a part of it would hide what comes after
                    file.truncate(before)
                    raise
            if before == 0:  # the first one of its round
                self._remove_superseded(question)
        except OSError as error:
            raise unusable(self.folder, "written", error) from error
        return reply

    def _remove_superseded(self, question: Question) -> None:
        for path in superseded(self._files(), question, experiments=EXPERIMENTS):
            path.unlink(missing_ok=True)  # another process does the same

    def _files(self) -> Iterator[tuple[Path, str, int]]:
        """Yield the files in the folder, each with its experiment and round."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return
        for match in filter(None, map(_FILE.fullmatch, names)):
            yield self.folder / match[0], match[1], int(match[2])

    def _label(self, question: Question, key: str) -> bytes:
        name = [self.client_id, question.phase, question.request, key]
        return json.dumps(name).encode("ascii")


Replies = ReplyCache | SharedReplyCache
"""Where a client keeps its replies: alone, or together with others."""


def _place(question: Question) -> tuple[str, int]:
    """Return the prefix of the names of a question's files."""
    return digest(question.experiment_id), question.server_round


def _writer_name() -> str:
    """Return a name that no other thread uses for files in the folder."""
    if getattr(_writer, "process", None) != os.getpid():  # a fork has its parent's
        _writer.process, _writer.token = os.getpid(), secrets.token_hex(8)
    return f"{_writer.process}-{_writer.token}"


def _head_of(content: bytes) -> bytes:
    return len(content).to_bytes(_SIZE_BYTES) + hashlib.sha256(content).digest()


def _found(path: Path, label: bytes) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return _last(file, label)
    except FileNotFoundError:  # its round is over since it was listed
        return None


def _last(file: IO[bytes], label: bytes) -> bytes | None:
    """Return the last reply with a label, reading up to the first incomplete one.

    Nobody else's is read: a file has those of hundreds of clients.
    """
    found, end = None, os.fstat(file.fileno()).st_size
    while (head := _head(file, end)) is not None and (own := _content(file, *head)) is not None:
        if (head := _head(file, end)) is None:
            break
        if own != label:
            file.seek(head[0], os.SEEK_CUR)
            continue
        found = _content(file, *head)
    return found


def _head(file: IO[bytes], end: int) -> tuple[int, bytes] | None:
    """Return size and checksum of the next reply in a file, if it is complete."""
    head = file.read(_SIZE_BYTES + _DIGEST_SIZE)
    size = int.from_bytes(head[:_SIZE_BYTES])
    whole = len(head) == _SIZE_BYTES + _DIGEST_SIZE and size <= end - file.tell()
    return (size, head[_SIZE_BYTES:]) if whole else None


def _content(file: IO[bytes], size: int, checksum: bytes) -> bytes | None:
    content = file.read(size)
    return content if hashlib.sha256(content).digest() == checksum else None
