"""VAFL in the numpy simulation: who takes turns, and with which embeddings."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from vertical_simulation import NO_TIME, Arrays, Perceptron, curve, setting, small

from flwr_privacy.stragglers import Stragglers


@dataclass(frozen=True)
class Steady(Stragglers):
    """Clients that always take the same time, by number."""

    times: tuple[float, ...]

    def finish_time(self, *, client_id: str, **_: Any) -> float:
        return self.times[int(client_id)]


def test_F26_clients_with_equal_delays_take_turns() -> None:
    found = curve(
        small(4), setting(method="vafl"), rounds=20, watch=range(1, 21), delays=Steady((1.0,) * 4)
    )
    assert found.seconds.tolist() == [1 + event // 4 for event in range(20)]
    assert [line["clients"] for line in found.history] == [["0"], ["1"], ["2"], ["3"]] * 5


def test_F26_a_client_that_is_100_times_slower_stops_nobody() -> None:
    data = small(3)
    found = curve(
        data, setting(method="vafl", **NO_TIME), rounds=10_000, by="seconds", watch=[100.5],
        delays=Steady((100.0, 1.0, 1.0)),
    )  # fmt: skip
    arrivals = Counter(line["clients"][0] for line in found.history)
    assert arrivals == {"0": 1, "1": 100, "2": 100}
    assert found.rounds[-1] == 201
    assert found.seconds[-1] == pytest.approx(100)


def test_vafl_uses_the_last_embeddings_of_all_others() -> None:
    data = small(3, rows=8)
    own, server_model = setting(method="vafl", batch_size=8), Perceptron((5, 8, 2))
    curve(data, own, rounds=7, server_model=server_model, delays=Steady((1.0, 1.6, 10.0)))
    # The same by hand; a batch is all rows, in any order: sort the mean's rows to compare.
    expanded = [np.concatenate([b, b**2], axis=1) for b in data.blocks]
    weights = [np.array(w) for w in curve(data, own, rounds=1, watch=[0]).weights]
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
