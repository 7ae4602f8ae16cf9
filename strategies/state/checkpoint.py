"""Saves and loads checkpoints: a state in one file; a damaged file is refused."""

from pathlib import Path
from typing import Any

from flwr_privacy.errors import CheckpointError
from flwr_privacy.wire.documents import dumps, loads
from flwr_privacy.wire.files import DamagedFileError, read_checksummed, write_checksummed

__all__ = ["load", "save"]

_MAGIC = b"flwr-privacy checkpoint 11\n"


def save(path: Path, state: dict[str, Any], *, durable: bool = True) -> None:
    """Write a state; a crash at any moment leaves the old file or the new one.

    Without `durable` a power cut may leave a damaged one.

    Raises
    ------
    TypeError
        If the state holds something that `flwr_privacy.wire.documents` does not.
    """
    write_checksummed(path, _MAGIC, dumps(state), durable=durable)


def load(path: Path) -> dict[str, Any]:
    """Read a state.

    Raises
    ------
    CheckpointError
        If the file is missing or damaged, or cannot be read.
    """
    try:
        return loads(read_checksummed(path, _MAGIC))
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    except DamagedFileError as error:
        raise CheckpointError(f"the checkpoint {path} {error}") from error
    except OSError as error:
        text = f"the checkpoint {path} cannot be read: {error.strerror}"
        raise CheckpointError(text) from error
