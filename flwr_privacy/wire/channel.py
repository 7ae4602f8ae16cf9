"""Seals messages between two clients that can reach each other only through the server.

Both ends agree on a secret with X25519, derive keys from it with HKDF-SHA256, and seal messages
with AES-256-GCM. What a key or a message is for (the scheme, the run, both parties, the round) is
bound into it, so it is of no use for anything else. Who has which public key is the caller's
concern: see `flwr_privacy.wire.pins`.

Sources: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
CCS 2017 (section 4: key agreement and authenticated encryption between the users); RFC 7748
(X25519); RFC 5869 (HKDF); NIST SP 800-38D (GCM).
"""

import os
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flwr_privacy.errors import InvalidParameterError, ProtocolError

__all__ = ["Channel", "KeyPair", "Part", "canonical", "check_usable", "derive"]

Part: TypeAlias = "str | int | bytes | Sequence[Part]"
"""What `canonical` encodes: a text, an integer, bytes, or a list or tuple of them, nested."""

KEY_BYTES = 32
"""Length of every key here, public, private or derived."""

_NONCE_BYTES = 12
_TAG_BYTES = 16
_LENGTH_BYTES = 8


def canonical(*parts: Part) -> bytes:
    r"""Encode parts so that different parts never have the same encoding.

    Every part is a letter for its type (``s``, ``i``, ``b``, ``l``), the length of its content
    (8 bytes, big-endian) and the content: UTF-8, two's complement (big-endian, no longer than it
    must be), the bytes as they are, or the encodings of the elements. A list is equal to the tuple
    of the same elements.

    Raises
    ------
    TypeError
        If a part is of another type. A bool is refused too, because Python takes it for 0 or 1,
        and a float, because equal numbers may have different bits.

    Examples
    --------
    >>> canonical("ab", -1)
    b's\x00\x00\x00\x00\x00\x00\x00\x02abi\x00\x00\x00\x00\x00\x00\x00\x01\xff'
    >>> canonical("ab", "c") == canonical("a", "bc")
    False
    """
    return b"".join(map(_encode, parts))


def derive(secret: bytes, *context: Part) -> bytes:
    """Derive a 32-byte key from a secret, for one purpose.

    Parameters
    ----------
    secret : bytes
        Any length, but with 128 bits of entropy at least: not a password.
    *context : Part
        What the key is for.

    Returns
    -------
    bytes
        HKDF-SHA256 without salt, over ``canonical("flwr-privacy derived key", context)``. Keys for
        different contexts look independent to everyone without the secret.

    Examples
    --------
    >>> len(derive(bytes(32), "mask", "round", 1))
    32
    """
    return _hkdf(secret, canonical("flwr-privacy derived key", context))


class KeyPair:
    """An X25519 key pair; the constructor makes a new one, `of` takes a private key.

    It cannot be pickled or copied, and its repr shows the beginning of the public key only.

    Examples
    --------
    >>> ward, clinic = KeyPair(), KeyPair()
    >>> ward.agree(clinic.public, "run", 7) == clinic.agree(ward.public, "run", 7)
    True
    """

    def __init__(self) -> None:
        self._key = X25519PrivateKey.generate()

    @classmethod
    def of(cls, private: bytes) -> "KeyPair":
        """Return the key pair of a private key of 32 bytes.

        Raises
        ------
        InvalidParameterError
            If it is anything else; the message does not show it.
        """
        if not _is_key(private):
            raise InvalidParameterError("private", type(private).__name__, f"{KEY_BYTES} bytes")
        pair = cls.__new__(cls)
        pair._key = X25519PrivateKey.from_private_bytes(private)
        return pair

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> bytes:
        """The private key, 32 bytes; written to a file of the node itself and nowhere else."""
        return self._key.private_bytes_raw()

    def agree(self, peer_public: bytes, *context: Part) -> bytes:
        """Compute the 32-byte key shared with a peer; nobody without one of both private keys can.

        Parameters
        ----------
        peer_public : bytes
            The peer's public key, 32 bytes.
        *context : Part
            What the key is for: scheme, version, run, both parties, the configuration's hash. The
            peer gives the same.

        Raises
        ------
        ProtocolError
            If the public key has the wrong length, or is a point of low order: then the key would
            be the same for every private key, and so known to all.

        Notes
        -----
        HKDF-SHA256 without salt of the X25519 shared secret, over
        ``canonical("flwr-privacy agreed key", context, [both public keys, the smaller first])``.

        **Guarantee.** *Protected*: the agreed key. *Against*: whoever sees or carries the public
        keys and knows the context. *Covered*: it looks random to them if the public key is the
        peer's (X25519's assumption), and so do keys of other contexts and other pairs. *Not
        covered*: who stands in the middle and gives both ends a public key of their own, when keys
        are neither pinned nor signed; one party that shows itself under several names, unless the
        context names both parties; messages from the past once a private key is lost (forward
        secrecy lasts as long as the pair: make a new one for every run or round).
        """
        if not _is_key(peer_public):
            raise ProtocolError(f"the public key cannot be used: it is not {KEY_BYTES} bytes")
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError as error:  # the shared secret is zero
            raise ProtocolError("the public key cannot be used: a point of low order") from error
        both = sorted([self.public, peer_public])
        return _hkdf(secret, canonical("flwr-privacy agreed key", context, both))

    def __repr__(self) -> str:
        return f"<KeyPair of {self.public[:4].hex()}...>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KeyPair cannot be pickled or copied: its private key stays here")


def check_usable(public: bytes) -> None:
    """Check that a shared key can be agreed on with a public key.

    Raises
    ------
    ProtocolError
        If it has the wrong length or is a point of low order.
    """
    KeyPair().agree(public, "check")


class Channel:
    """One end of a channel between two parties; each direction has a key of its own.

    It cannot be pickled or copied.

    Parameters
    ----------
    own : KeyPair
        The key pair of this end.
    peer_public : bytes
        The public key of the other end, 32 bytes.
    me, peer : str
        Names of this end and of the other one.
    context : tuple of Part
        What the channel is for: scheme, version, run, the configuration's hash. The peer gives the
        same.

    Raises
    ------
    InvalidParameterError
        If both ends have one name: their directions would have one key.
    ProtocolError
        If the public key cannot be used.

    Notes
    -----
    The key of a direction is derived from the agreed key under the name and the public key of the
    sender, then those of the receiver.

    A sealed message is 12 random bytes (the nonce), the ciphertext and a tag of 16 bytes. AES-GCM
    must never use a nonce twice under one key. Random ones meet with a probability below 2^-32
    while a key seals no more than 2^32 messages (SP 800-38D, section 8.3). A key here belongs to
    one direction between two parties in one context, and a training seals a few messages per round
    with it. A counter would have to survive a crash and a restart under the same key pair.

    **Guarantee.** *Protected*: the content of messages. *Against*: whoever carries them, and
    changes, drops, swaps or makes them up as they like. *Covered*: nobody but the two ends learns
    more than the length, and a message opens only if the other end sealed it, with the same
    associated data, for this channel and this direction: it cannot go back to its sender. This
    holds if the public keys are those of the two parties and their private keys are secret. *Not
    covered*: who stands in the middle when keys are neither pinned nor signed; replays, unless the
    associated data name the round and the message, and the caller takes each once; messages from
    the past once a private key is lost (forward secrecy lasts as long as the key pair); who talks
    to whom, when and how much; a peer that tells others.

    Examples
    --------
    >>> ward, clinic = KeyPair(), KeyPair()
    >>> here = Channel(ward, clinic.public, me="ward", peer="clinic", context=("demo", 1))
    >>> there = Channel(clinic, ward.public, me="clinic", peer="ward", context=("demo", 1))
    >>> sealed = here.seal(b"a share", "round", 3)
    >>> there.open(sealed, "round", 3)
    b'a share'
    >>> there.open(sealed, "round", 4)
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.ProtocolError: damaged, or sealed for another purpose: \
a message from 'ward' to 'clinic'
    """

    def __init__(
        self, own: KeyPair, peer_public: bytes, *, me: str, peer: str, context: tuple[Part, ...]
    ) -> None:
        if me == peer:
            raise InvalidParameterError("peer", peer, "another name than that of this end")
        shared = own.agree(peer_public, *context)
        here, there = (me, own.public), (peer, peer_public)
        self._me, self._peer = me, peer
        self._outgoing = AESGCM(derive(shared, "channel", here, there))
        self._incoming = AESGCM(derive(shared, "channel", there, here))

    def seal(self, plain: bytes, *associated: Part) -> bytes:
        """Encrypt `plain` so that only the peer can open it; the result is 28 bytes longer.

        Parameters
        ----------
        plain : bytes
            Less than 2^31 bytes.
        *associated : Part
            What the message is: round, phase, share-set id, sender, receiver, shape. It is not part
            of the sealed message; who opens that has to know it.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._outgoing.encrypt(nonce, plain, canonical(*associated))

    def open(self, sealed: bytes, *associated: Part) -> bytes:
        """Decrypt a message that the peer sealed with the same associated data.

        Raises
        ------
        ProtocolError
            If it was changed, or sealed by anyone else, for anyone else or with other associated
            data.
        """
        failure = ProtocolError(
            f"damaged, or sealed for another purpose: a message from {self._peer!r} to {self._me!r}"
        )
        if not isinstance(sealed, bytes) or len(sealed) < _NONCE_BYTES + _TAG_BYTES:
            raise failure
        nonce, ciphertext = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return self._incoming.decrypt(nonce, ciphertext, canonical(*associated))
        except InvalidTag:
            raise failure from None

    def __repr__(self) -> str:
        return f"<Channel from {self._me!r} to {self._peer!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Channel cannot be pickled or copied: its keys stay here")


def _encode(part: Part) -> bytes:
    if isinstance(part, str):
        # Half of a surrogate pair is no UTF-8, but a text that Python has: it gets bytes too.
        kind, content = b"s", part.encode("utf-8", "surrogatepass")
    elif isinstance(part, int) and not isinstance(part, bool):
        size = max(part, ~part).bit_length() // 8 + 1  # room for the sign
        kind, content = b"i", part.to_bytes(size, "big", signed=True)
    elif isinstance(part, bytes):
        kind, content = b"b", part
    elif isinstance(part, list | tuple):
        kind, content = b"l", canonical(*part)
    else:
        raise TypeError(
            f"a part is a str, an int, bytes or a list of them, not {type(part).__name__}"
        )
    return kind + len(content).to_bytes(_LENGTH_BYTES, "big") + content


def _hkdf(secret: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def _is_key(value: bytes) -> bool:
    """Tell whether a value, which may come from an adversary, has the type and size of a key."""
    return isinstance(value, bytes) and len(value) == KEY_BYTES
