"""The f-DP audit of one run: it keeps its level, and proves more than (epsilon, delta) does."""

import numpy as np
import pytest

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attacks.audit import one_run_audit
from flwr_privacy.simulations.research.attacks.one_run_fdp import fdp_audit, is_refuted
from flwr_privacy.simulations.research.audits.one_shot import normal_epsilon, one_shot

Drawn = tuple[np.ndarray, np.ndarray]


def channels(draws: np.random.Generator, *, mu: float, canaries: int) -> Drawn:
    """Return scores of canaries that are mu apart in Gaussian noise, and their coins."""
    coins = draws.random(canaries) < 0.5
    return np.where(coins, mu / 2, -mu / 2) + draws.normal(size=canaries), coins


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_a_true_claim_is_refuted_no_more_often_than_the_level(mu: float) -> None:
    draws = np.random.default_rng(1)
    refuted = 0
    for _ in range(200):
        scores, coins = channels(draws, mu=mu, canaries=100)
        correct = int(np.count_nonzero((scores > 0) == coins))
        refuted += is_refuted(canaries=100, guesses=100, correct=correct, mu=mu, level=0.05)
    assert refuted <= 20  # 10 are expected at most; more than 20 are as rare as 1 in 1000


def test_against_epsilon_and_delta_it_proves_more_and_never_more_than_there_is() -> None:
    draws = np.random.default_rng(2)
    for mu in (1.0, 2.0):
        scores, coins = channels(draws, mu=mu, canaries=1000)
        found = fdp_audit(scores, coins, guesses=300, delta=1e-5)
        one = one_run_audit(scores, coins, guesses=300, delta=1e-5)
        assert one.epsilon * 1.3 < found.epsilon < epsilon_of(mu, 1e-5)
        assert 0 < found.mu < mu


def test_without_noise_guesses_prove_much_and_without_a_signal_nothing() -> None:
    coins = np.arange(200) % 2 == 0
    assert fdp_audit(coins, coins, guesses=200, delta=1e-5).epsilon > 5
    scores, coins = channels(np.random.default_rng(3), mu=0.0, canaries=200)
    nothing = fdp_audit(scores, coins, guesses=200, delta=1e-5)
    assert (nothing.mu, nothing.epsilon) == (0.0, 0.0)


def test_more_right_guesses_refute_more() -> None:
    refuted = [
        [is_refuted(canaries=100, guesses=50, correct=c, mu=mu, level=0.05) for mu in (0, 0.5, 1)]
        for c in range(51)
    ]
    assert refuted == sorted(refuted)
    assert refuted[-1] == [True, True, True]
    assert all(row == sorted(row, reverse=True) for row in refuted)


@pytest.mark.parametrize(("name", "wrong"), [("mu", -1.0), ("level", 1.0), ("correct", 11)])
def test_what_is_out_of_range_is_refused(name: str, wrong: float) -> None:
    usual = {"canaries": 20, "guesses": 10, "correct": 5, "mu": 1.0, "level": 0.05}
    with pytest.raises(InvalidParameterError, match=name):
        is_refuted(**{**usual, name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("mean", [0.5, 1.0, 3.0])
def test_epsilon_of_two_normal_laws_is_that_of_the_gaussian_mechanism(mean: float) -> None:
    assert normal_epsilon(mean, 1.0, 1e-5) == pytest.approx(epsilon_of(mean, 1e-5), rel=1e-6)
    # Narrow or wide, it says something even where the means agree.
    assert normal_epsilon(0.0, 2.0, 1e-5) > 5
    assert normal_epsilon(0.0, 0.5, 1e-5) > 0.5


def test_the_one_shot_estimate_is_near_to_the_truth() -> None:
    draws = np.random.default_rng(4)
    directions = np.linalg.qr(draws.normal(size=(2000, 100)))[0].T
    noise = draws.normal(size=2000)
    found = one_shot(noise + 2.0 * directions.sum(axis=0), directions, delta=1e-5)
    assert found.mean == pytest.approx(2.0 / np.sqrt(1 + 400 / 2000), abs=0.35)
    assert 5 < found.epsilon < 14  # of the Gaussian mechanism: 10
    with pytest.raises(InvalidParameterError, match="directions"):
        one_shot(noise, directions[:1], delta=1e-5)
