"""Simulates FedVS and its baselines in NumPy, on a virtual clock.

The systems of "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for
Split Models" (ICML 2023), section 6. All of a seed start from the same weights and meet the same
delays. FedVS's sum is taken of the quantised values as exact integers, which is what decoding gives
whoever straggles. Everything comes from a seed: this rehearses a training and protects nobody.

A round of FedVS takes the time in which the last client has shared its weights, then that in which
as many uploads are there as decoding takes, then that of the gradients' way back and the clients'
steps. Other systems share nothing, and wait for all uploads or for those of the fast clients. What
clients compute takes them time by the number of multiplications, what they send by its bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.fedvs.delays import SHARE, UPLOAD
from flwr_privacy.fedvs.quantisation import dequantise, quantise, quantise_stochastic
from flwr_privacy.fedvs.rows import Segments, batch_of, order
from flwr_privacy.fedvs.server_model import ServerModel
from flwr_privacy.fedvs.sharing import data_shares, decode_rows, evaluate, weight_shares
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.paper.sharing import pad_rows
from flwr_privacy.wire.identity import derive_seed

from .clock import clock_of
from .parties import Clients, aggregate, gradients
from .synthetic_data import FedVSSettings, FedVSSyntheticData
from .vafl import Queue

__all__ = ["Delays", "FedVSTrainingCurve", "simulate"]

AXES = ("seconds", "rounds")
_MASKED_BITS = 16  # of the grid on which a masked sum adds

Array = NDArray[np.float64]
Floats = NDArray[np.float32]


class Delays(Protocol):
    """The delays of clients: `HalfSlow`, or a model with the same methods."""

    @property
    def fast(self) -> Sequence[str]:
        """The clients that are no stragglers."""
        ...

    def finish_time(
        self, *, seed: int | str, server_round: int, client_id: str, phase: str, request: int = 0
    ) -> float:
        """Return the virtual seconds of one client in a phase of a round."""
        ...


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
    updates : (N,) int64
        How many steps each client has made.
    """

    rounds: Array
    seconds: Array
    share_seconds: Array
    accuracy: Array
    loss: Array
    auc: Array
    arrays: Mapping[str, NDArray[Any]]
    weights: Sequence[Array]
    updates: NDArray[np.int64]


class _System(Protocol):
    """A system as the rehearsal drives it, from one step of the server model to the next."""

    clients: Clients
    arrays: Mapping[str, NDArray[Any]]
    updates: NDArray[np.int64]
    share_seconds: float

    def end(self) -> float:
        """Return the virtual time at which the next step ends."""
        ...

    def step(self) -> None:
        """Make it."""
        ...

    def embed_tests(self) -> Floats:
        """Return the aggregate for the test rows."""
        ...


def simulate(
    data: FedVSSyntheticData,
    setting: FedVSSettings,
    server_model: ServerModel,
    *,
    watch: Sequence[float],
    by: str = "seconds",
    rounds: int,
    seed: int,
    delays: Delays | None = None,
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
    delays : Delays, optional
        By default those of the setting. Clients have the names "0" to "N - 1".

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or the setting does not fit the data.
    """
    check_choice("by", by, AXES)
    check_integer("rounds", rounds, minimum=1)
    if not len(watch) or list(watch) != sorted(watch):
        raise InvalidParameterError("watch", list(watch), "ascending numbers, one at least")
    setting.check(data)
    if delays is None:
        delays = setting.delays(data.clients, seed)
    kind = _QueueOfClients if setting.method == "vafl" else _Rounds
    system: _System = kind(data, setting, server_model, delays, seed)
    seen: dict[str, list[float]] = {
        name: [] for name in ("rounds", "seconds", "share_seconds", "accuracy", "loss", "auc")
    }
    done, now, found = 0, 0.0, None
    for moment in watch:
        while done < rounds and moment >= (system.end() if by == "seconds" else done + 1):
            now, found = system.end(), None
            system.step()
            done += 1
        if found is None:  # else nothing has changed since the last look
            found = server_model.metrics(system.arrays, system.embed_tests(), data.test_labels)
        for name in ("accuracy", "loss", "auc"):
            seen[name].append(found.get(name, math.nan))
        seen["rounds"].append(done)
        seen["seconds"].append(now)
        seen["share_seconds"].append(system.share_seconds)
    return FedVSTrainingCurve(
        **{name: np.array(values) for name, values in seen.items()},
        arrays=system.arrays,
        weights=system.clients.weights,
        updates=system.updates,
    )


class _Rounds:
    """All systems with rounds: each is one step of everybody who takes part."""

    def __init__(
        self,
        data: FedVSSyntheticData,
        setting: FedVSSettings,
        server_model: ServerModel,
        delays: Delays,
        seed: int,
    ) -> None:
        self._data, self._setting, self._server_model = data, setting, server_model
        self._delays, self._seed = delays, seed
        self.clients = Clients(data, setting, seed)
        self.arrays: Mapping[str, NDArray[Any]] = server_model.initial()
        self.updates = np.zeros(data.clients, np.int64)
        self.share_seconds = 0.0
        self._who = list(range(data.clients))
        if setting.method == "ignore":
            self._who = sorted(int(name) for name in delays.fast)
        self._tested = self._who
        if setting.evaluate_all:
            self._tested = list(range(data.clients))
        K = setting.segments(data.clients)
        self._segments = Segments(rows=data.rows, K=K)
        self._coded_batch = min(-(-setting.batch_size // K), self._segments.length)
        self._order = order(data.rows, derive_seed(seed, "order"))
        self._code = None
        if setting.method == "fedvs":
            self._code = LagrangeCode(N=data.clients, K=K, T=setting.T, field=setting.field)
        self._shares = _Shares(self.clients, self._segments, self._order, self._code, setting)
        self._clock = clock_of(data, setting, self._coded_batch * K)
        self._round, self._now, self._end = 0, self._clock.offline, -1.0
        self._shared = 0.0  # seconds of the next round until weights are shared
        self._fastest: list[int] = []

    def end(self) -> float:
        """Return the virtual time at which the next round ends."""
        if self._end < 0:
            shares = [self._seconds(n, SHARE) for n in self._who] if self._code is not None else []
            uploads = [self._seconds(n, UPLOAD) for n in self._who]
            needed = self._code.threshold if self._code is not None else len(uploads)
            self._fastest = np.argsort(uploads, kind="stable")[:needed].tolist()
            self._shared = max(shares, default=0.0) + self._clock.relay
            self._end = self._now + self._shared + uploads[self._fastest[-1]] + self._clock.back
        return self._end

    def step(self) -> None:
        """Train for a round."""
        self._now, self._end = self.end(), -1.0
        self._round += 1
        self.share_seconds += self._shared
        coded = batch_of(
            self._segments.length, self._coded_batch, derive_seed(self._seed, "batch"), self._round
        )
        places = self._segments.real_rows(coded)
        rows = self._order[places[places < self._data.rows]]
        parts: dict[int, Floats] = {}
        if self._code is not None:
            embedding = self._shares.embed(coded, rows, self._round, self._fastest)
        else:
            parts = {n: self._embedded(n, rows) for n in self._who}
            embedding = aggregate(parts, self._setting.aggregation, self._data.clients)
        self.arrays, gradient, _ = self._server_model.step(
            self.arrays, embedding, self._data.labels[rows], self._setting.learning_rate
        )
        if self._code is not None:
            divisor = self._data.clients if self._setting.aggregation == "mean" else 1
            for n in self._who:
                self.clients.learn(n, rows, gradient, divisor)
        else:
            own = gradients(parts, gradient, self._setting.aggregation, self._who)
            for n in self._who:
                self.clients.learn(n, rows, own[n])
        self.updates[self._who] += 1

    def embed_tests(self) -> Floats:
        """Return the aggregate for the test rows."""
        parts = {n: self.clients.embed_tests(n) for n in self._tested}
        if self._setting.method == "wait-dp" and self._setting.test_noise:
            parts = {
                n: self.clients.noisy(n, part, "test", self._round) for n, part in parts.items()
            }
        return aggregate(parts, self._setting.aggregation, self._data.clients)

    def _embedded(self, n: int, rows: NDArray[Any]) -> Floats:
        """Return what the server learns of a client's embeddings."""
        part = self.clients.embed(n, rows)
        if self._setting.method == "wait-dp":
            return self.clients.noisy(n, part, self._round)
        if self._setting.method == "masked":  # a masked sum is one of integers
            return np.ldexp(np.rint(np.ldexp(part, _MASKED_BITS)), -_MASKED_BITS)
        return part

    def _seconds(self, n: int, phase: str) -> float:
        """Return the virtual seconds of a client in a phase of the next round."""
        drawn = self._delays.finish_time(
            seed=self._seed, server_round=self._round + 1, client_id=str(n), phase=phase
        )
        return drawn + (self._clock.share if phase == SHARE else self._clock.upload)[n]


class _Shares:
    """FedVS's sums: of integers, or through shares."""

    def __init__(
        self,
        clients: Clients,
        segments: Segments,
        places: NDArray[np.int64],
        code: LagrangeCode | None,
        setting: FedVSSettings,
    ) -> None:
        self._clients, self._segments, self._code = clients, segments, code
        self._setting, self._field = setting, setting.field
        self._divisor = len(clients.data) if setting.aggregation == "mean" else 1
        self._coded: NDArray[np.int64] | None = None
        if code is None or not setting.coded:
            return
        dealt = []
        for data in clients.data:
            elements = quantise(data[places].astype(np.float64), setting.data_bits, self._field)
            padded = pad_rows(elements, segments, self._field, SecureRandom())
            dealt.append(data_shares(code, padded, SecureRandom()))
        self._coded = np.concatenate(dealt, axis=2)

    def embed(
        self, coded: NDArray[np.int64], rows: NDArray[Any], server_round: int, who: Sequence[int]
    ) -> Floats:
        """Return the aggregate for a batch.

        Parameters
        ----------
        coded : ndarray of int64
            Coded rows of the batch.
        rows : ndarray of int
            The rows that they decode to, without pads.
        server_round : int
            On which the rounding depends.
        who : sequence of int
            Whose answers are decoded.
        """
        scales, field = self._setting.scales, self._field
        rounded = [
            quantise_stochastic(
                weights, scales.weight_bits, field, self._clients.rounding(n, server_round)
            )
            for n, weights in enumerate(self._clients.weights)
        ]
        if self._coded is not None and self._code is not None:
            dealt = [weight_shares(self._code, own, SecureRandom()) for own in rounded]
            answers = {
                n: evaluate(field, self._coded[n][coded], np.concatenate([own[n] for own in dealt]))
                for n in who
            }
            elements = decode_rows(self._code, answers)
            elements = elements[self._segments.counted(coded)]
        else:
            # Data are integers over a power of two: every product and sum is exact in float64.
            total = sum(
                self._clients.data[n][rows].astype(np.float64) @ field.signed(own)
                for n, own in enumerate(rounded)
            )
            elements = field.reduce(np.ldexp(total, scales.data_bits).astype(np.int64))
        embedding = dequantise(
            elements, scale_bits=scales.total_bits, field=field, divisor=self._divisor
        )
        return embedding.astype(np.float32)


class _QueueOfClients(Queue):
    """VAFL's queue with the clock of this module."""

    def __init__(
        self,
        data: FedVSSyntheticData,
        setting: FedVSSettings,
        server_model: ServerModel,
        delays: Delays,
        seed: int,
    ) -> None:
        clock = clock_of(data, setting, min(setting.batch_size, data.rows))

        def seconds(n: int, cycle: int) -> float:
            drawn = delays.finish_time(
                seed=seed, server_round=cycle, client_id=str(n), phase=UPLOAD
            )
            return drawn + clock.upload[n]

        super().__init__(data, setting, server_model, seconds, clock.back, seed)
