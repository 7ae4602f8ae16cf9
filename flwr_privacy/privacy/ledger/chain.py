"""Chains the charges of an experiment: a head commits to every charge before it, in order.

A server computes the same heads from its own questions, so a node whose ledger was set back, cut or
copied cannot show the head that the server saw before.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.wire.digests import values_digest

__all__ = ["Head", "begun", "extended", "head_of"]

_HEAD_BYTES = 32
_LABEL = "flwr-privacy chain 1"


@dataclass(frozen=True, kw_only=True)
class Head:
    """The end of a chain.

    Parameters
    ----------
    count : int
        Number of charges in the chain.
    value : bytes
        SHA-256, 32 bytes.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed; it may come from an adversary.
    """

    count: int
    value: bytes

    def __post_init__(self) -> None:
        check_integer("count", self.count, minimum=0, maximum=2**53)
        if not isinstance(self.value, bytes) or len(self.value) != _HEAD_BYTES:
            raise InvalidParameterError("head", type(self.value).__name__, f"{_HEAD_BYTES} bytes")


def begun(experiment_id: str) -> Head:
    """Return the head of an experiment without charges.

    Examples
    --------
    >>> begun("one").count, begun("one") == begun("two")
    (0, False)
    """
    return Head(count=0, value=values_digest(_LABEL, experiment_id))


def extended(head: Head, charge: Charge, *, phase: str, server_round: int, request: int) -> Head:
    """Return the head after one more charge.

    Parameters
    ----------
    head : Head
        The head before it.
    charge : Charge
        What the release cost.
    phase, server_round, request
        Name of the question within its experiment, as the ledger has it.

    Notes
    -----
    Left out is what a server cannot compute or a privacy card does not have: the node's time, and
    the digest of the question's arrays.
    """
    told = [[name, value] for name, value in sorted(charge.to_dict().items())]
    link = values_digest(head.value, phase, server_round, request, told)
    return Head(count=head.count + 1, value=link)


def head_of(experiment_id: str, charges: Iterable[tuple[str, int, int, Charge]]) -> Head:
    """Return the head of charges, oldest first: phase, round, request and charge of each.

    Examples
    --------
    >>> charge = Charge(neighbours="replace_one", noise_multiplier=2.0)
    >>> one = head_of("e", [("train", 1, 0, charge), ("train", 2, 0, charge)])
    >>> two = extended(begun("e"), charge, phase="train", server_round=1, request=0)
    >>> extended(two, charge, phase="train", server_round=2, request=0) == one
    True
    """
    head = begun(experiment_id)
    for phase, server_round, request, charge in charges:
        head = extended(head, charge, phase=phase, server_round=server_round, request=request)
    return head
