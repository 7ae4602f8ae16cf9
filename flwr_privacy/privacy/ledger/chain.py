"""Chains the charges of an experiment: a head commits to every charge before it, in order.

A server computes the same heads from its own questions, so a node whose ledger was set back, cut or
copied cannot show the head that the server saw before.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import FlwrPrivacyError, InvalidParameterError, check_integer
from flwr_privacy.wire.digests import values_digest

__all__ = ["Head", "Step", "UndecidedError", "begun", "explained", "extended", "head_of"]

_HEAD_BYTES = 32
_LABEL = "flwr-privacy chain 1"
_FLOATS = {entry.name for entry in fields(Charge) if entry.type is float}
_MOST_WAYS = 1000  # to leave out lost questions that are tried: 12 lost ones have 924 at most


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
    link = head.value + _question_digest(charge, phase, server_round, request)
    return Head(count=head.count + 1, value=hashlib.sha256(link).digest())


@lru_cache(maxsize=2**12)  # all clients of a round have the same
def _question_digest(charge: Charge, phase: str, server_round: int, request: int) -> bytes:
    # One form of a number, whoever wrote it: 2 and 2.0 are the same noise.
    told = [
        [name, float(value) if name in _FLOATS else value]
        for name, value in sorted(charge.to_dict().items())
    ]
    return values_digest(phase, server_round, request, told)


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


class UndecidedError(FlwrPrivacyError):
    """So many questions may have been charged or not that nobody looks for those that were."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A question that a client may have charged.

    Parameters
    ----------
    phase, server_round, request
        Its name, as the ledger has it.
    charge : Charge
        What it costs.
    sure : bool, default False
        Whether it was charged: its answer is there.
    """

    phase: str
    server_round: int
    request: int
    charge: Charge
    sure: bool = False

    def after(self, head: Head) -> Head:
        """Return the head of a chain with this charge at its end."""
        return extended(
            head,
            self.charge,
            phase=self.phase,
            server_round=self.server_round,
            request=self.request,
        )


def explained(base: Head, steps: Sequence[Step], head: Head) -> tuple[int, ...] | None:
    """Find out which questions lead from one head to a later one.

    Parameters
    ----------
    base : Head
        The head before them.
    steps : sequence of Step
        All questions since, oldest first. Those that are not sure may be left out.
    head : Head
        The head after them.

    Returns
    -------
    tuple of int or None
        The places of those that were charged; None if there is no such choice.

    Raises
    ------
    UndecidedError
        If there are too many choices, all of the right length.

    Examples
    --------
    >>> charge = Charge(neighbours="replace_one", noise_multiplier=2.0)
    >>> steps = [Step(phase="train", server_round=n, request=0, charge=charge) for n in (1, 2, 3)]
    >>> last = steps[2].after(steps[0].after(begun("e")))
    >>> explained(begun("e"), steps, last), explained(begun("e"), steps[:2], last)
    ((0, 2), None)
    """
    lost = sum(not step.sure for step in steps)
    left_out = len(steps) - (head.count - base.count)
    if not 0 <= left_out <= lost:
        return None
    if math.comb(lost, left_out) > _MOST_WAYS:
        raise UndecidedError(f"{lost} questions have no answer, and {left_out} were not charged")
    # Depth first, from the left: what choices share is computed once.
    waiting = [(0, base, left_out, tuple[int, ...]())]
    while waiting:
        place, reached, skips, taken = waiting.pop()
        if place == len(steps):
            if reached == head:
                return taken
            continue
        if skips and not steps[place].sure:
            waiting.append((place + 1, reached, skips - 1, taken))
        # Whoever is to be left out must still come.
        if sum(not step.sure for step in steps[place + 1 :]) >= skips:
            waiting.append((place + 1, steps[place].after(reached), skips, (*taken, place)))
    return None
