"""Lists the files of a node's state folder: of which client, of which kind, of which experiment.

The names of files have digests of experiment ids, because ids come from a server. An id is known
where a ledger, a reply or a client's memory of it has it, or where the operator gives it.
"""

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flwr_privacy.clients.vertical.sealed_shares import key_name
from flwr_privacy.errors import InvalidParameterError, LedgerError
from flwr_privacy.m2fdp.terms import SCHEME as M2FDP
from flwr_privacy.pipeline.experiment_state import experiment_named_in, hashed
from flwr_privacy.pipeline.reply_cache import digest
from flwr_privacy.pipeline.step_store import read_state
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.wire.files import DamagedFileError

__all__ = [
    "ALL_CLIENTS",
    "KINDS",
    "LEFTOVER",
    "NEVER",
    "NOW",
    "OVER",
    "StateFile",
    "known_experiments",
    "names_of",
    "state_files",
]

NEVER, OVER, NOW = "never", "when its experiment is over", "now"
LEDGER, IDENTITY, NOTES, REPLIES, SETUPS, SUMS, KEYS, STEPS, LOCKS, LEFTOVER, OTHER = (
    *("ledger", "identity", "notes", "replies", "setups", "secure sums", "keys", "steps"),
    *("locks", "leftover", "other"),
)
KINDS = {
    LEDGER: (NEVER, "it accounts for every release"),
    IDENTITY: (NEVER, "servers know the client by this key"),
    NOTES: (NEVER, "without its note the node would answer a stopped experiment again"),
    REPLIES: (OVER, "asked again without its reply, a node is charged a second time"),
    SETUPS: (OVER, "an experiment gets them once"),
    SUMS: (OVER, "they say which rounds were answered and opened"),
    KEYS: (OVER, "what was sealed with them cannot be opened any more"),
    STEPS: (OVER, "without them the data are coded again; they have shares of everybody's data"),
    LOCKS: (NEVER, "a process may hold one"),
    LEFTOVER: (NOW, "a process was killed while it wrote"),
    OTHER: (NEVER, "it is nothing of this library"),
}
"""When a kind of file may be deleted, and what it is for."""

ALL_CLIENTS = "(all)"
"""Owner of replies that simulated clients keep together."""

_FOLDERS = {"replies": REPLIES, "setups": SETUPS, "notes": NOTES, "secure-sum": SUMS}
_DIGEST = re.compile(r"([0-9a-f]{32})(?=[-.]|$)")
_LABEL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """A file of a state folder.

    Parameters
    ----------
    path : Path
        The file.
    client : str
        Whose it is; of a ledger the data set.
    kind : str
        One of `KINDS`.
    name : str
        The digest in its name, which stands for its experiment; "" without one.
    size : int
        Its bytes, as ``max_disk`` of a policy counts them.
    modified : datetime
        When it was written last.
    """

    path: Path
    client: str
    kind: str
    name: str
    size: int
    modified: datetime


def state_files(folder: Path) -> list[StateFile]:
    """Return all files of a state folder, in the order of their names.

    Raises
    ------
    InvalidParameterError
        If there is no such folder, or this user may not search it.
    """
    try:
        if folder.is_dir():
            return list(_found(folder))
    except OSError as error:
        allowed = f"a node's state folder that this user may search ({error.strerror})"
        raise InvalidParameterError("--state", str(folder), allowed) from error
    raise InvalidParameterError("--state", str(folder), "the folder of a node's state")


def _found(folder: Path) -> Iterator[StateFile]:
    for path in sorted(folder.rglob("*")):
        try:
            status = path.lstat()
        except FileNotFoundError:  # a node that runs has removed it
            continue
        if stat.S_ISDIR(status.st_mode):
            continue
        parts = path.relative_to(folder).parts
        client, kind, name = _place(parts)
        if not stat.S_ISREG(status.st_mode) and kind != LEDGER:
            kind, name = OTHER, ""
        yield StateFile(
            path=path,
            client=client,
            kind=kind,
            name=name,
            size=status.st_size,
            modified=datetime.fromtimestamp(status.st_mtime, UTC),
        )


def _place(parts: tuple[str, ...]) -> tuple[str, str, str]:
    """Return client, kind and experiment of a file below the state folder."""
    file = parts[-1]
    if len(parts) == 1:
        # A simulated client's ledger may have the name of its data set before that of the client.
        client, _, ending = file.rpartition("@")[2].rpartition(".")
        owner = client.removesuffix(".ledger").removesuffix(".identity")
        if ending == "lock":
            return owner, LOCKS, ""
        if ending == "new" and owner != client:
            return owner, LEFTOVER, ""
        kind = {"ledger": LEDGER, "identity": IDENTITY}.get(ending, OTHER)
        return ("-" if kind == OTHER else client), kind, ""
    client, _, ending = parts[0].rpartition(".")
    kind = _FOLDERS.get(ending, STEPS if len(parts) == 3 else OTHER)
    client = client or ALL_CLIENTS
    match = _DIGEST.match(parts[1])
    if match is None:
        return client, LOCKS if file == "lock" and kind != OTHER else OTHER, ""
    if file.endswith(".new"):
        return client, LEFTOVER, match[1]
    if file == "lock" or file.endswith(".lock"):
        return client, STEPS if kind == STEPS else LOCKS, match[1]  # a step's goes with its folder
    if kind == SUMS and file.endswith(".key"):
        kind = KEYS
    return client, kind, match[1]


def known_experiments(files: Iterable[StateFile]) -> list[str]:
    """Return the ids of the experiments that ledgers, replies and clients' states name.

    A ledger that cannot be read names none: `ledger check` says so.
    """
    found: dict[str, None] = {}
    for file in files:
        if file.kind == LEDGER:
            try:
                experiments = Ledger(file.path, data_set=file.path.stem).view().experiments()
            except LedgerError:
                continue
            found |= dict.fromkeys(experiments)
        elif file.kind in (REPLIES, SETUPS) and file.client != ALL_CLIENTS:
            found |= dict.fromkeys(_named_by(file))
        elif file.kind == SUMS or (file.kind == STEPS and file.path.name == "state"):
            found |= dict.fromkeys(_remembered_by(file))
    return list(found)


def _named_by(file: StateFile) -> Iterator[str]:
    """Yield the experiment that a reply is about: its label stands behind magic and checksum."""
    try:
        with file.path.open("rb") as opened:
            opened.readline()
            label = opened.read(_LABEL_BYTES)[hashlib.sha256().digest_size :]
        name = json.loads(label.partition(b"\n")[0])[0]
    except (OSError, ValueError, LookupError, TypeError):  # gone, or damaged: it names nothing
        return
    if isinstance(name, str) and digest(name) == file.name:
        yield name


def _remembered_by(file: StateFile) -> Iterator[str]:
    """Yield the experiment of what a client remembers of secure sums, or of a protocol's steps."""
    try:
        name = experiment_named_in(file.path)
    except (OSError, ValueError):  # gone, or damaged: it names nothing
        return
    if hashed(name) == file.name:
        yield name


def names_of(experiment_id: str, files: Iterable[StateFile]) -> set[str]:
    """Return the digests that stand for an experiment in the names of a folder's files.

    Raises
    ------
    LedgerError
        If what a client remembers of it cannot be read.
    """
    plain = hashed(experiment_id)
    names = {digest(experiment_id), plain, hashed(f"{M2FDP} {experiment_id}")}
    states = [file.path for file in files if (file.kind, file.name) == (STEPS, plain)]
    for steps in [path for path in states if path.name == "state"]:
        scheme = steps.parent.parent.name.rpartition(".")[2]
        try:
            generation = read_state(steps.parent).get("generation")
        except (OSError, DamagedFileError) as error:
            raise LedgerError(f"{steps} cannot be read: {error}") from error
        if isinstance(generation, str):
            names.add(hashed(f"{scheme} {key_name(experiment_id, generation)}"))
    return names
