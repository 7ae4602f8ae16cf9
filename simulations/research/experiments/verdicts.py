"""Checks the claims of a paper by comparing curves.

A claim compares runs of the same seed: it is **reproduced** or **not reproduced** where a paired
test after 5, 10 or 20 seeds says so at a level of 0.05 in all
(`flwr_privacy.simulations.research.experiments.significance`), else **undecided**, as it is with
fewer than 5 seeds. A claim with several comparisons is reproduced if each of them is; that it fails
is corrected for their number. Values of a function without draws are compared as they are.

What a search chose for a seed depends on the other seeds, if little: such differences are not quite
independent, and their p values not quite exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.reports.comparison.spread import mean_and_error

from .claims import Claim
from .curves import COSTS, END, TrainedRun, point
from .significance import ALPHA, PValues, all_of, any_of, exact_p_values, paired_p_values

__all__ = ["VERDICTS", "CheckedClaim", "Comparison", "check_claim", "verdict_of"]

VERDICTS = ("reproduced", "not reproduced", "undecided")
REPRODUCED, NOT_REPRODUCED, UNDECIDED = VERDICTS

_LARGER = ("accuracy", "value", "steps", "secure", "insecure")  # of these, more is better


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two curves over the seeds.

    Parameters
    ----------
    first, second : str
        Their labels.
    values : tuple of two lists of float
        What each came to, by seed; infinite or NaN where it diverged.
    differences : list of float
        By seed, by how much the first is better.
    mean, error : float
        Mean of the differences and its standard error.
    p_values : PValues
        Of the test that the claim makes of this pair.
    """

    first: str
    second: str
    values: tuple[list[float], list[float]]
    differences: list[float]
    mean: float
    error: float
    p_values: PValues

    @property
    def verdict(self) -> str:
        """What this pair alone says of the claim."""
        return _decided(self.p_values)


@dataclass(frozen=True, kw_only=True)
class CheckedClaim:
    """A claim with its comparisons.

    Parameters
    ----------
    claim : Claim
        What is claimed.
    comparisons : list of Comparison
        One for each pair; of a dip, those of its best point.
    p_values : PValues
        Of the whole claim.
    exact : bool
        Whether no draw has a part in it: then it is compared, and not tested.
    """

    claim: Claim
    comparisons: list[Comparison]
    p_values: PValues
    exact: bool

    @property
    def verdict(self) -> str:
        """The verdict on this claim alone, without regard to other claims of its paper."""
        return _decided(self.p_values)


def _decided(p_values: PValues) -> str:
    """Return the verdict of a claim's p values."""
    if p_values.two_sided > ALPHA:
        return UNDECIDED
    return REPRODUCED if p_values.is_better else NOT_REPRODUCED


def check_claim(claim: Claim, runs: Sequence[TrainedRun]) -> CheckedClaim:
    """Compare the runs that a claim names.

    Parameters
    ----------
    claim : Claim
        What is claimed.
    runs : Sequence of TrainedRun
        For each curve one run per seed, the same seeds for all.
    """
    table = _Table(claim, runs)
    comparisons: list[Comparison] = []
    parts = []
    for places in table.parts():
        found = [[_compared(table, first, second) for first, second in pairs] for pairs in places]
        whole = [all_of([one.p_values for one in compared]) for compared in found]
        parts.append(any_of(whole))
        # Beside the p value the mean counts: with few seeds, all p values are 1.
        means = [min(one.mean for one in compared) for compared in found]
        order = zip((one.better for one in whole), (-mean for mean in means), count(), strict=False)
        comparisons += found[min(order)[-1]]
    return CheckedClaim(
        claim=claim, comparisons=comparisons, p_values=all_of(parts), exact=table.exact
    )


def verdict_of(differences: NDArray[np.float64]) -> tuple[float, float, str]:
    """Return mean, standard error and verdict of a claim that something is better.

    Parameters
    ----------
    differences : (seeds,) float64
        By how much it is better with each seed: finite.

    Returns
    -------
    mean, error : float
        The error is NaN with one seed.
    verdict : str
        Undecided with fewer than 5 seeds.

    Examples
    --------
    >>> verdict_of(np.array([0.4, 0.5, 0.6, 0.5, 0.4]))[2], verdict_of(np.array([0.4, 0.5]))[2]
    ('reproduced', 'undecided')
    """
    mean, error = mean_and_error(differences.tolist())
    return mean, error, _decided(paired_p_values(differences))


class _Table:
    """Runs by what claims call them."""

    def __init__(self, claim: Claim, runs: Sequence[TrainedRun]) -> None:
        self.claim = claim
        self.seeds = sorted({run.seed for run in runs})
        self.exact = all(run.exact for run in runs) and len(self.seeds) == 1
        self.xs: dict[str, list[float]] = {}  # by curve, if there is a sweep
        for run in runs:
            if run.x is not None and run.x not in self.xs.setdefault(run.curve, []):
                self.xs[run.curve].append(run.x)
        self._runs = {(run.point, run.seed): run for run in runs}
        for run in runs:
            if run.x is not None and run.x == max(self.xs[run.curve]):
                self._runs[f"{run.curve} @ {END}", run.seed] = run

    def parts(self) -> list[list[list[tuple[str, str]]]]:
        """Return the points that are compared, or the curves if those are.

        A claim takes all of its parts, a part takes one of its lists, and a list all of its pairs.
        Only a dip has several lists: whichever point between the ends is the best one, it was not
        named before the runs were seen.
        """
        if self.claim.kind == "dips":
            return [self._dips(label) for label in self.claim.sides[0]]
        pairs = self.claim.pairs()
        if self.claim.metric == "best_x":
            return [[pairs]]
        return [[[found for first, second in pairs for found in self._points(first, second)]]]

    def values(self, name: str) -> NDArray[np.float64]:
        """Return what a point or a curve came to, by seed."""
        if self.claim.metric == "best_x":
            losses = [self._numbers(point(name, x), "loss") for x in self.xs[name]]
            least: NDArray[np.float64] = np.array(self.xs[name])[np.argmin(losses, axis=0)]
            return least
        return self._numbers(name, self.claim.metric)

    def _points(self, first: str, second: str) -> list[tuple[str, str]]:
        """Let curves be compared at the same values of the sweep."""
        found = []
        for x in self.xs.get(first, self.xs.get(second, [None])):
            if x is None or not self.claim.at_x or x in self.claim.at_x:
                pair = tuple(point(n, x) if n in self.xs else n for n in (first, second))
                found.append((pair[0], pair[1]))
        return found

    def _dips(self, label: str) -> list[list[tuple[str, str]]]:
        xs = sorted(self.xs.get(label, []))
        if len(xs) < 3:
            raise InvalidParameterError(f"claim {self.claim.id}: dips", label, "3 points at least")
        return [[(point(label, x), point(label, end)) for end in (xs[0], xs[-1])] for x in xs[1:-1]]

    def _numbers(self, name: str, metric: str) -> NDArray[np.float64]:
        claim = self.claim
        return np.array(
            [
                _value(
                    claim, metric, self._runs[name, seed], self._runs.get((claim.reference, seed))
                )
                for seed in self.seeds
            ]
        )


def _compared(table: _Table, first: str, second: str) -> Comparison:
    claim = table.claim
    ours, theirs = table.values(first), table.values(second)
    sign = 1 if claim.metric in _LARGER else -1
    share = claim.share if claim.kind in ("trains", "collapses") else 1.0
    with np.errstate(invalid="ignore"):  # infinity less infinity: both diverged
        differences = sign * (ours - share * theirs)
        if claim.kind == "collapses":
            differences = -differences
        if claim.relative:  # to what was never reached there is no share
            size = np.abs(theirs)
            differences = np.where(np.isinf(size), differences, differences / size)
        mean, error = mean_and_error(differences.tolist())
        if table.exact:
            error = 0.0
    return Comparison(
        first=first,
        second=second,
        values=(ours.tolist(), theirs.tolist()),
        differences=differences.tolist(),
        mean=mean,
        error=error,
        p_values=_p_values(claim, differences, exact=table.exact),
    )


def _p_values(claim: Claim, differences: NDArray[np.float64], *, exact: bool) -> PValues:
    """Test what a claim says of one pair; that curves are close is two claims."""
    excess = [differences - claim.margin]
    if claim.kind == "close":
        excess = [claim.within - differences, claim.within + differences]
    if exact:
        return all_of([exact_p_values(float(one[0])) for one in excess])
    return all_of([paired_p_values(one) for one in excess])


def _value(claim: Claim, metric: str, run: TrainedRun, reference: TrainedRun | None) -> float:
    if claim.target is not None:
        return claim.target.cost(run, metric)
    if run.diverged:
        return -math.inf if metric == "accuracy" else math.inf
    if metric == "distance":
        assert reference is not None  # checked when the claim was read
        return math.inf if reference.diverged else _distance(run, reference)
    values = run.values[metric]
    if metric in COSTS:
        return values[-1]
    if isinstance(claim.at, int):
        if claim.at >= len(values):
            allowed = f"a round up to {len(values) - 1}"
            raise InvalidParameterError(f"claim {claim.id}: at", claim.at, allowed)
        return values[claim.at]
    if claim.at == "best":
        return max(values) if metric in _LARGER else min(values)
    return float(np.mean(values[-5:])) if claim.at == "mean_last_5" else values[-1]


def _distance(run: TrainedRun, reference: TrainedRun) -> float:
    """Return the L2 distance of two models, relative to the norm of the second."""
    with np.load(run.model) as ours, np.load(reference.model) as theirs:
        vector = np.concatenate([theirs[name].ravel() for name in theirs], dtype=np.float64)
        other = np.concatenate([ours[name].ravel() for name in theirs], dtype=np.float64)
    return float(np.linalg.norm(other - vector) / np.linalg.norm(vector))
