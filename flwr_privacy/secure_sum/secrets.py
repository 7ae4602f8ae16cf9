"""The two secrets of a client in a secure sum: what is derived from them, and what commits to them.

For a sum every client deals the private key of its pairwise masks and the seed of a mask of its
own. Both ends of the protocol derive seeds, commitments and digests here, so they agree.
"""

import hashlib

from flwr_privacy.wire.channel import KeyPair, canonical, derive

__all__ = [
    "DIGEST_BYTES",
    "KEY",
    "SECRET_BYTES",
    "SEED",
    "asked_so_far",
    "commitment",
    "halves",
    "pair_seed",
    "self_seed",
    "share_digest",
    "words",
]

KEY, SEED = "key", "seed"
"""The two secrets of a client."""

SECRET_BYTES = 32
DIGEST_BYTES = 16


def words(server_round: int, step: int) -> str:
    """Return the name of a sum for log lines and errors."""
    return f"step {step} of round {server_round}" if step else f"round {server_round}"


def halves(share: bytes) -> tuple[bytes, bytes]:
    """Split a share into that of the key and that of the seed."""
    return share[:SECRET_BYTES], share[SECRET_BYTES:]


def pair_seed(
    own: KeyPair,
    peer_key: bytes,
    experiment_id: str,
    session: str,
    pair: tuple[str, str],
    asked: bytes = b"",
) -> bytes:
    """Derive the seed of the mask that two clients share in a session; the same for both.

    It binds the two names, because a key that goes by two of them must have two masks, which do not
    cancel; and what the client was asked.
    """
    return own.agree(peer_key, "pairwise mask", experiment_id, session, sorted(pair), asked)


def asked_so_far(before: bytes, asked: bytes) -> bytes:
    """Hash all requests of a round's steps up to one request."""
    return hashlib.sha256(before + asked).digest()


def self_seed(experiment_id: str, session: str, seed: bytes) -> bytes:
    """Derive the seed of a client's own mask."""
    return derive(seed, "own mask", experiment_id, session)


def commitment(experiment_id: str, session: str, client_id: str, seed: bytes) -> bytes:
    """Return a hash that commits a client to its seed, checked when the seed is opened."""
    return hashlib.sha256(canonical("seed", experiment_id, session, client_id, seed)).digest()


def share_digest(
    experiment_id: str, session: str, dealer: str, holder: int, kind: str, share: bytes
) -> bytes:
    """Return a hash of a share, checked when the share is revealed."""
    encoded = canonical("share", experiment_id, session, dealer, holder, kind, share)
    return hashlib.sha256(encoded).digest()[:DIGEST_BYTES]
