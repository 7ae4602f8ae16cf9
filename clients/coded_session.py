"""What a client of FedVS does with a question: deal rows, deal weights, evaluate what is coded."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy import fields as records
from flwr_privacy.arrays import Arrays
from flwr_privacy.channel import Part
from flwr_privacy.documents import dumps, loads
from flwr_privacy.errors import (
    DeclinedError,
    FieldRangeError,
    InvalidParameterError,
    ProtocolError,
)
from flwr_privacy.experiment_keys import forget_pair, own_pair, signature_of
from flwr_privacy.fedvs.network import initial_weights, project
from flwr_privacy.fedvs.quantisation import (
    check_partial_sum,
    equal_share,
    quantise_stochastic,
)
from flwr_privacy.fedvs.sharing import data_shares, evaluate, weight_shares, zero_masks
from flwr_privacy.fedvs.terms import (
    ANSWER,
    CODE,
    DEAL,
    SEALED,
    Chunk,
    CodeTerms,
    Dealing,
    Evaluation,
)
from flwr_privacy.ledger import Question
from flwr_privacy.mechanism import Answer
from flwr_privacy.pipeline import mark_insecure
from flwr_privacy.wire import METRICS, Fields

from .coded_files import CodedRows, Memory
from .custody import Custody
from .prepared import Prepared
from .sealed_shares import SCHEME, SealedShares, key_name
from .vertical import (
    Expanded,
    GivenData,
    Owned,
    Update,
    begin_weights,
    gradient_in,
    move_weights,
    told_of,
)

__all__ = ["CodedSession", "text_in"]

logger = logging.getLogger("flwr.privacy")


class CodedSession:
    """One message to one client: what it remembers, and what it answers."""

    def __init__(
        self, custody: Custody, question: Question, data: GivenData, *, simulated: bool
    ) -> None:
        self._custody = custody
        self._question = question
        self._experiment = question.experiment_id
        self._seals = SealedShares(custody, self._experiment, question.server_round)
        self._owned = Owned(data, custody, self._experiment)
        self._memory = Memory(custody, SCHEME, self._experiment, simulated=simulated)

    # -- The setup ---------------------------------------------------------------------------

    def enrol(self, generation: str) -> Answer:
        """Say who one is, with a key for this coding alone, and how large the data are."""
        name = key_name(self._experiment, generation)
        public = own_pair(self._custody, SCHEME, name).public
        signature = signature_of(self._custody, SCHEME, name, public)
        return {}, {**told_of(self._owned), "key": public, "signature": signature}

    def code(self, terms: CodeTerms, chunk: Chunk, arrays: Arrays, fields: Fields) -> Answer:
        """Take in the shares of the chunk before, and deal those of the next one (FedVS, (2))."""
        training, update = text_in(fields, "training"), fields.get("update")
        if type(update) is not int or update < 0:
            raise ProtocolError("the entry 'update' is no count")
        with self._memory.state() as state:
            if state.get("generation") != terms.generation:
                self._begin(state, terms, training, update)
            elif state["terms"] != dumps(records.write(terms)):
                raise ProtocolError("the terms are not those with which this coding began")
            if SEALED in arrays:
                self._store(state, terms, np.asarray(arrays[SEALED]))
            elif state["pending"]:
                raise ProtocolError("the shares of the rows that were dealt last are missing")
            if not chunk.count:
                self._check_complete(state, terms)
                return {}, self._own(fresh=state["fresh"])
            return self._deal_rows(state, terms, chunk)

    def _begin(self, state: dict[str, Any], terms: CodeTerms, training: str, update: int) -> None:
        """Begin a coding; weights are kept if they are of this training."""
        width = terms.widths[terms.place(self._custody.client_id)]
        shape = (width, terms.embedding)
        self._check_columns(terms)
        if terms.generation in state.get("generations", []):
            raise ProtocolError("a coding of the data that was given up before")
        fresh = begin_weights(
            state,
            training=training,
            update=update,
            shape=shape,
            draw=lambda: project(
                initial_weights(*shape, self._random("initial weights")), terms.w_max
            ),
        )
        if "generation" in state:
            name = key_name(self._experiment, state["generation"])
            forget_pair(self._custody, SCHEME, name)
        state |= {
            "generation": terms.generation,
            "generations": [*state.get("generations", []), terms.generation],
            "terms": dumps(records.write(terms)),
            "coded": dict.fromkeys(terms.parts, 0),
            "pending": [],
            "complete": False,
            "fresh": fresh,
            "set": {},
            "names": [],
            "summed": state.get("summed", []),
        }
        files = [self._file(terms, part) for part in terms.parts]
        self._memory.forget_coded({file.path for file in files})
        for file in files:
            file.create()

    def _check_columns(self, terms: CodeTerms) -> None:
        """Refuse terms that are about other data than the client's."""
        me, data = terms.place(self._custody.client_id), self._owned.raw()
        said = terms.columns[me], dict(zip(terms.parts, terms.rows, strict=True))
        own = data.columns, {name: len(rows) for name, rows in data.parts.items()}
        if said != own:
            raise ProtocolError(
                f"the terms have {said[0]} columns and rows {said[1]} of this client: it has "
                f"{own[0]} and {own[1]}"
            )

    def _deal_rows(self, state: dict[str, Any], terms: CodeTerms, chunk: Chunk) -> Answer:
        segments, me = terms.segments(chunk.part), terms.place(self._custody.client_id)
        done = state["coded"][chunk.part]
        if chunk.first != done or not 0 < chunk.count <= segments.length - done:
            raise ProtocolError(
                f"coded rows {chunk.first} to {chunk.first + chunk.count} of '{chunk.part}' do "
                f"not follow the {done} of {segments.length} that were dealt"
            )
        coded = np.arange(chunk.first, chunk.first + chunk.count)
        places, counted = segments.real_rows(coded), segments.counted(coded)
        random = self._random("shares")
        elements = np.empty((len(places), terms.widths[me]), np.int64)
        elements[counted] = self._integers(terms, chunk.part, places[counted]) % terms.prime
        # A pad of zeros would break what the answers hide: it is no row at all.
        pads = terms.field.uniform((int((~counted).sum()), terms.widths[me]), random)
        elements[~counted] = 0 if terms.paper else pads
        shares = data_shares(terms.code, elements, random)
        self._file(terms, chunk.part).write(chunk.first, [(terms.offsets[me], shares[me])])
        state["coded"][chunk.part] += chunk.count
        state["pending"] = [chunk.part, chunk.first, chunk.count]
        sealed = self._seals.seal(
            terms, shares, CODE, [terms.generation, chunk.part, chunk.first, chunk.count]
        )
        return {SEALED: sealed}, self._own()

    def _store(self, state: dict[str, Any], terms: CodeTerms, sealed: NDArray[Any]) -> None:
        if not state["pending"]:
            raise ProtocolError("shares of rows that were not dealt, or were stored before")
        part, first, count = state["pending"]
        sizes = [count * width for width in terms.widths]
        purpose: list[Part] = [terms.generation, part, first, count]
        opened = self._seals.open(terms, terms.members, sealed, sizes, CODE, purpose)
        blocks = (
            (terms.offsets[terms.place(sender)], elements.reshape(count, -1))
            for sender, elements in opened
        )
        self._file(terms, part).write(first, blocks)
        state["pending"] = []

    def _check_complete(self, state: dict[str, Any], terms: CodeTerms) -> None:
        lengths = {part: terms.segments(part).length for part in terms.parts}
        if state["coded"] != lengths:
            raise ProtocolError(f"coded rows are missing: {state['coded']} of {lengths}")
        if self._memory.durable:
            for part in terms.parts:
                self._file(terms, part).sync()
        state["complete"] = True

    # -- A round -----------------------------------------------------------------------------

    def deal(self, dealing: Dealing, arrays: Arrays) -> Answer:
        """Move the weights by the gradient that came; deal shares of them (FedVS, (3), (4))."""
        with self._coded_state(dealing.generation) as (state, terms):
            if terms is None:
                return {}, self._own(lost=True)
            self._move(state, terms, dealing, arrays)
            if not dealing.deals:
                return {}, self._own()
            name, asked = dealing.share_set, records.write(dealing)
            if state["set"].get("name") == name:
                kept = self._memory.dealt(name)
                if not kept or kept["asked"] != asked:
                    raise DeclinedError("shares of this set were dealt before, for another purpose")
                return {SEALED: kept["sealed"]}, self._own()
            round_names = [self._question.server_round, name]
            if round_names in state["names"]:
                raise DeclinedError("shares of this set were dealt before in this round")
            sealed = self._deal_weights(state, terms, dealing)
            # Those of other rounds cannot be opened in this one.
            names = [kept for kept in state["names"] if kept[0] == round_names[0]]
            state["names"] = [*names, round_names]
            self._memory.keep_dealt(name, asked, sealed)
            return {SEALED: sealed}, self._own()

    def _move(
        self, state: dict[str, Any], terms: CodeTerms, dealing: Dealing, arrays: Arrays
    ) -> None:
        """Apply a gradient once; who was not in the sum that it is of leaves it out."""

        def moved(weights: NDArray[np.float64]) -> NDArray[np.float64]:
            if self._custody.client_id not in dealing.trained_dealers or not dealing.trained_rows:
                return weights
            segments = terms.segments("train")
            coded = np.array(dealing.trained_rows, np.int64)
            places, counted = segments.real_rows(coded), segments.counted(coded)
            gradient = gradient_in(arrays, len(places), terms.embedding)
            return Update(
                rows=self._expanded(terms).rows("train", places[counted]),
                gradient=gradient[counted].astype(np.float64),
                divisor=len(dealing.trained_dealers) if terms.mean else 1,
                learning_rate=dealing.learning_rate,
                w_max=terms.w_max if terms.project else None,
            ).of(weights)

        move_weights(state, session=dealing.session, update=dealing.update, moved=moved)
        known = {_digest(state["weights"]), _digest(state["before"])}
        state["summed"] = [entry for entry in state["summed"] if entry[0] in known]

    def _deal_weights(
        self, state: dict[str, Any], terms: CodeTerms, dealing: Dealing
    ) -> NDArray[np.uint8]:
        segments, me = terms.segments(dealing.part), terms.place(self._custody.client_id)
        coded = np.array(dealing.evaluated_rows, np.int64)
        places, counted = segments.real_rows(coded), segments.counted(coded)
        if len(set(dealing.evaluated_rows)) != len(coded) or not len(coded):
            raise ProtocolError("the coded rows of the batch are not distinct, or there are none")
        terms.check_batch(len(coded))
        _check_maskers(terms, dealing.maskers, dealing.maskers)
        random = self._random("shares")
        try:
            weights = quantise_stochastic(
                state["weights"], terms.weight_bits, terms.field, self._random("rounding")
            )
            limit = terms.scales.owners_share(terms.widths[me])
            if not terms.project:
                limit = equal_share(len(terms.members), terms.field)
            rows = self._integers(terms, dealing.part, places[counted])
            check_partial_sum(rows, terms.field.signed(weights), limit)
        except FieldRangeError as error:
            raise FieldRangeError(
                f"client {self._custody.client_id}, round {self._question.server_round}: {error}"
            ) from error
        shares = weight_shares(terms.code, weights, random).reshape(terms.code.N, -1)
        if self._custody.client_id in dealing.maskers:
            masks = zero_masks(terms.code, len(coded), terms.embedding, random)
            shares = np.concatenate([shares, masks.reshape(terms.code.N, -1)], axis=1)
        state["set"] = {
            "name": dealing.share_set,
            "part": dealing.part,
            "rows": coded,
            "maskers": dealing.maskers,
            "own": shares[me],
            "answered": {},
        }
        return self._seals.seal(terms, shares, DEAL, _purpose(terms, state["set"]))

    def answer(self, evaluation: Evaluation, arrays: Arrays) -> Answer:
        """Return the coded embeddings of a batch, for all dealers together (FedVS, (5))."""
        with self._coded_state(evaluation.generation) as (state, terms):
            if terms is None or state["set"].get("name") != evaluation.share_set:
                raise ProtocolError("the client has no shares of this set")
            if SEALED not in arrays:
                raise ProtocolError("a question for coded embeddings without shares")
            sealed = np.asarray(arrays[SEALED])
            asked = {
                **records.write(evaluation),
                "digest": hashlib.sha256(sealed.tobytes()).digest(),
            }
            held = state["set"]
            if held["answered"]:
                if held["answered"]["asked"] != asked:
                    raise DeclinedError(
                        "this set of shares was evaluated before, with other shares or dealers: a "
                        "set is used once"
                    )
                return {ANSWER: held["answered"]["answer"]}, self._own()
            dealers = evaluation.dealers
            self._check_dealers(state, terms, dealers)
            answer = self._evaluated(terms, held, dealers, sealed)
            packed = np.frombuffer(terms.field.to_bytes(answer), np.uint8)
            held["answered"] = {"asked": asked, "answer": packed}
            held["own"] = np.zeros(0, np.int64)
            return {ANSWER: packed}, self._own()

    def _check_dealers(self, state: dict[str, Any], terms: CodeTerms, dealers: list[str]) -> None:
        held, places = state["set"], [terms.place(dealer) for dealer in dealers]
        if places != sorted(set(places)) or self._custody.client_id not in dealers:
            raise ProtocolError("the dealers are not distinct and in order, or lack this client")
        if len(dealers) < terms.least:
            raise DeclinedError(
                f"a sum over {len(dealers)} clients was asked for: at least {terms.least} were "
                "agreed on"
            )
        _check_maskers(terms, held["maskers"], dealers)
        # The difference of two sums over other dealers, of the same weights and rows, would be the
        # embeddings of those who are in one of them only.
        rows, weights = held["rows"], _digest(state["weights"])
        for of, part, earlier, others in state["summed"]:
            same = of == weights and part == held["part"]
            if same and others != dealers and np.isin(rows, earlier).any():
                raise DeclinedError(
                    "these rows were summed with these weights before, over other dealers: the two "
                    "sums together would show single embeddings"
                )
        state["summed"].append([weights, held["part"], rows, dealers])

    def _evaluated(
        self, terms: CodeTerms, held: dict[str, Any], dealers: list[str], sealed: NDArray[Any]
    ) -> NDArray[np.int64]:
        b, h = len(held["rows"]), terms.embedding
        sizes = [
            width * h + (b * h if member in held["maskers"] else 0)
            for member, width in zip(terms.members, terms.widths, strict=True)
        ]
        purpose = _purpose(terms, held)
        opened = dict(self._seals.open(terms, dealers, sealed, sizes, DEAL, purpose))
        opened[self._custody.client_id] = np.asarray(held["own"])
        places = [terms.place(dealer) for dealer in dealers]
        weights, masks = [], []
        for dealer, place in zip(dealers, places, strict=True):
            elements, count = opened[dealer], terms.widths[place] * h
            weights.append(elements[:count].reshape(-1, h))
            if len(elements) > count:
                masks.append(elements[count:].reshape(b, h))
        rows = self._file(terms, held["part"]).read(held["rows"])
        if len(dealers) < len(terms.members):
            columns = [np.arange(*terms.offsets[place : place + 2]) for place in places]
            rows = rows[:, np.concatenate(columns)]
        return evaluate(terms.field, rows, np.concatenate(weights), masks)

    def embed_plainly(self, chunk: Chunk) -> Answer:
        """Return the embeddings of some places of a part as they are: for simulations."""
        with self._memory.state() as state:
            terms = self._terms(state)
            places = np.arange(chunk.first, chunk.first + chunk.count)
            rows = self._expanded(terms).rows(chunk.part, places)
            return {ANSWER: rows @ state["weights"]}, self._own()

    # -- Parts -------------------------------------------------------------------------------

    @contextmanager
    def _coded_state(self, generation: str) -> Iterator[tuple[dict[str, Any], CodeTerms | None]]:
        """Lend the state, and the terms if all shares of this coding are there."""
        with self._memory.state() as state:
            terms = None
            if state.get("generation") == generation and state["complete"]:
                terms = self._terms(state)
                if not all(self._file(terms, part).is_there() for part in terms.parts):
                    logger.error("client %s: coded rows are gone", self._custody.client_id)
                    terms = None
            yield state, terms

    def _terms(self, state: dict[str, Any]) -> CodeTerms:
        if "terms" not in state:
            raise ProtocolError("there was no coding of the data")
        key = (str(self._memory.folder), state["generation"])
        return _kept_terms.get(key, lambda: _KeptTerms(_read_terms(loads(state["terms"])))).terms

    def _file(self, terms: CodeTerms, part: str) -> CodedRows:
        shape = (terms.segments(part).length, terms.offsets[-1])
        return self._memory.coded(terms.generation, part, shape)

    def _expanded(self, terms: CodeTerms) -> Expanded:
        return self._owned.expanded(
            order=terms.orders[terms.place(self._custody.client_id)],
            bias=terms.bias,
            x_max=terms.x_max,
            data_bits=terms.data_bits,
            generation=terms.generation,
        )

    def _integers(
        self, terms: CodeTerms, part: str, places: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        rows = self._expanded(terms).rows(part, places) * 2.0**terms.data_bits
        return rows.astype(np.int64)

    def _random(self, purpose: str) -> Any:
        return self._custody.random(self._question, purpose)

    def _own(self, **fields: Any) -> Fields:
        own: Fields = {METRICS: {"num-examples": 1}, **fields}
        mark_insecure(self._custody, own)
        return own


@dataclass(frozen=True, eq=False)
class _KeptTerms:
    """Terms that were read, which remember what follows from them."""

    terms: CodeTerms
    size: ClassVar[int] = 2**14


_kept_terms: Prepared[_KeptTerms] = Prepared(room=2**26)


def _read_terms(record: Mapping[str, Any]) -> CodeTerms:
    terms = records.read(CodeTerms, record)
    terms.check()
    return terms


def _purpose(terms: CodeTerms, held: Mapping[str, Any]) -> list[Part]:
    """Return what shares of weights are for: who was told of other rows cannot open them."""
    return [terms.generation, held["name"], held["part"], held["rows"].tobytes(), held["maskers"]]


def _digest(weights: Any) -> str:
    return hashlib.sha256(np.asarray(weights, np.float64).tobytes()).hexdigest()


def _check_maskers(terms: CodeTerms, maskers: list[str], dealers: list[str]) -> None:
    """Refuse a sum in which T colluding clients could be the only ones who add zero masks."""
    if not terms.zero_mask:
        if maskers:
            raise InvalidParameterError("maskers", maskers, "nobody without zero masks")
        return
    honest = len(set(maskers).intersection(dealers, terms.members))
    if honest <= terms.privacy:
        raise DeclinedError(
            f"{honest} clients add zero masks: with T = {terms.privacy} it takes "
            f"{terms.privacy + 1}"
        )


def text_in(fields: Fields, name: str) -> str:
    """Return a text of the scheme's own fields.

    Raises
    ------
    ProtocolError
        If there is none.
    """
    value = fields.get(name)
    if type(value) is not str or not value:
        raise ProtocolError(f"the entry '{name}' is no text")
    return value
