"""Asynchronous split learning (VAFL) on a virtual clock: no client waits for another.

The server keeps the last embedding of every row from every client. When a client's embeddings of
a batch arrive, they take their places, the server model makes a step on that batch with what is
there of the others, and that client alone gets its gradient and makes a step.

Source: Chen et al., "VAFL: a Method of Vertical Asynchronous Federated Learning" (2020), without
its noise, as "FedVS" (ICML 2023), section 6, compares itself with. What is kept at the start is one
pass over all rows; the paper does not say.
"""

import heapq
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.fedvs.server_model import ServerModel
from flwr_privacy.wire.identity import stream

from .parties import Clients, aggregate, gradients
from .synthetic_data import FedVSSettings, FedVSSyntheticData

__all__ = ["Queue"]

Floats = NDArray[np.float32]


class Queue:
    """The clients' embeddings on their way.

    Parameters
    ----------
    data, setting : Scene, Setting
        What is trained.
    server_model : ServerModel
        The server model.
    seconds : callable
        How long a client takes from one gradient to the arrival of its next embeddings: from its
        number and that of the cycle, from 1.
    back : float
        Seconds from an arrival until the client has its gradient and has made its step.
    seed : int
        Root of weights and batches.

    Attributes
    ----------
    updates : (N,) int64
        Arrivals of each client up to now.
    arrivals : list of int
        Who came, one after the other.
    """

    def __init__(
        self,
        data: FedVSSyntheticData,
        setting: FedVSSettings,
        server_model: ServerModel,
        seconds: Callable[[int, int], float],
        back: float,
        seed: int,
    ) -> None:
        self._data, self._setting, self._server_model = data, setting, server_model
        self._seconds, self._back, self._seed = seconds, back, seed
        self.clients = Clients(data, setting, seed)
        self.arrays: Mapping[str, NDArray[Any]] = server_model.initial()
        self.updates = np.zeros(data.clients, np.int64)
        self.arrivals: list[int] = []
        self.share_seconds = 0.0
        everything = np.arange(data.rows)
        self._kept = np.stack([self.clients.embed(n, everything) for n in range(data.clients)])
        self._linear = setting.aggregation in ("mean", "sum")
        self._total = self._kept.sum(axis=0, dtype=np.float64)  # only of use where it is linear
        self._waiting: list[tuple[float, int, int]] = []
        for n in range(data.clients):
            self._start(n, 0.0)

    def end(self) -> float:
        """Return the virtual time of the next arrival."""
        return self._waiting[0][0]

    def step(self) -> None:
        """Let the next embeddings arrive."""
        now, _, n = heapq.heappop(self._waiting)
        self.updates[n] += 1
        self.arrivals.append(n)
        # The client's weights are still those with which it set out.
        rows = self._batch(n)
        own = self.clients.embed(n, rows)
        how, clients = self._setting.aggregation, self._data.clients
        parts = dict.fromkeys(range(clients), own)
        if self._linear:
            self._total[rows] += own.astype(np.float64) - self._kept[n, rows]
            self._kept[n, rows] = own
            embedding = self._total[rows] / (clients if how == "mean" else 1)
        else:
            self._kept[n, rows] = own
            parts = {m: self._kept[m, rows] for m in range(clients)}
            embedding = aggregate(parts, how, clients)
        self.arrays, gradient, _ = self._server_model.step(
            self.arrays,
            embedding.astype(np.float32),
            self._data.labels[rows],
            self._setting.learning_rate,
        )
        self.clients.learn(n, rows, gradients(parts, gradient, how, [n])[n])
        self._start(n, now + self._back)

    def embed_tests(self) -> Floats:
        """Return the aggregate for the test rows, from the clients' present weights."""
        clients = self._data.clients
        parts = {n: self.clients.embed_tests(n) for n in range(clients)}
        return aggregate(parts, self._setting.aggregation, clients)

    def _start(self, n: int, now: float) -> None:
        """Let a client set out. Of those that arrive at one time, who set out first is first."""
        cycle = int(self.updates[n]) + 1
        arrival = now + self._seconds(n, cycle)
        heapq.heappush(self._waiting, (arrival, len(self.arrivals), n))

    def _batch(self, n: int) -> NDArray[np.int64]:
        """Return the rows of a client's batch, any of them with equal probability."""
        draws = stream(self._seed, "vafl batch", n, int(self.updates[n]))
        size = min(self._setting.batch_size, self._data.rows)
        rows: NDArray[np.int64] = draws.choice(self._data.rows, size, replace=False)
        return rows
