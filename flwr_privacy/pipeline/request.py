"""A server's request as one client received it, and its digest."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from flwr_privacy.privacy.ledger import Question
from flwr_privacy.wire.arrays import Arrays, digest_of
from flwr_privacy.wire.digests import values_digest
from flwr_privacy.wire.message import Fields

__all__ = ["DELIVERY", "Request", "question_of", "request_of"]

DELIVERY = frozenset({"summed", "honest", "certain", "code-limit", "needed", "withstood"})
"""Entries that say how an answer is delivered; they do not change what is released."""


@dataclass(frozen=True)
class Request:
    """A server's request as one client received it.

    Parameters
    ----------
    scheme : str
        Name of the scheme.
    question : Question
        Its name.
    arrays : Mapping of str to ndarray
        The arrays that came with it.
    fields : Mapping
        The scheme's own values; of the secure sum ``summed``, ``honest`` and ``certain``, what the
        client believes of it (`flwr_privacy.secure_sum.trust`), ``needed``, those without
        whom it is not opened, ``withstood``, how many of these may collude, and ``code-limit``.
    guarantees_dp : bool, default True
        Whether the client half promises differential privacy.
    """

    scheme: str
    question: Question
    arrays: Arrays
    fields: Mapping[str, Any]
    guarantees_dp: bool = True

    @cached_property
    def digest(self) -> str:
        """Hash of the whole request: 32 hexadecimal digits."""
        own = [[key, self.fields[key]] for key in sorted(self.fields) if key not in DELIVERY]
        arrays = [[name, digest_of(self.arrays, name)] for name in self.arrays]
        name = list(astuple(self.question))
        return values_digest(self.scheme, name, own, arrays).hex()[:32]


def question_of(phase: str, fields: Fields) -> Question:
    """Return the ledger's key of the request that `SchemeClient.handle` got."""
    return Question(
        experiment_id=fields["experiment-id"],
        phase=phase,
        server_round=fields["round"],
        request=fields["request"],
    )


def request_of(
    arrays: Arrays, scheme: str, phase: str, fields: Fields, guarantees_dp: bool
) -> Request:
    """Build the request of a message that a client half handles."""
    named = {"experiment-id", "round", "request"}
    own = {key: value for key, value in fields.items() if key not in named}
    nothing = {"summed": 0, "honest": 0, "certain": 0, "code-limit": 0}
    own = {**nothing, "needed": [], "withstood": 0, **own}
    return Request(scheme, question_of(phase, fields), arrays, own, guarantees_dp)
