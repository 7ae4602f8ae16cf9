"""M2FDP on the client: a device of a tree, or an aggregator that its devices trust.

A device clips the update of its training and puts it on a grid. If its parent in the tree is on its
own list of trusted parents, it seals the codes for it; otherwise it adds noise. Nothing that a
server says makes it send codes without noise in the open: only its operator can allow that, or a
simulation.
"""

from collections.abc import Callable
from typing import ClassVar

from flwr_privacy.accounting import ADD_REMOVE
from flwr_privacy.clients.certificates.poisson_steps import PoissonPlan, asked_steps
from flwr_privacy.clients.node.base import Evaluate, Train
from flwr_privacy.clients.node.client_app import SchemeClientApp
from flwr_privacy.clients.node.context_store import refuse_node_keys
from flwr_privacy.clients.node.private_evaluation import EvaluatingClient
from flwr_privacy.clients.node.rehearsal import rehearsed
from flwr_privacy.errors import ProtocolError, check_choice
from flwr_privacy.m2fdp import (
    AGGREGATE,
    DELIVER,
    SCHEME,
    DeviceUpdate,
    M2FDPTerms,
    SealedUpdate,
    TierSums,
)
from flwr_privacy.m2fdp.messages import going_down, going_up, unpacked
from flwr_privacy.pipeline.experiment_keys import introduction
from flwr_privacy.pipeline.mechanism import Answer, Facts, Release
from flwr_privacy.pipeline.request import request_of
from flwr_privacy.pipeline.sealed import OpenedMessages, Sealed, answer_sealed
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays, zeros_like
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import TRAIN, Fields

from .zone_aggregator import average, deliver, letter_of

__all__ = ["M2FDPClient", "M2FDPClientApp"]

_ROLE, DEVICE, AGGREGATOR = "m2fdp-role", "device", "aggregator"


Tried = Callable[[], None] | None
"""Tries a training on generated records, where it can."""


class M2FDPClient(EvaluatingClient):
    """Client half of `flwr_privacy.strategies.M2FDP`: a device or an aggregator.

    A device goes around any training. With the unit ``record`` the training must call
    `flwr_privacy.clients.torch.train_poisson`, once, and return what it made. A node whose own
    configuration has ``m2fdp-role = "aggregator"`` averages for its children and trains nothing.

    Guarantee
    ---------
    As `flwr_privacy.strategies.M2FDP`. A device sends codes without noise only sealed
    (`flwr_privacy.wire.channel.Channel`) for a parent that is in ``trusted_parents`` of its own
    policy and whose key it pins, or if its operator lists the scheme in ``allow_unprotected`` or
    the client is simulated. An aggregator opens only what children whose keys it pins sealed for
    this event and this set of siblings, adds the noise by itself, and hands out one noised average
    per period: the same again if it is asked again. Against messages that do not follow the
    protocol: a server names budgets, noise and the tree, so what binds it is the node's policy
    (``max_epsilon``, ``min_noise_multiplier``, ``trusted_parents``). It can leave messages out,
    down to the fewest children that an aggregator averages; the noise is for those that are there.
    The laws of drift other than ``worst`` are declared by the server: a node whose policy has
    ``max_epsilon``, ``units`` or a least noise declines them. In a private evaluation a device adds
    all of the noise itself, whomever it trusts, and an aggregator takes no part.
    """

    scheme: ClassVar[str] = SCHEME
    guarantees_dp: ClassVar[bool] = True
    phases: ClassVar[frozenset[str]] = frozenset({TRAIN, AGGREGATE, DELIVER})
    keeps_statistics: ClassVar[bool] = True
    sums_evaluations: ClassVar[bool] = False
    record_neighbours: ClassVar[str] = ADD_REMOVE

    def introduce(self, experiment_id: str) -> Fields:
        """Return the role of the node, and its public key if it has an identity."""
        return {"role": self._role(), **introduction(self._store(), SCHEME, experiment_id)}

    def handle(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Answer:
        """Answer one message, sealed or in the open; see `SchemeClient.handle`."""
        release = self._made_of(phase, arrays, fields, train)
        if isinstance(release, Release):
            return self._released(phase, arrays, fields, release)
        refuse_node_keys("message", fields)
        request = request_of(arrays, self.scheme, phase, fields, self.guarantees_dp)
        return answer_sealed(self._store(), request, release)

    def _made_of(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> Release | Sealed:
        """Return the release of a device's training, or what an aggregator makes of its children's.

        Raises
        ------
        InvalidParameterError, ProtocolError
            If the request is malformed, or the node has another role.
        """
        role = self._role()
        if role != (DEVICE if phase == TRAIN else AGGREGATOR):
            raise ProtocolError(
                f"phase '{phase}' is not for this node: its configuration has {_ROLE} = '{role}'"
            )
        me = client_id_from(self._context().node_config)
        if phase == AGGREGATE:
            return average(me, fields)
        if phase == DELIVER:
            return deliver(me, fields)
        terms = records.read_terms(M2FDPTerms, fields)
        # Records of its own training are counted instead, where one of them is protected.
        tried = None if terms.unit == "record" else self.rehearsal(arrays, fields, train)
        if terms.hides:
            return _sealed_update(me, terms, fields, dict(arrays), train, tried)
        return _update(terms, fields, dict(arrays), train, tried)

    def release_of_evaluation(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Release:
        """Return the release of what a device says of a model.

        Raises
        ------
        ProtocolError, InvalidParameterError
            If the node is an aggregator, or as `EvaluatingClient.release_of_evaluation`.
        """
        if (role := self._role()) != DEVICE:
            raise ProtocolError(f"this node evaluates nothing: it has {_ROLE} = '{role}'")
        return super().release_of_evaluation(arrays, fields, evaluate)

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return empty sums of codes, one for each group of devices."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        keep_back = fields.get("keep-back", [])
        if not isinstance(keep_back, list):
            raise ProtocolError("the entry 'keep-back' is no list of names")
        return TierSums(arrays, released_names(arrays, keep_back), fields["groups"])

    def _role(self) -> str:
        role = self._context().node_config.get(_ROLE, DEVICE)
        return check_choice(_ROLE, str(role), (DEVICE, AGGREGATOR))


class M2FDPClientApp(SchemeClientApp):
    """Flower's ClientApp with `M2FDPClient` around it; see `SchemeClientApp`."""

    scheme_client = M2FDPClient


def _update(
    terms: M2FDPTerms, fields: Fields, start: Arrays, train: Train, tried: Tried
) -> Release:
    """Return the release of an update in the open: with noise, without any, or of a simulation."""
    rehearsing = terms.unit == "record" and (terms.noised or not terms.noise_multiplier)
    return Release(
        mechanism=DeviceUpdate(terms, {}),
        work=lambda random, _: _trained(terms, start, train, random),
        facts=(lambda: _rehearsed(terms, start, train)) if rehearsing else None,
        rehearsal=tried,
        name=_release_name(terms, fields),
        asked=records.write(terms),
    )


def _sealed_update(
    me: str, terms: M2FDPTerms, fields: Fields, start: Arrays, train: Train, tried: Tried
) -> Sealed:
    """Return an update that only the trusted parent can read."""
    if me not in terms.siblings:
        raise ProtocolError("the request does not name this device among the children asked")
    received = []
    if "start-sealed" in fields:
        about = going_down(
            fields,
            fields.get("start-event"),
            sender=terms.parent,
            receiver=me,
            tier=terms.depth,
            children=terms.siblings,
        )
        received = [letter_of(fields, terms.parent, about, fields["start-sealed"])]

    def release(opened: OpenedMessages) -> Release:
        zone = None
        if opened.contents:
            zone = unpacked(opened.contents[0], terms, sender=terms.parent)
        mechanism = SealedUpdate(terms, {}, zone, opened.floor)
        return Release(
            mechanism=mechanism,
            work=lambda random, _: _trained(terms, mechanism.model(start), train, random),
            name=_release_name(terms, fields),
            rehearsal=tried,
        )

    about = going_up(
        fields,
        terms,
        sender=me,
        tier=terms.depth,
        receiver=terms.parent,
        children=terms.siblings,
    )
    return Sealed(
        release=release,
        received=received,
        sent=[letter_of(fields, terms.parent, about)],
        parent=terms.parent,
    )


def _release_name(terms: M2FDPTerms, fields: Fields) -> Question:
    """Return the name of a release: its period's first exchange, and where the answer goes."""
    return Question(
        experiment_id=str(fields["experiment-id"]),
        phase=terms.way,
        server_round=fields["round"],
        request=terms.period,
    )


def _rehearsed(terms: M2FDPTerms, start: Arrays, train: Train) -> Facts:
    """Rehearse the training on generated arrays; see `rehearsed`."""
    with asked_steps(_plan(terms)) as request:
        return Facts(
            records=rehearsed(TRAIN, lambda: train(zeros_like(start)), lambda: request.certificate)
        )


def _trained(terms: M2FDPTerms, start: Arrays, train: Train, sampler: SecureRandom) -> Arrays:
    """Have the user's training do its work, on Poisson batches where records are protected."""
    if terms.unit != "record":
        return train(start).arrays
    with asked_steps(_plan(terms), sampler) as request:
        arrays = dict(train(start).arrays)
    request.certificate.check(start.values(), arrays.values())
    return arrays


def _plan(terms: M2FDPTerms) -> PoissonPlan:
    return PoissonPlan(sampling_rate=terms.sampling_rate, steps=terms.steps)
