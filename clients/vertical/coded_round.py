"""A round of FedVS on the client: deals shares of its weights, evaluates everybody's coded rows."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DeclinedError, FieldRangeError, InvalidParameterError, ProtocolError
from flwr_privacy.fedvs.quantisation import check_partial_sum, equal_share, quantise_stochastic
from flwr_privacy.fedvs.sharing import evaluate, weight_shares, zero_masks
from flwr_privacy.fedvs.terms import ANSWER, DEAL, SEALED, Chunk, CodeTerms, DealRequest, Evaluation
from flwr_privacy.pipeline.mechanism import Answer
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.channel import Part

from .coded_files import dealt, keep_dealt
from .coding import Coding, agreed, complete_coding, replied
from .columns import GivenData
from .weights import WeightUpdate, gradient_in, move_weights

__all__ = ["deal", "embed", "embed_plainly", "move", "rounded_weights"]


def deal(store: StepStore, data: GivenData, dealing: DealRequest, arrays: Arrays) -> Answer:
    """Apply the received gradient to the weights; deal shares of them (FedVS, (3), (4)).

    Raises
    ------
    DeclinedError
        If shares would be dealt twice under one name, or too few clients add zero masks.
    FieldRangeError
        If the weights have left the range of the field.
    InvalidParameterError, ProtocolError
        If the request is malformed.
    """
    coding, state = complete_coding(store, data, dealing.generation), store.state
    if coding is None:
        return {}, replied(lost=True)
    move(coding, dealing, arrays)
    if not dealing.deals:
        return {}, replied()
    name, asked = dealing.share_set, records.write(dealing)
    if state["set"].get("name") == name:
        kept = dealt(store.folder, name)
        if not kept or kept["asked"] != asked:
            raise DeclinedError("shares of this set were dealt before, for another purpose")
        return {SEALED: kept["sealed"]}, replied()
    round_names = [store.server_round, name]
    if round_names in state["names"]:
        raise DeclinedError("shares of this set were dealt before in this round")
    sealed = _deal_weights(coding, dealing)
    # Those of other rounds cannot be opened in this one.
    names = [kept for kept in state["names"] if kept[0] == round_names[0]]
    state["names"] = [*names, round_names]
    keep_dealt(store.folder, name, asked, sealed)
    return {SEALED: sealed}, replied()


def move(coding: Coding, dealing: DealRequest, arrays: Arrays) -> None:
    """Apply a gradient once; who was not in the sum that it is of leaves it out."""
    terms, state = coding.terms, coding.store.state

    def moved(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        in_sum = coding.store.client_id in dealing.trained_dealers
        if not in_sum or not dealing.trained_rows:
            return weights
        segments = terms.segments("train")
        coded = np.array(dealing.trained_rows, np.int64)
        places, counted = segments.real_rows(coded), segments.counted(coded)
        gradient = gradient_in(arrays, len(places), terms.embedding)
        return WeightUpdate(
            rows=coding.expanded().rows("train", places[counted]),
            gradient=gradient[counted].astype(np.float64),
            divisor=len(dealing.trained_dealers) if terms.mean else 1,
            learning_rate=dealing.learning_rate,
            w_max=terms.w_max if terms.project else None,
        ).of(weights)

    move_weights(state, session=dealing.session, update=dealing.update, moved=moved)
    known = {_digest(state["weights"]), _digest(state["before"])}
    state["summed"] = [entry for entry in state["summed"] if entry[0] in known]


def _deal_weights(coding: Coding, dealing: DealRequest) -> NDArray[np.uint8]:
    store, terms, me = coding.store, coding.terms, coding.me
    coded = np.array(dealing.evaluated_rows, np.int64)
    places = coding.places(dealing.part, coded)
    if len(set(dealing.evaluated_rows)) != len(coded) or not len(coded):
        raise ProtocolError("the coded rows of the batch are not distinct, or there are none")
    terms.check_batch(len(coded))
    _check_maskers(terms, dealing.maskers, dealing.maskers)
    random = store.random("shares")
    weights = rounded_weights(coding, coding.integers(dealing.part, places))
    shares = weight_shares(terms.code, weights, random).reshape(terms.code.N, -1)
    if store.client_id in dealing.maskers:
        masks = zero_masks(terms.code, len(coded), terms.embedding, random)
        shares = np.concatenate([shares, masks.reshape(terms.code.N, -1)], axis=1)
    store.state["set"] = {
        "name": dealing.share_set,
        "part": dealing.part,
        "rows": coded,
        "maskers": dealing.maskers,
        "own": shares[me],
        "answered": {},
    }
    return coding.seals.seal(shares, DEAL, _purpose(terms, store.state["set"]))


def rounded_weights(coding: Coding, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the weights as elements of the field, rounded at random.

    Raises
    ------
    FieldRangeError
        If a product with the rows, which are in steps of their grid, has left its range.
    """
    store, terms = coding.store, coding.terms
    try:
        weights = quantise_stochastic(
            store.state["weights"], terms.weight_bits, terms.field, store.random("rounding")
        )
        limit = terms.scales.owners_share(coding.width)
        if not terms.project:
            limit = equal_share(len(terms.members), terms.field)
        check_partial_sum(rows, terms.field.signed(weights), limit)
    except FieldRangeError as error:
        raise FieldRangeError(
            f"client {store.client_id}, round {store.server_round}: {error}"
        ) from error
    return weights


def embed(store: StepStore, data: GivenData, evaluation: Evaluation, arrays: Arrays) -> Answer:
    """Return the coded embeddings of a batch, for all dealers together (FedVS, (5)).

    Raises
    ------
    DeclinedError
        If a set of shares would be used twice, or the sums would show single embeddings.
    ProtocolError
        If the request is malformed, or a share is damaged.
    """
    coding, state = complete_coding(store, data, evaluation.generation), store.state
    if coding is None or state["set"].get("name") != evaluation.share_set:
        raise ProtocolError("the client has no shares of this set")
    if SEALED not in arrays:
        raise ProtocolError("a request for coded embeddings without shares")
    sealed = np.asarray(arrays[SEALED])
    asked = {**records.write(evaluation), "digest": hashlib.sha256(sealed.tobytes()).digest()}
    held = state["set"]
    if held["answered"]:
        if held["answered"]["asked"] != asked:
            raise DeclinedError(
                "this set of shares was evaluated before, with other shares or dealers: a set is "
                "used once"
            )
        return {ANSWER: held["answered"]["answer"]}, replied()
    _check_dealers(coding, evaluation.dealers)
    answer = _evaluated(coding, evaluation.dealers, sealed)
    packed = np.frombuffer(coding.terms.field.to_bytes(answer), np.uint8)
    held["answered"] = {"asked": asked, "answer": packed}
    held["own"] = np.zeros(0, np.int64)
    return {ANSWER: packed}, replied()


def _check_dealers(coding: Coding, dealers: list[str]) -> None:
    terms, state = coding.terms, coding.store.state
    held, places = state["set"], [terms.place(dealer) for dealer in dealers]
    if places != sorted(set(places)) or coding.store.client_id not in dealers:
        raise ProtocolError("the dealers are not distinct and in order, or lack this client")
    if len(dealers) < terms.least:
        raise DeclinedError(
            f"a sum over {len(dealers)} clients was asked for: at least {terms.least} were agreed "
            "on"
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


def _evaluated(coding: Coding, dealers: list[str], sealed: NDArray[Any]) -> NDArray[np.int64]:
    terms, held = coding.terms, coding.store.state["set"]
    b, h = len(held["rows"]), terms.embedding
    sizes = [
        width * h + (b * h if member in held["maskers"] else 0)
        for member, width in zip(terms.members, terms.widths, strict=True)
    ]
    opened = dict(coding.seals.open(dealers, sealed, sizes, DEAL, _purpose(terms, held)))
    opened[coding.store.client_id] = np.asarray(held["own"])
    places = [terms.place(dealer) for dealer in dealers]
    weights, masks = [], []
    for dealer, place in zip(dealers, places, strict=True):
        elements, count = opened[dealer], terms.widths[place] * h
        weights.append(elements[:count].reshape(-1, h))
        if len(elements) > count:
            masks.append(elements[count:].reshape(b, h))
    rows = coding.file(held["part"]).read(held["rows"])
    if len(dealers) < len(terms.members):
        columns = [np.arange(*terms.offsets[place : place + 2]) for place in places]
        rows = rows[:, np.concatenate(columns)]
    return evaluate(terms.field, rows, np.concatenate(weights), masks)


def embed_plainly(store: StepStore, data: GivenData, chunk: Chunk) -> Answer:
    """Return uncoded embeddings of some places of a part, for simulations.

    Raises
    ------
    ProtocolError
        If the data are not coded, or there are no such places.
    """
    coding = Coding(store, data, agreed(store.state))
    rows = coding.terms.segments(chunk.part).rows
    if not 0 <= chunk.first < chunk.first + chunk.count <= rows:
        raise ProtocolError(f"places {chunk.first} to {chunk.first + chunk.count} of {rows}")
    places = np.arange(chunk.first, chunk.first + chunk.count)
    own = coding.expanded().rows(chunk.part, places)
    return {ANSWER: own @ store.state["weights"]}, replied()


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
