"""Tests claims by the coins of canary clients: chances, and the epsilon that could be refuted."""

import math
from dataclasses import dataclass

import numpy as np

from flwr_privacy.simulations.research.attacks.audit import guess_coins, one_run_audit, p_value
from flwr_privacy.simulations.research.attacks.one_run_fdp import fdp_audit, is_refuted

from .canary_runs import Scores
from .claims import Claim

__all__ = ["CoinTest", "coin_tests"]

_SHARES = (1, 2, 4)  # parts of the coins that are guessed: fixed before any run
_LEAST_P = 1e-12
_HALVINGS = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class CoinTest:
    """A test of a claim by one way of guessing coins.

    Parameters
    ----------
    claim : Claim
        The claim, over the rounds that were run.
    scores : Scores
        What is guessed from.
    guesses, correct : int
        Guesses, and how many of them were right.
    p : float
        Chance of so many right guesses where the claim holds, at most.
    """

    claim: Claim
    scores: Scores
    guesses: int
    correct: int
    p: float

    def bound(self, level: float) -> float:
        """Return the epsilon below which a claim like this would be refuted at a level."""
        audit = one_run_audit if self.claim.mu is None else fdp_audit
        return audit(
            self.scores.values,
            self.scores.coins,
            guesses=self.guesses,
            delta=self.claim.delta,
            confidence=1 - level,
        ).epsilon


def coin_tests(claim: Claim, scores: Scores) -> list[CoinTest]:
    """Test a claim over all rounds that were run.

    A claim of Gaussian noise is tested by its trade-off curve, any other by (epsilon, delta). No
    tests where delta is too large for the number of coins.
    """
    coins = scores.coins.size
    if claim.delta > 1 / (2 * coins):
        return []
    tests = []
    for share in _SHARES:
        guesses = max(1, coins // share)
        guessed = guess_coins(scores.values, guesses)
        correct = int(np.count_nonzero(guessed == np.where(scores.coins, 1, -1)))
        p = _chance(claim, coins=coins, guesses=guesses, correct=correct)
        tests.append(CoinTest(claim=claim, scores=scores, guesses=guesses, correct=correct, p=p))
    return tests


def _chance(claim: Claim, *, coins: int, guesses: int, correct: int) -> float:
    counts = {"guesses": guesses, "correct": correct}
    mu = claim.mu
    if mu is None:
        return p_value(canaries=coins, **counts, epsilon=claim.epsilon, delta=claim.delta)

    def refuted(exponent: float) -> bool:
        return is_refuted(canaries=coins, **counts, mu=mu, level=math.exp(exponent))

    low, high = math.log(_LEAST_P), math.log(0.999)
    if not refuted(high):
        return 1.0
    if refuted(low):
        return _LEAST_P
    for _ in range(_HALVINGS):  # the least level at which it is refuted
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return math.exp(high)
