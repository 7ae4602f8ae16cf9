"""M2FDP's two halves together where the server plays the aggregators: averages, noise, privacy."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from apps import make, model_of, record, run_strategy, same
from conformance import Killed
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_privacy.accounting import Charge, fitting, spent
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.clients.node.context_store import ContextStore
from flwr_privacy.clients.torch import get_arrays, set_arrays, train_poisson
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.m2fdp import (
    EventSchedule,
    TierTree,
    any_batch,
    sigma,
    true_epsilon,
    variance_by_tier,
)
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import M2FDP, AdaptiveControl
from flwr_privacy.strategies.m2fdp.simulated_aggregators import SimulatedAggregators
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import RECORD

Array = NDArray[np.float64]
Model = dict[str, Any]
Train = Callable[[str, Model, dict[str, Any]], Model]

MIXED = TierTree.of_edges(
    [("cloud", "A"), ("cloud", "B"), ("A", "1"), ("A", "3"), ("B", "5"), ("B", "7")], trusted={"A"}
)
HALF = TierTree.of_fanouts((2, 2), p=0.5)
DEEP = TierTree.of_fanouts((2, 2, 2), p=(0.5, 0.5))
DEEP_EVENTS = {"steps": 7, "events": {1: [5], 2: [2]}}


@pytest.fixture(autouse=True)
def _no_pause_before_nodes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_privacy.strategies.requests.federation._SETTLE", 0.0)


@pytest.fixture(autouse=True)
def _one_accountant_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last card of a run states epsilon by every accountant, which takes seconds."""
    card = M2FDP.card
    monkeypatch.setattr(M2FDP, "card", lambda self, *, final=False: card(self))


# -- A training whose every step is known ---------------------------------------------------------


def app_of(train: Train) -> ClientApp:
    """Return an app that trains by a function of the device's name, model and configuration."""
    app = ClientApp(mods=[as_mod(M2FDPClient)])

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        name = client_id_from(context.node_config)
        config = dict(message.content["config"])
        trained = train(name, model_of(message.content["arrays"]), config)
        content = {"arrays": record(trained), "metrics": MetricRecord({"num-examples": 7})}
        return Message(RecordDict(content), reply_to=message)

    return app


def nodes_of(tree: TierTree) -> list[dict[str, Any]]:
    """Return nodes that are simulated, one for each device."""
    count = len(tree.devices)
    return [
        {"client-id": name, "partition-id": i, "num-partitions": count, "privacy-simulated": True}
        for i, name in enumerate(tree.devices)
    ]


def run(
    tree: TierTree | None,
    train: Train,
    *,
    size: int = 3,
    start: Model | None = None,
    num_rounds: int = 1,
    engine: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, M2FDP]:
    """Train a model "w" of zeros; return the result and the strategy."""
    if tree is not None:
        options["tree"] = tree
    nodes = nodes_of(tree) if tree is not None else 4
    strategy = make(M2FDP, **{"experiment_id": "e", "seed": 1, **options})
    result = run_strategy(
        strategy,
        app_of(train),
        arrays=record({"w": np.zeros(size)} if start is None else start),
        num_rounds=num_rounds,
        **{"nodes": nodes, **(engine or {})},
    )
    return result, strategy


def w_of(result: Any) -> Array:
    return np.asarray(result.arrays["w"].numpy())


def stay(name: str, model: Model, config: dict[str, Any]) -> Model:
    return model


def push(name: str, model: Model, config: dict[str, Any]) -> Model:
    """Go further than any clipping allows, each device in a direction of its own."""
    direction = np.random.default_rng(int(name)).normal(size=model["w"].shape)
    return {"w": model["w"] + 1e3 * direction}


def to(targets: Mapping[str, float]) -> Train:
    return lambda name, model, config: {"w": np.full_like(model["w"], targets[name])}


def affine(name: str, w: Array) -> Array:
    """One local step: every device has a fixed point of its own."""
    place = int(name) + 1
    return (1 - 0.1 / place) * w + 0.05 * place * np.arange(1, w.size + 1)


def descend(name: str, model: Model, config: dict[str, Any]) -> Model:
    w = model["w"]
    for _ in range(config["local-steps"]):
        w = affine(name, w)
    return {"w": w}


def mean_of(tree: TierTree, node: str, models: Mapping[str, Array]) -> Array:
    """Return the mean of the means below a node."""
    if node in models:
        return models[node]
    below = [mean_of(tree, child, models) for child in tree.children(node)]
    return np.asarray(np.mean(below, axis=0))


def nested(tree: TierTree, schedule: EventSchedule, rounds: int, size: int = 3) -> Array:
    """Return the global model of the same steps as nested loops."""
    models = dict.fromkeys(tree.devices, np.zeros(size))
    for _ in range(rounds):
        for k in range(1, schedule.steps + 1):
            models = {name: affine(name, w) for name, w in models.items()}
            for tier in range(tree.depth):
                if k not in ((schedule.steps,) if tier == 0 else schedule.at(tier)):
                    continue
                for node in tree.tiers[tier]:
                    leaves = tree.leaves(node)
                    models |= dict.fromkeys(leaves, mean_of(tree, node, models))
    return models[tree.devices[0]]


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rounds", [1, 2])
def test_A1_without_noise_and_events_it_is_the_mean(p: float, rounds: int) -> None:
    tree = TierTree.of_fanouts((2, 2), p=p)
    result, _ = run(tree, descend, unit="none", clipping_norm=None, steps=3, num_rounds=rounds)
    np.testing.assert_allclose(
        w_of(result), nested(tree, EventSchedule(steps=3), rounds), atol=1e-6
    )


@pytest.mark.parametrize("p", [0.0, (0.5, 0.5), 1.0])
@pytest.mark.parametrize("clipping_norm", [None, 50.0])  # far above what the updates have
@pytest.mark.parametrize("rounds", [1, 2])
def test_A1_with_events_it_is_the_same_steps_as_nested_loops(
    p: Any, clipping_norm: float | None, rounds: int
) -> None:
    tree = TierTree.of_fanouts((2, 2, 2), p=p)
    result, _ = run(
        tree,
        descend,
        unit="none",
        clipping_norm=clipping_norm,
        clean_events=True,
        num_rounds=rounds,
        **DEEP_EVENTS,
    )
    expected = nested(tree, EventSchedule(**DEEP_EVENTS), rounds)
    np.testing.assert_allclose(w_of(result), expected, atol=1e-6)


def test_without_clean_events_a_trusted_subtree_has_no_events_inside() -> None:
    tree = TierTree.of_fanouts((1, 2), p=1.0)
    options = {"unit": "none", "clipping_norm": None, "steps": 4, "events": 2}
    without, with_events = (
        w_of(run(tree, descend, clean_events=clean, **options)[0]) for clean in (False, True)
    )
    np.testing.assert_allclose(without, nested(tree, EventSchedule(steps=4), 1), atol=1e-6)
    assert np.abs(without - with_events).max() > 1e-3


class Noise:
    """Given noise in place of the drawn one, by who adds it; `drawn` has who did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, values: Mapping[str, float]) -> None:
        self.values, self.drawn = values, list[str]()
        monkeypatch.setattr(ContextStore, "random", lambda own, question, purpose: own.client_id)
        monkeypatch.setattr(
            SimulatedAggregators, "_random", lambda own, purpose, node, *where: node
        )
        for module in ("m2fdp.release", "strategies.m2fdp.simulated_aggregators"):
            monkeypatch.setattr(f"flwr_privacy.{module}.noised", self.noised)

    def noised(self, codes: Any, *, sigma: float, grid: CodeGrid, random: Any) -> Any:
        self.drawn.append(random)
        return (codes + round(self.values[random] / grid.step)).astype(np.int32)


def test_A2_the_tiny_mixed_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A: (1 + 3) / 2 + 0.1 = 2.1; B: (5 + 0.2 + 7 + 0.4) / 2 = 6.3; the cloud: 4.2."""
    noise = Noise(monkeypatch, {"A": 0.1, "5": 0.2, "7": 0.4})
    train = to({"1": 1.0, "3": 3.0, "5": 5.0, "7": 7.0})
    result, _ = run(MIXED, train, size=1, clipping_norm=10.0, epsilon=100.0)
    assert w_of(result) == pytest.approx(4.2, abs=1e-6)
    assert sorted(noise.drawn) == ["5", "7", "A"]


def test_A2_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Noise(monkeypatch, {})
    train = to({"1": 1.0, "3": 3.0, "5": 5.0, "7": 7.0})
    result, _ = run(MIXED, train, size=1, unit="none", clipping_norm=None)
    assert w_of(result) == pytest.approx(4.0, abs=1e-6)
    assert noise.drawn == []


def test_A2_noise_of_a_local_event_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """B is noised after each of two segments, A once; nobody trains."""
    noise = Noise(monkeypatch, {"A": 0.1, "5": 0.2, "7": 0.4})
    result, _ = run(MIXED, stay, size=1, steps=4, events=2, epsilon=100.0)
    assert w_of(result) == pytest.approx((0.1 + 2 * 0.3) / 2, abs=1e-6)
    assert sorted(noise.drawn) == ["5", "5", "7", "7", "A"]


@pytest.mark.parametrize("trusted", [(), ("a", "b")])
def test_A3_it_is_a_mean_of_means(trusted: tuple[str, ...]) -> None:
    edges = [("cloud", "a"), ("cloud", "b"), ("a", "0"), ("b", "1"), ("b", "2"), ("b", "3")]
    tree = TierTree.of_edges(edges, trusted=trusted)
    train = to({"0": 0.0, "1": 4.0, "2": 4.0, "3": 4.0})
    options = {"unit": "none", "clipping_norm": None, "min_children": 1}
    assert w_of(run(tree, train, size=1, **options)[0]) == pytest.approx(2.0, abs=1e-6)


# -- Who is asked, and what it is told ------------------------------------------------------------


def charges_of(strategy: M2FDP) -> dict[str, list[Charge]]:
    return strategy.card().charges()


def entries_of(folder: Path, name: str) -> list[Any]:
    return list(Ledger(folder / f"{name}.ledger", data_set=name).entries())


@pytest.mark.parametrize("clean", [False, True])
def test_A5_exchanges_and_noised_releases_of_the_default_schedule(
    clean: bool, tmp_path: Path
) -> None:
    asked: dict[str, list[tuple[int, int]]] = {}

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        asked.setdefault(name, []).append((config["segment"], config["local-steps"]))
        return model

    result, strategy = run(
        MIXED,
        train,
        steps=20,
        events=5,
        clean_events="worst" if clean else None,
        num_rounds=2,
        engine={"state": tmp_path},
    )
    assert [line["exchanges"] for line in result.history] == [1, 4, 4]  # hello, and 8 questions
    segments = [(0, 5), (1, 5), (2, 5), (3, 5)]
    assert asked["5"] == asked["7"] == segments * 2
    assert asked["1"] == asked["3"] == (segments if clean else [(3, 20)]) * 2
    for name, releases in (("1", 1), ("3", 1), ("5", 4), ("7", 4)):
        assert len(charges_of(strategy)[name]) == 2 * releases
        questions = [entry.question for entry in entries_of(tmp_path, name)]
        assert [q.server_round for q in questions] == [1] * releases + [2] * releases
        assert len(set(questions)) == 2 * releases


def test_the_training_is_told_what_it_is_to_do() -> None:
    told: dict[str, list[dict[str, Any]]] = {}

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        told.setdefault(name, []).append(config)
        return model

    run(MIXED, train, steps=4, events={1: [1]}, step_rule="inv_sqrt", num_rounds=3)
    assert [c["server-round"] for c in told["1"]] == [1, 2, 3]
    assert [c["local-steps"] for c in told["5"]] == [1, 3] * 3
    assert [c["local-steps"] for c in told["1"]] == [4] * 3
    scales = [c["learning-rate-scale"] for c in told["1"]]
    assert scales == pytest.approx([1 / math.sqrt(t + 1) for t in (1, 2, 3)])
    assert "classifier-noise" not in told["1"][0]


@pytest.mark.parametrize("tree", [HALF, DEEP])
def test_devices_start_each_segment_from_what_the_last_event_left_them(tree: TierTree) -> None:
    """Device by device; without noise, so that each start is the mean below the event's node."""
    starts: dict[str, list[float]] = {}

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        starts.setdefault(name, []).append(float(model["w"][0]))
        return {"w": model["w"] + 2.0 ** int(name) / 4}

    events = {"steps": 4, "events": 2} if tree is HALF else {"steps": 6, "events": {1: [4], 2: [2]}}
    run(
        tree,
        train,
        size=1,
        unit="none",
        clipping_norm=None,
        clean_events=True,
        **events,
    )
    schedule = EventSchedule(**(events if tree is DEEP else {"steps": 4, "events": {1: 2}}))
    models = dict.fromkeys(tree.devices, np.zeros(1))
    for number, segment in enumerate(schedule.segments()):
        for name in tree.devices:
            assert starts[name][number] == pytest.approx(models[name][0], abs=1e-5)
        models = {name: w + 2.0 ** int(name) / 4 for name, w in models.items()}
        for node in tree.tiers[segment.tier]:
            models |= dict.fromkeys(tree.leaves(node), mean_of(tree, node, models))


def test_perturb_reg_tells_the_noise_that_all_devices_leave_in_the_model() -> None:
    told: list[float] = []

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        told.append(config["classifier-noise"])
        return model

    result, _ = run(TierTree.of_fanouts((4,)), train, perturb_reg=True)
    assert told == [pytest.approx(math.sqrt(result.history[1]["scheme"]["noise_var"]))] * 4


# -- A13: what it comes to in special cases -------------------------------------------------------

SEEDED = {"insecure_seed": 5, "engine": {"insecure_seed": 5, "nodes": 4}}


def test_A13_with_p_0_it_is_the_tree_in_which_nobody_is_trusted_bit_for_bit() -> None:
    """A trusted node above one that is not is none: the closure takes its label away."""
    options: Any = {"steps": 4, "events": 2, "num_rounds": 2, **SEEDED}
    results = [
        run(None, descend, fanouts=(2, 2), p=0.0, **options)[0],
        run(None, descend, fanouts="2,2", **options)[0],
        run(TierTree.of_fanouts((2, 2), p=0.0), descend, **options)[0],
    ]
    for other in results[1:]:
        assert same(results[0].arrays, other.arrays)
    trusted = run(None, descend, fanouts=(2, 2), p=0.5, **options)[0]
    assert np.abs(w_of(trusted) - w_of(results[0])).max() > 1e-3


class Spy:
    """Keeps the noise that was drawn, in the units of the weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noise: list[Array] = []
        self.sigmas: list[float] = []
        self.steps: list[float] = []
        from flwr_privacy.m2fdp import zone

        own = zone.noised

        def noised(codes: Any, *, sigma: float, grid: CodeGrid, random: Any) -> Any:
            before = codes.copy()
            out = own(codes, sigma=sigma, grid=grid, random=random)
            self.noise.append(grid.step * (out - before))
            self.sigmas.append(sigma)
            self.steps.append(grid.step)
            return out

        for module in ("m2fdp.release", "strategies.m2fdp.simulated_aggregators"):
            monkeypatch.setattr(f"flwr_privacy.{module}.noised", noised)


def clipped(vector: Array, norm: float) -> Array:
    return vector * min(1.0, norm / float(np.linalg.norm(vector)))


def test_A13_a_star_is_ldp_with_the_lemmas_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device: its update clipped to K times the norm, and noise z 2 C K; then the mean."""
    spy = Spy(monkeypatch)
    tree = TierTree.of_fanouts((4,))
    result, _ = run(tree, descend, steps=3, clipping_norm=0.1, epsilon=2.0)
    z = math.sqrt(1) / mu_of(2.0, 1e-5)
    assert spy.sigmas == pytest.approx([z * 2 * 0.1 * 3] * 4, rel=1e-6)
    updates = [
        clipped(descend(n, {"w": np.zeros(3)}, {"local-steps": 3})["w"], 0.3) for n in "0123"
    ]
    expected = np.mean(updates, axis=0) + np.mean(spy.noise, axis=0)
    np.testing.assert_allclose(w_of(result), expected, atol=4 * spy.steps[0])
    scheme = result.history[1]["scheme"]
    assert scheme["noise_var"] == pytest.approx(spy.sigmas[0] ** 2 / 4)
    assert scheme["noise_sigma_t1"] == pytest.approx(spy.sigmas[0])


@pytest.mark.parametrize("fanouts", [(1, 4), (2, 2)])
def test_A13_where_all_edges_are_trusted_it_is_central_dp_at_each(
    fanouts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One noise per edge, of a share of the sensitivity: the central one for (1, N)."""
    spy = Spy(monkeypatch)
    edges, children = fanouts
    tree = TierTree.of_fanouts(fanouts, p=1.0)
    result, _ = run(tree, descend, steps=3, clipping_norm=0.1, epsilon=2.0)
    z = 1 / mu_of(2.0, 1e-5)
    assert spy.sigmas == pytest.approx([z * 2 * 0.1 * 3 / children] * edges, rel=1e-6)
    updates = [
        clipped(descend(n, {"w": np.zeros(3)}, {"local-steps": 3})["w"], 0.3) for n in "0123"
    ]
    expected = np.mean(updates, axis=0) + np.mean(spy.noise, axis=0)
    np.testing.assert_allclose(w_of(result), expected, atol=4 * spy.steps[0])
    variance = result.history[1]["scheme"]["noise_var"]
    assert variance == pytest.approx((z * 2 * 0.3 / children) ** 2 / edges, rel=1e-6)


# -- A20: what is clipped -------------------------------------------------------------------------


class Tap:
    """Keeps the messages that cross a grid."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.said: list[Message] = []

    def __call__(self, grid: Any) -> None:
        push_, pull = grid.push_messages, grid.pull_messages

        def push_messages(messages: Iterable[Message]) -> Any:
            messages = list(messages)
            self.asked.extend(messages)
            return push_(messages)

        def pull_messages(ids: Iterable[str]) -> Any:
            replies = list(pull(ids))
            self.said.extend(replies)
            return replies

        grid.push_messages, grid.pull_messages = push_messages, pull_messages

    def answers(self) -> list[tuple[str, Model]]:
        """Return who answered, and the update that the codes stand for."""
        questions = [m for m in self.asked if m.content[RECORD]["phase"] == "train"]
        grids = {(m.metadata.dst_node_id, *_asked(m)): m.content[RECORD]["grid"] for m in questions}
        found = []
        for reply in self.said:
            if reply.has_content() and reply.content[RECORD]["phase"] == "train":
                grid = CodeGrid(grids[reply.metadata.src_node_id, *_asked(reply)])
                codes = model_of(reply.content["arrays"])
                assert {array.dtype for array in codes.values()} == {np.dtype(np.int32)}
                update = {name: grid.step * array for name, array in codes.items()}
                found.append((reply.content[RECORD]["client-id"], update))
        return found


def _asked(message: Message) -> tuple[Any, Any]:
    return message.content[RECORD]["round"], message.content[RECORD]["request"]


def test_A20_a_device_moves_by_at_most_the_clipping_norm_times_its_steps() -> None:
    tap = Tap()
    options = {"unit": "none", "steps": 6, "events": 2, "clipping_norm": 0.5}
    run(MIXED, push, engine={"before": tap}, **options)
    lengths: dict[str, list[float]] = {}
    for name, update in tap.answers():
        lengths.setdefault(name, []).append(float(np.linalg.norm(update["w"])))
    for name, steps in (("1", [6]), ("3", [6]), ("5", [2] * 3), ("7", [2] * 3)):
        assert lengths[name] == pytest.approx([0.5 * k for k in steps], rel=1e-6)
        assert all(length <= 0.5 * k for length, k in zip(lengths[name], steps, strict=True))


def test_A20_a_short_update_is_left_as_it_is() -> None:
    targets = {"1": 0.125, "3": -0.25, "5": 0.5, "7": 0.0625}
    tap = Tap()
    options = {"unit": "none", "clipping_norm": 1.0, "size": 1}
    run(MIXED, to(targets), engine={"before": tap}, **options)
    assert {name: float(update["w"][0]) for name, update in tap.answers()} == targets


def test_a_step_that_falls_has_a_clipping_that_falls() -> None:
    tap = Tap()
    options = {"unit": "none", "steps": 2, "clipping_norm": 0.5, "step_rule": "inv_sqrt"}
    run(MIXED, push, num_rounds=2, engine={"before": tap}, **options)
    lengths = [np.linalg.norm(update["w"]) for _, update in tap.answers()]
    assert lengths[:4] == pytest.approx([1 / math.sqrt(2)] * 4, rel=1e-6)
    assert lengths[4:] == pytest.approx([1 / math.sqrt(3)] * 4, rel=1e-6)


# -- Noise: how much of it ------------------------------------------------------------------------

SIZE = 20_000  # coordinates; a variance has a relative standard error of sqrt(2 / SIZE) = 1 %
BOUND = 5 * math.sqrt(2 / SIZE)  # five of them: fails by chance once in two million
EXACT = {
    "unit": "paper",
    "alpha": 1.0,
    "sampling_rate": 0.05,
    "clipping_norm": 0.01,
    "clean_events": False,
}
A8_TREE, A10_TREE = (10, 5), (4, 2, 3)


@pytest.mark.parametrize(
    ("fanouts", "p", "events", "expected"),
    [
        (A8_TREE, 0.0, {}, 0.02),
        (A8_TREE, 0.5, {}, 0.012),
        (A8_TREE, 1.0, {}, 0.004),
        (A8_TREE, 0.5, {1: 5}, 0.042),
        (A8_TREE, 1.0, {1: 5}, 0.004),
        (A10_TREE, (0.5, 0.5), {}, 0.0173611),
        (A10_TREE, (0.5, 0.5), {1: 5}, 0.0590278),
        (A10_TREE, (0.5, 0.5), {1: [5, 10], 2: [15]}, 0.0555556),
    ],
    ids=["A8 0", "A8 half", "A8 1", "A8 half 3", "A8 1 3", "A10", "A10 3", "A10 2 1"],
)
def test_A8_A10_the_variance_of_the_model_is_that_of_the_history(
    fanouts: tuple[int, ...], p: Any, events: Any, expected: float
) -> None:
    """With the paper's rule and one alpha; nobody trains, so that the model is the noise."""
    tree = TierTree.of_fanouts(fanouts, p=p)
    result, _ = run(tree, stay, size=SIZE, steps=20, events=events, **EXACT)
    device = sigma(2 * 0.01 * 20, q=0.05, n_comp=20, eps=8.0, delta=1e-5, alpha=1.0)
    scheme = result.history[1]["scheme"]
    assert scheme["noise_var"] / device**2 == pytest.approx(expected, rel=1e-3)
    assert w_of(result).var() == pytest.approx(scheme["noise_var"], rel=BOUND)
    assert abs(w_of(result).mean()) < 5 * math.sqrt(scheme["noise_var"] / SIZE)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("tree", [HALF, DEEP], ids=["half", "deep"])
def test_at_equal_privacy_it_is_that_of_every_tier(tree: TierTree, clean: bool) -> None:
    events = {"steps": 8, "events": 2} if tree is HALF else {"steps": 8, "events": {1: [6], 2: [2]}}
    options = {"clipping_norm": 0.25, "clean_events": "worst" if clean else None, **events}
    result, strategy = run(tree, stay, size=SIZE, **options)
    plan, sigmas = strategy.plan, {}
    for tier in plan.boundaries:
        releases = [plan.release(tier, p[-1].index) for p in plan.schedule.periods(tier)]
        sigmas[tier] = [release.multiplier * release.sensitivity for release in releases]
    variances = variance_by_tier(tree, sigmas, plan.schedule)
    scheme = result.history[1]["scheme"]
    assert scheme["noise_var"] == pytest.approx(sum(variances.values()), rel=1e-3)
    assert w_of(result).var() == pytest.approx(scheme["noise_var"], rel=BOUND)


def test_rounds_add_their_noise_up() -> None:
    result, _ = run(HALF, stay, size=SIZE, num_rounds=3)
    variances = [line["scheme"]["noise_var"] for line in result.history[1:]]
    assert w_of(result).var() == pytest.approx(sum(variances), rel=BOUND)


def test_insecure_edges_may_add_noise_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """HFL-DP as in its own paper: once at each edge, at global events only."""
    spy = Spy(monkeypatch)
    tree = TierTree.of_fanouts((2, 3))
    options = {"steps": 4, "events": 2, "clipping_norm": 0.5, "edge_noise": True}
    result, strategy = run(tree, stay, **options)
    device = math.sqrt(4 / 2) / mu_of(8.0, 1e-5) * 2 * 0.5 * 2
    edges = [sigma for sigma in spy.sigmas if sigma != pytest.approx(device, rel=1e-6)]
    assert (len(spy.sigmas), len(edges)) == (14, 2)
    assert edges[0] == edges[1] > 0
    variance = 2 * device**2 / 6 + edges[0] ** 2 / 2
    assert result.history[1]["scheme"]["noise_var"] == pytest.approx(variance, rel=1e-6)
    # The noise of an edge is none that a device's own cost is counted from.
    multipliers = [charge.noise_multiplier for charge in charges_of(strategy)["0"]]
    assert multipliers == pytest.approx([device / (2 * 0.5 * 2)] * 2, rel=1e-6)


def test_edges_of_the_paper_add_noise_too_where_there_are_local_events() -> None:
    options = {**EXACT, "steps": 4, "events": 2, "edge_noise": True}
    result, _ = run(TierTree.of_fanouts((2, 3)), stay, **options)
    rule = {"q": 0.05, "n_comp": 4, "eps": 8.0, "delta": 1e-5, "alpha": 1.0}
    device, edge = sigma(2 * 0.01 * 4, **rule), sigma(2 * 0.01 * 4 / 3, **rule)
    variance = 2 * device**2 / 6 + edge**2 / 2
    assert result.history[1]["scheme"]["noise_var"] == pytest.approx(variance, rel=1e-3)


def test_the_papers_noise_is_the_same_for_periods_with_and_without_clean_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy = Spy(monkeypatch)
    tree = TierTree.of_fanouts((1, 1, 3), p=(0.0, 1.0))
    options = {**EXACT, "steps": 8, "events": {1: [4], 2: [2]}}
    run(tree, stay, **{**options, "clean_events": True})
    printed = sigma(2 * 0.01 * 8 / 3, q=0.05, n_comp=8, eps=8.0, delta=1e-5, alpha=1.0)
    assert spy.sigmas == pytest.approx([printed] * 2, rel=1e-3)


def test_the_noise_of_a_few_devices_of_a_large_zone_is_all_there() -> None:
    """2 of 40 take part: twenty times the noise of all, for which the codes must have room."""
    tree = TierTree.of_fanouts((1, 40), p=1.0)
    options = {"fraction_train": 0.05, "min_train_nodes": 0, "size": SIZE, "epsilon": 0.5}
    result, _ = run(tree, stay, **options)
    assert result.history[1]["asked"] == 2
    variance = result.history[1]["scheme"]["noise_var"]
    assert variance == pytest.approx((2 / 2 / mu_of(0.5, 1e-5)) ** 2, rel=1e-4)
    assert w_of(result).var() == pytest.approx(variance, rel=BOUND)


# -- Equal privacy --------------------------------------------------------------------------------


def spent_of(strategy: M2FDP) -> dict[str, float]:
    """Return what each device spent, by the card."""
    return {
        name: spent(charges, delta=1e-5, accountant=fitting(charges))
        for name, charges in charges_of(strategy).items()
    }


def check_ledgers(strategy: M2FDP, folder: Path) -> None:
    """Check that every node's ledger has what the card has."""
    for name, charges in charges_of(strategy).items():
        kept = [entry.charge for entry in entries_of(folder, name)]
        assert sorted(kept, key=repr) == sorted(charges, key=repr)


EQUAL: dict[str, dict[str, Any]] = {
    "one release": {"steps": 3},
    "four and one": {"steps": 4, "events": 1},
    "unequal segments": {"steps": 7, "events": {1: [1, 3]}},
    "clean events": {"steps": 7, "events": {1: [1, 3]}, "clean_events": "worst"},
    "steps that fall": {"steps": 4, "events": 2, "step_rule": "inv_sqrt"},
    "star": {"tree": TierTree.of_fanouts((3,)), "steps": 2},
    "three tiers": {"tree": DEEP, **DEEP_EVENTS},
    "three tiers, clean": {"tree": DEEP, "clean_events": "worst", **DEEP_EVENTS},
    "much": {"steps": 4, "events": 2, "epsilon": 300.0},
    "little": {"steps": 4, "events": 2, "epsilon": 0.05},
    "smooth": {
        "steps": 4,
        "events": 2,
        "clean_events": "smooth",
        "smoothness": 0.1,
    },
    "control": {
        "steps": 6,
        "events": 1,
        "num_rounds": 8,
        "control": "adaptive",
        "total_steps": 11,
        "max_steps": 6,
        "initial_steps": 6,
    },
}


@pytest.mark.parametrize("case", EQUAL)
def test_every_device_spends_the_budget_wherever_its_noise_enters(
    case: str, tmp_path: Path
) -> None:
    options = {"tree": HALF, "num_rounds": 3, "epsilon": 2.0, **EQUAL[case]}
    tree = options.pop("tree")
    result, strategy = run(tree, stay, engine={"state": tmp_path}, **options)
    totals = spent_of(strategy)
    assert set(totals) == set(tree.devices)
    for total in totals.values():
        assert total == pytest.approx(options["epsilon"], rel=1e-6)
        assert total <= options["epsilon"] * (1 + 1e-9)
    check_ledgers(strategy, tmp_path)
    strategy.card().verify()
    for line in result.history[1:]:
        assert (line["accumulated"], line["refused"]) == (line["asked"], {})
    assert result.guarantee.epsilon == options["epsilon"]


def test_devices_decline_a_round_too_many() -> None:
    """A training that goes on beyond what it was planned for gets nothing more of anybody."""
    asked: list[int] = []

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        asked.append(config["server-round"])
        return model

    class Greedy(M2FDP):
        def setup(self, grid: Any) -> None:
            super().setup(grid)
            self._tier_schedule.total_steps = 4

    strategy = make(Greedy, tree=HALF, steps=2, experiment_id="e")
    result = run_strategy(
        strategy, app_of(train), nodes=nodes_of(HALF), arrays=record({"w": np.zeros(2)})
    )
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4, 0]
    assert result.history[3]["refused"] == {"declined": 4}
    assert result.history[3]["skipped"]
    assert sorted(set(asked)) == [1, 2]
    assert set(map(len, charges_of(strategy).values())) == {2}


def test_who_does_not_take_part_pays_nothing(tmp_path: Path) -> None:
    tree = TierTree.of_fanouts((2, 4), p=0.5)
    options = {"fraction_train": 0.5, "min_train_nodes": 0, "steps": 4, "events": 2}
    result, strategy = run(tree, stay, num_rounds=3, engine={"state": tmp_path}, **options)
    for line in result.history[1:]:
        assert line["scheme"]["participation_secure"] == 0.5
        assert line["scheme"]["participation_insecure"] == 0.5
    check_ledgers(strategy, tmp_path)
    rounds = {name: len(entries_of(tmp_path, name)) for name in tree.devices}
    assert sum(rounds[name] for name in "0123") == 2 * 3
    assert sum(rounds[name] for name in "4567") == 2 * 3 * 2
    whole = math.sqrt(3) / mu_of(8.0, 1e-5)
    for name in "0123":  # a share of the budget for each round, whoever takes part
        for entry in entries_of(tmp_path, name):
            assert entry.charge.noise_multiplier == pytest.approx(whole, rel=1e-6)
    assert max(spent_of(strategy).values()) <= 8.0


class Late(StragglerModel):
    """Who is late in a round, whatever is asked."""

    def race(self, clients: Any, *, server_round: int, phase: str, **_: Any) -> Any:
        late = {1: {"0"}, 2: {"2"}}.get(server_round, set()) if phase == "train" else set()
        return late.intersection(clients), 1.0


def test_late_devices_pay(tmp_path: Path) -> None:
    options = {"steps": 2, "stragglers": Late(), "min_children": 1}
    result, strategy = run(HALF, stay, num_rounds=2, engine={"state": tmp_path}, **options)
    assert [line["late"] for line in result.history[1:]] == [1, 1]
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3]
    assert set(map(len, charges_of(strategy).values())) == {2}
    check_ledgers(strategy, tmp_path)
    assert list(spent_of(strategy).values()) == pytest.approx([8.0] * 4, rel=1e-6)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_device_that_drops_out_between_clean_events_pays_once(
    failing: int, tmp_path: Path
) -> None:
    """Device 0 fails in one of three segments: what it gave before is in the zone's release."""

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name == "0" and config["segment"] == failing:
            raise RuntimeError("no more")
        return model

    tree = TierTree.of_fanouts((2, 3), p=0.5)
    options = {"steps": 6, "events": 2, "clean_events": "worst"}
    result, strategy = run(tree, train, engine={"state": tmp_path}, **options)
    assert not result.history[1]["skipped"]
    counts = {name: len(charges) for name, charges in charges_of(strategy).items()}
    assert counts == {"0": 1, "1": 1, "2": 1, "3": 3, "4": 3, "5": 3}
    check_ledgers(strategy, tmp_path)


def test_a_device_whose_training_fails_pays_on_both_sides(tmp_path: Path) -> None:
    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name == "0":
            raise RuntimeError("no more")
        return model

    tree = TierTree.of_fanouts((2, 3), p=0.5)
    options = {"steps": 6, "events": 2, "clean_events": "worst"}
    _, strategy = run(tree, train, engine={"state": tmp_path}, **options)
    assert charges_of(strategy)["0"] == [e.charge for e in entries_of(tmp_path, "0")] != []
    check_ledgers(strategy, tmp_path)


@pytest.mark.parametrize("phase", ["first", "later"])
def test_a_reply_that_is_lost_is_paid_for_on_both_sides(phase: str, tmp_path: Path) -> None:
    seen: list[str] = []

    def lose(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(ids: Any) -> Any:
            for reply in pull(ids):
                name = reply.content[RECORD]["client-id"] if reply.has_content() else ""
                mine = name == "0" and reply.content[RECORD]["phase"] == "train"
                if mine:
                    seen.append(name)
                if not (mine and len(seen) == (1 if phase == "first" else 2)):
                    yield reply

        grid.pull_messages = pull_messages

    tree = TierTree.of_fanouts((2, 3), p=0.5)
    options = {"steps": 6, "events": 2, "clean_events": "worst", "deadline": 1.0}
    _, strategy = run(tree, stay, engine={"state": tmp_path, "before": lose}, **options)
    assert len(charges_of(strategy)["0"]) == 1
    check_ledgers(strategy, tmp_path)


# -- Drop-outs ------------------------------------------------------------------------------------

TRIPLES = TierTree.of_edges(
    [
        *[("cloud", name) for name in ("A", "B", "C")],
        *[("A", name) for name in "012"],
        *[("B", name) for name in "345"],
        *[("C", name) for name in "67"],
    ],
    trusted={"A", "B"},
)


def gone(*names: str, then: Train = stay) -> Train:
    """Return a training in which some devices always fail."""

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name in names:
            raise RuntimeError("no data today")
        return then(name, model, config)

    return train


def push_by_name(name: str, model: Model, config: dict[str, Any]) -> Model:
    return {"w": np.full_like(model["w"], float(name))}


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("", (1 + 4 + 6.5) / 3),
        ("2", (0.5 + 4 + 6.5) / 3),
        ("12", (4 + 6.5) / 2),  # one answer is too few for a trusted node
        ("012", (4 + 6.5) / 2),
        ("6", (1 + 4 + 7) / 3),  # an insecure one hands on what it has
        ("67", (1 + 4) / 2),
        ("124567", None),
        ("0123467", None),
        ("01234567", None),
    ],
)
def test_weights_are_shared_by_those_who_answer(missing: str, expected: float | None) -> None:
    options = {"unit": "none", "clipping_norm": None, "size": 1}
    result, _ = run(TRIPLES, gone(*missing, then=push_by_name), **options)
    assert result.history[1]["skipped"] == (expected is None)
    assert w_of(result) == pytest.approx(expected or 0.0, abs=1e-6)


def test_min_children_is_the_fewest_that_a_trusted_node_averages() -> None:
    options = {"unit": "none", "clipping_norm": None, "size": 1}
    for least, expected in ((1, (0 + 4 + 6.5) / 3), (2, (4 + 6.5) / 2), (3, (4 + 6.5) / 2)):
        result, _ = run(TRIPLES, gone("1", "2", then=push_by_name), min_children=least, **options)
        assert w_of(result) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("missing", ["", "2", "12"])
def test_the_noise_of_a_trusted_node_grows_as_its_children_drop_out(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sensitivity is that of the devices that answered: 2 C K over their number."""
    spy = Spy(monkeypatch)
    run_options: dict[str, Any] = {"steps": 2, "clipping_norm": 0.5, "min_children": 1}
    result, strategy = run(TRIPLES, gone(*missing), **run_options)
    z = 1 / mu_of(8.0, 1e-5)
    trusted = [z * 2 / (3 - len(missing)), z * 2 / 3]
    assert sorted(spy.sigmas) == pytest.approx(sorted([*trusted, z * 2, z * 2]), rel=1e-6)
    scheme = result.history[1]["scheme"]
    assert scheme["noise_sigma_t1"] == pytest.approx(np.mean(trusted), rel=1e-6)
    assert scheme["noise_sigma_t2"] == pytest.approx(z * 2, rel=1e-6)
    for charges in charges_of(strategy).values():  # what it costs is as before
        assert [charge.noise_multiplier for charge in charges] == pytest.approx([z], rel=1e-6)


def test_the_noise_follows_the_share_of_the_answers_through_all_tiers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A zone of two tiers, 2 x 3 devices: of one edge a single device answers."""
    spy = Spy(monkeypatch)
    tree = TierTree.of_fanouts((1, 2, 3), p=1.0)
    run(tree, gone("0", "1"), clipping_norm=0.5, min_children=1)
    z = 1 / mu_of(8.0, 1e-5)
    assert spy.sigmas == pytest.approx([z * 1.0 / 2], rel=1e-6)  # its weight is 1/2


def test_the_variance_of_the_history_is_that_of_those_who_answered() -> None:
    options = {"min_children": 2, "size": SIZE, "steps": 4, "events": 2}
    result, _ = run(TRIPLES, gone("0", "1", "6"), **options)
    variance = result.history[1]["scheme"]["noise_var"]
    assert w_of(result).var() == pytest.approx(variance, rel=BOUND)


def test_a_round_without_answers_leaves_the_model_and_costs_what_was_asked(tmp_path: Path) -> None:
    everybody = gone(*"0123")
    result, strategy = run(HALF, everybody, num_rounds=2, engine={"state": tmp_path})
    assert [line["skipped"] for line in result.history[1:]] == [True, True]
    assert not w_of(result).any()
    assert sorted(charges_of(strategy)) == list("0123")
    check_ledgers(strategy, tmp_path)


def test_a_zone_whose_first_event_failed_goes_on_from_where_it_was() -> None:
    """Nobody of A answers in the first segment; its devices start from the public model again."""
    starts: dict[str, list[float]] = {}

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name in "01" and config["segment"] == 0:
            raise RuntimeError("not yet")
        starts.setdefault(name, []).append(float(model["w"][0]))
        return {"w": model["w"] + 1.0}

    options = {"unit": "none", "clipping_norm": None, "clean_events": True}
    result, _ = run(HALF, train, size=1, steps=4, events=2, **options)
    assert starts == {"0": [0.0], "1": [0.0], "2": [0.0, 1.0], "3": [0.0, 1.0]}
    assert w_of(result) == pytest.approx((1 + 2) / 2, abs=1e-6)


# -- What is sent of a model ----------------------------------------------------------------------

NORMALISED = {
    "conv.weight": np.linspace(-1, 1, 4).reshape(2, 2),
    "bn.weight": np.ones(2),
    "bn.running_mean": np.array([0.5, -0.5]),
    "bn.running_var": np.array([2.0, 3.0]),
    "bn.num_batches_tracked": np.array(11),
    "head": np.zeros(3),
}


def change_all(name: str, model: Model, config: dict[str, Any]) -> Model:
    return {key: (array + 1).astype(array.dtype) for key, array in model.items()}


def test_the_statistics_of_batch_normalisation_stay_on_the_devices() -> None:
    tap = Tap()
    options = {"keep_back": ["head"], "clipping_norm": 1.0}
    result, _ = run(MIXED, change_all, start=NORMALISED, engine={"before": tap}, **options)
    for _, codes in tap.answers():
        assert sorted(codes) == ["bn.weight", "conv.weight"]
    after = model_of(result.arrays)
    assert list(after) == list(NORMALISED)
    for name in ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "head"):
        np.testing.assert_array_equal(after[name], NORMALISED[name])
    for name in ("bn.weight", "conv.weight"):
        assert (after[name] != NORMALISED[name]).any()
    kept = "(not sent at all: bn.num_batches_tracked, bn.running_mean, bn.running_var, head)"
    assert kept in result.guarantee.not_protected


def test_a_kept_back_array_that_is_not_in_the_model_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"^keep_back = \['tail'\]: expected names of"):
        run(MIXED, stay, keep_back=["tail"])


def test_without_clipping_an_update_beyond_the_codes_is_not_sent() -> None:
    options = {"unit": "none", "clipping_norm": None, "size": 1}
    result, _ = run(MIXED, to({"1": 65.0, "3": 3.0, "5": 5.0, "7": 64.0}), **options)
    assert result.history[1]["refused"] == {"error": 1}
    assert w_of(result) == pytest.approx((5.0 + 64.0) / 2, abs=1e-5)  # A has too few


# -- Calibrations ---------------------------------------------------------------------------------


def linear(name: str, model: Model, config: dict[str, Any]) -> Model:
    """Train a linear model on Poisson batches, as many steps as the scheme asks."""
    net = torch.nn.Linear(2, 2)
    set_arrays(net, model)
    draws = np.random.default_rng(int(name))
    features = draws.normal(size=(40, 2)).astype(np.float32)
    train_poisson(net, features, draws.integers(0, 2, 40), learning_rate=0.1)
    return dict(get_arrays(net))


LINEAR = dict(get_arrays(torch.nn.Linear(2, 2)))
RECORD_OPTIONS: dict[str, Any] = {
    "unit": "record",
    "sampling_rate": 0.1,
    "steps": 4,
    "events": 2,
    "epsilon": 8.0,
    "delta": 1e-3,
    "num_rounds": 2,
}


def test_records_are_protected_by_poisson_batches(tmp_path: Path) -> None:
    result, strategy = run(
        MIXED, linear, start=LINEAR, engine={"state": tmp_path}, **RECORD_OPTIONS
    )
    assert [line["refused"] for line in result.history[1:]] == [{}, {}]
    for name, steps, releases in (("1", 4, 1), ("5", 2, 2)):
        entries = entries_of(tmp_path, name)
        assert len(entries) == 2 * releases
        assert {entry.unit for entry in entries} == {"record"}
        assert {entry.charge.sampling for entry in entries} == {any_batch(0.1, steps)}
        charges = [entry.charge for entry in entries]
        total = spent(charges, delta=1e-3, accountant="rdp")
        assert 8.0 * (1 - 1e-3) < total <= 8.0
    check_ledgers(strategy, tmp_path)
    assert result.guarantee.protects == "one record of a device"
    assert result.guarantee.accountant == "rdp"
    assert (w_of_linear := model_of(result.arrays)["weight"]).shape == (2, 2)
    assert (w_of_linear != LINEAR["weight"]).all()


@pytest.mark.parametrize(
    ("train", "text"),
    [
        (stay, "the training did no steps on Poisson batches"),
        (lambda n, m, c: change_all(n, linear(n, m, c), c), "the training returned other arrays"),
        (lambda n, m, c: linear(n, linear(n, m, c), c), "called a trainer for Poisson batches 2"),
    ],
    ids=["none", "changed", "twice"],
)
def test_a_training_without_poisson_batches_is_not_released(
    train: Train, text: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    options = {**RECORD_OPTIONS, "num_rounds": 1, "events": None}
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result, strategy = run(MIXED, train, start=LINEAR, engine={"state": tmp_path}, **options)
    assert result.history[1]["skipped"]
    assert text in caplog.text
    check_ledgers(strategy, tmp_path)  # it was charged before anybody could see that


def test_the_paper_promises_what_its_noise_costs(caplog: pytest.LogCaptureFixture) -> None:
    """alpha 0.01, as the accuracies of the paper need it: nowhere near the epsilon it says."""
    options = {"unit": "paper", "alpha": 0.01, "sampling_rate": 0.05, "epsilon": 1.0}
    with caplog.at_level(logging.INFO, "flwr.privacy"):
        result, strategy = run(HALF, stay, steps=4, events=2, num_rounds=2, **options)
    promise = result.guarantee
    schedule = EventSchedule(steps=4, events={1: 2})
    z = sigma(1.0, q=0.05, n_comp=8, eps=1.0, delta=1e-5, alpha=0.01)
    true = {
        tier: true_epsilon(HALF, schedule, tier, multiplier=z, rounds=2, delta=1e-5)
        for tier in (1, 2)
    }
    assert promise.epsilon == pytest.approx(max(true.values()), rel=1e-4)
    assert promise.epsilon > 1e3
    text = "the (epsilon = 1) that the paper's noise is named after: what it costs, all data of a "
    assert text + f"device replaced, is epsilon {promise.epsilon:.4g}" in promise.text()
    assert f"is epsilon {promise.epsilon:.4g}" in caplog.text
    totals = spent_of(strategy)
    for name, tier in (("0", 1), ("2", 2)):
        assert totals[name] == pytest.approx(true[tier], rel=1e-4)
    strategy.card().verify()
    assert promise.delta == 1e-5


def test_without_noise_nothing_is_promised(tmp_path: Path) -> None:
    options = {"unit": "none", "clipping_norm": None}
    result, strategy = run(HALF, stay, engine={"state": tmp_path}, **options)
    assert (result.guarantee.protects, result.guarantee.epsilon) == ("nothing", None)
    assert charges_of(strategy) == {}
    assert not list(tmp_path.glob("*.ledger"))
    assert result.history[1]["scheme"]["noise_var"] == 0.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"clean_events": "smooth", "smoothness": 0.1},
            "losses are as smooth as declared",
        ),
        ({"clean_events": "lemma"}, "losses are convex and smooth, and stay so under"),
    ],
)
def test_a_declared_drift_is_an_assumption_and_its_charges_are_not_proven(
    options: Any, text: str, tmp_path: Path
) -> None:
    events = {"steps": 4, "events": 2}
    result, _ = run(MIXED, stay, engine={"state": tmp_path}, **options, **events)
    assert any(text in assumption for assumption in result.guarantee.assumptions)
    assert {entry.scheme for entry in entries_of(tmp_path, "1")} == {"m2fdp-unproven"}
    assert {entry.scheme for entry in entries_of(tmp_path, "5")} == {"m2fdp"}


def test_smooth_losses_need_less_noise_than_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    """(5 + 5) steps of growth 1.1, one clean event, 2 children: the reach by hand."""
    found = {}
    tree = TierTree.of_fanouts((1, 2), p=1.0)
    for drift, options in (
        ("worst", {}),
        ("smooth", {"smoothness": 0.1}),
        ("lemma", {}),
    ):
        spy = Spy(monkeypatch)
        run(tree, stay, steps=10, events=5, clean_events=drift, **options)
        (found[drift],) = spy.sigmas
        monkeypatch.undo()
        monkeypatch.setattr("flwr_privacy.strategies.requests.federation._SETTLE", 0.0)
    z = 1 / mu_of(8.0, 1e-5)
    assert found["worst"] == pytest.approx(z * (2 * 5 / 2 + 2 * 5), rel=1e-6)
    assert found["lemma"] == pytest.approx(z * (2 * 5 / 2 + 2 * 5 / 2), rel=1e-6)
    assert found["lemma"] < found["smooth"] < found["worst"]


# -- Control --------------------------------------------------------------------------------------


def test_control_uses_all_steps_and_then_ends(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name == "0":
            told.append(config["local-steps"])
        return model

    control = AdaptiveControl(total_steps=11, max_steps=4, initial_steps=4)
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result, strategy = run(HALF, train, num_rounds=20, steps=4, control=control)
    steps = [int(line["scheme"]["steps"]) for line in result.history[1:]]
    assert sum(steps) == sum(told) == 11
    assert steps == told
    assert max(steps) <= 4
    assert "the 11 local steps are used up" in caplog.text
    assert list(spent_of(strategy).values()) == pytest.approx([8.0] * 4, rel=1e-6)


def test_control_may_ask_fewer_devices() -> None:
    tree = TierTree.of_fanouts((2, 4), p=0.5)
    control = AdaptiveControl(total_steps=6, max_steps=3, weights=(1e6, 0.0, 1e-6))
    result, _ = run(tree, stay, num_rounds=6, control=control)
    schemes = [line["scheme"] for line in result.history[1:]]
    assert {line["participation_secure"] for line in schemes} == {0.5}  # min_children is 2
    assert min(line["participation_insecure"] for line in schemes) < 1
    for line in result.history[1:]:
        shares = line["scheme"]["participation_secure"], line["scheme"]["participation_insecure"]
        assert line["asked"] == 4 * sum(shares)


def test_a_controlled_run_resumes_with_the_steps_that_are_left(tmp_path: Path) -> None:
    def kill(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise Killed

    control = AdaptiveControl(total_steps=9, max_steps=4, initial_steps=3)
    folders = [tmp_path / name for name in ("run", "nodes", "other")]
    for folder in folders:
        folder.mkdir()
    options: Any = {"num_rounds": 9, "control": control, "insecure_seed": 5}
    engine = {"insecure_seed": 5, "state": folders[2]}
    unbroken, _ = run(HALF, descend, engine=engine, **options)
    options |= {"engine": {"insecure_seed": 5, "state": folders[1]}, "run_dir": folders[0]}
    with pytest.raises(Killed):
        run(HALF, descend, on_round=kill, **options)
    resumed, strategy = run(HALF, descend, resume=True, **options)
    assert same(unbroken.arrays, resumed.arrays)
    steps = [[line["scheme"]["steps"] for line in r.history[1:]] for r in (unbroken, resumed)]
    assert steps[0] == steps[1]
    assert sum(steps[0]) == 9
    check_ledgers(strategy, folders[1])


# -- The run's history and files ------------------------------------------------------------------


def test_A18_energy_and_delay_of_the_default_tree() -> None:
    tree = TierTree.of_fanouts((10, 5), p=0.5)
    options = {"unit": "none", "clipping_norm": None, "size": 7840}
    result, _ = run(tree, stay, steps=20, events=5, **options)
    scheme = result.history[1]["scheme"]
    assert (scheme["energy_j"], scheme["delay_s"]) == pytest.approx((1.5183986, 5.458688))
    assert (scheme["steps"], scheme["participation_secure"]) == (20, 1.0)
    assert scheme["participation_insecure"] == 1.0


def test_the_tree_is_a_file_of_the_run(tmp_path: Path) -> None:
    result, _ = run(TRIPLES, gone("2"), run_dir=tmp_path, steps=4, events=2)
    nodes = {
        node["name"]: node for node in json.loads((tmp_path / "tree.json").read_text())["nodes"]
    }
    assert list(nodes) == ["cloud", "A", "B", "C", *"01234567"]
    assert nodes["cloud"] == {
        "name": "cloud",
        "parent": None,
        "tier": 0,
        "secure": False,
        "noise": False,
        "sigma": None,
        "epsilon": None,
        "devices": 8,
    }
    z = 1 / mu_of(8.0, 1e-5)
    for name, children in (("A", 2), ("B", 3)):
        assert (nodes[name]["secure"], nodes[name]["noise"], nodes[name]["epsilon"]) == (1, 1, 8.0)
        assert nodes[name]["sigma"] == pytest.approx(z * 2 * 4 / children, rel=1e-6)
    assert (nodes["C"]["secure"], nodes["C"]["noise"], nodes["C"]["sigma"]) == (False, False, None)
    for name in "67":
        assert (nodes[name]["parent"], nodes[name]["tier"], nodes[name]["noise"]) == ("C", 2, True)
        assert nodes[name]["sigma"] == pytest.approx(math.sqrt(2) * z * 2 * 2, rel=1e-6)
        assert nodes[name]["epsilon"] == 8.0
    for name in "012345":
        assert (nodes[name]["secure"], nodes[name]["noise"]) == (True, False)
        assert (nodes[name]["sigma"], nodes[name]["epsilon"]) == (None, None)
    assert {type(value) for node in nodes.values() for value in node.values()} <= {
        str,
        int,
        bool,
        float,
        type(None),
    }
    assert result.history[1]["scheme"]["noise_sigma_t1"] > 0


def test_labels_that_the_closure_takes_away_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """A trusted node above one that is not trusted: closed, and in the log."""
    edges = [
        *[("cloud", "top"), ("top", "ward"), ("top", "room"), ("ward", "0"), ("ward", "1")],
        *[("room", "2"), ("room", "3")],
    ]
    tree = TierTree.of_edges(edges, trusted={"top", "ward"})
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        _, strategy = run(tree, stay)
    assert "not trusted, because a child of theirs is not: top" in caplog.text
    assert not strategy.tree.secure("top")
    assert strategy.tree.secure("ward")


# -- What is refused ------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tree": ({"fanouts": None}, "^fanouts = None: expected the tree .* `fanouts` or `tree`"),
    "two trees": ({"tree": HALF}, r"^fanouts = \(2, 2\): expected the tree of aggregators"),
    "p of a tree": ({"fanouts": None, "tree": HALF, "p": 0.5}, "^p = 0.5: expected nothing beside"),
    "p above 1": ({"p": 1.5}, "^p = 1.5"),
    "p below 0": ({"p": -0.1}, "^p = -0.1"),
    "p of too many tiers": ({"p": (0.5, 0.5)}, "^p = "),
    "epsilon 0": ({"epsilon": 0.0}, "^epsilon = 0.0: expected a number above 0"),
    "epsilon below 0": ({"epsilon": -3.0}, "^epsilon = -3.0: expected a number above 0"),
    "delta": ({"delta": 1.0}, "^delta = 1.0"),
    "no alpha": (
        {"unit": "paper", "sampling_rate": 0.1},
        "^PaperNoise needs 'alpha': it is required",
    ),
    "alphas": (
        {"unit": "paper", "sampling_rate": 0.1, "alpha": [1.0, 1.0, 1.0]},
        "^alpha = .*: expected a number, or 2, one per tier",
    ),
    "no rate": ({"unit": "record"}, "^RecordNoise needs 'sampling_rate': it is required"),
    "no steps": ({"steps": 0}, "^steps = 0"),
    "period 0": ({"events": 0}, "^events = 0"),
    "lists that overlap": (
        {"fanouts": (2, 2, 2), "steps": 6, "events": {1: [2, 4], 2: [4]}},
        "^events of tier 2 = 4: expected no event of tier 1 after the same step",
    ),
    "a list with K": (
        {"steps": 4, "events": {1: [2, 4]}},
        "^events of tier 1 = 4: expected steps below 4, after which the global event is",
    ),
    "a tier too far down": (
        {"steps": 4, "events": {2: [2]}},
        "^tier of events = 2: expected a tier of aggregators, from 1 to 1",
    ),
    "no tier": ({"events": {"edge": 2}}, "^events = .*: expected numbers of tiers"),
    "events of a star": ({"fanouts": (4,), "steps": 4, "events": 2}, "^tier of events = 1: .*none"),
    "clipping": ({"clipping_norm": None}, "^clipping_norm = None"),
    "drift smooth": ({"clean_events": "smooth"}, "^SmoothDrift needs 'smoothness': it is required"),
    "a step rule": ({"step_rule": "theorem"}, "^step_rule = 'theorem': expected one of"),
    "control of records": (
        {
            **{"unit": "record", "sampling_rate": 0.5, "control": "adaptive"},
            **{"total_steps": 4, "max_steps": 2},
        },
        "^control = AdaptiveControl.*: expected None with RecordNoise",
    ),
    "no steps of a control": (
        {"control": "adaptive", "total_steps": 0, "max_steps": 2},
        "^total_steps = 0",
    ),
    "an unknown key": ({"tau": 4}, "^M2FDP has no 'tau'"),
    "a key of a control": ({"total_steps": 4}, "has no 'total_steps': only with control=adaptive"),
    "min_children": ({"min_children": 0}, "^min_children = 0"),
    "relay of made up clients": ({"relay": True, "clients": 4}, "^clients = 4: expected None with"),
    "relay without noise": (
        {"relay": True, "unit": "none"},
        "^relay = True: expected false without noise",
    ),
    "a flag": ({"edge_noise": "yes"}, "^edge_noise = 'yes': expected true or false"),
    "seed": ({"insecure_seed": -1}, "^insecure_seed = -1"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_is_refused_before_there_are_clients(what: str) -> None:
    options, message = BAD[what]
    with pytest.raises(InvalidParameterError, match=message):
        make(M2FDP, **{"fanouts": (2, 2), **options})


TREES: dict[str, tuple[str, str]] = {
    "two parents": (
        '[nodes.a]\ndevices = ["0", "1"]\n[nodes.b]\ndevices = ["1", "2"]\n',
        r"tree\.toml.*'?b'?.*'1'",
    ),
    "cycle": (
        '[nodes.a]\nparent = "b"\n[nodes.b]\nparent = "a"\ndevices = ["0"]\n',
        r"tree\.toml.*(cycle|circle|itself)",
    ),
    "a leaf without devices": (
        '[nodes.a]\ndevices = ["0", "1"]\n[nodes.b]\n',
        r"tree\.toml.*'?b'?",
    ),
}


@pytest.mark.parametrize("what", TREES)
def test_a_file_that_is_no_tree_is_refused_by_its_name_and_the_nodes(
    what: str, tmp_path: Path
) -> None:
    text, message = TREES[what]
    (tmp_path / "tree.toml").write_text(text)
    with pytest.raises(InvalidParameterError, match=message):
        make(M2FDP, tree=tmp_path / "tree.toml")


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "tree.toml").write_text(MIXED.to_toml())
    assert make(M2FDP, tree=tmp_path / "tree.toml").tree == MIXED


OTHERS = TierTree.of_edges([("cloud", "a"), ("cloud", "b")])


@pytest.mark.parametrize(
    ("options", "nodes", "message"),
    [
        (
            {"tree": OTHERS},
            4,
            r"^tree = \['a', 'b'\]: expected leaves that are there, such as \['0'",
        ),
    ],
    ids=["none of them"],
)
def test_what_does_not_fit_the_clients_is_refused_at_the_start(
    options: dict[str, Any], nodes: int, message: str
) -> None:
    whole = options if "tree" in options else {"fanouts": (2, 2), **options}
    with pytest.raises(InvalidParameterError, match=message):
        run_strategy(make(M2FDP, **whole), app_of(stay), nodes=nodes)


def test_a_tree_waits_for_as_many_clients_as_it_has_leaves() -> None:
    text = "3 of min_available_nodes = 4 nodes connected within 0.2 s"
    with pytest.raises(ProtocolError, match=text):
        run_strategy(make(M2FDP, fanouts=(2, 2)), app_of(stay), nodes=3, timeout=0.2)


def test_clients_beyond_the_leaves_are_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result = run_strategy(
            make(M2FDP, fanouts=(2, 2)),
            app_of(stay),
            nodes=6,
            arrays=record({"w": np.zeros(1)}),
            num_rounds=1,
        )
    assert result.history[1]["asked"] == 4
    assert "clients that are no leaf of the tree are not asked: ['4', '5']" in caplog.text


def test_a_tree_goes_on_without_the_devices_that_are_not_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = make(M2FDP, tree=MIXED, unit="none", min_children=1, min_available_nodes=3)
    nodes = [node for node in nodes_of(MIXED) if node["client-id"] != "3"]
    nodes.append({**nodes[0], "client-id": "stranger"})
    targets = {"1": 1.0, "5": 5.0, "7": 7.0, "stranger": 50.0}
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result = run_strategy(
            strategy,
            app_of(to(targets)),
            nodes=nodes,
            arrays=record({"w": np.zeros(1)}),
            num_rounds=1,
        )
    assert "devices of the tree that are not there: ['3']" in caplog.text
    assert "clients that are no leaf of the tree are not asked: ['stranger']" in caplog.text
    assert result.history[1]["asked"] == 3
    assert w_of(result) == pytest.approx((1 + 6) / 2, abs=1e-6)


def test_names_with_numbers_are_in_the_order_of_their_numbers() -> None:
    strategy = make(M2FDP, fanouts=(6, 2), unit="none")
    run_strategy(strategy, app_of(stay), nodes=12, arrays=record({"w": np.zeros(1)}), num_rounds=1)
    assert strategy.tree.devices == tuple(map(str, range(12)))
    assert strategy.tree.children("t1-5") == ("10", "11")


def test_a_fault_of_one_device_is_no_fault_of_its_siblings() -> None:
    fault = Fault(kind="crash", client="5", server_round=1)
    options = {"unit": "none", "clipping_norm": None, "size": 1, "deadline": 1.0}
    train = to({"1": 1.0, "3": 3.0, "5": 5.0, "7": 7.0})
    result, _ = run(MIXED, train, engine={"faults": [fault]}, **options)
    assert w_of(result) == pytest.approx((2 + 7) / 2, abs=1e-6)


def test_a_device_that_owes_an_answer_is_not_asked_again_in_the_round() -> None:
    """Two messages to one node at once lose state on Ray: who is late sits the next event out."""
    tree = TierTree.of_fanouts((2, 2))
    late = Fault(kind="delay", client="0", server_round=1, seconds=5.0)
    options = {"steps": 4, "events": 2, "quorum": 3, "deadline": 60.0}
    result, strategy = run(tree, stay, engine={"faults": [late]}, **options)
    assert (result.history[1]["asked"], result.history[1]["accumulated"]) == (3, 3)
    paid = {name: len(charges) for name, charges in charges_of(strategy).items()}
    assert paid == {"0": 1, "1": 2, "2": 2, "3": 2}
