"""Keys of a trusted zone: a node's own pair, and the channels to its neighbours in the tree.

A node has one X25519 pair per experiment, in a file of its own, and signs the public half with its
long-term identity. A neighbour is believed by the identity that this node has pinned, never by what
a server says.
"""

import hashlib
from typing import Any

from flwr_privacy.channel import Channel, KeyPair, Part
from flwr_privacy.errors import LedgerError, ProtocolError
from flwr_privacy.files import DamagedFileError, exclusive_lock, read_sealed, write_sealed

from .custody import Custody, is_simulated

__all__ = ["channel_to", "introduction", "own_pair"]

_MAGIC = b"flwr-privacy zone key\n"
_LOCK_TIMEOUT = 10.0  # seconds
_PURPOSE = "m2fdp key"


def own_pair(custody: Custody, experiment_id: str) -> KeyPair:
    """Return the node's key pair of an experiment; a new one the first time.

    Raises
    ------
    LedgerError
        If its file cannot be used.
    """
    name = hashlib.sha256(f"zone {experiment_id}".encode()).hexdigest()[:32]
    path = custody.sessions / f"{name}.key"
    try:
        custody.sessions.mkdir(mode=0o700, exist_ok=True)
        with exclusive_lock(path.with_suffix(".lock"), timeout=_LOCK_TIMEOUT):
            if path.exists():
                return KeyPair.of(read_sealed(path, _MAGIC))
            pair = KeyPair()
            write_sealed(path, _MAGIC, pair.private, durable=not is_simulated())
            return pair
    except DamagedFileError as error:
        raise LedgerError(f"the node's key of the experiment, {path}, {error}") from error
    except OSError as error:
        raise LedgerError(f"{path} cannot be used: {error.strerror}") from error


def introduction(custody: Custody, experiment_id: str) -> dict[str, Any]:
    """Return the node's public key and its signature; nothing without a long-term identity."""
    if custody.identity is None:
        return {}
    public = own_pair(custody, experiment_id).public
    signature = custody.identity.sign(_PURPOSE, experiment_id, custody.client_id, public)
    return {"key": public, "signature": signature}


def channel_to(
    custody: Custody, experiment_id: str, peer: str, public: Any, signature: Any
) -> Channel:
    """Return the channel to a neighbour whose identity this node has pinned.

    Parameters
    ----------
    custody : Custody
        What the node keeps.
    experiment_id : str
        The experiment.
    peer : str
        The neighbour.
    public, signature : bytes
        What is said to be its key, and its signature.

    Raises
    ------
    ProtocolError
        If the node pins nobody, or not this neighbour, or the signature is not the neighbour's.
    """
    if custody.pins is None:
        raise ProtocolError(
            f"'{peer}' may be anybody: this node pins no keys (privacy-pins in its configuration)"
        )
    if not isinstance(public, bytes):
        raise ProtocolError(f"no public key of '{peer}'")
    custody.pins.verify(peer, signature, _PURPOSE, experiment_id, peer, public)
    context: tuple[Part, ...] = ("m2fdp", 1, experiment_id)
    pair = own_pair(custody, experiment_id)
    return Channel(pair, public, me=custody.client_id, peer=peer, context=context)
