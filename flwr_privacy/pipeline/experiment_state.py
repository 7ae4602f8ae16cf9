"""Opens what a client remembers of an experiment, in a file of its node under a lock.

A server that asks twice, at once or after a restart, meets the same memory.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr_privacy.wire.documents import dumps, loads
from flwr_privacy.wire.files import (
    DamagedFileError,
    exclusive_lock,
    node_file,
    read_checksummed,
    write_checksummed,
)

from .node_limits import check_disk
from .node_store import NodeStore

__all__ = ["experiment_named_in", "hashed", "locked_state"]

_NAME = "experiment-id"  # in every state: names of files have digests only
_LONGEST_MAGIC = 64  # bytes
_LOCK_TIMEOUT = 60.0  # seconds; what is computed for a large model or batch takes some


def hashed(name: str) -> str:
    """Return a safe part of a file name for a name that comes from a server."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


@contextmanager
def locked_state(
    store: NodeStore, path: Path, magic: bytes, *, lock: Path, experiment_id: str
) -> Iterator[dict[str, Any]]:
    """Open a state under a lock; save it at the end, unless an error came.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    path : Path
        The file, in a folder of `store` or in a folder of such a folder.
    magic : bytes
        What the file begins with.
    lock : Path
        The lock file.
    experiment_id : str
        The experiment, which the file names for the node's operator.

    Raises
    ------
    LedgerError
        If a file cannot be used.
    DeclinedError
        If the node's policy has ``max_disk``, and there is no room for a new experiment.
    """
    if not path.exists():  # a server names as many experiments as it likes
        check_disk(store)
    with node_file(path, "what the client remembers of the experiment"):
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        with exclusive_lock(lock, timeout=_LOCK_TIMEOUT):
            state = loads(read_checksummed(path, magic)) if path.exists() else {}
            yield state
            named = {**state, _NAME: experiment_id}
            write_checksummed(path, magic, dumps(named), durable=store.durable)


def experiment_named_in(path: Path) -> str:
    """Return the experiment that a state file of any kind names.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or is damaged or no such file.
    """
    with path.open("rb") as file:
        magic = file.readline(_LONGEST_MAGIC)
    try:
        return str(loads(read_checksummed(path, magic))[_NAME])
    except (DamagedFileError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no state of an experiment") from error
