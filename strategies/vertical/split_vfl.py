"""Plain vertical split learning on the server: FedVS's baselines on the same loop.

Each takes one exchange a round: a client takes in its last gradient and answers with embeddings.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.errors import (
    CheckpointError,
    InvalidParameterError,
    NotEnoughSharesError,
    ProtocolError,
)
from flwr_privacy.fedvs.clock import Seconds, plain_seconds
from flwr_privacy.fedvs.data import TRAIN_PART
from flwr_privacy.fedvs.delays import HalfSlow
from flwr_privacy.fedvs.network import expanded_width
from flwr_privacy.fedvs.options import VAFL, IgnoreStragglers, WaitForAll, WaitNoised
from flwr_privacy.fedvs.rows import batch_of
from flwr_privacy.fedvs.split_vfl import EmbeddingRequest
from flwr_privacy.fedvs.terms import ENROL
from flwr_privacy.keywords import check_options, checked_keywords
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.grid import GridMean
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.secure_sum import Bounds, SecureSum
from flwr_privacy.secure_sum.fedavg_terms import FedAvgSumTerms
from flwr_privacy.strategies.requests.instruction import Instruction, to_each
from flwr_privacy.strategies.requests.messenger import Assigned, only
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.identity import derive_seed
from flwr_privacy.wire.message import EVALUATE, TRAIN, Fields

from .columns import Aggregate, Enrolled, Pending, arrays_message, natural
from .strategy import VerticalStrategy
from .vafl_arrivals import Arrivals

__all__ = ["SplitVFL"]

logger = logging.getLogger("flwr.privacy")

EMBED, SETTLE = "embed", "settle"
EMBEDDING, GRADIENT = "embedding", "gradient"


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class SplitVFL(VerticalStrategy):
    """Vertical split learning in which the server sees the clients' embeddings: FedVS's baselines.

    Parameters
    ----------
    fraction_train, ..., labels, server_model, ...
        Those of `VerticalStrategy`. With a `secure_sum` the server sees sums of embeddings; use
        ``threshold`` of all clients to wait for all. Tests are on plain embeddings even then.
    method : WaitForAll, IgnoreStragglers, VAFL or WaitNoised, default WaitForAll()
        For whose embeddings the server waits, and whether they have noise.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Guarantee
    ---------
    None without a secure sum: the server sees all embeddings. The noise of `WaitNoised` has no
    guarantee either (`flwr_privacy.fedvs.split_vfl.noisy`). Under a secure sum the server sees sums
    of embeddings, with what FedVS's sums say of the features.
    """

    method: WaitForAll | IgnoreStragglers | VAFL | WaitNoised = field(default_factory=WaitForAll)

    scheme: ClassVar[str] = "split-vfl"
    summable: ClassVar[bool] = True
    untimed: ClassVar[frozenset[str]] = frozenset({EVALUATE, ENROL, EMBED, SETTLE})

    def __post_init__(self) -> None:
        check_options(SplitVFL, self, "method")
        if self.secure_sum is not None and not isinstance(self.method, WaitForAll):
            raise InvalidParameterError("method", self.method, "WaitForAll() under a secure sum")
        super().__post_init__()
        if isinstance(self.data.order, Mapping) and len(set(self.data.order.values())) > 1:
            raise InvalidParameterError("order", self.data.order, "one order of all clients")

    def _build(self) -> None:
        super()._build()
        self._shape = (0, 0)
        self._owed: dict[str, Pending] = {}  # what each client has not got, under vafl
        self._arrivals: Arrivals | None = None  # under vafl
        self._cache: dict[str, NDArray[np.float32]] = {}
        self._arriving: tuple[str, NDArray[np.int64]] = ("", np.zeros(0, np.int64))

    # -- The setup ---------------------------------------------------------------------------

    def setup(self, grid: Grid) -> None:
        """Enrol the clients; under vafl, ask them for all embeddings once.

        Raises
        ------
        ProtocolError
            If a client does not answer, or the clients' rows do not belong together.
        """
        if not self.members:
            self._enrolled = self.enrol(grid, 0)
            self.members = natural(self._enrolled)
        self.simulate_delays()
        if isinstance(self.method, VAFL):
            self._begin_queue(grid)
        self.announce()

    def _begin_queue(self, grid: Grid) -> None:
        """Ask every client to embed all rows once; their simulated arrivals start here."""
        self._shape = (self._rows(TRAIN_PART), self.embedding)
        assigned = self._assigned(grid, 0, EMBED)
        self._cache = self.ask_all(
            grid,
            0,
            EMBED,
            RecordDict(),
            assigned,
            fields=self._fields(TRAIN_PART, [], None, update=0),
        )
        if missing := natural(set(self.members).difference(self._cache)):
            raise ProtocolError(f"the setup failed: clients {missing} sent no embeddings")
        delays, seed = self.messenger.stragglers, self.experiment.seed
        self._arrivals = Arrivals(self.members, delays, seed=seed)

    def seconds(self, delays: HalfSlow) -> Seconds:
        """Return the seconds that clients take for computing and messages."""
        widths = {
            client: expanded_width(told.columns, self._order, bias=self.data.bias)
            for client, told in self._enrolled.items()
        }
        batch = min(self.batch_size, self._rows(TRAIN_PART))
        return plain_seconds(widths, batch=batch, h=self.embedding, delays=delays)

    # -- A round -----------------------------------------------------------------------------

    def aggregated(
        self, grid: Grid, server_round: int, part: str, coded: NDArray[np.int64]
    ) -> Aggregate:
        """Return the aggregate of the embeddings of some rows.

        Raises
        ------
        NotEnoughSharesError
            If somebody is missing for whom the method waits.
        ProtocolError
            If nobody answers, or the sum of a secure sum cannot be opened.
        """
        training = part == TRAIN_PART
        if training and self._arrivals is not None:
            return self._arrival(grid, server_round, self._arrivals)
        rows = coded.tolist() if training else []
        self._shape = (len(coded), self.embedding)
        if training and self.secure_sum is not None:
            return self._summed(grid, server_round, rows)
        if isinstance(self.method, VAFL):
            self.deliver(grid, server_round)
        phase = TRAIN if training else EMBED
        assigned = self._asked(self._assigned(grid, server_round, phase))
        found = self.ask_all(
            grid,
            server_round,
            phase,
            self._content(self._pending),
            assigned,
            fields=self._fields(part, rows, self._pending, update=self._updates),
            own=to_each({client: {"update": count} for client, count in self._gradients.items()}),
        )
        waited = {client for clients in assigned.values() for client in clients}
        partly = isinstance(self.method, IgnoreStragglers) and self._known_fast() is None
        if not found or ((waited | self._everybody()) - set(found) and not partly):
            missing = natural((waited | self._everybody()).difference(found))
            raise NotEnoughSharesError(len(missing) + len(found), len(found), missing)
        self._pending = None
        return self._joined_up(found)

    def _joined_up(self, found: Mapping[str, NDArray[np.float32]]) -> Aggregate:
        clients = natural(found)
        total = np.sum([found[client].astype(np.float64) for client in clients], axis=0)
        values = total / (len(clients) if self._mean else 1)
        return Aggregate(values=values.astype(np.float32), clients=clients)

    def _summed(self, grid: Grid, server_round: int, rows: list[int]) -> Aggregate:
        """Return the aggregate that a secure sum opens."""
        self.messenger.settle(grid)
        if self.secure_sum is None or not self.prepared(grid, server_round):
            raise ProtocolError("the secure sum could not be prepared")
        codes = self._sum_terms(self.secure_sum).grid
        instruction = Instruction(
            fields=self._fields(TRAIN_PART, rows, self._pending, update=self._updates),
            accumulator=lambda: GridMean({EMBEDDING: np.zeros(self._shape)}, codes, [EMBEDDING]),
        )
        content = self._content(self._pending)
        assigned = self.transport.clients(grid, server_round)
        mean, _ = self.ask(grid, server_round, TRAIN, content, assigned, instruction)
        if mean is None:
            raise ProtocolError("the sum of the embeddings was not opened")
        self._pending = None
        clients = natural(mean.clients)
        scale = 1 if self._mean else len(clients)
        values = np.asarray(mean.finish()[EMBEDDING], np.float64) * scale
        return Aggregate(values=values.astype(np.float32), clients=clients)

    def batch(self, server_round: int) -> NDArray[np.int64]:
        """Return the rows of a round; under vafl those of the next client to arrive."""
        if self._arrivals is None:
            return super().batch(server_round)
        client, seconds = self._arrivals.next()
        self.messenger.virtual_seconds += seconds
        seed = derive_seed(self.experiment.seed, "vafl batches", client)
        length, count = self._rows(TRAIN_PART), self._gradients[client]
        rows = batch_of(length, self.batch_size, seed, count + 1)
        self._arriving = client, rows
        return rows

    def _arrival(self, grid: Grid, server_round: int, arrivals: Arrivals) -> Aggregate:
        """Return the aggregate of the next answer to arrive and the others' latest answers."""
        client, rows = self._arriving
        self._shape = (len(rows), self.embedding)
        owed, count = self._owed.get(client), self._gradients[client]
        found = self.ask_all(
            grid,
            server_round,
            TRAIN,
            self._content(owed),
            only(self._assigned(grid, server_round, TRAIN), {client}),
            fields=self._fields(TRAIN_PART, rows.tolist(), owed, update=count),
        )
        self.messenger.request_log(TRAIN).virtual_seconds = 0.0  # the queue has the clock
        arrivals.gradients[client] += client in found
        arrivals.await_answer(client, server_round)
        if client not in found:
            raise NotEnoughSharesError(1, 0, [client])
        self._owed.pop(client, None)
        self._cache[client][rows] = found[client]
        kept = {member: self._cache[member][rows] for member in self.members}
        return Aggregate(values=self._joined_up(kept).values, clients=[client])

    def train_round(self, grid: Grid, server_round: int, arrays: Any, config: Any) -> Any:
        """Make one step; under vafl the gradient is for the client that has answered."""
        result = super().train_round(grid, server_round, arrays, config)
        if isinstance(self.method, VAFL) and self._pending is not None:
            client, rows = self._arriving
            self._owed[client] = Pending(
                rows=rows.tolist(), clients=self.members, gradient=self._pending.gradient
            )
            self._pending = None
        return result

    def deliver(self, grid: Grid, server_round: int) -> None:
        """Send the clients their pending gradients, and ask nothing else."""
        if isinstance(self.method, VAFL):
            for client, owed in list(self._owed.items()):
                assigned = only(self._assigned(grid, server_round, SETTLE), {client})
                self._settle(grid, server_round, owed, assigned, self._gradients[client])
            self._owed = {}
        elif self._pending is not None:
            everybody = self._asked(self._assigned(grid, server_round, SETTLE))
            self._settle(grid, server_round, self._pending, everybody, self._updates)
            self._pending = None

    def _settle(
        self, grid: Grid, server_round: int, owed: Pending, assigned: Assigned, update: int
    ) -> None:
        fields = self._fields(TRAIN_PART, [], owed, update=update)
        self.ask_all(grid, server_round, SETTLE, self._content(owed), assigned, fields=fields)

    # -- Replies and sums --------------------------------------------------------------------

    def taken(self, phase: str, reply: ClientReply) -> Any:
        """Return the part of a reply that is kept: data description or embeddings."""
        if phase == ENROL:
            return Enrolled.of(reply)
        if phase == SETTLE:
            return True
        found = reply.arrays().get(EMBEDDING)
        if found is None:
            raise ReplyRefusedError("names", f"no array '{EMBEDDING}'")
        if found.dtype != np.float32:
            raise ReplyRefusedError("dtype", f"embeddings of {found.dtype}")
        if found.shape != self._shape:
            raise ReplyRefusedError("shape", f"embeddings of shape {found.shape}")
        if not np.isfinite(found).all():
            raise ReplyRefusedError("not finite", "embeddings that are not finite")
        return found.copy() if isinstance(self.method, VAFL) else found

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the codes; every client weighs 1."""
        return (self.secure_sum or SecureSum()).bounds(len(clients), largest_weight=1)

    def _sum_terms(self, secure_sum: SecureSum) -> FedAvgSumTerms:
        return FedAvgSumTerms(
            grid=secure_sum.grid, value_range=float(secure_sum.value_range), weighted_by=""
        )

    # -- What it says of itself --------------------------------------------------------------

    def guarantee(self) -> Guarantee:
        """Return a guarantee of nothing, or of what a secure sum hides."""
        if self.secure_sum is None:
            return Guarantee(scheme=self.scheme, protects="nothing", adversary="nobody")
        return Guarantee(
            scheme=self.scheme,
            protects="the embeddings of a client in training, up to their sum",
            adversary="an honest-but-curious server and clients that collude with it",
            not_protected=(
                "the sums: over many rounds they give the server the inner products of all pairs "
                "of rows",
                "labels: the gradients of single rows go to all clients",
                "the embeddings of test rows, which are sent in the open",
            ),
            assumptions=("the server follows the protocol", "clients keep their own secrets"),
            evidence=(
                "tests of the secure sum: dishonest servers and clients, and clients that drop out",
                "tests of split learning: what its messages tell",
            ),
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        CheckpointError
            Under vafl: the last embeddings of all clients are no part of a checkpoint.
        """
        if isinstance(self.method, VAFL):
            raise CheckpointError("a training with VAFL() cannot be resumed")
        super().load_state_dict(state)

    # -- Parts -------------------------------------------------------------------------------

    def _fields(self, part: str, rows: list[int], owed: Pending | None, *, update: int) -> Fields:
        noise = self.method if isinstance(self.method, WaitNoised) else None
        step = EmbeddingRequest(
            training=self._training,
            session=self._session,
            update=update,
            learning_rate=self._client_rate,
            trained_rows=[] if owed is None else owed.rows,
            trained_clients=[] if owed is None else owed.clients,
            divisor=1 if owed is None or not self._mean else len(owed.clients),
            part=part,
            rows=rows,
            order=self._order,
            bias=self.data.bias,
            x_max=self.data.x_max,
            embedding=self.embedding,
            epsilon=0.0 if noise is None else noise.epsilon,
            clip=0.0 if noise is None else noise.clip or 0.0,
        )
        terms = {} if self.secure_sum is None else self._sum_terms(self.secure_sum).write()
        return {**records.write(step), **terms}

    def _content(self, owed: Pending | None) -> RecordDict:
        return RecordDict() if owed is None else arrays_message({GRADIENT: owed.gradient})

    @property
    def _order(self) -> int:
        order = self.data.order
        return order if isinstance(order, int) else min(order.values())

    @property
    def _gradients(self) -> dict[str, int]:
        """How many gradients each client has got, under vafl."""
        return {} if self._arrivals is None else self._arrivals.gradients

    def _known_fast(self) -> list[str] | None:
        """Return the clients that are known not to be stragglers."""
        if isinstance(self.method, IgnoreStragglers) and self.method.fast is not None:
            return [str(name) for name in self.method.fast]
        delays = self.messenger.stragglers
        return list(delays.fast) if isinstance(delays, HalfSlow) else None

    def _everybody(self) -> set[str]:
        """Return the clients that a round waits for."""
        if not isinstance(self.method, IgnoreStragglers):
            return set(self.members)
        return set(self._known_fast() or ())

    def _asked(self, assigned: Assigned) -> Assigned:
        fast = self._known_fast() if isinstance(self.method, IgnoreStragglers) else None
        return assigned if fast is None else only(assigned, set(fast))
