"""Stores a client's key pair for each experiment in a file that never leaves its node."""

from pathlib import Path
from typing import Any

from flwr_privacy.errors import ProtocolError
from flwr_privacy.wire.channel import Channel, KeyPair, Part
from flwr_privacy.wire.files import exclusive_lock, node_file, read_checksummed, write_checksummed

from .experiment_state import hashed
from .node_limits import check_disk
from .node_store import NodeStore

__all__ = [
    "channel_to",
    "check_signature",
    "forget_pair",
    "introduction",
    "own_pair",
    "signature_of",
]

_MAGIC = b"flwr-privacy experiment key\n"
_LOCK_TIMEOUT = 10.0  # seconds


def own_pair(store: NodeStore, scheme: str, experiment_id: str) -> KeyPair:
    """Return the client's key pair of an experiment; make it the first time.

    Raises
    ------
    LedgerError
        If its file cannot be used.
    DeclinedError
        If the node's policy has ``max_disk``, and there is no room for a new one.
    """
    path = _path(store, scheme, experiment_id)
    if not path.exists():  # a server names as many experiments as it likes
        check_disk(store)
    with node_file(path, "the node's key of the experiment"):
        store.sessions.mkdir(mode=0o700, exist_ok=True)
        with exclusive_lock(path.with_suffix(".lock"), timeout=_LOCK_TIMEOUT):
            if path.exists():
                return KeyPair.of(read_checksummed(path, _MAGIC))
            pair = KeyPair()
            write_checksummed(path, _MAGIC, pair.private, durable=store.durable)
            return pair


def forget_pair(store: NodeStore, scheme: str, experiment_id: str) -> None:
    """Delete the client's key pair of an experiment: this node can open nothing sealed with it."""
    _path(store, scheme, experiment_id).unlink(missing_ok=True)


def signature_of(store: NodeStore, scheme: str, experiment_id: str, public: bytes) -> bytes:
    """Return the signature of a key by the client's long-term identity; b"" without one."""
    if store.identity is None:
        return b""
    return store.identity.sign(f"{scheme} key", experiment_id, store.client_id, public)


def introduction(store: NodeStore, scheme: str, experiment_id: str) -> dict[str, bytes]:
    """Return the client's public key and its signature; empty without a long-term identity."""
    if store.identity is None:
        return {}
    public = own_pair(store, scheme, experiment_id).public
    return {"key": public, "signature": signature_of(store, scheme, experiment_id, public)}


def channel_to(
    store: NodeStore, scheme: str, experiment_id: str, peer: str, public: Any, signature: Any
) -> Channel:
    """Return the channel to a peer whose identity this node has pinned.

    Parameters
    ----------
    store : NodeStore
        What the node keeps.
    scheme, experiment_id : str
        What the keys are for.
    peer : str
        Who is at the other end.
    public, signature : bytes
        What the server says is the peer's key, and its signature.

    Raises
    ------
    ProtocolError
        As `check_signature`.
    LedgerError, DeclinedError
        As `own_pair`.
    """
    check_signature(store, scheme, experiment_id, peer, public, signature)
    context: tuple[Part, ...] = (scheme, 1, experiment_id)
    pair = own_pair(store, scheme, experiment_id)
    return Channel(pair, public, me=store.client_id, peer=peer, context=context)


def check_signature(
    store: NodeStore, scheme: str, experiment_id: str, peer: str, public: Any, signature: Any
) -> None:
    """Check that a key is that of a peer whose identity this node has pinned.

    Raises
    ------
    ProtocolError
        If the node pins nobody, or not this peer, or the signature is not the peer's.
    """
    if store.pins is None:
        raise ProtocolError(
            f"'{peer}' may be anybody: this node pins no keys (privacy-pins in its configuration)"
        )
    if not isinstance(public, bytes):
        raise ProtocolError(f"no public key of '{peer}'")
    store.pins.verify(peer, signature, f"{scheme} key", experiment_id, peer, public)


def _path(store: NodeStore, scheme: str, experiment_id: str) -> Path:
    return store.sessions / f"{hashed(f'{scheme} {experiment_id}')}.key"
