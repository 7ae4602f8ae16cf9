"""The setup of FedVS on the client: describes its data, deals its shares, stores others'."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError, ProtocolError
from flwr_privacy.fedvs.network import initial_weights, project
from flwr_privacy.fedvs.sharing import data_shares
from flwr_privacy.fedvs.terms import CODE, SEALED, Chunk, CodeTerms
from flwr_privacy.pipeline.mechanism import Answer
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.channel import Part
from flwr_privacy.wire.documents import dumps
from flwr_privacy.wire.message import Fields

from .coded_files import forget_coded
from .coding import Coding, owned, replied
from .columns import GivenData, told_of
from .sealed_shares import key_name
from .weights import begin_weights

__all__ = ["code", "draw_weights", "enrol", "text_in"]


def enrol(store: StepStore, data: GivenData, generation: str) -> Answer:
    """Return the client's identity with a key for this coding alone, and the size of its data."""
    name = key_name(store.experiment_id, generation)
    public = store.pair(name).public
    told = told_of(owned(store, data))
    return {}, {**told, "key": public, "signature": store.signature(name, public)}


def code(coding: Coding, chunk: Chunk, arrays: Arrays, fields: Fields) -> Answer:
    """Store the shares of the previous chunk, and deal those of the next one (FedVS, (2)).

    Raises
    ------
    DeclinedError
        If the disk has no room for the shares of everybody's rows.
    ProtocolError
        If the request is not the one that follows, or a share is damaged.
    """
    store, terms = coding.store, coding.terms
    state = store.state
    _check_keys(store, terms)
    training, update = text_in(fields, "training"), fields.get("update")
    if type(update) is not int or update < 0:
        raise ProtocolError("the entry 'update' is no count")
    if state.get("generation") != terms.generation:
        _begin(coding, training, update)
    elif state["terms"] != dumps(records.write(terms)):
        raise ProtocolError("the terms are not those with which this coding began")
    if SEALED in arrays:
        _keep_shares(coding, np.asarray(arrays[SEALED]))
    elif state["pending"]:
        raise ProtocolError("the shares of the rows that were dealt last are missing")
    if not chunk.count:
        _check_complete(coding)
        return {}, replied(fresh=state["fresh"])
    return _deal_rows(coding, chunk)


def _check_keys(store: StepStore, terms: CodeTerms) -> None:
    """Refuse keys that are not the client's own, or not those of pinned peers."""
    name = key_name(store.experiment_id, terms.generation)
    if terms.keys[terms.place(store.client_id)] != store.pair(name).public:
        raise ProtocolError("the key that is said to be this client's is not")
    for peer, key, signature in zip(terms.members, terms.keys, terms.signatures, strict=True):
        if peer != store.client_id:
            store.check_peer(name, peer, key, signature)


def _begin(coding: Coding, training: str, update: int) -> None:
    """Begin a coding; weights are kept if they are of this training."""
    store, terms = coding.store, coding.terms
    state = store.state
    _check_columns(coding)
    if terms.generation in state.get("generations", []):
        raise ProtocolError("a coding of the data that was given up before")
    fresh = draw_weights(coding, training, update)
    files = [coding.file(part) for part in terms.parts]
    store.check_room(sum(file.size for file in files))
    if "generation" in state:
        store.forget_pair(key_name(store.experiment_id, state["generation"]))
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
    forget_coded(store.folder, {file.path for file in files})
    for file in files:
        file.create()


def draw_weights(coding: Coding, training: str, update: int) -> bool:
    """Draw the client's first weights of a training; return whether it had none."""
    store, shape = coding.store, (coding.width, coding.terms.embedding)

    def draw() -> NDArray[np.float64]:
        return project(initial_weights(*shape, store.random("initial weights")), coding.terms.w_max)

    return begin_weights(store.state, training=training, update=update, shape=shape, draw=draw)


def _check_columns(coding: Coding) -> None:
    """Refuse terms that are about other data than the client's; its log has the sizes."""
    terms, data = coding.terms, owned(coding.store, coding.data).raw()
    said = terms.columns[coding.me], dict(zip(terms.parts, terms.rows, strict=True))
    own = data.columns, {name: len(rows) for name, rows in data.parts.items()}
    if said != own:
        raise DataError(
            f"the terms have {said[0]} columns and rows {said[1]} of this client: it has "
            f"{own[0]} and {own[1]}"
        )


def _deal_rows(coding: Coding, chunk: Chunk) -> Answer:
    terms, state, me = coding.terms, coding.store.state, coding.me
    segments, done = terms.segments(chunk.part), state["coded"][chunk.part]
    if chunk.first != done or not 0 < chunk.count <= segments.length - done:
        raise ProtocolError(
            f"coded rows {chunk.first} to {chunk.first + chunk.count} of '{chunk.part}' do not "
            f"follow the {done} of {segments.length} that were dealt"
        )
    coded = np.arange(chunk.first, chunk.first + chunk.count)
    places, counted = segments.real_rows(coded), segments.counted(coded)
    random = coding.store.random("shares")
    elements = np.empty((len(places), coding.width), np.int64)
    elements[counted] = coding.integers(chunk.part, places[counted]) % terms.prime
    # A pad of zeros would break what the answers hide: it is no row at all.
    pads = terms.field.uniform((int((~counted).sum()), coding.width), random)
    elements[~counted] = 0 if terms.paper else pads
    shares = data_shares(terms.code, elements, random)
    coding.file(chunk.part).write(chunk.first, [(terms.offsets[me], shares[me])])
    state["coded"][chunk.part] += chunk.count
    state["pending"] = [chunk.part, chunk.first, chunk.count]
    purpose: list[Part] = [terms.generation, chunk.part, chunk.first, chunk.count]
    return {SEALED: coding.seals.seal(shares, CODE, purpose)}, replied()


def _keep_shares(coding: Coding, sealed: NDArray[Any]) -> None:
    """Open the shares of the rows that were dealt last, and keep them."""
    terms, state = coding.terms, coding.store.state
    if not state["pending"]:
        raise ProtocolError("shares of rows that were not dealt, or were stored before")
    part, first, count = state["pending"]
    sizes = [count * width for width in terms.widths]
    purpose: list[Part] = [terms.generation, part, first, count]
    opened = coding.seals.open(terms.members, sealed, sizes, CODE, purpose)
    blocks = (
        (terms.offsets[terms.place(sender)], elements.reshape(count, -1))
        for sender, elements in opened
    )
    coding.file(part).write(first, blocks)
    state["pending"] = []


def _check_complete(coding: Coding) -> None:
    terms, state = coding.terms, coding.store.state
    lengths = {part: terms.segments(part).length for part in terms.parts}
    if state["coded"] != lengths:
        raise ProtocolError(f"coded rows are missing: {state['coded']} of {lengths}")
    if coding.store.durable:
        for part in terms.parts:
            coding.file(part).sync()
    state["complete"] = True


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
