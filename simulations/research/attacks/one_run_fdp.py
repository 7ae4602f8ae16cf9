"""Bounds privacy from one run by its trade-off curve: the audit of f-differential privacy.

As in `flwr_privacy.simulations.research.attacks.audit.one_run_audit` each of m canaries is there or
not, by a coin of its own, and the auditor guesses coins after one run. The hypothesis is sharper: a
whole trade-off curve, here that of Gaussian noise (mu-GDP). It needs no channels of their own for
the canaries and no shape of the noise, and it comes closer to the truth than (epsilon, delta) does:
of r guesses with c right ones, probabilities of at least so many right ones are carried on from
guess to guess, by what the curve allows.

Source: Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run", ICML 2025
(arXiv 2410.22235), algorithms 3 and 4.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

from .audit import guess_coins
from .scores import labelled

__all__ = ["FDPAudit", "fdp_audit", "is_refuted"]

_CONFIDENCE = 0.95
_HIGHEST = 50.0  # mu at which guesses are right in float64
_HALVINGS = 40


@dataclass(frozen=True, kw_only=True)
class FDPAudit:
    """A lower bound of mu from guessed coins, for any mechanism that claims Gaussian privacy.

    Parameters
    ----------
    canaries, guesses, correct : int
        Coins, guesses, and how many of them were right.
    delta, confidence : float
        Delta of the claim; chance with which the bound holds.
    mu : float
        Lower bound: with this or less the mechanism is not mu-GDP for the turn of one coin.
    epsilon : float
        Epsilon of a mechanism that is mu-GDP and no better, at delta.
    """

    canaries: int
    guesses: int
    correct: int
    delta: float
    confidence: float
    mu: float
    epsilon: float


def is_refuted(*, canaries: int, guesses: int, correct: int, mu: float, level: float) -> bool:
    """Tell whether so many right guesses refute mu-GDP at a level.

    Parameters
    ----------
    canaries, guesses, correct : int
        m coins, r guesses, c of them right; r is fixed before the run.
    mu : float
        The claim, at least 0.
    level : float
        Chance with which a mechanism that keeps its claim is refuted, at most; between 0 and 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> is_refuted(canaries=100, guesses=100, correct=65, mu=0.0, level=0.05)
    True
    >>> is_refuted(canaries=100, guesses=100, correct=55, mu=0.0, level=0.05)
    False
    """
    check_integer("canaries", canaries, minimum=1)
    check_integer("guesses", guesses, minimum=1, maximum=canaries)
    check_integer("correct", correct, minimum=0, maximum=guesses)
    check_number("mu", mu, minimum=0)
    if not 0 < check_number("level", level) < 1:
        raise InvalidParameterError("level", level, "a number strictly between 0 and 1")
    share = guesses / canaries
    # Masses, summed over places, of guesses that are right (r) and wrong (h) where at least so
    # many are right; they begin with the level and have to fit into the share of guesses.
    right, wrong = level * share * correct / guesses, level * share * (guesses - correct) / guesses
    for count in range(correct - 1, -1, -1):
        more = max(wrong, float(ndtr(ndtri(min(right, 1.0)) - mu)))
        right += count / (guesses - count) * (more - wrong)
        wrong = more
        if right + wrong > share:
            return True
    return False


def fdp_audit(
    scores: ArrayLike,
    coins: ArrayLike,
    *,
    guesses: int,
    delta: float,
    confidence: float = _CONFIDENCE,
) -> FDPAudit:
    """Return a lower bound on mu, and on epsilon, from one run.

    Parameters
    ----------
    scores : array_like, shape (m,)
        A score for each canary, from nothing but what the mechanism released.
    coins : array_like of bool, shape (m,)
        The fair coins, True for heads. Larger scores speak for heads.
    guesses : int
        How many coins are guessed, chosen before the scores are seen.
    delta : float
        Strictly between 0 and 1.
    confidence : float, default 0.95
        Chance with which the bound holds.

    Raises
    ------
    InvalidParameterError
        If a value is out of range or the shapes do not fit.

    Guarantee
    ---------
    For every mechanism that is mu-GDP for the turn of one coin, the bound is above mu with a chance
    of at most ``1 - confidence``. The coins are fair, independent, and secret from the mechanism's
    noise; nothing else is assumed. `FDPAudit.epsilon` is that of a mechanism that is mu-GDP and no
    better: of one whose claim is (epsilon, delta) alone it is not a bound.

    Examples
    --------
    >>> coins = np.arange(1000) % 2 == 0
    >>> audit = fdp_audit(coins, coins, guesses=1000, delta=1e-5)
    >>> round(audit.mu, 2), round(audit.epsilon, 1)
    (2.37, 12.3)
    """
    values, heads = labelled(scores, "coins", coins)
    guessed = guess_coins(values, guesses)
    correct = int(np.count_nonzero(guessed == np.where(heads, 1, -1)))
    counts = {"canaries": values.size, "guesses": guesses, "correct": correct}
    level = 1 - confidence
    low, high = 0.0, _HIGHEST
    if is_refuted(**counts, mu=low, level=level):
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            refuted = is_refuted(**counts, mu=middle, level=level)
            low, high = (middle, high) if refuted else (low, middle)
    return FDPAudit(
        **counts,
        delta=delta,
        confidence=confidence,
        mu=low,
        epsilon=epsilon_of(low, delta) if low else 0.0,
    )
