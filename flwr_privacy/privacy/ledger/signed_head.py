"""Signs the head of an experiment with a node's long-term key, and reads files of such heads.

A signed head proves that the holder of the key said, at some time, that its ledger had these
charges of the experiment. It does not prove that the ledger still has them, that there are no
others, or when it was said.
"""

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.wire.channel import Part
from flwr_privacy.wire.pins import Identity, Pins

from .chain import Head
from .entries import check_name

__all__ = ["SignedHead", "heads_from_json", "heads_to_json"]

_LABEL = "ledger head"
_FIELDS = ("experiment", "client", "count", "value", "key", "signature")
_SIGNATURE_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class SignedHead:
    """The head of an experiment in a client's ledger, and the signature of the client's key.

    Parameters
    ----------
    experiment, client : str
        Whose charges they are.
    head : Head
        Number of charges and the value of the chain.
    key : str, default ""
        The client's public key (`Identity.public`); empty without a signature.
    signature : bytes, default b""
        What `Identity.sign` made of the rest; empty where the client has no key, as in a
        simulation.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed; it may come from an adversary.

    Examples
    --------
    >>> from flwr_privacy.privacy.ledger.chain import begun
    >>> identity = Identity.generate()
    >>> signed = SignedHead.sign(identity, experiment="e", client="a", head=begun("e"))
    >>> signed.verify()
    >>> heads_from_json(heads_to_json([signed])) == (signed,)
    True
    """

    experiment: str
    client: str
    head: Head
    key: str = ""
    signature: bytes = b""

    def __post_init__(self) -> None:
        check_name("experiment", self.experiment)
        check_name("client", self.client)
        if not isinstance(self.key, str) or not isinstance(self.signature, bytes):
            raise InvalidParameterError("key", type(self.key).__name__, "a text, beside bytes")
        if bool(self.key) != bool(self.signature):
            raise InvalidParameterError("signature", "one of two", "a key and a signature, or none")
        if self.signature and len(self.signature) != _SIGNATURE_BYTES:
            allowed = f"{_SIGNATURE_BYTES} bytes"
            raise InvalidParameterError("signature", f"{len(self.signature)} bytes", allowed)

    @classmethod
    def sign(
        cls, identity: Identity | None, *, experiment: str, client: str, head: Head
    ) -> "SignedHead":
        """Sign a head with a client's key; without a key it stays unsigned."""
        if identity is None:
            return cls(experiment=experiment, client=client, head=head)
        signature = identity.sign(*_parts(experiment, client, head))
        return cls(
            experiment=experiment,
            client=client,
            head=head,
            key=identity.public,
            signature=signature,
        )

    def verify(self) -> None:
        """Check the signature with the key that is named here; whose key that is, it cannot tell.

        Raises
        ------
        ProtocolError
            If it does not fit, or there is none.
        InvalidParameterError
            If the key or the client's name is malformed.
        """
        if not self.signature:
            raise ProtocolError(f"the head of client {self.client!r} has no signature")
        parts = _parts(self.experiment, self.client, self.head)
        Pins({self.client: self.key}).verify(self.client, self.signature, *parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the head as plain values, for JSON."""
        return {
            "experiment": self.experiment,
            "client": self.client,
            "count": self.head.count,
            "value": self.head.value.hex(),
            "key": self.key,
            "signature": base64.b64encode(self.signature).decode("ascii"),
        }

    @classmethod
    def from_dict(cls, values: Any) -> "SignedHead":
        """Read a head from plain values; all of them must be present.

        Raises
        ------
        InvalidParameterError
            If a value is missing, unknown or not allowed.
        """
        if not isinstance(values, Mapping) or set(values) != set(_FIELDS):
            found = sorted(map(str, values)) if isinstance(values, Mapping) else values
            raise InvalidParameterError("head", found, f"the keys {list(_FIELDS)}")
        try:
            value = bytes.fromhex(values["value"])
            signature = base64.b64decode(values["signature"], validate=True)
        except (TypeError, ValueError) as error:
            allowed = "a value in hexadecimal digits and a signature in base64"
            raise InvalidParameterError("head", values["value"], allowed) from error
        return cls(
            experiment=values["experiment"],
            client=values["client"],
            head=Head(count=values["count"], value=value),
            key=values["key"],
            signature=signature,
        )


def heads_to_json(heads: Iterable[SignedHead]) -> str:
    """Write heads as the text of a file."""
    return json.dumps({"heads": [head.to_dict() for head in heads]}, indent=1) + "\n"


def heads_from_json(text: str | bytes) -> tuple[SignedHead, ...]:
    """Read heads from the text of a file.

    Raises
    ------
    InvalidParameterError
        If it is anything else. The signatures are not checked: see `SignedHead.verify`.
    """
    allowed = 'JSON as {"heads": [...]}'
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError("heads", "no JSON", allowed) from error
    if not isinstance(values, dict) or set(values) != {"heads"}:
        raise InvalidParameterError("heads", type(values).__name__, allowed)
    if not isinstance(values["heads"], list):
        raise InvalidParameterError("heads", type(values["heads"]).__name__, allowed)
    return tuple(map(SignedHead.from_dict, values["heads"]))


def _parts(experiment: str, client: str, head: Head) -> tuple[Part, ...]:
    return (_LABEL, experiment, client, head.count, head.value)
