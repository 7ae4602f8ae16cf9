"""Gives a protocol step its experiment's state and files, keys and randomness.

Everything lies in a folder of the node's own, one for each client and experiment, for its owner's
eyes only. A state is written when a message was answered, never when it was refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.channel import KeyPair
from flwr_privacy.wire.documents import loads
from flwr_privacy.wire.files import read_checksummed

from .experiment_keys import check_signature, forget_pair, own_pair, signature_of
from .experiment_state import hashed, locked_state
from .node_limits import check_disk
from .node_store import NodeStore

__all__ = ["StepStore", "opened", "read_state"]

_MAGIC = b"flwr-privacy vertical state\n"


class StepStore:
    """The part of a node store that a protocol step may use: neither ledger nor policy.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    scheme : str
        Name of the scheme.
    question : Question
        Name of the question.

    Attributes
    ----------
    client_id, experiment_id : str
        Whose step it is, and of which experiment.
    server_round : int
        The round of the question.
    folder : Path
        Where the scheme's files of the experiment lie.
    durable : bool
        Whether what must not be lost outlives a power cut.
    state : dict
        What the client remembers; what a step changes in it is kept once it has answered.
    """

    def __init__(self, store: NodeStore, scheme: str, question: Question) -> None:
        self._store, self._scheme, self._question = store, scheme, question
        self.client_id = store.client_id
        self.experiment_id = question.experiment_id
        self.server_round = question.server_round
        self.durable = store.durable
        name = hashed(question.experiment_id)
        self.folder = store.folder / f"{store.client_id}.{scheme}" / name
        self.state: dict[str, Any] = {}

    def random(self, purpose: str) -> SecureRandom:
        """Return a random source for this answer and one purpose."""
        return self._store.random(self._question, purpose)

    def check_room(self, size: int) -> None:
        """Decline a file, whose size the server chooses, if the client's disk space is used up.

        Raises
        ------
        DeclinedError
            If the node's policy has ``max_disk``, and the file would pass it.
        """
        check_disk(self._store, size)

    def pair(self, name: str) -> KeyPair:
        """Return the client's key pair of a name; make it the first time."""
        return own_pair(self._store, self._scheme, name)

    def forget_pair(self, name: str) -> None:
        """Delete the client's key pair of a name: this node can open nothing sealed with it."""
        forget_pair(self._store, self._scheme, name)

    def signature(self, name: str, public: bytes) -> bytes:
        """Return the signature of a key by the client's long-term identity; b"" without one."""
        return signature_of(self._store, self._scheme, name, public)

    def check_peer(self, name: str, peer: str, public: Any, signature: Any) -> None:
        """Check that a key is that of a peer, where the node pins the peers' identities.

        Raises
        ------
        ProtocolError
            If it is not the peer's, or the node pins others and not this one.
        """
        if self._store.pins is not None:
            check_signature(self._store, self._scheme, name, peer, public, signature)


def read_state(folder: Path) -> dict[str, Any]:
    """Return what a client remembers of an experiment in its folder.

    Raises
    ------
    OSError, DamagedFileError
        If the file cannot be read, or is damaged.
    """
    state: dict[str, Any] = loads(read_checksummed(folder / "state", _MAGIC))
    return state


@contextmanager
def opened(store: NodeStore, scheme: str, question: Question) -> Iterator[StepStore]:
    """Open the store of a step under a lock; save its state at the end, unless an error came.

    Raises
    ------
    LedgerError
        If a file cannot be used.
    DeclinedError
        If the node's policy has ``max_disk``, and there is no room for a new experiment.
    """
    lent = StepStore(store, scheme, question)
    path, lock = lent.folder / "state", lent.folder / "lock"
    named = question.experiment_id
    with locked_state(store, path, _MAGIC, lock=lock, experiment_id=named) as lent.state:
        yield lent
