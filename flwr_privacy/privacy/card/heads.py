"""The heads on a privacy card: what the clients' ledgers said that they hold of the experiment."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.ledger.signed_head import SignedHead

__all__ = ["CardHead"]


@dataclass(frozen=True, kw_only=True)
class CardHead:
    """The last head that a client showed the server.

    Parameters
    ----------
    signed : SignedHead
        The head, with the signature of the client's key where it has one.
    unlike : str, default ""
        Why it is not that of the card's charges of the client; empty where it is.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    signed: SignedHead
    unlike: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.unlike, str):
            raise InvalidParameterError("unlike", type(self.unlike).__name__, "a text")

    @cached_property
    def text(self) -> str:
        """The head as a line of JSON, made once; the experiment is that of the card."""
        values = self.signed.to_dict()
        del values["experiment"]
        return json.dumps({**values, "unlike": self.unlike})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, experiment: str) -> "CardHead":
        """Read a head of an experiment's card; all values must be present.

        Raises
        ------
        InvalidParameterError
            If a value is missing, unknown or not allowed.
        """
        own = dict(values)
        unlike = own.pop("unlike", None)
        return cls(signed=SignedHead.from_dict({**own, "experiment": experiment}), unlike=unlike)
