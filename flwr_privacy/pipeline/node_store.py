"""The persistent state of one client on its node: ledger, reply cache, policy, keys.

All of it is the operator's: nothing in a message or in a run's configuration can change it.
"""

import glob
import logging
import stat
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.files import node_file, read_checksummed, write_checksummed
from flwr_privacy.wire.pins import Identity, Pins

from .reply_cache import ReplyCache, digest
from .shared_reply_cache import Replies

if TYPE_CHECKING:  # a scheme without privacy opens no ledger
    from flwr_privacy.privacy.ledger import Ledger

__all__ = ["NodeRules", "NodeStore"]

logger = logging.getLogger("flwr.privacy")

_NOTE = b"flwr-privacy note\n"


@dataclass(frozen=True, kw_only=True)
class NodeRules:
    """The rules that a node's operator sets for one client.

    Parameters
    ----------
    policy : Policy
        What the operator allows.
    client_id : str
        Whose answers it is about.
    simulated : bool
        Whether the client's data are nobody's.
    has_policy_file : bool, default False
        Whether the operator has written a policy.
    insecure_seed : int, optional
        Seed of the noise, for tests.
    """

    policy: Policy
    client_id: str
    simulated: bool
    has_policy_file: bool = False
    insecure_seed: int | None = None

    def random(self, question: Question, purpose: str) -> SecureRandom:
        """Return a random source for one answer and one purpose, such as its noise."""
        if self.insecure_seed is None:
            return SecureRandom()
        logger.warning(
            "client %s draws its noise from a seed: nothing is protected", self.client_id
        )
        return SecureRandom.insecure(
            self.insecure_seed, purpose, self.client_id, *astuple(question)
        )


@dataclass(frozen=True, kw_only=True)
class NodeStore(NodeRules):
    """The persistent state of one client, with the rules of its operator.

    Parameters
    ----------
    ledger : Ledger
        Everything that was released about the client's data.
    replies : ReplyCache or CommonReplies
        The last noised replies; those of simulated clients lie together.
    setups : ReplyCache
        Replies that are given once for a whole experiment.
    folder : Path
        Where all of it lies.
    sessions : Path
        Folder for what the client remembers of secure sums.
    identity : Identity, optional
        Its long-term key, with which it signs others.
    pins : Pins, optional
        Long-term keys of the others.
    """

    ledger: "Ledger"
    replies: Replies
    setups: ReplyCache
    folder: Path
    sessions: Path
    identity: Identity | None
    pins: Pins | None

    @property
    def durable(self) -> bool:
        """Whether writes survive a power cut; False for simulated clients."""
        return not self.simulated

    @property
    def pinned(self) -> int | None:
        """Number of clients whose keys the node has pinned, its own included; None without pins."""
        return None if self.pins is None else len({*self.pins.clients, self.client_id})

    def note(self, experiment_id: str, name: str, value: str) -> None:
        """Keep a short text about an experiment, durably.

        Raises
        ------
        LedgerError
            If it cannot be written.
        """
        self.change_note(experiment_id, name, lambda _: value)

    def change_note(
        self, experiment_id: str, name: str, change: Callable[[str | None], str]
    ) -> None:
        """Replace a note by what a function makes of it, durably; what it raises leaves the note.

        Raises
        ------
        LedgerError
            If it cannot be read or written.
        """
        path = self.note_path(experiment_id, name)
        with node_file(path, "a note of the node"):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with self.ledger.held():  # another process may write the same note
                value = change(self.noted(experiment_id, name))
                write_checksummed(path, _NOTE, value.encode(), durable=self.durable)

    def noted(self, experiment_id: str, name: str) -> str | None:
        """Return the note about an experiment, or None.

        Raises
        ------
        LedgerError
            If it cannot be read.
        """
        path = self.note_path(experiment_id, name)
        with node_file(path, "a note of the node"):
            try:
                return read_checksummed(path, _NOTE).decode()
            except FileNotFoundError:
                return None

    def disk(self) -> int:
        """Return the size in bytes of the client's files: ledger, replies, sessions, notes."""
        own = [self.ledger.path, *self.folder.glob(f"{glob.escape(self.client_id)}.*")]
        files = (f for path in {*own} for f in ([path] if path.is_file() else path.rglob("*")))
        return sum(map(_size, files))

    def note_path(self, experiment_id: str, name: str) -> Path:
        """Return the file of a note about an experiment."""
        return self.folder / f"{self.client_id}.notes" / f"{digest(experiment_id)}.{name}"


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 for a folder, and for what another process has just removed."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
