"""The NumPy simulation of M2FDP: that it is the strategy, the clients and the plain algorithm."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from apps import make
from numpy.typing import NDArray
from tier_training import Model, run, w_of

from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.m2fdp import CLOUD, AdaptiveControl, TierTree
from flwr_privacy.m2fdp.paper_noise import noise_multiplier
from flwr_privacy.simulations.research.m2fdp.numpy_simulation import (
    LocalSteps,
    SimulatedM2FDP,
    TrainingCurve,
    of_seed,
)
from flwr_privacy.simulations.research.m2fdp.synthetic_data import (
    SyntheticData,
    generated_data,
    labelled_data,
    random_patches,
    split,
)
from flwr_privacy.simulations.tasks.data import load
from flwr_privacy.strategies.m2fdp.tree_members import any_trusted
from flwr_privacy.wire.identity import stream

Array = NDArray[np.float64]

DEFAULT = TierTree.of_fanouts("10,5", p=0.5)
STAR = TierTree.of_fanouts("50")
ABOVE = {"a": CLOUD, "b": CLOUD, "aa": "a", "ab": "a", "ba": "b"}
BELOW = {"0": "aa", "1": "aa", "2": "aa", "3": "ab", "4": "ba", "5": "ba"}
UNEVEN = TierTree(parents=ABOVE | BELOW, devices=tuple(BELOW), trusted={"aa", "b", "ba"})


def of(tree: TierTree, **options: Any) -> SimulatedM2FDP:
    least = {"min_children": 1} if any_trusted(tree) else {}
    own = {**least, "epsilon": 1.0, "steps": 1, **options}
    if own.get("unit") == "none":
        del own["epsilon"]
    return make(SimulatedM2FDP, tree=tree, **own, **of_seed(own.pop("seed", 0)))


def quiet(N: int = 50, d: int = 2000) -> SyntheticData:
    """Return records without features: all gradients are zero, and models are noise alone."""
    return SyntheticData(
        features=np.zeros((N, 3, d), np.float32),
        labels=np.zeros((N, 3), np.int64),
        test_features=np.zeros((1, d), np.float32),
        test_labels=np.zeros(1, np.int64),
        classes=10,
    )


def exact(data: SyntheticData) -> SyntheticData:
    """Return the data as float64, so that models are."""
    return replace(data, features=data.features.astype(np.float64))


# -- It is the strategy and its clients -----------------------------------------------------------


PAPER_NOISE = {"unit": "paper", "alpha": 0.05, "sampling_rate": 0.3}
CONTROL = AdaptiveControl(total_steps=9, max_steps=4, initial_steps=3)
METHODS: dict[str, dict[str, Any]] = {
    "M2FDP": {"fanouts": "2,3", "p": 0.5},
    "M2FDP, clean events": {"fanouts": "2,3", "p": 0.5, "clean_events": "worst"},
    "M2FDP, three tiers": {"fanouts": "3,2,1", "p": (0.4, 0.5), "events": {1: [3], 2: [1]}},
    "M2FDP, the paper's noise": {"fanouts": "2,3", "p": 0.5, **PAPER_NOISE},
    "M2FDP, control": {"fanouts": "2,3", "p": 0.5, "control": CONTROL, "events": {}},
    "HFL": {"fanouts": "2,3", "unit": "none"},
    "HFL-DP": {"fanouts": "2,3", "p": 0, **PAPER_NOISE},
    "HFL-DP, noise at edges too": {"fanouts": "2,3", "edge_noise": True, **PAPER_NOISE},
    "PEDPFL": {"fanouts": "6", "events": {}, **PAPER_NOISE},
    "PEDPFL, perturbed loss": {
        "fanouts": "6",
        "events": {},
        "perturb_reg": True,
        "step_rule": "inv_sqrt",
        **PAPER_NOISE,
    },
}


@pytest.mark.usefixtures("no_settling", "one_accountant")
@pytest.mark.parametrize("method", METHODS)
def test_it_comes_to_the_models_of_the_inline_engine(method: str) -> None:
    """Same seed: noise, weights, participants and divisors are those of strategy and clients."""
    options = {"steps": 4, "events": 2, "clipping_norm": 0.1, **METHODS[method]}
    options |= {"min_children": 1} if options.get("p") else {}
    data = exact(generated_data(3, N=6, m=12, d=5, classes=3, each=2))
    perturb = 0.5 if "perturb_reg" in options else 0.0
    local = LocalSteps(data=data, seed=4, learning_rate=0.5, clip=0.2, rate=0.3, perturb=perturb)
    named = make(SimulatedM2FDP, experiment_id="e", seed=1, insecure_seed=5, **options)
    options |= {"insecure_seed": 5} if named.privacy.edge_noise or any_trusted(named.tree) else {}

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        end = config["local-steps"]
        if "control" not in options:
            segment = named.schedule.segments()[config["segment"]]
            end = segment.start + segment.steps
        steps = range(end - config["local-steps"] + 1, end + 1)
        own = np.array(model["w"])[None]
        trained = local.trained(
            own, [int(name)], server_round=config["server-round"], steps=steps, told=config
        )
        return {"w": trained[0]}

    result, _ = run(
        named.tree.with_devices([str(row) for row in range(6)]),
        train,
        start={"w": np.zeros((5, 3))},
        num_rounds=4,
        engine={"insecure_seed": 5},
        **{key: value for key, value in options.items() if key not in ("fanouts", "p")},
    )
    curve = named.simulate(local, rounds=4)
    np.testing.assert_allclose(curve.model, w_of(result), rtol=0, atol=1e-9)
    lines = [line["scheme"] for line in result.history[1:] if not line.get("skipped")]
    for name, values in (
        ("noise_var", curve.noise_var),
        ("energy_j", np.diff(curve.energy)),
        ("delay_s", np.diff(curve.seconds)),
    ):
        assert values.tolist() == pytest.approx([line[name] for line in lines], rel=1e-9)
    assert bool(curve.noise_var.any()) == (method != "HFL")


# -- It is the plain algorithm --------------------------------------------------------------------


def plainly(local: LocalSteps, training: SimulatedM2FDP, *, rounds: int) -> Array:
    """Train device by device and node by node, without noise."""
    tree, data, schedule = training.tree, local.data, training.schedule
    W = np.zeros((data.features.shape[2], data.classes))
    for t in range(1, rounds + 1):
        models = dict.fromkeys(tree.devices, W)
        tier_after = {s.start + s.steps: s.tier for s in schedule.segments()}
        for k in range(1, schedule.steps + 1):
            draws = stream(local.seed, "m2fdp batches", t, k)
            taken = draws.random(data.labels.shape, dtype=np.float32) < local.rate
            for i, device in enumerate(tree.devices):
                g = gradient(data.features[i][taken[i]], data.labels[i][taken[i]], models[device])
                if local.clip is not None:
                    g = g * min(1.0, local.clip / max(float(np.linalg.norm(g)), 1e-300))
                falling = math.sqrt(t + 1) if training.step_rule == "inv_sqrt" else 1.0
                models[device] = models[device] - local.learning_rate / falling * g
            if k in tier_after:
                for node in tree.tiers[tier_after[k]]:
                    if node == CLOUD or training.privacy.clean or not tree.secure(node):
                        result = mean(tree, node, models)
                        models |= dict.fromkeys(tree.leaves(node), result)
        W = models[tree.devices[0]]
    return W


def mean(tree: TierTree, node: str, models: Mapping[str, Array]) -> Array:
    children = tree.children(node)
    if not children:
        return models[node]
    return sum((mean(tree, child, models) for child in children), start=0.0) / len(children)


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
        (TierTree.of_fanouts("6"), {"events": {}}),
        (UNEVEN, {}),
        (UNEVEN, {"steps": 6, "events": {1: [4], 2: [1, 3]}}),
        (UNEVEN, {"steps": 6, "clean_events": False}),
        (UNEVEN, {"step_rule": "inv_sqrt"}),
        (UNEVEN, {"clip": None, "clipping_norm": None, "learning_rate": 0.1}),
    ],
    ids=["two tiers", "star", "uneven", "both tiers", "no clean events", "falling", "no clip"],
)
def test_A1_noise_off_equals_nested_loops(tree: TierTree, more: dict[str, Any]) -> None:
    given = {"learning_rate": 0.5, "clip": 0.5, **more}
    own = {key: given.pop(key) for key in ("learning_rate", "clip")}
    data = exact(generated_data(3, N=6, m=12, d=5, classes=3, each=2))
    local = LocalSteps(data=data, seed=4, rate=0.3, **own)
    options = {"steps": 4, "events": 2, "clipping_norm": 0.25, "clean_events": True, **given}
    training = of(tree, unit="none", **options)
    curve = training.simulate(local, rounds=3)
    expected = plainly(local, training, rounds=3)
    np.testing.assert_allclose(curve.model, expected, atol=1e-6)
    assert not curve.noise_var.any()


def test_a_perturbation_without_noise_is_a_longer_step() -> None:
    data = generated_data(0, N=6, m=30, d=8)
    models = [
        of(TierTree.of_fanouts("2,3"), unit="none", clipping_norm=None)
        .simulate(LocalSteps(data=data, seed=1, clip=None, **own), rounds=4)
        .model
        for own in ({"perturb": 1.0, "learning_rate": 0.1}, {"learning_rate": 0.2})
    ]
    np.testing.assert_allclose(models[0], models[1], rtol=1e-4, atol=1e-5)


# -- The noise ------------------------------------------------------------------------------------


PRINTED = {"unit": "paper", "alpha": 1.0, "sampling_rate": 0.05, "clipping_norm": 0.5}


@pytest.mark.parametrize("tree", [DEFAULT, TierTree.of_fanouts("10,5"), STAR], ids=["p", "0", "L1"])
def test_what_the_models_get_has_the_variance_that_is_said(tree: TierTree) -> None:
    events = {1: 5} if tree.depth > 1 else {}
    training = of(tree, steps=20, events=events, **PRINTED)
    curve = training.simulate(LocalSteps(data=quiet(), seed=0), rounds=2)
    said = np.sum(curve.noise_var)
    # 20,000 values: the standard error of a variance is 1 %.
    assert curve.model.var() == pytest.approx(said, rel=0.04)
    assert abs(curve.model.mean()) < 4 * math.sqrt(said / curve.model.size)


def test_the_variance_holds_on_an_uneven_tree_with_two_tiers_of_events() -> None:
    training = of(UNEVEN, steps=6, events={1: [4], 2: [1, 3]}, **{**PRINTED, "clipping_norm": 1.0})
    curve = training.simulate(LocalSteps(data=quiet(N=6), seed=0), rounds=1)
    z = noise_multiplier(q=0.05, n_comp=6, eps=1, delta=1e-5)
    # aa is under a, which b's like is not: 3 devices, released at steps 4 and 6; 3 alone under ab,
    # released at 1, 3, 4, 6; b with 2 devices once.
    sigma = 2 * 6 * z
    expected = 2 * (sigma / 3 / 4) ** 2 + 4 * (sigma / 4) ** 2 + (sigma / 2 / 2) ** 2
    assert curve.noise_var[0] == pytest.approx(expected, rel=1e-5)
    assert curve.model.var() == pytest.approx(expected, rel=0.04)


def test_A13_a_star_is_local_noise_and_so_is_a_tree_that_nobody_trusts() -> None:
    local = LocalSteps(data=quiet(d=4), seed=0)
    options = {"steps": 20, **PRINTED, "clipping_norm": 0.01}
    trees = [STAR, TierTree.of_fanouts("10,5", p=0), TierTree.of_fanouts("10,5", p=1)]
    star, nobody, edges = (of(tree, **options).simulate(local, rounds=3) for tree in trees)
    z = noise_multiplier(q=0.05, n_comp=60, eps=1, delta=1e-5)
    device = z * 2 * 0.01 * 20
    assert star.noise_var[0] == pytest.approx(device**2 / 50, rel=1e-5)
    np.testing.assert_allclose(nobody.model, star.model, rtol=1e-3, atol=1e-3)
    # Central noise at each of 10 edges of 5 devices.
    assert edges.noise_var[0] == pytest.approx((device / 5) ** 2 / 10, rel=1e-5)


def test_noise_at_the_edges_comes_on_top() -> None:
    tree, options = TierTree.of_fanouts("10,5"), {"steps": 20, "events": 5, **PRINTED}
    found = [
        of(tree, edge_noise=more, **options)
        .simulate(LocalSteps(data=quiet(d=4), seed=0), rounds=1)
        .noise_var[0]
        for more in (True, False)
    ]
    z = noise_multiplier(q=0.05, n_comp=20, eps=1, delta=1e-5)
    extra = 10 * (z * 2 * 20 * 0.5 / 5 / 10) ** 2
    assert found[0] - found[1] == pytest.approx(extra, rel=1e-5)


def test_A18_energy_and_delay_of_a_training() -> None:
    local = LocalSteps(data=generated_data(0, d=784), seed=0)
    curve = of(DEFAULT, unit="none", steps=20, events=5).simulate(local, rounds=2)
    assert curve.energy.tolist() == pytest.approx([0, 1.5183986, 3.0367972], rel=1e-6)
    assert curve.seconds.tolist() == pytest.approx([0, 5.458688, 10.917376], rel=1e-6)
    control = AdaptiveControl(total_steps=5, max_steps=5, initial_steps=5)
    short = of(DEFAULT, unit="none", events=5, control=control).simulate(local, rounds=5)
    assert short.energy.tolist() == pytest.approx([0, 0.4983206], rel=1e-6)


# -- Orderings ------------------------------------------------------------------------------------


@cache
def digits(devices: int) -> SyntheticData:
    data = load("digits")
    size = float(np.sqrt(np.mean(data.features.astype(np.float64) ** 2) * 64))
    features, tests = data.features / size, data.test_features / size
    return labelled_data(
        features, data.labels, tests, data.test_labels, devices=devices, seed=0, each=4
    )


def reached(tree: TierTree, *, rounds: int, **options: Any) -> float:
    """Return the mean accuracy over the last five rounds."""
    data = digits(len(tree.devices))
    local = LocalSteps(data=data, seed=0, learning_rate=10.0, clip=0.02)
    own = {"steps": 20, "events": 5, "clipping_norm": 0.2, **options}
    curve: TrainingCurve = of(tree, **own).simulate(local, rounds=rounds)
    return float(curve.accuracy[-5:].mean())


PRINTED_ALPHA = {"unit": "paper", "alpha": 0.02, "sampling_rate": 0.05}
SHARES = {p: TierTree.of_fanouts("4,5", p=p) for p in (1, 0.5, 0)}


@cache
def with_one_alpha(p: float, epsilon: float = 1.0) -> float:
    return reached(SHARES[p], rounds=20, epsilon=epsilon, **PRINTED_ALPHA)


def test_A23_more_trust_is_better_with_one_alpha() -> None:
    plain = reached(SHARES[1], rounds=20, unit="none")
    assert plain > with_one_alpha(1) - 0.02
    assert with_one_alpha(1) > with_one_alpha(0.5) + 0.05
    assert with_one_alpha(0.5) > with_one_alpha(0) + 0.02


def test_A23_accuracy_rises_with_epsilon() -> None:
    low, high = (with_one_alpha(0.5, epsilon) for epsilon in (0.25, 4.0))
    assert low + 0.1 < with_one_alpha(0.5) < high - 0.05


def test_trust_helps_at_equal_privacy_without_clean_events_only() -> None:
    secure, nobody, clean = (
        reached(SHARES[p], rounds=20, epsilon=200.0, **more)
        for p, more in ((1, {}), (0, {}), (1, {"clean_events": "worst"}))
    )
    assert secure > nobody + 0.1
    assert clean < nobody + 0.1


def test_A23_secure_lower_tiers_are_better() -> None:
    options: Any = {**PRINTED_ALPHA, "alpha": 0.04}
    first, *others = (
        reached(TierTree.of_fanouts("2,2,2,2", p=p), rounds=12, **options)
        for p in ((0.5, 0, 0), (0.5, 0, 1), (1, 1, 1))
    )
    assert min(others) > first + 0.05


def test_A23_more_secure_tiers_are_better() -> None:
    found = [
        reached(TierTree.of_fanouts(fanouts, p=1), rounds=12, **{**PRINTED_ALPHA, "alpha": 0.3})
        for fanouts in ("2,3", "2,3,3")
    ]
    assert found[1] > found[0] + 0.05


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
        ({"rate": 0}, "rate = 0: expected above 0 and at most 1"),
        ({"clip": -1}, "clip = -1"),
        ({"learning_rate": "1"}, "learning_rate = '1'"),
    ],
)
def test_bad_local_steps_are_refused_by_name(more: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        LocalSteps(data=quiet(), seed=0, **more)


def test_a_simulation_that_does_not_fit_is_refused() -> None:
    local = LocalSteps(data=quiet(N=10), seed=0)
    with pytest.raises(InvalidParameterError, match="tree = '50 devices': expected 10 devices"):
        of(DEFAULT, unit="none").simulate(local, rounds=1)
    with pytest.raises(InvalidParameterError, match="insecure_seed = None"):
        make(SimulatedM2FDP, fanouts="2,5", unit="none").simulate(local, rounds=1)


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
