"""Seals a node's answers for its neighbours in a tree, so that the server cannot read them.

The neighbours in a tree of aggregators talk through a server that must not read what they say. The
node believes a neighbour by the key that it pins, and sends what has no noise yet to nobody but the
parent that its policy trusts. What is opened, charged and sealed is settled here and in
`flwr_privacy.pipeline.answer`; a scheme says what is sealed for whom, and what is made of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_privacy.errors import DeclinedError
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.wire.channel import Channel, Part
from flwr_privacy.wire.message import METRICS, Fields

from .answer import answer, check_step
from .experiment_keys import channel_to
from .mechanism import Answer, Release, ReleasePlan
from .node_store import NodeStore
from .request import Request
from .users_code import check_going_on

__all__ = ["SEALED", "Letter", "OpenedMessages", "Sealed", "SealedStep", "answer_sealed"]

SEALED = "sealed"
"""Entry of an answer: what is to be sealed, and once it is, what the server passes on."""


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A sealed message from or to a neighbour.

    Parameters
    ----------
    peer : str
        The neighbour.
    key, signature : bytes
        What the server says is its public key of the experiment, and its signature.
    about : tuple
        What the message is; both ends must have been told the same.
    sealed : bytes
        The message, of one that came.
    """

    peer: str
    key: Any
    signature: Any
    about: tuple[Part, ...]
    sealed: Any = b""


@dataclass(frozen=True, kw_only=True)
class OpenedMessages:
    """The messages that a node has opened, and its policy's least noise.

    Parameters
    ----------
    contents : list of bytes
        Of the messages that came, in their order.
    floor : float
        Least standard deviation of the noise that the node's policy allows, in units of the
        weights: whoever adds the noise keeps to it.
    """

    contents: list[bytes]
    floor: float


@dataclass(frozen=True, kw_only=True)
class SealedStep:
    """A step towards a release: its result stays sealed between neighbours and costs nothing.

    Parameters
    ----------
    name : Question
        The name of the release.
    plan : ReleasePlan
        What will be released, as far as it is known: the node declines the step if it would decline
        that.
    content : bytes
        What is sealed for the neighbours.
    """

    name: Question
    plan: ReleasePlan
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """An answer that is computed from sealed messages, or sealed for neighbours, or both.

    Parameters
    ----------
    release : callable
        Returns what is made of the messages, once they are open. It reads no data of the node's
        own.
    received : sequence of Letter
        The messages that came.
    sent : sequence of Letter
        For whom the entry `SEALED` of a release, or the content of a step, is sealed: the parent,
        or children. Nothing else leaves the node then but metrics. Without any, the release leaves
        as it is, with its noise.
    parent : str, default ""
        The neighbour that the node must trust.
    averaged : sequence of str, optional
        Of an average: all children who were asked for the messages that came.
    least : int, default 1
        Of an average: fewest messages that the server allows.
    """

    release: Callable[[OpenedMessages], Release | SealedStep]
    received: Sequence[Letter] = ()
    sent: Sequence[Letter] = ()
    parent: str = ""
    averaged: Sequence[str] | None = None
    least: int = 1


def answer_sealed(store: NodeStore, request: Request, sealed: Sealed) -> Answer:
    """Open the received messages, carry out the release or step, and seal its result.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    request : Request
        The question.
    sealed : Sealed
        What the client half makes of it.

    Raises
    ------
    DeclinedError
        If the node's policy does not trust the parent, or asks for more children; otherwise as
        `flwr_privacy.pipeline.answer.answer`.
    ProtocolError
        If a message cannot be opened, or a neighbour is not pinned; otherwise as `answer`.
    InvalidParameterError, LedgerError, ChargedFailureError
        As `answer`.
    """
    experiment_id = request.question.experiment_id
    check_going_on(store, experiment_id)
    _check_parent(store, sealed)
    _check_children(store, sealed)
    channels: dict[str, Channel] = {}
    for letter in (*sealed.received, *sealed.sent):
        if letter.peer not in channels:
            given = (letter.peer, letter.key, letter.signature)
            channels[letter.peer] = channel_to(store, request.scheme, experiment_id, *given)
    contents = [channels[one.peer].open(one.sealed, *one.about) for one in sealed.received]
    made = sealed.release(OpenedMessages(contents=contents, floor=store.policy.min_sigma or 0.0))
    # Nobody to seal it for: it leaves with its own noise, like every release.
    if isinstance(made, Release) and not sealed.sent:
        return answer(store, request, made)
    # Only what is sealed for the trusted parent may leave without noise.
    to_parent = [letter.peer for letter in sealed.sent] == [sealed.parent]

    def seal(content: bytes) -> Fields:
        closed = [channels[one.peer].seal(content, *one.about) for one in sealed.sent]
        return {SEALED: closed[0] if to_parent else closed}

    if isinstance(made, Release):
        return answer(
            store,
            request,
            made,
            seal=lambda given: ({}, {METRICS: given[1][METRICS], **seal(given[1][SEALED])}),
            sealed=to_parent,
        )
    check_step(store, request, made.name, made.plan)
    return {}, seal(made.content)


def _check_parent(store: NodeStore, sealed: Sealed) -> None:
    trusted = list(store.policy.trusted_parents or ())
    if sealed.parent and sealed.parent not in trusted:
        raise DeclinedError(
            f"the parent '{sealed.parent[:64]}' is not trusted: this node's policy has "
            f"trusted_parents = {trusted}"
        )
    if sealed.averaged is None:
        return
    # The children's answers would be in two releases, of which they pay one.
    if sealed.parent and len(trusted) > 1:
        raise DeclinedError(
            f"this node's policy has trusted_parents = {trusted}: an aggregator has one at most, "
            "or its children's answers would be in two releases"
        )
    if trusted and not sealed.sent:
        raise DeclinedError(
            "this node's policy has trusted_parents: it hands nothing on with noise"
        )


def _check_children(store: NodeStore, sealed: Sealed) -> None:
    if sealed.averaged is None:
        return
    least, answered = max(sealed.least, store.policy.min_children), len(sealed.received)
    if answered < least:
        raise DeclinedError(
            f"{answered} of {len(sealed.averaged)} children answered: this node averages at least "
            f"{least}"
        )
