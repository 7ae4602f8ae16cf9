"""The facts of ACFL's specification on bounds, the golden round, and what the noise truly does."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import Moments, gradient, moments, moments_gradient
from flwr_privacy.acfl.privacy import eps_feature, sigma2_for_eps
from flwr_privacy.acfl.weights import AlphaPolicy, coded_energy
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.theory import (
    alpha_bounds,
    alpha_estimated,
    coded_fixed_point,
    convergence_bound,
    encode,
    gradient_mse,
    optimal_second_moment_bound,
    second_moment_bound,
    uplink_bits,
)

Array = NDArray[np.float64]

F5 = {"p": 0.2, "N": 3, "beta2": 2.0, "C2": 1.5, "s1": 0.5, "s2": 0.25, "d": 2, "o": 1}
SETTINGS = st.fixed_dictionaries(
    {
        "p": st.floats(0, 0.95),
        "N": st.integers(1, 200),
        "beta2": st.floats(0.01, 100),
        "C2": st.floats(0.01, 100),
        "s1": st.floats(0.001, 100),
        "s2": st.floats(0.001, 100),
        "d": st.integers(1, 100),
        "o": st.integers(1, 20),
    }
)

# The paper's bounds


def test_F5_the_second_moment() -> None:
    assert second_moment_bound(0.5, **F5) == pytest.approx(19.875)
    assert alpha_bounds(**F5) == pytest.approx(0.2)
    assert optimal_second_moment_bound(**F5) == pytest.approx(19.2)
    assert second_moment_bound(0.2, **F5) == pytest.approx(19.2)


@given(SETTINGS)
def test_F5_the_best_weight_has_the_least_bound(values: dict[str, Any]) -> None:
    p, N, beta2 = values["p"], values["N"], values["beta2"]
    noise = N * coded_energy(values["C2"], *(values[name] for name in ("s1", "s2", "d", "o")))
    least = optimal_second_moment_bound(**values)
    assert second_moment_bound(alpha_bounds(**values), **values) == pytest.approx(least)
    for alpha in np.linspace(0, 1, 41):
        u = second_moment_bound(alpha, **values)
        simple = (N + (1 - alpha) ** 2 * p / (1 - p)) * N * beta2 + alpha**2 * noise
        assert u == pytest.approx(simple)
        assert u >= least * (1 - 1e-12)
    missing = p * N * beta2 / (1 - p)
    assert least == pytest.approx(N**2 * beta2 + missing * noise / (missing + noise))
    assert N**2 * beta2 * (1 - 1e-12) <= least <= (N**2 * beta2 + missing) * (1 + 1e-12)


FIGURE_1 = [  # eps, sigma^2, alpha, then the bound: adaptive, at 0, 0.1, 0.5, 0.9 and 1
    (1, 104.001, 9.71149e-5, 10.222201, 10.222222, 33.060175, 582.059942, 1863.296433, 2298.017544),
    (10, 9.95797, 0.00101334, 10.221997, 10.222222, 12.370754, 64.824409, 187.453306, 229.075412),
    (50, 1.62972, 0.00615982, 10.220853, 10.222222, 10.538539, 19.019022, 39.043852, 45.853864),
    (100, 0.623554, 0.0159409, 10.218680, 10.222222, 10.317182, 13.485101, 21.113949, 23.718181),
    (200, 0.173031, 0.055157, 10.209965, 10.222222, 10.218067, 11.007226, 13.085634, 13.806682),
    (500, 0.00842715, 0.545171, 10.101073, 10.222222, 10.181854, 10.101905, 10.152394, 10.185397),
    (1000, 6.98397e-05, 0.993133, 10.001526, 10.222222, 10.180015, 10.055940, 10.003467, 10.001536),
]  # fmt: skip


def test_F6_the_papers_figure_1() -> None:
    before = math.inf
    for eps, variance, weight, adaptive, *fixed in FIGURE_1:
        s = sigma2_for_eps(eps, 100, 10)
        assert s == pytest.approx(variance, rel=1e-5)
        assert eps_feature(100, 10, s, s) == pytest.approx(eps)
        values = {"p": 0.1, "N": 5, "beta2": 100, "C2": 1, "s1": s, "s2": s, "d": 100, "o": 10}
        assert alpha_bounds(**values) == pytest.approx(weight, rel=1e-5)  # type: ignore[arg-type]
        best = convergence_bound(optimal_second_moment_bound(**values), 1, 1000)  # type: ignore[arg-type]
        assert best == pytest.approx(adaptive, abs=1e-6)
        found = [
            convergence_bound(second_moment_bound(alpha, **values), 1, 1000)  # type: ignore[arg-type]
            for alpha in (0, 0.1, 0.5, 0.9, 1)
        ]
        assert found == pytest.approx(fixed, abs=2e-6)
        assert best <= min(found)
        assert 10 <= best <= 10 + 2 / 9
        assert best < before
        before = best


def test_F19_uploads() -> None:
    assert uplink_bits(100, 10, 10, 1000, 32) == (640_000, 320_000_000)
    assert uplink_bits(100, 10, 10, 1000, 32, p=0.2) == (640_000, pytest.approx(256_000_000))


@pytest.mark.parametrize(
    ("change", "name"),
    [({"p": 1.0}, "p"), ({"N": 0}, "N"), ({"beta2": -1.0}, "beta2"), ({"s1": -1.0}, "s1")],
)
def test_what_is_out_of_range_is_refused(change: dict[str, Any], name: str) -> None:
    values = {**F5, **change}
    for call in (
        lambda: second_moment_bound(0.5, **values),
        lambda: optimal_second_moment_bound(**values),
        lambda: alpha_bounds(**values),
    ):
        with pytest.raises(InvalidParameterError, match=f"^{name} = "):
            call()


# The golden round

X1, Y1 = np.array([[1, 0], [0, 1], [0.5, 0.5]]), np.array([[1], [0], [0.5]])
X2, Y2 = np.array([[0.5, -0.5], [1, 1], [0, 0.5]]), np.array([[0], [1], [-0.5]])
N1 = np.array([[[0.1, -0.2], [0.3, 0.05]], [[-0.05, 0.1], [0, 0.2]]])
N2 = np.array([[[0.2], [-0.1]], [[-0.3], [0.15]]])
W = np.array([[0.5], [-0.5]])
EXACT = [moments(X1, Y1), moments(X2, Y2)]
CODED = Moments(
    EXACT[0].features + EXACT[1].features + N1.sum(axis=0),
    EXACT[0].labels + EXACT[1].labels + N2.sum(axis=0),
)


def equal(found: Array, expected: list[float], digits: int = 8) -> bool:
    return np.allclose(found.ravel(), expected, rtol=0, atol=0.51 * 10.0**-digits)


def test_F7_golden_round_arithmetic() -> None:
    assert equal(EXACT[0].features, [1.25, 0.25, 0.25, 1.25], 12)
    assert equal(EXACT[0].labels, [1.25, 0.25], 12)
    assert equal(EXACT[1].features, [1.25, 0.75, 0.75, 1.5], 12)
    assert equal(EXACT[1].labels, [1, 0.75], 12)
    assert equal(CODED.features, [2.55, 0.9, 1.3, 3.0], 12)
    assert equal(CODED.labels, [2.15, 1.05], 12)
    G1, G2 = gradient(X1, Y1, W), gradient(X2, Y2, W)
    assert equal(G1, [-0.75, -0.75], 12)
    assert equal(G2, [-0.75, -1.125], 12)
    G_S = moments_gradient(CODED, W)
    assert equal(G_S, [-1.325, -1.9], 12)
    loss = sum(float(np.sum((X @ W - Y) ** 2)) / 2 for X, Y in ((X1, Y1), (X2, Y2)))
    assert loss == pytest.approx(1.03125, abs=1e-12)

    energy = coded_energy(float(np.sum(W**2)), 0.5, 0.2, 2, 1)
    assert energy == pytest.approx(0.9, abs=1e-12)
    rounds = [
        ("estimated", [G1], (0.2941176471, 0.9411764706), [-1.09558824, -1.26470588]),
        ("estimated", [G1, G2], (0.3535353535, 0.8619528620), [-1.76136364, -2.28787879]),
        (0.5, [G1], (0.5, 2 / 3), [-1.1625, -1.45]),
    ]
    after = [[0.60955882, -0.37352941], [0.67613636, -0.27121212], [0.61625, -0.355]]
    for (alpha, came, expected, total), expected_model in zip(rounds, after, strict=True):
        policy = AlphaPolicy(alpha, straggler_rate=0.25)
        squares = sum(float(np.sum(G**2)) for G in came)
        weights = policy.weigh(t=1, answered=len(came), devices=2, squares=squares, energy=energy)
        assert weights == pytest.approx(expected, abs=1e-10)
        assert policy.beta2 == pytest.approx(squares / len(came))
        assert weights is not None
        G_All = weights.coded * G_S + weights.received * sum(came)
        assert equal(G_All, total)
        assert equal(W - 0.1 * G_All, expected_model)


def test_F13_where_a_constant_weight_settles() -> None:
    A, B = (EXACT[0][part] + EXACT[1][part] for part in (0, 1))
    noise = N1.sum(axis=0), N2.sum(axis=0)
    assert equal(coded_fixed_point(A, B, *noise, 0.0), [0.88297872, 0.04255319])
    assert equal(coded_fixed_point(A, B, *noise, 0.5), [0.86774095, 0.00942536])
    model = W.copy()
    for _ in range(2000):  # all answer, p = 0.25: the mean of the rounds is reached exactly
        exact = A @ model - B
        model -= 0.05 * (0.5 * moments_gradient(CODED, model) + 0.5 * exact)
    assert equal(model, [0.86774095, 0.00942536])


# What the noise and the stragglers do at a fixed model


def test_F8_the_gradient_is_unbiased_and_has_the_stated_error() -> None:
    rng = np.random.default_rng(8)
    N, m, d, o, p, s1, s2, alpha = 4, 20, 3, 2, 0.3, 0.7, 0.4, 0.35
    model = rng.normal(size=(d, o))
    X, Y = rng.uniform(-1, 1, (N, m, d)), rng.uniform(-1, 1, (N, m, o))
    G = np.array([gradient(*data, model) for data in zip(X, Y, strict=True)])
    full = G.sum(axis=0)
    errors = []
    for _ in range(10):  # of 20,000 draws
        first = rng.normal(0, math.sqrt(s1), (20000, N, d, d)).sum(axis=1)
        second = rng.normal(0, math.sqrt(s2), (20000, N, d, o)).sum(axis=1)
        came = np.einsum("ri,ijk->rjk", rng.random((20000, N)) >= p, G)
        coded = full + first @ model - second
        errors.append(alpha * coded + (1 - alpha) / (1 - p) * came - full)
    error = np.concatenate(errors)
    draws = len(error)
    assert draws >= 100_000
    assert (np.abs(error.mean(axis=0)) < 4 * error.std(axis=0) / math.sqrt(draws)).all()
    squares = np.sum(error**2, axis=(1, 2))
    expected = gradient_mse(alpha, p, list(G), model, s1, s2)
    assert abs(squares.mean() - expected) < 4 * squares.std() / math.sqrt(draws)
    assert squares.std() / math.sqrt(draws) < 0.01 * expected  # the bound above says something


def test_F8_the_encodings_have_the_stated_error() -> None:
    rng = np.random.default_rng(9)
    model = rng.normal(size=(3, 2))
    data = [(rng.uniform(-1, 1, (5, 3)), rng.uniform(-1, 1, (5, 2))) for _ in range(2)]
    G = [gradient(X, Y, model) for X, Y in data]
    squares = []
    for _ in range(5000):
        coded = [moments_gradient(encode(X, Y, 0.7, 0.4, rng), model) for X, Y in data]
        squares.append(float(np.sum((sum(coded) - sum(G)) ** 2)))
    expected = gradient_mse(1.0, 0.0, G, model, 0.7, 0.4)
    assert abs(np.mean(squares) - expected) < 4 * np.std(squares) / math.sqrt(5000)


@pytest.mark.parametrize("seed", range(5))
def test_F8_the_adaptive_weight_minimises_the_error(seed: int) -> None:
    rng = np.random.default_rng(seed)
    N, d, o = 4, 3, 2
    p, s1, s2 = rng.uniform(0.05, 0.9), rng.uniform(0.01, 2), rng.uniform(0.01, 2)
    model, G = rng.normal(size=(d, o)), list(rng.normal(0, 5, (N, d, o)))
    grid = np.linspace(0, 1, 2001)
    best = grid[np.argmin([gradient_mse(alpha, p, G, model, s1, s2) for alpha in grid])]
    mean = float(np.mean([np.sum(one**2) for one in G]))
    expected = alpha_estimated(p, mean, float(np.sum(model**2)), s1, s2, d, o).coded
    assert abs(best - expected) <= 0.5 / 2000 + 1e-9
