"""Caches each noised reply, so that the same request gets the same reply again.

A question that comes twice (a resumed round, a message that was sent again) then reveals nothing
new and costs nothing.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

from flwr_privacy.errors import LedgerError
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.wire.files import (
    DamagedFileError,
    exclusive_lock,
    read_checksummed,
    write_checksummed,
)

__all__ = ["EXPERIMENTS", "REPLIES", "ReplyCache", "digest", "superseded", "unusable"]

EXPERIMENTS = 4
"""Experiments whose last round is kept; a reply to an older one is forgotten."""

REPLIES = 32
"""Replies that are kept of a round, whatever a server asks in it."""

_MAGIC = b"flwr-privacy reply\n"
_FILE = re.compile(r"([0-9a-f]{32})-([0-9]{1,19})-[0-9a-f]{32}\.reply(?:\.new)?")
_LOCK_TIMEOUT = 10.0  # seconds; a reply is written in far less


class ReplyCache:
    """The cached replies of one client, by question and digest.

    The order is: **charge first, keep second, note the answer in the ledger third, send last.** A
    reply that is kept but not charged must never be sent. A charge that the ledger does not know
    to be answered may still be; where it was answered and the reply is forgotten, a second reply
    would be a second release.

    Parameters
    ----------
    folder : str or Path
        Where they lie; one folder per client. It is created, readable by its owner only, if the
        folder that it lies in is there.
    durable : bool, default False
        Whether a reply that was kept outlives a power cut.
    experiments : int, optional
        Number of experiments whose replies are kept; by default all.

    Notes
    -----
    Of each experiment the last round is kept (all phases and requests, `REPLIES` at most), and what
    was asked out of order after it. They may be deleted while no node runs: a question that is put
    again is then charged again.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> replies = ReplyCache(Path(folder.name, "replies"))
    >>> question = Question(experiment_id="e", phase="train", server_round=1)
    >>> replies.keep(question, b"noised"), replies.keep(question, b"noised once more")
    (b'noised', b'noised')
    >>> replies.find(question)
    b'noised'
    >>> folder.cleanup()
    """

    def __init__(
        self, folder: str | Path, *, durable: bool = False, experiments: int | None = None
    ) -> None:
        self.folder = Path(folder)
        self.durable = durable
        self._experiments = experiments

    def find(self, question: Question, key: str = "") -> bytes | None:
        """Return the reply to a question, or None if there is none.

        A damaged file counts as none: the next release is charged anew, which is safe.

        Parameters
        ----------
        question : Question
            Its name.
        key : str
            Digest of the whole question.

        Raises
        ------
        LedgerError
            If the file is there but cannot be read.
        """
        label = _label(question, key)
        try:
            content = read_checksummed(self._path(question, key), _MAGIC)
        except (FileNotFoundError, DamagedFileError):
            return None
        except OSError as error:
            raise unusable(self.folder, "read", error) from error
        # A file under another question's name is not its reply.
        return content[len(label) :] if content.startswith(label) else None

    def keep(self, question: Question, reply: bytes, key: str = "") -> bytes:
        """Cache the reply to a question if it has none; return the cached reply.

        Replies to earlier rounds of the experiment are removed, and those to old experiments. Call
        it after the charge and before the reply is sent.

        Parameters
        ----------
        question : Question
            Its name.
        reply : bytes
            What is to be kept.
        key : str
            Digest of the whole question.

        Raises
        ------
        LedgerError
            If it cannot be written, or another process writes replies all the while.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with exclusive_lock(self.folder / "lock", timeout=_LOCK_TIMEOUT):
                # Under the lock: another process may have answered, and only one reply is sent.
                if (found := self.find(question, key)) is not None:
                    return found
                content = _label(question, key) + reply
                write_checksummed(self._path(question, key), _MAGIC, content, durable=self.durable)
                # After the write: a crash in between leaves too many replies, never too few.
                for earlier in self._superseded(question):
                    earlier.unlink()
        except OSError as error:
            raise unusable(self.folder, "written", error) from error
        return reply

    def _path(self, question: Question, key: str) -> Path:
        experiment = digest(question.experiment_id)
        own = digest(question.phase, question.request, key)
        return self.folder / f"{experiment}-{question.server_round}-{own}.reply"

    def _superseded(self, question: Question) -> list[Path]:
        """Return the files of earlier rounds of the experiment, and of old experiments."""
        matches = (_FILE.fullmatch(name) for name in os.listdir(self.folder))
        files = [(self.folder / m[0], m[1], int(m[2])) for m in matches if m]
        return superseded(files, question, experiments=self._experiments)


def superseded(
    files: Iterable[tuple[Path, str, int]], question: Question, *, experiments: int | None
) -> list[Path]:
    """Return the files that are no longer needed once a question has its reply.

    Parameters
    ----------
    files : iterable of (Path, str, int)
        Each with the digest of its experiment and its round.
    question : Question
        The one that has a reply.
    experiments : int, optional
        Number of experiments that are kept, the question's included; by default all.
    """
    experiment = digest(question.experiment_id)
    gone, own, last = list[Path](), list[Path](), dict[str, float]()
    others: list[tuple[Path, str]] = []
    for path, its_experiment, its_round in files:
        if its_experiment != experiment:
            others.append((path, its_experiment))
            if experiments is not None:
                last[its_experiment] = max(last.get(its_experiment, 0.0), _written(path))
        elif its_round < question.server_round:
            gone.append(path)
        else:
            own.append(path)
    if len(own) > REPLIES:
        gone += sorted(own, key=_written)[:-REPLIES]
    if experiments is None:
        return gone
    newest = sorted(last, key=last.__getitem__, reverse=True)[: max(0, experiments - 1)]
    return gone + [path for path, its_experiment in others if its_experiment not in newest]


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has removed it since it was listed
        return 0.0


def _label(question: Question, key: str) -> bytes:
    """Return a line that identifies a question."""
    return json.dumps([*astuple(question), key]).encode("ascii") + b"\n"


def unusable(folder: Path, done: str, error: OSError) -> LedgerError:
    """Return the error for a reply cache that cannot be read or written."""
    return LedgerError(f"the reply cache {folder} cannot be {done}: {error.strerror}")


def digest(*names: str | int) -> str:
    """Return a safe part of a file name for names that come from a server."""
    return hashlib.sha256(json.dumps(names).encode("ascii")).hexdigest()[:32]
