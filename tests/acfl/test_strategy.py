"""ACFL's two halves together: the paper's algorithm and its variants."""

import itertools
from typing import Any

import numpy as np
import pytest
from acfl_app import (
    FEATURES,
    GOLDEN,
    GOLDEN_NOISE,
    LABELS,
    NOISED_RECORDS,
    NOISY,
    Array,
    data_of,
    descend,
    keep_models,
    late,
    model_after,
    name_of,
    of_phase,
    run,
    set_noise,
)
from apps import make
from flwr.app import Message
from flwr.serverapp.strategy import FedAvgM
from grid_tap import tapped

from flwr_privacy.clients import acfl_client_app
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import ACFL, Exact

DEVICES = [data_of(i) for i in range(4)]
A = sum(X.T @ X for X, _ in DEVICES)
B = sum(X.T @ Y for X, Y in DEVICES)
GOLDEN_APP = acfl_client_app(lambda context: GOLDEN[name_of(context)])


def gradients(W: Array) -> list[Array]:
    return [X.T @ (X @ W - Y) for X, Y in DEVICES]


def lose(client: int | str, **where: Any) -> Fault:
    """A reply that is refused at once: who sends it is as good as late."""
    return Fault(kind="nan", client=str(client), **where)


# -- The algorithm as it is printed --------------------------------------------------------------

ONE = {"beta2": 1.125, "alpha": 0.2941176471, "received_weight": 0.9411764706}
BOTH = {"beta2": 1.4765625, "alpha": 0.3535353535, "received_weight": 0.8619528620}
SLOW = {"stragglers": late({1: "1"})}


@pytest.mark.parametrize(
    ("options", "faults", "line", "total", "model"),
    [
        (SLOW, [], ONE, [-1.09558824, -1.26470588], [0.60955882, -0.37352941]),
        ({}, [lose(1)], ONE, [-1.09558824, -1.26470588], [0.60955882, -0.37352941]),
        ({}, [], BOTH, [-1.76136364, -2.28787879], [0.67613636, -0.27121212]),
        ({**SLOW, "alpha": 0.5}, [], {"alpha": 0.5}, [-1.1625, -1.45], [0.61625, -0.355]),
    ],
    ids=["one is late", "one is refused", "both answer", "not adaptive"],
)
def test_F7_golden_round(
    options: Any, faults: Any, line: Any, total: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_noise(monkeypatch, GOLDEN_NOISE, (0.5, 0.2))
    printed = {"noise": "variances", "sigma1_sq": 0.5, "sigma2_sq": 0.2, "max_records": 3}
    strategy = make(ACFL, **printed, straggler_rate=0.25, learning_rate=0.1, **options)
    start = np.array([[0.5], [-0.5]])
    options = {"start": start, "nodes": 2, "num_rounds": 1, "faults": faults}
    result = run(strategy, GOLDEN_APP, **options)
    assert strategy.coded is not None
    np.testing.assert_allclose(strategy.coded.features, [[2.55, 0.9], [1.3, 3.0]], atol=1e-6)
    np.testing.assert_allclose(strategy.coded.labels, [[2.15], [1.05]], atol=1e-6)
    scheme = result.history[1]["scheme"]
    expected = {"C2": 0.5, "energy": 0.9, "step": 0.1, "members": 2, **line}
    assert {key: scheme[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    moved = (start - model_after(result)) / 0.1
    np.testing.assert_allclose(moved[:, 0], total, atol=1e-6)
    np.testing.assert_allclose(model_after(result)[:, 0], model, atol=1e-6)


ANSWERED = [(0, 1, 3), (2,), (0, 1, 2, 3), (), (1, 3), (0, 2, 3)]
MISSING = {t: [str(i) for i in range(4) if i not in r] for t, r in enumerate(ANSWERED, 1)}


@pytest.mark.parametrize(
    ("options", "p", "fixed"),
    [
        ({"straggler_rate": 0.3}, 0.3, None),
        ({"straggler_rate": 0.9}, 0.9, None),
        ({"straggler_rate": 0.3, "alpha": 0.5}, 0.3, 0.5),
        ({"straggler_rate": 0.3, "alpha": 0.0}, 0.3, 0.0),
        ({"straggler_rate": 0.3, "alpha": 1.0}, 0.3, 1.0),
        ({"straggler_rate": 0.0, "alpha": 0.0}, 0.0, 0.0),
    ],
    ids=["adaptive", "adaptive 0.9", "not adaptive", "rescaled", "coded only", "ignored"],
)
def test_each_setting_trains_as_the_formulas_say(options: Any, p: float, fixed: Any) -> None:
    models: list[Array] = []
    strategy = make(
        ACFL,
        **NOISY,
        **options,
        learning_rate=0.02,
        schedule="inverse",
        stragglers=late(MISSING),
        seed=1,
    )
    run(strategy, num_rounds=6, evaluate_fn=keep_models(models))
    noise: Any = (0.0, 0.0)
    if strategy.coded is not None:
        noise = strategy.coded.features - A, strategy.coded.labels - B
        assert np.abs(noise[0]).min() > 1e-4
    expected = descend(
        models[0],
        DEVICES,
        ANSWERED,
        p=p,
        s1=0.4,
        s2=0.1,
        noise=noise,
        step=lambda t: 0.02 / t,
        alpha=fixed,
    )
    assert (strategy.coded is None) == (fixed == 0)
    np.testing.assert_allclose(models, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "slow", [{}, {1: "01", 2: "0123", 4: "2"}, dict.fromkeys(range(1, 7), "0")]
)
def test_F9_without_noise_it_is_the_ideal_run_whoever_straggles(slow: Any) -> None:
    options = {"noise": "none", "straggler_rate": 0.4, "learning_rate": 0.02}
    result = run(make(ACFL, **options, stragglers=late(slow)), num_rounds=6)
    everybody = [range(4)] * 6
    zeros = np.zeros((FEATURES, LABELS))
    ideal = descend(zeros, DEVICES, everybody, p=0.0, step=lambda t: 0.02, alpha=0.0)
    np.testing.assert_allclose(model_after(result), ideal[6], rtol=1e-12)
    last = result.history[6]["scheme"]
    assert (last["alpha"], last["received_weight"], last["energy"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("rate", [0.0, None])
def test_F10_if_all_answer_the_coded_data_are_not_used(rate: float | None) -> None:
    options = {**NOISY, "sigma1_sq": 1e4, "sigma2_sq": 1e4, "straggler_rate": rate}
    result = run(make(ACFL, **options, learning_rate=0.02), num_rounds=5)
    zeros = np.zeros((FEATURES, LABELS))
    ideal = descend(zeros, DEVICES, [range(4)] * 5, p=0.0, step=lambda t: 0.02, alpha=0.0)
    np.testing.assert_allclose(model_after(result), ideal[5], rtol=1e-12)
    for line in result.history[1:]:
        assert (line["scheme"]["alpha"], line["scheme"]["received_weight"]) == (0.0, 1.0)


@pytest.mark.parametrize("p", [0.4, 0.999999])
def test_F11_a_round_without_answers_takes_the_coded_data_and_the_last_estimate(p: float) -> None:
    models: list[Array] = []
    options = {**NOISY, "straggler_rate": p, "learning_rate": 0.02}
    strategy = make(ACFL, **options, stragglers=late({2: "0123"}))
    result = run(strategy, num_rounds=3, evaluate_fn=keep_models(models))
    first, second = (line["scheme"] for line in result.history[1:3])
    beta2 = np.mean([(G**2).sum() for G in gradients(models[0])])
    assert first["beta2"] == second["beta2"] == pytest.approx(beta2)
    D = 3 * 0.4 * (models[1] ** 2).sum() + 2 * 3 * 0.1
    assert second["alpha"] == pytest.approx(p * beta2 / (p * beta2 + (1 - p) * D))
    assert strategy.coded is not None
    coded = strategy.coded.features @ models[1] - strategy.coded.labels
    np.testing.assert_allclose(models[2], models[1] - 0.02 * second["alpha"] * coded, rtol=1e-9)
    assert not result.history[2]["skipped"]
    assert np.isfinite(models).all()


def test_F11_before_the_first_answer_the_model_stays() -> None:
    models: list[Array] = []
    strategy = make(ACFL, **NOISY, straggler_rate=0.4, stragglers=late({1: "0123", 2: "0123"}))
    result = run(strategy, num_rounds=3, evaluate_fn=keep_models(models))
    assert [line["skipped"] for line in result.history[1:]] == [True, True, False]
    np.testing.assert_array_equal(models[2], models[0])
    assert "beta2" not in result.history[2]["scheme"]
    assert np.abs(models[3] - models[2]).max() > 0.01


@pytest.mark.parametrize(
    ("predictable", "expected"),
    [(False, [2.22222222, 4.61538462, 2.4, 5.77777778]), (True, None)],
)
def test_F12_weights_of_this_rounds_answers_are_biased_those_of_the_last_are_not(
    predictable: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices with gradients 1 and 3; a first round with tiny steps shows beta2 = 5."""
    data = {"0": ([[1.0]], [[-0.5]]), "1": ([[1.0], [1.0]], [[-1.0], [-1.0]])}
    app = acfl_client_app(lambda context: data[name_of(context)])
    set_noise(monkeypatch, {}, (8.0, 2.0))
    rate, found = 1e-9, []
    options = {"sigma1_sq": 8.0, "sigma2_sq": 2.0, "straggler_rate": 0.5, "learning_rate": rate}
    for came in itertools.product((False, True), repeat=2):
        models: list[Array] = []
        run(
            make(ACFL, noise="variances", max_records=2, predictable=predictable, **options),
            app,
            start=np.array([[0.5]]),
            nodes=2,
            num_rounds=2,
            faults=[lose(i, server_round=2) for i, here in enumerate(came) if not here],
            evaluate_fn=keep_models(models),
        )
        found.append(float((models[1] - models[2]).item()) / rate)
    if expected is not None:
        assert found == pytest.approx(expected, abs=1e-5)
    assert np.mean(found) == pytest.approx(4.0 if predictable else 3.753846, abs=1e-5)


# -- Variants ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": "bounds", "gradient_bound": 3.0, "model_bound": 0.5},
        {"alpha": "horizon"},
        {"predictable": True},
    ],
    ids=["bounds", "horizon", "predictable"],
)
def test_the_other_policies(options: Any) -> None:
    """(36), the weight of section 7.2, and (43) with the estimate of the round before."""
    p, models = 0.3, []
    slow = late({1: "2", 2: "01", 3: "3"})
    strategy = make(ACFL, **NOISY, **options, straggler_rate=p, learning_rate=0.02, stragglers=slow)
    result = run(strategy, num_rounds=4, evaluate_fn=keep_models(models))
    lines = [line["scheme"] for line in result.history[1:]]
    for t, line in enumerate(lines, start=1):
        D = 3 * 0.4 * (models[t - 1] ** 2).sum() + 2 * 3 * 0.1
        missing = p * line["beta2"] / (1 - p)
        if "horizon" in options.values():
            D *= t
        elif "predictable" in options:
            missing = p * lines[max(t - 2, 0)]["beta2"] / (1 - p)
        else:
            missing, D = p * 3.0**2 / (1 - p), 3 * 0.4 * 0.5**2 + 2 * 3 * 0.1
        assert line["alpha"] == pytest.approx(missing / (missing + D))
        assert line["received_weight"] == pytest.approx((1 - line["alpha"]) / (1 - p))


def test_each_client_has_its_own_rate() -> None:
    """F21: S = sum I p / (1 - p)^2 |G|^2 and a = S / (S + N D)."""
    rates = {"0": 0.2, "1": 0.5, "2": 0.0, "3": 0.4}
    strategy = make(
        ACFL, **NOISY, straggler_rate=rates, learning_rate=0.02, stragglers=late({1: "3"})
    )
    result = run(strategy, num_rounds=1)
    G = gradients(np.zeros((FEATURES, LABELS)))
    S = sum(rates[str(i)] / (1 - rates[str(i)]) ** 2 * (G[i] ** 2).sum() for i in range(3))
    a = S / (S + 4 * 2 * 3 * 0.1)
    assert strategy.coded is not None
    total = (1 - a) * sum(G[i] / (1 - rates[str(i)]) for i in range(3)) - a * strategy.coded.labels
    assert result.history[1]["scheme"]["alpha"] == pytest.approx(a)
    np.testing.assert_allclose(model_after(result), -0.02 * total, rtol=1e-9)


def test_noise_in_the_gradients_takes_weight_from_them() -> None:
    """The default: (43) with t D, and the noise of a gradient beside what its stragglers miss."""
    p, models = 0.3, []
    strategy = make(ACFL, **NOISED_RECORDS, straggler_rate=p, stragglers=late({1: "2", 2: "01"}))
    result = run(strategy, num_rounds=3, insecure_seed=3, evaluate_fn=keep_models(models))
    setup, terms = strategy._set_up.terms, strategy._terms
    noise = FEATURES * LABELS * terms.sigma**2
    for t, line in enumerate([line["scheme"] for line in result.history[1:]], start=1):
        C2 = float((models[t - 1] ** 2).sum())
        D = FEATURES * setup.sigma_features**2 * C2
        D += FEATURES * LABELS * setup.sigma_labels**2
        missing = p * line["beta2"] + noise
        # So much of it that the test would see that it is left out.
        assert noise > 0.01 * missing
        assert line["alpha"] == pytest.approx(missing / (missing + (1 - p) * t * D), rel=1e-9)
        assert line["received_weight"] == pytest.approx((1 - line["alpha"]) / (1 - p), rel=1e-9)


def test_the_rate_is_estimated_where_it_is_not_known() -> None:
    result = run(make(ACFL, **NOISY, stragglers=late({1: "0", 2: "", 3: "123"})), num_rounds=3)
    rates = [line["scheme"]["straggler_rate"] for line in result.history[1:]]
    assert rates == pytest.approx([1 / 4, 1 / 8, 1 / 3])


def test_who_is_not_drawn_counts_as_missing() -> None:
    """Half of the clients in a round: over many rounds the sum is that of all."""
    total = np.zeros((FEATURES, LABELS))
    options = {"noise": "none", "alpha": 0.0, "straggler_rate": 0.0, "learning_rate": 1.0}
    draws = 40
    for seed in range(draws):
        strategy = make(ACFL, **options, fraction_train=0.5, seed=seed)
        total -= model_after(run(strategy, num_rounds=1)) / draws
    G = np.array(gradients(total * 0))
    # Two of four without replacement, each times 2.
    error = 2 * np.sqrt(G.var(axis=0, ddof=1) * 2 * (1 - 2 / 4) / draws)
    assert (np.abs(total - G.sum(axis=0)) < 4 * error).all()


def test_step_ridge_and_projection() -> None:
    models: list[Array] = []
    options = {"noise": "none", "alpha": 0.0, "ridge": 2.0, "schedule": "shifted", "shift": 3.0}
    bounded = {"learning_rate": 0.05, "model_bound": 0.1, "project": True}
    result = run(make(ACFL, **options, **bounded), num_rounds=4, evaluate_fn=keep_models(models))
    W = models[0]
    for t in range(1, 5):
        W = W - 0.05 / (1 + t / 3) * (A @ W - B + 2.0 * W)
        W = W * min(1.0, 0.1 / np.linalg.norm(W))
        np.testing.assert_allclose(models[t], W, rtol=1e-9, atol=1e-14)
    assert result.history[4]["scheme"]["C2"] == pytest.approx(0.01)  # it was at its bound


def test_the_coded_data_tell_a_step_size() -> None:
    strategy = make(ACFL, **NOISY, ridge=1.5)
    result = run(strategy, num_rounds=1)
    assert strategy.coded is not None
    symmetric = (strategy.coded.features + strategy.coded.features.T) / 2
    largest = np.linalg.eigvalsh(symmetric).max()
    assert result.history[1]["scheme"]["step"] == pytest.approx(1 / (largest + 1.5))


@pytest.mark.parametrize(
    ("options", "values", "rows"),
    [({}, 9, 3.0), ({"symmetric_noise": True}, 6, 3.0), ({"symmetrize": True}, 9, 2.0)],
    ids=["as printed", "symmetric noise", "symmetrised"],
)
def test_symmetry(options: Any, values: int, rows: float) -> None:
    """D is d s1 C2 + o d s2, with (d + 1) / 2 for d where the server symmetrises."""
    heard: list[Message] = []
    start = np.full((FEATURES, LABELS), 0.5)
    strategy = make(ACFL, **NOISY, **options, alpha=1.0, learning_rate=0.01)
    result = run(strategy, start=start, num_rounds=1, before=tapped(said=heard.append))
    (sizes,) = {m.content["arrays"]["features"].numpy().size for m in of_phase(heard, "setup")}
    assert sizes == values
    C2 = float((start**2).sum())
    assert result.history[1]["scheme"]["energy"] == pytest.approx(rows * 0.4 * C2 + 6 * 0.1)
    assert strategy.coded is not None
    features = strategy.coded.features
    if "symmetrize" in options:
        features = (features + features.T) / 2
    np.testing.assert_allclose(
        model_after(result), start - 0.01 * (features @ start - strategy.coded.labels), rtol=1e-12
    )
    assert (np.abs(features - features.T).max() == 0) == bool(options)


def test_scfl_takes_the_gradient_of_projections_less_the_noise_it_expects() -> None:
    options = {"noise": "variances", "encoding": "scfl", "alpha": 0.5, "straggler_rate": 0.2}
    start = np.full((FEATURES, LABELS), 0.5)
    strategy = make(ACFL, **options, sigma1_sq=0.3, learning_rate=0.01, max_records=20)
    result = run(strategy, start=start, num_rounds=1)
    assert strategy.coded is not None
    X, Y = strategy.coded
    coded = X.T @ (X @ start - Y) / 3 - 4 * 0.3 * start
    total = 0.5 * coded + 0.5 / 0.8 * sum(gradients(start))
    np.testing.assert_allclose(model_after(result), start - 0.01 * total, rtol=1e-9)


def test_a_server_optimiser_of_flower_takes_the_step_over() -> None:
    options = {"noise": "none", "straggler_rate": 0.2, "learning_rate": 0.02}
    plain, inner = (
        make(ACFL, **options),
        make(ACFL, **options, inner=FedAvgM(server_learning_rate=1.0)),
    )
    np.testing.assert_allclose(
        model_after(run(plain)), model_after(run(inner)), rtol=1e-12, atol=1e-15
    )


def test_a_float32_model_stays_one() -> None:
    result = run(ACFL(privacy=Exact()), start=np.zeros((FEATURES, LABELS), np.float32))
    assert model_after(result).dtype == np.float32
    assert np.abs(model_after(result)).max() > 0.01
