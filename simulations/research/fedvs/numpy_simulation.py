"""Trains FedVS and its baselines in one process: the strategies' rounds without messages.

A `SimulatedFedVS` and a `SimulatedSplitVFL` are the strategies themselves: batches, aggregates,
decoding, waits, virtual clock and evaluation are those of `flwr_privacy.strategies.FedVS` and
`SplitVFL`, and a client's weights, embeddings and noise are made by the functions of
`flwr_privacy.clients`. What is left out is Flower, the nodes' stores and the sealed shares: FedVS's
answers are points of a polynomial through the clients' exact integer sums, so that the strategy
decodes what it decodes from shares. A round is about ten times as fast as on the inline engine, and
no data are coded before the first. A test compares the models, the weights, the clock and who
answered with the inline engine's.

The systems of "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for
Split Models" (ICML 2023), section 6. All of a seed start from the same weights and meet the same
delays. Everything comes from the seed: this protects nobody.
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

from flwr_privacy.clients import FedVSClient, SplitVFLClient, VerticalData
from flwr_privacy.clients.vertical.coded_data import draw_weights
from flwr_privacy.clients.vertical.coded_round import move, rounded_weights
from flwr_privacy.clients.vertical.coding import Coding, replied
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.fedvs.data import TEST_PART, TRAIN_PART
from flwr_privacy.fedvs.server_model import ServerModel
from flwr_privacy.fedvs.terms import (
    ANSWER,
    DEAL,
    DEAL_EVALUATION,
    GRADIENT,
    CodeTerms,
    DealRequest,
    Evaluation,
)
from flwr_privacy.pipeline.mechanism import Answer
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.stragglers import StragglerModel, Stragglers
from flwr_privacy.strategies import FedVS, SplitVFL
from flwr_privacy.strategies.options.loop_options import LoopOptions
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import ClientReply, arrays_of
from flwr_privacy.strategies.state.experiment import to_record
from flwr_privacy.strategies.transport.transport import Plain
from flwr_privacy.strategies.vertical.columns import Aggregate, Enrolled, natural
from flwr_privacy.strategies.vertical.split_vfl import SETTLE
from flwr_privacy.strategies.vertical.strategy import VerticalStrategy
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.channel import KeyPair
from flwr_privacy.wire.documents import dumps
from flwr_privacy.wire.message import METRICS, RECORD, TRAIN, Fields

from .synthetic_data import FedVSSettings, FedVSSyntheticData

__all__ = [
    "FedVSTrainingCurve",
    "SimulatedFedVS",
    "SimulatedSplitVFL",
    "experiment_of",
    "simulate",
    "training_of",
]

AXES = ("seconds", "rounds")
_GRID = cast("Grid", None)  # nobody looks at it

Array = NDArray[np.float64]
Floats = NDArray[np.float32]


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


class _Party(StepStore):
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


class _InProcess(VerticalStrategy):
    """A strategy whose clients, "0" to "N - 1" by their columns, answer without messages."""

    _parties: Mapping[str, _Party]

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
        self._parties = {str(n): _Party(n, data, experiment, seed) for n in range(data.clients)}
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

    def answered(self, party: _Party, phase: str, arrays: Arrays, fields: Fields) -> Answer:
        """Return what a client answers to a request."""
        raise NotImplementedError


class SimulatedSplitVFL(_InProcess, SplitVFL):
    """`flwr_privacy.strategies.SplitVFL` without messages; parameters are the same.

    Attributes
    ----------
    joined : {"concatenate", "max"}, optional
        How embeddings are put together in the paper's Figure 1, in place of their mean or sum.
        Those of ignored clients are zeros where they are concatenated.
    test_noise : bool
        Whether the noise of `WaitNoised` is in tests too, as under `SplitVFL`.
    """

    joined: str | None = None
    test_noise: bool = True

    def setup(self, grid: Grid) -> None:
        """Enrol the clients, and have them draw their weights."""
        super().setup(grid)
        nothing = self._fields(TRAIN_PART, [], None, update=0)
        self.ask_all(grid, 0, SETTLE, RecordDict(), self._assigned(grid, 0, SETTLE), fields=nothing)

    def answered(self, party: _Party, phase: str, arrays: Arrays, fields: Fields) -> Answer:
        """Return what a client answers to a request."""
        if GRADIENT in arrays and self.joined is not None:
            own = np.asarray(arrays[GRADIENT], np.float32)
            arrays = {GRADIENT: np.ascontiguousarray(self._part(own, party.client_id))}
        step = SplitVFLClient(party.data).release(phase, arrays, fields, _no_training)
        return step.work(party)

    def _joined_up(self, found: Mapping[str, Floats]) -> Aggregate:
        clients = natural(found)
        if self.joined == "concatenate":
            zeros = np.zeros_like(found[clients[0]])
            blocks = [found.get(member, zeros) for member in self.members]
            return Aggregate(values=np.concatenate(blocks, axis=1), clients=clients)
        if self.joined == "max":
            blocks = [found[client] for client in clients]
            self._largest = np.array(clients)[np.argmax(blocks, axis=0)]
            return Aggregate(values=np.max(blocks, axis=0), clients=clients)
        return super()._joined_up(found)

    def _part(self, gradient: Floats, client: str) -> Floats:
        """Return the gradient with respect to a client's own embeddings."""
        if self.joined == "max":
            return np.where(self._largest == client, gradient, np.float32(0))
        first = self.members.index(client) * self.embedding
        return gradient[:, first : first + self.embedding]

    def _all_embeddings(self, grid: Grid, server_round: int, part: str) -> Floats:
        return self.aggregated(grid, server_round, part, np.arange(self._rows(part))).values

    def _fields(self, part: str, rows: list[int], owed: Any, *, update: int) -> Fields:
        found = super()._fields(part, rows, owed, update=update)
        return found if self.test_noise or part == TRAIN_PART else {**found, "epsilon": 0.0}


class SimulatedFedVS(_InProcess, FedVS):
    """`flwr_privacy.strategies.FedVS` without messages; parameters are the same.

    Tests are on plain embeddings (``evaluation="oracle"``).
    """

    def _share_rows(self, grid: Grid, server_round: int, terms: CodeTerms) -> None:
        """Have the clients draw their weights; their rows stay where they are."""
        for party in self._parties.values():
            draw_weights(Coding(party, party.data, terms), self._training, self._updates)
            party.state |= {"terms": dumps(records.write(terms)), "summed": []}
        self._sums: dict[str, NDArray[np.int64]] = {}
        self._answers: tuple[str, NDArray[np.int64]] = ("", np.zeros(0, np.int64))

    def answered(self, party: _Party, phase: str, arrays: Arrays, fields: Fields) -> Answer:
        """Return what a client answers to a request."""
        if phase == TRAIN:
            evaluation, terms = records.read(Evaluation, fields), self._agreed()
            if self._answers[0] != evaluation.share_set:
                self._answers = evaluation.share_set, self._coded(evaluation.dealers)
            own = self._answers[1][terms.place(party.client_id)]
            return {ANSWER: np.frombuffer(terms.field.to_bytes(own), np.uint8)}, replied()
        if phase in (DEAL, DEAL_EVALUATION):
            self._deal(party, records.read(DealRequest, fields), arrays)
            return {}, replied()
        return FedVSClient(party.data).release(phase, arrays, fields, _no_training).work(party)

    def _deal(self, party: _Party, dealing: DealRequest, arrays: Arrays) -> None:
        """Have a client move its weights, and keep its part of the sum."""
        coding = Coding(party, party.data, self._agreed())
        move(coding, dealing, arrays)
        if not dealing.deals:
            return
        segments = coding.terms.segments(dealing.part)
        coded = np.array(dealing.evaluated_rows, np.int64)
        places, counted = segments.real_rows(coded), segments.counted(coded)
        rows = coding.integers(dealing.part, places[counted])
        weights = coding.terms.field.signed(rounded_weights(coding, rows))
        own = np.zeros((len(places), coding.terms.embedding), np.int64)
        # Within the range that the client has checked, far below 2**53, all of it is exact.
        own[counted] = rows.astype(np.float64) @ weights.astype(np.float64)
        self._sums[party.client_id] = own

    def _coded(self, dealers: list[str]) -> NDArray[np.int64]:
        """Return answers of all clients that decode to the sums over some of them."""
        code = self._agreed().code
        total = code.field.reduce(np.sum([self._sums[dealer] for dealer in dealers], axis=0))
        blocks = total.reshape(code.K, -1, total.shape[1])
        return code.encode(blocks, np.zeros((code.T, *blocks.shape[1:]), np.int64))

    def _check_sealed(self, *shares: Any) -> None:
        """Check nothing: no shares are sealed."""

    def _passed_on(self, *shares: Any) -> dict[str, RecordDict]:
        """Pass nothing on."""
        return {}


def _no_training(*_: Any) -> Any:
    raise AssertionError("vertical schemes have no training of the user's")


def experiment_of(seed: int) -> str:
    """Return the experiment's name of a seed, on which the common order of the rows depends."""
    return f"numpy {seed}"


def training_of(
    data: FedVSSyntheticData,
    setting: FedVSSettings,
    server_model: ServerModel,
    *,
    seed: int,
    delays: Stragglers | None = None,
) -> SimulatedFedVS | SimulatedSplitVFL:
    """Return the strategy of a setting; parameters are those of `simulate`."""
    keywords = setting.strategy(data.clients, seed)
    common: dict[str, Any] = {
        **keywords,
        "labels": data.labels,
        "test_labels": data.test_labels,
        "server_model": server_model,
        "loop": LoopOptions(
            seed=seed,
            experiment_id=experiment_of(seed),
            stragglers=cast("StragglerModel | None", delays),
            write_card=False,
        ),
    }
    if delays is not None:
        common["delays"] = False
    if setting.method == "fedvs":
        return SimulatedFedVS(**common, evaluation="oracle")
    training = SimulatedSplitVFL(**common)
    training.test_noise = setting.test_noise
    if setting.aggregation in ("concatenate", "max"):
        training.joined = setting.aggregation
    return training


def simulate(
    data: FedVSSyntheticData,
    setting: FedVSSettings,
    server_model: ServerModel,
    *,
    watch: Sequence[float],
    by: str = "seconds",
    rounds: int,
    seed: int,
    delays: Stragglers | None = None,
) -> FedVSTrainingCurve:
    """Train one setting and look at it at some moments.

    Parameters
    ----------
    data : FedVSSyntheticData
        The data.
    setting : FedVSSettings
        What to train.
    server_model : ServerModel
        The server model; concatenated embeddings are N times as wide.
    watch : sequence of float
        The moments, ascending, at least one: virtual seconds or rounds.
    by : {"seconds", "rounds"}, default "seconds"
        Which.
    rounds : int
        The most steps of the server model, at least 1. A training that has made them stands still.
    seed : int
        Root of weights, batches, roundings, noise, delays, and of who straggles.
    delays : Stragglers, optional
        By default those of the setting. Clients have the names "0" to "N - 1".

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or the setting does not fit the data.
    """
    check_choice("by", by, AXES)
    if not len(watch) or list(watch) != sorted(watch):
        raise InvalidParameterError("watch", list(watch), "ascending numbers, one at least")
    setting.check(data)
    training = training_of(data, setting, server_model, seed=seed, delays=delays)
    return training.run(data, watch=watch, by=by, rounds=rounds)
