"""The rehearsal of M2FDP: that it is the plain algorithm with the noise that it says it has."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_privacy.accounting.gaussian import epsilon_of, mu_of
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.m2fdp.paper_noise import noise_multiplier
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.sensitivity import Drift
from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree
from flwr_privacy.simulations.research.m2fdp.noise_theory import variance_by_tier
from flwr_privacy.simulations.research.m2fdp.numpy_simulation import (
    M2FDPSettings,
    TrainingCurve,
    simulate,
)
from flwr_privacy.simulations.research.m2fdp.rounds import Rounds
from flwr_privacy.simulations.research.m2fdp.synthetic_data import (
    SyntheticData,
    generated_data,
    labelled_data,
    random_patches,
    split,
)
from flwr_privacy.simulations.tasks.data import load
from flwr_privacy.wire.identity import stream

Array = NDArray[np.float64]

EVERY_5 = EventSchedule(steps=20, events={1: 5})
DEFAULT = TierTree.of_fanouts("10,5", p=0.5)
STAR = TierTree.of_fanouts("50")
ABOVE = {"a": CLOUD, "b": CLOUD, "aa": "a", "ab": "a", "ba": "b"}
BELOW = {"0": "aa", "1": "aa", "2": "aa", "3": "ab", "4": "ba", "5": "ba"}
UNEVEN = TierTree(parents=ABOVE | BELOW, devices=tuple(BELOW), trusted={"aa", "b", "ba"})


def quiet(N: int = 50, d: int = 2000) -> SyntheticData:
    """Return records without features: all gradients are zero, and models are noise alone."""
    return SyntheticData(
        features=np.zeros((N, 3, d), np.float32),
        labels=np.zeros((N, 3), np.int64),
        test_features=np.zeros((1, d), np.float32),
        test_labels=np.zeros(1, np.int64),
        classes=10,
    )


# -- It is the plain algorithm ------------------------------------------------------------------


def plainly(data: SyntheticData, setting: M2FDPSettings, *, rounds: int, seed: int) -> Array:
    """Train device by device and node by node, without noise, in float64."""
    tree = setting.tree
    W = np.zeros((data.features.shape[2], data.classes))
    for t in range(1, rounds + 1):
        draws = stream(seed, "m2fdp batches", t)
        shape = data.labels.shape
        taking = participants(tree, setting, t, seed)
        models = dict.fromkeys(tree.devices, W)
        tier_after = {s.start + s.steps: s.tier for s in setting.schedule.segments()}
        for k in range(1, setting.schedule.steps + 1):
            taken = draws.random(shape, dtype=np.float32) < setting.rate
            for i, device in enumerate(tree.devices):
                g = gradient(data.features[i][taken[i]], data.labels[i][taken[i]], models[device])
                if setting.clip is not None:
                    g = g * min(1.0, setting.clip / max(float(np.linalg.norm(g)), 1e-300))
                falling = math.sqrt(t + 1) if setting.step_rule == "inv_sqrt" else 1.0
                models[device] = models[device] - setting.learning_rate / falling * g
            if k in tier_after:
                for node in tree.tiers[tier_after[k]]:
                    if node == CLOUD or setting.clean_events or not tree.secure(node):
                        result = mean(tree, node, models, taking)
                        models |= dict.fromkeys(tree.leaves(node), result)
        W = models[tree.devices[0]]
    return W


def participants(tree: TierTree, setting: M2FDPSettings, t: int, seed: int) -> set[str]:
    if setting.path is None:
        return set(tree.devices)
    keys = stream(seed, "m2fdp participants", t).random(len(tree.devices))
    of_device = dict(zip(tree.devices, keys, strict=True))
    taking: set[str] = set()
    for node in tree.tiers[-2]:
        secure = tree.secure(tree.ancestor(node, 1))
        number = setting.path[t - 1][1 if secure else 2]
        taking |= {*sorted(tree.children(node), key=of_device.__getitem__)[:number]}
    return taking


def mean(tree: TierTree, node: str, models: Mapping[str, Array], taking: set[str]) -> Array:
    children = tree.children(node)
    if not children:
        return models[node]
    below = [child for child in children if tree.children(child) or child in taking]
    return sum((mean(tree, child, models, taking) for child in below), start=0.0) / len(below)


def gradient(X: NDArray[Any], labels: NDArray[Any], W: Array) -> Array:
    """Return the gradient of the mean over records of sum_c max(0, 1 - y_c (W^T x)_c)^2."""
    total = np.zeros_like(W)
    for x, label in zip(X.astype(np.float64), labels, strict=True):
        for c in range(W.shape[1]):
            y = 1.0 if c == label else -1.0
            gap = 1 - y * (x @ W[:, c])
            if gap > 0:
                total[:, c] -= 2 * gap * y * x
    return total / max(1, len(labels))


@pytest.mark.parametrize(
    ("tree", "more"),
    [
        (TierTree.of_fanouts("2,3"), {}),
        (TierTree.of_fanouts("6"), {"schedule": EventSchedule(steps=4)}),
        (UNEVEN, {}),
        (UNEVEN, {"schedule": EventSchedule(steps=6, events={1: [4], 2: [1, 3]})}),
        (UNEVEN, {"schedule": EventSchedule(steps=6, events={1: 2}), "clean_events": False}),
        (UNEVEN, {"step_rule": "inv_sqrt"}),
        (UNEVEN, {"clip": None, "learning_rate": 0.1}),
        (UNEVEN, {"path": [(4, 1, 2)] * 3}),
    ],
    ids=[
        *("two tiers", "star", "uneven", "both tiers", "no clean events", "falling", "no clip"),
        "participation",
    ],
)
def test_A1_noise_off_equals_nested_loops(tree: TierTree, more: dict[str, Any]) -> None:
    data = generated_data(3, N=6, m=12, d=5, classes=3, each=2)
    given = {"schedule": EventSchedule(steps=4, events={1: 2}), "learning_rate": 0.5, "clip": 0.5}
    setting = M2FDPSettings(tree=tree, calibration="none", rate=0.3, **{**given, **more})
    curve = simulate(data, [setting], rounds=3, seed=4)
    expected = plainly(data, setting, rounds=3, seed=4)
    assert np.linalg.norm(curve.models[0] - expected) < 1e-5 * np.linalg.norm(expected)
    assert not curve.noise.any()


def test_settings_together_train_as_each_does_alone() -> None:
    data = generated_data(0, N=6, m=30, d=8)
    schedule = EventSchedule(steps=4, events={1: 2})
    paper = {"calibration": "paper", "alpha": 0.05, "schedule": schedule}
    settings = [
        M2FDPSettings(tree=TierTree.of_fanouts("2,3", p=0.5), **paper),
        M2FDPSettings(tree=TierTree.of_fanouts("2,3"), **{**paper, "rate": 0.2}),
        M2FDPSettings(tree=TierTree.of_fanouts("6"), schedule=EventSchedule(steps=4), epsilon=50),
        M2FDPSettings(tree=TierTree.of_fanouts("3,2", p=1), schedule=schedule, epsilon=50),
        M2FDPSettings(
            tree=TierTree.of_fanouts("3,2", p=1), path=[(5, 1, 1), (2, 2, 2)], epsilon=50
        ),
        M2FDPSettings(tree=TierTree.of_fanouts("2,3"), perturb=0.5, **paper),
    ]
    together = simulate(data, settings, rounds=5, seed=1)
    for row, setting in enumerate(settings):
        alone = simulate(data, [setting], rounds=5, seed=1)
        np.testing.assert_allclose(together.models[row], alone.models[0], rtol=2e-3, atol=2e-3)
        np.testing.assert_array_equal(together.noise[row], alone.noise[0])
        np.testing.assert_array_equal(together.energy[row], alone.energy[0])


def test_a_perturbation_without_noise_is_a_longer_step() -> None:
    data = generated_data(0, N=6, m=30, d=8)
    one = {"tree": TierTree.of_fanouts("2,3"), "calibration": "none", "clip": None}
    settings = [
        M2FDPSettings(**one, perturb=1.0, learning_rate=0.1),
        M2FDPSettings(**one, learning_rate=0.2),
    ]
    curve = simulate(data, settings, rounds=4, seed=1)
    np.testing.assert_allclose(curve.models[0], curve.models[1], rtol=1e-4, atol=1e-5)


# -- The noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fanouts", "p", "events"),
    [
        ("10,5", 0.5, {1: 5}),
        ("10,5", 1, {1: 5}),
        ("10,5", 0, {}),
        ("4,2,3", (0.5, 0.5), {1: [5, 15], 2: [10]}),
        ("2,4,4,4", (0.5, 0, 1), {1: 5}),
        ("50", None, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("calibration", ["paper", "device"])
def test_the_noise_of_a_round_is_that_of_variance_by_tier(
    fanouts: str, p: Any, events: Any, calibration: str
) -> None:
    tree = TierTree.of_fanouts(fanouts, p=p)
    schedule = EventSchedule(steps=20, events=events)
    setting = M2FDPSettings(tree=tree, schedule=schedule, calibration=calibration, alpha=0.3)
    rounds = Rounds(setting, 60)
    below = tree.smallest_fanouts()
    sigmas: dict[int, float | list[float]] = {}
    for tier in range(1, tree.depth + 1):
        reach = 2 / math.prod(below[tier - 1 :])
        if calibration == "paper":
            z = noise_multiplier(q=0.05, n_comp=1200, eps=1, delta=1e-5, alpha=0.3)
            sigmas[tier] = z * 20 * reach
        else:
            periods = [sum(s.steps for s in period) for period in schedule.periods(tier)]
            mu = mu_of(1, 1e-5)
            sigmas[tier] = [math.sqrt(1200 / k) / mu * k * reach for k in periods]
    expected = sum(variance_by_tier(tree, sigmas, schedule).values())
    assert rounds.of(rounds.plan[0]).std ** 2 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tree", [DEFAULT, TierTree.of_fanouts("10,5"), STAR], ids=["p", "0", "L1"])
def test_what_the_models_get_has_the_variance_that_is_said(tree: TierTree) -> None:
    schedule = EVERY_5 if tree.depth > 1 else EventSchedule(steps=20)
    setting = M2FDPSettings(tree=tree, schedule=schedule, calibration="paper", learning_rate=0.5)
    curve = simulate(quiet(), [setting], rounds=2, seed=0)
    said = np.sum(curve.noise[0] ** 2)
    # 20,000 values: the standard error of a variance is 1 %.
    assert curve.models[0].var() == pytest.approx(said, rel=0.04)
    assert abs(curve.models[0].mean()) < 4 * math.sqrt(said / curve.models[0].size)


def test_the_variance_holds_on_an_uneven_tree_with_two_tiers_of_events() -> None:
    schedule = EventSchedule(steps=6, events={1: [4], 2: [1, 3]})
    setting = M2FDPSettings(tree=UNEVEN, schedule=schedule, calibration="paper")
    curve = simulate(quiet(N=6), [setting], rounds=1, seed=0)
    z = noise_multiplier(q=0.05, n_comp=6, eps=1, delta=1e-5)
    # aa is under a, which b's like is not: 3 devices, released at steps 4 and 6; 3 alone under ab,
    # released at 1, 3, 4, 6; b with 2 devices once.
    sigma = 2 * 6 * z
    expected = 2 * (sigma / 3 / 4) ** 2 + 4 * (sigma / 4) ** 2 + (sigma / 2 / 2) ** 2
    assert curve.noise[0, 0] ** 2 == pytest.approx(expected, rel=1e-9)
    assert curve.models[0].var() == pytest.approx(expected, rel=0.04)


def test_A13_a_star_is_local_noise_and_so_is_a_tree_that_nobody_trusts() -> None:
    once = {"schedule": EventSchedule(steps=20), "calibration": "paper", "learning_rate": 0.01}
    settings = [
        M2FDPSettings(tree=STAR, **once),
        M2FDPSettings(tree=TierTree.of_fanouts("10,5", p=0), **once),
        M2FDPSettings(tree=TierTree.of_fanouts("10,5", p=1), **once),
    ]
    data = generated_data(0)
    curve = simulate(data, settings, rounds=3, seed=0)
    z = noise_multiplier(q=0.05, n_comp=60, eps=1, delta=1e-5)
    device = z * 2 * 0.01 * 20
    assert curve.noise[0, 0] == pytest.approx(device / math.sqrt(50), rel=1e-6)
    np.testing.assert_allclose(curve.models[1], curve.models[0], rtol=1e-3, atol=1e-3)
    # Central noise at each of 10 edges of 5 devices.
    assert curve.noise[2, 0] == pytest.approx(device / 5 / math.sqrt(10), rel=1e-6)


def test_a_device_pays_its_budget_whatever_path_the_controller_takes() -> None:
    tree = TierTree.of_fanouts("1")
    path = [(5, 1, 1), (20, 1, 1), (1, 1, 1), (14, 1, 1)]
    rounds = Rounds(M2FDPSettings(tree=tree, epsilon=3.0, path=path), 9)
    # A release of k steps moves by at most 2 k; its noise is `std`.
    squares = sum((2 * choice[0] / rounds.of(choice).std) ** 2 for choice in rounds.plan)
    assert epsilon_of(math.sqrt(squares), 1e-5) == pytest.approx(3.0, rel=1e-6)
    assert len(rounds.plan) == 4


def test_A22_clean_events_cost_four_times_lemma_1() -> None:
    tree = TierTree.of_fanouts("10,5", p=1)

    def std(**more: Any) -> float:
        rounds = Rounds(M2FDPSettings(tree=tree, schedule=EVERY_5, **more), 60)
        return rounds.of(rounds.plan[0]).std

    assert std(clean_events=True) == pytest.approx(4 * std(), rel=1e-9)
    lemma = std(clean_events=True, drift=Drift(law="lemma"))
    assert lemma == pytest.approx(std(), rel=1e-9)


def test_noise_at_the_edges_comes_on_top() -> None:
    tree = TierTree.of_fanouts("10,5")
    paper = {"tree": tree, "schedule": EVERY_5, "calibration": "paper"}
    with_it, without = (
        Rounds(M2FDPSettings(**paper, edge_noise=more), 60) for more in (True, False)
    )
    z = noise_multiplier(q=0.05, n_comp=1200, eps=1, delta=1e-5)
    extra = 10 * (z * 2 * 20 / 5 / 10) ** 2
    found = [one.of(one.plan[0]).std ** 2 for one in (with_it, without)]
    assert found[0] - found[1] == pytest.approx(extra, rel=1e-9)


def test_fewer_participants_are_drawn_evenly_and_cost_noise() -> None:
    setting = M2FDPSettings(
        tree=DEFAULT, schedule=EVERY_5, calibration="paper", path=[(20, 2, 3)] * 40
    )
    rounds = Rounds(setting, 40)
    scales = np.array(
        [rounds.participants((20, 2, 3), stream(0, "keys", t).random(50)) for t in range(2000)]
    )
    # Edges of the first half are secure: 2 of 5 take part, else 3 of 5; on average all weigh 1.
    assert set(np.unique(scales[:, :25])) == {0, 2.5}
    assert (np.count_nonzero(scales[:, :25], axis=1) == 10).all()
    assert (np.count_nonzero(scales[:, 25:], axis=1) == 15).all()
    assert np.abs(scales.mean(axis=0) - 1).max() < 4 * math.sqrt(1.5 / 2000)
    z = noise_multiplier(q=0.05, n_comp=800, eps=1, delta=1e-5)
    edge, device = 2 * 20 * z / 2, 2 * 20 * z
    expected = 5 * (edge / 10) ** 2 + 4 * 15 * (device / 30) ** 2
    assert rounds.of((20, 2, 3)).std ** 2 == pytest.approx(expected, rel=1e-9)
    assert rounds.counts((20, 2, 3)) == [2] * 5 + [3] * 5
    curve = simulate(quiet(), [setting], rounds=1, seed=0)
    # Composed over the one round that was asked for.
    assert curve.models[0].var() == pytest.approx(expected / 40, rel=0.04)


def test_A18_energy_and_delay_of_a_course() -> None:
    data = generated_data(0, d=784)
    settings = [
        M2FDPSettings(tree=DEFAULT, schedule=EVERY_5, calibration="none"),
        M2FDPSettings(tree=DEFAULT, schedule=EVERY_5, calibration="none", path=[(5, 5, 5)]),
    ]
    curve = simulate(data, settings, rounds=2, seed=0)
    assert curve.energy[0].tolist() == pytest.approx([0, 1.5183986, 3.0367972], rel=1e-6)
    assert curve.seconds[0].tolist() == pytest.approx([0, 5.458688, 10.917376], rel=1e-6)
    assert curve.energy[1].tolist() == pytest.approx([0, 0.4983206, 0.4983206], rel=1e-6)
    assert curve.accuracy[1, 2] == curve.accuracy[1, 1]


# -- Orderings ----------------------------------------------------------------------------------


@cache
def digits(devices: int, seed: int) -> SyntheticData:
    data = load("digits")
    size = float(np.sqrt(np.mean(data.features.astype(np.float64) ** 2) * 64))
    return labelled_data(
        data.features / size,
        data.labels,
        data.test_features / size,
        data.test_labels,
        devices=devices,
        seed=seed,
    )


LEARNS = {"schedule": EVERY_5, "learning_rate": 10.0, "clip": 0.02}
PAPER = {"calibration": "paper", "alpha": 0.02}
SHARES = {p: TierTree.of_fanouts("10,5", p=p) for p in (1, 0.5, 0)}


def last(settings: Mapping[Any, M2FDPSettings], *, rounds: int) -> dict[Any, float]:
    """Return the mean accuracy after the last round, over three seeds."""
    devices = len(next(iter(settings.values())).tree.devices)
    found = []
    for seed in range(3):
        data = digits(devices, seed)
        curve: TrainingCurve = simulate(data, list(settings.values()), rounds=rounds, seed=seed)
        found.append(curve.accuracy[:, -1])
    return dict(zip(settings, np.mean(found, axis=0).tolist(), strict=True))


@cache
def by_share() -> dict[Any, float]:
    settings = {p: M2FDPSettings(tree=tree, **LEARNS, **PAPER) for p, tree in SHARES.items()}
    settings["plain"] = M2FDPSettings(tree=SHARES[1], **LEARNS, calibration="none")
    for epsilon in (0.25, 4.0):
        settings[f"epsilon {epsilon}"] = M2FDPSettings(
            tree=SHARES[0.5], **LEARNS, **PAPER, epsilon=epsilon
        )
    for p, tree in SHARES.items():
        settings[f"equal {p}"] = M2FDPSettings(tree=tree, **LEARNS, epsilon=100.0)
    settings["clean"] = M2FDPSettings(tree=SHARES[1], **LEARNS, epsilon=100.0, clean_events=True)
    return last(settings, rounds=40)


def test_A23_more_trust_is_better_with_one_alpha() -> None:
    found = by_share()
    assert found["plain"] > found[1] - 0.02
    assert found[1] > found[0.5] + 0.08
    assert found[0.5] > found[0] + 0.05


def test_A23_accuracy_rises_with_epsilon() -> None:
    found = by_share()
    assert found["epsilon 0.25"] + 0.1 < found[0.5] < found["epsilon 4.0"] - 0.05


def test_trust_helps_at_equal_privacy_without_clean_events_only() -> None:
    found = by_share()
    assert found["equal 1"] > found["equal 0.5"] + 0.1
    assert found["equal 0.5"] > found["equal 0"] + 0.03
    assert found["clean"] < found["equal 0"] + 0.1


def test_A23_secure_lower_tiers_are_better() -> None:
    shares = {"D.1": (0.5, 0, 0), "D.2": (0.5, 0, 1), "D.3": (0.5, 1, 1), "D.4": (1, 1, 1)}
    found = last(
        {
            name: M2FDPSettings(
                tree=TierTree.of_fanouts("2,3,3,3", p=p),
                **LEARNS,
                calibration="paper",
                alpha=0.1,
            )
            for name, p in shares.items()
        },
        rounds=20,
    )
    assert min(found["D.2"], found["D.3"], found["D.4"]) > found["D.1"] + 0.05


def test_A23_more_secure_tiers_are_better() -> None:
    found = []
    for fanouts in ("2,3", "2,3,3", "2,3,3,3"):
        tree = TierTree.of_fanouts(fanouts, p=1)
        setting = M2FDPSettings(tree=tree, **LEARNS, calibration="paper", alpha=0.3)
        found.append(last({"all secure": setting}, rounds=20)["all secure"])
    assert found[2] > found[1] + 0.05
    assert found[1] > found[0] + 0.1


# -- Scenes -------------------------------------------------------------------------------------


def test_a_split_is_fair_and_disjoint() -> None:
    labels = np.repeat(np.arange(10), 120)
    parts = split(labels, devices=50, each=3, seed=1)
    assert parts.shape == (50, 24)
    assert len(np.unique(parts)) == parts.size
    for part in parts:
        numbers = np.bincount(labels[part], minlength=10)
        assert sorted(numbers.tolist()) == [0] * 7 + [8] * 3
    assert (np.bincount(labels[parts.ravel()]) == 120).all()
    assert not np.array_equal(parts, split(labels, devices=50, each=3, seed=2))
    few = labelled_data(
        np.eye(1200, dtype=np.float32),
        labels,
        np.eye(1200, dtype=np.float32),
        labels,
        devices=50,
        seed=1,
        records=10,
    )
    assert few.features.shape == (50, 10, 1200)
    assert {*few.features.argmax(axis=2)[7]} < {*parts[7]}


def test_random_patches_are_convolutions() -> None:
    images = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    found = random_patches(images, filters=4, seed=5, width=4, stride=2, pools=1)
    weights = stream(5, "m2fdp scene", "filters").normal(size=(48, 4))
    weights -= weights.mean(axis=0)
    weights /= np.linalg.norm(weights, axis=0)
    answers = []
    for row in (0, 2, 4):
        for column in (0, 2, 4):
            patch = images[1, :, row : row + 4, column : column + 4].astype(float).ravel()
            patch = (patch - patch.mean()) / math.sqrt(patch.var() + 0.1)
            answers.append(patch @ weights)
    expected = [np.maximum(sign * np.array(answers), 0).mean(axis=0) for sign in (1, -1)]
    np.testing.assert_allclose(found[1], np.concatenate(expected), rtol=1e-4)


# -- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"calibration": "papre"}, "calibration = 'papre'.*nearest: 'paper'"),
        ({"clip": None}, "clip = None: expected a number, as there is noise"),
        ({"edge_noise": True}, "edge_noise = True: expected false"),
        ({"rate": 0}, "rate = 0: expected a number above 0"),
        ({"step_rule": "falling"}, "step_rule = 'falling'"),
        ({"path": [(5, 1, 0)]}, "path = 0"),
        ({"path": [(5, 1, 1)], "calibration": "record"}, "calibration = 'record' takes rounds"),
        ({"schedule": EventSchedule(steps=4, events={2: 2})}, "tier of events = 2"),
    ],
)
def test_a_bad_setting_is_refused_by_name(more: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        M2FDPSettings(tree=DEFAULT, **more)


def test_a_rehearsal_that_does_not_fit_is_refused() -> None:
    data = generated_data(0, N=10)
    with pytest.raises(InvalidParameterError, match="tree = '50 devices': expected 10 devices"):
        simulate(data, [M2FDPSettings(tree=DEFAULT)], rounds=1, seed=0)
    with pytest.raises(InvalidParameterError, match="settings"):
        simulate(data, [], rounds=1, seed=0)


def test_records_that_do_not_suffice_are_refused() -> None:
    with pytest.raises(DataError, match="a label has 2 records, too few for 3 devices"):
        split(np.repeat(np.arange(3), 2), devices=3, each=3, seed=0)
    with pytest.raises(InvalidParameterError, match="each = 4"):
        split(np.repeat(np.arange(3), 2), devices=3, each=4, seed=0)
    with pytest.raises(InvalidParameterError, match="images = "):
        random_patches(np.zeros((2, 3, 8, 9), np.float32), filters=2, seed=0)
    with pytest.raises(InvalidParameterError, match="test_labels = "):
        SyntheticData(
            features=np.zeros((2, 3, 4), np.float32),
            labels=np.zeros((2, 3), np.int64),
            test_features=np.zeros((2, 4), np.float32),
            test_labels=np.array([0, 5]),
            classes=5,
        )
