"""Audits a mechanism: hides coins in its input, guesses them, and bounds epsilon from below.

Each of m canaries is one of two records, by a fair coin of its own; the mechanism runs once on all
of them, and the auditor guesses coins from what it released. Too many right guesses refute the
claimed epsilon. An audit proves that a mechanism is broken; one that finds nothing proves nothing.

Two bounds, from the same coins and scores:

- `one_run_audit` holds for every mechanism, whatever it does. Even of m right guesses it cannot
  make more than `largest_epsilon` (about 5.8 for 1000 canaries, 8.1 for 10,000), and against noise
  it makes much less.
- `gaussian_audit` goes on where the first one ends, and it is sharper for Gaussian noise, but it
  rests on an assumption: each canary has a channel of its own, independent of the others, and of
  Gaussian shape.

The coin decides what the neighbours are. With two opposite records of the largest norm it is the
replacement of a record, at its worst; with a record that is there or not it is adding or removing
one.

Sources: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023,
corollary 5.4 and appendix D; Dong, Roth and Su, "Gaussian Differential Privacy", JRSS B 2022.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, expit, ndtri
from scipy.stats import binom

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

from .scores import labelled, vector

__all__ = [
    "GaussianAudit",
    "OneRunAudit",
    "at_least",
    "at_most",
    "gaussian_audit",
    "guess_coins",
    "largest_epsilon",
    "largest_mu",
    "one_run_audit",
    "p_value",
]

_CONFIDENCE = 0.95
_HIGHEST = 40.0  # epsilon at which randomised response makes no error in float64
_HALVINGS = 60


def at_least(count: int, trials: int, confidence: float = _CONFIDENCE) -> float:
    """Return a probability that the true one is below with a chance of at most 1 - confidence.

    Clopper and Pearson's lower bound, "The use of confidence or fiducial limits", 1934.

    Parameters
    ----------
    count, trials : int
        Successes among independent trials.
    confidence : float, default 0.95
        Strictly between 0 and 1.

    Examples
    --------
    >>> round(at_least(8, 10), 4), at_least(0, 10)
    (0.4931, 0.0)
    """
    _check_counts(count, trials, confidence)
    return float(betaincinv(count, trials - count + 1, 1 - confidence)) if count else 0.0


def at_most(count: int, trials: int, confidence: float = _CONFIDENCE) -> float:
    """Return a probability that the true one is above with a chance of at most 1 - confidence.

    Parameters are those of `at_least`.

    Examples
    --------
    >>> round(at_most(0, 3), 4), at_most(3, 3)
    (0.6316, 1.0)
    """
    _check_counts(count, trials, confidence)
    return 1 - at_least(trials - count, trials, confidence)


def guess_coins(scores: ArrayLike, guesses: int) -> NDArray[np.int8]:
    """Guess heads for the largest scores, tails for the smallest, and nothing between them.

    Parameters
    ----------
    scores : array_like, shape (m,)
        The larger, the likelier is heads.
    guesses : int
        How many coins to guess, half of them from each end.

    Returns
    -------
    ndarray of int8, shape (m,)
        1 for heads, -1 for tails, 0 for no guess.

    Raises
    ------
    InvalidParameterError
        If there are fewer scores than guesses, or one is not finite.

    Examples
    --------
    >>> guess_coins([0.3, -2.0, 1.5, 0.1], 2)
    array([ 0, -1,  1,  0], dtype=int8)
    """
    values = vector("scores", scores)
    check_integer("guesses", guesses, minimum=1, maximum=values.size)
    order = np.argsort(values, kind="stable")
    guessed = np.zeros(values.size, np.int8)
    guessed[order[: guesses // 2]] = -1
    guessed[order[values.size - (guesses - guesses // 2) :]] = 1
    return guessed


def p_value(*, canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the chance that bounds so many right guesses, for (epsilon, delta)-DP mechanisms.

    ``P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i`` with W binomial of r guesses, each right
    with probability ``e^epsilon / (1 + e^epsilon)`` (Steinke et al., corollary 5.4).

    Parameters
    ----------
    canaries, guesses, correct : int
        m coins, r guesses, v of them right. The number of guesses is fixed before the run.
    epsilon, delta : float
        What the mechanism is said to have, for one coin that is turned; epsilon at least 0, delta
        from 0 to ``1 / (2 m)``: with more the theorem says next to nothing.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(p_value(canaries=100, guesses=10, correct=10, epsilon=1.0, delta=0.0), 4)
    0.0436
    >>> round(p_value(canaries=100, guesses=10, correct=10, epsilon=1.0, delta=1e-3), 4)
    0.0894
    """
    check_integer("canaries", canaries, minimum=1)
    check_integer("guesses", guesses, minimum=1, maximum=canaries)
    check_integer("correct", correct, minimum=0, maximum=guesses)
    check_number("epsilon", epsilon, minimum=0)
    check_number("delta", delta, minimum=0, maximum=1 / (2 * canaries))
    right = float(expit(epsilon))
    chance = float(binom.sf(correct - 1, guesses, right))
    if delta and correct:
        below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)
        means = np.cumsum(below) / np.arange(1, correct + 1)
        chance += 2 * canaries * delta * float(means.max())
    return min(1.0, chance)


@dataclass(frozen=True, kw_only=True)
class OneRunAudit:
    """A lower bound of epsilon from guessed coins, for any mechanism.

    Parameters
    ----------
    canaries, guesses, correct : int
        Coins, guesses, and how many of them were right.
    delta, confidence : float
        Delta of the claim; chance with which the bound holds.
    epsilon : float
        Lower bound: with this or less, at this delta, the mechanism is not differentially private.
    """

    canaries: int
    guesses: int
    correct: int
    delta: float
    confidence: float
    epsilon: float


def one_run_audit(
    scores: ArrayLike,
    coins: ArrayLike,
    *,
    guesses: int,
    delta: float,
    confidence: float = _CONFIDENCE,
) -> OneRunAudit:
    """Return a lower bound on epsilon from one run.

    Parameters
    ----------
    scores : array_like, shape (m,)
        A score for each canary, from nothing but what the mechanism released.
    coins : array_like of bool, shape (m,)
        The fair coins, True for heads. Larger scores speak for heads.
    guesses : int
        How many coins are guessed. It has to be chosen before the scores are seen: the best of
        several is no bound any more.
    delta : float
        Delta of the claim, from 0 to ``1 / (2 m)``.
    confidence : float, default 0.95
        Chance with which the bound holds.

    Raises
    ------
    InvalidParameterError
        If a value is out of range or the shapes do not fit.

    Guarantee
    ---------
    For every mechanism that is (epsilon, delta)-differentially private for the turn of one coin,
    the bound is above epsilon with a chance of at most ``1 - confidence``. The coins are fair,
    independent, and secret from the mechanism's noise; nothing else is assumed.

    Examples
    --------
    >>> coins = np.arange(1000) % 2 == 0
    >>> round(one_run_audit(coins, coins, guesses=1000, delta=0.0).epsilon, 2)
    5.81
    """
    values, heads = labelled(scores, "coins", coins)
    _check_confidence(confidence)
    guessed = guess_coins(values, guesses)
    correct = int(np.count_nonzero(guessed == np.where(heads, 1, -1)))
    low, high = 0.0, _HIGHEST

    def refuted(epsilon: float) -> bool:
        chance = p_value(
            canaries=values.size, guesses=guesses, correct=correct, epsilon=epsilon, delta=delta
        )
        return chance <= 1 - confidence

    if refuted(low):
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if refuted(middle) else (low, middle)
    return OneRunAudit(
        canaries=values.size,
        guesses=guesses,
        correct=correct,
        delta=delta,
        confidence=confidence,
        epsilon=low,
    )


@dataclass(frozen=True, kw_only=True)
class GaussianAudit:
    """A lower bound of mu from guessed coins, for independent Gaussian channels.

    Parameters
    ----------
    canaries, correct : int
        Coins, all of which are guessed, and how many guesses were right.
    delta, confidence : float
        Delta of the claim; chance with which the bounds hold.
    mu : float
        Lower bound: with less the mechanism is not Gaussian-differentially private.
    epsilon : float
        Epsilon of a Gaussian channel with this mu, at delta.
    """

    canaries: int
    correct: int
    delta: float
    confidence: float
    mu: float
    epsilon: float


def gaussian_audit(
    scores: ArrayLike,
    coins: ArrayLike,
    *,
    threshold: float,
    delta: float,
    confidence: float = _CONFIDENCE,
) -> GaussianAudit:
    """Return a lower bound on mu, and on epsilon, from one run.

    A guess from a mu-GDP channel is right with probability ``Phi(mu / 2)`` at most, so
    ``mu >= 2 Phi^-1(p)`` with a lower bound p on that probability (`at_least`).

    Parameters
    ----------
    scores, coins, confidence
        As in `one_run_audit`.
    threshold : float
        Heads is guessed above it. It has to be chosen before the scores are seen.
    delta : float
        Strictly between 0 and 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range or the shapes do not fit.

    Guarantee
    ---------
    Assumed: given the coins, the scores are independent of each other, and each depends on its own
    coin alone. For a mechanism that is mu-GDP for the turn of one coin, the bound is then above mu
    with a chance of at most ``1 - confidence``. `GaussianAudit.epsilon` assumes in addition that
    the channel is Gaussian: of a mechanism that is (epsilon, delta)-DP in another way, such as
    randomised response, it may be far above epsilon.

    Examples
    --------
    >>> coins = np.arange(1000) % 2 == 0
    >>> audit = gaussian_audit(coins, coins, threshold=0.5, delta=1e-5)
    >>> round(audit.mu, 2), round(audit.epsilon, 1)
    (5.5, 37.8)
    """
    values, heads = labelled(scores, "coins", coins)
    correct = int(np.count_nonzero((values > check_number("threshold", threshold)) == heads))
    mu = _mu(at_least(correct, values.size, confidence))
    return GaussianAudit(
        canaries=values.size,
        correct=correct,
        delta=delta,
        confidence=confidence,
        mu=mu,
        epsilon=epsilon_of(mu, delta),
    )


def largest_epsilon(canaries: int, *, confidence: float = _CONFIDENCE) -> float:
    """Return the most that `one_run_audit` can say: all guesses right, and delta 0.

    Parameters
    ----------
    canaries : int
        Coins, all of which are guessed.
    confidence : float, default 0.95
        Strictly between 0 and 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(largest_epsilon(1000), 2), round(largest_epsilon(10_000), 2)
    (5.81, 8.11)
    """
    right = at_least(canaries, canaries, confidence)
    return max(0.0, math.log(right) - math.log1p(-right))


def largest_mu(canaries: int, *, confidence: float = _CONFIDENCE) -> float:
    """Return the most that `gaussian_audit` can say: all guesses right.

    Parameters and errors are those of `largest_epsilon`.

    Examples
    --------
    >>> round(largest_mu(1000), 2), round(largest_mu(10_000), 2)
    (5.5, 6.86)
    """
    return _mu(at_least(canaries, canaries, confidence))


def _mu(right: float) -> float:
    return max(0.0, 2 * float(ndtri(right)))


def _check_counts(count: int, trials: int, confidence: float) -> None:
    check_integer("trials", trials, minimum=1)
    check_integer("count", count, minimum=0, maximum=trials)
    _check_confidence(confidence)


def _check_confidence(confidence: float) -> None:
    if not 0 < check_number("confidence", confidence) < 1:
        raise InvalidParameterError("confidence", confidence, "a number strictly between 0 and 1")
