"""The NumPy simulation of ACFL: that it is the strategy and its clients, and facts of trainings."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from acfl_app import keep_models, model_after, name_of, run
from apps import make
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import gradient
from flwr_privacy.acfl.steps import StepSize
from flwr_privacy.clients import acfl_client_app
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.numpy_simulation import (
    ACFLTrainingCurve,
    RandomStragglers,
    SimulatedACFL,
    of_seed,
)
from flwr_privacy.simulations.research.acfl.scfl import projected_mse
from flwr_privacy.simulations.research.acfl.synthetic_data import (
    ACFLSyntheticData,
    heterogeneous_data,
    paper_data,
)
from flwr_privacy.simulations.research.acfl.theory import coded_fixed_point
from flwr_privacy.strategies import ACFL

Array = NDArray[np.float64]

PAPER_STEPS = {"learning_rate": 1e-4, "schedule": "inverse"}


def falling(data: ACFLSyntheticData) -> dict[str, Any]:
    """Return the steps 1 / (lambda (t + 3))."""
    return {"learning_rate": 1 / (3 * data.convexity), "schedule": "shifted", "shift": 3.0}


def small() -> ACFLSyntheticData:
    return heterogeneous_data(3, N=6, m=12, d=4, o=3)


def keys(*, seed: int = 0, rate: float = 0.2, silent: int = 0, **options: Any) -> dict[str, Any]:
    """Return the keys of a strategy; ``s`` is the variance of all noise, by default 1."""
    s = options.pop("s", 1.0)
    if "noise" not in options:
        options["noise"] = "variances" if s else "none"
    if options["noise"] == "variances":
        options["sigma1_sq"] = s
        if options.get("encoding") != "scfl":
            options["sigma2_sq"] = s
    usual = {"straggler_rate": rate, "max_records": 100, "label_bound": 4.0, "learning_rate": 0.02}
    return {**usual, **options, **of_seed(seed, rate=rate, silent=silent)}


def train(data: ACFLSyntheticData, *, rounds: int, **options: Any) -> ACFLTrainingCurve:
    return make(SimulatedACFL, **keys(**options)).simulate(data, rounds=rounds)


# -- It is the strategy and its clients ---------------------------------------------------------


ROUNDS = 12
SEED = 7  # at a rate of 0.9 nobody answers in its first rounds
BOUNDS = {"alpha": "bounds", "gradient_bound": 2.0, "model_bound": 0.5}
METHODS: dict[str, dict[str, Any]] = {
    "ACFL": {},
    "ACFL, other noise": {"s": 0.3, "rate": 0.4},
    "ACFL, paper's level": {"noise": "paper", "mi_epsilon": 5.0},
    "ACFL, without noise": {"s": 0.0},
    "ACFL, predictable": {"predictable": True, "rate": 0.4},
    "ACFL, bounds": BOUNDS,
    "ACFL, horizon": {"alpha": "horizon", "rate": 0.4, "s": 0.1},
    "ACFL, estimated rate": {"straggler_rate": None, "rate": 0.4},
    "ACFL, another rate": {"straggler_rate": 0.5},
    "ACFL, silent devices": {"silent": 2, "rate": 0.0, "straggler_rate": 0.3},
    "ACFL, often nobody": {"rate": 0.9},
    "ACFL, often nobody, predictable": {"rate": 0.9, "predictable": True},
    "ACFL, often nobody, bounds": {"rate": 0.9, **BOUNDS},
    "ACFL, symmetric noise": {"symmetric_noise": True},
    "ACFL, symmetrised": {"symmetrize": True},
    "ACFL, own step": {"learning_rate": None, "ridge": 0.5},
    "ACFL, projected": {"project": True, "model_bound": 0.4},
    "NA": {"alpha": 0.5},
    "SCFL": {"alpha": 0.5, "encoding": "scfl", "s": 0.1},
    "SCFL, paper's level": {"alpha": 0.5, "encoding": "scfl", "noise": "paper", "mi_epsilon": 1.0},
    "uncoded": {"alpha": 0.0, "rate": 0.4},
    "stragglers ignored": {"alpha": 0.0, "straggler_rate": 0.0},
    "everybody answers": {"alpha": 0.0, "rate": 0.0},
    "coded only": {"alpha": 1.0},
}


@pytest.mark.parametrize("method", METHODS)
def test_it_is_the_training_of_the_inline_engine(method: str) -> None:
    """Same seed: planned noise, coded data, stragglers, weights and models, round by round."""
    data, options = small(), keys(seed=SEED, **METHODS[method])
    simulated = make(SimulatedACFL, **options)
    curve = simulated.simulate(data, rounds=ROUNDS)
    strategy, models = make(ACFL, **options), []

    def data_of(context: Any) -> tuple[Array, Array]:
        row = int(name_of(context))
        return data.features[row], data.labels[row]

    result = run(
        strategy,
        acfl_client_app(data_of),
        start=data.start,
        nodes=data.devices,
        num_rounds=ROUNDS,
        insecure_seed=SEED,
        evaluate_fn=keep_models(models),
    )
    assert simulated.state_dict()["setup"] == strategy.state_dict()["setup"]
    if strategy.coded is not None:
        for ours, theirs in zip(simulated.coded, strategy.coded, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    lines = result.history[1:]
    if not strategy.weighting.coded_only:
        law = options["loop"].stragglers
        here = [law.answered(data.devices, seed=SEED, server_round=t) for t in range(1, ROUNDS + 1)]
        assert [line["accumulated"] for line in lines] == np.sum(here, axis=1).tolist()
    for ours, name in ((curve.coded, "alpha"), (curve.received, "received_weight")):
        theirs = [line["scheme"].get(name, math.nan) for line in lines]
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(curve.model, model_after(result), rtol=0, atol=1e-9)
    losses = [loss(data, W) for W in models]
    np.testing.assert_allclose(curve.losses, losses, rtol=1e-9)


def test_some_rounds_of_these_have_no_answer() -> None:
    law = RandomStragglers(rate=0.9)
    came = [law.answered(6, seed=SEED, server_round=t).sum() for t in range(1, ROUNDS + 1)]
    first = next(t for t, count in enumerate(came) if count)
    assert first > 0
    assert 0 in came[first:]


def loss(data: ACFLSyntheticData, W: Array) -> float:
    return sum(
        float(np.sum((X @ W - Y) ** 2)) / 2 for X, Y in zip(data.features, data.labels, strict=True)
    )


# -- What is drawn ------------------------------------------------------------------------------


def test_trainings_of_a_seed_meet_the_same_stragglers() -> None:
    few, many, silent = (
        np.array([law.answered(6, seed=0, server_round=t) for t in range(1, 501)])
        for law in (RandomStragglers(), RandomStragglers(rate=0.4), RandomStragglers(silent=2))
    )
    assert not (many & ~few).any()
    # Standard error of the share that answered, of 3000: 0.009.
    assert abs(many.mean() - 0.6) < 4 * 0.009
    assert not silent[:, :2].any()
    np.testing.assert_array_equal(silent[:, 2:], few[:, 2:])


def coded(data: ACFLSyntheticData, **options: Any) -> Any:
    """Return the global coded data set of a simulated setup."""
    training = make(SimulatedACFL, **keys(**options))
    training.simulate(data, rounds=1)
    return training._set_up.coded


def test_the_summed_noise_has_the_variance_of_all_devices() -> None:
    data, s = small(), 0.5
    sets = [coded(data, seed=n, s=s).moments for n in range(200)]
    for part, exact in (("features", data.curvature), ("labels", data.cross.sum(axis=0))):
        apart = np.array([getattr(one, part) - exact for one in sets])
        squares = np.sum(apart**2, axis=(1, 2)) / (data.devices * s)
        degrees = exact.size
        assert abs(squares.mean() - degrees) < 4 * math.sqrt(2 * degrees / len(sets))


def test_the_projected_set_is_without_bias_and_has_the_error_of_its_formula() -> None:
    data, s = small(), 0.2
    pairs = list(zip(data.features, data.labels, strict=True))
    true = sum(gradient(X, Y, data.start) for X, Y in pairs)
    scfl = {"alpha": 0.5, "encoding": "scfl", "s": s}
    found = np.array([coded(data, seed=n, **scfl).gradient(data.start) for n in range(500)])
    errors = found - true
    standard = errors.std(axis=0, ddof=1) / math.sqrt(len(found))
    assert (np.abs(errors.mean(axis=0)) < 4 * standard).all()
    squares = np.sum(errors**2, axis=(1, 2))
    expected = projected_mse(pairs, data.start, c=4, s=s)
    assert abs(squares.mean() - expected) < 4 * squares.std(ddof=1) / math.sqrt(len(found))


def test_the_data_are_what_they_are_said_to_be() -> None:
    data = paper_data(0)
    assert data.features.shape == data.labels.shape == (100, 100, 10)
    # The mean square of uniform features is 1/3: A is near 10^4 / 3 I.
    assert abs(np.trace(data.curvature) / 10 / (1e4 / 3) - 1) < 0.02
    assert data.least_loss < 1e-20
    curve = train(data, rounds=1, alpha=0.0, **PAPER_STEPS)
    assert curve.losses[0] == pytest.approx(loss(data, data.start), rel=1e-9)
    for entries in (data.start, data.best):
        assert entries.min() > 0 - 1e-12
        assert entries.max() < 1 / 30 + 1e-12
    apart = heterogeneous_data(0)
    gradients = apart.gram @ apart.best - apart.cross
    assert np.abs(gradients.sum(axis=0)).max() < 1e-10
    assert (np.linalg.norm(gradients, axis=(1, 2)) > 1).all()
    assert apart.convexity == pytest.approx(np.linalg.eigvalsh(apart.curvature).min())
    assert (paper_data(1).features != data.features).all()


# -- Facts --------------------------------------------------------------------------------------


def test_F9_without_noise_the_coded_data_are_all_that_is_needed() -> None:
    data = heterogeneous_data(0)
    exact = coded(data, s=0.0)
    for W in (data.start, data.best, np.ones(data.start.shape)):
        true = sum(gradient(X, Y, W) for X, Y in zip(data.features, data.labels, strict=True))
        np.testing.assert_allclose(exact.gradient(W), true, rtol=1e-10, atol=1e-11)
    steps = falling(data)
    ideal = train(data, rounds=100, alpha=0.0, rate=0.0, **steps)
    for options in (
        *({"rate": p} for p in (0.2, 0.4, 0.8)),
        {"silent": 19, "rate": 0.0, "straggler_rate": 0.95},
    ):
        curve = train(data, rounds=100, s=0.0, **steps, **options)
        assert (curve.coded == 1).all()
        assert (curve.received == 0).all()
        np.testing.assert_allclose(curve.model, ideal.model, rtol=1e-9)


def test_F10_without_stragglers_it_is_gradient_descent_whatever_the_noise() -> None:
    data = heterogeneous_data(0)
    steps = StepSize(1 / (3 * data.convexity), "shifted", 3)
    W = data.start
    for t in range(1, 101):
        W = W - steps.at(t) * (data.curvature @ W - data.cross.sum(axis=0))
    for s in (0.01, 1.0, 1e6):
        curve = train(data, rounds=100, rate=0.0, s=s, **falling(data))
        assert (curve.coded == 0).all()
        assert (curve.received == 1).all()
        np.testing.assert_allclose(curve.model, W, rtol=1e-9)


def test_F11_rounds_without_an_answer() -> None:
    data, rounds = small(), 40
    law = RandomStragglers(rate=0.9)
    came = np.array([law.answered(6, seed=SEED, server_round=t + 1).sum() for t in range(rounds)])
    first = int(np.flatnonzero(came)[0])
    later = np.flatnonzero((came == 0) & (np.arange(rounds) > first))
    curve = train(data, rounds=rounds, seed=SEED, rate=0.9, **falling(data))
    assert (curve.excess[: first + 1] == curve.excess[0]).all()
    assert np.isnan(curve.coded[:first]).all()
    assert np.isfinite(curve.coded[first:]).all()
    assert (curve.coded[later] > 0).all()
    # Nobody at all: only weights that need no estimate do anything.
    nobody = {"silent": data.devices, "rate": 0.0, "straggler_rate": 0.999999}
    for own, moves in (({}, False), ({"alpha": 1.0}, True), (BOUNDS, True)):
        curve = train(data, rounds=rounds, **nobody, **falling(data), **own)
        assert (curve.model != data.start).all() if moves else (curve.model == data.start).all()
        assert np.isfinite(curve.excess).all()


def test_F13_a_constant_weight_settles_where_the_frozen_noise_puts_it() -> None:
    data, alpha = heterogeneous_data(0), 0.5
    options = {"alpha": alpha, "rate": 0.4, "s": 0.1}
    noisy, cross = coded(data, **options).moments, data.cross.sum(axis=0)
    settles = coded_fixed_point(
        data.curvature, cross, noisy.features - data.curvature, noisy.labels - cross, alpha
    )
    curve = train(data, rounds=20_000, **options, **falling(data))
    assert np.linalg.norm(curve.model - settles) < 0.02 * np.linalg.norm(settles)
    away = np.linalg.norm(curve.model - data.best)
    assert away > 5 * np.linalg.norm(curve.model - settles)
    assert curve.excess[-1] == pytest.approx(data.excess(settles), rel=0.05)


@cache
def on_the_papers_data(p: float) -> tuple[dict[str, Array], Array]:
    """Return the last losses by seed, and ACFL's mean weights."""
    methods: dict[str, dict[str, Any]] = {
        "ideal": {"alpha": 0.0, "rate": 0.0},
        "uncoded": {"alpha": 0.0, "rate": p},
        "coded": {"alpha": 1.0, "rate": p},
    }
    for s in (0.01, 1.0, 10.0):
        methods[f"ACFL {s:g}"] = {"rate": p, "s": s}
        methods[f"NA {s:g}"] = {"alpha": 0.5, "rate": p, "s": s}
    losses: dict[str, list[float]] = {name: [] for name in methods}
    weights = []
    for seed in range(10):
        data = paper_data(seed)
        for name, options in methods.items():
            curve = train(data, rounds=1000, seed=seed, **options, **PAPER_STEPS)
            losses[name].append(curve.losses[-1])
            if name == "ACFL 1":
                weights.append(curve.coded)
    return {name: np.array(own) for name, own in losses.items()}, np.mean(weights, axis=0)


def less(first: Array, second: Array, errors: float = 4.0) -> bool:
    """Tell whether the mean difference over the seeds is that many standard errors below 0."""
    differences = first - second
    error = differences.std(ddof=1) / math.sqrt(len(differences))
    return bool(differences.mean() < -errors * error)


@pytest.mark.long
@pytest.mark.parametrize("p", [0.2, 0.4])
def test_F14_the_order_on_the_papers_data(p: float) -> None:
    losses, weights = on_the_papers_data(p)
    acfl, uncoded = losses["ACFL 1"], losses["uncoded"]
    assert not less(acfl, losses["ideal"])
    assert less(acfl, losses["NA 1"])
    assert less(losses["NA 1"], losses["coded"])
    # The ratio has a standard error of about 0.02.
    assert abs(acfl.mean() / losses["NA 1"].mean() - 0.32) < 0.08
    assert abs(acfl.mean() / uncoded.mean() - 1) < 0.01
    assert losses["NA 10"].mean() > 15 * losses["NA 0.01"].mean()
    assert abs(losses["ACFL 10"].mean() / losses["ACFL 0.01"].mean() - 1) < 0.05
    assert weights[0] > 0.04
    assert weights[-1] < 1e-3
    assert (np.diff(weights[::100]) < 0).all()


@pytest.mark.long
def test_F15_the_order_at_equal_epsilon() -> None:
    levels = (0.1, 1.0, 5.0, 10.0)
    methods: dict[Any, dict[str, Any]] = {"uncoded": {"alpha": 0.0}}
    for eps in levels:
        own = {"noise": "paper", "mi_epsilon": eps, "label_bound": 1.0}
        methods[eps, "ACFL"] = own
        methods[eps, "NA"] = {"alpha": 0.5, **own}
        methods[eps, "SCFL"] = {"alpha": 0.5, "encoding": "scfl", **own}
    losses: dict[Any, list[float]] = {name: [] for name in methods}
    for seed in range(6):
        data = paper_data(seed)
        for name, options in methods.items():
            curve = train(data, rounds=1000, seed=seed, **options, **PAPER_STEPS)
            losses[name].append(curve.losses[-1])
    last = {name: np.array(own) for name, own in losses.items()}
    for eps in levels:
        assert less(last[eps, "ACFL"], last[eps, "NA"])
        assert less(last[eps, "ACFL"], last[eps, "SCFL"])
        assert abs(last[eps, "ACFL"].mean() / last["uncoded"].mean() - 1) < 0.01
    # SCFL's floor is the projection: less noise does not help any more.
    assert last[10.0, "SCFL"].mean() == pytest.approx(last[5.0, "SCFL"].mean(), rel=0.01)


def test_F18_on_devices_that_differ_the_adaptive_weight_has_a_floor() -> None:
    rows = []
    for seed in range(3):
        data = heterogeneous_data(seed)
        usual = {"seed": seed, "rate": 0.4, "s": 0.1, **falling(data)}
        rows.append(
            [
                train(data, rounds=5000, **usual, **own).excess[[10, 1000, 5000]]
                for own in ({}, {"alpha": 0.0}, {"alpha": "horizon"}, {"alpha": 0.5})
            ]
        )
    acfl, uncoded, horizon, half = np.mean(rows, axis=0)
    assert abs(acfl[2] / acfl[1] - 1) < 0.05
    assert uncoded[1] > 3 * uncoded[2]
    assert horizon[1] > 3 * horizon[2]
    assert acfl[2] > half[2] > 10 * uncoded[2]
    assert acfl[0] < uncoded[0]


def test_silent_devices_are_what_the_coded_data_are_for() -> None:
    rows = np.array(
        [
            [
                train(
                    data,
                    rounds=1000,
                    seed=seed,
                    **{"silent": 4, "rate": 0.0, "straggler_rate": 0.2, "s": 0.1, "alpha": alpha},
                    **falling(data),
                ).excess[-1]
                for alpha in ("estimated", 1.0, 0.5, "horizon", 0.0)
            ]
            for seed in range(6)
            for data in [heterogeneous_data(seed)]
        ]
    )
    for better, worse in zip(rows.T[:-1], rows.T[1:], strict=True):
        assert less(better, worse, errors=2.0)


def test_a_training_that_diverges_ends() -> None:
    curve = train(paper_data(0), rounds=2000, alpha=1.0, s=1e9, learning_rate=1e-4)
    last = int(np.flatnonzero(np.isfinite(curve.excess))[-1])
    assert 1 < last < 2000
    assert np.isinf(curve.excess[last + 1 :]).all()
    assert np.isnan(curve.coded[last:]).all()


# -- Bad input ----------------------------------------------------------------------------------


def test_data_beyond_the_bounds_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="Y = 'a value outside'"):
        train(small(), rounds=1, label_bound=0.1)
    with pytest.raises(InvalidParameterError, match="max_records = 11"):
        train(small(), rounds=1, max_records=11)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rate": 1.0}, "rate = 1.0: expected a number of at least 0"),
        ({"silent": -1}, "silent = -1"),
    ],
)
def test_bad_stragglers_are_refused_by_name(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        RandomStragglers(**values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rounds": 0}, "rounds = 0"),
        ({"silent": 7}, "silent = 7: expected an integer from 0 to 6"),
        ({"noise": "record"}, "privacy = 'an option that is not simulated'"),
        ({"straggler_rate": {str(row): 0.1 for row in range(6)}}, "straggler_rate"),
        ({"batch_fraction": 0.5}, "batch_fraction"),
        ({"fraction_train": 0.5}, "fraction_train"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        train(small(), **{"rounds": 1, **values})


def test_a_simulation_without_its_stragglers_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"loop = .*expected that of `of_seed`"):
        make(SimulatedACFL, noise="none", alpha=0.0, learning_rate=1.0).simulate(small(), rounds=1)


@pytest.mark.parametrize(
    ("part", "shape", "text"),
    [
        ("features", (6, 12), r"features = \(6, 12\)"),
        ("features", (0, 12, 4), "features"),
        ("labels", (6, 11, 3), r"labels = .*\(6, 12, o\)"),
        ("start", (3, 4), r"start = .*\(4, 3\)"),
    ],
)
def test_data_whose_shapes_do_not_fit_are_refused(
    part: str, shape: tuple[int, ...], text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        replace(small(), **{part: np.zeros(shape)})


def test_data_of_nothing_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="m = 0"):
        paper_data(0, m=0)
