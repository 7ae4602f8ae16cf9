"""The numpy simulation of FedVS and its baselines: it is the strategies and their clients."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vertical
from apps import model_of, record, run_strategy
from flwr.app import Context
from numpy.typing import NDArray
from vertical_simulation import Arrays, Perceptron, accuracy, curve, setting, small

from flwr_privacy.clients import VerticalData, fedvs_client_app, split_vfl_client_app
from flwr_privacy.coding.thresholds import recovery_threshold
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.fedvs.delays import HalfSlow
from flwr_privacy.pipeline.node_store import NodeRules
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.in_process import FedVSTrainingCurve
from flwr_privacy.simulations.research.fedvs.numpy_simulation import (
    SimulatedSplitVFL,
    experiment_of,
    training_of,
)
from flwr_privacy.simulations.research.fedvs.synthetic_data import (
    METHODS,
    FedVSSettings,
    FedVSSyntheticData,
)
from flwr_privacy.strategies import FedVS, LoopOptions, SplitVFL
from flwr_privacy.strategies.vertical.columns import Aggregate

Array = NDArray[np.float64]


def same(one: FedVSTrainingCurve, other: FedVSTrainingCurve) -> bool:
    """Tell whether two trainings came to the same models, bit for bit."""
    return all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays) and all(
        np.array_equal(*pair) for pair in zip(one.weights, other.weights, strict=True)
    )


def first_weights(data: FedVSSyntheticData, own: FedVSSettings) -> list[Array]:
    return [np.array(w) for w in curve(data, own, rounds=1, watch=[0]).weights]


# -- It is the strategies and their clients -------------------------------------------------------


@pytest.fixture
def one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nodes draw first weights as the simulation does: the same ones under all methods."""
    drawn = NodeRules.random

    def random(self: NodeRules, question: Question, purpose: str) -> SecureRandom:
        if purpose == "initial weights":
            question = replace(question, phase="train", server_round=1, request=0)
        return drawn(self, question, purpose)

    monkeypatch.setattr(NodeRules, "random", random)


def inline(
    data: FedVSSyntheticData, own: FedVSSettings, folder: Path, *, rounds: int, seed: int
) -> tuple[Any, list[list[str]], dict[str, Array]]:
    """Train a setting on the inline engine; return the result, who counted, and the weights."""
    counted: dict[int, list[str]] = {}
    kind: Any = FedVS if own.method == "fedvs" else SplitVFL

    def data_fn(context: Context) -> VerticalData:
        n = vertical.place(context, None)
        return VerticalData(train=data.blocks[n], test=data.test_blocks[n])

    class Noting(kind):  # type: ignore[misc]
        def aggregated(self, grid: Any, server_round: int, part: str, coded: Any) -> Aggregate:
            found: Aggregate = super().aggregated(grid, server_round, part, coded)
            if part == "train":
                counted[server_round] = found.clients
            return found

    oracle = {"evaluation": "oracle"} if own.method == "fedvs" else {}
    server_model = Perceptron((own.embedding, 8, 2))
    strategy = Noting(
        **own.strategy(data.clients, seed),
        **oracle,
        labels=data.labels,
        test_labels=data.test_labels,
        server_model=server_model,
        loop=LoopOptions(seed=seed, experiment_id=experiment_of(seed)),
    )
    app = fedvs_client_app if own.method == "fedvs" else split_vfl_client_app
    result = run_strategy(
        strategy,
        app(data_fn),
        arrays=record(server_model.initial()),
        nodes=data.clients,
        insecure_seed=seed,
        state=folder,
        num_rounds=rounds,
    )
    states = vertical.states(folder, kind.scheme)
    weights = {client: state["weights"] for client, state in states.items() if "weights" in state}
    return result, list(counted.values()), weights


HELD: dict[str, dict[str, Any]] = {
    "FedVS": {"method": "fedvs", "K": 1},
    "FedVS, K = 2, sum": {"method": "fedvs", "K": 2, "aggregation": "sum", "learning_rate": 0.1},
    "FedVS, T = 2, coarse": {"method": "fedvs", "K": 1, "T": 2, "data_bits": 1, "weight_bits": 3},
    "FedVS, another prime": {"method": "fedvs", "K": 2, "prime": 2**31 - 19, "order": 3},
    "FedVS, cut weights": {"method": "fedvs", "K": 1, "w_max": 0.75},
    "Wait": {"method": "wait"},
    "Wait, sum": {"method": "wait", "aggregation": "sum", "learning_rate": 0.1},
    "Wait, masked": {"method": "masked"},
    "Ignore": {"method": "ignore"},
    "VAFL": {"method": "vafl"},
    "Wait-DP": {"method": "wait-dp", "test_noise": True},
    "Wait-DP, clip": {"method": "wait-dp", "clip": 0.5, "test_noise": True},
}


@pytest.mark.usefixtures("one_start")
@pytest.mark.parametrize("method", HELD)
def test_it_comes_to_the_models_of_the_inline_engine(method: str, tmp_path: Path) -> None:
    """Same seed: arrivals, divisors, weights, models, noise, clock and metrics are the same."""
    data, rounds, seed = small(6), 12 if method == "VAFL" else 4, 1
    own = setting(**HELD[method])
    result, counted, weights = inline(data, own, tmp_path, rounds=rounds, seed=seed)
    found = curve(data, own, rounds=rounds, seed=seed, watch=range(1, rounds + 1))
    for name, array in model_of(result.arrays).items():
        np.testing.assert_allclose(found.arrays[name], array, rtol=0, atol=1e-9)
    assert len(weights) == (3 if own.method == "ignore" else 6)  # who is never asked has none
    for client, theirs in weights.items():
        np.testing.assert_allclose(found.weights[int(client)], theirs, rtol=0, atol=1e-9)
    assert [line["clients"] for line in found.history] == counted
    lines = [line for line in result.history if line["round"] > 0]
    for line, own_line in zip(lines, found.history, strict=True):
        for name in ("asked", "answered", "accumulated", "late"):
            assert line[name] == own_line[name]
        told = {name: line["scheme"][name] for name in own_line["scheme"]}
        assert told == pytest.approx(own_line["scheme"], rel=1e-12)
    ends = [line["virtual_seconds"] for line in lines]
    assert found.seconds.tolist() == pytest.approx(ends, rel=1e-12)
    evaluated = lines[-1]["server"]
    for name in ("loss", "accuracy"):
        assert getattr(found, name)[-1] == pytest.approx(evaluated[name], rel=1e-6)


# -- FedVS --------------------------------------------------------------------------------------


def test_F17_who_straggles_does_not_change_the_model() -> None:
    own = setting(K=2)
    found = [
        curve(small(10), replace(own, slow=slow, delay_scale=scale), rounds=6)
        for slow, scale in (("drawn", 1.0), ("first", 1.0), ("last", 3.0), ("last", 0.0))
    ]
    assert all(same(found[0], other) for other in found[1:])
    assert len({float(one.seconds[-1]) for one in found}) == 4


def test_the_first_sum_is_that_of_the_rounded_values() -> None:
    data, own = small(6), setting(K=1, data_bits=6, weight_bits=5)
    server_model = Perceptron((5, 8, 2))
    curve(data, own, rounds=1, server_model=server_model)
    start = first_weights(data, replace(own, method="wait"))
    (given,) = server_model.embeddings
    exact = given.astype(np.float64) * 6 * 2**11
    np.testing.assert_allclose(exact, np.rint(exact), atol=1e-3)  # float32 of integers / 6
    # Within the rounding of weights (one unit of the grid each) of some rows of the rounded data.
    powers = [np.concatenate([block, block**2], axis=1) for block in data.blocks]
    rounded = [np.floor(2**6 * power + 0.5) / 2**6 for power in powers]
    plain = sum(x @ w for x, w in zip(rounded, start, strict=True)) / 6
    bound = sum(np.abs(x).sum(axis=1).max() for x in rounded) / 6 * 2.0**-5
    nearest = np.abs(given[:, None, :] - plain[None]).max(axis=2).min(axis=1)
    assert (nearest < bound).all()
    assert nearest.max() > bound / 1e3  # the weights were rounded


def test_weights_are_kept_within_their_bound() -> None:
    own = setting(w_max=0.75)
    assert max(np.abs(w).max() for w in curve(small(), own).weights) == 0.75
    wide = curve(small(), replace(own, w_max=4.0))
    assert max(np.abs(w).max() for w in wide.weights) > 0.75


def test_FedVS_comes_to_waiting_for_all_as_bits_grow() -> None:
    data = small()  # over more rounds the kinks of ReLU make differences of their own
    wait = curve(data, setting(method="wait", batch_size=41), rounds=2).weights
    gaps = []
    for bits in (2, 6, 11):
        own = setting(K=1, data_bits=bits, weight_bits=bits, batch_size=41, w_max=4.0)
        pairs = zip(curve(data, own, rounds=2).weights, wait, strict=True)
        gaps.append(max(np.abs(one - other).max() for one, other in pairs))
    assert gaps[0] > 8 * gaps[1] > 64 * gaps[2]
    assert gaps[2] < 2e-5


def test_the_most_segments_are_those_that_half_of_the_clients_can_decode() -> None:
    assert [setting().segments(N) for N in (28, 10, 11, 6)] == [6, 2, 2, 1]
    assert setting(method="wait").segments(28) == 1


# -- Its rivals ---------------------------------------------------------------------------------


def plainly(
    data: FedVSSyntheticData, weights: list[Array], batches: Sequence[NDArray[np.int64]]
) -> list[Array]:
    """Train by waiting for all on given batches, by autograd of one matrix of all columns."""
    server_model = Perceptron((5, 8, 2))
    arrays: Arrays = server_model.initial()
    expanded = np.concatenate([np.concatenate([b, b**2], axis=1) for b in data.blocks], axis=1)
    joint = np.concatenate(weights)
    for rows in batches:
        embedding = (expanded[rows] @ joint / data.clients).astype(np.float32)
        arrays, gradient, _ = server_model.step(arrays, embedding, data.labels[rows], 0.5)
        joint = joint - 0.5 * expanded[rows].T @ gradient / data.clients
    return np.split(joint, np.cumsum([len(w) for w in weights])[:-1])


def test_waiting_for_all_is_gradient_descent_on_the_joint_columns() -> None:
    data, own = small(), setting(method="wait", batch_size=41)  # a batch is all rows
    start = first_weights(data, own)
    expected = plainly(data, start, [np.arange(41)] * 12)
    for one, other in zip(curve(data, own).weights, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_masked_sum_is_that_of_waiting_for_all_up_to_its_grid() -> None:
    data = small()
    wait, masked = (curve(data, setting(method=name)) for name in ("wait", "masked"))
    assert not same(wait, masked)
    for one, other in zip(wait.weights, masked.weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)
    assert wait.seconds.tolist() == masked.seconds.tolist()


def test_who_is_ignored_never_learns_and_is_not_in_the_mean() -> None:
    data, own = small(), setting(method="ignore", slow="last")
    server_model = Perceptron((5, 8, 2))
    found = curve(data, own, rounds=7, server_model=server_model)
    assert [line["clients"] for line in found.history] == [["0", "1", "2"]] * 7
    start = first_weights(data, own)
    assert all(np.array_equal(found.weights[n], start[n]) for n in (3, 4, 5))
    assert not any(np.array_equal(found.weights[n], start[n]) for n in (0, 1, 2))
    fast = FedVSSyntheticData(
        blocks=data.blocks[:3],
        labels=data.labels,
        test_blocks=data.test_blocks[:3],
        test_labels=data.test_labels,
    )
    alone = curve(fast, replace(own, method="wait"), rounds=7)
    assert all(np.array_equal(found.weights[n], alone.weights[n]) for n in (0, 1, 2))
    assert found.accuracy.tolist() == alone.accuracy.tolist()  # they are tested alone


def test_with_a_large_epsilon_wait_dp_is_waiting_for_all() -> None:
    data = small()
    wait = curve(data, setting(method="wait"))
    dp = curve(data, setting(method="wait-dp", epsilon=1e9, test_noise=True))
    for one, other in zip(wait.weights, dp.weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    noisy = curve(data, setting(method="wait-dp", epsilon=5.0))
    assert np.abs(noisy.weights[0] - wait.weights[0]).max() > 0.01


def joining(how: str, clients: int) -> SimulatedSplitVFL:
    own = setting(method="wait", aggregation=how, embedding=3)
    training = training_of(small(clients), own, Perceptron((3, 2)), seed=0)
    assert isinstance(training, SimulatedSplitVFL)
    training.members = [str(n) for n in range(clients)]
    return training


@pytest.mark.parametrize("how", ["concatenate", "max"])
def test_gradients_of_joined_embeddings_are_their_finite_differences(how: str) -> None:
    rng, training = np.random.default_rng(0), joining(how, 5)
    parts = {n: rng.normal(size=(4, 3)) for n in ("0", "1", "3")}
    given = rng.normal(size=training._joined_up(parts).values.shape)
    found = {n: training._part(given, n) for n in parts}
    for n, part in parts.items():
        for place in np.ndindex(part.shape):
            moved = np.zeros_like(part)
            moved[place] = 1e-5
            ends = [
                np.sum(given * training._joined_up({**parts, n: part + sign * moved}).values)
                for sign in (1, -1)
            ]
            assert found[n][place] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-5)


def test_who_is_ignored_is_zero_where_embeddings_are_concatenated() -> None:
    parts = {"0": np.array([[1.0, 5.0, 0.0]]), "2": np.array([[3.0, 1.0, 2.0]])}
    found = {how: joining(how, 3)._joined_up(parts) for how in ("concatenate", "max")}
    assert found["concatenate"].values.tolist() == [[1, 5, 0, 0, 0, 0, 3, 1, 2]]
    assert found["max"].values.tolist() == [[3, 5, 2]]
    assert found["max"].clients == ["0", "2"]


@pytest.mark.parametrize("how", ["mean", "sum", "concatenate", "max"])
@pytest.mark.parametrize("method", ["wait", "ignore", "vafl"])
def test_all_aggregations_train(method: str, how: str) -> None:
    data = small(rows=80)
    data = replace(data, test_blocks=data.blocks, test_labels=data.labels)
    own = setting(method=method, aggregation=how, learning_rate=0.1, batch_size=80)
    found = curve(data, own, rounds=200, watch=[1, 200])
    assert found.loss[1] < 0.95 * found.loss[0]


# -- Looking at it ------------------------------------------------------------------------------


def test_moments_in_seconds_show_the_rounds_that_have_ended() -> None:
    data, own = small(), setting(method="wait")
    by_round = curve(data, own, rounds=6, watch=list(range(7)))
    ends = by_round.seconds
    assert ends[0] == 0
    watch = [float(ends[3]) - 1e-6, float(ends[3]), float(ends[6]) + 1e6]
    by_time = curve(data, own, rounds=6, watch=watch, by="seconds")
    assert by_time.rounds.tolist() == [2, 3, 6]
    assert by_time.loss.tolist() == by_round.loss[[2, 3, 6]].tolist()
    assert by_time.seconds.tolist() == ends[[2, 3, 6]].tolist()


def test_a_training_that_has_made_all_rounds_stands_still() -> None:
    found = curve(small(), setting(), rounds=3, watch=[3, 50])
    assert found.rounds.tolist() == [3, 3]
    assert found.loss[0] == found.loss[1]


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_same_training_and_another_seed_another(method: str) -> None:
    data, own = small(), setting(method=method)
    one, again, other = (curve(data, own, rounds=4, seed=seed) for seed in (1, 1, 2))
    assert same(one, again)
    assert one.seconds.tolist() == again.seconds.tolist()
    assert not same(one, other)


def test_all_methods_start_from_the_same_weights() -> None:
    data = small()
    starts = [first_weights(data, setting(method=method, w_max=4.0)) for method in METHODS]
    for weights in starts[1:]:
        assert all(np.array_equal(*pair) for pair in zip(starts[0], weights, strict=True))


# -- Accuracy -----------------------------------------------------------------------------------


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
        ({"test_noise": 1}, "test_noise"),
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
        curve(small(6), setting(**values))


@pytest.mark.parametrize(
    ("values", "text"),
    [({"watch": []}, "watch"), ({"watch": [2, 1]}, "ascending"), ({"by": "hours"}, "by")],
)
def test_moments_are_ascending(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        curve(small(), setting(), **values)


def test_blocks_have_the_same_rows_and_columns() -> None:
    data = small()
    for name, value in (
        ("blocks", (*data.blocks[:1], data.blocks[1][:-1])),
        ("test_blocks", data.test_blocks[:-1]),
        ("labels", data.labels[:-1]),
        ("blocks", ()),
    ):
        with pytest.raises(DataError, match="blocks"):
            replace(data, **{name: value})


def test_delays_and_code_agree_on_the_threshold() -> None:
    own = setting(K=2, T=2)
    assert recovery_threshold(own.segments(10), own.T) == 7
    assert isinstance(own.delays(10, seed=0), HalfSlow)
