"""MSP and MSPDQ on the client: train, split, mix; sub-states stay here, in the app's scratch state.

A learning round takes several messages. What the client keeps between them lies in Flower's
`context.state`: until the last one, or until the next training if the server never asks for that.
"""

from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from flwr_privacy.clients.node.base import SchemeClient, Train
from flwr_privacy.clients.node.client_app import SchemeClientApp
from flwr_privacy.clients.node.records import RecordArrays, to_record
from flwr_privacy.coding.packing import pack
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.mspdq import (
    CODES,
    MIX,
    SYNC,
    Member,
    MSPTerms,
    SubStates,
    centred,
    code_sum,
    decode_start,
    encode_start,
    outweighs,
)
from flwr_privacy.pipeline.mechanism import Answer, Unprotected
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.wire.arrays import Arrays, HashedArrays
from flwr_privacy.wire.fields import read_terms, write
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.layout import Layout
from flwr_privacy.wire.message import METRICS, TRAIN, Fields

__all__ = ["MSPClient", "MSPClientApp", "MSPDQClient", "MSPDQClientApp"]

_PLACE, _STATES = "flwr-privacy.mixing", "flwr-privacy.sub-states"
_WEIGHT = "num-examples"
_AVERAGED = "_averaged"

Vectors = NDArray[np.float64]


class _MixingClient(SchemeClient):
    """What both client halves share: the round's memory, and who is asked what when."""

    steps: ClassVar[frozenset[str]] = frozenset({SYNC, MIX})
    keeps_statistics: ClassVar[bool] = True

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Unprotected:
        """Return the release of the client's next message of a learning round."""
        return Unprotected(
            lambda random: self._message(phase, arrays, fields, train, random("mixing"))
        )

    def _message(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train, random: SecureRandom
    ) -> Answer:
        """Answer a request of a learning round.

        Raises
        ------
        DataError
            If the trained model is not finite.
        ProtocolError
            If the request is malformed, or does not follow the client's last message: it belongs
            to another round, repeats an old one, or the client did not train.
        InvalidParameterError
            If a parameter is not allowed.
        """
        round_ = _Round(self._context(), fields)
        if phase == TRAIN:
            return self._begin(round_, arrays, fields, train, random)
        terms = round_.terms()
        layout, average = _averaged(arrays)
        if phase == SYNC:
            weight = terms.mixing.own_weight(random)
            member = Member.begin(terms, round_.model(layout.size), average, weight=weight)
            return self._first(round_, member, layout, fields, random)
        member = round_.member(terms, layout.size)
        step = fields.get("step")
        if type(step) is not int or step != member.sent:
            raise ProtocolError(
                f"mixing step {step!r} does not follow this client's message "
                f"{member.sent}: it was taken, or the one before was not"
            )
        member.step(average, random)
        return self._said(round_, member, layout, fields, random)

    def _begin(
        self, round_: "_Round", arrays: Arrays, fields: Fields, train: Train, random: SecureRandom
    ) -> Answer:
        """Train, split, and return message 0 (or 1, where the client can take the first step)."""
        round_.forget()
        terms = read_terms(MSPTerms, fields)
        self._check(terms, fields)
        start = dict(arrays)
        layout = Layout.of(start, released_names(start, terms.keep_back))
        common = layout.vector(start)
        model = layout.vector(train(start).arrays)
        # From a reference it is drawn when the client begins to mix.
        weight = 0 if terms.start == "reference" else terms.mixing.own_weight(random)
        if terms.levels == 0:
            visible = terms.law.visible(model, random)
            out = layout.arrays(visible)
            member = Member.begin(terms, model, layout.vector(out), visible, weight=weight)
            round_.keep(member)
            return out, {}
        if terms.start == "global":
            member = Member.begin(terms, model, common, weight=weight)
            return self._first(round_, member, layout, fields, random)
        if terms.start == "reference":
            round_.keep_model(terms, model)
            if not fields.get("refers", False):
                return {}, {}
        codes, ends = encode_start(terms.law.visible(model, random), terms.levels, random)
        own: Fields = {"ends": list(ends)}
        if terms.start == "independent":
            first = decode_start(codes, ends, terms.levels)
            member = Member.begin(terms, model, first, weight=weight)
            own |= _scalar(member)
            round_.keep(member)
        return {CODES: pack(codes, terms.bits)}, own

    def _first(
        self,
        round_: "_Round",
        member: Member,
        layout: Layout,
        fields: Fields,
        random: SecureRandom,
    ) -> Answer:
        """Return the first message after a common start: that of step 0 if it can be taken."""
        if not member.terms.leaps:
            round_.keep(member)
            return {}, _scalar(member)
        member.step(member.heard, random)  # all have the start, so their average is the start
        return self._said(round_, member, layout, fields, random)

    def _said(
        self,
        round_: "_Round",
        member: Member,
        layout: Layout,
        fields: Fields,
        random: SecureRandom,
    ) -> Answer:
        """Return the message after a step."""
        own: Fields = {}
        terms = member.terms
        if terms.levels == 0:
            out: dict[str, Any] = layout.arrays(member.states.visible)
            member.heard = layout.vector(out)
        else:
            width = None if terms.interval == "self" else _width(fields)
            said = member.say(width, random)
            if fields["summed"]:
                out = {CODES: centred(said.codes, terms.levels).astype(np.int32)}
                own = {METRICS: {_WEIGHT: _draws(fields, round_.client_id)}}
            else:
                out = {CODES: pack(said.codes, terms.bits)}
                own = {"saturated": said.saturated, **_scalar(member)}
                if width is None:
                    own["half-width"] = said.width / 2
        round_.keep(member)
        return out, own

    def _check(self, terms: MSPTerms, fields: Fields) -> None:
        """Refuse terms that this client half does not follow."""
        raise NotImplementedError


class MSPClient(_MixingClient):
    """Client half of `flwr_privacy.strategies.MSP`.

    Put it around any training. What leaves the node are visible sub-states, and no metrics.

    Guarantee
    ---------
    None against whoever sees the messages, which the server does: the first two of a round give the
    trained model away (`flwr_privacy.simulations.research.mspdq.consensus`).
    """

    scheme: ClassVar[str] = "msp"
    phases: ClassVar[frozenset[str]] = frozenset({TRAIN, MIX})

    def _check(self, terms: MSPTerms, fields: Fields) -> None:
        if terms.levels != 0:
            raise InvalidParameterError("levels", terms.levels, "0: MSP does not quantize")


class MSPClientApp(SchemeClientApp):
    """Flower's ClientApp with `MSPClient` around it; see `SchemeClientApp`."""

    scheme_client = MSPClient


class MSPDQClient(_MixingClient):
    """Client half of `flwr_privacy.strategies.MSPDQ`.

    Put it around any training. What leaves the node are codes of a few bits, what the rule of the
    intervals asks for, and no metrics; under a secure sum masked codes and nothing else.

    Guarantee
    ---------
    Under a secure sum that of `flwr_privacy.secure_sum.Participant`: the server sees sums of codes.
    Otherwise none against whoever sees the messages, up to the rounding: see
    `flwr_privacy.strategies.MSPDQ`. A node with ``min_summed`` in its policy answers only within
    sums; one with ``max_epsilon``, ``units`` or a least noise declines in any case: a sum has no
    epsilon.
    """

    scheme: ClassVar[str] = "mspdq"
    phases: ClassVar[frozenset[str]] = frozenset({TRAIN, SYNC, MIX})
    sums: ClassVar[str] = "may"

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of codes, where they are summed."""
        if phase not in (TRAIN, MIX) or not fields.get("sums", False):
            return super().accumulator(phase, arrays, fields)
        names = released_names(arrays, fields.get("keep-back", [])) if phase == TRAIN else arrays
        return code_sum(Layout.of(arrays, names).size)

    def _check(self, terms: MSPTerms, fields: Fields) -> None:
        if terms.levels == 0:
            raise InvalidParameterError("levels", terms.levels, "at least 2")
        if not fields["summed"]:
            return
        if terms.start != "global" or not terms.intervals.public:
            raise ProtocolError(
                f"start '{terms.start}' and interval '{terms.interval}' under a secure sum: they "
                "would show what a single client has; only the global start with public widths "
                "does not"
            )


class MSPDQClientApp(SchemeClientApp):
    """Flower's ClientApp with `MSPDQClient` around it; see `SchemeClientApp`."""

    scheme_client = MSPDQClient


class _Round:
    """What a client keeps of a learning round, in its app's state."""

    def __init__(self, context: Context, fields: Fields) -> None:
        self.client_id = client_id_from(context.node_config)
        self._state = context.state
        self._name = {"experiment-id": fields["experiment-id"], "round": fields["round"]}
        self._summed = bool(fields["summed"])

    def forget(self) -> None:
        self._state.pop(_PLACE, None)
        self._state.pop(_STATES, None)

    def keep(self, member: Member) -> None:
        """Keep a client as it is after a message; after the last one there is nothing to keep."""
        if member.sent == member.terms.rounds:
            self.forget()
            return
        arrays = {"visible": member.states.visible, "hidden": member.states.hidden}
        kept = {**arrays, "heard": member.heard}
        self._keep(member.terms, kept, member.sent, member.weight)

    def keep_model(self, terms: MSPTerms, model: Vectors) -> None:
        self._keep(terms, {"model": model}, 0, 0)

    def terms(self) -> MSPTerms:
        """Return the parameters of the round that the client trained in.

        Raises
        ------
        ProtocolError
            If it was another round, or none.
        """
        place = self._state.get(_PLACE)
        if not isinstance(place, ConfigRecord) or any(
            place.get(key) != value for key, value in self._name.items()
        ):
            raise ProtocolError(
                f"this client has no sub-states of round {self._name['round']}: it did not train "
                "in it, or the round is over"
            )
        if place.get("summed") != self._summed:
            raise ProtocolError(
                "the first message of this round was summed securely, and so is every other"
                if place.get("summed")
                else "the first message of this round was not summed, so no other is"
            )
        return read_terms(MSPTerms, place)

    def member(self, terms: MSPTerms, size: int) -> Member:
        """Return the client as it was after its last message."""
        place = self._state[_PLACE]
        visible, hidden, heard = self._arrays(("visible", "hidden", "heard"), size)
        states = SubStates(visible=visible, hidden=hidden)
        sent, weight = (int(place[name]) for name in ("sent", "weight"))  # type: ignore[arg-type]
        return Member(terms=terms, states=states, heard=heard, weight=weight, sent=sent)

    def model(self, size: int) -> Vectors:
        """Return the trained model, which waits for the common start."""
        (model,) = self._arrays(("model",), size)
        return model

    def _arrays(self, names: tuple[str, ...], size: int) -> list[Vectors]:
        record = self._state[_STATES]
        if not isinstance(record, ArrayRecord) or not set(names) <= set(record):
            raise ProtocolError("the request does not follow the client's last message")
        # Not copied: a step makes new arrays, so a message that fails half-way leaves these.
        arrays: list[Any] = [RecordArrays(record)[name] for name in names]
        if any(array.size != size for array in arrays):
            raise ProtocolError(
                f"an average of {size} values for a client with {arrays[0].size} of them"
            )
        return arrays

    def _keep(self, terms: MSPTerms, arrays: dict[str, Vectors], sent: int, weight: int) -> None:
        place = self._state.get(_PLACE)  # of this round, if there is one
        if not isinstance(place, ConfigRecord):
            place = ConfigRecord({**write(terms), **self._name, "summed": self._summed})
        kept = place.copy()  # if the message fails after this, it is forgotten
        kept["sent"], kept["weight"] = sent, weight
        self._state[_PLACE] = kept
        self._state[_STATES] = to_record(arrays, local=True)


def _averaged(arrays: Arrays) -> tuple[Layout, Vectors]:
    """Return the layout of an average and its values; once where several clients share it."""
    made = vars(arrays) if isinstance(arrays, HashedArrays) else {}
    if _AVERAGED not in made:
        layout = Layout.of(arrays, list(arrays))
        average = layout.vector(arrays)
        average.flags.writeable = False
        made[_AVERAGED] = layout, average
    averaged: tuple[Layout, Vectors] = made[_AVERAGED]
    return averaged


def _scalar(member: Member) -> Fields:
    """Return what the server must know for the next width, if its rule asks."""
    asks = member.terms.interval in ("paper", "linf")
    return {"scalar": member.scalar()} if asks else {}


def _width(fields: Fields) -> float:
    width = fields.get("width")
    if type(width) is not float:
        raise ProtocolError("the request has no width of the intervals")
    return width


def _draws(fields: Fields, client_id: str) -> int:
    """Return how often a client was drawn, from the table that all have; once without one."""
    names, counts = fields.get("drawn", []), fields.get("draws", [])
    if not names and not counts:
        return 1
    if not (
        isinstance(names, list)
        and isinstance(counts, list)
        and names == sorted(set(names))
        and len(names) == len(counts)
        and all(type(count) is int and count > 0 for count in counts)
        and client_id in names
    ):
        raise ProtocolError("the table of draws is malformed, or does not have this client")
    draws: dict[str, int] = dict(zip(names, counts, strict=True))
    if outweighs(draws, least=fields["summed"]):
        raise ProtocolError(
            "a client was drawn so often that it may weigh more than all others in a sum"
        )
    return draws[client_id]
