"""Writes files so that damage is detected, and locks them between processes.

A checksummed file is a magic line, the SHA-256 of its payload, and the payload. It is written
beside the old one and put in its place in one step, so whoever reads finds the old file or the new
one. A file that grows is written at its end, by `append`.
"""

import errno
import hashlib
import os
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from flwr_privacy.errors import InvalidParameterError, LedgerError

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "PRIVATE",
    "DamagedFileError",
    "append",
    "exclusive_lock",
    "locked_file",
    "node_file",
    "open_private",
    "read_checksummed",
    "read_toml",
    "write_all",
    "write_checksummed",
    "write_file",
    "write_text",
]

Built = TypeVar("Built")

PRIVATE = 0o600
"""Rights of a file for its owner alone."""

_DIGEST_SIZE = hashlib.sha256().digest_size
_POLL = 0.005  # seconds between two looks at a lock that is taken


class DamagedFileError(Exception):
    """A file is damaged or of another kind; the text is written after the file's name."""


@contextmanager
def node_file(path: Path, what: str) -> Iterator[None]:
    """Raise what goes wrong with a file of the node as an error that names it.

    Parameters
    ----------
    path : Path
        The file.
    what : str
        What it has, as in "the node's key".

    Raises
    ------
    LedgerError
        If the file is damaged, or cannot be read, written or locked.
    """
    try:
        yield
    except DamagedFileError as error:
        raise LedgerError(f"{what}, {path}, {error}") from error
    except OSError as error:
        raise LedgerError(f"{path} cannot be used: {error.strerror}") from error


def write_checksummed(path: Path, magic: bytes, payload: bytes, *, durable: bool) -> None:
    """Write a file that `read_checksummed` reads; a crash leaves the old file or the new one.

    Only the owner may read it. At most one writer of a path at a time (see `exclusive_lock`).

    Parameters
    ----------
    path : Path
        The file; its folder is there. ``path`` + ``.new`` is used on the way.
    magic : bytes
        What the file begins with: its kind, a line of ASCII.
    payload : bytes
        The content.
    durable : bool
        Whether the content outlives a power cut as soon as this function returns (file and folder
        are flushed to the disk). If not, a power cut may leave a damaged file.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    write_file(path, (magic + hashlib.sha256(payload).digest(), payload), durable=durable)


def write_file(path: Path, parts: Iterable[bytes | bytearray], *, durable: bool) -> None:
    """Write a file from its parts as `write_checksummed` does, without magic line and checksum.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb", opener=open_private) as file:
        for part in parts:
            file.write(part)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        _flush_folder(path.parent)


def append(
    path: Path, descriptor: int, content: bytes, *, length: int, torn: int = 0, durable: bool
) -> None:
    """Write at the end of a file that this process has locked; if that fails, it stays as it was.

    A process that is killed may leave a part at the end.

    Parameters
    ----------
    path, descriptor
        The file, and as what `locked_file` has opened it.
    content : bytes
        What comes to its end.
    length : int
        The bytes that it has.
    torn : int, default 0
        Bytes behind them that an earlier write has left, which are cut off.
    durable : bool
        Whether the content outlives a power cut as soon as this function returns.

    Raises
    ------
    OSError
        If it cannot be written.
    DamagedFileError
        If it has another length or name: somebody else writes to it, or has removed it.
    """
    if os.fstat(descriptor).st_size != length + torn or not _is(path, descriptor):
        raise DamagedFileError("was changed by somebody who does not hold its lock")
    try:
        if torn:
            os.ftruncate(descriptor, length)
        rest, place = memoryview(content), length
        while rest:
            written = os.pwrite(descriptor, rest, place)
            rest, place = rest[written:], place + written
        if durable:
            os.fsync(descriptor)
            if length == 0:
                _flush_folder(path.parent)
    except OSError:
        os.ftruncate(descriptor, length)
        raise


def write_all(file: IO[bytes], content: bytes | memoryview) -> None:
    """Write bytes to an unbuffered file, which may take a part of them at a time.

    Raises
    ------
    OSError
        If not all can be written; a part may have been.
    """
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def read_checksummed(path: Path, magic: bytes) -> bytes:
    r"""Return the payload of a file that `write_checksummed` wrote.

    Raises
    ------
    OSError
        If the file is not there or cannot be read.
    DamagedFileError
        If it begins otherwise or its checksum does not fit.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checksummed(Path(folder, "file"), b"example\n", b"content", durable=False)
    ...     read_checksummed(Path(folder, "file"), b"example\n")
    b'content'
    """
    content = path.read_bytes()
    if not content.startswith(magic):
        raise DamagedFileError(f"does not begin with {magic.decode('ascii').rstrip()!r}")
    start = len(magic) + _DIGEST_SIZE
    digest, payload = content[len(magic) : start], content[start:]
    if hashlib.sha256(payload).digest() != digest:
        raise DamagedFileError("is damaged: its checksum does not fit its content")
    return payload


def read_toml(what: str, path: str | Path, build: Callable[[dict[str, Any]], Built]) -> Built:
    """Return what is built of the values of a TOML file.

    Parameters
    ----------
    what : str
        What the file has, as an error calls it.
    path : str or Path
        The file.
    build : callable
        Takes the values of the file.

    Raises
    ------
    InvalidParameterError
        If the file cannot be read or is no TOML, or as `build`. The message names the file.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise InvalidParameterError(what, str(path), allowed) from error
    except ValueError as error:  # no UTF-8, or no TOML
        raise InvalidParameterError(what, str(path), f"a TOML file ({error})") from error
    try:
        return build(values)
    except InvalidParameterError as error:
        parameter = f"{what} {path}: {error.parameter}"
        raise InvalidParameterError(parameter, error.value, error.allowed) from None


def write_text(path: Path, text: str, *, mode: int | None = None, durable: bool = True) -> None:
    """Write a text file atomically: a reader sees the old text or the new one, never a part.

    Several processes may do so at once; the last one counts.

    Parameters
    ----------
    path : Path
        The file.
    text : str
        Its new content.
    mode : int, optional
        Its rights, such as `PRIVATE`; by default what the process's umask says.
    durable : bool, default True
        Whether the text is flushed to the disk before it takes the old one's place. If not, a power
        cut may leave neither.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            if mode is not None:  # before the text is in it
                beside.chmod(mode)
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def exclusive_lock(path: Path, *, timeout: float) -> Iterator[int]:
    """Hold a lock between processes and threads; it is freed when its holder ends.

    Parameters
    ----------
    path : Path
        The lock file, which is created and stays. Not a file that is replaced: a lock on the old
        one guards nothing (`locked_file`).
    timeout : float
        Seconds to wait for another holder.

    Yields
    ------
    int
        The file's descriptor.

    Raises
    ------
    TimeoutError
        If another one holds it all the while.
    OSError
        If the lock file cannot be opened, or the platform has no ``fcntl``.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this platform has no fcntl to lock files with")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        _acquire(descriptor, timeout)
        try:
            yield descriptor
        finally:
            # Not by closing alone: a process that was forked meanwhile has a copy.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def locked_file(path: Path, *, timeout: float) -> Iterator[int]:
    """Open a file, which is created, and hold a lock on it between processes and threads.

    Where its holder leaves it empty, it is removed. Whoever replaces it holds this lock until then:
    the new file has another one.

    Parameters
    ----------
    path : Path
        The file. Its folder is there.
    timeout : float
        As of `exclusive_lock`.

    Yields
    ------
    int
        Its descriptor, for reading and writing.

    Raises
    ------
    TimeoutError, OSError
        As `exclusive_lock`.
    """
    end = time.monotonic() + timeout
    while True:
        with exclusive_lock(path, timeout=max(0.0, end - time.monotonic())) as descriptor:
            # Its last holder may have removed or replaced it: what has that name now counts.
            if not _is(path, descriptor):
                continue
            try:
                yield descriptor
            finally:
                if os.fstat(descriptor).st_size == 0 and _is(path, descriptor):
                    path.unlink()
            return


def _is(path: Path, descriptor: int) -> bool:
    """Tell whether a path is the name of an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _acquire(descriptor: int, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                reason = f"it is locked by another process (waited {timeout:g} s)"
                raise TimeoutError(errno.ETIMEDOUT, reason) from None
        time.sleep(_POLL)


def open_private(path: str, flags: int) -> int:
    """Open a file, as an opener of `open`, that only its owner may read and write."""
    return os.open(path, flags, PRIVATE)


def _flush_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows has no flush of a folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
