"""Runs the coding of the data on the server: agrees on parameters and relays sealed shares."""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.coding.thresholds import recovery_threshold, usual_partitions
from flwr_privacy.errors import (
    CheckpointError,
    InvalidParameterError,
    ProtocolError,
    check_choice,
)
from flwr_privacy.fedvs.clock import Seconds, coded_seconds
from flwr_privacy.fedvs.data import TRAIN_PART
from flwr_privacy.fedvs.delays import HalfSlow
from flwr_privacy.fedvs.guarantee import guarantee_of
from flwr_privacy.fedvs.options import LagrangeCoding, Quantisation
from flwr_privacy.fedvs.rows import Segments
from flwr_privacy.fedvs.sharing import maskers
from flwr_privacy.fedvs.terms import CODE, SEAL_BYTES, SEALED, Chunk, CodeTerms
from flwr_privacy.keywords import check_options, checked_keywords
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.channel import check_usable

from .columns import arrays_message, natural
from .strategy import VerticalStrategy

__all__ = ["DataCoding", "coded_answer", "natural_in", "plain_answer"]

EVALUATIONS = ("secure", "oracle", "none")

logger = logging.getLogger("flwr.privacy")


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class DataCoding(VerticalStrategy):
    """Base of `FedVS`: asks the clients to code their data, and relays their sealed shares.

    Parameters
    ----------
    coding, quantisation, evaluation
        As in `FedVS`.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.
    """

    coding: LagrangeCoding = field(default_factory=LagrangeCoding)
    quantisation: Quantisation = field(default_factory=Quantisation)
    evaluation: Literal["secure", "oracle", "none"] = "secure"

    def __post_init__(self) -> None:
        check_options(DataCoding, self, "coding", "quantisation")
        check_choice("evaluation", self.evaluation, EVALUATIONS)
        super().__post_init__()

    def _build(self) -> None:
        super()._build()
        self.terms: CodeTerms | None = None
        self._stale = False  # whether the data are to be coded anew: shares are gone, or old

    def setup(self, grid: Grid) -> None:
        """Ask every client to code its data, once per experiment.

        Raises
        ------
        ProtocolError
            If a client does not answer, or the clients' rows do not belong together.
        InvalidParameterError
            If the parameters do not fit the clients; no data have been shared then.
        """
        if self.terms is None:
            self._code(grid, 0)
        else:
            self.simulate_delays(self.terms.partitions)
        self.announce()

    def refresh(self, grid: Grid, server_round: int | None = None) -> None:
        """Ask all clients to code their data again with new masks, and to delete the old shares.

        Rows that clients have got since then are coded with the others, under the names of their
        parts.

        Raises
        ------
        ProtocolError
            If a client does not answer.
        """
        self._code(grid, self.planned_rounds or 0 if server_round is None else server_round)

    def seconds(self, delays: HalfSlow) -> Seconds:
        """Return the seconds that clients take for computing and messages."""
        terms = self._agreed()
        b = min(self.rows_of(terms, TRAIN_PART), terms.segments(TRAIN_PART).length)
        return coded_seconds(terms, b=b, delays=delays)

    def _code(self, grid: Grid, server_round: int) -> None:
        generation = secrets.token_hex(16)
        self._enrolled = self.enrol(grid, server_round, generation=generation)
        self.members = natural(self._enrolled)
        terms = self._new_terms(generation)
        terms.check()
        for part in terms.parts:
            terms.check_batch(min(self.rows_of(terms, part), terms.segments(part).length))
        self.delays_of_members(terms.partitions)  # they are checked before any data are shared
        self._share_rows(grid, server_round, terms)
        self.terms, self._stale = terms, False
        self.simulate_delays(terms.partitions)
        if self.counted is not None:
            self.messenger.virtual_seconds += self.counted.setup

    def _share_rows(self, grid: Grid, server_round: int, terms: CodeTerms) -> None:
        """Have every client deal shares of its rows to all others, chunk by chunk."""
        record = records.write(terms)
        passing: dict[str, NDArray[np.uint8]] = {}
        for chunk in [*self._chunks(terms), Chunk(part=TRAIN_PART, first=0, count=0)]:
            own = self._passed_on(terms, passing, self.members)
            assigned = self._assigned(grid, server_round, CODE)
            self._check_present(assigned)
            with self.messenger.patiently():
                passing = self.ask_all(
                    grid,
                    server_round,
                    CODE,
                    RecordDict(),
                    assigned,
                    fields={
                        **record,
                        **records.write(chunk),
                        "training": self._training,
                        "update": self._updates,
                    },
                    own=own,
                )
                if chunk.count:
                    self._check_sealed(
                        terms, CODE, passing, [chunk.count * w for w in terms.widths]
                    )
            if missing := natural(set(self.members).difference(passing)):
                details = "; ".join(self.messenger.request_log(CODE).details)
                raise ProtocolError(
                    f"the data could not be coded: clients {missing} did not answer"
                    + (f" ({details})" if details else "")
                    + "; start again, and their data are coded anew"
                )
        if self._updates and (fresh := natural_in(self.members, _fresh(passing))):
            for client in fresh:
                logger.warning("client %s has lost its weights and begins with new ones", client)
            self._numbers["restarted"] = len(fresh)

    def _new_terms(self, generation: str) -> CodeTerms:
        told = [self._enrolled[name] for name in self.members]
        N, T = len(told), self.coding.T
        K = usual_partitions(N, T) if self.coding.K is None else self.coding.K
        needed = recovery_threshold(K, T)
        for name, entry in zip(self.members, told, strict=True):
            try:
                check_usable(entry.key)
            except ProtocolError as error:
                raise ProtocolError(f"client {name}: {error}") from error
        if self.coding.spare > max(0, N - needed):
            allowed = f"at most {N - needed}: {needed} of {N} answers are needed"
            raise InvalidParameterError("spare", self.coding.spare, allowed)
        least = N if self.coding.least_dealers is None else self.coding.least_dealers
        if needed <= N and not needed <= least <= N:
            allowed = f"from {needed}, the answers that are needed, to the {N} clients"
            raise InvalidParameterError("least_dealers", least, allowed)
        return CodeTerms(
            generation=generation,
            members=self.members,
            keys=[entry.key for entry in told],
            signatures=[entry.signature for entry in told],
            columns=[entry.columns for entry in told],
            orders=[self._order_of(name) for name in self.members],
            parts=list(told[0].rows),
            rows=list(told[0].rows.values()),
            partitions=K,
            privacy=T,
            least=min(least, N),
            prime=self.quantisation.prime,
            data_bits=self.quantisation.data_bits,
            weight_bits=self.quantisation.weight_bits,
            x_max=self.data.x_max,
            w_max=self.quantisation.w_max,
            embedding=self.embedding,
            bias=self.data.bias,
            mean=self._mean,
            zero_mask=self.coding.masked,
            project=not self.coding.paper,
            paper=self.coding.paper,
        )

    def _chunks(self, terms: CodeTerms) -> list[Chunk]:
        """Return the chunks in which the coded rows are dealt."""
        row = terms.bytes_of(terms.offsets[-1]) * (len(terms.members) - 1)
        most = max(1, self.coding.relay_limit // row)
        chunks = []
        for part in terms.parts:
            length = terms.segments(part).length
            for first in range(0, length, most):
                chunks.append(Chunk(part=part, first=first, count=min(most, length - first)))
        return chunks

    def _check_sealed(
        self,
        terms: CodeTerms,
        phase: str,
        shares: dict[str, Any],
        sizes: list[int],
    ) -> None:
        """Drop answers that are no sealed shares of the requested form."""
        others = len(terms.members) - 1
        for client in list(shares):
            length = terms.bytes_of(sizes[terms.place(client)]) + SEAL_BYTES
            sealed = shares[client]
            if not isinstance(sealed, np.ndarray):
                detail = f"client {client} dealt no shares"
                self.messenger.request_log(phase).refuse("names", detail)
                del shares[client]
            elif sealed.dtype != np.uint8 or sealed.shape != (others, length):
                reason = "dtype" if sealed.dtype != np.uint8 else "shape"
                detail = f"client {client} dealt shares of {sealed.dtype}, shape {sealed.shape}"
                self.messenger.request_log(phase).refuse(reason, detail)
                del shares[client]

    def guarantee(self) -> Guarantee:
        """Return the guarantee."""
        signed = self.terms is not None and all(self.terms.signatures)
        return guarantee_of(self.terms, pinned=signed, insecure=self._insecure)

    def state_dict(self) -> dict[str, Any]:
        """Return the agreed parameters and the state of every vertical scheme."""
        terms = None if self.terms is None else records.write(self.terms)
        own = {"terms": terms, "order": self._order_of_all()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        CheckpointError
            If it was made with other parameters of the code.
        """
        super().load_state_dict(state)
        if state["terms"] is None:
            return
        terms = records.read(CodeTerms, state["terms"])
        rounding, order = self.quantisation, self._order_of_all()
        mine = {
            "order": (order, state["order"]),
            "bias": (self.data.bias, terms.bias),
            "x_max": (self.data.x_max, terms.x_max),
            "paper": (self.coding.paper, terms.paper),
            "least_dealers": (self.coding.least_dealers or len(terms.members), terms.least),
            "K": (self.coding.K or terms.partitions, terms.partitions),
            "T": (self.coding.T, terms.privacy),
            "prime": (rounding.prime, terms.prime),
            "data_bits, weight_bits": (
                (rounding.data_bits, rounding.weight_bits),
                (terms.data_bits, terms.weight_bits),
            ),
            "embedding": (self.embedding, terms.embedding),
            "w_max": (rounding.w_max, terms.w_max),
            "zero_mask": (self.coding.masked, terms.zero_mask),
            "aggregation": (self._mean, terms.mean),
        }
        for name, (now, then) in mine.items():
            if now != then:
                raise CheckpointError(f"the checkpoint has {name} = {then!r}, not {now!r}")
        self.terms = terms

    def _order_of_all(self) -> int | dict[str, int]:
        return dict(self.data.order) if isinstance(self.data.order, Mapping) else self.data.order

    def segments(self, part: str) -> Segments:
        """Return the segments of a part's rows in its coded rows."""
        return self._agreed().segments(part)

    def rows_at_a_time(self, part: str) -> int:
        """Return how many coded rows are evaluated on one set of shares."""
        return self.rows_of(self._agreed(), part)

    def rows_of(self, terms: CodeTerms, part: str) -> int:
        """Return how many coded rows are evaluated on one set of shares under some terms."""
        if part == TRAIN_PART:
            return -(-self.batch_size // terms.partitions)
        if self.evaluation == "oracle":
            return terms.segments(part).length
        if terms.zero_mask:
            dealers = maskers(len(terms.members), terms.privacy)
            per_row = terms.bytes_of(terms.embedding) * len(terms.members) * dealers
            return max(1, self.coding.relay_limit // per_row)
        # As large as a batch whose answers can be independent (FedVS has no rule).
        return max(1, terms.offsets[-1] // (terms.partitions + terms.privacy) // 2)

    def _maskers(self, server_round: int) -> list[str]:
        """Return the clients that add zero masks, in turns: one more than needed."""
        if not self.coding.masked:
            return []
        count = maskers(len(self.members), self.coding.T)
        first = server_round * count
        chosen = {(first + step) % len(self.members) for step in range(count)}
        return [self.members[place] for place in sorted(chosen)]

    def _passed_on(
        self,
        terms: CodeTerms,
        shares: Mapping[str, NDArray[np.uint8]],
        dealers: list[str],
    ) -> dict[str, RecordDict]:
        """Return for each client the shares that the dealers have sealed for it."""
        if not shares:
            return {}
        own = {}
        for place, receiver in enumerate(terms.members):
            pieces = [
                # Dealers leave themselves out of their rows.
                shares[dealer][place - (place > terms.place(dealer))]
                for dealer in dealers
                if dealer != receiver
            ]
            own[receiver] = arrays_message({SEALED: np.concatenate(pieces)})
        return own

    def _agreed(self) -> CodeTerms:
        if self.terms is None:
            raise ProtocolError("there was no setup: no data are coded")
        return self.terms


def coded_answer(
    answer: NDArray[Any], terms: CodeTerms, shape: tuple[int, int]
) -> NDArray[np.int64]:
    """Return the elements of an answer.

    Raises
    ------
    ReplyRefusedError
        If they are none of that shape.
    """
    size = int(np.prod(shape))
    if answer.dtype != np.uint8:
        raise ReplyRefusedError("dtype", f"an answer of {answer.dtype}")
    if answer.shape != (terms.bytes_of(size),):
        raise ReplyRefusedError("shape", f"an answer of shape {answer.shape}")
    try:
        elements = terms.field.from_bytes(answer.tobytes(), size)
    except ProtocolError as error:
        raise ReplyRefusedError("range", str(error)) from error
    return elements.reshape(shape)


def plain_answer(answer: NDArray[Any], shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return the embeddings of an answer.

    Raises
    ------
    ReplyRefusedError
        If they are none of that shape.
    """
    if answer.dtype != np.float64 or answer.shape != shape:
        raise ReplyRefusedError("shape", f"embeddings of shape {answer.shape}")
    if not np.isfinite(answer).all():
        raise ReplyRefusedError("not finite", "embeddings that are not finite")
    return answer


def _fresh(passing: Mapping[str, Any]) -> dict[str, Any]:
    return {client: fresh for client, fresh in passing.items() if fresh is True}


def natural_in(members: list[str], among: Mapping[str, Any]) -> list[str]:
    """Return the members that are among some names, in their own order."""
    return [member for member in members if member in among]
