"""FedVS on the server: pass sealed shares on, stop at the answers that suffice, decode their sum.

"FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split Models",
ICML 2023, Algorithm 1.
"""

import logging
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy import fields as records
from flwr_privacy.averaging import ReplyRefusedError
from flwr_privacy.channel import check_usable
from flwr_privacy.errors import (
    CheckpointError,
    InvalidParameterError,
    NotEnoughSharesError,
    ProtocolError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.fedvs.costs import SEAL_BYTES
from flwr_privacy.fedvs.data import TEST_PART, TRAIN_PART
from flwr_privacy.fedvs.promise import promise
from flwr_privacy.fedvs.quantisation import dequantise
from flwr_privacy.fedvs.rows import Segments
from flwr_privacy.fedvs.sharing import decode_rows, maskers
from flwr_privacy.fedvs.terms import (
    ANSWER,
    CODE,
    DEAL,
    DEAL_EVALUATION,
    EMBED_EVALUATION,
    ENROL,
    GRADIENT,
    ORACLE,
    SEALED,
    Chunk,
    CodeTerms,
    Dealing,
    Evaluation,
)
from flwr_privacy.field import MERSENNE_31
from flwr_privacy.guarantee import Guarantee
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.lagrange import recovery_threshold, usual_partitions
from flwr_privacy.wire import EVALUATE, TRAIN

from .columns import Aggregate, Enrolled, arrays_message, natural
from .conversation import only
from .round import ClientReply
from .vertical import VerticalStrategy

__all__ = ["FedVS"]

logger = logging.getLogger("flwr.privacy")

EVALUATIONS = ("secure", "oracle", "none")


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class FedVS(VerticalStrategy):
    """Vertical split learning on coded shares, exact from the first R answers (FedVS).

    Parameters
    ----------
    fraction_train, ..., labels, central, ...
        Those of `VerticalStrategy`.
    K : int, optional
        Segments of the rows: the more, the less a client computes, and the more answers it takes.
        By default the most with which half of the clients may straggle, or 1.
    T : int, default 1
        How many colluding clients learn nothing from shares.
    prime : int, default 2**31 - 1
        Size p of the field, below 2**31. One below 2**22 makes shares smaller and products faster,
        if the scales fit.
    data_bits, weight_bits : int, default 8
        Bits of the grids on which features and weights are rounded, l_x and l_w.
    w_max : float, default 2.0
        Bound of the absolute value of a weight, to which the clients cut them.
    zero_mask : bool, default True
        Whether some clients add shares of zero to the answers, so that these say their sum only.
    spare : int, default 0
        Answers beyond the R that are needed for which a round waits, to find wrong ones.
    least_dealers : int, optional
        Least number of clients over which embeddings are summed, R or more; by default all. With
        fewer, who deals no weights in time is left out of the round and misses its gradient. That
        shows the server the embeddings of single clients: sums of two rounds with and without one
        differ by little else.
    evaluation : {"secure", "oracle", "none"}, default "secure"
        How test rows are evaluated: coded as the others; from plain embeddings, in simulations
        only; not at all.
    refresh_every : int, optional
        Rounds after which the data are coded anew, and the old shares are deleted.
    relay_limit : int, default 2**26
        Bytes of shares that the server passes on at a time during the setup.
    paper : bool, default False
        Whether everything is as printed: no zero masks, pads of zeros, weights without bounds. The
        clients must allow it.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range; what depends on the number of clients is refused when they
        have said who they are, before any data are shared.

    Notes
    -----
    A round has two exchanges: all clients take in the last gradient and deal shares of their
    weights; they evaluate, and the first R = 2 (K + T - 1) + 1 answers are decoded. The first
    exchange waits for everybody up to the `deadline`, also for those whose last answer was not
    needed and is still on its way (the paper's resilience is for the second one). A round that
    lacks dealers or answers is skipped, and the next one asks anew. The setup passes the coded data
    on in pieces; a client that has lost its shares has everything coded anew.

    Guarantee
    ---------
    Adversary: clients that collude, and an honest-but-curious server, of any computing power but
    for the sealing of shares on their way (X25519, AES-GCM).
    T clients learn nothing of the others' features and weights from their shares. T + 1 learn
    everybody's weights, K + T all features, and fewer do where features have few values: binary
    ones are open to T + 1. The server learns the sums of the clients' embeddings
    and nothing else from the answers, also together with T clients; without zero masks (`paper`)
    that holds neither with a client nor in general. Over many rounds those sums give the server the
    inner products of all pairs of rows. All clients see the gradients of single rows, and with them
    much of the labels. The clients' first weights are drawn in secret: were they known, the sums of
    the first round would be linear equations on the features (`flwr-privacy attack fedvs`).
    A server that makes clients up is bound by keys that nodes pin, by nothing else.

    Examples
    --------
    >>> from functools import partial
    >>> from flwr_privacy.clients.torch import TorchCentral, mlp
    >>> from flwr_privacy.strategies import FedVS
    >>> central = TorchCentral(partial(mlp, (64, 32, 2)))
    >>> strategy = FedVS(labels=[0, 1, 1, 0], central=central, T=1, batch_size=2, order=1)
    """

    K: int | None = None
    T: int = 1
    prime: int = MERSENNE_31
    data_bits: int = 8
    weight_bits: int = 8
    w_max: float = 2.0
    zero_mask: bool | None = None
    spare: int = 0
    least_dealers: int | None = None
    evaluation: Literal["secure", "oracle", "none"] = "secure"
    refresh_every: int | None = None
    relay_limit: int = 2**26
    paper: bool = False

    scheme: ClassVar[str] = "fedvs"
    untimed: ClassVar[frozenset[str]] = frozenset(
        {EVALUATE, ENROL, CODE, DEAL_EVALUATION, EMBED_EVALUATION, ORACLE}
    )

    def __post_init__(self) -> None:
        self._paper = check_flag("paper", self.paper)
        self._zero_mask = (
            not self.paper if self.zero_mask is None else check_flag("zero_mask", self.zero_mask)
        )
        if self.paper and self._zero_mask:
            raise InvalidParameterError("zero_mask", True, "false with paper=True")
        if self.K is not None:
            check_integer("K", self.K, minimum=1)
        self._K, self._T = self.K, check_integer("T", self.T, minimum=1)
        self._prime = check_integer("prime", self.prime, minimum=3, maximum=2**31 - 1)
        self._bits = self.data_bits, self.weight_bits
        self._w_max = check_number("w_max", self.w_max, minimum=1e-12)
        self._spare = check_integer("spare", self.spare, minimum=0)
        if self.least_dealers is not None:
            check_integer("least_dealers", self.least_dealers, minimum=2)
        self._least = self.least_dealers
        self._evaluation = check_choice("evaluation", self.evaluation, EVALUATIONS)
        if self.refresh_every is not None:
            check_integer("refresh_every", self.refresh_every, minimum=1)
        self._refresh_every = self.refresh_every
        self._relay_limit = check_integer("relay_limit", self.relay_limit, minimum=1)
        super().__post_init__()
        if self._evaluation == "none":
            self._labels.pop(TEST_PART, None)

    def _build(self) -> None:
        super()._build()
        self.terms: CodeTerms | None = None
        self._stale = False  # whether the data are to be coded anew: shares are gone, or old

    # -- The setup ---------------------------------------------------------------------------

    def setup(self, grid: Grid) -> None:
        """Have every client code its data, once for an experiment.

        Raises
        ------
        ProtocolError
            If a client does not answer, or the clients' rows do not belong together.
        InvalidParameterError
            If the parameters do not fit the clients; no data have been shared then.
        """
        if self.terms is None:
            self._code(grid, 0)
        self.simulate_delays(self._agreed().partitions)
        self.announce()

    def joined(self, grid: Grid, server_round: int, clients: list[str]) -> None:
        """Say of clients that come after the setup that they take no part."""
        if late := sorted(set(clients).difference(self.members)):
            logger.warning("clients %s came after the setup and take no part", late)

    def refresh(self, grid: Grid, server_round: int | None = None) -> None:
        """Have all data coded anew, with new masks; the clients delete the old shares.

        Rows that clients have got since then are coded with the others, under the names of their
        parts.

        Raises
        ------
        ProtocolError
            If a client does not answer.
        """
        self._code(grid, self.planned_rounds or 0 if server_round is None else server_round)

    def _code(self, grid: Grid, server_round: int) -> None:
        generation = secrets.token_hex(16)
        self._enrolled = self.enrol(grid, server_round, generation=generation)
        self.members = natural(self._enrolled)
        terms = self._new_terms(generation)
        terms.check()
        for part in terms.parts:
            terms.check_batch(min(self.rows_of(terms, part), terms.segments(part).length))
        record = records.write(terms)
        passing: dict[str, NDArray[np.uint8]] = {}
        for chunk in [*self._chunks(terms), Chunk(part=TRAIN_PART, first=0, count=0)]:
            own = self._passed_on(terms, passing, self.members)
            assigned = self._assigned(grid, server_round, CODE)
            self._check_present(assigned)
            with self.conversation.patiently():
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
                details = "; ".join(self.conversation.book(CODE).details)
                raise ProtocolError(
                    f"the data could not be coded: clients {missing} did not answer"
                    + (f" ({details})" if details else "")
                )
        if self._updates and (fresh := natural_in(self.members, _fresh(passing))):
            for client in fresh:
                logger.warning("client %s has lost its weights and begins with new ones", client)
            self._numbers["restarted"] = len(fresh)
        self.terms, self._stale = terms, False

    def _new_terms(self, generation: str) -> CodeTerms:
        told = [self._enrolled[name] for name in self.members]
        N, T = len(told), self._T
        K = usual_partitions(N, T) if self._K is None else self._K
        needed = recovery_threshold(K, T)
        for name, entry in zip(self.members, told, strict=True):
            try:
                check_usable(entry.key)
            except ProtocolError as error:
                raise ProtocolError(f"client {name}: {error}") from error
        if self._spare > max(0, N - needed):
            allowed = f"at most {N - needed}: {needed} of {N} answers are needed"
            raise InvalidParameterError("spare", self._spare, allowed)
        least = N if self._least is None else self._least
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
            prime=self._prime,
            data_bits=self._bits[0],
            weight_bits=self._bits[1],
            x_max=self._x_max,
            w_max=self._w_max,
            embedding=self._embedding,
            bias=self._bias,
            mean=self._mean,
            zero_mask=self._zero_mask,
            project=not self._paper,
            paper=self._paper,
        )

    def _chunks(self, terms: CodeTerms) -> list[Chunk]:
        """Return the pieces in which the coded rows are dealt."""
        row = terms.bytes_of(terms.offsets[-1]) * (len(terms.members) - 1)
        most = max(1, self._relay_limit // row)
        chunks = []
        for part in terms.parts:
            length = terms.segments(part).length
            for first in range(0, length, most):
                chunks.append(Chunk(part=part, first=first, count=min(most, length - first)))
        return chunks

    # -- A round -----------------------------------------------------------------------------

    def aggregated(
        self, grid: Grid, server_round: int, part: str, coded: NDArray[np.int64]
    ) -> Aggregate:
        """Return the aggregate of some rows, decoded from the first answers that suffice.

        Raises
        ------
        NotEnoughSharesError
            If too few clients deal or answer; the message names those who are missing.
        ProtocolError
            If answers contradict each other, or the data cannot be coded anew.
        """
        training = part == TRAIN_PART
        every = self._refresh_every
        due = every is not None and server_round > 1 and (server_round - 1) % every == 0
        self._stale |= training and due
        if self._stale:
            self._code(grid, server_round)
        if not training and self._evaluation == "oracle":
            return self._plain(grid, server_round, part)
        phases = (DEAL, TRAIN) if training else (DEAL_EVALUATION, EMBED_EVALUATION)
        dealing, shares = self._dealt(grid, server_round, phases[0], part, coded)
        if self._stale:
            self._code(grid, server_round)
            dealing, shares = self._dealt(grid, server_round, phases[0], part, coded)
        terms, dealers = self._agreed(), natural_in(self.members, shares)
        # Two sums over the same rows and weights must not be over other clients.
        least = terms.least if training else len(self.members)
        if len(dealers) < least:
            raise NotEnoughSharesError(
                least, len(dealers), natural(set(self.members).difference(dealers))
            )
        self._told(server_round, dealers)
        answers = self._embedded(grid, server_round, phases[1], dealing, dealers, shares)
        values = self._decoded(server_round, phases[1], answers, len(dealers))
        if training:
            self._numbers |= {
                "dealers": len(dealers),
                "answers": len(answers),
                "threshold": terms.code.threshold,
                "refused_shares": sum(self.conversation.book(DEAL).refused.values()),
                "seconds_share": self.conversation.book(DEAL).virtual_seconds,
                "seconds_upload": self.conversation.book(TRAIN).virtual_seconds,
            }
        return Aggregate(values=values, clients=dealers)

    def _dealt(
        self, grid: Grid, server_round: int, phase: str, part: str, coded: NDArray[np.int64]
    ) -> tuple[Dealing, dict[str, NDArray[np.uint8]]]:
        """Give the clients the pending gradient; return the shares of weights that they deal."""
        terms = self._agreed()
        dealing = self._dealing(
            secrets.token_hex(16),
            part=part,
            rows=coded.tolist(),
            maskers=self._maskers(server_round),
        )
        content = self._gradient()
        assigned = self._assigned(grid, server_round, phase)
        # Simulated stragglers are waited for: those who are late could not be told apart from
        # those who are gone, and nobody is gone in the paper's model.
        simulated = self.conversation.stragglers is not None
        with self.conversation.patiently() if simulated else nullcontext():
            found = self.ask_all(
                grid, server_round, phase, content, assigned, fields=records.write(dealing)
            )
        self._stale = any(shares is None for shares in found.values())
        shares = {client: sealed for client, sealed in found.items() if sealed is not None}
        extra = len(coded) * terms.embedding
        sizes = [
            width * terms.embedding + (extra if member in dealing.maskers else 0)
            for member, width in zip(terms.members, terms.widths, strict=True)
        ]
        self._check_sealed(terms, phase, shares, sizes)
        return dealing, shares

    def _embedded(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        dealing: Dealing,
        dealers: list[str],
        shares: Mapping[str, NDArray[np.uint8]],
    ) -> dict[int, NDArray[np.int64]]:
        """Pass the shares on; return the answers by the places of who gave them."""
        terms = self._agreed()
        question = Evaluation(
            generation=terms.generation, share_set=dealing.share_set, dealers=dealers
        )
        self._answer_shape = (len(dealing.evaluated_rows), terms.embedding)
        assigned = only(self._assigned(grid, server_round, phase), set(dealers))
        quorum = min(terms.code.threshold + self._spare, len(dealers))
        answers = self.ask_all(
            grid,
            server_round,
            phase,
            RecordDict(),
            assigned,
            fields=records.write(question),
            own=self._passed_on(terms, shares, dealers),
            quorum=quorum,
        )
        if len(answers) < terms.code.threshold:
            missing = natural(set(dealers).difference(answers))
            raise NotEnoughSharesError(terms.code.threshold, len(answers), missing)
        return {terms.place(client): answer for client, answer in answers.items()}

    def _decoded(
        self, server_round: int, phase: str, answers: dict[int, NDArray[np.int64]], dealers: int
    ) -> NDArray[np.float32]:
        terms = self._agreed()
        sums = decode_rows(terms.code, answers)
        if len(answers) > terms.code.threshold and terms.code.inconsistent(answers).any():
            self.conversation.book(phase).refuse("malformed", "answers contradict each other")
            names = [terms.members[place] for place in sorted(answers)]
            raise ProtocolError(
                f"round {server_round}: the answers contradict each other, one of {names} is wrong"
            )
        divisor = dealers if terms.mean else 1
        real = dequantise(
            sums, scale_bits=terms.scales.total_bits, field=terms.field, divisor=divisor
        )
        return real.astype(np.float32)

    def _plain(self, grid: Grid, server_round: int, part: str) -> Aggregate:
        """Return the aggregate of plain embeddings of all rows of a part, for simulations."""
        self.deliver(grid, server_round)
        terms, segments = self._agreed(), self.segments(part)
        self._answer_shape = (segments.rows, terms.embedding)
        answers = self.ask_all(
            grid,
            server_round,
            ORACLE,
            RecordDict(),
            self._assigned(grid, server_round, ORACLE),
            fields=records.write(Chunk(part=part, first=0, count=segments.rows)),
        )
        if missing := natural(set(self.members).difference(answers)):
            raise NotEnoughSharesError(len(self.members), len(answers), missing)
        total = sum(answers[client] for client in self.members)
        values = np.zeros((segments.K * segments.length, terms.embedding), np.float32)
        values[: segments.rows] = total / (len(self.members) if terms.mean else 1)
        return Aggregate(values=values, clients=list(self.members))

    def deliver(self, grid: Grid, server_round: int) -> None:
        """Give the clients the pending gradient, if there is one, and ask them nothing."""
        if self._pending is None:
            return
        dealing = self._dealing(None, part=TRAIN_PART, rows=[], maskers=[])
        found = self.ask_all(
            grid,
            server_round,
            DEAL_EVALUATION,
            self._gradient(),
            self._assigned(grid, server_round, DEAL_EVALUATION),
            fields=records.write(dealing),
        )
        self._told(server_round, found)

    # -- Replies -----------------------------------------------------------------------------

    def taken(self, phase: str, reply: ClientReply) -> Any:
        """Return what of a reply is kept: a client's data, sealed shares, an answer."""
        if phase == ENROL:
            return Enrolled.of(reply)
        if reply.fields.get("lost") is True:
            logger.warning("client %s has lost its shares of the data", reply.client_id)
            return None
        if phase in (CODE, DEAL, DEAL_EVALUATION):
            arrays = reply.arrays()
            if phase == CODE and SEALED not in arrays:
                return bool(reply.fields.get("fresh"))
            return np.asarray(arrays[SEALED]) if SEALED in arrays else np.zeros((0, 0), np.uint8)
        answer = reply.arrays().get(ANSWER)
        if answer is None:
            raise ReplyRefusedError("names", f"no array '{ANSWER}'")
        return self._plain_answer(answer) if phase == ORACLE else self._coded_answer(answer)

    def _coded_answer(self, answer: NDArray[Any]) -> NDArray[np.int64]:
        terms, size = self._agreed(), int(np.prod(self._answer_shape))
        if answer.dtype != np.uint8:
            raise ReplyRefusedError("dtype", f"an answer of {answer.dtype}")
        if answer.shape != (terms.bytes_of(size),):
            raise ReplyRefusedError("shape", f"an answer of shape {answer.shape}")
        try:
            elements = terms.field.from_bytes(answer.tobytes(), size)
        except ProtocolError as error:
            raise ReplyRefusedError("range", str(error)) from error
        return elements.reshape(self._answer_shape)

    def _plain_answer(self, answer: NDArray[Any]) -> NDArray[np.float64]:
        if answer.dtype != np.float64 or answer.shape != self._answer_shape:
            raise ReplyRefusedError("shape", f"embeddings of shape {answer.shape}")
        if not np.isfinite(answer).all():
            raise ReplyRefusedError("not finite", "embeddings that are not finite")
        return answer

    def _check_sealed(
        self,
        terms: CodeTerms,
        phase: str,
        shares: dict[str, NDArray[np.uint8]],
        sizes: list[int],
    ) -> None:
        """Drop sealed shares of another form than was asked for."""
        others = len(terms.members) - 1
        for client in list(shares):
            length = terms.bytes_of(sizes[terms.place(client)]) + SEAL_BYTES
            sealed = shares[client]
            if sealed.dtype != np.uint8 or sealed.shape != (others, length):
                reason = "dtype" if sealed.dtype != np.uint8 else "shape"
                detail = f"client {client} dealt shares of {sealed.dtype}, shape {sealed.shape}"
                self.conversation.book(phase).refuse(reason, detail)
                del shares[client]

    # -- What the books and the history say --------------------------------------------------

    def guarantee(self) -> Guarantee:
        """Return the promise."""
        signed = self.terms is not None and all(self.terms.signatures)
        return promise(self.terms, pinned=signed, insecure=self._insecure)

    def state_dict(self) -> dict[str, Any]:
        """Return what was agreed on, beside what every vertical scheme keeps."""
        terms = None if self.terms is None else records.write(self.terms)
        own = {"terms": terms, "order": self._order}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned.

        Raises
        ------
        CheckpointError
            If it was made with other parameters of the code.
        """
        super().load_state_dict(state)
        if state["terms"] is None:
            return
        terms = records.read(CodeTerms, state["terms"])
        mine = {
            "order": (self._order, state["order"]),
            "bias": (self._bias, terms.bias),
            "x_max": (self._x_max, terms.x_max),
            "paper": (self._paper, terms.paper),
            "least_dealers": (self._least or len(terms.members), terms.least),
            "K": (self._K or terms.partitions, terms.partitions),
            "T": (self._T, terms.privacy),
            "prime": (self._prime, terms.prime),
            "data_bits, weight_bits": (self._bits, (terms.data_bits, terms.weight_bits)),
            "embedding": (self._embedding, terms.embedding),
            "w_max": (self._w_max, terms.w_max),
            "zero_mask": (self._zero_mask, terms.zero_mask),
            "aggregation": (self._mean, terms.mean),
        }
        for name, (now, then) in mine.items():
            if now != then:
                raise CheckpointError(f"the checkpoint has {name} = {then!r}, not {now!r}")
        self.terms = terms

    # -- Parts -------------------------------------------------------------------------------

    def segments(self, part: str) -> Segments:
        """Return how the rows of a part lie in its coded rows."""
        return self._agreed().segments(part)

    def rows_at_a_time(self, part: str) -> int:
        """Return how many coded rows are evaluated on one set of shares."""
        return self.rows_of(self._agreed(), part)

    def rows_of(self, terms: CodeTerms, part: str) -> int:
        """Return how many coded rows are evaluated on one set of shares under some terms."""
        if part == TRAIN_PART:
            return -(-self._batch_size // terms.partitions)
        if self._evaluation == "oracle":
            return terms.segments(part).length
        if terms.zero_mask:
            dealers = maskers(len(terms.members), terms.privacy)
            per_row = terms.bytes_of(terms.embedding) * len(terms.members) * dealers
            return max(1, self._relay_limit // per_row)
        # As large as a batch whose answers can be independent (FedVS has no rule).
        return max(1, terms.offsets[-1] // (terms.partitions + terms.privacy) // 2)

    def _maskers(self, server_round: int) -> list[str]:
        """Return who adds zero masks, in turns: one of them more than needed."""
        if not self._zero_mask:
            return []
        count = maskers(len(self.members), self._T)
        first = server_round * count
        chosen = {(first + step) % len(self.members) for step in range(count)}
        return [self.members[place] for place in sorted(chosen)]

    def _dealing(
        self, share_set: str | None, *, part: str, rows: list[int], maskers: list[str]
    ) -> Dealing:
        pending = self._pending
        return Dealing(
            generation=self._agreed().generation,
            session=self._session,
            update=self._updates,
            learning_rate=self._client_rate,
            trained_rows=[] if pending is None else pending.rows,
            trained_dealers=[] if pending is None else pending.clients,
            deals=share_set is not None,
            share_set=share_set or "none",
            part=part,
            evaluated_rows=rows,
            maskers=maskers,
        )

    def _gradient(self) -> RecordDict:
        pending = self._pending
        return RecordDict() if pending is None else arrays_message({GRADIENT: pending.gradient})

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


def _fresh(passing: Mapping[str, Any]) -> dict[str, Any]:
    return {client: fresh for client, fresh in passing.items() if fresh is True}


def natural_in(members: list[str], among: Mapping[str, Any]) -> list[str]:
    """Return the members that are among some names, in their own order."""
    return [member for member in members if member in among]
