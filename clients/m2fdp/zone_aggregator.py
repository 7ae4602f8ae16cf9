"""Runs an aggregator that its children trust: averages their sealed answers, relays models.

What is opened, allowed, charged and sealed is settled by `flwr_privacy.pipeline.sealed`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flwr_privacy.errors import ProtocolError
from flwr_privacy.m2fdp import DOWN, EVENT, UP, Delivery, Duty, Upload, ZoneAverage, averaged
from flwr_privacy.m2fdp.messages import going_down, going_up, packed, unpacked
from flwr_privacy.pipeline.mechanism import Release
from flwr_privacy.pipeline.sealed import Letter, OpenedMessages, Sealed, SealedStep
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.channel import Part
from flwr_privacy.wire.message import Fields

__all__ = ["average", "deliver", "letter_of"]


def average(me: str, fields: Fields) -> Sealed:
    """Average the children's sealed answers, and release or seal the result as the event requires.

    Parameters
    ----------
    me : str
        The aggregator.
    fields : dict
        The scheme's own values of the request, and its name.

    Raises
    ------
    InvalidParameterError, ProtocolError
        If the request is malformed.
    """
    duty = records.read(Duty, fields)
    if duty.noise_multiplier == 0:
        raise ProtocolError("an aggregator of its own has nothing to do where there is no noise")
    keys = _childrens_keys(fields, duty.children if duty.way == DOWN else duty.senders)
    received = [
        Letter(
            peer=child,
            **keys[child],
            about=going_up(
                fields,
                duty,
                sender=child,
                tier=duty.own_tier + 1,
                receiver=me,
                children=duty.children,
            ),
            sealed=sealed,
        )
        for child, sealed in zip(duty.senders, duty.sealed, strict=True)
    ]
    sent: list[Letter] = []
    if duty.way == DOWN:
        sent = _for_children(me, fields, duty, keys)
    elif duty.way == UP:
        about = going_up(
            fields,
            duty,
            sender=me,
            tier=duty.own_tier,
            receiver=duty.parent,
            children=duty.siblings,
        )
        sent = [letter_of(fields, duty.parent, about)]
    return Sealed(
        release=lambda opened: _average(fields, duty, opened),
        received=received,
        sent=sent,
        parent=duty.parent if duty.way == UP else "",
        averaged=duty.children,
        least=duty.min_children,
    )


def _average(fields: Fields, duty: Duty, opened: OpenedMessages) -> Release | SealedStep:
    uploads = [
        unpacked(content, duty, sender=child)
        for content, child in zip(opened.contents, duty.senders, strict=True)
    ]
    if len({upload.codes.size for upload in uploads}) != 1:
        raise ProtocolError("the children's answers have different sizes")
    mean = averaged(uploads, duty.drift, tier=duty.own_tier, grid=CodeGrid(duty.grid))
    if duty.way == UP:
        return _step(fields, duty, replace(mean, floor=max(mean.floor, opened.floor)))
    if duty.way == DOWN:
        shared = duty.drift.broadcast(mean.reach, tier=duty.own_tier)
        return _step(fields, duty, replace(mean, reach=shared))
    # A round that is resumed brings the same answers sealed anew, and perhaps not all of them:
    # it gets what was handed out before.
    anew = ("senders", "sealed", "siblings")
    return Release(
        mechanism=ZoneAverage(duty, mean),
        work=lambda _, __: None,
        name=_release_name(fields, duty),
        asked={k: v for k, v in records.write(duty).items() if k not in anew},
        single=True,
    )


def deliver(me: str, fields: Fields) -> Sealed:
    """Open the model of a clean event above and seal it for each child; parameters as `average`."""
    delivery = records.read(Delivery, fields)
    about = going_down(
        fields,
        delivery.event,
        sender=delivery.parent,
        receiver=me,
        tier=delivery.own_tier,
        children=delivery.siblings,
    )
    start = letter_of(fields, delivery.parent, about, fields.get("start-sealed"))
    keys = _childrens_keys(fields, delivery.children)
    return Sealed(
        release=lambda opened: _step(
            fields, delivery, unpacked(opened.contents[0], delivery, sender=delivery.parent)
        ),
        received=[start],
        sent=_for_children(me, fields, delivery, keys),
        parent=delivery.parent,
    )


def _step(fields: Fields, asked: Duty | Delivery, model: Upload) -> SealedStep:
    return SealedStep(
        name=_release_name(fields, asked),
        plan=asked.plan(),
        content=packed(model, asked),
    )


def _release_name(fields: Fields, asked: Duty | Delivery) -> Question:
    return Question(
        experiment_id=str(fields["experiment-id"]),
        phase=EVENT,
        server_round=fields["round"],
        request=asked.period,
    )


def _for_children(
    me: str, fields: Fields, asked: Duty | Delivery, keys: dict[str, dict[str, Any]]
) -> list[Letter]:
    """Return the letters, still to be sealed, to each child that was asked."""
    return [
        Letter(
            peer=child,
            **keys[child],
            about=going_down(
                fields,
                asked.event,
                sender=me,
                receiver=child,
                tier=asked.own_tier + 1,
                children=asked.children,
            ),
        )
        for child in asked.children
    ]


def letter_of(fields: Fields, parent: str, about: tuple[Part, ...], sealed: Any = b"") -> Letter:
    """Return a message from or to the parent, with the parent's key in the request."""
    key, signature = fields.get("parent-key"), fields.get("parent-signature")
    return Letter(peer=parent, key=key, signature=signature, about=about, sealed=sealed)


def _childrens_keys(fields: Fields, members: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the keys of children in a request, as `Letter` takes them."""
    keys, signatures = fields.get("keys"), fields.get("signatures")
    if not isinstance(keys, list) or not isinstance(signatures, list):
        raise ProtocolError("the request has no keys of the children")
    if not len(keys) == len(signatures) == len(members):
        raise ProtocolError("not one key and one signature for each child")
    return {
        member: {"key": key, "signature": signature}
        for member, key, signature in zip(members, keys, signatures, strict=True)
    }
