"""Tests over seeds whether something is better: one paired test after 5, 10 and 20 seeds each.

The test of a look is the paired t test: a t test of one sample, the differences of two curves that
share a seed's data, start and clients. An experiment may be looked at three times and stopped when
it is decided, so each look has a third of `ALPHA` (Bonferroni): a p value is three times the
smallest of the looks. Seeds between two looks wait for the next one; those after the 20th count
for nothing.

A run that diverged is worse than any that did not, which leaves a difference without a size. Such
a look is a sign test, of whether the first is better more often than not; a seed with which both
diverged counts for neither. So is a look whose differences have one or two sizes, as those of costs
and rounds may: the t test would be wrong too often. Which of the tests it is depends on the sizes
of the differences alone, and not on their signs: if two curves do not differ, each sign is a fair
coin whatever the sizes are, so the choice takes nothing from the level. A sign test decides after
10 seeds at the earliest.

Both directions are tested: a claim may turn out wrong as well as right. `PValues` keeps the two
one-sided values, from which those of a claim with several comparisons follow (`all_of`, `any_of`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, ttest_1samp

__all__ = [
    "ALPHA",
    "LOOKS",
    "PValues",
    "all_of",
    "any_of",
    "exact_p_values",
    "holm_adjusted",
    "next_look",
    "paired_p_values",
]

ALPHA = 0.05
"""Chance of a wrong verdict on a claim, at most, over all looks and both directions."""
LOOKS = (5, 10, 20)
"""Numbers of seeds after which a claim is tested."""
_DIGITS = 9  # of the largest size; what differs in later ones is rounding
_SIZES = 3  # that a t test takes


@dataclass(frozen=True, kw_only=True)
class PValues:
    """The one-sided p values of a claim.

    Parameters
    ----------
    better : float
        Against the hypothesis that what is claimed to be better is not.
    worse : float
        Against the hypothesis that it is not worse.
    """

    better: float
    worse: float

    @property
    def two_sided(self) -> float:
        """The p value of the claim: small if either direction is clear."""
        return min(1.0, 2 * min(self.better, self.worse))

    @property
    def is_better(self) -> bool:
        """Whether the direction with the smaller p value is the claimed one."""
        return self.better < self.worse


def paired_p_values(differences: NDArray[np.float64]) -> PValues:
    """Test by how much the first of two curves is better.

    Parameters
    ----------
    differences : (seeds,) float64
        In the order of the seeds. Infinite where one curve diverged, NaN where both did.

    Returns
    -------
    PValues
        Both 1 with fewer seeds than the first look takes.

    Examples
    --------
    >>> p = paired_p_values(np.array([0.9, 1.0, 1.1, 1.0, 1.2]))
    >>> round(p.better, 6), p.worse
    (5.1e-05, 1.0)
    """
    looks = [_one_look(differences[:seeds]) for seeds in LOOKS if seeds <= len(differences)]
    if not looks:
        return PValues(better=1.0, worse=1.0)
    better, worse = np.minimum(1.0, len(LOOKS) * np.min(looks, axis=0))
    return PValues(better=float(better), worse=float(worse))


def _one_look(differences: NDArray[np.float64]) -> tuple[float, float]:
    sizes = np.abs(differences)
    if np.isfinite(sizes).all() and _distinct(sizes) >= _SIZES:
        better, worse = (
            float(ttest_1samp(differences, 0.0, alternative=side).pvalue)
            for side in ("greater", "less")
        )
        return better, worse
    # A tie counts against both directions.
    count = len(differences)
    better, worse = (
        float(binomtest(int(np.sum(sign * differences > 0)), count, alternative="greater").pvalue)
        for sign in (1, -1)
    )
    return better, worse


def _distinct(sizes: NDArray[np.float64]) -> int:
    largest = sizes.max()
    return len(np.unique(np.round(sizes / largest, _DIGITS))) if largest > 0 else 1


def exact_p_values(difference: float) -> PValues:
    """Return those of a number in which no draw has a part: it is larger than nought, or it is not.

    Examples
    --------
    >>> exact_p_values(0.1), exact_p_values(0.0)
    (PValues(better=0.0, worse=1.0), PValues(better=1.0, worse=1.0))
    """
    return PValues(better=float(not difference > 0), worse=float(not difference < 0))


def all_of(tests: Sequence[PValues]) -> PValues:
    """Return the p values of a claim that takes all of several comparisons.

    It holds if each holds, which the largest p value bounds; and it fails if one fails, for which
    the smallest is multiplied by their number (Bonferroni).

    Examples
    --------
    >>> all_of([PValues(better=0.01, worse=0.9), PValues(better=0.02, worse=0.8)])
    PValues(better=0.02, worse=1.0)
    """
    return PValues(
        better=max(test.better for test in tests),
        worse=min(1.0, len(tests) * min(test.worse for test in tests)),
    )


def any_of(tests: Sequence[PValues]) -> PValues:
    """Return the p values of a claim for which one of several comparisons is enough."""
    opposite = all_of([PValues(better=test.worse, worse=test.better) for test in tests])
    return PValues(better=opposite.worse, worse=opposite.better)


def next_look(seeds: int) -> int | None:
    """Return after how many seeds the next test is; None after the last.

    Examples
    --------
    >>> next_look(3), next_look(5), next_look(20)
    (5, 10, None)
    """
    return next((look for look in LOOKS if look > seeds), None)


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return p values for a family of claims: those up to `ALPHA` may be taken as decided.

    Then the chance that any verdict of the family is wrong is at most `ALPHA`, whatever depends on
    what. Holm, "A simple sequentially rejective multiple test procedure", 1979.

    Examples
    --------
    >>> holm_adjusted([0.03, 0.01, 0.04])
    [0.06, 0.03, 0.06]
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    left = np.arange(len(values), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(left * values[order]))
    return [float(value) for value in adjusted]
