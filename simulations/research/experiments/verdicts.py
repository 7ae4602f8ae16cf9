"""Checks the claims of a paper by comparing curves.

A claim compares runs of the same seed, and a verdict takes at least three seeds: **reproduced** or
**not reproduced** where the mean difference is more than two standard errors on one side of what is
claimed, else **undecided**. A run that diverged is worse than any that did not. Values of a
function have no spread: they are compared as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.reports.comparison.spread import mean_and_error

from .claims import Claim
from .curves import COSTS, END, TrainedRun, point

__all__ = ["SEEDS", "VERDICTS", "CheckedClaim", "Comparison", "check_claim", "verdict_of"]

VERDICTS = ("reproduced", "not reproduced", "undecided")
REPRODUCED, NOT_REPRODUCED, UNDECIDED = VERDICTS
SEEDS = 3
"""Fewest seeds for a verdict."""

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
    verdict : str
        What this pair says of the claim.
    """

    first: str
    second: str
    values: tuple[list[float], list[float]]
    differences: list[float]
    mean: float
    error: float
    verdict: str


@dataclass(frozen=True, kw_only=True)
class CheckedClaim:
    """A claim with its comparisons and its verdict.

    A claim is reproduced if all of its comparisons say so, and not reproduced if one says so.
    """

    claim: Claim
    comparisons: list[Comparison]
    verdict: str


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
    comparisons = [_compared(table, first, second) for first, second in table.pairs()]
    verdicts = {comparison.verdict for comparison in comparisons}
    verdict = UNDECIDED
    if NOT_REPRODUCED in verdicts:
        verdict = NOT_REPRODUCED
    elif verdicts == {REPRODUCED}:
        verdict = REPRODUCED
    return CheckedClaim(claim=claim, comparisons=comparisons, verdict=verdict)


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
        Undecided with fewer than `SEEDS`.

    Examples
    --------
    >>> verdict_of(np.array([0.25, 0.5, 0.75]))[2], verdict_of(np.array([-0.25, 0.5, 0.0]))[2]
    ('reproduced', 'undecided')
    """
    mean, error = mean_and_error(differences.tolist())
    if len(differences) < SEEDS:
        return mean, error, UNDECIDED
    return mean, error, _sided(mean, error)


class _Table:
    """Runs by what claims call them."""

    def __init__(self, claim: Claim, runs: Sequence[TrainedRun]) -> None:
        self.claim = claim
        self.seeds = sorted({run.seed for run in runs})
        self.exact = all(run.exact for run in runs)
        self.xs: dict[str, list[float]] = {}  # by curve, if there is a sweep
        for run in runs:
            if run.x is not None and run.x not in self.xs.setdefault(run.curve, []):
                self.xs[run.curve].append(run.x)
        self._runs = {(run.point, run.seed): run for run in runs}
        for run in runs:
            if run.x is not None and run.x == max(self.xs[run.curve]):
                self._runs[f"{run.curve} @ {END}", run.seed] = run

    def pairs(self) -> list[tuple[str, str]]:
        """Return the points that are compared, or the curves if those are."""
        if self.claim.kind == "dips":
            return [pair for label in self.claim.sides[0] for pair in self._ends(label)]
        pairs = self.claim.pairs()
        if self.claim.metric == "best_x":
            return pairs
        return [found for first, second in pairs for found in self._points(first, second)]

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

    def _ends(self, label: str) -> list[tuple[str, str]]:
        xs = sorted(self.xs.get(label, []))
        if len(xs) < 3:
            raise InvalidParameterError(f"claim {self.claim.id}: dips", label, "3 points at least")
        sign = 1 if self.claim.metric in _LARGER else -1
        best = max(xs[1:-1], key=lambda x: sign * float(np.mean(self.values(point(label, x)))))
        return [(point(label, best), point(label, end)) for end in (xs[0], xs[-1])]

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
        if table.exact and len(differences) == 1:
            error = 0.0
    return Comparison(
        first=first,
        second=second,
        values=(ours.tolist(), theirs.tolist()),
        differences=differences.tolist(),
        mean=mean,
        error=error,
        verdict=_verdict(claim, differences, mean, error, exact=table.exact),
    )


def _verdict(
    claim: Claim, differences: NDArray[np.float64], mean: float, error: float, *, exact: bool
) -> str:
    if len(differences) < SEEDS and not exact:
        return UNDECIDED
    if claim.kind == "close":
        distances = np.abs(differences)
        # Where a run diverged there is no error to go by: all seeds have to agree.
        holds = abs(mean) + 2 * error <= claim.within
        fails = abs(mean) - 2 * error > claim.within or bool(np.all(distances == math.inf))
    elif np.isfinite(differences).all():
        return _sided(mean - claim.margin, error)
    else:
        holds = bool(np.all(differences > claim.margin))
        fails = bool(np.all(differences < claim.margin))
    return REPRODUCED if holds else NOT_REPRODUCED if fails else UNDECIDED


def _sided(mean: float, error: float) -> str:
    """Tell on which side of nought a mean is, by two standard errors."""
    if abs(mean) > 2 * error:
        return REPRODUCED if mean > 0 else NOT_REPRODUCED
    return UNDECIDED


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
