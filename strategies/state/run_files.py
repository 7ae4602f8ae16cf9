"""Reads the files of a run folder."""

from pathlib import Path

from flwr_privacy.errors import CheckpointError

__all__ = ["content_of"]


def content_of(path: Path) -> bytes | None:
    """Return the content of a file; None if it is not there.

    Raises
    ------
    CheckpointError
        If it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
