"""What a client of FedVS keeps between two messages: its state, and its shares of everybody's rows.

Everything lies in a folder of the node's own, one for each client and experiment, for its owner's
eyes only. A state is written when a message was answered, never when it was refused.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.documents import dumps, loads
from flwr_privacy.errors import LedgerError
from flwr_privacy.files import DamagedFileError, exclusive_lock, read_sealed, write_sealed

from .custody import Custody, is_simulated

__all__ = ["CodedRows", "Memory"]

_MAGIC = b"flwr-privacy vertical state\n"
_LOCK_TIMEOUT = 60.0  # seconds; the evaluation of a large batch takes some
_STORED = np.dtype("<u4")  # an element is below 2^31


class CodedRows:
    """Shares of the rows of a part: a matrix of elements in a file that is not read as a whole.

    Parameters
    ----------
    path : Path
        The file.
    length, columns : int
        Its shape: the coded rows, and the columns of all clients' expanded data.
    """

    def __init__(self, path: Path, length: int, columns: int) -> None:
        self.path = path
        self.shape = (length, columns)

    def create(self) -> None:
        """Make the file anew, for its owner alone (mode 0600)."""
        self.path.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, self._size)
        finally:
            os.close(descriptor)

    def is_there(self) -> bool:
        """Tell whether the file is there, with the size that it should have."""
        return self.path.is_file() and self.path.stat().st_size == self._size

    def write(self, first: int, blocks: Iterable[tuple[int, NDArray[np.integer[Any]]]]) -> None:
        """Write some rows of the columns of some clients, each from the column where it begins."""
        mapped = np.memmap(self.path, _STORED, mode="r+", shape=self.shape)
        for offset, elements in blocks:
            rows, columns = elements.shape
            mapped[first : first + rows, offset : offset + columns] = elements

    def sync(self) -> None:
        """Have what was written outlive a power cut: lost pages would be zeros."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return some rows, in full."""
        mapped = np.memmap(self.path, _STORED, mode="r", shape=self.shape)
        return np.asarray(mapped[rows], np.uint32)

    @property
    def _size(self) -> int:
        return self.shape[0] * self.shape[1] * _STORED.itemsize


class Memory:
    """What a client remembers of one experiment.

    Parameters
    ----------
    custody : Custody
        What the node keeps for the client.
    scheme, experiment_id : str
        The experiment.
    simulated : bool, default False
        Whether the client is made up: it has no power cut to fear that would set it back.
    """

    def __init__(
        self, custody: Custody, scheme: str, experiment_id: str, *, simulated: bool = False
    ) -> None:
        name = hashlib.sha256(experiment_id.encode()).hexdigest()[:32]
        self.durable = not (simulated or is_simulated())
        self.folder = custody.sessions.with_name(f"{custody.client_id}.{scheme}") / name

    @contextmanager
    def state(self) -> Iterator[dict[str, Any]]:
        """Lend the state, under a lock; it is on the disk afterwards, unless an error came.

        Raises
        ------
        LedgerError
            If a file cannot be used.
        """
        path = self.folder / "state"
        try:
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            with exclusive_lock(self.folder / "lock", timeout=_LOCK_TIMEOUT):
                state = loads(read_sealed(path, _MAGIC)) if path.exists() else {}
                yield state
                write_sealed(path, _MAGIC, dumps(state), durable=self.durable)
        except DamagedFileError as error:
            raise LedgerError(f"what the client remembers of the run, {path}, {error}") from error
        except OSError as error:
            raise LedgerError(f"{path} cannot be used: {error.strerror}") from error

    def keep_dealt(self, name: str, asked: dict[str, Any], sealed: NDArray[np.uint8]) -> None:
        """Keep the shares that were dealt last; call it while the state is lent."""
        content = dumps({"name": name, "asked": asked, "sealed": sealed})
        write_sealed(self.folder / "dealt", _MAGIC, content, durable=False)

    def dealt(self, name: str) -> dict[str, Any]:
        """Return what was asked and dealt under a name, if it was the last; else nothing."""
        try:
            kept = loads(read_sealed(self.folder / "dealt", _MAGIC))
        except (FileNotFoundError, DamagedFileError):  # after a power cut
            return {}
        return kept if kept["name"] == name else {}

    def coded(self, generation: str, part: str, shape: tuple[int, int]) -> CodedRows:
        """Return the file with the shares of a part's rows, which may not be there yet."""
        name = hashlib.sha256(f"{generation} {part}".encode()).hexdigest()[:32]
        return CodedRows(self.folder / f"{name}.coded", *shape)

    def forget_coded(self, kept: set[Path]) -> None:
        """Remove the files of earlier codings of the data."""
        for path in self.folder.iterdir():
            if re.fullmatch(r"[0-9a-f]{32}\.coded", path.name) and path not in kept:
                path.unlink(missing_ok=True)
