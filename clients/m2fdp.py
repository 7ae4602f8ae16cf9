"""M2FDP on the client: a device of a tree, or an aggregator that its devices trust.

A device clips the update of its training and puts it on a grid. If its parent in the tree is on its
own list of trusted parents, it seals the codes for it; otherwise it adds noise. Nothing that a
server says makes it send codes without noise in the open, but on a node that simulates clients.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_privacy import fields as records
from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import WeightedMean
from flwr_privacy.channel import Channel, Part
from flwr_privacy.documents import dumps, loads
from flwr_privacy.errors import DataError, DeclinedError, ProtocolError, check_choice
from flwr_privacy.grid import Grid, saturated
from flwr_privacy.layout import Layout
from flwr_privacy.ledger import Entry, Question
from flwr_privacy.m2fdp import (
    AGGREGATE,
    CODES,
    DELIVER,
    DOWN,
    EVENT,
    UP,
    VALUE_RANGE,
    Delivery,
    Duty,
    Reach,
    Terms,
    TierSums,
    Upload,
    averaged,
    moved,
    noised,
    trained,
)
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.updates import Update, clip, released_names
from flwr_privacy.wire import METRICS, TRAIN, Fields

from .base import SchemeClient, Train
from .custody import SIMULATED, Custody, is_simulated, refuse_node_keys
from .kept import Answer, mark_insecure, once
from .node import may_play_any
from .poisson import PoissonPlan, asked_steps
from .release import PlannedRelease, check_unaccounted
from .zone_keys import channel_to, introduction

__all__ = ["M2FDPClient"]

logger = logging.getLogger("flwr.privacy")

_ROLE, DEVICE, AGGREGATOR = "m2fdp-role", "device", "aggregator"
_WEIGHT = "num-examples"

Codes = NDArray[np.int64]


class M2FDPClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.M2FDP`: a device or an aggregator.

    A device goes around any training. With the unit ``record`` the training must call
    `flwr_privacy.clients.torch.train_poisson`, once, and return what it made. A node whose own
    configuration has ``m2fdp-role = "aggregator"`` averages for its children and trains nothing.

    Guarantee
    ---------
    As `flwr_privacy.strategies.M2FDP`. A device sends codes without noise only sealed
    (`flwr_privacy.channel.Channel`) for a parent that is in ``trusted_parents`` of its own policy
    and whose key it pins, or on a node that simulates clients. An aggregator opens only what
    children whose keys it pins sealed for this event and this set of siblings, adds the noise by
    itself, and hands out one noised average per period: the same again if it is asked again.
    Against a server that does not follow the protocol: it names budgets, noise and the tree, so
    what binds it is the node's policy (``max_epsilon``, ``min_noise_multiplier``,
    ``trusted_parents``). It can leave messages out, down to the fewest children that an aggregator
    averages; the noise is for those that are there. The laws of drift other than ``worst`` are
    declared by the server: a node with ``max_epsilon`` declines them.
    """

    scheme: ClassVar[str] = "m2fdp"
    phases: ClassVar[frozenset[str]] = frozenset({TRAIN, AGGREGATE, DELIVER})

    def introduce(self, experiment_id: str) -> Fields:
        """Return the role of the node, and its public key if it has an identity."""
        custody = Custody.of(self._context())
        return {"role": self._role(), **introduction(custody, experiment_id)}

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Train and answer as a device, or average and pass on as an aggregator.

        Raises
        ------
        DeclinedError
            If the policy or the budget does not allow it, or the parent is not trusted.
        LedgerError
            If the node's files cannot be used.
        DataError
            If the update is not finite, or beyond what codes can hold.
        InvalidParameterError, ProtocolError
            If the question is malformed, a sealed message is not what it should be, or the node
            has another role.
        """
        refuse_node_keys("message", fields)
        custody = Custody.of(self._context())
        custody.policy.check_sum(None)
        role = self._role()
        if role != (DEVICE if phase == TRAIN else AGGREGATOR):
            raise ProtocolError(
                f"phase '{phase}' is not for this node: its configuration has {_ROLE} = '{role}'"
            )
        if phase == AGGREGATE:
            return _Aggregator(custody, fields).average()
        if phase == DELIVER:
            return _Aggregator(custody, fields).deliver()
        return self._answer(custody, arrays, fields, train)

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return empty sums of codes, one for each group of devices."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        grid, keep_back = fields.get("grid"), fields.get("keep-back", [])
        if type(grid) is not int or not isinstance(keep_back, list):
            raise ProtocolError("the question has no grid that all devices share")
        names = released_names(arrays, keep_back)
        return TierSums(arrays, Grid(grid), names, fields["groups"])

    def _answer(
        self, custody: Custody, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        terms = records.read(Terms, fields)
        device = _Device(custody, terms, fields, dict(arrays), train)
        if terms.noise_multiplier == 0:
            check_unaccounted(custody, scheme=self.scheme)
            return device.plain()
        if terms.noised:
            return device.noised()
        if terms.sealed:
            return device.sealed()
        config = self._context().node_config
        if not (is_simulated() or config.get(SIMULATED) or may_play_any(config)):
            raise DeclinedError(
                f"the parent '{terms.parent}' is played by the server: this node sends nothing "
                "without noise in the open (it simulates no clients)"
            )
        return device.in_the_open()

    def _context(self) -> Context:
        if self.context is None:
            raise TypeError("M2FDPClient needs the context: M2FDPClient(client, context)")
        return self.context

    def _role(self) -> str:
        role = self._context().node_config.get(_ROLE, DEVICE)
        return check_choice(_ROLE, str(role), (DEVICE, AGGREGATOR))


class _Device:
    """A device's answer to one question."""

    def __init__(
        self, custody: Custody, terms: Terms, fields: Fields, start: Arrays, train: Train
    ) -> None:
        self._custody = custody
        self._terms = terms
        self._fields = fields
        self._start = start
        self._train = train
        self._grid = Grid(terms.grid)
        self._names = released_names(start, terms.keep_back)
        self._experiment = str(fields["experiment-id"])
        # A release has the name of the exchange with which its period began.
        self._question = Question(
            experiment_id=self._experiment,
            phase=TRAIN,
            server_round=fields["round"],
            request=terms.period,
        )

    def plain(self) -> Answer:
        """Answer without noise, which protects nothing."""
        update = self._update(self._start, SecureRandom())
        codes = self._grid.encode(update.vector)
        return update.arrays(saturated(codes)), _weighted()

    def noised(self) -> Answer:
        """Answer with noise: nobody above is trusted."""
        release = self._release()

        def prepare() -> Callable[[SecureRandom], Answer]:
            update = self._update(self._start, self._sampler())
            sigma = self._terms.noise_multiplier * 2 * self._terms.clipping_norm
            release.check_policy(self._terms.noise_multiplier, sigma)
            codes = self._grid.encode(update.vector)
            update.vector.resize(0, refcheck=False)  # frees it: it is as large as two models

            def noise(random: SecureRandom) -> Answer:
                return update.arrays(
                    noised(codes, sigma=sigma, grid=self._grid, random=random)
                ), _weighted()

            return noise

        return once(release, records.write(self._terms), prepare)

    def in_the_open(self) -> Answer:
        """Answer without noise to a server that plays the trusted parent, in a simulation."""
        release = self._release()
        self._check_paid(release, self._custody.ledger.entries())
        update = self._update(self._start, self._sampler())
        codes = self._grid.encode(update.vector)
        self._pay(release)
        own = _weighted()
        mark_insecure(self._custody, own)
        return update.arrays(saturated(codes)), own

    def sealed(self) -> Answer:
        """Answer with codes that only the trusted parent can read."""
        terms, fields = self._terms, self._fields
        channel = _trusted_channel(self._custody, terms.parent, self._experiment, fields)
        if self._custody.client_id not in terms.siblings:
            raise ProtocolError("the question does not name this device among the children asked")
        release = self._release()
        self._check_paid(release, self._custody.ledger.entries())
        offset, reach = self._offset(channel)
        layout = Layout.of(self._start, self._names)
        model = self._start
        if offset is not None:
            model = moved(self._start, layout, self._grid.step * offset)
        update = self._update(model, self._sampler())
        codes = self._grid.encode(update.vector)
        reach = trained(
            terms.drift, reach, terms.clipping_norm, terms.steps, self._grid, codes.size
        )
        if offset is not None:
            codes += offset
        self._pay(release)
        sealed = channel.seal(
            _packed(Upload(codes, reach), terms),
            *_associated(
                self._experiment,
                fields["round"],
                terms,
                UP,
                self._custody.client_id,
                terms.parent,
                terms.siblings,
            ),
        )
        own: Fields = {**_weighted(), "sealed": sealed}
        mark_insecure(self._custody, own)
        return {}, own

    def _offset(self, channel: Channel) -> tuple[Codes | None, Reach]:
        """Return how far the zone has come since its public start, and what that may tell."""
        terms, fields = self._terms, self._fields
        if "start-sealed" not in fields:
            return None, Reach(anchor=terms.depth)
        content = channel.open(
            fields["start-sealed"],
            *_down(
                self._experiment,
                fields["round"],
                fields.get("start-event"),
                terms.parent,
                self._custody.client_id,
                terms.siblings,
            ),
        )
        upload = _unpacked(content, terms)
        layout = Layout.of(self._start, self._names)
        if upload.codes.size != layout.size:
            raise ProtocolError("the sealed start has another size than the model")
        return upload.codes, upload.reach

    def _update(self, start: Arrays, sampler: SecureRandom) -> Update:
        """Train; return the clipped update."""
        terms = self._terms
        if terms.unit == "record":
            plan = PoissonPlan(sampling_rate=terms.sampling_rate, steps=terms.steps)
            with asked_steps(plan, sampler) as request:
                arrays = dict(self._train(start).arrays)
            request.steps.check(start.values(), arrays.values())
        else:
            arrays = dict(self._train(start).arrays)
        update = Update.between(start, arrays, self._names)
        if terms.clipping_norm:
            clip(update.vector, terms.clipping_norm)
        elif np.abs(update.vector).max(initial=0.0) > VALUE_RANGE:
            raise DataError(f"the update has values beyond {VALUE_RANGE:g}: clip it")
        return update

    def _release(self) -> PlannedRelease:
        terms, charge = self._terms, self._terms.charge()
        if charge is None:
            raise ProtocolError("there is no noise to charge")
        release = PlannedRelease(
            custody=self._custody,
            question=self._question,
            scheme=M2FDPClient.scheme,
            unit=terms.unit,
            charge=charge,
            epsilon=terms.epsilon,
            delta=terms.delta,
            proven=terms.proven or terms.noised,
        )
        release.check_policy(terms.noise_multiplier)
        return release

    def _pay(self, release: PlannedRelease) -> None:
        """Charge the release that this answer goes into, unless an earlier answer has."""
        with self._custody.ledger.locked() as book:
            if not self._check_paid(release, book.entries):
                book.charge(release.entry())

    @staticmethod
    def _check_paid(release: PlannedRelease, entries: Sequence[Entry]) -> bool:
        """Tell whether a release is paid for; decline it if it is not and cannot be.

        Raises
        ------
        DeclinedError
            If it cannot be, or was paid for as another one.
        """
        for entry in entries:
            if entry.question == release.question:
                asked = release.entry()
                known = (entry.scheme, entry.unit, entry.charge)
                if known != (asked.scheme, asked.unit, asked.charge):
                    raise DeclinedError("the same period was asked about with other noise")
                return True
        release.check_affordable(entries)
        return False

    def _sampler(self) -> SecureRandom:
        return self._custody.random(self._question, "sample")


class _Aggregator:
    """An aggregator's answer to one question."""

    def __init__(self, custody: Custody, fields: Fields) -> None:
        self._custody = custody
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
            _unpacked(
                channels[sender].open(
                    sealed,
                    *_associated(
                        self._experiment, self._round, duty, UP, sender, self._me, duty.children
                    ),
                ),
                duty,
            )
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
            return {}, {"sealed": self._handed(Upload(mean.codes, reach), duty, channels)}
        if duty.way == UP:
            channel = _trusted_channel(custody, duty.parent, self._experiment, self._fields)
            parts = _associated(
                self._experiment, self._round, duty, UP, self._me, duty.parent, duty.siblings
            )
            return {}, {"sealed": channel.seal(_packed(mean, duty), *parts)}
        return self._noised(mean, duty, grid)

    def _noised(self, mean: Upload, duty: Duty, grid: Grid) -> Answer:
        """Hand out the average with noise, once per period."""
        custody, charge = self._custody, duty.charge()
        if charge is None:
            raise ProtocolError("there is no noise to charge")
        release = PlannedRelease(
            custody=custody,
            question=Question(
                experiment_id=self._experiment,
                phase=EVENT,
                server_round=self._round,
                request=duty.period,
            ),
            scheme=M2FDPClient.scheme,
            unit=duty.unit,
            charge=charge,
            epsilon=duty.epsilon,
            delta=duty.delta,
            proven=duty.proven,
        )
        sigma = duty.noise_multiplier * mean.reach.total
        release.check_policy(duty.noise_multiplier, sigma)
        asked = records.write(duty)
        # Other answers of the children would be another release: the digest tells them apart.
        asked["sealed"] = hashlib.sha256(b"".join(duty.sealed)).hexdigest()

        def prepare() -> Callable[[SecureRandom], Answer]:
            def noise(random: SecureRandom) -> Answer:
                codes = noised(mean.codes, sigma=sigma, grid=grid, random=random)
                return {CODES: codes}, {METRICS: {}, "sigma": sigma}

            return noise

        return once(release, asked, prepare)

    def deliver(self) -> Answer:
        """Open the model of a clean event above, and seal it for each child."""
        delivery = records.read(Delivery, self._fields)
        fields = self._fields
        parent = str(fields.get("parent", ""))
        channel = _trusted_channel(self._custody, parent, self._experiment, fields)
        siblings = _names(fields.get("siblings"))
        content = channel.open(
            fields.get("start-sealed", b""),
            *_down(self._experiment, self._round, delivery.event, parent, self._me, siblings),
        )
        channels = self._channels(delivery.children)
        sealed = [
            channels[child].seal(
                content,
                *_down(
                    self._experiment,
                    self._round,
                    delivery.event,
                    self._me,
                    child,
                    delivery.children,
                ),
            )
            for child in delivery.children
        ]
        return {}, {"sealed": sealed}

    def _handed(self, upload: Upload, duty: Duty, channels: dict[str, Channel]) -> list[bytes]:
        content = _packed(upload, duty)
        return [
            channels[child].seal(
                content,
                *_down(self._experiment, self._round, duty.event, self._me, child, duty.children),
            )
            for child in duty.children
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


def _trusted_channel(custody: Custody, parent: str, experiment_id: str, fields: Fields) -> Channel:
    """Return the channel to a parent, if the node's own policy trusts it.

    Raises
    ------
    DeclinedError
        If it does not.
    """
    if parent not in (custody.policy.trusted_parents or ()):
        raise DeclinedError(
            f"the parent '{parent[:64]}' is not trusted: this node's policy has trusted_parents = "
            f"{list(custody.policy.trusted_parents or ())}"
        )
    return channel_to(
        custody, experiment_id, parent, fields.get("parent-key"), fields.get("parent-signature")
    )


def _associated(
    experiment_id: str,
    server_round: int,
    terms: Terms | Duty,
    way: str,
    sender: str,
    receiver: str,
    children: Sequence[str],
) -> tuple[Part, ...]:
    """Return what an answer that goes up is bound to: the event, and all who were asked."""
    event = [terms.event, terms.tier, terms.period]
    return ("m2fdp", experiment_id, server_round, event, way, sender, receiver, list(children))


def _down(
    experiment_id: str,
    server_round: int,
    event: Any,
    sender: str,
    receiver: str,
    children: Sequence[str],
) -> tuple[Part, ...]:
    """Return what a model that goes down is bound to."""
    if type(event) is not int:
        raise ProtocolError("the question does not say which event a sealed model is of")
    return ("m2fdp", experiment_id, server_round, event, DOWN, sender, receiver, list(children))


def _packed(upload: Upload, terms: Terms | Duty) -> bytes:
    """Return an upload as bytes, with what sender and receiver must agree on."""
    reach = upload.reach
    return dumps(
        {
            "codes": upload.codes,
            "anchor": reach.anchor,
            "shared": reach.shared,
            "nearer": [list(step) for step in reach.nearer],
            "own": reach.own,
            "agreed": _agreed(terms),
        }
    )


def _unpacked(content: bytes, terms: Terms | Duty) -> Upload:
    """Return the upload of a member of the zone.

    Raises
    ------
    ProtocolError
        If it was asked for other noise, another grid or another unit than this node.
    """
    state = loads(content)
    if state["agreed"] != _agreed(terms):
        raise ProtocolError("a member of the zone was asked for another noise, grid or unit")
    reach = Reach(
        anchor=state["anchor"],
        shared=state["shared"],
        nearer=tuple((tier, length) for tier, length in state["nearer"]),
        own=state["own"],
    )
    return Upload(np.asarray(state["codes"]), reach)


def _agreed(terms: Terms | Duty) -> list[Any]:
    return [
        terms.unit,
        terms.noise_multiplier,
        terms.sampling,
        terms.grid,
        terms.period,
        terms.law,
        terms.growth,
        sorted(terms.keep_back),
    ]


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ProtocolError("the question does not say who was asked")
    return value


def _weighted() -> Fields:
    return {METRICS: {_WEIGHT: 1}}
