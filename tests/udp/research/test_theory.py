"""UDP's theory: the paper's bounds, the corrected ones, and worlds in which they can be checked."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.accounting.gaussian import delta_of, epsilon_of, mu_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.udp.moments import (
    eps_moments,
    eps_server,
    ln_moment,
    ln_moment_paper,
)
from flwr_privacy.simulations.research.udp.theory import (
    SEARCH_GRID,
    PLProblem,
    b_corrected,
    b_paper,
    bound_corrected,
    bound_paper,
    c_corrected,
    c_paper,
    optimal_rounds,
    search_cost,
    stationary_rounds,
)
from flwr_privacy.udp import sigma_paper

DELTA = 1e-3
EPSILONS = (4.0, 8.0, 12.0, 16.0, 20.0)

BASE = PLProblem(
    Theta=2.3, mu=0.1, Lc=1.0, eta=1.0, U=50, K=50, epsilon=4.0, delta=DELTA, Dl=0.0025
)
MLP = 203530  # parameters


def best(problem: PLProblem, b: float, c: float) -> float:
    return stationary_rounds(problem.Theta, problem.A, b, c)


# -- F15: moments -------------------------------------------------------------------------------


def integrated(q: float, r: float, lambda_: int) -> tuple[float, float]:
    """Return D10 and D01 by adding up the mixture's density on a fine grid, sigma = 1."""
    x, step = np.linspace(-30, 30 + 2 * r * lambda_, 400_001, retstep=True)
    log_ratio = np.logaddexp(math.log1p(-q) if q < 1 else -np.inf, math.log(q) + r * x - r**2 / 2)
    under = norm.logpdf(x)
    up = np.exp(under + (lambda_ + 1) * log_ratio).sum() * step
    down = np.exp(under - lambda_ * log_ratio).sum() * step
    return float(up), float(down)


@pytest.mark.parametrize("q", [0.05, 0.6, 0.9, 1.0])
@pytest.mark.parametrize(("r", "lambda_"), [(0.01, 1), (0.1, 3), (0.3, 5), (0.25, 20), (2.0, 4)])
def test_F15_the_moment_is_that_of_the_mixture_and_the_larger_of_both_directions(
    q: float, r: float, lambda_: int
) -> None:
    up, down = integrated(q, r, lambda_)
    assert ln_moment(q, r, lambda_) == pytest.approx(math.log(up), rel=1e-8, abs=1e-12)
    assert up >= down * (1 - 1e-12)


def test_F15_the_papers_approximation_is_no_upper_bound() -> None:
    assert ln_moment(0.6, 0.3, 5) == pytest.approx(0.5464654, rel=1e-6)
    assert ln_moment(0.6, 0.1, 3) == pytest.approx(0.021774, rel=1e-4)
    assert ln_moment_paper(0.6, 0.1, 3) == pytest.approx(0.036)
    # Inside the range of Fig. 2, which says "always above".
    assert ln_moment(0.9, 0.25, 100) == pytest.approx(305.005, rel=1e-6)
    assert ln_moment_paper(0.9, 0.25, 100) == 284.0625
    assert ln_moment(0.1, 0.25, 100) == pytest.approx(84.911, rel=1e-5)
    assert ln_moment_paper(0.1, 0.25, 100) == pytest.approx(31.563, rel=1e-4)


@pytest.mark.parametrize(
    ("q", "r", "first"),
    [(0.9, 0.1, 170), (0.9, 0.25, 28), (0.6, 0.25, 35), (0.1, 0.25, 80), (0.1, 0.5, 20)],
)
def test_F15_from_which_order_on_the_approximation_fails(q: float, r: float, first: int) -> None:
    fails = [n for n in range(1, 251) if ln_moment(q, r, n) > ln_moment_paper(q, r, n)]
    assert fails == list(range(first, 251))


@given(st.floats(1e-9, 3), st.integers(1, 500))
def test_F15_when_everybody_takes_part_both_are_equal(r: float, lambda_: int) -> None:
    exact = lambda_ * (lambda_ + 1) * r**2 / 2
    assert ln_moment(1.0, r, lambda_) == pytest.approx(exact, rel=1e-9)
    assert ln_moment_paper(1.0, r, lambda_) == pytest.approx(exact, rel=1e-12)


@given(st.floats(0.001, 0.999), st.floats(1e-7, 3), st.integers(1, 300))
def test_the_moment_lies_below_the_rigorous_bounds_of_the_chain(
    q: float, r: float, lambda_: int
) -> None:
    moment = ln_moment(q, r, lambda_)
    growth = lambda_ * r**2 / 2
    single = math.log1p(q * math.expm1(growth)) if growth < 700 else math.log(q) + growth
    assert 0 < moment <= (lambda_ + 1) * single * (1 + 1e-9)
    assert moment <= ln_moment(1.0, r, lambda_) * (1 + 1e-9)
    assert moment <= ln_moment(q, r, lambda_ + 1)


def test_a_release_that_depends_on_nothing_has_no_moment() -> None:
    assert ln_moment(0.5, 0.0, 7) == 0.0


def test_a_small_moment_keeps_its_digits() -> None:
    # To first order in r^2: binom(lambda + 1, 2) q^2 r^2.
    assert ln_moment(0.5, 1e-9, 3) == pytest.approx(6 * 0.25 * 1e-18, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.0, 0.1, 3), "q = 0.0: expected a number above 0 and of at most 1"),
        ((1.1, 0.1, 3), "q = 1.1"),
        ((0.5, -0.1, 3), "r = -0.1: expected a finite number of at least 0"),
        ((0.5, 0.1, -1), "lambda_ = -1"),
    ],
)
def test_moments_that_there_are_not(values: tuple[float, float, int], text: str) -> None:
    for moment in (ln_moment, ln_moment_paper):
        with pytest.raises(InvalidParameterError, match=text):
            moment(*values)
    with pytest.raises(InvalidParameterError, match=r"lambda_ = 1\.5: expected an integer"):
        ln_moment(0.5, 0.1, 1.5)  # type: ignore[arg-type]


# -- F12 and section 7.2: the view of the server -------------------------------------------------


@pytest.mark.parametrize(
    ("q", "rounds", "truths"),
    [
        (0.6, 200, {4.0: 3.453, 8.0: 8.411, 12.0: 14.627, 16.0: 22.074, 20.0: 30.746}),
        (0.6, 50, {20.0: 31.879}),
        (0.1, 200, {4.0: 3.634, 8.0: 9.061, 20.0: 35.149}),
        (0.1, 50, {20.0: 44.935}),
    ],
)
def test_F12_what_the_papers_noise_gives_a_server_that_sees_who_takes_part(
    q: float, rounds: int, truths: dict[float, float]
) -> None:
    for epsilon, true in truths.items():
        z = sigma_paper(rounds=rounds, q=q, epsilon=epsilon, delta=DELTA)
        seen = eps_server(noise_multiplier=z, rounds=rounds, q=q, delta=DELTA)
        assert seen == pytest.approx(true, abs=6e-4)


def test_F9_who_is_always_there_has_the_gaussian_figure() -> None:
    for epsilon in EPSILONS:
        z = sigma_paper(rounds=200, q=1.0, epsilon=epsilon, delta=DELTA)
        seen = eps_server(noise_multiplier=z, rounds=200, q=1.0, delta=DELTA)
        assert seen == pytest.approx(epsilon_of(math.sqrt(200) / z, DELTA), rel=1e-9)


@given(st.floats(0.3, 30), st.integers(1, 60), st.floats(0.01, 1), st.floats(-9, -1))
def test_the_average_delta_over_the_participations_is_delta(
    z: float, rounds: int, q: float, exponent: float
) -> None:
    delta = 10**exponent
    seen = eps_server(noise_multiplier=z, rounds=rounds, q=q, delta=delta)
    counts = np.arange(rounds + 1)
    average = math.fsum(
        float(share) * delta_of(math.sqrt(count) / z, seen)
        for count, share in zip(counts, binom.pmf(counts, rounds, q), strict=True)
    )
    if seen == 0:
        assert average <= delta
    else:
        assert average == pytest.approx(delta, rel=1e-6)
    assert seen <= epsilon_of(math.sqrt(rounds) / z, delta) * (1 + 1e-9)


def test_who_hardly_ever_takes_part_is_private_at_a_larger_delta() -> None:
    assert eps_server(noise_multiplier=1e-3, rounds=1, q=0.01, delta=0.1) == 0.0
    assert eps_server(noise_multiplier=1e-200, rounds=1, q=0.5, delta=0.1) == math.inf


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0.0"),
        ({"rounds": 0}, "rounds = 0"),
        ({"q": 0.0}, "q = 0.0"),
        ({"delta": 1.0}, "delta = 1.0"),
    ],
)
def test_views_that_there_are_not(change: dict[str, Any], text: str) -> None:
    values = {"noise_multiplier": 1.0, "rounds": 10, "q": 0.5, "delta": DELTA, **change}
    with pytest.raises(InvalidParameterError, match=text):
        eps_server(**values)


# -- F16, F17: the bounds ------------------------------------------------------------------------


def test_F16_the_papers_bound() -> None:
    assert abs(BASE.A - 0.9) < 1e-15
    assert b_paper(BASE) == pytest.approx(2.698342e-5, rel=1e-6)
    assert c_paper(BASE) == 0
    for rounds, value in ((50, 0.013196), (86, 0.002587), (100, 0.002759), (200, 0.005397)):
        assert bound_paper(BASE, rounds) == pytest.approx(value, abs=6e-7)
    places = [best(p, b_paper(p), 0.0) for p in (replace(BASE, epsilon=e) for e in EPSILONS)]
    assert places == pytest.approx([86.3884, 99.552, 107.250, 112.712, 116.948], abs=6e-4)
    assert optimal_rounds(BASE.Theta, BASE.A, b_paper(BASE), 0.0) == 86


def test_F16_the_papers_bound_where_clients_are_drawn() -> None:
    drawn = replace(BASE, K=30, epsd=0.5)
    assert b_paper(drawn) == pytest.approx(1.619005e-5, rel=1e-6)
    assert c_paper(drawn) == pytest.approx(0.0340136, rel=1e-5)
    assert best(drawn, b_paper(drawn), c_paper(drawn)) == pytest.approx(91.098, abs=6e-4)
    assert bound_paper(drawn, 200) == pytest.approx(0.037252, abs=6e-7)
    assert c_paper(drawn, extra_U=True) == pytest.approx(50 * 0.0340136, rel=1e-5)
    gained = bound_paper(drawn, 200, extra_U=True) - bound_paper(drawn, 200)
    assert gained == pytest.approx(49 * 0.0340136, rel=1e-5)


def test_F17_the_corrected_bound() -> None:
    full = replace(BASE, d=MLP)
    drawn = replace(full, K=30, epsd=0.5)
    for problem in (full, drawn):
        assert b_corrected(problem) == pytest.approx(0.1098387, rel=1e-6)
        assert b_corrected(problem) == pytest.approx(b_paper(problem) * MLP / problem.K, rel=1e-9)
    assert c_corrected(full) == c_paper(full) == 0
    assert best(full, b_corrected(full), 0.0) == pytest.approx(8.1146, abs=6e-5)
    assert bound_corrected(full, 8) == pytest.approx(1.4905, abs=6e-5)
    assert bound_corrected(full, 9) == pytest.approx(1.4966, abs=6e-5)
    assert optimal_rounds(full.Theta, full.A, b_corrected(full), 0.0) == 8
    places = [best(p, b_corrected(p), 0.0) for p in (replace(full, epsilon=e) for e in EPSILONS)]
    assert places[1:] == pytest.approx([19.46, 27.42, 33.13, 37.54], abs=6e-3)


@given(
    eta=st.floats(0.01, 1),
    mu=st.floats(0.01, 1),
    K=st.integers(1, 50),
    d=st.integers(1, 10**6),
    epsd=st.floats(1e-9, 10) | st.just(0.0),
)
def test_how_far_the_papers_terms_are_from_the_corrected_ones(
    eta: float, mu: float, K: int, d: int, epsd: float
) -> None:
    problem = replace(BASE, eta=eta, mu=mu, K=K, d=d, epsd=epsd)
    step = eta * problem.Lc * (2 - eta * problem.Lc)  # 1 at eta = 1 / Lc, below it less
    assert b_corrected(problem) == pytest.approx(b_paper(problem) * d / (K * step), rel=1e-9)
    assert c_corrected(problem) * step == pytest.approx(c_paper(problem), rel=1e-9)
    assert c_corrected(problem) >= c_paper(problem) * (1 - 1e-9)


def test_every_client_may_have_its_own_budget_and_sensitivity() -> None:
    epsilon, delta, Dl = (1.0, 2.0, 4.0), (1e-3, 1e-4, 1e-5), (0.1, 0.2, 0.3)
    own = replace(BASE, U=3, K=2, epsilon=epsilon, delta=delta, Dl=Dl)
    sum_of_clients = (
        0.01 * 3 * math.log(10) / 1 + 0.04 * 4 * math.log(10) / 4 + 0.09 * 5 * math.log(10) / 16
    )
    assert own.noise == pytest.approx(sum_of_clients)
    assert b_paper(own) == pytest.approx(1 / 0.1 * 2 / 9 * sum_of_clients)
    assert b_corrected(own) == pytest.approx(1 / 9 / 0.1 * sum_of_clients)
    same = replace(BASE, U=3, K=2, epsilon=[4.0] * 3, delta=[DELTA] * 3, Dl=[0.0025] * 3)
    assert bound_paper(same, 7) == bound_paper(replace(BASE, U=3, K=2), 7)


# Worlds in which the expected loss is known, or can be played.


def sigma_of(problem: PLProblem, rounds: int) -> float:
    assert isinstance(problem.epsilon, float)
    assert isinstance(problem.delta, float)
    assert isinstance(problem.Dl, float)
    return sigma_paper(
        rounds=rounds,
        q=problem.K / problem.U,
        epsilon=problem.epsilon,
        delta=problem.delta,
        Dl=problem.Dl,
    )


def played(
    problem: PLProblem, curvatures: NDArray[Any], centres: NDArray[Any], rounds: int, runs: int
) -> tuple[float, float]:
    """Train on the losses ``1/2 sum_j h_j (w - x_i)_j^2``; return mean and standard error of the
    loss above the least one at the end.
    """
    draws = np.random.default_rng(7)
    start = centres.mean(axis=0)
    start = start + np.sqrt(2 * problem.Theta / (problem.d * curvatures))
    w = np.repeat(start[None], runs, axis=0)
    sigma = sigma_of(problem, rounds)
    for _ in range(rounds):
        chosen = np.argsort(draws.random((runs, problem.U)), axis=1)[:, : problem.K]
        gradient = curvatures * (w - centres[chosen].mean(axis=1))
        noise = draws.normal(0, sigma, (runs, problem.K, problem.d)).mean(axis=1)
        w = w - problem.eta * gradient + noise
    losses = (curvatures * (w - centres.mean(axis=0)) ** 2).sum(axis=1) / 2
    return float(losses.mean()), float(losses.std(ddof=1) / math.sqrt(runs))


def world(d: int, K: int, eta: float, mu: float) -> tuple[PLProblem, NDArray[Any], NDArray[Any]]:
    """Return quadratic losses of ten clients whose curvatures go from mu to 1."""
    curvatures = np.linspace(mu, 1.0, d) if d > 1 else np.array([mu])
    centres = np.random.default_rng(1).normal(0, 0.3, (10, d))
    divergence = curvatures * (centres - centres.mean(axis=0))
    problem = PLProblem(
        Theta=1.0,
        mu=mu,
        Lc=float(curvatures.max()),
        eta=eta,
        U=10,
        K=K,
        epsilon=2.0,
        delta=DELTA,
        Dl=0.05,
        epsd=float((divergence**2).sum(axis=1).mean()),
        d=d,
    )
    return problem, curvatures, centres


@pytest.mark.parametrize(("d", "K", "eta"), [(1, 10, 0.3), (5, 4, 0.5), (20, 1, 0.9), (3, 10, 1.0)])
def test_F17_quadratic_losses_meet_the_corrected_bound_exactly(d: int, K: int, eta: float) -> None:
    problem, curvatures, centres = world(d, K, eta, mu=1.0)
    mean, error = played(problem, curvatures, centres, rounds=15, runs=4000)
    # A mean lies further than 4.5 standard errors away once in 150 000 times.
    assert abs(mean - bound_corrected(problem, 15)) < 4.5 * error


@pytest.mark.parametrize(("d", "K", "eta"), [(5, 10, 0.3), (8, 3, 0.7)])
def test_F17_the_corrected_bound_holds_where_curvatures_differ(d: int, K: int, eta: float) -> None:
    problem, curvatures, centres = world(d, K, eta, mu=0.2)
    for rounds in (3, 20):
        mean, error = played(problem, curvatures, centres, rounds, runs=1000)
        assert mean - 4.5 * error < bound_corrected(problem, rounds)


@pytest.mark.parametrize(
    ("d", "K", "eta"),
    [
        (1, 1, 0.2),  # a step below 1 / Lc, where the paper's constant is too small
        (60, 10, 1.0),  # many parameters, which the paper forgets
    ],
)
def test_F17_the_papers_bound_is_broken(d: int, K: int, eta: float) -> None:
    problem, curvatures, centres = world(d, K, eta, mu=1.0)
    mean, error = played(problem, curvatures, centres, rounds=40, runs=1000)
    assert mean - 4.5 * error > bound_paper(problem, 40)


def test_F17_the_corrected_bound_holds_for_a_loss_that_is_not_convex() -> None:
    # F(w) = w^2 + 3 sin(w)^2 has PL constant 1/32 and smoothness 8 (Karimi, Nutini, Schmidt 2016).
    problem = PLProblem(
        Theta=3.0**2 + 3 * math.sin(3.0) ** 2,
        mu=1 / 32,
        Lc=8.0,
        eta=1 / 8,
        U=4,
        K=4,
        epsilon=2.0,
        delta=DELTA,
        Dl=0.01,
    )
    draws = np.random.default_rng(3)
    for rounds in (5, 50):
        w = np.full(2000, 3.0)
        for _ in range(rounds):
            noise = draws.normal(0, sigma_of(problem, rounds), (4, w.size)).mean(axis=0)
            w = w - problem.eta * (2 * w + 3 * np.sin(2 * w)) + noise
        losses = w**2 + 3 * np.sin(w) ** 2
        error = float(losses.std() / math.sqrt(losses.size))
        assert float(losses.mean()) - 4.5 * error < bound_corrected(problem, rounds)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"Theta": -1.0}, "Theta = -1.0"),
        ({"mu": 0.0}, "mu = 0.0"),
        ({"mu": 2.0}, "mu = 2.0: expected a finite number from .* to 1.0"),
        ({"Lc": 0.0}, "Lc = 0.0"),
        ({"eta": 0.0}, "eta = 0.0"),
        ({"eta": 1.1}, "eta = 1.1"),
        ({"U": 0}, "U = 0"),
        ({"K": 0}, "K = 0"),
        ({"K": 51}, "K = 51: expected an integer from 1 to 50"),
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"epsilon": [1.0] * 49}, "epsilon = .*: expected a number, or one for each of U = 50"),
        ({"epsilon": [1.0] * 49 + [-1.0]}, "epsilon = -1.0"),
        ({"epsilon": "4"}, "epsilon = '4'"),
        ({"delta": 1.0}, "delta = 1.0"),
        ({"delta": [DELTA] * 51}, "delta = .*: expected a number, or one for each of U = 50"),
        ({"Dl": 0.0}, "Dl = 0.0"),
        ({"epsd": -1.0}, "epsd = -1.0"),
        ({"d": 0}, "d = 0"),
    ],
)
def test_trainings_of_which_the_theorem_says_nothing(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        replace(BASE, **change)


def test_no_bound_for_less_than_no_rounds() -> None:
    for bound in (bound_paper, bound_corrected):
        with pytest.raises(InvalidParameterError, match="rounds = -1"):
            bound(BASE, -1)


# -- F18: the best number of rounds --------------------------------------------------------------


def losses(Theta: float, A: float, b: float, c: float, most: int = 2000) -> NDArray[np.float64]:
    rounds = np.arange(most + 1)
    values: NDArray[np.float64] = A**rounds * Theta + (1 - A**rounds) * (b * rounds + c)
    return values


@given(
    st.floats(0.01, 100),
    st.floats(0.0, 0.99),
    st.floats(-7, 2).map(lambda exponent: 10**exponent),
    st.floats(0, 2),
)
def test_F18_the_best_number_of_rounds_is_that_of_brute_force(
    Theta: float, A: float, b: float, c: float
) -> None:
    found = optimal_rounds(Theta, A, b, c)
    values = losses(Theta, A, b, c)
    # By value: of two that are equal up to rounding either is right.
    assert values[found] <= values.min() * (1 + 1e-9)
    if c >= Theta:
        assert found == 0


@given(st.floats(0.1, 100), st.floats(0.01, 0.9999), st.floats(-9, 1).map(lambda e: 10**e))
def test_F18_at_the_stationary_point_the_derivative_is_zero(
    Theta: float, A: float, b: float
) -> None:
    a, place = -math.log(A), stationary_rounds(Theta, A, b, 0.0)

    def rise(T: float) -> float:
        return b * math.expm1(a * T) - a * (Theta - b * T)

    highest = math.log1p(a * Theta / b) / a * (1 + 1e-9)
    assert place == pytest.approx(brentq(rise, 0, highest, xtol=1e-13), rel=1e-6, abs=1e-9)


def test_F18_more_budget_more_rounds_and_more_noise_fewer() -> None:
    by_epsilon = [
        optimal_rounds(p.Theta, p.A, b_corrected(p), c_corrected(p))
        for p in (replace(BASE, epsilon=e, d=MLP) for e in np.geomspace(0.5, 500, 40).tolist())
    ]
    assert by_epsilon == sorted(by_epsilon)
    assert len(set(by_epsilon)) > 20
    places = [stationary_rounds(2.3, 0.9, b, 0.1) for b in np.geomspace(1e-12, 1, 40).tolist()]
    assert all(one > other for one, other in pairwise(places))


def test_F18_with_too_many_rounds_the_noise_alone_counts() -> None:
    b = b_corrected(BASE)
    assert bound_corrected(BASE, 10**7) / 10**7 == pytest.approx(b, rel=1e-6)


def test_F18_nothing_to_gain_no_rounds() -> None:
    assert optimal_rounds(1.0, 0.9, 1e-5, 1.0) == optimal_rounds(0.0, 0.9, 1e-5, 0.0) == 0
    assert optimal_rounds(1.0, 0.9, 1e-5, math.nextafter(1.0, 0.0)) == 0


def test_F18_one_round_is_enough_where_it_reaches_the_minimum() -> None:
    assert optimal_rounds(2.0, 0.0, 1.0, 0.5) == 1  # 1.5 after one round
    assert optimal_rounds(1.4, 0.0, 1.0, 0.5) == 0


def test_F18_a_budget_that_is_nearly_endless_does_not_overflow() -> None:
    # e^M would have 10^290 digits; T = ln(M) / a nearly.
    a = -math.log(0.9)
    assert stationary_rounds(1.0, 0.9, 1e-290, 0.0) == pytest.approx(
        math.log(a * 1e290 - math.log(a * 1e290)) / a, rel=1e-12
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((-1.0, 0.9, 1e-5, 0.0), "Theta = -1.0"),
        ((1.0, 1.0, 1e-5, 0.0), "A = 1.0: expected a number of at least 0 and below 1"),
        ((1.0, -0.1, 1e-5, 0.0), "A = -0.1"),
        ((1.0, 0.9, 0.0, 0.0), "b = 0.0"),
        ((1.0, 0.9, 1e-320, 0.0), "b = 1e-320: expected a number that is not vanishing"),
        ((1.0, 0.9, 1e-5, -1.0), "c = -1.0"),
    ],
)
def test_bounds_without_a_best_number_of_rounds(
    values: tuple[float, float, float, float], text: str
) -> None:
    for function in (stationary_rounds, optimal_rounds):
        with pytest.raises(InvalidParameterError, match=text):
            function(*values)


# -- F26: the search -----------------------------------------------------------------------------


def test_F26_the_search_costs_the_rounds_of_its_grid() -> None:
    cost = search_cost(epsilon=4.0, delta=DELTA)
    assert (cost.runs, cost.rounds) == (11, 1460)
    assert sum(SEARCH_GRID) == 1460
    tens = search_cost(range(10, 301, 10), epsilon=4.0, delta=DELTA)
    assert (tens.runs, tens.rounds) == (30, 4650)
    assert search_cost((5, 7), epsilon=4.0, delta=DELTA, repeats=3).rounds == 36


def test_F26_the_search_costs_the_privacy_of_all_its_trainings() -> None:
    cost = search_cost((20, 50), epsilon=4.0, delta=DELTA, repeats=2)
    assert cost.mu == pytest.approx(2 * mu_of(4.0, DELTA))
    # Round by round, by another accountant: each training has 20 or 50 releases of its own noise.
    mu = mu_of(4.0, DELTA)
    charges = [
        Charge(neighbours="replace_one", noise_multiplier=math.sqrt(rounds) / mu, count=2 * rounds)
        for rounds in (20, 50)
    ]
    assert cost.epsilon == pytest.approx(spent(charges, delta=DELTA, accountant="pld"), rel=1e-3)
    assert cost.epsilon > 2 * 4.0  # far more than one of its trainings
    one = search_cost((200,), epsilon=4.0, delta=DELTA)
    assert one.epsilon == pytest.approx(4.0, rel=1e-9)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.floats(0.1, 20))
def test_F26_a_longer_search_costs_more(grid: list[int], epsilon: float) -> None:
    cost = search_cost(grid, epsilon=epsilon, delta=DELTA)
    more = search_cost([*grid, 1], epsilon=epsilon, delta=DELTA)
    assert cost.rounds < more.rounds
    assert epsilon * (1 - 1e-9) <= cost.epsilon < more.epsilon


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"grid": ()}, r"grid = \(\): expected at least one number of rounds"),
        ({"grid": (10, 0)}, "grid = 0"),
        ({"repeats": 0}, "repeats = 0"),
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"delta": 0.0}, "delta = 0.0"),
    ],
)
def test_searches_that_there_are_not(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        search_cost(**{"epsilon": 4.0, "delta": DELTA, **change})


@pytest.mark.parametrize("q", [0.1, 0.6, 1.0])
def test_the_moments_accountant_is_that_of_renyi_divergences(q: float) -> None:
    orders = range(1, 65)
    made = eps_moments(noise_multiplier=3.0, rounds=50, q=q, delta=1e-5, lambdas=orders)
    event = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(3.0))
    accountant = rdp.RdpAccountant([order + 1 for order in orders])
    accountant.compose(event, 50)
    divergences = dict(zip(accountant._orders, accountant._rdp, strict=True))
    least = min(divergences[order + 1] + math.log(1e5) / order for order in orders)
    assert made == pytest.approx(least, rel=1e-9)


def test_an_empty_search_over_orders_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"lambdas = .*orders to search, one at least"):
        eps_moments(noise_multiplier=1.0, rounds=1, q=1.0, delta=1e-5, lambdas=[])
