"""The privacy ledger: every release about one data set, in a file that loses no entry in a crash.

A charge is on the disk when `LockedLedger.charge` returns, and only then may the bytes leave the
node. A crash in between leaves a charge without a release, never a release without a charge.
`LockedLedger.answer` notes that a charge has its answer, before the answer leaves; the others are
`unanswered`. Simulated clients, whose data are nobody's, do not wait for the disk: there this holds
for crashes of processes, not for power cuts.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr_privacy.errors import LedgerError, check_integer, check_number
from flwr_privacy.wire.files import (
    DamagedFileError,
    exclusive_lock,
    read_checksummed,
    write_checksummed,
)

from .chain import Head
from .entries import Entry, check_name
from .view import LedgerView

__all__ = ["Ledger", "LockedLedger"]

_MAGIC = b"flwr-privacy ledger\n"
_VERSION = 2
_ANSWERED = "answered"  # the one key of a line that is no entry


class Ledger:
    """All releases about one data set, by all schemes and runs of a node.

    Charges, and notes that they were answered, are added at its end; nothing of it changes.

    Parameters
    ----------
    path : str or Path
        The file. Its folder is the operator's and must be there; the file is created by the first
        charge, readable by its owner only. A link is followed, so that all names of a file are one
        ledger. ``path`` + ``.lock`` beside it stays and must not be removed while a node runs.
    data_set : str
        Name of the data set: 1 to 128 printable ASCII characters. A file about another is refused.
    durable : bool, default True
        Whether a charge outlives a power cut. Without it a killed process still loses nothing.

    Raises
    ------
    InvalidParameterError
        If the name is not allowed. The file is read by `entries` and `locked`, which raise
        `LedgerError`.

    Notes
    -----
    Guarantee. Against crashes and kills of processes at any moment, and, if it is `durable`, power
    cuts: the ledger holds every charge that returned, and at most one per process that did not.
    Two processes that share a ledger charge one after the other, so both never pass a cap that only
    one release fits under.

    Not covered: a file that somebody deletes or sets back to an older copy, or a copy (or hard
    link) that is charged instead; somebody who edits it and mends the checksum; a disk that says
    it has written what it has not; a folder on a network whose file system has no locks.

    Examples
    --------
    >>> import tempfile
    >>> from flwr_privacy.accounting import Charge
    >>> from flwr_privacy.privacy.ledger import Question
    >>> folder = tempfile.TemporaryDirectory()
    >>> ledger = Ledger(Path(folder.name, "ward-7.ledger"), data_set="ward-7")
    >>> question = Question(experiment_id="e", phase="train", server_round=1)
    >>> with ledger.locked() as locked:
    ...     if locked.count < 10:
    ...         charge = Charge(neighbours="replace_one", noise_multiplier=2.0)
    ...         entry = Entry(question=question, scheme="udp", unit="user", charge=charge)
    ...         number = locked.charge(entry)
    >>> [entry.question.server_round for entry in ledger.unanswered()]
    [1]
    >>> with ledger.locked() as locked:
    ...     locked.answer(number)
    >>> len(ledger.entries()), len(ledger.unanswered())
    (1, 0)
    >>> folder.cleanup()
    """

    def __init__(self, path: str | Path, *, data_set: str, durable: bool = True) -> None:
        # Through links: the file is replaced where it lies, and its lock lies beside it.
        self.path = Path(os.path.realpath(path))
        self.data_set = check_name("data_set", data_set)
        self.durable = durable

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

    def read(self) -> tuple[tuple[Entry, ...], frozenset[int]]:
        """Return every release so far, and the numbers of those that were answered.

        Raises
        ------
        LedgerError
            As `entries`.
        """
        return self._parse(self._read())

    def view(self) -> LedgerView:
        """Return the ledger's content as it is now; others may charge meanwhile.

        Raises
        ------
        LedgerError
            As `entries`.
        """
        return LedgerView(*self.read())

    def head(self, experiment_id: str) -> Head:
        """Return the head of an experiment's chain of charges, as it is now.

        Raises
        ------
        LedgerError
            As `entries`.
        """
        return self.view().head(experiment_id)

    def entries(self) -> tuple[Entry, ...]:
        """Return every release so far; empty if the file does not exist yet.

        Raises
        ------
        LedgerError
            If the folder is missing, or the file cannot be read, is damaged, is no ledger, has
            another version or is about another data set.
        """
        return self.read()[0]

    def unanswered(self) -> tuple[Entry, ...]:
        """Return the charges without an answer, after a crash, a kill or a charged failure.

        An answer that was made counts, whatever became of it on its way.

        Raises
        ------
        LedgerError
            As `entries`.
        """
        entries, answered = self.read()
        return tuple(entry for n, entry in enumerate(entries) if n not in answered)

    @contextmanager
    def locked(self, *, timeout: float = 10.0) -> Iterator["LockedLedger"]:
        """Lock the ledger for a check and a charge; other processes and threads wait.

        Parameters
        ----------
        timeout : float, default 10.0
            Seconds to wait for another process or thread.

        Raises
        ------
        LedgerError
            If another one holds it all the while, the platform cannot lock files, or as `entries`.
        """
        check_number("timeout", timeout, minimum=0)
        self._check_folder()
        with ExitStack() as stack:
            try:
                # A file of its own: each write replaces the ledger, and with it a lock on it.
                lock = self.path.with_name(self.path.name + ".lock")
                stack.enter_context(exclusive_lock(lock, timeout=timeout))
            except OSError as error:
                raise self._error(f"cannot be opened: {error.strerror}") from error
            # Under the lock: others may have charged since `entries` was read.
            content = self._read()
            locked = LockedLedger(self, content, *self._parse(content))
            stack.callback(locked.close)
            yield locked

    def _check_folder(self) -> None:
        if not self.path.parent.is_dir():
            raise self._error(f"has no folder: there is no folder {self.path.parent}")

    def _read(self) -> bytes:
        """Read the file: a header line, then one line per charge and per answer."""
        try:
            return read_checksummed(self.path, _MAGIC)
        except FileNotFoundError:
            self._check_folder()
            return _line({"version": _VERSION, "data_set": self.data_set})
        except DamagedFileError as error:
            raise self._error(str(error)) from None
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from error

    def _parse(self, content: bytes) -> tuple[tuple[Entry, ...], frozenset[int]]:
        """Return the entries, and the numbers of those that were answered."""
        first, *lines = content.splitlines() or [b""]
        self._check_first(first)
        if not content.endswith(b"\n"):
            raise self._error("is damaged: its last line has no end")
        entries, answered = list[Entry](), set[int]()
        for number, line in enumerate(lines, start=2):
            try:
                read = _read_line(line)
                if isinstance(read, Entry):
                    entries.append(read)
                elif 0 <= read < len(entries) and read not in answered:
                    answered.add(read)
                else:
                    raise ValueError("no charge before it, or answered before")
            except ValueError as error:
                # Without the error's text: it has the values, and they stay here.
                raise self._error(f"is damaged: its line {number} is malformed") from error
        return tuple(entries), frozenset(answered)

    def _check_first(self, line: bytes) -> None:
        try:
            first = _mapping(line)
        except ValueError as error:
            raise self._error("is damaged: its first line is malformed") from error
        version, data_set = first.get("version"), first.get("data_set")
        if version != _VERSION:
            raise self._error(f"has version {version!r}: this library reads version {_VERSION}")
        if data_set != self.data_set:
            raise self._error(f"is about the data set {data_set!r}, not {self.data_set!r}")

    def _error(self, text: str) -> LedgerError:
        return LedgerError(f"the privacy ledger {self.path} {text}")


class LockedLedger(LedgerView):
    """A locked ledger, as `Ledger.locked` yields it, with what was charged and answered here."""

    def __init__(
        self,
        ledger: Ledger,
        content: bytes,
        entries: tuple[Entry, ...],
        answered: frozenset[int],
    ) -> None:
        super().__init__(entries, answered)
        self._ledger = ledger
        self._content = content
        self._held = True

    def charge(self, entry: Entry) -> int:
        """Charge a release before it happens; the entry is written and flushed when this returns.

        Returns
        -------
        int
            Its number.

        Raises
        ------
        LedgerError
            If it cannot be written. The release must then not happen.
        RuntimeError
            If the ledger is not held any more.
        """
        self._add(entry.to_dict())
        self._entries.append(entry)
        return self.count - 1

    def answer(self, number: int) -> None:
        """Mark a charge as answered before the answer is sent; a second call changes nothing.

        From then on another answer needs another charge, unless it has the same bytes.

        Parameters
        ----------
        number : int
            What `charge` returned.

        Raises
        ------
        LedgerError
            If it cannot be written. The answer must then not leave.
        RuntimeError
            If the ledger is not held any more.
        """
        if number not in range(self.count):
            raise ValueError(f"there is no charge {number}")
        if not self.is_answered(number):
            self._add({_ANSWERED: number})
            self._answered.add(number)

    def _add(self, values: Mapping[str, Any]) -> None:
        if not self._held:
            raise RuntimeError("the ledger is not held any more: write inside `locked`")
        content = self._content + _line(values)
        try:
            # The whole file anew, then renamed: a crash leaves the old ledger or the new one.
            write_checksummed(self._ledger.path, _MAGIC, content, durable=self._ledger.durable)
        except OSError as error:
            raise LedgerError(
                f"the privacy ledger {self._ledger.path} cannot be written: {error.strerror}"
            ) from error
        self._content = content

    def close(self) -> None:
        """Mark the lock as over: this object can no longer charge."""
        self._held = False


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode("ascii") + b"\n"


def _mapping(line: bytes) -> dict[str, Any]:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("no mapping")
    return values


@lru_cache(maxsize=2**14)  # a ledger is read anew at every charge, with two new lines
def _read_line(line: bytes) -> Entry | int:
    """Return the entry of a line, or the number of the entry that the line marks as answered."""
    values = _mapping(line)
    if set(values) != {_ANSWERED}:
        return Entry.from_dict(values)
    return check_integer(_ANSWERED, values[_ANSWERED], minimum=0)
