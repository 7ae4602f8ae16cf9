"""The facts of ACFL's specification on the weights, row by row, and what a policy remembers."""

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flwr_privacy.acfl.encoding import encode, gradient, moments_gradient
from flwr_privacy.acfl.weights import (
    AlphaPolicy,
    Weights,
    alpha_bounds,
    alpha_estimated,
    alpha_horizon,
    coded_energy,
    device_weights,
    stable_weights,
)
from flwr_privacy.errors import InvalidParameterError

PROBABILITIES = st.floats(0, 1)
ENERGIES = st.one_of(st.just(0.0), st.floats(1e-12, 1e12))


def close(value: float | tuple[float, ...], expected: Any, rel: float = 1e-12) -> bool:
    return value == pytest.approx(expected, rel=rel, abs=1e-14)


# The formulas


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.2, 20, 0.04, 1, 1, 10, 10), (0.04743833, 1.19070209)),
        ((0.1, 100, 1, 1, 1, 100, 10), (0.01, 1.1)),
        ((0.5, 5, 1, 0.5, 0.5, 2, 2), (0.625, 0.75)),
        ((0, 5, 1, 1, 1, 2, 2), (0, 1)),
        ((0.3, 5, 1, 0, 0, 2, 2), (1, 0)),
        ((1, 5, 1, 1, 1, 2, 2), (1, 1.2)),
        ((0.4, 0, 1, 1, 1, 2, 2), (0, 1.66666667)),
    ],
)
def test_F4_weights(values: tuple[Any, ...], expected: tuple[float, float]) -> None:
    a, w = alpha_estimated(*values)
    p = values[0]
    assert close((a, w), expected, rel=1e-7)
    assert close(a + (1 - p) * w, 1.0)
    assert 0 <= a <= 1
    if p < 1:
        assert close(w, (1 - a) / (1 - p))


def test_F4_how_the_weight_moves() -> None:
    usual = {"p": 0.2, "beta2": 20.0, "C2": 0.04, "s1": 1.0, "s2": 1.0, "d": 10, "o": 10}

    def weight(**changes: float) -> float:
        return alpha_estimated(**{**usual, **changes}).coded  # type: ignore[arg-type]

    for name in ("p", "beta2"):
        assert weight(**{name: 2 * usual[name]}) > weight() > weight(**{name: usual[name] / 2})
    for name in ("s1", "s2", "C2"):
        assert weight(**{name: 2 * usual[name]}) < weight() < weight(**{name: usual[name] / 2})


@given(PROBABILITIES, ENERGIES, ENERGIES, ENERGIES)
def test_the_gradient_is_unbiased_whatever_the_energies(
    p: float, beta2: float, D: float, noise: float
) -> None:
    a, w = stable_weights(p, beta2, D, gradient_noise=noise)
    assert 0 <= a <= 1
    assert w >= 0
    assert math.isfinite(w)
    if p < 1:
        assert close(a + (1 - p) * w, 1.0)
        assert close(w, (1 - a) / (1 - p), rel=1e-4 / (1 - p) if a > 0.5 else 1e-12)
    else:  # all weight is on the coded data, whatever has come; if there is an error to weigh
        assert a == (1 if beta2 + noise > 0 else 0)


@given(st.floats(0, 0.99), ENERGIES, ENERGIES, ENERGIES)
def test_the_weights_minimise_the_error_of_a_round(
    p: float, beta2: float, D: float, noise: float
) -> None:
    assume(beta2 + D + noise > 0)

    def error(a: Any) -> Any:
        return (1 - a) ** 2 * (p * beta2 + noise) / (1 - p) + a**2 * D

    found = error(stable_weights(p, beta2, D, gradient_noise=noise).coded)
    assert found <= error(np.linspace(0, 1, 1001)).min() * (1 + 1e-12)


def test_the_error_that_they_minimise_is_that_of_all_masks() -> None:
    rng = np.random.default_rng(0)
    p, N, D, noise = 0.3, 4, 2.5, 0.75
    G = rng.normal(size=(N, 6))
    squares = float(np.mean(np.sum(G**2, axis=1)))

    def error(a: float, w: float) -> float:
        total = 0.0
        for mask in itertools.product((0, 1), repeat=N):
            chance = math.prod(1 - p if one else p for one in mask)
            missed = (w * np.array(mask) + a - 1) @ G
            total += chance * (float(missed @ missed) + w**2 * noise * sum(mask) + a**2 * N * D)
        return total

    best = stable_weights(p, squares, D, gradient_noise=noise)
    least = error(*best)
    expected = (1 - best.coded) ** 2 * (p * squares + noise) / (1 - p) + best.coded**2 * D
    assert close(least, N * expected)
    for a in np.linspace(0, 1, 101):
        assert error(a, (1 - a) / (1 - p)) >= least * (1 - 1e-12)
    for shift in (-1e-3, 1e-3):  # and of no other pair that is unbiased
        a = best.coded + shift
        assert error(a, (1 - a) / (1 - p)) > least


def test_coded_energy_is_the_energy_of_the_noise_in_the_gradient() -> None:
    rng = np.random.default_rng(1)
    d, o, s1, s2, draws = 3, 2, 0.5, 0.2, 20000
    X, Y, W = rng.normal(size=(4, d)), rng.normal(size=(4, o)), rng.normal(size=(d, o))
    C2 = float(np.sum(W**2))
    clean = X.T @ (X @ W - Y)
    N1 = rng.normal(0, math.sqrt(s1), (draws, d, d))
    N2 = rng.normal(0, math.sqrt(s2), (draws, d, o))
    halved = (N1 + N1.transpose(0, 2, 1)) / 2
    mirrored = np.array(
        [
            moments_gradient(encode(X, Y, s1, s2, rng, symmetric=True), W) - clean
            for _ in range(draws)
        ]
    )
    for found, symmetrised in ((N1 @ W - N2, False), (mirrored, False), (halved @ W - N2, True)):
        energies = np.sum(found**2, axis=(1, 2))
        expected = coded_energy(C2, s1, s2, d, o, symmetrised=symmetrised)
        assert abs(energies.mean() - expected) < 4 * energies.std() / math.sqrt(draws)
    assert coded_energy(C2, s1, s2, d, o) == pytest.approx(d * s1 * C2 + o * d * s2)
    assert coded_energy(math.inf, 0.0, s2, d, o) == o * d * s2  # a model that diverged
    assert coded_energy(math.inf, s1, s2, d, o) == math.inf


# The edges, as the specification's table has them

ENERGY = coded_energy(1.0, 1.0, 1.0, 2, 2)
HUGE, TINY = 1e308, 5e-324


@pytest.mark.parametrize(
    ("p", "beta2", "D", "expected"),
    [
        (0.0, 5.0, ENERGY, (0.0, 1.0)),
        (0.0, 5.0, 0.0, (0.0, 1.0)),
        (0.0, 0.0, 0.0, (0.0, 1.0)),
        (0.3, 5.0, 0.0, (1.0, 0.0)),
        (0.4, 0.0, ENERGY, (0.0, 1 / 0.6)),
        (0.4, 0.0, 0.0, (0.0, 1 / 0.6)),
        (1.0, 5.0, ENERGY, (1.0, ENERGY / 5)),
        (1.0, 0.0, 0.0, (0.0, 1.0)),
        (1.0, 0.0, ENERGY, (0.0, 1.0)),
        (0.5, math.inf, 1.0, (0.0, 2.0)),
        (0.5, 1.0, math.inf, (0.0, 2.0)),
        (0.5, math.nan, 1.0, (0.0, 2.0)),
        (0.5, 1.0, math.nan, (0.0, 2.0)),
        (1.0, math.inf, 1.0, (0.0, 1.0)),
        (0.5, HUGE, HUGE, (0.5, 1.0)),
        (0.5, TINY, TINY, (0.5, 1.0)),
        (0.5, TINY, HUGE, (0.0, 2.0)),
        (0.5, HUGE, TINY, (1.0, 0.0)),
        (1.0, TINY, HUGE, (0.0, 1.0)),
    ],
)
def test_edges(p: float, beta2: float, D: float, expected: tuple[float, float]) -> None:
    assert stable_weights(p, beta2, D) == pytest.approx(expected, rel=1e-15, abs=0)


def test_F11_a_probability_close_to_one_gives_finite_weights() -> None:
    for p in (0.999999, 1 - 2**-53):
        a, w = alpha_estimated(p, 20, 0.04, 1, 1, 10, 10)
        assert 0 < 1 - a < 1e-4
        assert w == pytest.approx(coded_energy(0.04, 1, 1, 10, 10) / 20, rel=1e-3)


@given(ENERGIES, ENERGIES)
def test_F10_without_stragglers_the_coded_data_are_not_used(beta2: float, D: float) -> None:
    assert stable_weights(0.0, beta2, D) == (0.0, 1.0)


@given(st.floats(1e-3, 1), st.floats(1e-6, 1e6))
def test_F9_without_noise_only_the_coded_data_are_used(p: float, beta2: float) -> None:
    assert stable_weights(p, beta2, 0.0) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("fact", "rate", "variance", "masks"),
    [
        ("F9", 0.4, 0.0, [(1, 0, 0), (0, 1, 1), (0, 0, 0), (1, 1, 1)]),
        ("F10", 0.0, 25.0, [(1, 1, 1)] * 4),
    ],
    ids=["F9 no noise", "F10 no stragglers"],
)
def test_F9_F10_the_gradient_is_the_full_one_without_noise_or_stragglers(
    fact: str, rate: float, variance: float, masks: list[tuple[int, ...]]
) -> None:
    rng = np.random.default_rng(2)
    X, Y = rng.uniform(-1, 1, (3, 6, 3)), rng.uniform(-1, 1, (3, 6, 2))
    coded = [encode(x, y, variance, variance, rng) for x, y in zip(X, Y, strict=True)]
    policy = AlphaPolicy("estimated", straggler_rate=rate)
    W = rng.normal(size=(3, 2))
    for t, mask in enumerate(masks, start=1):
        G = np.array([gradient(x, y, W) for x, y in zip(X, Y, strict=True)])
        came = np.array(mask)
        weights = policy.weigh(
            t=t,
            answered=sum(mask),
            devices=3,
            squares=float(came @ np.sum(G**2, axis=(1, 2))),
            energy=coded_energy(float(np.sum(W**2)), variance, variance, 3, 2),
        )
        assert weights == ((1.0, 0.0) if fact == "F9" else (0.0, 1.0))
        assert weights is not None
        total = weights.coded * sum(moments_gradient(c, W) for c in coded)
        total = total + weights.received * np.einsum("i,ijk->jk", came, G)
        np.testing.assert_allclose(total, G.sum(axis=0), rtol=1e-12)
        W -= 0.05 * total


@pytest.mark.parametrize(
    ("p", "beta2", "D", "noise"),
    [(-0.1, 1, 1, 0), (1.1, 1, 1, 0), (0.5, -1, 1, 0), (0.5, 1, -1, 0), (0.5, 1, 1, -1)],
)
def test_what_is_no_probability_or_energy_is_refused(
    p: float, beta2: float, D: float, noise: float
) -> None:
    with pytest.raises(InvalidParameterError):
        stable_weights(p, beta2, D, gradient_noise=noise)


# The other weights


@given(st.floats(0, 0.99), st.integers(1, 1000), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_the_weight_of_known_bounds_is_the_same_formula(
    p: float, N: int, beta2: float, C2: float
) -> None:
    expected = alpha_estimated(p, beta2, C2, 0.5, 0.25, 2, 1).coded
    assert close(alpha_bounds(p, N, beta2, C2, 0.5, 0.25, 2, 1), expected)


def test_the_weight_for_a_horizon_is_least_for_the_sum_of_both_errors() -> None:
    values = (0.2, 20.0, 0.04, 1.0, 1.0, 10, 10)
    D = coded_energy(*values[2:])
    assert alpha_horizon(*values, 1) == alpha_estimated(*values)
    for t in (2, 17, 1000):
        a, w = alpha_horizon(*values, t)
        assert close(a + 0.8 * w, 1.0)
        grid = np.linspace(0, 1, 100001)
        errors = (1 - grid) ** 2 * 0.2 * 20 / 0.8 / t + grid**2 * D
        assert abs(grid[errors.argmin()] - a) < 2e-5


def test_F21_devices_with_their_own_rates() -> None:
    rates, squares = (0.2, 0.5), (1.0, 9.0)
    S = sum(p / (1 - p) * square for p, square in zip(rates, squares, strict=True))
    assert close(S, 9.25)
    a, w = device_weights(S, 2.0)
    assert close(a, 0.8222222, rel=1e-7)
    assert close(w, 1 - a)
    assert device_weights(0.0, 0.0) == (0.0, 1.0)
    assert device_weights(math.inf, 1.0) == (0.0, 1.0)


def test_F21_what_came_estimates_the_error_without_bias() -> None:
    rates, squares, N = {"x": 0.2, "y": 0.5}, (1.0, 9.0), 2
    mean = 0.0
    for mask in itertools.product((0, 1), repeat=N):
        chance = math.prod(1 - p if one else p for one, p in zip(mask, rates.values(), strict=True))
        seen = sum(
            one * p / (1 - p) ** 2 * square
            for one, p, square in zip(mask, rates.values(), squares, strict=True)
        )
        policy = AlphaPolicy("estimated", straggler_rate=rates)
        weights = policy.weigh(t=1, answered=sum(mask), devices=N, squares=seen, energy=1.0)
        if sum(mask) == 0:
            assert weights is None
            continue
        assert weights is not None
        assert close(weights, (seen / (seen + N), N / (seen + N)))
        assert policy.beta2 is not None
        mean += chance * policy.beta2 * N
    assert close(mean, 9.25)


# Policies


def weigh(policy: AlphaPolicy, t: int = 1, **changes: Any) -> Weights | None:
    usual = {"answered": 2, "devices": 4, "squares": 10.0, "energy": 3.0}
    return policy.weigh(t=t, **{**usual, **changes})


def test_policies_give_the_weights_of_their_formulas() -> None:
    bounds = {"gradient_bound": 3.0, "model_bound": 2.0}
    assert weigh(AlphaPolicy("estimated", straggler_rate=0.3)) == stable_weights(0.3, 5, 3)
    assert weigh(AlphaPolicy("bounds", straggler_rate=0.3, **bounds)) == stable_weights(0.3, 9, 3)
    horizon = AlphaPolicy("horizon", straggler_rate=0.3)
    assert [weigh(horizon, t=t) for t in (1, 7)] == [
        stable_weights(0.3, 5, 3),
        stable_weights(0.3, 5, 21),
    ]
    for alpha in (0, 0.5, 1):
        fixed = AlphaPolicy(alpha, straggler_rate=0.3)
        assert weigh(fixed) == (alpha, pytest.approx((1 - alpha) / 0.7))
    assert weigh(AlphaPolicy(0, straggler_rate=0)) == (0.0, 1.0)


@pytest.mark.parametrize("policy", ["estimated", "bounds", "horizon"])
def test_policies_count_the_noise_of_the_gradients(policy: str) -> None:
    bounds = {"gradient_bound": math.sqrt(5), "model_bound": 2.0}
    single = AlphaPolicy(policy, straggler_rate=0.3, **bounds)
    found = weigh(single, gradient_noise=0.5)
    assert found == pytest.approx(stable_weights(0.3, 5, 3, gradient_noise=0.5))
    assert found is not None
    assert close(found.coded + 0.7 * found.received, 1.0)


def test_squares_below_zero_count_as_none() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=0.3)
    assert weigh(policy, squares=-4.0, gradient_noise=2.0) == stable_weights(
        0.3, 0.0, 3.0, gradient_noise=2.0
    )
    assert policy.beta2 == 0


@pytest.mark.parametrize("policy", ["estimated", "bounds", "horizon", 0.25])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_equal_rates_of_the_devices_are_one_rate(policy: str | float, noise: float) -> None:
    p, squares, N = 0.3, 10.0, 4
    options: dict[str, Any] = {"gradient_bound": 2.0, "model_bound": 1.0}
    one = AlphaPolicy(policy, straggler_rate=p, **options)
    each = AlphaPolicy(policy, straggler_rate=dict.fromkeys("abcd", p), **options)
    changes = {"answered": N, "gradient_noise": noise, "t": 3}
    expected = weigh(one, squares=squares, **changes)
    found = weigh(each, squares=p / (1 - p) * squares, **changes)
    assert expected is not None
    assert found is not None
    assert close(found.coded, expected.coded)
    assert close(found.received / (1 - p), expected.received)
    assert one.rate == p
    assert each.rate is None


def test_F11_a_round_without_an_answer_uses_the_last_estimate() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=0.25)
    empty = {"answered": 0, "squares": 0.0}
    assert weigh(policy, 1, **empty) is None
    assert weigh(policy, 2) == stable_weights(0.25, 5.0, 3.0)
    assert weigh(policy, 3, energy=4.0, **empty) == stable_weights(0.25, 5.0, 4.0)
    assert policy.beta2 == 5.0


def test_F11_weights_that_need_no_estimate_are_there_without_an_answer() -> None:
    empty = {"answered": 0, "squares": 0.0}
    assert weigh(AlphaPolicy(0.5, straggler_rate=0.2), **empty) == (0.5, 0.625)
    bounds = AlphaPolicy("bounds", straggler_rate=0.2, gradient_bound=2, model_bound=1)
    assert weigh(bounds, **empty) == stable_weights(0.2, 4, 3)


@pytest.mark.parametrize(
    ("predictable", "expected", "mean"),
    [(False, [2.222222, 4.615385, 2.4, 5.777778], 3.753846), (True, None, 4.0)],
)
def test_F12_an_estimate_of_the_same_round_biases_the_gradient(
    predictable: bool, expected: list[float] | None, mean: float
) -> None:
    G, found = np.array([1.0, 3.0]), []
    for mask in itertools.product((0, 1), repeat=2):
        policy = AlphaPolicy("estimated", straggler_rate=0.5, predictable=predictable)
        policy.weigh(t=1, answered=2, devices=2, squares=10.0, energy=4.0)  # beta2 is 5
        came = np.array(mask)
        weights = policy.weigh(
            t=2, answered=sum(mask), devices=2, squares=float(came @ G**2), energy=4.0
        )
        assert weights is not None
        found.append(weights.coded * 4 + weights.received * float(came @ G))
    if expected is not None:
        assert found == pytest.approx(expected, abs=5e-7)
    assert np.mean(found) == pytest.approx(mean, abs=5e-7)


def test_a_predictable_policy_looks_back_one_round() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=0.25, predictable=True)
    assert weigh(policy, 1, answered=0, squares=0.0) is None
    assert weigh(policy, 2, squares=10.0) == stable_weights(0.25, 5.0, 3.0)  # has only its own
    assert weigh(policy, 3, squares=30.0) == stable_weights(0.25, 5.0, 3.0)
    assert weigh(policy, 4, answered=0, squares=0.0) == stable_weights(0.25, 15.0, 3.0)
    assert weigh(policy, 5, squares=2.0) == stable_weights(0.25, 15.0, 3.0)


def test_an_unknown_rate_is_estimated_from_all_rounds() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=None)
    assert policy.rate is None
    for t, (answered, rate) in enumerate([(4, 0.0), (2, 0.25), (3, 0.25), (0, 7 / 16)], start=1):
        found = weigh(policy, t, answered=answered, squares=5.0 * answered)
        assert policy.rate == pytest.approx(rate)
        assert found == pytest.approx(stable_weights(rate, 5.0, 3.0))


def test_an_unknown_rate_leaves_one_device_at_least() -> None:
    policy = AlphaPolicy(0.5, straggler_rate=None)
    assert weigh(policy, answered=0, squares=0.0) == (0.5, 2.0)
    assert policy.rate == 0.75
    alone = AlphaPolicy(0.5, straggler_rate=None)
    assert weigh(alone, devices=1, answered=0, squares=0.0) == (0.5, 0.5)


def test_a_predictable_rate_is_that_of_the_rounds_before() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=None, predictable=True)
    rates = []
    for t, answered in enumerate((2, 4, 0), start=1):
        weigh(policy, t, answered=answered, squares=5.0 * answered)
        rates.append(policy.rate)
    assert rates == [0.5, 0.5, 0.25]


@pytest.mark.parametrize("predictable", [False, True])
@pytest.mark.parametrize("rate", [None, 0.25, {"a": 0.1, "b": 0.4, "c": 0.4, "d": 0.0}])
def test_a_policy_goes_on_from_its_state(
    rate: float | Mapping[str, float] | None, predictable: bool
) -> None:
    def fresh() -> AlphaPolicy:
        return AlphaPolicy("estimated", straggler_rate=rate, predictable=predictable)

    whole, first = fresh(), fresh()
    rounds = [(2, 9.0), (0, 0.0), (3, 4.0), (0, 0.0), (4, 1.0)]
    for t, (answered, squares) in enumerate(rounds[:2], start=1):
        for policy in (whole, first):
            weigh(policy, t, answered=answered, squares=squares)
    second = fresh()
    second.load(json.loads(json.dumps(first.state())))
    assert second.rate == whole.rate
    assert second.beta2 == whole.beta2
    for t, (answered, squares) in enumerate(rounds[2:], start=3):
        expected = weigh(whole, t, answered=answered, squares=squares)
        assert weigh(second, t, answered=answered, squares=squares) == expected


@pytest.mark.parametrize(
    ("policy", "changes", "name"),
    [
        ("adaptive", {}, "alpha"),
        (1.1, {}, "alpha"),
        (-0.1, {}, "alpha"),
        (True, {}, "alpha"),
        (None, {}, "alpha"),
        ("estimated", {"straggler_rate": 1.0}, "straggler_rate"),
        ("estimated", {"straggler_rate": -0.1}, "straggler_rate"),
        ("estimated", {"straggler_rate": {"a": 0.5, "b": 1.0}}, "straggler_rate"),
        ("estimated", {"straggler_rate": {}}, "straggler_rate"),
        ("bounds", {}, "gradient_bound"),
        ("bounds", {"gradient_bound": 1.0}, "model_bound"),
        ("bounds", {"gradient_bound": 0.0, "model_bound": 1.0}, "gradient_bound"),
        ("estimated", {"model_bound": -1.0}, "model_bound"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} = "):
        AlphaPolicy(policy, **{"straggler_rate": 0.2, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"t": 0}, {"answered": 5}, {"answered": -1}, {"devices": 0}, {"energy": -1.0}],
)
def test_a_round_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        weigh(AlphaPolicy("estimated", straggler_rate=0.2), **changes)
