"""A client's part in secure sums, for any scheme that sends codes on a grid.

What a client remembers lies in a file of its node, under a lock: a server that asks twice, at once
or after a restart, meets the same memory.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict

from flwr_privacy.coding.packing import pack
from flwr_privacy.errors import (
    DeclinedError,
    InvalidParameterError,
    ProtocolError,
    RefusedPeersError,
)
from flwr_privacy.pipeline.experiment_keys import check_signature, signature_of
from flwr_privacy.pipeline.experiment_state import hashed, locked_state
from flwr_privacy.pipeline.users_code import check_frozen, check_going_on
from flwr_privacy.privacy.averaging import Metrics, WeightedMean
from flwr_privacy.secure_sum import Bounds, Invitation, Joined, MaskedSum, Participant
from flwr_privacy.secure_sum.masked import MASKED, residues, vector_size
from flwr_privacy.secure_sum.messages import DEAL, JOIN, KEYS, OPEN, OWN, SIGNED, Opening, Revealed
from flwr_privacy.secure_sum.trust import BelievedSum, believed_sum, withstood_colluders
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.digests import request_digest
from flwr_privacy.wire.fields import read, write
from flwr_privacy.wire.message import INSECURE, RECORD, TRAIN, Header

from .context_store import ContextStore

__all__ = ["SumPlace", "answer_phase", "join", "step_of", "summed"]

logger = logging.getLogger("flwr.privacy")

_MAGIC = b"flwr-privacy secure sum\n"
_WEIGHT = "num-examples"


@dataclass(frozen=True)
class SumPlace:
    """A client's place in a secure sum, from joining to sending its vector.

    Parameters
    ----------
    store : ContextStore
        What the node keeps for the client.
    header : Header
        The request.
    joined : Joined
        Who dealt, and what it dealt to the client.
    bounds : Bounds
        What its vector must keep to.
    believed : BelievedSum
        How many clients are in any sum that the server can open.
    needed : list of str
        Those without whose vectors nobody who shares masks with the client opens the sum.
    withstood : int
        How many of these may collude with a server that tells each client another story, and it
        can open no single vector.
    """

    store: ContextStore
    header: Header
    joined: Joined
    bounds: Bounds
    believed: BelievedSum
    needed: list[str]
    withstood: int

    def masked(self, arrays: Arrays, metrics: Metrics) -> tuple[Arrays, dict[str, Any]]:
        """Return the masked reply that may leave the node, and the metrics that may go with it.

        Raises
        ------
        InvalidParameterError
            If codes or weight are not what was agreed on.
        ProtocolError
            If the vector of this session has left the node already.
        """
        ordered = {name: np.asarray(arrays[name]) for name in sorted(arrays)}
        vector = residues(ordered, int(metrics[_WEIGHT]), self.bounds)
        bits = self.bounds.modulus_bits
        with _participant(self.store, self.header.experiment_id) as participant:
            vector = participant.mask(self.joined.session, vector, bits)
        # The one metric that says nothing of the data.
        told = {key: value for key, value in metrics.items() if key == INSECURE}
        return {MASKED: pack(vector, bits)}, told


def join(context: Context, header: Header, content: RecordDict) -> SumPlace:
    """Join the secure sum that a training request names.

    Raises
    ------
    DeclinedError
        If too few clients are in it for the node's policy, or the node has stopped answering the
        experiment.
    ProtocolError
        If the client cannot join: a share is damaged, it was asked in this session before, or the
        server contradicts itself.
    """
    store = ContextStore.of(context)
    check_going_on(store, header.experiment_id)
    check_frozen(store, header.experiment_id, _record(content, RECORD))
    record = _record(content, JOIN)
    joined, bounds = read(Joined, record), read(Bounds, record)
    if len(joined.dealers) > bounds.cohort:
        raise ProtocolError("more dealers than clients of the cohort")
    if strange := [name for name in content if "@" in name]:
        raise ProtocolError(f"records {strange} in a request for a secure sum: no '@' in a name")
    # Before the training: a request that is refused must have no effect, and a second one in
    # the same session would be another one.
    with _participant(store, header.experiment_id) as participant:
        local, roster = participant.seat(joined.session, header.server_round, step_of(header))
        told: dict[str, Any] = {
            "threshold": joined.threshold,
            "roster": roster,
            "local_threshold": local,
            "pinned": store.pinned,
            "max_cohort": store.policy.max_cohort,
        }
        believed = believed_sum(cohort=bounds.cohort, **told)
        needed = participant.needed(joined.session)
        store.policy.check_sum(believed.clients - len(needed))
        participant.join(joined, request_digest(content, without=OWN))
    withstood = withstood_colluders(needed=len(needed), **told)
    return SumPlace(store, header, joined, bounds, believed, needed, withstood)


def step_of(header: Header) -> int:
    """Return which of a round's sums a request for a vector belongs to.

    The training is the first; every later request of the scheme is one more. Before round 1 there
    is no training, and the first request, a setup, has the first sum.

    Raises
    ------
    ProtocolError
        If a later request has a number with which it would pass for the training: some who were in
        its sum may be missing then.
    """
    if header.phase == TRAIN:
        return 0
    if header.request < 0:
        raise ProtocolError(
            f"request {header.request} of phase '{header.phase}': expected 0 or more"
        )
    return header.request + (header.server_round > 0)


def summed(mean: WeightedMean, content: RecordDict) -> WeightedMean:
    """Return the accumulator for masked vectors, if the request asks for them."""
    if JOIN not in content:
        return mean
    bounds = read(Bounds, _record(content, JOIN))
    return MaskedSum(vector_size(mean), bounds.modulus_bits)


def answer_phase(context: Context, header: Header, content: RecordDict) -> RecordDict:
    """Answer a request of the protocol itself: the phases ``keys`` and ``shares``.

    Raises
    ------
    ProtocolError
        If the client refuses; see `Participant`.
    """
    store = ContextStore.of(context)
    if header.phase == KEYS:
        return RecordDict({DEAL: _own_key(store, header.experiment_id)})
    reply = RecordDict()
    with _participant(store, header.experiment_id) as participant:
        if OPEN in content:
            opening = read(Opening, _record(content, OPEN))
            keys, seeds = participant.reveal(opening.session, opening.survivors)
            reply[OPEN] = ConfigRecord(write(Revealed(keys=keys, seeds=seeds)))
        if DEAL in content:
            try:
                invitation = read(Invitation, _record(content, DEAL))
                _check_signatures(store, header.experiment_id, invitation)
                store.policy.check_sum(invitation.threshold - len(invitation.needed))
                dealt = ConfigRecord(write(participant.deal(invitation)))
            except (ProtocolError, DeclinedError, InvalidParameterError) as error:
                if OPEN not in content:
                    raise
                # What was revealed is sent all the same.
                peers = list(error.peers) if isinstance(error, RefusedPeersError) else []
                dealt = ConfigRecord({"refused": str(error), **({"peers": peers} if peers else {})})
            reply[DEAL] = dealt
    return reply


def _own_key(store: ContextStore, experiment_id: str) -> ConfigRecord:
    with _participant(store, experiment_id) as participant:
        key = participant.public_key()
    signature = signature_of(store, SIGNED, experiment_id, key)
    return ConfigRecord({"key": key, **({"signature": signature} if signature else {})})


def _check_signatures(store: ContextStore, experiment_id: str, invitation: Invitation) -> None:
    if store.pins is None:
        return
    keys, signatures, refused = invitation.keys, invitation.signatures, dict[str, str]()
    for member, key, signature in zip(invitation.roster, keys, signatures, strict=False):
        if member != store.client_id:
            try:
                check_signature(store, SIGNED, experiment_id, member, key, signature)
            except ProtocolError as error:
                refused[member] = str(error)
    if refused:
        raise RefusedPeersError(refused)


@contextmanager
def _participant(store: ContextStore, experiment_id: str) -> Iterator[Participant]:
    """Open a client's side of an experiment under a lock; write its state to disk at the end."""
    path = store.sessions / hashed(experiment_id)
    lock = path.with_suffix(".lock")
    with locked_state(store, path, _MAGIC, lock=lock, experiment_id=experiment_id) as state:
        yield Participant(store.client_id, experiment_id, state)


def _record(content: RecordDict, name: str) -> Mapping[str, Any]:
    record = content[name]
    if not isinstance(record, ConfigRecord):
        raise ProtocolError(f"the record '{name}' is no ConfigRecord")
    return record
