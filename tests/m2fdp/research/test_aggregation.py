"""One aggregation event, against loops over nodes and against the systems it comes down to."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree
from flwr_privacy.simulations.research.m2fdp.aggregation import aggregate_event

Vector = NDArray[np.float64]


def nested(
    tree: TierTree,
    models: Mapping[str, Vector],
    node: str = CLOUD,
    *,
    noise: Callable[[str], Vector] | None = None,
    min_children: int = 1,
) -> Vector | None:
    """Return what a node holds after an event that ends there: section 3.3, node by node."""
    if not tree.children(node):
        return models.get(node)
    received = []
    for child in tree.children(node):
        model = nested(tree, models, child, noise=noise, min_children=min_children)
        if model is None:
            continue
        if noise is not None and not tree.secure(node) and tree.secure(child):
            model = model + noise(child)
        received.append(model)
    if len(received) < (min_children if tree.secure(node) else 1):
        return None
    total = received[0]
    for model in received[1:]:
        total = total + model
    return total / len(received)


def random_tree(rng: np.random.Generator, depth: int) -> TierTree:
    """Return a tree with random numbers of children and random trust."""
    edges, level = [], [CLOUD]
    for tier in range(1, depth + 1):
        below = []
        for parent in level:
            for i in range(int(rng.integers(1, 5))):
                below.append(f"{tier}-{len(below)}-{i}")
                edges.append((parent, below[-1]))
        level = below
    aggregators = sorted({parent for parent, _ in edges} - {CLOUD})
    return TierTree.of_edges(edges, trusted={a for a in aggregators if rng.random() < 0.6})


def noise_of(seed: int, size: int, scale: Callable[[str], float] | None = None) -> Any:
    """Return noise by node that is the same whoever asks, and the list of who asked."""
    asked: list[str] = []

    def noise(node: str) -> Vector:
        asked.append(node)
        rng = np.random.default_rng([seed, *node.encode()])
        return rng.normal(0, 1 if scale is None else scale(node), size)

    return noise, asked


TINY = TierTree(
    parents={"A": CLOUD, "B": CLOUD, "1": "A", "3": "A", "5": "B", "7": "B"},
    devices=("1", "3", "5", "7"),
    trusted=frozenset({"A"}),
)
TINY_MODELS = {"1": [1.0], "3": [3.0], "5": [5.0], "7": [7.0]}
TINY_NOISE = {"A": 0.1, "5": 0.2, "7": 0.4}


def tiny(**arguments: Any) -> dict[str, Vector]:
    models = {device: np.array(model) for device, model in TINY_MODELS.items()}
    return aggregate_event(TINY, arguments.pop("models", models), **arguments)


# --- The specification's facts -------------------------------------------------------------------


@pytest.mark.parametrize("events", [{}, {1: [2, 5], 2: [3]}, {1: 4, 2: 2}], ids=str)
def test_A1_without_noise_the_training_is_nested_loops_of_sgd(events: Any) -> None:
    """Quadratic losses of its own at every device; aggregation as in section 3.2, by hand."""
    tree = TierTree.of_fanouts((2, 3, 2), p=(0.5, 0.5))
    rng = np.random.default_rng(1)
    targets, eta = rng.normal(size=(12, 4)), 0.1
    curvature = rng.uniform(0.2, 3, size=(12, 4))
    schedule = EventSchedule(steps=7, events=events)

    models = np.zeros((12, 4))
    for _ in range(2):
        for segment in schedule.segments():
            for _ in range(segment.steps):
                models = models - eta * curvature * (models - targets)
            tops = aggregate_event(tree, models, event_tier=segment.tier)
            models = np.stack([tops[tree.ancestor(d, segment.tier)] for d in tree.devices])

    # Devices are 0 to 11: two to a node of tier 2, six to one of tier 1.
    loops = [[0.0] * 4 for _ in range(12)]
    for _ in range(2):
        for k in range(1, 8):
            for j in range(12):
                for i in range(4):
                    loops[j][i] -= eta * curvature[j, i] * (loops[j][i] - targets[j, i])
            size = {1: 6, 2: 2}
            for tier in (1, 2):
                if k in schedule.at(tier):
                    for start in range(0, 12, size[tier]):
                        members = range(start, start + size[tier])
                        mean = [sum(loops[j][i] for j in members) / size[tier] for i in range(4)]
                        for j in members:
                            loops[j] = list(mean)
        mean = [sum(loops[j][i] for j in range(12)) / 12 for i in range(4)]
        loops = [list(mean) for _ in range(12)]
    np.testing.assert_allclose(models, loops, rtol=1e-12, atol=1e-14)
    assert np.ptp(models, axis=0).max() == 0
    assert np.abs(models).min() > 1e-3


def test_A1_a_global_event_without_noise_is_the_mean_of_a_balanced_tree() -> None:
    tree = TierTree.of_fanouts((3, 4, 5), p=(1 / 3, 0.5))
    models = np.random.default_rng(2).normal(size=(60, 7))
    (name,), (model,) = zip(*aggregate_event(tree, models, event_tier=0).items(), strict=True)
    assert name == CLOUD
    np.testing.assert_allclose(model, models.mean(axis=0), rtol=1e-12, atol=1e-15)


def test_A2_the_tiny_mixed_tree() -> None:
    asked: list[str] = []

    def stub(node: str) -> Vector:
        asked.append(node)
        return np.array([TINY_NOISE[node]])

    assert tiny(event_tier=0, noise=stub) == {CLOUD: np.array([4.2])}
    assert asked == ["A", "5", "7"]
    # What the edges send up: A its mean and noise, B what its devices noised.
    edges = tiny(event_tier=1, noise=stub)
    assert asked[3:] == ["5", "7"]
    sent = [edges["A"][0] + TINY_NOISE["A"], edges["B"][0]]
    assert sent == pytest.approx([2.1, 6.3], rel=1e-15)
    assert list(edges) == ["A", "B"]
    assert tiny(event_tier=0) == {CLOUD: np.array([4.0])}


def test_A3_a_mean_of_means() -> None:
    edges = [(CLOUD, "a"), (CLOUD, "b"), ("a", "0"), ("b", "1"), ("b", "2"), ("b", "3")]
    models = np.array([[0.0], [4.0], [4.0], [4.0]])
    assert aggregate_event(TierTree.of_edges(edges), models, event_tier=0)[CLOUD] == [2.0]


def test_A10_variance_of_the_noise_of_the_mixed_tree() -> None:
    """Noise over 20,000 coordinates; models stay where an event put them, as without training."""
    tree = TierTree.of_fanouts((4, 2, 3), p=(0.5, 0.5))
    scale = {1: 1 / 6, 2: 1 / 3, 3: 1.0}  # sigma over that of a device: 1 / its leaves
    variances = []
    for number, events in enumerate([{}, {1: 5}, {1: [5, 10], 2: [15]}]):
        models = np.zeros((24, 20_000))
        for segment in EventSchedule(steps=20, events=events).segments():
            seed = 10 * number + segment.index
            noise, asked = noise_of(seed, 20_000, lambda node: scale[tree.tier(node)])
            tops = aggregate_event(tree, models, event_tier=segment.tier, noise=noise)
            assert tuple(asked) == tree.injectors(segment.tier)
            models = np.stack([tops[tree.ancestor(d, segment.tier)] for d in tree.devices])
        variances.append(models[0].var())
    # One standard error is 1 %: sqrt(2 / 20000).
    assert variances == pytest.approx([0.0173611, 0.0590278, 0.0555556], rel=0.03)


def test_A13_a_star_is_ldp_fedavg() -> None:
    tree = TierTree.of_fanouts((50,))
    models = np.random.default_rng(3).normal(size=(50, 20))
    noise, asked = noise_of(0, 20)
    model = aggregate_event(tree, models, event_tier=0, noise=noise)[CLOUD]
    assert asked == list(tree.devices)
    uploads = [models[int(device)] + noise(device) for device in tree.devices]
    np.testing.assert_allclose(model, np.mean(uploads, axis=0), rtol=1e-12, atol=1e-15)
    # Var = sigma_dev^2 / N
    assert sum(tree.weight(node) ** 2 for node in tree.injectors()) == pytest.approx(1 / 50)


@pytest.mark.parametrize("size", [1, 3, 100], ids=["single", "narrow", "wide"])
def test_A13_two_tiers_without_trust_are_hfl_dp_bit_for_bit(size: int) -> None:
    tree = TierTree.of_fanouts((4, 5), p=0.0)
    start = np.random.default_rng(4).normal(size=(20, size))
    models, loops = start.copy(), start.copy()
    for segment in EventSchedule(steps=20, events={1: 5}).segments():
        noise, asked = noise_of(segment.index, size)
        tops = aggregate_event(tree, models, event_tier=segment.tier, noise=noise)
        assert asked == list(tree.devices)
        models = np.stack([tops[tree.ancestor(d, segment.tier)] for d in tree.devices])

        # HFL-DP: every device noises every upload, edges and cloud average what they get.
        edges = np.zeros((4, size))
        for edge in range(4):
            for j in range(5 * edge, 5 * edge + 5):
                edges[edge] += loops[j] + noise(str(j))
            edges[edge] /= 5
        if segment.tier == 0:
            edges[:] = (((edges[0] + edges[1]) + edges[2]) + edges[3]) / 4
        loops = np.repeat(edges, 5, axis=0)
    assert models.tobytes() == loops.tobytes()


@pytest.mark.parametrize("size", [1, 3, 100], ids=["single", "narrow", "wide"])
def test_A13_trusted_edges_are_central_dp_at_every_edge(size: int) -> None:
    tree = TierTree.of_fanouts((4, 5), p=1.0)
    models = np.random.default_rng(5).normal(size=(20, size))
    noise, asked = noise_of(0, size)
    model = aggregate_event(tree, models, event_tier=0, noise=noise)[CLOUD]
    assert asked == ["t1-0", "t1-1", "t1-2", "t1-3"]
    central = np.zeros(size)
    for edge in range(4):
        summed = np.zeros(size)
        for j in range(5 * edge, 5 * edge + 5):
            summed += models[j]
        central += summed / 5 + noise(f"t1-{edge}")
    assert model.tobytes() == (central / 4).tobytes()


# --- Who is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [2, 70], ids=["narrow", "wide"])
@pytest.mark.parametrize("min_children", [1, 2])
def test_any_tree_with_anybody_missing_equals_the_loops(
    depth: int, size: int, min_children: int
) -> None:
    rng = np.random.default_rng([depth, size, min_children])
    skipped = 0
    for seed in range(12):
        tree = random_tree(rng, depth)
        models = {d: rng.normal(size=size) for d in tree.devices if rng.random() < 0.7}
        for event_tier in range(depth):
            noise, asked = noise_of(seed, size)
            got = aggregate_event(
                tree, models, event_tier=event_tier, noise=noise, min_children=min_children
            )
            called, asked_by_loops = noise_of(seed, size)
            expected = {
                node: nested(tree, models, node, noise=called, min_children=min_children)
                for node in tree.tiers[event_tier]
            }
            assert list(got) == [node for node, model in expected.items() if model is not None]
            for node, model in got.items():
                np.testing.assert_allclose(model, expected[node], rtol=1e-12, atol=1e-13)
            skipped += len(expected) - len(got)
            # In the order of the tree, each at most once, and nobody whose subtree is left out.
            order = [node for node in tree.injectors(event_tier) if node in set(asked)]
            assert asked == order
            if min_children == 1:
                assert sorted(asked) == sorted(asked_by_loops)
    assert skipped or depth == 1


def test_parents_renormalise_over_those_who_answered() -> None:
    models = {"1": np.array([1.0]), "5": np.array([5.0]), "7": np.array([7.0])}
    asked: list[str] = []

    def noise(node: str) -> None:
        asked.append(node)

    assert tiny(models=models, event_tier=0, noise=noise) == {CLOUD: np.array([3.5])}
    assert asked == ["A", "5", "7"]
    # Edge A is left with one child, which it would give away.
    asked.clear()
    assert tiny(models=models, event_tier=0, noise=noise, min_children=2) == {CLOUD: [6.0]}
    assert asked == ["5", "7"]
    assert list(tiny(models=models, event_tier=1, min_children=2)) == ["B"]
    # Edge B is insecure: a single noised model is as good as any.
    single = {"5": np.array([5.0])}
    assert tiny(models=single, event_tier=0, min_children=2) == {CLOUD: [5.0]}


def test_nobody_answered() -> None:
    def noise(node: str) -> Vector:
        raise AssertionError(node)

    for event_tier in (0, 1):
        assert tiny(models={}, event_tier=event_tier, noise=noise) == {}
        assert tiny(event_tier=event_tier, participants=(), noise=noise) == {}


def test_a_node_above_is_left_out_with_too_few_children() -> None:
    """A secure node of tier 1 counts its secure children that take part, not the devices."""
    tree = TierTree.of_fanouts((1, 2, 3), p=1.0)
    models = {str(j): np.array([float(j)]) for j in range(6)}
    assert aggregate_event(tree, models, event_tier=0, min_children=2) == {CLOUD: [2.5]}
    without = {device: model for device, model in models.items() if device not in {"0", "1"}}
    assert aggregate_event(tree, without, event_tier=0, min_children=2) == {}
    assert aggregate_event(tree, without, event_tier=2, min_children=2) == {"t2-1": [4.0]}


def test_participants_are_the_only_ones_that_count() -> None:
    matrix = np.array([[1.0], [np.nan], [5.0], [np.inf]])
    kept = matrix.copy()
    assert tiny(models=matrix, event_tier=0, participants=("5", "1")) == {CLOUD: [3.0]}
    np.testing.assert_array_equal(matrix, kept)
    assert tiny(event_tier=0, participants=["1"]) == {CLOUD: [1.0]}


# --- Input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["matrix", "rows", "mapping", "float32"])
def test_models_are_not_changed_and_may_come_in_any_form(kind: str) -> None:
    matrix = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    models: Any = {
        "matrix": matrix,
        "rows": matrix.tolist(),
        "mapping": dict(zip(reversed(TINY.devices), matrix[::-1], strict=True)),
        "float32": matrix.astype(np.float32),
    }[kind]
    kept = matrix.copy()
    noise, _ = noise_of(0, 2)
    got = tiny(models=models, event_tier=0, noise=noise)[CLOUD]
    assert got.dtype == np.float64
    expected = nested(TINY, dict(zip(TINY.devices, kept, strict=True)), noise=noise)
    np.testing.assert_allclose(got, expected, rtol=1e-14)
    np.testing.assert_array_equal(matrix, kept)
    got += 1  # what comes out is nobody else's
    np.testing.assert_array_equal(matrix, kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"event_tier": 2}, "event_tier = 2: expected an integer from 0 to 1"),
        ({"event_tier": -1}, "event_tier = -1: expected an integer from 0 to 1"),
        ({"min_children": 0}, "min_children = 0: expected an integer of at least 1"),
        ({"models": {"9": np.zeros(1)}}, "models = '9': expected devices of the tree"),
        ({"models": {"A": np.zeros(1)}}, "models = 'A': expected devices of the tree"),
        ({"models": np.zeros((3, 1))}, "models = (3, 1): expected the shape (4, d)"),
        ({"models": np.zeros(4)}, "models = (4,): expected the shape (4, d)"),
        (
            {"models": {"1": np.zeros(2), "3": np.zeros(3)}},
            "shape of models = \"(3,) of device '3'\": expected one shape (d,) for all",
        ),
        ({"models": {"1": np.zeros((1, 1))}}, "(1, 1) of device '1'"),
        ({"participants": ["1", "9"]}, "participants = '9': expected devices of the tree"),
        (
            {"models": {"1": np.zeros(1)}, "participants": ["1", "3"]},
            "participants = '3': expected a device that has a model",
        ),
        ({"noise": lambda node: 0.0}, "shape of noise = \"() of node 'A'\": expected (1,)"),
        ({"noise": lambda node: np.zeros(2)}, "\"(2,) of node 'A'\": expected (1,)"),
    ],
    ids=[
        "tier-of-devices",
        "negative-tier",
        "no-children",
        "unknown-device",
        "aggregator",
        "rows-missing",
        "flat",
        "other-shape",
        "two-dimensions",
        "unknown-participant",
        "silent-participant",
        "scalar-noise",
        "other-noise",
    ],
)
def test_what_fits_nothing_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        tiny(**{"event_tier": 0, **arguments})
    assert message in str(caught.value)


# --- Speed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fanouts", [(100, 200), (10_000, 2)], ids=["wide", "many-edges"])
def test_many_small_models_take_a_third_of_the_time_of_the_loops(fanouts: tuple[int, ...]) -> None:
    def seconds(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    tree = TierTree.of_fanouts(fanouts, p=0.5)
    matrix = np.random.default_rng(0).normal(size=(math.prod(fanouts), 4))
    models = dict(zip(tree.devices, matrix, strict=True))
    results = [aggregate_event(tree, matrix, event_tier=0)[CLOUD], nested(tree, models)]
    np.testing.assert_allclose(*results, rtol=1e-10)
    ours = min(seconds(lambda: aggregate_event(tree, matrix, event_tier=0)) for _ in range(5))
    loops = min(seconds(lambda: nested(tree, models)) for _ in range(3))
    assert 3 * ours < loops
