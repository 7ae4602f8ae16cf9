"""The client half of secure sums, for any scheme that sends codes on a grid, or alone.

What a client remembers lies in a file of its node, under a lock: a server that asks twice, at once
or after a restart, meets the same memory.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict

from flwr_privacy.coding.packing import pack
from flwr_privacy.errors import (
    DataError,
    DeclinedError,
    InvalidParameterError,
    LedgerError,
    ProtocolError,
)
from flwr_privacy.pipeline.answer import check_going_on
from flwr_privacy.pipeline.mechanism import Answer, Unprotected
from flwr_privacy.pipeline.node_limits import check_disk
from flwr_privacy.privacy.averaging import Metrics, WeightedMean
from flwr_privacy.privacy.grid import GridMean
from flwr_privacy.privacy.updates import Update
from flwr_privacy.secure_sum import Bounds, Invitation, Joined, MaskedSum, Participant
from flwr_privacy.secure_sum.federated import FedAvgSumTerms
from flwr_privacy.secure_sum.masked import MASKED, residues, vector_size
from flwr_privacy.secure_sum.messages import DEAL, JOIN, KEYS, OPEN, OWN, Opening, Revealed
from flwr_privacy.secure_sum.trust import BelievedSum, believed_sum
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.documents import dumps, loads
from flwr_privacy.wire.fields import read, write
from flwr_privacy.wire.files import DamagedFileError, exclusive_lock, read_sealed, write_sealed
from flwr_privacy.wire.message import METRICS, TRAIN, Fields, Header, question_digest

from .base import SchemeClient, Train
from .context_store import ContextStore, is_simulated

__all__ = ["SecureSumClient"]

logger = logging.getLogger("flwr.privacy")

_MAGIC = b"flwr-privacy secure sum\n"
_LOCK_TIMEOUT = 60.0  # seconds; masks of a large model take some
_WEIGHT = "num-examples"
_TOLD = "insecure-noise"  # the one metric that says nothing of the data


class SecureSumClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.FedAvg` under a secure sum.

    Put it around any training. Its update goes, weighted by its number of examples, into a sum that
    the server opens as a whole. Metrics of the training are not sent.

    Guarantee
    ---------
    That of `flwr_privacy.secure_sum.Participant`; it answers nothing outside of a secure sum. Keys
    of the others are believed to be what the server says they are, unless the node pins them
    (``privacy-pins`` in its configuration).
    """

    scheme: ClassVar[str] = "fedavg"
    sums: ClassVar[str] = "only"

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Unprotected:
        """Return the release of an update as codes, and of its weight."""
        return Unprotected(lambda _: self._codes(FedAvgSumTerms.read(fields), dict(arrays), train))

    def _codes(self, terms: FedAvgSumTerms, start: Arrays, train: Train) -> Answer:
        """Train; return the update as codes, and the weight.

        Raises
        ------
        DataError
            If the update is not finite or goes beyond the range that was agreed on.
        ProtocolError
            If the weight is no whole number.
        """
        names = terms.names(start)
        trained = train(start)
        weight = 1
        if terms.weighted_by:
            examples: Any = trained.metrics.get(terms.weighted_by)
            number = isinstance(examples, int | float | np.number)
            if not number or not float(examples).is_integer():
                raise ProtocolError(
                    f"the metric '{terms.weighted_by}' is no whole number: a secure sum needs "
                    "whole weights"
                )
            weight = int(examples)
        update = Update.between(start, trained.arrays, names)
        largest = float(max(update.vector.max(initial=0.0), -update.vector.min(initial=0.0)))
        if largest > terms.value_range:
            logger.error("the update has values up to %g", largest)
            raise DataError(
                f"the update is beyond value_range = {terms.value_range:g}: raise it, or train in "
                "smaller steps"
            )
        vector = update.vector
        vector *= 1 / terms.grid.step  # exact: a power of two
        codes = np.rint(vector, out=vector).astype(np.int32)
        return update.arrays(codes), {METRICS: {_WEIGHT: weight}}

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of codes for a training."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        terms = FedAvgSumTerms.read(fields)
        return GridMean(arrays, terms.grid, terms.names(arrays))


@dataclass(frozen=True)
class SumPlace:
    """A client's place in a secure sum, from joining to sending its vector.

    Parameters
    ----------
    store : ContextStore
        What the node keeps for the client.
    header : Header
        The question.
    joined : Joined
        Who dealt, and what it dealt to the client.
    bounds : Bounds
        What its vector must keep to.
    believed : BelievedSum
        How many clients are in any sum that the server can open.
    """

    store: ContextStore
    header: Header
    joined: Joined
    bounds: Bounds
    believed: BelievedSum

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
        told = {key: value for key, value in metrics.items() if key == _TOLD}
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
    record = _record(content, JOIN)
    joined, bounds = read(Joined, record), read(Bounds, record)
    if len(joined.dealers) > bounds.cohort:
        raise ProtocolError("more dealers than clients of the cohort")
    if strange := [name for name in content if "@" in name]:
        raise ProtocolError(f"records {strange} in a question for a secure sum: no '@' in a name")
    # Before the training: a question that is refused must have no effect, and a second one in
    # the same session would be another one.
    with _participant(store, header.experiment_id) as participant:
        local, roster = participant.seat(joined.session, header.server_round, step_of(header))
        believed = believed_sum(
            cohort=bounds.cohort,
            threshold=joined.threshold,
            roster=roster,
            local_threshold=local,
            pinned=store.pinned,
            max_cohort=store.policy.max_cohort,
        )
        store.policy.check_sum(believed.clients)
        participant.join(joined, question_digest(content, without=OWN))
    return SumPlace(store, header, joined, bounds, believed)


def step_of(header: Header) -> int:
    """Return which of a round's sums a request for a vector belongs to.

    The training is the first; every later question of the scheme is one more. Before round 1 there
    is no training, and the first question, a setup, has the first sum.

    Raises
    ------
    ProtocolError
        If a later question has a number with which it would pass for the training: some who were in
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
                store.policy.check_sum(invitation.threshold)
                dealt = ConfigRecord(write(participant.deal(invitation)))
            except (ProtocolError, DeclinedError, InvalidParameterError) as error:
                if OPEN not in content:
                    raise
                # What was revealed is sent all the same.
                dealt = ConfigRecord({"refused": str(error)})
            reply[DEAL] = dealt
    return reply


def _own_key(store: ContextStore, experiment_id: str) -> ConfigRecord:
    with _participant(store, experiment_id) as participant:
        key = participant.public_key()
    record = ConfigRecord({"key": key})
    if store.identity is not None:
        record["signature"] = store.identity.sign(*_signed(experiment_id, store.client_id, key))
    return record


def _check_signatures(store: ContextStore, experiment_id: str, invitation: Invitation) -> None:
    if store.pins is None:
        return
    keys, signatures = invitation.keys, invitation.signatures
    for member, key, signature in zip(invitation.roster, keys, signatures, strict=False):
        if member != store.client_id:
            store.pins.verify(member, signature, *_signed(experiment_id, member, key))


def _signed(experiment_id: str, client_id: str, key: bytes) -> tuple[str | bytes, ...]:
    return ("secure-sum key", experiment_id, client_id, key)


@contextmanager
def _participant(store: ContextStore, experiment_id: str) -> Iterator[Participant]:
    """Open a client's side of an experiment under a lock; write its state to disk at the end."""
    name = hashlib.sha256(experiment_id.encode()).hexdigest()[:32]
    path = store.sessions / name
    if not path.exists():  # a server names as many experiments as it likes
        check_disk(store)
    try:
        store.sessions.mkdir(mode=0o700, exist_ok=True)
        with exclusive_lock(path.with_suffix(".lock"), timeout=_LOCK_TIMEOUT):
            state = loads(read_sealed(path, _MAGIC)) if path.exists() else {}
            participant = Participant(store.client_id, experiment_id, state)
            yield participant
            # A simulated client has no power cut to fear that would set it back.
            content = dumps(participant.state)
            write_sealed(path, _MAGIC, content, durable=not is_simulated())
    except DamagedFileError as error:
        raise LedgerError(f"what the client remembers of secure sums, {path}, {error}") from error
    except OSError as error:
        raise LedgerError(f"{path} cannot be used: {error.strerror}") from error


def _record(content: RecordDict, name: str) -> Mapping[str, Any]:
    record = content[name]
    if not isinstance(record, ConfigRecord):
        raise ProtocolError(f"the record '{name}' is no ConfigRecord")
    return record
