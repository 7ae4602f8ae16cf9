"""Files of a FedVS client: its shares of everybody's rows, and the shares that it dealt last."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.wire.documents import dumps, loads
from flwr_privacy.wire.files import DamagedFileError, read_checksummed, write_checksummed

__all__ = ["CodedRows", "dealt", "forget_coded", "keep_dealt"]

_MAGIC = b"flwr-privacy vertical state\n"
_STORED = np.dtype("<u4")  # an element is below 2^31


class CodedRows:
    """The shares of a part's rows: a matrix in a file that is never read as a whole.

    Parameters
    ----------
    folder : Path
        Where it lies.
    generation, part : str
        Which coding and which part it is of.
    shape : tuple of int
        The coded rows, and the columns of all clients' expanded data.
    """

    def __init__(self, folder: Path, generation: str, part: str, shape: tuple[int, int]) -> None:
        name = hashlib.sha256(f"{generation} {part}".encode()).hexdigest()[:32]
        self.path = folder / f"{name}.coded"
        self.shape = shape

    def create(self) -> None:
        """Create the file, readable by its owner alone (mode 0600); an old one is replaced."""
        self.path.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, self.size)
        finally:
            os.close(descriptor)

    def is_there(self) -> bool:
        """Tell whether the file exists with the right size."""
        return self.path.is_file() and self.path.stat().st_size == self.size

    def write(self, first: int, blocks: Iterable[tuple[int, NDArray[np.integer[Any]]]]) -> None:
        """Write some rows of the columns of some clients, each from the column where it begins."""
        mapped = np.memmap(self.path, _STORED, mode="r+", shape=self.shape)
        for offset, elements in blocks:
            rows, columns = elements.shape
            mapped[first : first + rows, offset : offset + columns] = elements

    def sync(self) -> None:
        """Flush the file to disk, because pages lost in a power cut would be zeros."""
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
    def size(self) -> int:
        """Bytes of the file."""
        return self.shape[0] * self.shape[1] * _STORED.itemsize


def forget_coded(folder: Path, kept: set[Path]) -> None:
    """Remove the files of earlier codings of the data."""
    for path in folder.iterdir():
        if re.fullmatch(r"[0-9a-f]{32}\.coded", path.name) and path not in kept:
            path.unlink(missing_ok=True)


def keep_dealt(folder: Path, name: str, asked: dict[str, Any], sealed: NDArray[np.uint8]) -> None:
    """Store the shares of weights that were dealt last."""
    content = dumps({"name": name, "asked": asked, "sealed": sealed})
    write_checksummed(folder / "dealt", _MAGIC, content, durable=False)


def dealt(folder: Path, name: str) -> dict[str, Any]:
    """Return the last request and its dealt shares if they have this name, else nothing."""
    try:
        kept = loads(read_checksummed(folder / "dealt", _MAGIC))
    except (FileNotFoundError, DamagedFileError):  # after a power cut
        return {}
    return kept if kept["name"] == name else {}
