"""The entries of a message in which a node shows the head of an experiment in its ledger."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.wire.message import Fields

from .chain import Head

if TYPE_CHECKING:  # it loads cryptography
    from .signed_head import SignedHead

__all__ = ["COUNT", "SHOWN", "SIGNATURE", "VALUE", "head_in", "is_shown", "shown", "signed_in"]

COUNT, VALUE, SIGNATURE = "ledger-count", "ledger-head", "ledger-signature"
"""Entries of the record: number of charges, value of the chain, and the client's signature."""

SHOWN = frozenset({COUNT, VALUE, SIGNATURE})
"""All of them."""


def shown(signed: "SignedHead") -> Fields:
    """Return the entries that show a head; unsigned ones have no signature."""
    entries: Fields = {COUNT: signed.head.count, VALUE: signed.head.value}
    return {**entries, SIGNATURE: signed.signature} if signed.signature else entries


def is_shown(fields: Mapping[str, Any]) -> bool:
    """Tell whether a message shows a head, or what is meant to be one."""
    return not SHOWN.isdisjoint(fields)


def head_in(fields: Mapping[str, Any]) -> Head:
    """Return the head that a message shows; nothing says yet that it is the client's.

    Raises
    ------
    ProtocolError
        If it is malformed.
    """
    try:
        return Head(count=fields.get(COUNT, -1), value=fields.get(VALUE, b""))
    except InvalidParameterError as error:
        raise ProtocolError(f"the head of its ledger is malformed: {error}") from error


def signed_in(fields: Mapping[str, Any], *, experiment: str, client: str, key: str) -> "SignedHead":
    """Return the head that a message shows, with its signature if the client's key is known.

    Parameters
    ----------
    fields : Mapping
        The entries of the message.
    experiment, client : str
        Whose it must be.
    key : str
        The client's public key; "" if none is known: then a signature says nothing and is left out.

    Raises
    ------
    ProtocolError
        If the head is malformed, or is not signed with that key.
    """
    from .signed_head import SignedHead

    head = head_in(fields)
    if not key:
        return SignedHead(experiment=experiment, client=client, head=head)
    try:
        signed = SignedHead(
            experiment=experiment,
            client=client,
            head=head,
            key=key,
            signature=fields.get(SIGNATURE, b""),
        )
        signed.verify()
    except (InvalidParameterError, ProtocolError) as error:
        raise ProtocolError("the head of its ledger is not signed with its key") from error
    return signed
