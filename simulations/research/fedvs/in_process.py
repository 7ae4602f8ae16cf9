"""Clients that answer a vertical strategy in one process, and the training that asks them.

A strategy over `InProcess` keeps its own rounds, waits, virtual clock and evaluation; in place of
messages, keys and the nodes' stores there is a `Party` for each client, which lends its steps what
its node would. Everything comes from the seed: this protects nobody.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.clients import VerticalData
from flwr_privacy.errors import check_integer
from flwr_privacy.fedvs.data import TEST_PART
from flwr_privacy.pipeline.mechanism import Answer
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import ClientReply, arrays_of
from flwr_privacy.strategies.state.experiment import to_record
from flwr_privacy.strategies.transport.transport import Plain
from flwr_privacy.strategies.vertical.columns import Aggregate, Enrolled, natural
from flwr_privacy.strategies.vertical.strategy import VerticalStrategy
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.channel import KeyPair
from flwr_privacy.wire.message import METRICS, RECORD, TRAIN, Fields

from .synthetic_data import FedVSSyntheticData

__all__ = ["FedVSTrainingCurve", "InProcess", "Party"]

_GRID = cast("Grid", None)  # nobody looks at it

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class FedVSTrainingCurve:
    """Accuracy and loss of a simulated training at W moments.

    Parameters
    ----------
    rounds : (W,) float64
        Steps of the server model up to then; of vafl one for each embedding that came.
    seconds, share_seconds : (W,) float64
        Virtual time at the end of the last of them, and how much of it went by until weights were
        shared. FedVS's first round starts when the data are shared, after time 0.
    accuracy, loss, auc : (W,) float64
        On the test rows. The last is NaN where the server model gives none.
    arrays : dict of str to ndarray
        Weights of the server model at the end.
    weights : list of (e_n, h) float64
        The clients' weights at the end.
    history : list of dict
        Of each round: the counts of the strategy's history, its own numbers (``scheme``), and whose
        embeddings the gradient is of (``clients``).
    """

    rounds: Array
    seconds: Array
    share_seconds: Array
    accuracy: Array
    loss: Array
    auc: Array
    arrays: Mapping[str, NDArray[Any]]
    weights: Sequence[Array]
    history: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Moment:
    """A training after a round: enough to evaluate it when the next round is over."""

    rounds: int = 0
    seconds: float = 0.0
    share_seconds: float = 0.0
    arrays: ArrayRecord
    weights: Mapping[str, Array]


class Party(StepStore):
    """A client in this process, with what its node would lend to its steps."""

    def __init__(self, n: int, columns: FedVSSyntheticData, experiment_id: str, seed: int) -> None:
        self.client_id, self.experiment_id = str(n), experiment_id
        self.data = VerticalData(train=columns.blocks[n], test=columns.test_blocks[n])
        # No folder, but a name under which trainings on the same columns find them expanded.
        self.folder = Path(f"simulated {columns.serial} {experiment_id} {n}")
        self.durable = False
        self.state: dict[str, Any] = {}
        self._seed = seed

    def asked(self, question: Question) -> None:
        """Begin to answer a question."""
        self._question, self.server_round = question, question.server_round

    def random(self, purpose: str) -> SecureRandom:
        """Return a random source for this answer; that of first weights is one for all methods."""
        question = self._question
        if purpose == "initial weights":
            question = Question(experiment_id=self.experiment_id, phase=TRAIN, server_round=1)
        return SecureRandom.insecure(self._seed, purpose, self.client_id, *astuple(question))

    def pair(self, name: str) -> KeyPair:
        """Return a key pair, with which nothing is sealed."""
        return KeyPair()

    def signature(self, name: str, public: bytes) -> bytes:
        """Return no signature."""
        return b""


@dataclass(frozen=True)
class _Reply(ClientReply):
    """The answer of a client in this process."""

    found: Arrays

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of the answer."""
        return dict(self.found)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the answer."""
        return dict(self.fields[METRICS])


class InProcess(VerticalStrategy):
    """A strategy whose clients, "0" to "N - 1" by their columns, answer without messages."""

    _parties: Mapping[str, Party]

    def run(
        self, data: FedVSSyntheticData, *, watch: Sequence[float], by: str, rounds: int
    ) -> FedVSTrainingCurve:
        """Train on the columns of `data`; parameters are those of `simulate`.

        Raises
        ------
        InvalidParameterError
            If a value is not allowed.
        """
        self.planned_rounds = check_integer("rounds", rounds, minimum=1)
        seed, experiment = int(self.experiment.seed), self.experiment.id
        self._parties = {str(n): Party(n, data, experiment, seed) for n in range(data.clients)}
        self.setup(_GRID)
        self._history: list[dict[str, Any]] = []
        last = _Moment(
            seconds=self.messenger.counts()["virtual_seconds"],
            arrays=to_record(dict(self.server_model.initial())),
            weights=self._weights(),
        )
        ahead: _Moment | None = None  # a round that is over after the moment that is looked at
        seen: dict[str, list[float]] = {
            name: [] for name in ("rounds", "seconds", "share_seconds", "accuracy", "loss", "auc")
        }
        found: Mapping[str, float] | None = None
        for moment in watch:
            while last.rounds < rounds and (by == "seconds" or last.rounds + 1 <= moment):
                ahead = ahead or self._next(last)
                if by == "seconds" and ahead.seconds > moment:
                    break
                last, ahead, found = ahead, None, None
            if found is None:  # else nothing has changed since the last look
                found = self._evaluated(last)
            for name in ("accuracy", "loss", "auc"):
                seen[name].append(found.get(name, math.nan))
            for name in ("rounds", "seconds", "share_seconds"):
                seen[name].append(getattr(last, name))
        return FedVSTrainingCurve(
            **{name: np.array(values) for name, values in seen.items()},
            arrays=arrays_of(last.arrays),
            weights=[last.weights[client] for client in self._parties],
            history=self._history[: last.rounds],
        )

    def _next(self, last: _Moment) -> _Moment:
        """Train for a round, and have the clients make their steps."""
        server_round = last.rounds + 1
        self._summed_up: list[str] = []
        arrays, _ = self.train_round(_GRID, server_round, last.arrays, ConfigRecord())
        self.deliver(_GRID, server_round)
        counts = self.messenger.counts()
        self._history.append({**counts, "clients": self._summed_up, "scheme": self._numbers})
        return _Moment(
            rounds=server_round,
            seconds=counts["virtual_seconds"],
            share_seconds=last.share_seconds + self._numbers.get("seconds_share", 0.0),
            arrays=arrays or last.arrays,
            weights=self._weights(),
        )

    def _evaluated(self, moment: _Moment) -> Mapping[str, float]:
        """Return the metrics on the test rows with the weights that clients had at a moment."""
        now = self._weights()
        self._set_weights(moment.weights)
        values = self._all_embeddings(_GRID, moment.rounds, TEST_PART)
        self._set_weights(now)
        labels = self._ordered_labels(TEST_PART)
        return self.server_model.metrics(arrays_of(moment.arrays), values, labels)

    def _weights(self) -> dict[str, Array]:
        return {client: party.state["weights"] for client, party in self._parties.items()}

    def _set_weights(self, weights: Mapping[str, Array]) -> None:
        for client, own in weights.items():
            self._parties[client].state["weights"] = own

    # -- In place of messages --------------------------------------------------------------------

    def _build(self) -> None:
        super()._build()
        self.transport = Plain(self.drawn)  # a secure sum is that of codes, as it opens them
        self.messenger.recorded = True
        self._announced = True

    def enrol(self, grid: Grid, server_round: int, **fields: str) -> dict[str, Enrolled]:
        """Ask the clients of this process for a description of their data."""
        self.members = natural(self._parties)
        return super().enrol(grid, server_round, **fields)

    def aggregated(
        self, grid: Grid, server_round: int, part: str, coded: NDArray[np.int64]
    ) -> Aggregate:
        """Return the aggregate of some rows, and note over whom it is."""
        found = super().aggregated(grid, server_round, part, coded)
        self._summed_up = found.clients
        return found

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Return all clients, as if on one node."""
        return {0: self.members}

    def _assigned(self, grid: Grid, server_round: int, phase: str) -> Assigned:
        return {0: self.members}

    def ask(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        content: RecordDict,
        assigned: Assigned,
        instruction: Instruction,
        *,
        quorum: int | None = None,
    ) -> tuple[WeightedMean | None, MetricRecord | None]:
        """Have the clients answer that are not late; see `SchemeStrategy.ask`."""
        log = self.messenger.opened(server_round, phase, assigned, quorum=quorum)
        question = Question(
            experiment_id=self.experiment.id,
            phase=phase,
            server_round=server_round,
            request=log.header.request,
        )
        sent = [record for record in content.values() if isinstance(record, ArrayRecord)]
        arrays = arrays_of(*sent) if sent else {}
        summed = int(phase == TRAIN and self.secure_sum is not None)
        mean, take = instruction.accumulator(), instruction.take or self.take
        for client in assigned[0]:
            log.answered.add(client)
            if client in log.late:
                log.late_count += 1
                continue
            own = instruction.own.get(client, RecordDict()).get(RECORD, ConfigRecord())
            fields: Fields = {**instruction.fields, **dict(own), "summed": summed}
            party = self._parties[client]
            party.asked(question)
            found, told = self.answered(party, phase, arrays, fields)
            take(mean, _Reply(client, RecordDict(), told, found))
            log.used.add(client)
        return (mean if mean.weight else None), None

    def answered(self, party: Party, phase: str, arrays: Arrays, fields: Fields) -> Answer:
        """Return what a client answers to a request."""
        raise NotImplementedError
