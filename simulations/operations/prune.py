"""Deletes from a node's state folder what no privacy accounting needs.

An experiment is over when the node's operator says so. The node is told first: it answers nothing
more of it (the note that a stopped experiment has), so what is deleted cannot be asked for again.
Ledgers and notes are never deleted.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flwr_privacy.errors import InvalidParameterError, LedgerError
from flwr_privacy.pipeline.node_store import NodeStore
from flwr_privacy.pipeline.reply_cache import ReplyCache
from flwr_privacy.pipeline.users_code import stop_answering
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.wire.files import exclusive_lock

from .state_files import (
    ALL_CLIENTS,
    KEYS,
    KINDS,
    LEDGER,
    NOW,
    OVER,
    STEPS,
    SUMS,
    StateFile,
    known_experiments,
    names_of,
    state_files,
)

__all__ = ["prune", "removable"]

LEFT_ALONE = timedelta(days=1)
"""For so long a file that is being written is no leftover."""

LOCK_TIMEOUT = 10.0  # seconds


def removable(folder: Path, over: Sequence[str] = ()) -> list[StateFile]:
    """Return the files of a state folder that may be deleted.

    Parameters
    ----------
    folder : Path
        What a node names as ``privacy-state``.
    over : sequence of str
        Experiments that are over: nobody will go on with them.

    Raises
    ------
    InvalidParameterError
        If there is no such folder, or it has nothing of an experiment.
    LedgerError
        If what a client remembers of one cannot be read.
    """
    files = state_files(folder)
    names = set[str]()
    for experiment in over:
        own = names_of(experiment, files)
        if not any(file.name in own for file in files):
            known = ", ".join(known_experiments(files)) or "none is known"
            allowed = f"an experiment that has files here: {known}"
            raise InvalidParameterError("--over", experiment, allowed)
        names |= own
    yesterday = datetime.now(UTC) - LEFT_ALONE
    return [file for file in files if _may_go(file, names, yesterday)]


def _may_go(file: StateFile, names: set[str], yesterday: datetime) -> bool:
    when, _ = KINDS[file.kind]
    return (when == NOW and file.modified < yesterday) or (when == OVER and file.name in names)


def prune(folder: Path, over: Sequence[str] = ()) -> list[StateFile]:
    """Delete the files that `removable` names, and return them.

    The clients that have files of an experiment answer nothing more of it from then on.

    Raises
    ------
    InvalidParameterError
        As `removable`.
    LedgerError
        As `removable`, or if a file is in use or cannot be deleted.
    """
    files = removable(folder, over)
    if os.geteuid() != (owner := folder.stat().st_uid):
        # The node could not read notes of another user.
        raise InvalidParameterError("user", os.geteuid(), f"the owner of {folder}: user {owner}")
    for experiment in over:
        for client in _clients(folder, experiment):
            stop_answering(_store(folder, client), experiment)
    for file in files:
        try:
            with _held(file):
                # As a whole: a state without its shares would be a client that has lost its data.
                if file.kind == STEPS:
                    shutil.rmtree(file.path.parent)
                else:
                    file.path.unlink()
        except FileNotFoundError:  # gone with its folder, or by the node's own hand
            continue
        except OSError as error:
            raise LedgerError(f"{file.path} cannot be deleted: {error.strerror}") from error
    return files


def _store(folder: Path, client: str) -> NodeStore:
    return NodeStore(
        policy=Policy(),
        client_id=client,
        simulated=False,
        ledger=Ledger(folder / f"{client}.ledger", data_set=client),
        replies=ReplyCache(folder / f"{client}.replies"),
        setups=ReplyCache(folder / f"{client}.setups"),
        folder=folder,
        sessions=folder / f"{client}.secure-sum",
        identity=None,
        pins=None,
    )


def _clients(folder: Path, experiment: str) -> list[str]:
    """Return the clients that have files of an experiment; of common replies all clients."""
    files = state_files(folder)
    names = names_of(experiment, files)
    owners = {file.client for file in files if file.name in names}
    if ALL_CLIENTS in owners:
        owners |= {file.client for file in files if file.kind == LEDGER}
    return sorted(owners - {ALL_CLIENTS})


@contextmanager
def _held(file: StateFile) -> Iterator[None]:
    """Hold the lock under which the node writes a file, if it has one."""
    path = file.path
    lock = path.with_suffix(".lock") if file.kind in (SUMS, KEYS) else path.with_name("lock")
    with exclusive_lock(lock, timeout=LOCK_TIMEOUT) if lock.exists() else nullcontext():
        yield
