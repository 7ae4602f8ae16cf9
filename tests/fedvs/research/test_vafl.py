"""VAFL in the numpy simulation: who takes turns, and with which embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from vertical_simulation import NO_TIME, Arrays, Perceptron, curve, setting, small

from flwr_privacy.simulations.research.fedvs.parties import Clients
from flwr_privacy.simulations.research.fedvs.synthetic_data import FedVSSyntheticData
from flwr_privacy.simulations.research.fedvs.vafl import Queue


@dataclass(frozen=True)
class Steady:
    """Clients that always take the same time, by number."""

    times: tuple[float, ...]

    @property
    def fast(self) -> Sequence[str]:
        return [str(n) for n in range(len(self.times))]

    def finish_time(self, *, client_id: str, **_: Any) -> float:
        return self.times[int(client_id)]


def queue(data: FedVSSyntheticData, times: tuple[float, ...], **values: Any) -> Queue:
    own = setting(method="vafl", **values)
    return Queue(data, own, Perceptron((5, 8, 2)), lambda n, cycle: times[n], 0.0, seed=1)


def test_F26_clients_with_equal_delays_take_turns() -> None:
    own = queue(small(4), (1.0,) * 4)
    for event in range(20):
        assert own.end() == 1 + event // 4
        own.step()
    assert own.arrivals == [0, 1, 2, 3] * 5


def test_F26_a_client_that_is_100_times_slower_stops_nobody() -> None:
    data = small(3)
    found = curve(
        data, setting(method="vafl", **NO_TIME), rounds=10_000, by="seconds", watch=[100.5],
        delays=Steady((100.0, 1.0, 1.0)),
    )  # fmt: skip
    assert found.updates.tolist() == [1, 100, 100]
    assert found.rounds[-1] == 201
    assert found.seconds[-1] == pytest.approx(100)


def test_vafl_uses_the_last_embeddings_of_all_others() -> None:
    data = small(3, rows=8)
    own, server_model = setting(method="vafl", batch_size=8), Perceptron((5, 8, 2))
    curve(data, own, rounds=7, server_model=server_model, delays=Steady((1.0, 1.6, 10.0)))
    # The same by hand; a batch is all rows, in any order: sort the mean's rows to compare.
    expanded = [np.concatenate([b, b**2], axis=1) for b in data.blocks]
    weights = Clients(data, own, seed=1).weights
    kept = [x @ w for x, w in zip(expanded, weights, strict=True)]
    arrays: Arrays = Perceptron((5, 8, 2)).initial()
    for n, given in zip((0, 1, 0, 0, 1, 0, 1), server_model.embeddings, strict=True):
        kept[n] = expanded[n] @ weights[n]
        mean = np.mean(kept, axis=0)
        np.testing.assert_allclose(np.sort(given, axis=0), np.sort(mean, axis=0), atol=1e-5)
        arrays, gradient, _ = Perceptron((5, 8, 2)).step(
            arrays, mean.astype(np.float32), data.labels, 0.5
        )
        weights[n] = weights[n] - 0.5 * expanded[n].T @ gradient / 3
