"""M2FDP's two halves together: special cases, what is clipped, and how much noise there is."""

import math
from typing import Any

import numpy as np
import pytest
from apps import same
from tier_training import (
    BOUND,
    DEEP,
    HALF,
    MIXED,
    SIZE,
    Array,
    Model,
    Spy,
    Tap,
    charges_of,
    descend,
    run,
    stay,
    to,
    w_of,
)

from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.m2fdp.paper_noise import sigma
from flwr_privacy.simulations.research.m2fdp.noise_theory import variance_by_tier

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


# -- A training whose every step is known ---------------------------------------------------------


def push(name: str, model: Model, config: dict[str, Any]) -> Model:
    """Go further than any clipping allows, each device in a direction of its own."""
    direction = np.random.default_rng(int(name)).normal(size=model["w"].shape)
    return {"w": model["w"] + 1e3 * direction}


# -- A13: what it comes to in special cases -------------------------------------------------------


SEEDED = {"engine": {"insecure_seed": 5, "nodes": 4}}


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
    trusted = run(None, descend, fanouts=(2, 2), p=0.5, insecure_seed=5, **options)[0]
    assert np.abs(w_of(trusted) - w_of(results[0])).max() > 1e-3


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


@pytest.mark.parametrize("unit", ["paper", "device"])
def test_an_edge_above_secure_nodes_alone_adds_noise_of_its_own(unit: str) -> None:
    """No device adds noise there; the constant is that of tier 1."""
    tree, noises = TierTree.of_fanouts((4, 2, 3), p=(0.5, 1.0)), []
    for more in (True, False):
        options: dict[str, Any] = {"steps": 4, "events": 2, "edge_noise": more}
        options |= {**EXACT, "alpha": (0.5, 2.0, 3.0)} if unit == "paper" else {}
        result, _ = run(tree, stay, **{"clipping_norm": 0.01, **options})
        noises.append(result.history[1]["scheme"]["noise_var"])
    if unit == "paper":
        edge = sigma(2 * 0.01 * 4 / 6, q=0.05, n_comp=4, eps=8.0, delta=1e-5, alpha=0.5)
    else:
        edge = math.sqrt(4 / 2) / mu_of(8.0, 1e-5) * 2 * 0.01 * 2 / 6
    assert noises[0] - noises[1] == pytest.approx(2 * edge**2 / 16, rel=1e-3)


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
