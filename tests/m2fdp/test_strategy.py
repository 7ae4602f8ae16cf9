"""M2FDP's two halves together where the server plays the aggregators: questions and averages."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import model_of
from tier_training import (
    DEEP,
    DEEP_EVENTS,
    HALF,
    MIXED,
    TRIPLES,
    Array,
    Model,
    Tap,
    affine,
    change_all,
    charges_of,
    descend,
    entries_of,
    gone,
    run,
    stay,
    to,
    w_of,
)

from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.clients.node.context_store import ContextStore
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp import EventSchedule, TierTree
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.strategies.m2fdp.simulated_aggregators import SimulatedAggregators

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


# -- A training whose every step is known ---------------------------------------------------------


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
    options: dict[str, Any] = {"unit": "none", "clipping_norm": None}
    options |= {"min_children": 1} if trusted else {}
    assert w_of(run(tree, train, size=1, **options)[0]) == pytest.approx(2.0, abs=1e-6)


# -- Who is asked, and what it is told ------------------------------------------------------------


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


# -- What is sent of a model ----------------------------------------------------------------------


NORMALISED = {
    "conv.weight": np.linspace(-1, 1, 4).reshape(2, 2),
    "bn.weight": np.ones(2),
    "bn.running_mean": np.array([0.5, -0.5]),
    "bn.running_var": np.array([2.0, 3.0]),
    "bn.num_batches_tracked": np.array(11),
    "head": np.zeros(3),
}


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
