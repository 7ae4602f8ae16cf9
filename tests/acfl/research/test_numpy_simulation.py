"""The rehearsal of ACFL: that it is the plain algorithm, and the facts about whole trainings."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import gradient, moments_gradient
from flwr_privacy.acfl.privacy import sigma2_for_eps
from flwr_privacy.acfl.scfl import sigma2_for_eps_projected
from flwr_privacy.acfl.steps import StepSize
from flwr_privacy.acfl.weights import coded_energy
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.numpy_simulation import (
    ACFLSettings,
    ACFLTrainingCurve,
    coded_set,
    simulate,
    stragglers,
)
from flwr_privacy.simulations.research.acfl.scfl import projected_mse
from flwr_privacy.simulations.research.acfl.synthetic_data import (
    ACFLSyntheticData,
    heterogeneous_data,
    paper_data,
)
from flwr_privacy.simulations.research.acfl.theory import coded_fixed_point

Array = NDArray[np.float64]

PAPER_STEPS = StepSize(1e-4, "inverse")


def noise(s: float) -> dict[str, float]:
    return {"sigma1_sq": s, "sigma2_sq": s}


def falling(data: ACFLSyntheticData) -> StepSize:
    """Return 1 / (lambda (t + 3))."""
    return StepSize(1 / (3 * data.convexity), "shifted", 3)


def small(kind: str = "heterogeneous") -> ACFLSyntheticData:
    make = heterogeneous_data if kind == "heterogeneous" else paper_data
    return make(3, N=6, m=12, d=4, o=3)


# -- It is the plain algorithm ------------------------------------------------------------------


def plainly(
    data: ACFLSyntheticData,
    setting: ACFLSettings,
    *,
    rounds: int,
    steps: StepSize,
    seed: int,
    ridge: float,
) -> tuple[list[float], list[tuple[float, float]], Array]:
    """Train one setting device by device and round by round, as section 3.2 has it."""
    answered = stragglers(data, setting, rounds=rounds, seed=seed)
    coded = coded_set(data, setting, seed=seed)
    policy = setting.policy()
    d, o = data.start.shape
    W = data.start
    losses = [loss(data, W)]
    weights = []
    for t in range(1, rounds + 1):
        came = [
            gradient(data.features[i], data.labels[i], W) for i in np.flatnonzero(answered[t - 1])
        ]
        size = setting.model_bound**2 if setting.alpha == "bounds" else np.sum(W**2)
        found = policy.weigh(
            t=t,
            answered=len(came),
            devices=data.devices,
            squares=sum(float(np.sum(G**2)) for G in came),
            energy=coded_energy(float(size), setting.sigma1_sq, setting.sigma2_sq, d, o),
        )
        weights.append(found or (math.nan, math.nan))
        if found is not None:
            total = found.coded * moments_gradient(coded, W)
            total = total + found.received * sum(came, start=np.zeros((d, o))) + ridge * W
            W = W - steps.at(t) * total
        losses.append(loss(data, W))
    return losses, weights, W


def loss(data: ACFLSyntheticData, W: Array) -> float:
    return sum(
        float(np.sum((X @ W - Y) ** 2)) / 2 for X, Y in zip(data.features, data.labels, strict=True)
    )


BOUNDS = {"alpha": "bounds", "gradient_bound": 2.0, "model_bound": 0.5}
SETTINGS = {
    "estimated": ACFLSettings(),
    "estimated, other noise": ACFLSettings(sigma1_sq=0.3, sigma2_sq=0.02, straggler_rate=0.4),
    "estimated, without noise": ACFLSettings(**noise(0)),
    "predictable": ACFLSettings(predictable=True, straggler_rate=0.4),
    "bounds": ACFLSettings(**BOUNDS),
    "horizon": ACFLSettings(alpha="horizon", straggler_rate=0.4, **noise(0.1)),
    "horizon, predictable": ACFLSettings(alpha="horizon", predictable=True),
    "often nobody": ACFLSettings(straggler_rate=0.9),
    "often nobody, predictable": ACFLSettings(straggler_rate=0.9, predictable=True),
    "often nobody, horizon": ACFLSettings(straggler_rate=0.9, alpha="horizon"),
    "often nobody, bounds": ACFLSettings(straggler_rate=0.9, **BOUNDS),
    "non-adaptive": ACFLSettings(alpha=0.5),
    "uncoded": ACFLSettings(alpha=0, straggler_rate=0.4),
    "coded only": ACFLSettings(alpha=1.0),
    "stragglers ignored": ACFLSettings(alpha=0, assumed_rate=0),
    "ideal": ACFLSettings(alpha=0, straggler_rate=0),
    "another rate assumed": ACFLSettings(assumed_rate=0.5),
    "silent devices": ACFLSettings(silent=2, straggler_rate=0, assumed_rate=0.3),
    "silent and straggling": ACFLSettings(silent=2),
    "SCFL": ACFLSettings(alpha=0.5, encoding="scfl", sigma1_sq=0.1, sigma2_sq=0),
    "SCFL with noise on labels": ACFLSettings(
        alpha=0.5, encoding="scfl", sigma1_sq=0.1, sigma2_sq=0.1
    ),
}
ROUNDS, RIDGE = 40, 0.5
SEED = 2  # at a rate of 0.9 nobody answers in its first three rounds


@cache
def together(kind: str) -> ACFLTrainingCurve:
    data = small(kind)
    settings = list(SETTINGS.values())
    return simulate(data, settings, rounds=ROUNDS, steps=falling(data), seed=SEED, ridge=RIDGE)


@pytest.mark.parametrize("kind", ["heterogeneous", "paper"])
@pytest.mark.parametrize("name", SETTINGS)
def test_all_settings_at_once_train_as_each_does_plainly(name: str, kind: str) -> None:
    data, row = small(kind), list(SETTINGS).index(name)
    losses, weights, W = plainly(
        data, SETTINGS[name], rounds=ROUNDS, steps=falling(data), seed=SEED, ridge=RIDGE
    )
    curve = together(kind)
    assert np.linalg.norm(curve.models[row] - W) <= 1e-12 * np.linalg.norm(W)
    assert np.abs(curve.losses[row] - losses).max() <= 1e-12 * max(losses)
    pairs = np.stack([curve.coded[row], curve.received[row]], axis=1)
    np.testing.assert_allclose(pairs, weights, rtol=1e-12, atol=1e-15)


def test_blocks_of_rounds_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    data, settings = small(), [ACFLSettings(), ACFLSettings(straggler_rate=0.4, alpha=0)]
    whole = simulate(data, settings, rounds=25, steps=falling(data), seed=1)
    # Of a round and stream: A, R, A^2, A R, |R|^2, and the number.
    values = 2 * (4 * 4 + 4 * 3) + 2
    monkeypatch.setattr(
        "flwr_privacy.simulations.research.acfl.numpy_simulation._BLOCK", 7 * values * 2
    )
    parts = simulate(data, settings, rounds=25, steps=falling(data), seed=1)
    np.testing.assert_allclose(parts.excess, whole.excess, rtol=1e-12)


# -- What is drawn ------------------------------------------------------------------------------


def test_settings_meet_the_same_stragglers_and_the_same_noise() -> None:
    data = small()
    few, many = (
        stragglers(data, ACFLSettings(straggler_rate=rate), rounds=500, seed=0)
        for rate in (0.2, 0.4)
    )
    assert not (many & ~few).any()
    # Standard error of the share that answered, of 3000: 0.009.
    assert abs(many.mean() - 0.6) < 4 * 0.009
    assert not stragglers(data, ACFLSettings(silent=2), rounds=9, seed=0)[:, :2].any()
    one, four = (coded_set(data, ACFLSettings(**noise(s)), seed=0) for s in (1.0, 4.0))
    exact = coded_set(data, ACFLSettings(**noise(0)), seed=0)
    for part in range(2):
        np.testing.assert_allclose(four[part] - exact[part], 2 * (one[part] - exact[part]))


def test_the_summed_noise_has_the_variance_of_all_devices() -> None:
    data = small()
    sets = [coded_set(data, ACFLSettings(sigma1_sq=2.0, sigma2_sq=0.5), seed=n) for n in range(500)]
    for part, exact, s in (
        ("features", data.curvature, 2.0),
        ("labels", data.cross.sum(axis=0), 0.5),
    ):
        apart = np.array([getattr(one, part) - exact for one in sets])
        squares = np.sum(apart**2, axis=(1, 2)) / (data.devices * s)
        degrees = exact.size
        assert abs(squares.mean() - degrees) < 4 * math.sqrt(2 * degrees / len(sets))


def test_the_projected_set_is_without_bias_and_has_the_error_of_its_formula() -> None:
    data, s = small(), 0.2
    setting = ACFLSettings(alpha=0.5, encoding="scfl", sigma1_sq=s, sigma2_sq=0)
    pairs = list(zip(data.features, data.labels, strict=True))
    true = sum(gradient(X, Y, data.start) for X, Y in pairs)
    found = np.array(
        [moments_gradient(coded_set(data, setting, seed=n), data.start) for n in range(2000)]
    )
    errors = found - true
    standard = errors.std(axis=0, ddof=1) / math.sqrt(len(found))
    assert (np.abs(errors.mean(axis=0)) < 4 * standard).all()
    squares = np.sum(errors**2, axis=(1, 2))
    expected = projected_mse(pairs, data.start, c=4, s=s)
    assert abs(squares.mean() - expected) < 4 * squares.std(ddof=1) / math.sqrt(len(found))


def test_the_scenes_are_what_they_are_said_to_be() -> None:
    data = paper_data(0)
    assert data.features.shape == data.labels.shape == (100, 100, 10)
    # The mean square of uniform features is 1/3: A is near 10^4 / 3 I.
    assert abs(np.trace(data.curvature) / 10 / (1e4 / 3) - 1) < 0.02
    assert data.least_loss < 1e-20
    assert loss(data, data.start) == pytest.approx(rehearsed_start(data), rel=1e-9)
    for entries in (data.start, data.best):
        assert entries.min() > 0 - 1e-12
        assert entries.max() < 1 / 30 + 1e-12
    apart = heterogeneous_data(0)
    gradients = apart.gram @ apart.best - apart.cross
    assert np.abs(gradients.sum(axis=0)).max() < 1e-10
    assert (np.linalg.norm(gradients, axis=(1, 2)) > 1).all()
    assert apart.convexity == pytest.approx(np.linalg.eigvalsh(apart.curvature).min())
    assert (paper_data(1).features != data.features).all()


def rehearsed_start(data: ACFLSyntheticData) -> float:
    curve = simulate(data, [ACFLSettings()], rounds=1, steps=PAPER_STEPS, seed=0)
    return float(curve.losses[0, 0])


# -- Facts --------------------------------------------------------------------------------------


def test_F9_without_noise_the_coded_data_are_all_that_is_needed() -> None:
    data = heterogeneous_data(0)
    exact = coded_set(data, ACFLSettings(**noise(0)), seed=0)
    for W in (data.start, data.best, np.ones(data.start.shape)):
        true = sum(gradient(X, Y, W) for X, Y in zip(data.features, data.labels, strict=True))
        np.testing.assert_allclose(moments_gradient(exact, W), true, rtol=1e-10, atol=1e-11)
    settings = [
        ACFLSettings(alpha=0, straggler_rate=0),
        *(ACFLSettings(straggler_rate=p, **noise(0)) for p in (0.2, 0.4, 0.95)),
        ACFLSettings(silent=19, straggler_rate=0, assumed_rate=0.95, **noise(0)),
    ]
    curve = simulate(data, settings, rounds=100, steps=falling(data), seed=0)
    assert (curve.coded[1:] == 1).all()
    assert (curve.received[1:] == 0).all()
    for model in curve.models[1:]:
        np.testing.assert_allclose(model, curve.models[0], rtol=1e-9)


def test_F10_without_stragglers_it_is_gradient_descent_whatever_the_noise() -> None:
    data = heterogeneous_data(0)
    steps = falling(data)
    settings = [ACFLSettings(straggler_rate=0, **noise(s)) for s in (0.01, 1.0, 1e6)]
    curve = simulate(data, settings, rounds=100, steps=steps, seed=0)
    assert (curve.coded == 0).all()
    assert (curve.received == 1).all()
    W = data.start
    for t in range(1, 101):
        W = W - steps.at(t) * (data.curvature @ W - data.cross.sum(axis=0))
    for model in curve.models:
        np.testing.assert_allclose(model, W, rtol=1e-9)


def test_F11_rounds_without_an_answer() -> None:
    data = small()
    setting = ACFLSettings(straggler_rate=0.9)
    came = stragglers(data, setting, rounds=ROUNDS, seed=SEED).sum(axis=1)
    first = int(np.flatnonzero(came)[0])
    assert first == 3
    later = np.flatnonzero((came == 0) & (np.arange(ROUNDS) > first))
    curve = simulate(data, [setting], rounds=ROUNDS, steps=falling(data), seed=SEED)
    assert (curve.excess[0, : first + 1] == curve.excess[0, 0]).all()
    assert np.isnan(curve.coded[0, :first]).all()
    assert np.isfinite(curve.coded[0, first:]).all()
    assert (curve.coded[0, later] > 0).all()
    # Nobody at all: only weights that need no estimate do anything.
    nobody = {"silent": data.devices, "straggler_rate": 0, "assumed_rate": 0.999999}
    settings = [
        ACFLSettings(**nobody),
        ACFLSettings(alpha=1.0, **nobody),
        ACFLSettings(**BOUNDS, **nobody),
    ]
    curve = simulate(data, settings, rounds=ROUNDS, steps=falling(data), seed=SEED)
    assert (curve.models[0] == data.start).all()
    assert np.isfinite(curve.excess).all()
    assert (curve.models[1:] != data.start).all()


def test_F13_a_constant_weight_settles_where_the_frozen_noise_puts_it() -> None:
    data, alpha = heterogeneous_data(0), 0.5
    setting = ACFLSettings(alpha=alpha, straggler_rate=0.4, **noise(0.1))
    coded = coded_set(data, setting, seed=0)
    cross = data.cross.sum(axis=0)
    settles = coded_fixed_point(
        data.curvature,
        cross,
        coded.features - data.curvature,
        coded.labels - cross,
        alpha,
    )
    steps = StepSize(1 / (3 * data.convexity), "shifted", 3)
    curve = simulate(data, [setting], rounds=20_000, steps=steps, seed=0)
    model = curve.models[0]
    assert np.linalg.norm(model - settles) < 0.02 * np.linalg.norm(settles)
    assert np.linalg.norm(model - data.best) > 5 * np.linalg.norm(model - settles)
    apart = settles - data.best
    excess = np.sum(apart * (data.curvature @ apart)) / 2
    assert curve.excess[0, -1] == pytest.approx(excess, rel=0.05)


@cache
def on_the_papers_data() -> tuple[dict[tuple[float, str], Array], dict[float, Array]]:
    """Return the last losses by seed, and ACFL's weights, for p of 0.2 and 0.4."""
    settings: dict[tuple[float, str], ACFLSettings] = {}
    for p in (0.2, 0.4):
        rate = {"straggler_rate": p}
        settings[p, "ideal"] = ACFLSettings(alpha=0, straggler_rate=0)
        settings[p, "uncoded"] = ACFLSettings(alpha=0, **rate)
        settings[p, "coded"] = ACFLSettings(alpha=1.0, **rate)
        for s in (0.01, 1.0, 10.0):
            settings[p, f"ACFL {s:g}"] = ACFLSettings(**rate, **noise(s))
            settings[p, f"NA {s:g}"] = ACFLSettings(alpha=0.5, **rate, **noise(s))
    curves = [
        simulate(
            paper_data(seed), list(settings.values()), rounds=1000, steps=PAPER_STEPS, seed=seed
        )
        for seed in range(20)
    ]
    losses = np.array([curve.losses[:, -1] for curve in curves])
    weights = np.mean([curve.coded for curve in curves], axis=0)
    rows = {p: weights[list(settings).index((p, "ACFL 1"))] for p in (0.2, 0.4)}
    return dict(zip(settings, losses.T, strict=True)), rows


def less(first: Array, second: Array, errors: float = 4.0) -> bool:
    """Tell whether the mean difference over the seeds is that many standard errors below 0."""
    differences = first - second
    error = differences.std(ddof=1) / math.sqrt(len(differences))
    return bool(differences.mean() < -errors * error)


@pytest.mark.parametrize("p", [0.2, 0.4])
def test_F14_the_order_on_the_papers_data(p: float) -> None:
    # Over 20 seeds: over 10 of them the ratio to NA has a standard error of about 0.02.
    losses, weights = on_the_papers_data()
    acfl, uncoded = losses[p, "ACFL 1"], losses[p, "uncoded"]
    assert not less(acfl, losses[p, "ideal"])
    assert less(acfl, losses[p, "NA 1"])
    assert less(losses[p, "NA 1"], losses[p, "coded"])
    assert abs(acfl.mean() / losses[p, "NA 1"].mean() - 0.32) < 0.06
    assert abs(acfl.mean() / uncoded.mean() - 1) < 0.01
    assert losses[p, "NA 10"].mean() > 15 * losses[p, "NA 0.01"].mean()
    assert abs(losses[p, "ACFL 10"].mean() / losses[p, "ACFL 0.01"].mean() - 1) < 0.05
    first, last = weights[p][0], weights[p][-1]
    assert first > 0.04
    assert last < 1e-3
    assert (np.diff(weights[p][::100]) < 0).all()


def test_F15_the_order_at_equal_epsilon() -> None:
    levels = (0.1, 1.0, 5.0, 10.0)
    settings = {(0.0, "uncoded"): ACFLSettings(alpha=0)}
    for eps in levels:
        own = noise(sigma2_for_eps(eps, 10, 10))
        settings[eps, "ACFL"] = ACFLSettings(**own)
        settings[eps, "NA"] = ACFLSettings(alpha=0.5, **own)
        settings[eps, "SCFL"] = ACFLSettings(
            alpha=0.5, encoding="scfl", sigma1_sq=sigma2_for_eps_projected(eps, 10), sigma2_sq=0
        )
    rows = np.array(
        [
            simulate(
                paper_data(seed),
                list(settings.values()),
                rounds=1000,
                steps=PAPER_STEPS,
                seed=seed,
            ).losses[:, -1]
            for seed in range(10)
        ]
    )
    losses = dict(zip(settings, rows.T, strict=True))
    for eps in levels:
        assert less(losses[eps, "ACFL"], losses[eps, "NA"])
        assert less(losses[eps, "ACFL"], losses[eps, "SCFL"])
        assert abs(losses[eps, "ACFL"].mean() / losses[0, "uncoded"].mean() - 1) < 0.01
    # SCFL's floor is the projection: less noise does not help any more.
    assert losses[10.0, "SCFL"].mean() == pytest.approx(losses[5.0, "SCFL"].mean(), rel=0.01)


def test_F18_on_devices_that_differ_the_adaptive_weight_has_a_floor() -> None:
    settings = [
        ACFLSettings(straggler_rate=0.4, **noise(0.1)),
        ACFLSettings(straggler_rate=0.4, alpha=0),
        ACFLSettings(straggler_rate=0.4, alpha="horizon", **noise(0.1)),
        ACFLSettings(straggler_rate=0.4, alpha=0.5, **noise(0.1)),
    ]
    rows = []
    for seed in range(3):
        data = heterogeneous_data(seed)
        curve = simulate(data, settings, rounds=5000, steps=falling(data), seed=seed)
        rows.append(curve.excess[:, [10, 1000, 5000]])
    acfl, uncoded, horizon, half = np.mean(rows, axis=0)
    assert abs(acfl[2] / acfl[1] - 1) < 0.05
    assert uncoded[1] > 3 * uncoded[2]
    assert horizon[1] > 3 * horizon[2]
    assert acfl[2] > half[2] > 10 * uncoded[2]
    assert acfl[0] < uncoded[0]


def test_silent_devices_are_what_the_coded_data_are_for() -> None:
    settings = [
        ACFLSettings(silent=4, straggler_rate=0, assumed_rate=0.2, alpha=alpha, **noise(0.1))
        for alpha in ("estimated", 1.0, 0.5, "horizon", 0)
    ]
    rows = np.array(
        [
            simulate(data, settings, rounds=1000, steps=falling(data), seed=seed).excess[:, -1]
            for seed in range(6)
            for data in [heterogeneous_data(seed)]
        ]
    )
    for better, worse in zip(rows.T[:-1], rows.T[1:], strict=True):
        assert less(better, worse, errors=2.0)


def test_a_setting_that_diverges_leaves_the_others_alone() -> None:
    data = paper_data(0)
    fine = ACFLSettings()
    wild = ACFLSettings(alpha=1.0, **noise(1e9))
    steps = StepSize(1e-4)
    both = simulate(data, [fine, wild], rounds=2000, steps=steps, seed=0)
    alone = simulate(data, [fine], rounds=2000, steps=steps, seed=0)
    assert not np.isfinite(both.excess[1, -1])
    np.testing.assert_allclose(both.excess[0], alone.excess[0], rtol=1e-12)


# -- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"alpha": "estimatd"}, "alpha = 'estimatd'.*nearest: 'estimated'"),
        ({"alpha": 1.1}, "alpha = 1.1"),
        ({"alpha": "bounds"}, "gradient_bound = None"),
        ({"straggler_rate": 1.0}, "straggler_rate = 1.0: expected a number of at least 0"),
        ({"assumed_rate": -0.1}, "assumed_rate = -0.1"),
        ({"sigma1_sq": -1.0}, "sigma1_sq = -1.0"),
        ({"sigma2_sq": math.inf}, "sigma2_sq = inf"),
        ({"silent": -1}, "silent = -1"),
        ({"encoding": "scfl"}, "alpha = 'estimated': expected a number for encoding = 'scfl'"),
        ({"encoding": "mds"}, "encoding = 'mds'"),
    ],
)
def test_a_bad_setting_is_refused_by_name(values: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        replace(ACFLSettings(), **values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"settings": []}, "settings = "),
        ({"rounds": 0}, "rounds = 0"),
        ({"ridge": -1.0}, "ridge = -1.0"),
        ({"settings": [ACFLSettings(silent=7)]}, "silent = 7: expected an integer from 0 to 6"),
    ],
)
def test_a_bad_rehearsal_is_refused_by_name(values: dict[str, object], text: str) -> None:
    usual: dict[str, object] = {"settings": [ACFLSettings()], "rounds": 1, "steps": StepSize(1.0)}
    with pytest.raises(InvalidParameterError, match=text):
        simulate(small(), seed=0, **{**usual, **values})


@pytest.mark.parametrize(
    ("part", "shape", "text"),
    [
        ("features", (6, 12), r"features = \(6, 12\)"),
        ("features", (0, 12, 4), "features"),
        ("labels", (6, 11, 3), r"labels = .*\(6, 12, o\)"),
        ("start", (3, 4), r"start = .*\(4, 3\)"),
    ],
)
def test_a_scene_whose_shapes_do_not_fit_is_refused(
    part: str, shape: tuple[int, ...], text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        replace(small(), **{part: np.zeros(shape)})


def test_a_scene_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="m = 0"):
        paper_data(0, m=0)
