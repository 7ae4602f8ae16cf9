"""Kept replies: the noised answer to a question, so that asking again gets the same bytes.

A question that is put twice (a resumed round, a message that was sent again) then reveals nothing
new and costs nothing.
"""

import hashlib
import json
import os
import re
from pathlib import Path

from .errors import LedgerError
from .files import DamagedFileError, exclusive_lock, read_sealed, write_sealed
from .ledger import Question

__all__ = ["KeptReplies", "digest", "unusable"]

_MAGIC = b"flwr-privacy reply\n"
_FILE = re.compile(r"([0-9a-f]{32})-([0-9]{1,19})-[0-9a-f]{32}\.reply(\.new)?")
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
    durable : bool, default False
        Whether a reply that was kept outlives a power cut.

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

    def __init__(self, folder: str | Path, *, durable: bool = False) -> None:
        self.folder = Path(folder)
        self.durable = durable

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
            raise unusable(self.folder, "read", error) from error
        # A file under another question's name is not its reply.
        return content[len(label) :] if content.startswith(label) else None

    def keep(self, question: Question, reply: bytes) -> None:
        """Keep the reply to a question; those to earlier rounds of its experiment are removed.

        Call it after the charge and before the reply is sent.

        Raises
        ------
        LedgerError
            If it cannot be written, or another process writes replies all the while.
        """
        path = self._path(question)
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with exclusive_lock(self.folder / "lock", timeout=_LOCK_TIMEOUT):
                write_sealed(path, _MAGIC, _label(question) + reply, durable=self.durable)
                for earlier in self._files_before(question):
                    earlier.unlink()
        except OSError as error:
            raise unusable(self.folder, "written", error) from error

    def _path(self, question: Question) -> Path:
        experiment, own = digest(question.experiment_id), digest(question.phase, question.request)
        return self.folder / f"{experiment}-{question.server_round}-{own}.reply"

    def _files_before(self, question: Question) -> list[Path]:
        """Return the files of earlier rounds of a question's experiment."""
        experiment = digest(question.experiment_id)
        matches = (_FILE.fullmatch(name) for name in os.listdir(self.folder))
        return [
            self.folder / match[0]
            for match in matches
            if match and match[1] == experiment and int(match[2]) < question.server_round
        ]


def _label(question: Question) -> bytes:
    """Return a line that no other question has."""
    key = [question.experiment_id, question.phase, question.server_round, question.request]
    return json.dumps(key).encode("ascii") + b"\n"


def unusable(folder: Path, done: str, error: OSError) -> LedgerError:
    """Return the error of replies that cannot be read or written."""
    return LedgerError(f"the kept replies {folder} cannot be {done}: {error.strerror}")


def digest(*names: str | int) -> str:
    """Return a part of a file's name for names that come from a server, and may be anything."""
    return hashlib.sha256(json.dumps(names).encode("ascii")).hexdigest()[:32]
