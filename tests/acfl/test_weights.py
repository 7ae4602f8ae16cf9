"""The facts of ACFL's specification on the weights, row by row."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flwr_privacy.acfl.encoding import gradient, moments_gradient
from flwr_privacy.acfl.weights import AlphaPolicy, coded_energy, device_weights, stable_weights
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.theory import (
    alpha_bounds,
    alpha_estimated,
    alpha_horizon,
    encode,
)

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
    assert close(a + (1 - p) * w, 1.0) or p == 1
    # In rational numbers nothing cancels; below, floats have no such number.
    q, square, v, coded = (Fraction(x) for x in (p, beta2, noise, D))
    total = q * square + v + (1 - q) * coded
    if total > 1e-250:
        assert close((a, w), (float((q * square + v) / total), float(coded / total)))
    elif total == 0:
        assert (a, w) == (0, 1 / (1 - p) if p < 1 else 1)


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


@pytest.mark.parametrize(
    "change", [{"C2": -1.0}, {"s1": -0.1}, {"s2": -0.1}, {"d": 0}, {"o": 0}], ids=str
)
def test_an_energy_of_no_noise_or_of_no_data_is_refused(change: dict[str, Any]) -> None:
    name, value = next(iter(change.items()))
    with pytest.raises(InvalidParameterError, match=f"{name} = {value}: expected"):
        coded_energy(**{"C2": 0.5, "s1": 0.5, "s2": 0.2, "d": 2, "o": 1, **change})


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
