"""The two secrets of a client in a secure sum: what is derived from them, and what commits to them.

For a sum every client deals the private key of its pairwise masks and the seed of a mask of its
own. Both ends of the protocol derive seeds, commitments and digests here, so they agree.
"""

import hashlib
from dataclasses import dataclass

from flwr_privacy.wire.channel import KeyPair, canonical, derive

__all__ = [
    "DIGEST_BYTES",
    "KEY",
    "SECRET_BYTES",
    "SEED",
    "Derivation",
    "asked_so_far",
    "halves",
    "words",
]

KEY, SEED = "key", "seed"
"""The two secrets of a client."""

SECRET_BYTES = 32
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Derivation:
    """Derives the seeds and hashes of one session, the same for all of its parties.

    Parameters
    ----------
    experiment_id, session : str
        What they are bound to: the experiment, and the name of the session.
    """

    experiment_id: str
    session: str

    def pair_seed(
        self, own: KeyPair, peer_key: bytes, pair: tuple[str, str], asked: bytes = b""
    ) -> bytes:
        """Return the seed of the mask that two clients share; the same for both.

        It binds the two names, because a key that goes by two of them must have two masks, which do
        not cancel; and what the client was asked.
        """
        context = (self.experiment_id, self.session, sorted(pair), asked)
        return own.agree(peer_key, "pairwise mask", *context)

    def self_seed(self, seed: bytes) -> bytes:
        """Return the seed of a client's own mask."""
        return derive(seed, "own mask", self.experiment_id, self.session)

    def commitment(self, client_id: str, seed: bytes) -> bytes:
        """Return a hash that commits a client to its seed, checked when the seed is opened."""
        parts = canonical("seed", self.experiment_id, self.session, client_id, seed)
        return hashlib.sha256(parts).digest()

    def share_digest(self, dealer: str, holder: int, kind: str, share: bytes) -> bytes:
        """Return a hash of a share, checked when the share is revealed."""
        context = (self.experiment_id, self.session, dealer, holder, kind)
        return hashlib.sha256(canonical("share", *context, share)).digest()[:DIGEST_BYTES]


def words(server_round: int, step: int) -> str:
    """Return the name of a sum for log lines and errors."""
    return f"step {step} of round {server_round}" if step else f"round {server_round}"


def halves(share: bytes) -> tuple[bytes, bytes]:
    """Split a share into that of the key and that of the seed."""
    return share[:SECRET_BYTES], share[SECRET_BYTES:]


def asked_so_far(before: bytes, asked: bytes) -> bytes:
    """Hash all requests of a round's steps up to one request."""
    return hashlib.sha256(before + asked).digest()
