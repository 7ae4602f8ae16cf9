"""The audits' bounds against exact enumeration and mechanisms whose epsilon is known."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binom, norm

from flwr_privacy.accounting.gaussian import epsilon_of, mu_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attacks.audit import (
    at_least,
    at_most,
    gaussian_audit,
    guess_coins,
    largest_epsilon,
    largest_mu,
    one_run_audit,
    p_value,
)

DELTA = 1e-5


def tail(trials: int, p: Fraction, least: int) -> Fraction:
    return sum(
        (math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(least, trials + 1)),
        Fraction(0),
    )


def gaussian_run(mu: float, canaries: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    coins = draws.random(canaries) < 0.5
    return np.where(coins, mu / 2, -mu / 2) + draws.normal(size=canaries), coins


@pytest.mark.parametrize("trials", [1, 7, 30])
def test_the_bounds_of_a_share_are_where_the_tail_is_one_minus_the_confidence(trials: int) -> None:
    assert at_least(0, trials) == 0
    assert at_most(trials, trials) == 1
    for count in range(1, trials + 1):
        assert binom.sf(count - 1, trials, at_least(count, trials, 0.9)) == pytest.approx(0.1)
    for count in range(trials):
        assert binom.cdf(count, trials, at_most(count, trials, 0.9)) == pytest.approx(0.1)


@pytest.mark.parametrize("delta", [Fraction(0), Fraction(1, 1000)])
def test_the_p_value_is_that_of_corollary_5_4(delta: Fraction) -> None:
    canaries, guesses, right = 40, 9, Fraction(3, 4)  # of epsilon ln 3
    for correct in range(guesses + 1):
        beta = tail(guesses, right, correct)
        alpha = max(
            (
                (tail(guesses, right, correct - i) - beta) / i
                for i in range(1, canaries + 1)
                if i <= correct
            ),
            default=Fraction(0),
        )
        found = p_value(
            canaries=canaries,
            guesses=guesses,
            correct=correct,
            epsilon=math.log(3),
            delta=float(delta),
        )
        assert found == pytest.approx(min(1.0, float(beta + 2 * canaries * delta * alpha)))


def law_of_right_guesses(m: int, right: float, revealed: int, chance: float) -> np.ndarray:
    """Randomised response to m coins that tells some of them with certainty, by chance."""
    counts = np.arange(m + 1)
    told = binom.pmf(counts - revealed, m - revealed, right)
    law: np.ndarray = (1 - chance) * binom.pmf(counts, m, right) + chance * told
    return law


def worst(m: int, revealed: int, chance: float, epsilon: float, delta: float) -> float:
    """How much likelier a p-value of at most a is than a; at most 0 for a valid test."""
    law = law_of_right_guesses(m, 1 / (1 + math.exp(-epsilon)), revealed, chance)
    values = [
        p_value(canaries=m, guesses=m, correct=v, epsilon=epsilon, delta=delta)
        for v in range(m + 1)
    ]
    return max(
        float(sum(p for p, v in zip(law, values, strict=True) if v <= level)) - level
        for level in values
        if level < 1
    )


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-2, 0.05])
def test_mechanisms_that_reveal_coins_with_delta_are_refuted_no_more_often_than_allowed(
    epsilon: float, delta: float
) -> None:
    """A coin is among `revealed` random ones of m with a chance of delta in all."""
    m = 10
    for revealed in range(1, m + 1):
        chance = min(1.0, m * delta / revealed)
        assert worst(m, revealed, chance, epsilon, delta) <= 1e-12


def test_without_the_term_of_delta_they_would_be() -> None:
    assert worst(10, 10, 0.05, 0.5, 0.0) > 0.01


def test_more_right_guesses_refute_more_and_a_larger_epsilon_less() -> None:
    def value(correct: int, epsilon: float) -> float:
        return p_value(canaries=400, guesses=100, correct=correct, epsilon=epsilon, delta=1e-4)

    for epsilon in (0.0, 1.0, 3.0):
        by_count = [value(correct, epsilon) for correct in range(101)]
        assert all(a >= b for a, b in pairwise(by_count))
    for correct in (60, 90, 100):
        by_epsilon = [value(correct, e) for e in np.linspace(0, 6, 61)]
        low = [v for v in by_epsilon if v < 0.5]
        assert low == sorted(low)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_randomised_response_is_refuted_with_nearly_the_chance_that_is_allowed(
    epsilon: float,
) -> None:
    """The bound is tight there: its chance to be too large is the level, but for whole counts."""
    m, right = 2000, 1 / (1 + math.exp(-epsilon))

    def chance(correct: int) -> float:
        return p_value(canaries=m, guesses=m, correct=correct, epsilon=epsilon, delta=0.0)

    first = next(v for v in range(m // 2, m + 1) if chance(v) <= 0.05)
    assert 0.03 < binom.sf(first - 1, m, right) <= 0.05
    coins, wrong = np.arange(m) % 2 == 0, 2 * round(m * (1 - right) / 2)
    scores = np.where(coins, 1.0, -1.0) * np.where(np.arange(m) < wrong, -1, 1)
    found = one_run_audit(scores, coins, guesses=m, delta=0.0)
    assert found.correct == m - wrong
    assert epsilon - 0.25 < found.epsilon < epsilon
    assert p_value(
        canaries=m, guesses=m, correct=found.correct, epsilon=found.epsilon, delta=0.0
    ) == pytest.approx(0.05, rel=1e-6)


def test_what_canaries_can_certify_at_best() -> None:
    for canaries, epsilon in ((1000, 5.8), (10_000, 8.1)):
        assert round(largest_epsilon(canaries), 1) == epsilon
        coins = np.arange(canaries) % 2 == 0
        best = one_run_audit(coins, coins, guesses=canaries, delta=0.0)
        assert best.correct == canaries
        assert best.epsilon == pytest.approx(largest_epsilon(canaries), rel=1e-9)
        sharp = gaussian_audit(coins, coins, threshold=0.5, delta=DELTA)
        assert sharp.mu == largest_mu(canaries)
        assert sharp.epsilon == epsilon_of(sharp.mu, DELTA) > 30
    assert largest_epsilon(1) == 0  # one coin guessed right proves nothing
    assert largest_epsilon(1000, confidence=0.99) < largest_epsilon(1000)


def test_the_gaussian_bound_is_too_large_with_nearly_the_chance_that_is_allowed() -> None:
    m = 4000
    for mu in (0.3, 1.0, 3.0):
        right = float(norm.cdf(mu / 2))
        first = next(v for v in range(m // 2, m + 1) if 2 * norm.ppf(at_least(v, m, 0.95)) > mu)
        assert 0.03 < binom.sf(first - 1, m, right) <= 0.05


def test_no_threshold_makes_guesses_from_a_gaussian_channel_better() -> None:
    thresholds = np.linspace(-3, 3, 61)
    for mu in (0.5, 2.0):
        right = (norm.cdf(thresholds + mu / 2) + norm.sf(thresholds - mu / 2)) / 2
        assert right.max() <= norm.cdf(mu / 2) + 1e-12


@pytest.mark.parametrize("epsilon", [2.0, 4.0])
def test_noise_three_times_too_small_is_flagged_and_correct_noise_passes(epsilon: float) -> None:
    """In 16 runs. The one-run audit misses fewer than 1 of 1000, see `udp.attack`;
    the Gaussian one flags 1 % of the correct ones: more than 3 of 16 with a chance of 2e-5."""
    mu, options = mu_of(epsilon, DELTA), {"delta": DELTA, "confidence": 0.99}
    alarms = 0
    for seed in range(16):
        right, broken = (gaussian_run(factor * mu, 4000, seed) for factor in (1, 3))
        assert one_run_audit(*right, guesses=1000, **options).epsilon < epsilon / 2
        assert one_run_audit(*broken, guesses=1000, **options).epsilon > epsilon
        alarms += gaussian_audit(*right, threshold=0, **options).epsilon > epsilon
        found = gaussian_audit(*broken, threshold=0, **options)
        assert 2 * epsilon < found.epsilon
        assert 2.5 * mu < found.mu < 3.2 * mu
    assert alarms <= 3


def test_beyond_its_ceiling_only_the_gaussian_audit_finds_the_defect() -> None:
    scores, coins = gaussian_run(3 * mu_of(16.0, DELTA), 4000, 0)
    options = {"delta": DELTA, "confidence": 0.99}
    assert one_run_audit(scores, coins, guesses=1000, **options).epsilon < 5.4
    assert gaussian_audit(scores, coins, threshold=0, **options).epsilon > 16


def test_guesses_come_in_halves_from_both_ends() -> None:
    scores = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert guess_coins(scores, 5).tolist() == [1, -1, 1, -1, 1]
    assert guess_coins(scores, 3).tolist() == [1, -1, 1, 0, 0]
    assert guess_coins(scores, 1).tolist() == [1, 0, 0, 0, 0]
    assert np.abs(guess_coins(np.zeros(100), 30)).sum() == 30


COINS = np.array([True, False, True])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: at_least(3, 2), "count = 3"),
        (lambda: at_most(1, 2, 1.0), "confidence = 1.0"),
        (lambda: guess_coins([1.0, math.nan], 1), "scores"),
        (lambda: guess_coins([1.0], 2), "guesses = 2"),
        (
            lambda: p_value(canaries=10, guesses=10, correct=9, epsilon=1, delta=0.06),
            "delta = 0.06",
        ),
        (
            lambda: p_value(canaries=10, guesses=11, correct=9, epsilon=1, delta=0),
            "guesses = 11",
        ),
        (lambda: one_run_audit(np.zeros(2), COINS, guesses=1, delta=0), "coins"),
        (lambda: one_run_audit(np.zeros(3), np.ones(3), guesses=1, delta=0), "coins"),
        (
            lambda: one_run_audit(np.zeros(3), COINS, guesses=1, delta=0, confidence=0),
            "confidence = 0",
        ),
        (lambda: gaussian_audit(np.zeros(3), COINS, threshold=0, delta=0), "delta = 0"),
        (lambda: gaussian_audit(np.zeros(3), COINS, threshold=math.inf, delta=0.1), "threshold"),
        (lambda: largest_epsilon(0), "trials = 0"),
    ],
)
def test_what_is_not_allowed_is_named(call, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        call()
