"""FedVS on the server: relays sealed shares, stops when enough answers came, decodes their sum.

"FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split Models",
ICML 2023, Algorithm 1.
"""

import logging
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.errors import (
    NotEnoughSharesError,
    ProtocolError,
)
from flwr_privacy.fedvs.data import TEST_PART, TRAIN_PART
from flwr_privacy.fedvs.quantisation import dequantise
from flwr_privacy.fedvs.sharing import decode_rows
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
    DealRequest,
    Evaluation,
)
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.strategies.requests.messenger import only
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.message import EVALUATE, TRAIN

from .columns import Aggregate, Enrolled, arrays_message, natural
from .data_coding import DataCoding, coded_answer, natural_in, plain_answer

__all__ = ["FedVS"]

logger = logging.getLogger("flwr.privacy")


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class FedVS(DataCoding):
    """Vertical split learning on coded shares, exact from any first R answers (FedVS).

    Parameters
    ----------
    fraction_train, ..., labels, server_model, ...
        Those of `VerticalStrategy`.
    coding : LagrangeCoding
        How rows and weights are divided into shares: `LagrangeCoding.K` segments, of which
        `LagrangeCoding.T` colluding clients learn nothing.
    quantisation : Quantisation
        The field, and the grids of features and weights.
    evaluation : {"secure", "oracle", "none"}, default "secure"
        How test rows are evaluated: coded as the others; from plain embeddings, in simulations
        only; not at all.

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
    >>> from flwr_privacy.clients.torch import TorchServerModel, mlp
    >>> from flwr_privacy.strategies import ColumnFeatures, FedVS, LagrangeCoding
    >>> server_model = TorchServerModel(partial(mlp, (64, 32, 2)))
    >>> strategy = FedVS(
    ...     labels=[0, 1, 1, 0],
    ...     server_model=server_model,
    ...     data=ColumnFeatures(order=1),
    ...     coding=LagrangeCoding(T=1),
    ...     batch_size=2,
    ... )
    """

    scheme: ClassVar[str] = "fedvs"
    untimed: ClassVar[frozenset[str]] = frozenset(
        {EVALUATE, ENROL, CODE, DEAL_EVALUATION, EMBED_EVALUATION, ORACLE}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluation == "none":
            self._labels.pop(TEST_PART, None)

    # -- A round -----------------------------------------------------------------------------

    def aggregated(
        self, grid: Grid, server_round: int, part: str, coded: NDArray[np.int64]
    ) -> Aggregate:
        """Return the aggregate of some rows, decoded from the first answers that are enough.

        Raises
        ------
        NotEnoughSharesError
            If too few clients deal or answer; the message names those who are missing.
        ProtocolError
            If answers contradict each other, or the data cannot be coded anew.
        """
        training = part == TRAIN_PART
        every = self.coding.refresh_every
        due = every is not None and server_round > 1 and (server_round - 1) % every == 0
        self._stale |= training and due
        if self._stale:
            self._code(grid, server_round)
        if not training and self.evaluation == "oracle":
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
                "refused_shares": sum(self.messenger.request_log(DEAL).refused.values()),
                "seconds_share": self.messenger.request_log(DEAL).virtual_seconds,
                "seconds_upload": self.messenger.request_log(TRAIN).virtual_seconds,
            }
        return Aggregate(values=values, clients=dealers)

    def _dealt(
        self, grid: Grid, server_round: int, phase: str, part: str, coded: NDArray[np.int64]
    ) -> tuple[DealRequest, dict[str, NDArray[np.uint8]]]:
        """Send the clients the pending gradient; return the shares of weights that they deal."""
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
        simulated = self.messenger.stragglers is not None
        with self.messenger.patiently() if simulated else nullcontext():
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
        dealing: DealRequest,
        dealers: list[str],
        shares: Mapping[str, NDArray[np.uint8]],
    ) -> dict[int, NDArray[np.int64]]:
        """Relay the shares; return the answers by their client's place."""
        terms = self._agreed()
        evaluation = Evaluation(
            generation=terms.generation, share_set=dealing.share_set, dealers=dealers
        )
        self._answer_shape = (len(dealing.evaluated_rows), terms.embedding)
        assigned = only(self._assigned(grid, server_round, phase), set(dealers))
        quorum = min(terms.code.threshold + self.coding.spare, len(dealers))
        answers = self.ask_all(
            grid,
            server_round,
            phase,
            RecordDict(),
            assigned,
            fields=records.write(evaluation),
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
            self.messenger.request_log(phase).refuse("malformed", "answers contradict each other")
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
        """Send the clients the pending gradient, if there is one, and ask nothing else."""
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
        """Return the part of a reply that is kept: data description, sealed shares, or answer."""
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
        if phase == ORACLE:
            return plain_answer(answer, self._answer_shape)
        return coded_answer(answer, self._agreed(), self._answer_shape)

    # -- Parts -------------------------------------------------------------------------------

    def _dealing(
        self, share_set: str | None, *, part: str, rows: list[int], maskers: list[str]
    ) -> DealRequest:
        pending = self._pending
        return DealRequest(
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
