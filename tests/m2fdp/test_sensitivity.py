"""How far one device's data reach: the paper's Lemma, and the laws of drift against brute force."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.sensitivity import (
    DRIFTS,
    Drift,
    Reach,
    largest_weights,
    sensitivity_worst_case,
)
from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree
from flwr_privacy.privacy.updates import clip
from flwr_privacy.simulations.research.m2fdp.noise_theory import (
    sensitivity,
    sensitivity_node,
    sensitivity_smooth,
    smooth_factor,
)

Array = NDArray[np.float64]
State = TypeVar("State")
Segments = Sequence[tuple[int, int]]  # local steps, and the tier of the event after them

EVERY_5 = [(5, 1), (5, 1), (5, 1), (5, 0)]


def zone(*fanouts: int) -> TierTree:
    """Return a tree with one trusted zone, whose top is the only node of tier 1."""
    return TierTree.of_fanouts((1, *fanouts), p=1.0)


def uneven_zone(leaves: Sequence[int]) -> TierTree:
    """Return a trusted zone of depth 3 with so many devices below each aggregator."""
    edges = [(CLOUD, "top")]
    for i, count in enumerate(leaves):
        edges += [("top", f"node-{i}")]
        edges += [(f"node-{i}", f"{i}-{k}") for k in range(count)]
    return TierTree.of_edges(edges, trusted={"top", *(f"node-{i}" for i in range(len(leaves)))})


def walk(
    tree: TierTree,
    segments: Segments,
    start: State,
    *,
    train: Callable[[str, State, int], State],
    average: Callable[[list[tuple[State, float]], int], State],
    hand_out: Callable[[State, int], State] = lambda state, tier: state,
    weights: Mapping[str, float] | None = None,
    absent: Sequence[frozenset[str]] = (),
    everybody: bool = True,
) -> State:
    """Run the segments of a zone from one noised release to the next; return what is released.

    `weights` are shares of the nodes before those that take part are scaled to one; `absent` are
    the devices that miss each segment, who get the model of its event only if `everybody` does.
    """
    (top,) = tree.tiers[1]
    states = dict.fromkeys(tree.devices, start)
    for number, (steps, event) in enumerate(segments):
        missing = absent[number] if absent else frozenset()
        present = [device for device in tree.devices if device not in missing]
        values = {device: train(device, states[device], steps) for device in present}
        for tier in range(tree.depth - 1, max(event, 1) - 1, -1):
            averages = {}
            for node in tree.tiers[tier]:
                children = [child for child in tree.children(node) if child in values]
                if children:
                    shares = [(weights or {}).get(child, 1.0) for child in children]
                    parts = [
                        (values[child], share / sum(shares))
                        for child, share in zip(children, shares, strict=True)
                    ]
                    averages[node] = average(parts, tier)
            values = averages
        if event == 0:
            return values[top]
        for node, value in values.items():
            for device in tree.leaves(node):
                if everybody or device in present:
                    states[device] = hand_out(value, event)
    raise AssertionError("no release")


def law(tree: TierTree, segments: Segments, drift: Drift, slack: float = 0.0, **how: Any) -> float:
    """Return the sensitivity of a release by the law, for steps of length 1."""
    reach = walk(
        tree,
        segments,
        Reach(anchor=tree.depth),
        train=lambda _, reach, steps: drift.trained(
            reach, bound=float(steps), steps=steps, slack=slack
        ),
        average=lambda parts, tier: drift.averaged(parts, tier=tier, slack=slack),
        hand_out=lambda reach, tier: drift.broadcast(reach, tier=tier),
        **how,
    )
    return reach.total


def mean(parts: list[tuple[Any, float]], tier: int = 0) -> Any:
    return sum(value * weight for value, weight in parts)


def distances(tree: TierTree, segments: Segments, drift: Drift, **how: Any) -> list[float]:
    """Return how far the data of each device move a release: distances on a line, one by one."""

    def trained(apart: float, steps: int, protected: bool) -> float:
        free = apart + 2 * steps
        if protected:
            return free
        if drift.law == "lemma" or apart == 0:
            return apart
        return free if drift.law == "worst" else min(free, apart * drift.growth**steps)

    def of(protected: str) -> float:
        return walk(
            tree,
            segments,
            0.0,
            train=lambda device, apart, steps: trained(apart, steps, device == protected),
            average=mean,
            **how,
        )

    return [of(device) for device in tree.devices]


# The paper's forms


def test_A6_sensitivity_of_the_default_tree() -> None:
    found = [sensitivity(tier, eta=0.01, K=20, G=1.0, fanouts=(5,)) for tier in (1, 2)]
    assert found == pytest.approx([0.08, 0.4])


def test_A6_sensitivity_of_four_tiers() -> None:
    found = [sensitivity(tier, eta=0.01, K=20, G=1.0, fanouts=(4, 4, 4)) for tier in (1, 2, 3, 4)]
    assert found == pytest.approx([0.00625, 0.025, 0.1, 0.4])


def test_A6_node_exact_form_is_the_papers_in_a_balanced_tree_and_less_elsewhere() -> None:
    values = {"eta": 0.01, "K": 20, "G": 1.0}
    assert sensitivity_node([1 / 16] * 16, **values) == pytest.approx(0.025)
    tree = uneven_zone([2, 5, 3])
    weights = [tree.weight(device, "top") for device in tree.devices]
    exact = sensitivity_node(weights, **values)
    assert exact == pytest.approx(0.4 / 6)  # a device of the node with two
    assert exact <= sensitivity(1, fanouts=tree.smallest_fanouts(), **values)


def test_A20_clipped_gradients() -> None:
    for vector, expected in (([3.0, 4.0], [0.6, 0.8]), ([0.3, 0.4], [0.3, 0.4])):
        gradient = np.array(vector)
        clip(gradient, 1.0)
        assert gradient == pytest.approx(expected, rel=1e-9)


def test_A20_local_training_moves_a_model_by_eta_K_G() -> None:
    generator = np.random.default_rng(20)
    eta, K, G = 0.1, 20, 0.5
    for direction in generator.normal(size=(20, 6)):
        w = np.zeros(6)
        for _ in range(K):
            gradient = direction + generator.normal(size=6) * generator.choice([0.0, 1.0, 9.0])
            clip(gradient, G)
            w -= eta * gradient
        assert np.linalg.norm(w) <= eta * K * G
    w = -sum(eta * G * np.eye(6)[0] for _ in range(K))  # attained: the same way every time
    assert np.linalg.norm(w) == pytest.approx(eta * K * G)


@pytest.mark.parametrize(
    ("segments", "factor"), [(EVERY_5, 4.0), ([(20, 0)], 1.0), ([(10, 1), (10, 0)], 3.0)]
)
def test_A22_worst_case_over_the_lemma(segments: Segments, factor: float) -> None:
    lemma = sensitivity(1, eta=0.01, K=20, G=1.0, fanouts=(5,))
    worst = sensitivity_worst_case(segments, weights={1: 1.0, 2: 0.2}, eta=0.01, G=1.0)
    assert worst == pytest.approx(factor * lemma)
    assert law(zone(5), segments, Drift()) == pytest.approx(factor * 8)
    assert law(zone(5), segments, Drift(law="lemma")) == pytest.approx(8)


def test_A22_eight_devices_and_forty_steps() -> None:
    segments = [(5, 1)] * 7 + [(5, 0)]
    assert law(zone(8), segments, Drift()) / (2 * 40 / 8) == pytest.approx(7.125)  # "x7.1"


def test_A22_smooth_factor() -> None:
    assert smooth_factor(20, 1 / 20) == pytest.approx(1.6533, abs=5e-5)
    assert smooth_factor(1, 0.3) == pytest.approx(1)
    assert smooth_factor(7, 0.0) == 1
    assert smooth_factor(10**6, 1e-6) == pytest.approx(math.e - 1, rel=1e-5)
    assert smooth_factor(10**6, 1.0) == math.inf
    found = sensitivity_smooth(1, eta=0.05, K=20, G=1.0, fanouts=(5,), beta=1.0)
    assert found == pytest.approx(1.653298 * 0.4, rel=1e-6)


def test_worst_case_goes_on_over_several_tiers() -> None:
    """After an event at tier 1 a later one at tier 2 does not free the devices elsewhere."""
    weights = {1: 1.0, 2: 0.5, 3: 0.1}
    segments = [(4, 2), (3, 1), (2, 2), (1, 0)]
    expected = 2 * (4 * 0.1 + 3 * 0.5 + 2 * 1 + 1 * 1)
    assert sensitivity_worst_case(segments, weights=weights, eta=1.0, G=1.0) == expected
    assert law(zone(2, 5), segments, Drift()) == pytest.approx(expected)


# The laws, against models that do attain them


def descend(
    tree: TierTree, segments: Segments, slope: Callable[[str, float], float], eta: float = 1.0
) -> float:
    """Return what a zone releases after gradient steps, clipped to 1, from 0."""

    def train(device: str, w: float, steps: int) -> float:
        for _ in range(steps):
            w -= eta * min(1.0, max(-1.0, slope(device, w)))
        return w

    return walk(tree, segments, 0.0, train=train, average=mean)


def attained(
    tree: TierTree, segments: Segments, others: Callable[[float], float], eta: float = 1.0
) -> float:
    """Return the difference of two releases: device 0 always goes up, or always down."""

    def released(slope: float) -> float:
        return descend(tree, segments, lambda d, w: slope if d == "0" else others(w), eta)

    return released(-1.0) - released(1.0)


@pytest.mark.parametrize(
    ("fanouts", "segments"),
    [
        ((5,), EVERY_5),
        ((3,), [(1, 1)] * 9 + [(1, 0)]),
        ((2, 3), [(2, 2), (3, 1), (4, 2), (1, 0)]),
        ((2, 3), [(2, 2), (3, 2), (1, 0)]),
        ((2, 2, 2), [(1, 3), (2, 2), (3, 3), (1, 1), (2, 3), (1, 0)]),
    ],
)
def test_A22_the_worst_case_is_attained_by_siblings_that_run_away(
    fanouts: tuple[int, ...], segments: Segments
) -> None:
    tree = zone(*fanouts)
    found = attained(tree, segments, lambda w: -float(np.sign(w)))  # the loss -|w|
    assert found == pytest.approx(law(tree, segments, Drift()))


def test_A22_the_default_tree_reaches_032() -> None:
    assert attained(zone(5), EVERY_5, lambda w: -float(np.sign(w)), eta=0.01) == pytest.approx(0.32)


@pytest.mark.parametrize(
    ("fanouts", "segments"),
    [
        ((5,), EVERY_5),
        ((5,), [(1, 1)] * 19 + [(1, 0)]),
        ((2, 3), [(5, 2), (5, 1), (5, 2), (5, 0)]),
        ((2, 3), [(5, 2), (5, 2), (10, 0)]),
    ],
)
def test_smooth_law_is_attained_by_concave_parabolas(
    fanouts: tuple[int, ...], segments: Segments
) -> None:
    """With the loss ``-beta w^2 / 2`` distances grow by 1 + eta beta as long as nothing clips."""
    tree, beta = zone(*fanouts), 1 / 20
    drift = Drift(law="smooth", growth=1 + beta)
    found = law(tree, segments, drift)
    assert attained(tree, segments, lambda w: -beta * w) == pytest.approx(found)
    highest = sensitivity_smooth(1, eta=1.0, K=20, G=1.0, fanouts=fanouts, beta=beta)
    assert found <= highest * (1 + 1e-12)
    assert found <= law(tree, segments, Drift())


def test_smooth_law_of_the_default_tree() -> None:
    """The specification attained 1.38 times the Lemma with the events of the experiments."""
    found = law(zone(5), EVERY_5, Drift(law="smooth", growth=1.05))
    assert found / 8 == pytest.approx(1.38, abs=0.005)


@pytest.mark.parametrize("law_name", DRIFTS)
def test_every_law_is_the_lemma_without_clean_events(law_name: str) -> None:
    drift = Drift(law=law_name, growth=1.5)
    assert law(zone(2, 3), [(20, 0)], drift) == pytest.approx(2 * 20 / 6)
    assert law(zone(1), [(20, 0)], drift) == pytest.approx(40)


@pytest.mark.parametrize(
    "segments",
    [
        [(2, 2), (3, 1), (4, 2), (1, 0)],
        [(2, 1), (3, 2), (4, 1), (1, 0)],
        [(2, 2), (3, 2), (5, 0)],
    ],
)
def test_the_lemma_is_lemma_1_whatever_the_clean_events(segments: Segments) -> None:
    expected = sensitivity(1, eta=1.0, K=10, G=1.0, fanouts=(2, 3))
    assert law(zone(2, 3), segments, Drift(law="lemma")) == pytest.approx(expected)


# The laws, against everything that can happen


@pytest.mark.parametrize(
    ("fanouts", "segments"),
    [
        ((3,), [(1, 1), (2, 1), (1, 0)]),
        ((2, 2), [(1, 2), (1, 1), (2, 0)]),
        ((2, 2), [(1, 1), (1, 2), (2, 0)]),
    ],
)
def test_the_worst_case_is_the_largest_of_all(fanouts: tuple[int, ...], segments: Segments) -> None:
    """Enumerates the updates of all siblings: free where their models differ, else equal."""
    tree = zone(*fanouts)
    reached: set[tuple[Fraction, ...]] = {(Fraction(0),) * len(tree.devices)}
    released: set[Fraction] = set()
    for steps, event in segments:
        following: set[tuple[Fraction, ...]] = set()
        for state in reached:
            moves = [
                (-2 * steps, 0, 2 * steps) if i == 0 or apart else (0,)
                for i, apart in enumerate(state)
            ]
            for chosen in itertools.product(*moves):
                apart = [a + b for a, b in zip(state, chosen, strict=True)]
                nodes = tree.tiers[max(event, 1)]
                groups = [apart[slice(*tree.span(node))] for node in nodes]
                means = [sum(group, Fraction(0)) / len(group) for group in groups]
                following.add(
                    tuple(m for m, group in zip(means, groups, strict=True) for _ in group)
                )
                if event == 0:
                    released.add(means[0])
        reached = following
    assert float(max(released)) == pytest.approx(law(tree, segments, Drift()))


def _segments(depth: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    inner = st.tuples(st.integers(1, 6), st.integers(1, depth - 1))
    return st.builds(
        lambda clean, last: [*clean, (last, 0)], st.lists(inner, max_size=5), st.integers(1, 6)
    )


def _drifts() -> st.SearchStrategy[Drift]:
    return st.builds(Drift, law=st.sampled_from(DRIFTS), growth=st.floats(1, 2))


@given(
    fanouts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
    drift=_drifts(),
)
@settings(deadline=None, max_examples=60)
def test_exact_in_balanced_zones(fanouts: list[int], data: st.DataObject, drift: Drift) -> None:
    tree = zone(*fanouts)
    segments = data.draw(_segments(tree.depth))
    found = law(tree, segments, drift)
    exact = max(distances(tree, segments, drift))
    if drift.law == "smooth":
        assert exact <= found * (1 + 1e-12)  # a cap of several moves is one of their sum
    else:
        assert found == pytest.approx(exact)


@given(
    leaves=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    segments=_segments(3),
    drift=_drifts(),
    data=st.data(),
    everybody=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_sound_with_uneven_weights_and_absentees(
    leaves: list[int],
    segments: list[tuple[int, int]],
    drift: Drift,
    data: st.DataObject,
    everybody: bool,
) -> None:
    tree = uneven_zone(leaves)
    nodes = [*tree.tiers[2], *tree.devices]
    shares = data.draw(
        st.lists(st.floats(0.1, 10), min_size=len(nodes), max_size=len(nodes)), label="weights"
    )
    misses = st.frozensets(st.sampled_from(tree.devices), max_size=len(tree.devices) - 1)
    how: dict[str, Any] = {
        "weights": dict(zip(nodes, shares, strict=True)),
        "absent": [data.draw(misses, label="absent") for _ in segments],
        "everybody": everybody,
    }
    exact = max(distances(tree, segments, drift, **how))
    assert exact <= law(tree, segments, drift, **how) * (1 + 1e-12)


@pytest.mark.parametrize("law_name", ["smooth", "lemma"])
@pytest.mark.parametrize("grid", [0.0, 0.125])
@pytest.mark.parametrize("at_once", [False, True], ids=["steps clipped", "updates clipped"])
def test_sound_for_gradient_fields_in_the_plane(law_name: str, grid: float, at_once: bool) -> None:
    """Clipped linear fields: any for ``smooth``, gradients of convex losses for ``lemma``.

    With a grid, updates are truncated to it and averages rounded, which `slack` is for.
    """
    generator = np.random.default_rng(7)
    beta = 0.2
    slack = grid * math.sqrt(2)
    drift = Drift(law=law_name, growth=1 + beta)
    tree = uneven_zone([2, 3])
    segments = [(2, 2), (3, 1), (1, 2), (2, 0)]
    bound = law(tree, segments, drift, slack)
    largest = 0.0
    for _ in range(60):
        fields = {device: _field(generator, beta, law_name) for device in tree.devices}
        usual = _released(tree, segments, fields, grid, at_once)
        for protected in tree.devices:
            changed = fields | {protected: _field(generator, beta, law_name)}
            moved = usual - _released(tree, segments, changed, grid, at_once)
            largest = max(largest, float(np.linalg.norm(moved)))
    assert bound / 8 < largest <= bound


def _released(
    tree: TierTree,
    segments: Segments,
    fields: Mapping[str, tuple[Array, Array]],
    grid: float,
    at_once: bool,
) -> Array:
    def train(device: str, w: Array, steps: int) -> Array:
        moved = w.copy()
        for _ in range(steps):
            slope = fields[device][0] @ moved + fields[device][1]
            if not at_once:
                clip(slope, 1.0)
            moved -= slope
        update = moved - w
        clip(update, float(steps))
        return w + (np.trunc(update / grid) * grid if grid else update)

    def average(parts: list[tuple[Array, float]], tier: int) -> Array:
        w: Array = mean(parts)
        return np.floor(w / grid + 0.5) * grid if grid else w

    return walk(tree, segments, np.zeros(2), train=train, average=average)


def _field(generator: np.random.Generator, beta: float, law_name: str) -> tuple[Array, Array]:
    """Return a matrix of norm beta and an offset."""
    matrix = generator.normal(size=(2, 2))
    if law_name == "lemma":  # symmetric, not negative, and small enough that nothing is clipped
        matrix = matrix @ matrix.T
    matrix *= beta / np.linalg.norm(matrix, 2)
    offset = generator.normal(size=2)
    return matrix, offset * (0.3 if law_name == "lemma" else 2) / np.linalg.norm(offset)


# One step of the law at a time


def test_laws_are_ordered() -> None:
    tree = zone(2, 3)
    segments = [(2, 2), (3, 1), (4, 2), (1, 0)]
    grown = [law(tree, segments, Drift(law="smooth", growth=g)) for g in (1.0, 1.1, 1.5, 1e9)]
    assert grown == sorted(grown)
    assert grown[0] == pytest.approx(law(tree, segments, Drift(law="lemma")))
    assert grown[-1] == pytest.approx(law(tree, segments, Drift()))


def test_a_growth_that_no_float_holds_is_the_worst_case() -> None:
    reach = Reach(anchor=1, shared=1.0)
    found = Drift(law="smooth", growth=1e300).trained(reach, bound=3.0, steps=10)
    assert found == Reach(anchor=1, shared=7.0)


def test_rounding_only_counts_where_models_differ() -> None:
    drift = Drift(law="lemma")
    fresh = Reach(anchor=2)
    assert drift.trained(fresh, bound=1.0, steps=1, slack=0.5) == Reach(anchor=2, own=2.0)
    assert drift.averaged([(fresh, 1.0)], tier=1, slack=0.5) == Reach(anchor=1)
    moved = drift.averaged([(Reach(anchor=2, own=2.0), 0.5)], tier=1, slack=0.5)
    assert moved == Reach(anchor=1, own=1.5)
    shared = drift.broadcast(moved, tier=1)
    assert shared == Reach(anchor=1, shared=1.5)
    trained = drift.trained(shared, bound=1.0, steps=1, slack=0.5)
    assert trained.common == 2.0
    averaged = drift.averaged([(trained, 0.5)], tier=1, slack=0.5)
    assert averaged.common == 2.5
    assert averaged.own == trained.own / 2


def test_an_event_below_keeps_what_an_event_above_has_shared() -> None:
    drift = Drift(law="lemma")
    shared = Reach(anchor=1, shared=1.0)
    trained = drift.trained(shared, bound=2.0, steps=2)
    assert trained == Reach(anchor=1, shared=1.0, own=4.0)
    averaged = drift.averaged([(trained, 0.25), (shared, 0.75)], tier=2)
    assert averaged == Reach(anchor=1, shared=1.0, own=1.0)
    assert drift.broadcast(averaged, tier=2) == Reach(anchor=1, shared=1.0, nearer=((2, 1.0),))


def test_a_child_may_weigh_next_to_nothing() -> None:
    children = [(Reach(anchor=2, own=2.0), 1e-20)]
    assert Drift().averaged(children, tier=1) == Reach(anchor=1, own=2e-20)


def test_totals() -> None:
    reach = Reach(anchor=1, shared=1.0, nearer=((2, 0.5), (4, 0.25)), own=3.0)
    assert (reach.common, reach.total) == (1.75, 4.75)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Drift(law="best"), "law = 'best': expected one of 'lemma', 'smooth', 'worst'"),
        (lambda: Drift(growth=0.9), "growth = 0.9: expected a finite number of at least 1"),
        (lambda: Reach(anchor=-1), "anchor = -1: expected an integer of at least 0"),
        (lambda: Reach(anchor=1, own=math.nan), "own = nan: expected a finite number"),
        (
            lambda: Reach(anchor=2, nearer=((2, 1.0),)),
            "nearer = 2: expected an integer of",
        ),
        (
            lambda: Drift().averaged([(Reach(anchor=2), 0.6)] * 2, tier=1),
            "weights = 1.2: expected weights that sum to one at most",
        ),
        (
            lambda: Drift().averaged(
                [(Reach(anchor=2), 0.5), (Reach(anchor=2), 0.5 + 1.5e-9)], tier=1
            ),
            "expected weights that sum to one at most",
        ),
        (lambda: Drift().averaged([], tier=1), "weights = 0: expected weights that sum to one"),
        (
            lambda: Drift().trained(Reach(anchor=2), bound=1.0, steps=0),
            "steps = 0: expected an integer of at least 1",
        ),
        (
            lambda: sensitivity(3, eta=0.1, K=1, G=1.0, fanouts=(5,)),
            "tier = 3: expected an integer from 1 to 2",
        ),
        (
            lambda: sensitivity(1, eta=0.1, K=1, G=1.0, fanouts=(0,)),
            "fanouts = 0: expected an integer of at least 1",
        ),
        (
            lambda: sensitivity_node([], eta=0.1, K=1, G=1.0),
            "path_weights = []: expected at least one, all of them above 0",
        ),
        (
            lambda: sensitivity_node([1.5], eta=0.1, K=1, G=1.0),
            "path_weights = 1.5: expected a finite number of at most 1",
        ),
        (
            lambda: sensitivity_worst_case([(1, 2), (1, 0)], weights={1: 1.0, 3: 0.5}, eta=1, G=1),
            "expected a weight for tier 2",
        ),
        (
            lambda: sensitivity_worst_case([(1, 0)], weights={}, eta=1, G=1),
            "weights = {}: expected a weight by tier",
        ),
        *(
            (
                lambda weight=weight: sensitivity_worst_case(
                    [(1, 0)], weights={1: 1.0, 2: weight}, eta=1, G=1
                ),
                f"weight = {weight}: expected a number above 0 and at most 1",
            )
            for weight in (0.0, 1.5)
        ),
        (
            lambda: sensitivity_worst_case([(1, 0)], weights={1: 1.0}, eta=-1, G=1),
            "eta = -1: expected a finite number of at least 0",
        ),
        (
            lambda: sensitivity_worst_case([(1, 0)], weights={1: 1.0}, eta=1, G=-1),
            "G = -1: expected a finite number of at least 0",
        ),
        (lambda: smooth_factor(0, 0.1), "K = 0: expected an integer of at least 1"),
    ],
)
def test_errors_name_the_parameter(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        call()
    assert message in str(caught.value)


def test_the_largest_weight_is_that_of_the_smallest_family() -> None:
    """The first zone has three devices, the second two: one of those weighs a half there."""
    edges = [("cloud", "a"), ("cloud", "b"), *[("a", name) for name in "012"]]
    tree = TierTree.of_edges([*edges, ("b", "3"), ("b", "4")], trusted={"a", "b"})
    assert largest_weights(tree, 1) == {1: 1.0, 2: 0.5}
