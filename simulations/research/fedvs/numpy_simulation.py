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

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.clients import FedVSClient, SplitVFLClient
from flwr_privacy.clients.vertical.coded_data import draw_weights
from flwr_privacy.clients.vertical.coded_round import move, rounded_weights
from flwr_privacy.clients.vertical.coding import Coding, replied
from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.fedvs.data import TRAIN_PART
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
from flwr_privacy.stragglers import StragglerModel, Stragglers
from flwr_privacy.strategies import FedVS, SplitVFL
from flwr_privacy.strategies.options.loop_options import LoopOptions
from flwr_privacy.strategies.vertical.columns import Aggregate, natural
from flwr_privacy.strategies.vertical.split_vfl import SETTLE
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.documents import dumps
from flwr_privacy.wire.message import TRAIN, Fields

from .in_process import FedVSTrainingCurve, InProcess, Party
from .synthetic_data import FedVSSettings, FedVSSyntheticData

__all__ = [
    "SimulatedFedVS",
    "SimulatedSplitVFL",
    "experiment_of",
    "simulate",
    "training_of",
]

AXES = ("seconds", "rounds")
Floats = NDArray[np.float32]


class SimulatedSplitVFL(InProcess, SplitVFL):
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

    def answered(self, party: Party, phase: str, arrays: Arrays, fields: Fields) -> Answer:
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


class SimulatedFedVS(InProcess, FedVS):
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

    def answered(self, party: Party, phase: str, arrays: Arrays, fields: Fields) -> Answer:
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

    def _deal(self, party: Party, dealing: DealRequest, arrays: Arrays) -> None:
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
