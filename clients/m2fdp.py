"""M2FDP on the client: a device of a tree, or an aggregator that its devices trust.

A device clips the update of its training and puts it on a grid. If its parent in the tree is on its
own list of trusted parents, it seals the codes for it; otherwise it adds noise. Nothing that a
server says makes it send codes without noise in the open: only its operator can allow that, or a
simulation.
"""

import logging
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy import fields as records
from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import WeightedMean
from flwr_privacy.channel import Channel
from flwr_privacy.errors import DeclinedError, ProtocolError, check_choice
from flwr_privacy.grid import Grid
from flwr_privacy.layout import Layout
from flwr_privacy.ledger import Entry, Question
from flwr_privacy.m2fdp import (
    AGGREGATE,
    DELIVER,
    SCHEME,
    DeviceUpdate,
    Reach,
    Terms,
    TierSums,
    Upload,
    moved,
    trained,
)
from flwr_privacy.mechanism import Answer, Facts, Release
from flwr_privacy.pipeline import check_going_on, check_limits, mark_insecure, run
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.release import PlannedRelease
from flwr_privacy.updates import Update, check_start, released_names
from flwr_privacy.wire import METRICS, TRAIN, Fields

from .base import SchemeClient, Train
from .custody import Custody, refuse_node_keys
from .poisson import PoissonPlan, asked_steps
from .rehearsal import rehearsed
from .zone_aggregator import Aggregator
from .zone_keys import introduction
from .zone_messages import going_down, going_up, packed, trusted_channel, unpacked

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
    and whose key it pins, or if its operator lists the scheme in ``allow_unprotected`` or the
    client is simulated. An aggregator opens only what
    children whose keys it pins sealed for this event and this set of siblings, adds the noise by
    itself, and hands out one noised average per period: the same again if it is asked again.
    Against a server that does not follow the protocol: it names budgets, noise and the tree, so
    what binds it is the node's policy (``max_epsilon``, ``min_noise_multiplier``,
    ``trusted_parents``). It can leave messages out, down to the fewest children that an aggregator
    averages; the noise is for those that are there. The laws of drift other than ``worst`` are
    declared by the server: a node with ``max_epsilon`` declines them.
    """

    scheme: ClassVar[str] = SCHEME
    promises_dp: ClassVar[bool] = True
    phases: ClassVar[frozenset[str]] = frozenset({TRAIN, AGGREGATE, DELIVER})
    keeps_statistics: ClassVar[bool] = True

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
        self.check_unsummed()
        role = self._role()
        if role != (DEVICE if phase == TRAIN else AGGREGATOR):
            raise ProtocolError(
                f"phase '{phase}' is not for this node: its configuration has {_ROLE} = '{role}'"
            )
        if phase == AGGREGATE:
            return Aggregator(custody, fields, self._hand_out).average()
        if phase == DELIVER:
            return Aggregator(custody, fields, self._hand_out).deliver()
        return self._answer(custody, arrays, fields, train)

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return empty sums of codes, one for each group of devices."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        keep_back = fields.get("keep-back", [])
        if not isinstance(keep_back, list):
            raise ProtocolError("the entry 'keep-back' is no list of names")
        return TierSums(arrays, released_names(arrays, keep_back), fields["groups"])

    def _hand_out(self, release: Release, fields: Fields) -> Answer:
        return self._released(AGGREGATE, {}, fields, release)

    def _answer(
        self, custody: Custody, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        terms = records.read(Terms, fields)
        device = _Device(custody, terms, fields, dict(arrays), train)
        if not terms.noise_multiplier or terms.noised:
            return self._released(TRAIN, arrays, fields, device.release())
        check_going_on(custody, str(fields["experiment-id"]))
        if terms.sealed:
            return device.sealed()
        self.check_unprotected()  # the server plays the parent, which adds the noise
        return device.in_the_open()

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

    def _question(self, way: str = TRAIN) -> Question:
        """Return the name of the release: its period's first exchange, and where the answer goes.

        What goes to two places is in two releases.
        """
        return Question(
            experiment_id=self._experiment,
            phase=way,
            server_round=self._fields["round"],
            request=self._terms.period,
        )

    def release(self) -> Release:
        """Return the release of an update with noise, or without any."""
        return Release(
            mechanism=DeviceUpdate(self._terms, {}),
            work=lambda random, _: self._trained(self._start, random),
            facts=self._rehearsed if self._terms.unit == "record" else None,
            name=self._question(),
            asked=records.write(self._terms),
        )

    def _rehearsed(self) -> Facts:
        """Rehearse the training on generated arrays; see `rehearsed`."""
        zeros = {name: np.zeros_like(array) for name, array in self._start.items()}
        with asked_steps(self._plan()) as request:
            found = rehearsed(TRAIN, lambda: self._train(zeros), lambda: request.steps)
        return Facts(records=found)

    def _plan(self) -> PoissonPlan:
        terms = self._terms
        return PoissonPlan(sampling_rate=terms.sampling_rate, steps=terms.steps)

    def in_the_open(self) -> Answer:
        """Answer without noise to a server that plays the trusted parent, in a simulation."""
        number = self._pay(self._release(self._question("in the open")))
        update = self._update(self._start)
        codes = self._grid.encode(update.vector, np.empty(update.vector.size, np.int32))
        own = _weighted()
        mark_insecure(self._custody, own)
        self._custody.ledger.answer(number)
        return update.arrays(codes), own

    def sealed(self) -> Answer:
        """Answer with codes that only the trusted parent can read."""
        terms, fields = self._terms, self._fields
        channel = trusted_channel(self._custody, terms.parent, self._experiment, fields)
        if self._custody.client_id not in terms.siblings:
            raise ProtocolError("the question does not name this device among the children asked")
        release = self._release(self._question(f"sealed for {terms.parent}"))
        # The most that the zone may add for this answer. What it does add, the parent checks.
        release.check_policy(
            terms.noise_multiplier, terms.noise_multiplier * 2 * terms.clipping_norm
        )
        offset, reach = self._offset(channel)
        layout = Layout.of(self._start, self._names)
        model = self._start
        if offset is not None:
            model = moved(self._start, layout, self._grid.step * offset)
        number = self._pay(release)
        update = self._update(model)
        codes = self._grid.encode(update.vector)
        reach = trained(
            terms.drift, reach, terms.clipping_norm, terms.steps, self._grid, codes.size
        )
        if offset is not None:
            codes += offset
        parts = going_up(
            self._experiment,
            fields["round"],
            terms,
            sender=self._custody.client_id,
            tier=terms.depth,
            receiver=terms.parent,
            children=terms.siblings,
        )
        floor = self._custody.policy.min_sigma or 0.0
        sealed = channel.seal(packed(Upload(codes, reach, floor), terms), *parts)
        own: Fields = {**_weighted(), "sealed": sealed}
        mark_insecure(self._custody, own)
        self._custody.ledger.answer(number)
        return {}, own

    def _offset(self, channel: Channel) -> tuple[Codes | None, Reach]:
        """Return how far the zone has come since its public start, and what that may tell."""
        terms, fields = self._terms, self._fields
        if "start-sealed" not in fields:
            return None, Reach(anchor=terms.depth)
        parts = going_down(
            self._experiment,
            fields["round"],
            fields.get("start-event"),
            sender=terms.parent,
            receiver=self._custody.client_id,
            tier=terms.depth,
            children=terms.siblings,
        )
        content = channel.open(fields["start-sealed"], *parts)
        upload = unpacked(content, terms)
        layout = Layout.of(self._start, self._names)
        if upload.codes.size != layout.size:
            raise ProtocolError("the sealed start has another size than the model")
        return upload.codes, upload.reach

    def _trained(self, start: Arrays, sampler: SecureRandom) -> Arrays:
        """Have the user's training do its work, on Poisson batches where records are protected."""
        terms = self._terms
        if terms.unit != "record":
            return self._train(start).arrays
        with asked_steps(self._plan(), sampler) as request:
            arrays = dict(self._train(start).arrays)
        request.steps.check(start.values(), arrays.values())
        return arrays

    def _update(self, start: Arrays) -> Update:
        """Train after the charge; return the clipped update, zero if the training fails."""
        mechanism = DeviceUpdate(self._terms, {})
        sampler = self._custody.random(self._question(), "sample")
        update: Update = run(
            self._custody,
            self._experiment,
            lambda: mechanism.measure(start, self._trained(start, sampler)),
            lambda: mechanism.failed(start),
        )
        return update

    def _release(self, question: Question) -> PlannedRelease:
        check_start(self._start, self._names)
        terms, charge = self._terms, self._terms.charge()
        if charge is None:
            raise ProtocolError("there is no noise to charge")
        release = PlannedRelease(
            custody=self._custody,
            question=question,
            scheme=SCHEME,
            unit=terms.unit,
            charge=charge,
            epsilon=terms.epsilon,
            delta=terms.delta,
            proven=terms.proven or terms.noised,
        )
        release.check_policy(terms.noise_multiplier)
        return release

    def _pay(self, release: PlannedRelease) -> int:
        """Charge the release that this answer goes into, unless an earlier answer has.

        Returns
        -------
        int
            The number of the charge.
        """
        with self._custody.ledger.locked() as book:
            number = self._paid(release, book.entries)
            if number is not None:
                return number
            check_limits(self._custody, book)
            return book.charge(release.entry())

    @staticmethod
    def _paid(release: PlannedRelease, entries: Sequence[Entry]) -> int | None:
        """Return which charge paid for a release; decline it if there is none and cannot be.

        Raises
        ------
        DeclinedError
            If it cannot be, or was paid for as another one.
        """
        for number, entry in enumerate(entries):
            if entry.question == release.question:
                asked = release.entry()
                known = (entry.scheme, entry.unit, entry.charge)
                if known != (asked.scheme, asked.unit, asked.charge):
                    raise DeclinedError("the same period was asked about with other noise")
                return number
        release.check_affordable(entries)
        return None


def _weighted() -> Fields:
    return {METRICS: {_WEIGHT: 1}}
