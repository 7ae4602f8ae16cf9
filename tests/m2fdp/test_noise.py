"""The paper's noise, and the exact variance of what it leaves in the global model."""

import math
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.paper_noise import noise_multiplier, sigma
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree
from flwr_privacy.simulations.research.m2fdp.noise_theory import (
    one_shot_sigma,
    sensitivity,
    tree_noise_var,
    variance_by_tier,
)

Array = NDArray[np.float64]

RULE = {"q": 0.05, "n_comp": 4000, "eps": 1.0, "delta": 1e-5}
ONE_EVENT = EventSchedule(steps=20)
EVERY_5 = EventSchedule(steps=20, events={1: 5})

CONFIGS = {"D1": (0.5, 0, 0), "D2": (0.5, 0, 1), "D3": (0.5, 1, 1), "D4": (1, 1, 1)}


def by_tier(tree: TierTree) -> dict[int, float]:
    """Return the noise by tier, where a device's has a standard deviation of 1."""
    fanouts = tree.smallest_fanouts()
    return {
        tier: sensitivity(tier, eta=0.5, K=1, G=1.0, fanouts=fanouts)
        for tier in range(1, tree.depth + 1)
    }


def variance(tree: TierTree, schedule: EventSchedule = ONE_EVENT) -> float:
    return sum(variance_by_tier(tree, by_tier(tree), schedule).values())


def injecting(tree: TierTree) -> dict[int, int]:
    return dict(Counter(tree.tier(node) for node in tree.injectors()))


# The rule


def test_A7_noise_of_the_default_tree() -> None:
    assert noise_multiplier(**RULE) == pytest.approx(10.729830, rel=1e-6)
    device = sensitivity(2, eta=0.01, K=20, G=1.0, fanouts=(5,))
    edge = sensitivity(1, eta=0.01, K=20, G=1.0, fanouts=(5,))
    assert sigma(device, **RULE) == pytest.approx(4.291932, rel=1e-6)
    assert sigma(edge, **RULE) == pytest.approx(0.858386, rel=1e-6)


def test_A7_noise_of_four_tiers() -> None:
    found = [
        sigma(sensitivity(tier, eta=0.01, K=20, G=1.0, fanouts=(4, 4, 4)), **RULE)
        for tier in (1, 2, 3, 4)
    ]
    assert found == pytest.approx([0.0670614, 0.2682458, 1.0729830, 4.2919321], rel=1e-6)


def test_A7_how_the_noise_scales() -> None:
    usual = sigma(0.4, **RULE)
    assert sigma(0.4, **{**RULE, "eps": 0.5}) == pytest.approx(2 * usual)
    assert sigma(0.4, **{**RULE, "n_comp": 16000}) == pytest.approx(2 * usual)
    assert sigma(0.4, **RULE, alpha=0.1) == pytest.approx(usual / 10)
    assert sigma(0.8, **RULE) == pytest.approx(2 * usual)
    assert sigma(0.4, **{**RULE, "q": 0.1}) == pytest.approx(2 * usual)


def test_A7_one_release() -> None:
    assert one_shot_sigma(0.4, eps=1.0, delta=1e-5) == pytest.approx(1.937922, rel=1e-6)


# What is left of it


@pytest.mark.parametrize(
    ("p", "nodes", "one", "four"),
    [(0.0, 50, 0.02, 0.08), (0.5, 30, 0.012, 0.042), (1.0, 10, 0.004, 0.004)],
)
def test_A8_variance_of_the_default_tree(p: float, nodes: int, one: float, four: float) -> None:
    tree = TierTree.of_fanouts((10, 5), p=p)
    assert len(tree.injectors()) == nodes
    assert variance(tree) == pytest.approx(one)
    assert variance(tree, EVERY_5) == pytest.approx(four)
    closed = (p / 25 + (1 - p) * 4 / 5) / 10
    assert variance(tree, EVERY_5) == pytest.approx(closed)


def test_A8_the_list_of_nodes_says_the_same() -> None:
    tree = TierTree.of_fanouts((10, 5), p=0.5)
    noise = by_tier(tree)
    nodes = [(tree.tier(v), tree.weight(v), noise[tree.tier(v)]) for v in tree.injectors()]
    assert tree_noise_var(nodes) == pytest.approx(0.012)
    assert tree_noise_var(nodes, {1: 3}) == pytest.approx(0.042)
    assert tree_noise_var([]) == 0


def test_A9_an_edge_that_is_trusted() -> None:
    secure, insecure = (TierTree.of_fanouts((1, 5), p=p) for p in (1.0, 0.0))
    assert variance(insecure) / variance(secure) == pytest.approx(5)
    noise = by_tier(secure)
    assert (noise[2] / noise[1]) ** 2 == pytest.approx(25)


MIXED = TierTree.of_fanouts((4, 2, 3), p=(0.5, 0.5))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ({}, 0.0173611),
        ({1: [1, 2, 3]}, 0.0590278),
        ({1: [1, 2], 2: [3]}, 0.0555556),
    ],
    ids=["global only", "three at tier 1", "two at tier 1, one at tier 2"],
)
def test_A10_mixed_tree(events: Mapping[int, list[int]], expected: float) -> None:
    schedule = EventSchedule(steps=10, events=events)
    assert injecting(MIXED) == {1: 2, 2: 2, 3: 6}
    assert variance(MIXED, schedule) == pytest.approx(expected, rel=5e-6)
    # A relative standard error of sqrt(2 / 20000) = 1 %; 3 % is three of them.
    drawn = rehearsed(MIXED, schedule, by_tier(MIXED), entries=20_000, seed=10)
    assert float(np.mean(drawn**2)) == pytest.approx(expected, rel=0.03)


def rehearsed(
    tree: TierTree, schedule: EventSchedule, noise: Mapping[int, float], entries: int, seed: int
) -> Array:
    """Return a round in which nobody learns: what the noise makes of models of zeros."""
    generator = np.random.default_rng(seed)
    models = {device: np.zeros(entries) for device in tree.devices}

    def average(node: str) -> Array:
        """Return the average at a node, over children that add noise if the node is not secure."""
        parts = []
        for child in tree.children(node):
            leaf = child in models
            value = models[child] if leaf else average(child)
            if not tree.secure(node) and tree.secure(child):
                value = value + generator.normal(size=entries) * noise[tree.tier(child)]
            parts.append(value)
        return np.mean(parts, axis=0)

    for segment in schedule.segments():
        tops = {node: average(node) for node in tree.tiers[segment.tier]}
        for node, model in tops.items():
            models.update(dict.fromkeys(tree.leaves(node), model))
    assert set(tops) == {CLOUD}
    return tops[CLOUD]


@pytest.mark.parametrize(
    ("config", "expected", "nodes"),
    [
        ("D1", 3.967285e-3, {1: 1, 4: 64}),
        ("D2", 1.037598e-3, {1: 1, 3: 16}),
        ("D3", 3.051758e-4, {1: 1, 2: 4}),
        ("D4", 1.220703e-4, {1: 2}),
    ],
)
def test_A11_which_tiers_are_trusted(config: str, expected: float, nodes: dict[int, int]) -> None:
    tree = TierTree.of_fanouts((2, 4, 4, 4), p=CONFIGS[config])
    assert injecting(tree) == nodes
    assert variance(tree) == pytest.approx(expected, rel=1e-6)


def test_A11_more_trust_is_less_noise() -> None:
    found = [variance(TierTree.of_fanouts((2, 4, 4, 4), p=p)) for p in CONFIGS.values()]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4


@pytest.mark.parametrize(
    ("p", "first", "ratio"), [(1.0, 0.03125, 16), (0.0, 0.125, 4)], ids=["secure", "insecure"]
)
def test_A12_depth(p: float, first: float, ratio: float) -> None:
    found = [variance(TierTree.of_fanouts((2, 4, 4, 4)[:depth], p=p)) for depth in (2, 3, 4)]
    assert found == pytest.approx([first, first / ratio, first / ratio**2])


def test_A13_variance_of_a_star() -> None:
    assert variance(TierTree.of_fanouts((50,))) == pytest.approx(1 / 50)


def test_wider_or_more_edges_at_one_number_of_devices() -> None:
    """Section 8.9: nearly equal at p = 0.5, while wider edges win clearly where all are trusted."""
    more, wider = (TierTree.of_fanouts(fanouts, p=0.5) for fanouts in ((10, 5), (2, 25)))
    assert variance(more) == pytest.approx(0.0120)
    assert variance(wider) == pytest.approx(0.0104)
    assert variance(more, EVERY_5) == pytest.approx(0.0420)
    assert variance(wider, EVERY_5) == pytest.approx(0.0404)
    more, wider = (TierTree.of_fanouts(fanouts, p=1.0) for fanouts in ((10, 5), (2, 25)))
    assert (variance(more), variance(wider)) == pytest.approx((0.0040, 0.0008))


@pytest.mark.parametrize(("p", "expected"), [(1.0, 120), (0.0, 269)])
def test_noise_drowns_a_round_at_an_honest_alpha(p: float, expected: float) -> None:
    """Section 8.2: the noise's norm over the largest norm of an update, in one round."""
    tree = TierTree.of_fanouts((10, 5), p=p)
    device = sigma(sensitivity(2, eta=0.01, K=20, G=1.0, fanouts=(5,)), **RULE)
    norm = device * math.sqrt(7840 * variance(tree))
    assert norm / (0.01 * 20 * 1.0) == pytest.approx(expected, abs=0.6)


def test_every_release_may_have_its_own_noise() -> None:
    tree = TierTree.of_fanouts((10, 5), p=0.5)
    schedule = EventSchedule(steps=20, events={1: [5, 15]})
    found = variance_by_tier(tree, {1: 0.2, 2: [0.25, 0.5, 0.25]}, schedule)
    assert found == pytest.approx({1: 5 * 0.01 * 0.04, 2: 25 * 0.0004 * 0.375})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: variance_by_tier(MIXED, {1: 1.0, 2: 1.0}, ONE_EVENT),
            "sigmas = {1: 1.0, 2: 1.0}: expected a standard deviation for tier 3",
        ),
        (
            lambda: variance_by_tier(MIXED, {1: [1.0, 1.0], 2: 1.0, 3: 1.0}, ONE_EVENT),
            "sigmas = [1.0, 1.0]: expected one for each of the 1 releases of a round at tier 1",
        ),
        (
            lambda: variance_by_tier(MIXED, {1: -1.0, 2: 1.0, 3: 1.0}, ONE_EVENT),
            "sigmas = -1.0: expected a finite number of at least 0",
        ),
        (
            lambda: variance_by_tier(TierTree.of_fanouts((5,)), {1: 1.0}, EVERY_5),
            "tier of events = 1: expected none",
        ),
        (lambda: noise_multiplier(**{**RULE, "q": 0.0}), "q = 0.0: expected a finite number from"),
        (lambda: noise_multiplier(**{**RULE, "eps": -1.0}), "eps = -1.0: expected a finite number"),
        (lambda: noise_multiplier(**RULE, alpha=0.0), "alpha = 0.0: expected a finite number"),
        (lambda: noise_multiplier(**{**RULE, "delta": 1.0}), "strictly between 0 and 1"),
        (lambda: sigma(-1.0, **RULE), "Delta = -1.0: expected a finite number of at least 0"),
        (
            lambda: one_shot_sigma(1.0, eps=2.0, delta=1e-5),
            "eps = 2.0: expected a finite number from",
        ),
        (lambda: tree_noise_var([(0, 0.1, 1.0)]), "tier = 0: expected an integer of at least 1"),
        (lambda: tree_noise_var([], {1: -1}), "n_events = -1: expected an integer of at least 0"),
    ],
)
def test_errors_name_the_parameter(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        call()
    assert message in str(caught.value)
