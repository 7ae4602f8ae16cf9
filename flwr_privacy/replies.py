"""Kept replies: the noised answer to a question, so that asking again gets the same bytes.

A question that is put twice (a resumed round, a message that was sent again) then reveals nothing
new and costs nothing.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import LedgerError
from .files import DamagedFileError, exclusive_lock, read_sealed, write_sealed
from .ledger import Question

__all__ = ["KeptReplies"]

_MAGIC = b"flwr-privacy reply\n"
_FILE = re.compile(r"([0-9]{1,19})-[0-9a-f]{32}\.reply(\.new)?")
_LOCK_TIMEOUT = 10.0  # seconds; a reply is written in far less


class KeptReplies:
    """The replies of one client, by question.

    The order is: **charge first, keep second, send last.** A reply that is kept but not charged
    must never be sent: were it kept first, a crash before the charge would leave a reply that is
    found when the question comes again, and leaves the node without ever being charged. The other
    way round, a crash between the two costs a charge for nothing, which is safe.

    Parameters
    ----------
    folder : str or Path
        Where they lie; one folder per client. It is created, readable by its owner only, if the
        folder that it lies in is there.

    Notes
    -----
    Of each experiment the last round is kept (all phases and requests), and what was asked out of
    order after it. Each file was charged once, so a budget bounds their number. They may be deleted
    while no node runs: a question that is put again is then charged again.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> replies = KeptReplies(Path(folder.name, "replies"))
    >>> question = Question(experiment_id="e", phase="train", server_round=1)
    >>> replies.keep(question, b"noised")
    >>> replies.find(question)
    b'noised'
    >>> folder.cleanup()
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def find(self, question: Question) -> bytes | None:
        """Return the reply to a question, or None if there is none.

        A damaged file counts as none: the next release is charged anew, which is safe.

        Raises
        ------
        LedgerError
            If the file is there but cannot be read.
        """
        label = _label(question)
        try:
            content = read_sealed(self._path(question), _MAGIC)
        except (FileNotFoundError, DamagedFileError):
            return None
        except OSError as error:
            raise self._error("read", error) from error
        # A file under another question's name is not its reply.
        return content[len(label) :] if content.startswith(label) else None

    def keep(self, question: Question, reply: bytes, *, durable: bool = False) -> None:
        """Keep the reply to a question; those to earlier rounds of its experiment are removed.

        Call it after the charge and before the reply is sent. A power cut may lose the reply,
        unless it is to be durable.

        Raises
        ------
        LedgerError
            If it cannot be written, or another process writes replies all the while.
        """
        path = self._path(question)
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with exclusive_lock(self.folder / "lock", timeout=_LOCK_TIMEOUT):
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_sealed(path, _MAGIC, _label(question) + reply, durable=durable)
                for earlier in _files_before(path.parent, question.server_round):
                    earlier.unlink()
        except OSError as error:
            raise self._error("written", error) from error

    def _path(self, question: Question) -> Path:
        # Hashes: the names come from a server, and may be anything.
        name = f"{question.server_round}-{_digest([question.phase, question.request])}.reply"
        return self.folder / _digest([question.experiment_id]) / name

    def _error(self, done: str, error: OSError) -> LedgerError:
        return LedgerError(f"the kept replies {self.folder} cannot be {done}: {error.strerror}")


def _label(question: Question) -> bytes:
    """Return a line that no other question has."""
    key = [question.experiment_id, question.phase, question.server_round, question.request]
    return json.dumps(key).encode("ascii") + b"\n"


def _digest(names: list[str | int]) -> str:
    return hashlib.sha256(json.dumps(names).encode("ascii")).hexdigest()[:32]


def _files_before(folder: Path, server_round: int) -> Iterator[Path]:
    for name in os.listdir(folder):
        match = _FILE.fullmatch(name)
        if match and int(match[1]) < server_round:
            yield folder / name
