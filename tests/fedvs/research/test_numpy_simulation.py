"""The rehearsal of FedVS and its rivals: each is the plain algorithm; and its virtual clock."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from flwr_privacy.coding.lagrange import recovery_threshold
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.fedvs.costs import cost_model
from flwr_privacy.fedvs.delays import HalfSlow, transfer_seconds
from flwr_privacy.simulations.research.fedvs.numpy_simulation import TrainingCurve, simulate
from flwr_privacy.simulations.research.fedvs.parties import Clients, aggregate, gradients
from flwr_privacy.simulations.research.fedvs.synthetic_data import (
    METHODS,
    FedVSSettings,
    SyntheticData,
)
from flwr_privacy.simulations.research.fedvs.vafl import Queue

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]

NO_TIME = {"bandwidth_mbps": 1e15, "speed": 1e18}  # beside the delays


class Perceptron:
    """Layers with ReLU between them and the cross entropy, in NumPy; it keeps what it was given."""

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        self._sizes, self._seed = sizes, seed
        self.embeddings: list[Floats] = []

    def initial(self) -> dict[str, NDArray[Any]]:
        rng = np.random.default_rng(self._seed)
        found: dict[str, NDArray[Any]] = {}
        for i, (inputs, outputs) in enumerate(zip(self._sizes, self._sizes[1:], strict=False)):
            weights = rng.normal(0, math.sqrt(2 / inputs), (inputs, outputs))
            found[f"w{i}"] = weights.astype(np.float32)
            found[f"b{i}"] = np.zeros(outputs, np.float32)
        return found

    def step(
        self, arrays: Arrays, embedding: Floats, labels: NDArray[Any], learning_rate: float
    ) -> tuple[dict[str, NDArray[Any]], Floats, float]:
        self.embeddings.append(embedding)
        layers = self._layers(arrays, embedding)
        chances = np.exp(layers[-1] - layers[-1].max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = float(-np.log(chances[rows, labels]).mean())
        chances[rows, labels] -= 1
        slope = chances / np.float32(len(labels))
        rate = np.float32(learning_rate)
        found: dict[str, NDArray[Any]] = {}
        for i in reversed(range(len(self._sizes) - 1)):
            found[f"w{i}"] = arrays[f"w{i}"] - rate * (layers[i].T @ slope)
            found[f"b{i}"] = arrays[f"b{i}"] - rate * slope.sum(axis=0)
            slope = slope @ arrays[f"w{i}"].T
            if i:
                slope *= layers[i] > 0
        return found, slope, loss

    def scores(self, arrays: Arrays, embedding: Floats) -> Floats:
        return self._layers(arrays, embedding)[-1]

    def metrics(self, arrays: Arrays, embedding: Floats, labels: NDArray[Any]) -> dict[str, float]:
        scores = self.scores(arrays, embedding)
        loss = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels]
        hits = scores.argmax(axis=1) == labels
        return {"loss": float(loss.mean()), "accuracy": float(hits.mean())}

    def _layers(self, arrays: Arrays, embedding: Floats) -> list[Floats]:
        layers = [embedding.astype(np.float32)]
        last = len(self._sizes) - 2
        for i in range(last + 1):
            found = layers[-1] @ arrays[f"w{i}"] + arrays[f"b{i}"]
            layers.append(found if i == last else np.maximum(found, 0))
        return layers


def small(clients: int = 6, rows: int = 41, seed: int = 0) -> SyntheticData:
    """Return a scene whose clients have 1 to 3 columns, and whose rows are no multiple of K."""
    rng = np.random.default_rng(seed)
    columns = [1 + n % 3 for n in range(clients)]
    blocks = [rng.uniform(-1, 1, (rows, d)) for d in columns]
    tests = [rng.uniform(-1, 1, (15, d)) for d in columns]
    return SyntheticData(
        blocks=blocks,
        labels=(sum(block[:, 0] for block in blocks) > 0).astype(np.int64),
        test_blocks=tests,
        test_labels=(sum(test[:, 0] for test in tests) > 0).astype(np.int64),
    )


def setting(**values: Any) -> FedVSSettings:
    return FedVSSettings(
        **{
            "embedding": 5,
            "order": 2,
            "batch_size": 9,
            "learning_rate": 0.5,
            "data_bits": 8,
            "weight_bits": 8,
            **values,
        }
    )


def course(
    scene: SyntheticData, own: FedVSSettings, *, rounds: int = 12, seed: int = 1, **values: Any
) -> TrainingCurve:
    wide = scene.clients if own.aggregation == "concatenate" else 1
    central = values.pop("central", None) or Perceptron((wide * own.embedding, 8, 2))
    watch = values.pop("watch", [rounds])
    return simulate(
        scene, own, central, watch=watch, by=values.pop("by", "rounds"), rounds=rounds, seed=seed,
        **values,
    )  # fmt: skip


def same(one: TrainingCurve, other: TrainingCurve) -> bool:
    """Tell whether two trainings came to the same models, bit for bit."""
    return all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays) and all(
        np.array_equal(*pair) for pair in zip(one.weights, other.weights, strict=True)
    )


# -- FedVS --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "values"),
    [
        (6, {"K": 1, "T": 1}),
        (10, {"K": 2, "T": 1}),
        (9, {"K": 2, "T": 2, "aggregation": "sum"}),
        (10, {"K": 3, "T": 1, "order": 3, "prime": 2**31 - 19, "weight_bits": 12}),
        (7, {"K": 3, "T": 1, "data_bits": 1, "weight_bits": 3, "project": False}),
    ],
)
def test_F17_what_shares_decode_to_is_the_integer_sum_bit_for_bit(
    clients: int, values: dict[str, Any]
) -> None:
    own = setting(**values)
    integers, coded = (
        course(small(clients), replace(own, coded=coded), rounds=10) for coded in (False, True)
    )
    assert same(integers, coded)
    assert integers.loss.tolist() == coded.loss.tolist()


@pytest.mark.parametrize("coded", [False, True])
def test_F17_who_straggles_does_not_change_the_model(coded: bool) -> None:
    own = setting(K=2, coded=coded)
    found = [
        course(small(10), replace(own, slow=slow, delay_scale=scale), rounds=6)
        for slow, scale in (("drawn", 1.0), ("first", 1.0), ("last", 3.0), ("last", 0.0))
    ]
    assert all(same(found[0], other) for other in found[1:])
    assert len({float(one.seconds[-1]) for one in found}) == 4


def test_the_first_sum_is_that_of_the_rounded_values() -> None:
    scene, own = small(6), setting(K=1, data_bits=6, weight_bits=5)
    central = Perceptron((5, 8, 2))
    course(scene, own, rounds=1, central=central)
    start = Clients(scene, replace(own, method="wait"), seed=1).weights
    (given,) = central.embeddings
    exact = given.astype(np.float64) * 6 * 2**11
    np.testing.assert_allclose(exact, np.rint(exact), atol=1e-3)  # float32 of integers / 6
    # Within the rounding of weights (one unit of the grid each) of some rows of the rounded data.
    powers = [np.concatenate([block, block**2], axis=1) for block in scene.blocks]
    rounded = [np.floor(2**6 * power + 0.5) / 2**6 for power in powers]
    plain = sum(x @ w for x, w in zip(rounded, start, strict=True)) / 6
    bound = sum(np.abs(x).sum(axis=1).max() for x in rounded) / 6 * 2.0**-5
    nearest = np.abs(given[:, None, :] - plain[None]).max(axis=2).min(axis=1)
    assert (nearest < bound).all()
    assert nearest.max() > bound / 1e3  # the weights were rounded


def test_weights_are_kept_within_their_bound() -> None:
    own = setting(w_max=0.75)
    assert max(np.abs(w).max() for w in course(small(), own).weights) == 0.75
    free = course(small(), replace(own, project=False))
    assert max(np.abs(w).max() for w in free.weights) > 0.75


def test_FedVS_comes_to_waiting_for_all_as_bits_grow() -> None:
    scene = small()  # over more rounds the kinks of ReLU make differences of their own
    wait = course(scene, setting(method="wait", batch_size=41), rounds=2).weights
    gaps = []
    for bits in (2, 6, 12):
        own = setting(K=1, data_bits=bits, weight_bits=bits, batch_size=41, project=False)
        pairs = zip(course(scene, own, rounds=2).weights, wait, strict=True)
        gaps.append(max(np.abs(one - other).max() for one, other in pairs))
    assert gaps[0] > 8 * gaps[1] > 64 * gaps[2]
    assert gaps[2] < 1e-5


def test_the_most_segments_are_those_that_half_of_the_clients_can_decode() -> None:
    assert [setting().segments(N) for N in (28, 10, 11, 6)] == [6, 2, 2, 1]
    assert setting(method="wait").segments(28) == 1


# -- Its rivals ---------------------------------------------------------------------------------


def plainly(
    scene: SyntheticData, weights: list[Array], batches: Sequence[NDArray[np.int64]]
) -> list[Array]:
    """Train by waiting for all on given batches, by autograd of one matrix of all columns."""
    central = Perceptron((5, 8, 2))
    arrays: Arrays = central.initial()
    data = np.concatenate([np.concatenate([b, b**2], axis=1) for b in scene.blocks], axis=1)
    joint = np.concatenate(weights)
    for rows in batches:
        embedding = (data[rows] @ joint / scene.clients).astype(np.float32)
        arrays, gradient, _ = central.step(arrays, embedding, scene.labels[rows], 0.5)
        joint = joint - 0.5 * data[rows].T @ gradient / scene.clients
    return np.split(joint, np.cumsum([len(w) for w in weights])[:-1])


def test_waiting_for_all_is_gradient_descent_on_the_joint_columns() -> None:
    scene, own = small(), setting(method="wait", batch_size=41)  # a batch is all rows
    start = Clients(scene, own, seed=1).weights
    expected = plainly(scene, start, [np.arange(41)] * 12)
    for one, other in zip(course(scene, own).weights, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_masked_sum_is_that_of_waiting_for_all_up_to_its_grid() -> None:
    scene = small()
    wait, masked = (course(scene, setting(method=name)) for name in ("wait", "masked"))
    assert not same(wait, masked)
    for one, other in zip(wait.weights, masked.weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)
    assert wait.seconds.tolist() == masked.seconds.tolist()


def test_who_is_ignored_never_learns_and_is_not_in_the_mean() -> None:
    scene, own = small(), setting(method="ignore", slow="last")
    central = Perceptron((5, 8, 2))
    found = course(scene, own, rounds=7, central=central)
    assert found.updates.tolist() == [7, 7, 7, 0, 0, 0]
    start = Clients(scene, own, seed=1).weights
    assert all(np.array_equal(found.weights[n], start[n]) for n in (3, 4, 5))
    assert not any(np.array_equal(found.weights[n], start[n]) for n in (0, 1, 2))
    fast = SyntheticData(
        blocks=scene.blocks[:3],
        labels=scene.labels,
        test_blocks=scene.test_blocks[:3],
        test_labels=scene.test_labels,
    )
    alone = course(fast, replace(own, method="wait"), rounds=7)
    assert all(np.array_equal(found.weights[n], alone.weights[n]) for n in (0, 1, 2))
    assert found.accuracy.tolist() == alone.accuracy.tolist()  # they are tested alone
    everybody = course(scene, replace(own, evaluate_all=True), rounds=7)
    assert everybody.loss.tolist() != found.loss.tolist()


def test_wait_dp_has_laplace_noise_of_the_range_over_epsilon() -> None:
    clients = Clients(small(), setting(method="wait-dp", epsilon=4.0), seed=0)
    embedding = np.random.default_rng(0).uniform(-1, 2, (400, 50)).astype(np.float32)
    noise = (clients.noisy(0, embedding, 1) - embedding) / (np.ptp(embedding) / 4)
    n = noise.size
    assert abs(noise.mean()) < 4.5 * math.sqrt(2 / n)
    assert abs(np.abs(noise).mean() - 1) < 4.5 / math.sqrt(n)  # |Laplace| is exponential
    for t in (0.5, 1.0, 3.0):
        p = math.exp(-t)
        assert abs((np.abs(noise) > t).mean() - p) < 4.5 * math.sqrt(p * (1 - p) / n)
    again, later = (clients.noisy(0, embedding, moment) for moment in (1, 2))
    assert np.array_equal(again, clients.noisy(0, embedding, 1))
    assert not np.array_equal(again, later)
    assert not np.array_equal(again, clients.noisy(1, embedding, 1))


def test_a_clip_gives_wait_dp_a_scale_that_does_not_depend_on_the_data() -> None:
    clients = Clients(small(), setting(method="wait-dp", epsilon=2.0, clip=0.5), seed=0)
    wide = np.full((300, 50), 9.0, np.float32)
    noise = clients.noisy(0, wide, 1) - 0.5
    assert abs(np.abs(noise).mean() - 2 * 0.5 / 2.0) < 4.5 * 0.5 / math.sqrt(noise.size)
    np.testing.assert_allclose(clients.noisy(0, 5 * wide, 1), clients.noisy(0, wide, 1))


def test_with_a_large_epsilon_wait_dp_is_waiting_for_all() -> None:
    scene = small()
    wait = course(scene, setting(method="wait"))
    dp = course(scene, setting(method="wait-dp", epsilon=1e9, test_noise=True))
    for one, other in zip(wait.weights, dp.weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    noisy = course(scene, setting(method="wait-dp", epsilon=5.0))
    assert np.abs(noisy.weights[0] - wait.weights[0]).max() > 0.01


@pytest.mark.parametrize("how", ["mean", "sum", "concatenate", "max"])
def test_gradients_of_aggregates_are_their_finite_differences(how: str) -> None:
    rng = np.random.default_rng(0)
    parts = {n: rng.normal(size=(4, 3)) for n in (0, 1, 3)}
    weights = rng.normal(size=aggregate(parts, how, 5).shape)
    found = gradients(parts, weights, how, list(parts))
    for n, part in parts.items():
        for place in np.ndindex(part.shape):
            moved = np.zeros_like(part)
            moved[place] = 1e-5
            ends = [
                np.sum(weights * aggregate({**parts, n: part + sign * moved}, how, 5))
                for sign in (1, -1)
            ]
            assert found[n][place] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-5)


@pytest.mark.parametrize("how", ["mean", "sum", "concatenate", "max"])
@pytest.mark.parametrize("method", ["wait", "ignore", "vafl"])
def test_all_aggregations_train(method: str, how: str) -> None:
    scene = small(rows=80)
    scene = replace(scene, test_blocks=scene.blocks, test_labels=scene.labels)
    own = setting(method=method, aggregation=how, learning_rate=0.1, batch_size=80)
    found = course(scene, own, rounds=200, watch=[1, 200])
    assert found.loss[1] < 0.95 * found.loss[0]


# -- VAFL ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steady:
    """Clients that always take the same time, by number."""

    times: tuple[float, ...]

    @property
    def fast(self) -> Sequence[str]:
        return [str(n) for n in range(len(self.times))]

    def finish_time(self, *, client_id: str, **_: Any) -> float:
        return self.times[int(client_id)]


def queue(scene: SyntheticData, times: tuple[float, ...], **values: Any) -> Queue:
    own = setting(method="vafl", **values)
    return Queue(scene, own, Perceptron((5, 8, 2)), lambda n, cycle: times[n], 0.0, seed=1)


def test_F26_clients_with_equal_delays_take_turns() -> None:
    own = queue(small(4), (1.0,) * 4)
    for event in range(20):
        assert own.end() == 1 + event // 4
        own.step()
    assert own.arrivals == [0, 1, 2, 3] * 5


def test_F26_a_client_that_is_100_times_slower_stops_nobody() -> None:
    scene = small(3)
    found = course(
        scene, setting(method="vafl", **NO_TIME), rounds=10_000, by="seconds", watch=[100.5],
        delays=Steady((100.0, 1.0, 1.0)),
    )  # fmt: skip
    assert found.updates.tolist() == [1, 100, 100]
    assert found.rounds[-1] == 201
    assert found.seconds[-1] == pytest.approx(100)


def test_vafl_uses_the_last_embeddings_of_all_others() -> None:
    scene = small(3, rows=8)
    own, central = setting(method="vafl", batch_size=8), Perceptron((5, 8, 2))
    course(scene, own, rounds=7, central=central, delays=Steady((1.0, 1.6, 10.0)))
    # The same by hand; a batch is all rows, in any order: sort the mean's rows to compare.
    data = [np.concatenate([b, b**2], axis=1) for b in scene.blocks]
    weights = Clients(scene, own, seed=1).weights
    kept = [x @ w for x, w in zip(data, weights, strict=True)]
    arrays: Arrays = Perceptron((5, 8, 2)).initial()
    for n, given in zip((0, 1, 0, 0, 1, 0, 1), central.embeddings, strict=True):
        kept[n] = data[n] @ weights[n]
        mean = np.mean(kept, axis=0)
        np.testing.assert_allclose(np.sort(given, axis=0), np.sort(mean, axis=0), atol=1e-5)
        arrays, gradient, _ = Perceptron((5, 8, 2)).step(
            arrays, mean.astype(np.float32), scene.labels, 0.5
        )
        weights[n] = weights[n] - 0.5 * data[n].T @ gradient / 3


# -- The clock ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "quorum"), [("wait", 10), ("masked", 10), ("wait-dp", 10), ("fedvs", 5)]
)
def test_a_round_takes_what_the_delays_say(method: str, quorum: int) -> None:
    scene, own = small(10), setting(method=method, **NO_TIME)
    found = course(scene, own, rounds=5, watch=[1, 2, 3, 4, 5])
    delays = own.delays(10, seed=1)
    now = shared = 0.0
    for t in range(1, 6):
        if method == "fedvs":
            shared += delays.race(delays.clients, seed=1, server_round=t, phase="weights")[1]
        now += delays.race(delays.clients, seed=1, server_round=t, phase="train", quorum=quorum)[1]
        assert found.share_seconds[t - 1] == pytest.approx(shared)
        assert found.seconds[t - 1] == pytest.approx(now + shared)


def test_ignoring_waits_for_the_fast_clients_alone() -> None:
    own = setting(method="ignore", **NO_TIME)
    found = course(small(10), own, rounds=3)
    delays = own.delays(10, seed=1)
    expected = sum(
        delays.race(delays.fast, seed=1, server_round=t, phase="train")[1] for t in (1, 2, 3)
    )
    assert found.seconds[-1] == pytest.approx(expected)
    assert len(delays.fast) == 5


@pytest.mark.parametrize(("slow", "last"), [("first", {"0", "1"}), ("last", {"3", "4"})])
def test_the_slow_clients_can_be_the_first_or_last_ones(slow: str, last: set[str]) -> None:
    assert set(setting(method="wait", slow=slow).delays(5, seed=0).clients[3:]) == last


def test_who_is_slow_is_drawn_from_the_seed() -> None:
    own = setting(method="wait")
    found = {own.delays(8, seed=seed).fast for seed in range(6)}
    assert len(found) > 1
    assert own.delays(8, seed=3) == own.delays(8, seed=3)


def test_without_delays_a_round_takes_its_messages_and_products() -> None:
    own = setting(delay_scale=0.0, K=2, bandwidth_mbps=1.0, speed=1e6)
    found = course(small(10), own, rounds=2, watch=[1, 2])
    widths = [2 * (1 + n % 3) for n in range(10)]
    # Ten rows in a batch: five coded ones for two segments. Three clients deal zero masks.
    costs = cost_model(N=10, K=2, T=1, rows=41, widths=widths, h=5, b=5)
    shares = [
        transfer_seconds(9 * (size + mask * costs.mask_bytes), 1.0)
        + (macs + mask * costs.mask_macs) / 1e6
        for size, macs, mask in zip(
            costs.weights_bytes, costs.weights_macs, [1] * 3 + [0] * 7, strict=True
        )
    ]
    received = sum(costs.weights_bytes) - (4 * 2 * 5 + 28) + 3 * costs.mask_bytes
    sharing = max(shares) + transfer_seconds(received, 1.0)
    upload = costs.answer_macs / 1e6 + transfer_seconds(costs.answer_bytes, 1.0)
    back = transfer_seconds(4 * 10 * 5, 1.0) + 10 * 6 * 5 / 1e6
    assert found.share_seconds[0] == pytest.approx(sharing)
    assert found.seconds[1] - found.seconds[0] == pytest.approx(sharing + upload + back)


def seconds_of_a_round(**values: Any) -> float:
    found = course(small(28), setting(**values), rounds=25, watch=[1, 25])
    return float(found.seconds[1] - found.seconds[0]) / 24


def test_F20_small_K_is_fast_where_delays_dominate_and_large_K_where_products_do() -> None:
    delayed = [seconds_of_a_round(K=K, batch_size=60) for K in (1, 6, 13)]
    assert delayed == sorted(delayed)
    computed = [
        seconds_of_a_round(K=K, batch_size=60, delay_scale=0.0, speed=1e4) for K in (1, 6, 13)
    ]
    assert computed == sorted(computed, reverse=True)
    assert computed[0] > 2 * computed[2]


def test_F20_larger_T_is_never_faster() -> None:
    found = [seconds_of_a_round(K=1, T=T) for T in (1, 6, 13)]
    assert found == sorted(found)
    assert found[2] > found[0]


def test_F20_a_round_is_shorter_than_waiting_for_all_where_little_time_is_for_sharing() -> None:
    wait = seconds_of_a_round(method="wait", batch_size=60)
    short = seconds_of_a_round(batch_size=60, batch="real")
    long = seconds_of_a_round(batch_size=60, K=13, log_base="2")
    assert short < wait < long


# -- Looking at it ------------------------------------------------------------------------------


def test_moments_in_seconds_show_the_rounds_that_have_ended() -> None:
    scene, own = small(), setting(method="wait")
    by_round = course(scene, own, rounds=6, watch=list(range(7)))
    ends = by_round.seconds
    assert ends[0] == 0
    watch = [float(ends[3]) - 1e-6, float(ends[3]), float(ends[6]) + 1e6]
    by_time = course(scene, own, rounds=6, watch=watch, by="seconds")
    assert by_time.rounds.tolist() == [2, 3, 6]
    assert by_time.loss.tolist() == by_round.loss[[2, 3, 6]].tolist()
    assert by_time.seconds.tolist() == ends[[2, 3, 6]].tolist()


def test_a_training_that_has_made_all_rounds_stands_still() -> None:
    found = course(small(), setting(), rounds=3, watch=[3, 50])
    assert found.rounds.tolist() == [3, 3]
    assert found.loss[0] == found.loss[1]


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_same_training_and_another_seed_another(method: str) -> None:
    scene, own = small(), setting(method=method)
    one, again, other = (course(scene, own, rounds=4, seed=seed) for seed in (1, 1, 2))
    assert same(one, again)
    assert one.seconds.tolist() == again.seconds.tolist()
    assert not same(one, other)


def test_all_methods_start_from_the_same_weights() -> None:
    scene = small()
    starts = [Clients(scene, setting(method=method), seed=4).weights for method in METHODS]
    for weights in starts[1:]:
        assert all(np.array_equal(*pair) for pair in zip(starts[0], weights, strict=True))


# -- Accuracy -----------------------------------------------------------------------------------


@cache
def digits() -> SyntheticData:
    features, labels = load_digits(return_X_y=True)
    places = np.random.default_rng(0).permutation(len(labels))
    train, test = places[360:], places[:360]
    blocks = np.array_split(features / 16, 16, axis=1)
    return SyntheticData(
        blocks=[block[train] for block in blocks],
        labels=labels[train],
        test_blocks=[block[test] for block in blocks],
        test_labels=labels[test],
    )


def accuracy(method: str, **values: Any) -> float:
    own = FedVSSettings(method=method, embedding=32, learning_rate=0.1, slow="last", **values)
    central = Perceptron((32, 64, 32, 10))
    found = simulate(
        digits(), own, central, watch=range(400, 601, 50), by="rounds", rounds=600, seed=0
    )
    return float(found.accuracy.mean())


def test_F18_on_digits_FedVS_is_level_with_waiting_and_others_are_not() -> None:
    wait = accuracy("wait")
    assert wait > 0.9
    assert abs(accuracy("fedvs", weight_bits=12) - wait) < 0.015
    assert accuracy("ignore") < wait - 0.08
    assert accuracy("wait-dp") < wait - 0.08


# -- Refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"method": "secret"}, "method"),
        ({"aggregation": "max"}, "aggregation"),
        ({"method": "wait-dp", "aggregation": "concatenate"}, "aggregation"),
        ({"embedding": 0}, "embedding"),
        ({"K": 0}, "K = 0"),
        ({"T": 0}, "T = 0"),
        ({"prime": 2**31 - 2}, "p"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"clip": -1.0}, "clip"),
        ({"coded": 1}, "coded"),
        ({"slow": "some"}, "slow"),
        ({"log_base": "10"}, "log_base"),
        ({"batch": "half"}, "batch"),
        ({"speed": 0.0}, "speed"),
    ],
)
def test_a_bad_setting_is_refused_by_name(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        setting(**values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"K": 3}, "clients = 6: .* at least 7"),
        ({"w_max": 1e6}, "data_bits"),
        ({"stragglers": 7}, "stragglers"),
        ({"method": "ignore", "stragglers": 6}, "fewer than clients"),
    ],
)
def test_a_setting_that_does_not_fit_the_clients_is_refused(
    values: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        course(small(6), setting(**values))


@pytest.mark.parametrize(
    ("values", "text"),
    [({"watch": []}, "watch"), ({"watch": [2, 1]}, "ascending"), ({"by": "hours"}, "by")],
)
def test_moments_are_ascending(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        course(small(), setting(), **values)


def test_blocks_have_the_same_rows_and_columns() -> None:
    scene = small()
    for name, value in (
        ("blocks", (*scene.blocks[:1], scene.blocks[1][:-1])),
        ("test_blocks", scene.test_blocks[:-1]),
        ("labels", scene.labels[:-1]),
        ("blocks", ()),
    ):
        with pytest.raises(DataError, match="blocks"):
            replace(scene, **{name: value})


def test_delays_and_code_agree_on_the_threshold() -> None:
    own = setting(K=2, T=2)
    assert recovery_threshold(own.segments(10), own.T) == 7
    assert isinstance(own.delays(10, seed=0), HalfSlow)
