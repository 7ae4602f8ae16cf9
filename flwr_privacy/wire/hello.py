"""Signs a client's hello and checks the signature, so that a name belongs to a key.

Notes
-----
**Guarantee.** *Protected*: the name of a client. *Against*: other nodes, whatever they send, for a
server that follows the protocol. *Covered*: a hello whose signature fits was made by the holder of
the key, for this nonce, this node, this scheme, this experiment and this client, with exactly these
fields: it is of no use at another time, from another node, in another experiment or with a field
changed. *Not covered*: the server, which may say of anybody what it likes; a server at which the
same client answers elsewhere, and which passes on another server's nonce as its own; what comes
after the hello, for which Flower's node authentication stands; a client that has no key; which key
is the right one: the server pins it, or believes the first one. What a key tells: a client has the
same one in every experiment, as it has its ``client-id``. No two should share one: pins refuse it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr_privacy.errors import InvalidParameterError, ProtocolError

from .digests import values_digest
from .message import Fields, Header

if TYPE_CHECKING:  # cryptography is loaded where somebody signs
    from .pins import Identity

__all__ = ["IDENTITY", "NONCE", "NONCE_BYTES", "SIGNATURE", "key_text", "proven_key", "signed"]

NONCE, IDENTITY, SIGNATURE = "nonce", "identity", "identity-signature"
"""Entries of the record: in the question the nonce; in the reply public key and signature."""

NONCE_BYTES = 32

_SHOWN = 16  # characters of a public key in a text: 96 bits, which nobody finds a second key for


def signed(
    identity: "Identity", header: Header, fields: Mapping[str, Any], *, nonce: Any, node: int
) -> Fields:
    """Return the fields of a hello with the client's public key and its signature.

    Parameters
    ----------
    identity : Identity
        The client's long-term key.
    header : Header
        Of the reply, with the client's name.
    fields : Mapping
        Everything that the client says of itself.
    nonce : bytes
        What the server drew for this hello; it comes from the question.
    node : int
        The node that the question was sent to.

    Raises
    ------
    ProtocolError
        If the nonce is none.

    Examples
    --------
    >>> from flwr_privacy.wire.pins import Identity
    >>> header = Header(scheme="udp", experiment_id="e", phase="hello", server_round=0,
    ...                 client_id="ward-7")
    >>> ward, question = Identity.generate(), {"nonce": bytes(32), "node": 5}
    >>> fields = signed(ward, header, {"plays": "one"}, **question)
    >>> proven_key(header, fields, **question) == ward.public
    True
    >>> proven_key(header, fields | {"plays": "any"}, **question)
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.ProtocolError: the hello is not signed with the key that it names
    """
    if not isinstance(nonce, bytes) or len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"hello: the entry '{NONCE}' is not {NONCE_BYTES} bytes")
    told = {**fields, IDENTITY: identity.public}
    return {**told, SIGNATURE: identity.sign(*_parts(header, told, nonce, node))}


def proven_key(header: Header, fields: Mapping[str, Any], *, nonce: bytes, node: int) -> str:
    """Return the public key that a hello is signed with; "" if it names and signs none.

    Parameters are those of `signed`; header and fields may come from an adversary.

    Raises
    ------
    ProtocolError
        If there is a key or a signature, and the one does not fit the other and the rest.
    """
    if IDENTITY not in fields and SIGNATURE not in fields:
        return ""
    from .pins import Pins

    told = {name: value for name, value in fields.items() if name != SIGNATURE}
    try:
        public: str = fields.get(IDENTITY, "")
        claimed = Pins({header.client_id: public})
        claimed.verify(
            header.client_id, fields.get(SIGNATURE, b""), *_parts(header, told, nonce, node)
        )
    except (InvalidParameterError, ProtocolError) as error:
        raise ProtocolError("the hello is not signed with the key that it names") from error
    return public


def key_text(public: str) -> str:
    """Return how a text calls a public key: its beginning, or that there is none.

    Examples
    --------
    >>> key_text("GL1zYsmVJ7TPHTDkQkYaBzPzR9zv5yKkM2KgkOAZFPw="), key_text("")
    ('key GL1zYsmVJ7TPHTDk...', 'no key')
    """
    return f"key {public[:_SHOWN]}..." if public else "no key"


def _parts(
    header: Header, told: Mapping[str, Any], nonce: bytes, node: int
) -> tuple[str | int | bytes, ...]:
    # Empty strings and lists do not travel: see `Header.write`.
    entries = [[name, value] for name, value in sorted(told.items()) if value not in ("", [])]
    who = (header.scheme, header.experiment_id, header.client_id)
    return ("hello", nonce, node, *who, values_digest(*entries))
