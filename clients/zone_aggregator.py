"""An aggregator that its children trust: it opens what they sealed, averages, and hands it on."""

from collections.abc import Callable, Sequence

from flwr_privacy import fields as records
from flwr_privacy.channel import Channel, Part
from flwr_privacy.errors import DeclinedError, ProtocolError
from flwr_privacy.grid import Grid
from flwr_privacy.ledger import Question
from flwr_privacy.m2fdp import (
    DOWN,
    EVENT,
    UP,
    Delivery,
    Duty,
    Upload,
    ZoneAverage,
    averaged,
)
from flwr_privacy.mechanism import Answer, Release
from flwr_privacy.wire import Fields

from .custody import Custody
from .zone_keys import channel_to
from .zone_messages import going_down, going_up, packed, trusted_channel, unpacked

__all__ = ["Aggregator"]


class Aggregator:
    """An aggregator's answer to one question."""

    def __init__(
        self, custody: Custody, fields: Fields, hand_out: Callable[[Release, Fields], Answer]
    ) -> None:
        self._custody = custody
        self._hand_out = hand_out
        self._fields = fields
        self._me = custody.client_id
        self._experiment = str(fields["experiment-id"])
        self._round: int = fields["round"]

    def average(self) -> Answer:
        """Open what the children sealed, average it, and hand it on as the event has it."""
        duty, custody = records.read(Duty, self._fields), self._custody
        least = max(duty.min_children, custody.policy.min_children)
        if len(duty.senders) < least:
            raise DeclinedError(
                f"{len(duty.senders)} of {len(duty.children)} children answered: this node "
                f"averages at least {least}"
            )
        grid = Grid(duty.grid)
        members = duty.children if duty.way == DOWN else duty.senders
        channels = self._channels(members)
        uploads = [
            unpacked(channels[sender].open(sealed, *self._from_child(duty, sender)), duty)
            for sender, sealed in zip(duty.senders, duty.sealed, strict=True)
        ]
        if len({upload.codes.size for upload in uploads}) != 1:
            raise ProtocolError("the children's answers have different sizes")
        if duty.noise_multiplier == 0:
            raise ProtocolError(
                "an aggregator of its own has nothing to do where there is no noise"
            )
        mean = averaged(uploads, duty.drift, tier=duty.own_tier, grid=grid)
        if duty.way == DOWN:
            reach = duty.drift.broadcast(mean.reach, tier=duty.own_tier)
            content = packed(Upload(mean.codes, reach, mean.floor), duty)
            return {}, {"sealed": self._for_children(content, duty, channels)}
        if duty.way == UP:
            return {}, {"sealed": self._for_parent(mean, duty)}
        return self._noised(mean, duty)

    def deliver(self) -> Answer:
        """Open the model of a clean event above, and seal it for each child."""
        delivery, fields = records.read(Delivery, self._fields), self._fields
        parent, siblings = fields.get("parent"), fields.get("siblings")
        if not isinstance(parent, str) or not isinstance(siblings, list):
            raise ProtocolError("the question does not say whose model it is, and who was asked")
        channel = trusted_channel(self._custody, parent, self._experiment, fields)
        parts = going_down(
            self._experiment,
            self._round,
            delivery.event,
            sender=parent,
            receiver=self._me,
            tier=delivery.own_tier,
            children=siblings,
        )
        content = channel.open(fields.get("start-sealed", b""), *parts)
        channels = self._channels(delivery.children)
        return {}, {"sealed": self._for_children(content, delivery, channels)}

    def _from_child(self, duty: Duty, child: str) -> tuple[Part, ...]:
        return going_up(
            self._experiment,
            self._round,
            duty,
            sender=child,
            tier=duty.own_tier + 1,
            receiver=self._me,
            children=duty.children,
        )

    def _for_parent(self, mean: Upload, duty: Duty) -> bytes:
        """Seal an average for the one parent that this node trusts."""
        trusted = self._custody.policy.trusted_parents or ()
        if len(trusted) > 1:
            raise DeclinedError(
                f"this node's policy has trusted_parents = {list(trusted)}: an aggregator has one "
                "at most, or its children's answers would be in two releases"
            )
        channel = trusted_channel(self._custody, duty.parent, self._experiment, self._fields)
        parts = going_up(
            self._experiment,
            self._round,
            duty,
            sender=self._me,
            tier=duty.own_tier,
            receiver=duty.parent,
            children=duty.siblings,
        )
        return channel.seal(packed(mean, duty), *parts)

    def _noised(self, mean: Upload, duty: Duty) -> Answer:
        """Hand out the average with noise, once per period.

        Not if this node trusts a parent: the same answers would be in two releases, of which the
        devices pay one.
        """
        if self._custody.policy.trusted_parents:
            raise DeclinedError(
                "this node's policy has trusted_parents: it hands nothing on with noise"
            )
        sigma = duty.noise_multiplier * mean.reach.total
        if sigma < mean.floor:
            raise DeclinedError(
                f"the noise would be {sigma:.6g}: a member of the zone has min_sigma = "
                f"{mean.floor:.6g}"
            )
        # A round that is resumed brings the same answers sealed anew, and perhaps not all of them:
        # it gets what was handed out before.
        anew = ("senders", "sealed", "siblings")
        release = Release(
            mechanism=ZoneAverage(duty, mean),
            work=lambda _, __: None,
            name=Question(
                experiment_id=self._experiment,
                phase=EVENT,
                server_round=self._round,
                request=duty.period,
            ),
            asked={k: v for k, v in records.write(duty).items() if k not in anew},
            single=True,
        )
        return self._hand_out(release, self._fields)

    def _for_children(
        self, content: bytes, about: Duty | Delivery, channels: dict[str, Channel]
    ) -> list[bytes]:
        """Seal a model for each child that was asked."""
        return [
            channels[child].seal(
                content,
                *going_down(
                    self._experiment,
                    self._round,
                    about.event,
                    sender=self._me,
                    receiver=child,
                    tier=about.own_tier + 1,
                    children=about.children,
                ),
            )
            for child in about.children
        ]

    def _channels(self, members: Sequence[str]) -> dict[str, Channel]:
        """Return the channels to children; all of them must be pinned."""
        fields = self._fields
        keys, signatures = fields.get("keys"), fields.get("signatures")
        if not isinstance(keys, list) or not isinstance(signatures, list):
            raise ProtocolError("the question has no keys of the children")
        if not len(keys) == len(signatures) == len(members):
            raise ProtocolError("not one key and one signature for each child")
        return {
            member: channel_to(self._custody, self._experiment, member, key, signature)
            for member, key, signature in zip(members, keys, signatures, strict=True)
        }
