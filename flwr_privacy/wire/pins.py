"""Pins public keys to clients: long-term identities that operators exchange outside the training.

Keys that a server passes on may be the server's own. So each client has an Ed25519 key for life,
the operators exchange the public halves by another way (a list on paper, a signed mail), and a
client signs with it whatever the others must know to be its own, its key pair of the run above all.
"""

import base64
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_choice

from .channel import Part, canonical
from .files import open_private, read_toml
from .identity import check_client_id

__all__ = ["Identity", "Pins"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_PUBLIC_BYTES = 32
_LONGEST_NAME = 64  # characters of a name from the wire in an error


class Identity:
    """The long-term Ed25519 key of a client.

    It cannot be pickled or copied, and its repr shows the beginning of the public key only.

    Parameters
    ----------
    key : Ed25519PrivateKey
        The private key; see `generate` and `read`.

    Examples
    --------
    >>> import tempfile
    >>> identity = Identity.generate()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     identity.write(Path(folder, "identity.pem"))
    ...     Identity.read(Path(folder, "identity.pem")).public == identity.public
    True
    >>> len(identity.public), len(identity.sign("run", 7))
    (44, 64)
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> "Identity":
        """Return a new identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: str | Path) -> "Identity":
        """Read an identity from a PEM file (PKCS #8, without password).

        Raises
        ------
        InvalidParameterError
            If the file cannot be read, has rights for others than its owner, or holds no such key.
            The message names the file and shows nothing of its content.
        """
        try:
            with open(path, "rb") as file:
                rights = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                content = file.read()
        except OSError as error:
            allowed = f"a file that can be read ({error.strerror})"
            raise InvalidParameterError("identity", str(path), allowed) from error
        if rights & _OTHERS:
            allowed = f"a file for its owner alone, not with mode {rights:04o} (chmod 600 {path})"
            raise InvalidParameterError("identity", str(path), allowed)
        try:
            key = load_pem_private_key(content, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            allowed = "an Ed25519 private key in PEM, without password"
            raise InvalidParameterError("identity", str(path), allowed)
        return cls(key)

    def write(self, path: str | Path) -> None:
        """Write the identity to a new file that only its owner may read (mode 0600).

        Raises
        ------
        InvalidParameterError
            If there is something at `path`, which stays as it is, or it cannot be written.
        """
        pem = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            with open(path, "xb", opener=open_private) as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError as error:
            allowed = "a new file: an identity is never overwritten"
            raise InvalidParameterError("identity", str(path), allowed) from error
        except OSError as error:
            allowed = f"a file that can be written ({error.strerror})"
            raise InvalidParameterError("identity", str(path), allowed) from error

    @property
    def public(self) -> str:
        """The public key as the others pin it: its 32 bytes in base64, 44 characters."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode("ascii")

    def sign(self, *parts: Part) -> bytes:
        """Sign parts; `Pins.verify` checks it with the same ones.

        Returns
        -------
        bytes
            The Ed25519 signature, 64 bytes, of ``canonical("flwr-privacy signature", *parts)``.
        """
        return self._key.sign(_signed(parts))

    def __repr__(self) -> str:
        return f"<Identity of {self.public[:8]}...>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Identity cannot be pickled or copied: its private key stays here")


@dataclass(frozen=True)
class Pins:
    """The pinned public keys of the clients that a node knows.

    Parameters
    ----------
    clients : mapping of str to str
        Public key of each client (`Identity.public`) by its client id.

    Raises
    ------
    InvalidParameterError
        If an id or a key is malformed, or two clients have one key: they would be one party.

    Notes
    -----
    **Guarantee.** *Protected*: that what is taken for a client's is the client's. *Against*:
    whoever carries the messages. *Covered*: a signature that fits was made by the holder of the
    pinned key over exactly these parts (Ed25519, RFC 8032). *Not covered*: parts that say too
    little: without the run and the round a signature of the past fits again; keys that were pinned
    for the wrong client; a client that lost its private key, or chose a public key with which
    anyone can sign (a point of low order), until its pin is removed everywhere; a party with
    several keys, which is several clients.

    Examples
    --------
    >>> ward = Identity.generate()
    >>> pins = Pins({"ward-7": ward.public})
    >>> "ward-7" in pins
    True
    >>> pins.verify("ward-7", ward.sign("run", 7), "run", 7)
    >>> pins.verify("ward-7", ward.sign("run", 7), "run", 8)
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.ProtocolError: the signature of client 'ward-7' does not fit its pinned key
    """

    clients: Mapping[str, str]

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for client_id, public in self.clients.items():
            check_client_id(client_id, parameter="clients")
            parameter = f"clients.{client_id}"
            _check_public(parameter, public)
            if public in owners:
                allowed = f"another key than that of client {owners[public]!r}"
                raise InvalidParameterError(parameter, public, allowed)
            owners[public] = client_id
        # A view of a copy: nothing changes the pins later.
        object.__setattr__(self, "clients", MappingProxyType(dict(self.clients)))

    @classmethod
    def read(cls, path: str | Path) -> "Pins":
        """Read pins from a TOML file with one table, ``[clients]``: ``"client-id" = "base64"``.

        Raises
        ------
        InvalidParameterError
            If the file cannot be read or is no TOML, has another key or no table, or an id or a
            public key is not allowed. The message names the file.
        """

        def pins(values: dict[str, Any]) -> "Pins":
            for key in values:
                check_choice("key", key, ["clients"])
            clients = values.get("clients")
            if not isinstance(clients, dict):
                raise InvalidParameterError("clients", clients, "a table of public keys")
            return cls(clients)

        return read_toml("pins", path, pins)

    def verify(self, client_id: str, signature: bytes, *parts: Part) -> None:
        """Check that a client signed these parts (`Identity.sign`).

        Raises
        ------
        ProtocolError
            If the client is not pinned or the signature does not fit; the message names the client.
        """
        if client_id not in self:
            raise ProtocolError(f"client {client_id[:_LONGEST_NAME]!r} is not pinned")
        public = Ed25519PublicKey.from_public_bytes(base64.b64decode(self.clients[client_id]))
        misfit = ProtocolError(f"the signature of client {client_id!r} does not fit its pinned key")
        if not isinstance(signature, bytes):
            raise misfit
        try:
            public.verify(signature, _signed(parts))
        except InvalidSignature:
            raise misfit from None

    def __contains__(self, client_id: str) -> bool:
        return client_id in self.clients


def _signed(parts: tuple[Part, ...]) -> bytes:
    return canonical("flwr-privacy signature", *parts)


def _check_public(parameter: str, public: Any) -> None:
    allowed = f"a public key: {_PUBLIC_BYTES} bytes in base64 (an id with a dot needs quotes)"
    if not isinstance(public, str):
        raise InvalidParameterError(parameter, public, allowed)
    try:
        decoded = base64.b64decode(public)
    except ValueError as error:  # wrong length, or no ASCII
        raise InvalidParameterError(parameter, public, allowed) from error
    # One text per key, or a key could be pinned twice: decoding skips strange letters and odd bits.
    if len(decoded) != _PUBLIC_BYTES or base64.b64encode(decoded).decode("ascii") != public:
        raise InvalidParameterError(parameter, public, allowed)
