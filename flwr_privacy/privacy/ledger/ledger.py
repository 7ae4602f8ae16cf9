"""The privacy ledger: every release about one data set, in a file that loses no entry in a crash.

A charge is on the disk when `LockedLedger.charge` returns, and only then may the bytes leave the
node. A crash in between leaves a charge without a release, never a release without a charge.
`LockedLedger.answer` notes that a charge has its answer, before the answer leaves; the others are
`unanswered`. Simulated clients, whose data are nobody's, do not wait for the disk: there this holds
for crashes of processes, not for power cuts.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr_privacy.errors import LedgerError, check_number
from flwr_privacy.wire.files import DamagedFileError, append, locked_file

from .chain import Head
from .entries import Entry, check_name, now_text
from .journal import Journal
from .loss import Loss
from .view import LedgerView
from .witness import Seen, Witness

__all__ = ["Ledger", "LockedLedger"]


class Ledger:
    """All releases about one data set, by all schemes and runs of a node.

    Charges, and notes that they were answered, are added at its end; nothing of it changes.

    Parameters
    ----------
    path : str or Path
        The file. Its folder is the operator's and must be there; the file is created by the first
        charge, readable by its owner only. A link is followed, so that all names of a file are one
        ledger.
    data_set : str
        Name of the data set: 1 to 128 printable ASCII characters. A file about another is refused.
    durable : bool, default True
        Whether a charge outlives a power cut. Without it a killed process still loses nothing.
    witness : Path, optional
        Folder on another volume for the ledger's `Witness`; by default there is none.

    Raises
    ------
    InvalidParameterError
        If the name is not allowed. The file is read by `view` and `locked`, which raise
        `LedgerError`.
    LedgerError
        If the witness has no folder.

    Notes
    -----
    Guarantee. Against crashes and kills of processes at any moment, and, if it is `durable`, power
    cuts (on a file system that makes a file longer only when the bytes are there): the ledger holds
    every charge that returned, and at most one per process that did not. Two processes that share a
    ledger charge one after the other, so both never pass a cap that only one release fits under.

    A file that is deleted, set back to an older copy, cut, or a copy that is charged instead is
    found by its witness, or by a server that has seen the heads of its experiment. Without either
    it is not. Not covered: somebody who edits it and mends the checksums, unless there is a
    witness; a disk that says it has written what it has not; a folder on a network whose file
    system has no locks.

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
    >>> len(ledger.entries()), len(ledger.unanswered()), ledger.head("e").count
    (1, 0, 1)
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        data_set: str,
        durable: bool = True,
        witness: Path | None = None,
    ) -> None:
        # Through links: the lock lies beside the file.
        self.path = Path(os.path.realpath(path))
        self.data_set = check_name("data_set", data_set)
        self.durable = durable
        self.witness = (
            None if witness is None else Witness(witness, data_set=data_set, durable=durable)
        )

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

    def view(self) -> LedgerView:
        """Return the ledger's content as it is now; others may charge meanwhile.

        Raises
        ------
        LedgerError
            If the folder is missing, or the file cannot be read, is damaged, is no ledger, has
            another version, is about another data set, or lacks what its witness has seen.
        """
        return LedgerView(self._read())

    def head(self, experiment_id: str) -> Head:
        """Return the head of an experiment's chain of charges, as it is now.

        Raises
        ------
        LedgerError
            As `view`.
        """
        return self.view().head(experiment_id)

    def entries(self) -> tuple[Entry, ...]:
        """Return every release so far; empty if the file does not exist yet.

        Raises
        ------
        LedgerError
            As `view`.
        """
        return self.view().entries()

    def unanswered(self) -> tuple[Entry, ...]:
        """Return the charges without an answer, after a crash, a kill or a charged failure.

        An answer that was made counts, whatever became of it on its way.

        Raises
        ------
        LedgerError
            As `view`.
        """
        return self.view().unanswered()

    @contextmanager
    def held(self, *, timeout: float = 10.0) -> Iterator[int]:
        """Hold the ledger's lock without reading it; other processes and threads wait.

        Parameters
        ----------
        timeout : float, default 10.0
            Seconds to wait for another process or thread.

        Yields
        ------
        int
            Descriptor of the file, which is removed again if it stays empty.

        Raises
        ------
        LedgerError
            If another one holds it all the while, or the platform cannot lock files.
        """
        check_number("timeout", timeout, minimum=0)
        self._check_folder()
        lock = locked_file(self.path, timeout=timeout)
        try:
            descriptor = lock.__enter__()
        except OSError as error:
            raise self._error(f"cannot be opened: {error.strerror}") from error
        try:
            yield descriptor
        finally:
            lock.__exit__(None, None, None)

    @contextmanager
    def locked(self, *, timeout: float = 10.0) -> Iterator["LockedLedger"]:
        """Lock the ledger for a check and a charge; other processes and threads wait.

        Parameters
        ----------
        timeout : float, default 10.0
            As of `held`.

        Raises
        ------
        LedgerError
            As `held` and `view`.
        """
        with self.held(timeout=timeout) as descriptor:
            # Under the lock: others may have charged since it was read.
            locked = LockedLedger(self, self._read(descriptor), descriptor)
            try:
                yield locked
            finally:
                locked.close()

    def accept_loss(self, *, timeout: float = 10.0) -> Loss:
        """Go on with a ledger that lacks what its witness has seen; the loss is written into it.

        What is missing is in no total: the data set has released more than the ledger says.

        Raises
        ------
        LedgerError
            If there is no witness, it misses nothing, or as `held` and `view`.
        """
        if self.witness is None:
            raise self._error("has no witness, so nothing is known to be missing")
        with self.held(timeout=timeout) as descriptor:
            seen, journal = self.witness.seen(), self.read(descriptor)
            if seen is None or not self.witness.missing(seen, journal):
                raise self._error("lacks nothing that a witness has seen: there is no loss")
            loss = Loss(time=now_text(), charges=journal.count, witnessed=seen.charges)
            self.write(descriptor, journal, journal.lost(loss))
            return loss

    def begin_witness(self, *, timeout: float = 10.0) -> int:
        """Let a witness begin with the ledger as it is; return the number of its charges.

        Raises
        ------
        LedgerError
            If there is no folder for a witness, it has begun before, or as `held` and `view`.
        """
        if self.witness is None:
            raise self._error("has no folder for a witness")
        with self.held(timeout=timeout):
            journal = self.read()
            if self.witness.seen() is not None:
                raise self._error(f"has a witness: {self.witness.path}")
            self.witness.write(Seen.of(journal))
            return journal.count

    def read(self, descriptor: int | None = None) -> Journal:
        """Return the file's content, whatever a witness has seen.

        Parameters
        ----------
        descriptor : int, optional
            The file, where it is open.

        Raises
        ------
        LedgerError
            As `view`.
        """
        content = bytearray()
        try:
            if descriptor is not None:
                content = bytearray(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            else:
                content = bytearray(self.path.read_bytes())
        except FileNotFoundError:
            self._check_folder()
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from error
        return Journal(self.path, self.data_set, content)

    def write(self, descriptor: int, journal: Journal, lines: bytes) -> None:
        """Write lines at the end of the file, whose lock is held, and tell the witness.

        Raises
        ------
        LedgerError
            If they cannot be written.
        """
        length = len(journal.content)
        if self.witness is not None and not length and self.witness.seen() is None:
            # Before the file is there: a kill must not leave a ledger that has no witness.
            self.witness.write(Seen.of(journal))
        try:
            append(
                self.path,
                descriptor,
                lines,
                length=length,
                torn=journal.torn,
                durable=self.durable,
            )
        except DamagedFileError as error:
            raise self._error(str(error)) from error
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}") from error
        journal.torn = 0
        journal.extend(lines)
        if self.witness is not None:
            self.witness.write(Seen.of(journal))

    def _read(self, descriptor: int | None = None) -> Journal:
        if self.witness is None:
            return self.read(descriptor)
        # First: another process may write to both, the ledger first.
        seen = self.witness.seen()
        journal = self.read(descriptor)
        self.witness.check(seen, journal)
        return journal

    def _check_folder(self) -> None:
        if not self.path.parent.is_dir():
            raise self._error(f"has no folder: there is no folder {self.path.parent}")

    def _error(self, text: str) -> LedgerError:
        return LedgerError(f"the privacy ledger {self.path} {text}")


class LockedLedger(LedgerView):
    """A locked ledger, as `Ledger.locked` yields it, with what was charged and answered here."""

    def __init__(self, ledger: Ledger, journal: Journal, descriptor: int) -> None:
        super().__init__(journal)
        self._ledger = ledger
        self._descriptor: int | None = descriptor

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
        self._write(self._journal.charged(entry))
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
        if not self.is_answered(number):
            self._write(self._journal.answered(number))

    def _write(self, lines: bytes) -> None:
        if self._descriptor is None:
            raise RuntimeError("the ledger is not held any more: write inside `locked`")
        self._ledger.write(self._descriptor, self._journal, lines)

    def close(self) -> None:
        """Mark the lock as over: this object can no longer charge."""
        self._descriptor = None
