"""Checks the claims of a paper by comparing curves.

A claim compares runs of the same seed, and a verdict takes at least three seeds: **reproduced** or
**not reproduced** where the mean difference is more than two standard errors on one side of what is
claimed, else **undecided**. A run that diverged is worse than any that did not. Values of a
function have no spread: they are compared as they are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

from .curves import COSTS, END, MEASURES, METRICS, TrainedRun, point

__all__ = ["KINDS", "SEEDS", "VERDICTS", "CheckedClaim", "Claim", "Comparison", "Target", "judge"]

KINDS = ("better", "worse", "ordered", "close", "trains", "collapses", "dips")
VERDICTS = ("reproduced", "not reproduced", "undecided")
REPRODUCED, NOT_REPRODUCED, UNDECIDED = VERDICTS
SEEDS = 3
"""Fewest seeds for a verdict."""

_PLACES = ("last", "best", "mean_last_5")
_LARGER = ("accuracy", "value", "steps", "secure", "insecure")  # of these, more is better
_ALONE = ("trains", "collapses", "dips")  # of one side
_OTHERS = ("distance", "best_x")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A level of a metric; `metric` is ``accuracy`` (at least) or ``loss`` (at most)."""

    metric: str
    value: float

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Target":
        """Read ``{ accuracy = 0.8 }`` or ``{ loss = 0.5 }``."""
        if len(table) != 1:
            raise InvalidParameterError("target", dict(table), "one of accuracy = , loss = ")
        ((metric, value),) = table.items()
        return cls(
            metric=check_choice("target", metric, METRICS), value=check_number(metric, value)
        )

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}"

    def cost(self, run: TrainedRun, cost: str) -> float:
        """Return what a run had cost when it first was there; infinity if it never was."""
        sign = 1 if self.metric == "accuracy" else -1
        for value, spent in zip(run.values[self.metric], run.values[cost], strict=True):
            if sign * value >= sign * self.value:
                return spent
        return math.inf


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of a paper about its curves.

    Parameters
    ----------
    id, text : str
        Name, and the claim in words.
    kind : str
        ``better`` and ``worse``: each curve of the first side against each of the second;
        ``ordered``: each against the next, best first; ``close``: the mean difference is within
        `within`; ``trains`` and ``collapses``: at least, at most `share` of what the curve
        `reference` reaches; ``dips``: over the sweep, the best point between the ends of each curve
        is better than both ends.
    sides : tuple of tuples of str
        Labels of the curves. Over a sweep a label stands for the points of its curve, which are
        compared each with the other curve's at the same value; ``label @ 4`` is one point, and
        ``label @ end`` the last one.
    metric : str, default "accuracy"
        ``accuracy``, ``loss``; ``rounds``, ``bits``, ``uploads`` until `target`, or in all;
        ``distance`` of the final model from the one of the curve `reference`, relative to its norm;
        over a sweep also ``best_x``, where a curve has the least loss (the less, the better); of
        a function what it has, as its ``value`` (the more, the better).
    at : str or int, default "last"
        Which value of accuracy or loss: ``last``, ``best``, ``mean_last_5`` or that of a round.
    target : Target, optional
        For costs.
    at_x : tuple of float, default ()
        The values of the sweep at which curves are compared; by default all.
    margin : float, default 0
        By how much the first has to be better.
    within : float, default 0
        Largest difference that is close.
    relative : bool, default False
        Whether differences are shares of the second curve's value.
    reference : str, default ""
        Label of a curve.
    share : float, default 0.5
        For ``trains`` and ``collapses``.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed or something is missing.
    """

    id: str
    text: str
    kind: str
    sides: tuple[tuple[str, ...], ...]
    metric: str = "accuracy"
    at: str | int = "last"
    target: Target | None = None
    at_x: tuple[float, ...] = ()
    margin: float = 0.0
    within: float = 0.0
    relative: bool = False
    reference: str = ""
    share: float = 0.5

    def __post_init__(self) -> None:
        name = f"claim {self.id}"
        check_choice(f"{name}: metric", self.metric, (*METRICS, *COSTS, *_OTHERS, *MEASURES))
        if isinstance(self.at, str):
            check_choice(f"{name}: at", self.at, _PLACES)
        else:
            check_integer(f"{name}: at", self.at, minimum=0)
        if self.target is not None and self.metric not in COSTS:
            allowed = "a target for rounds, bits, uploads and seconds only"
            raise InvalidParameterError(f"{name}: target", self.target, allowed)
        if (self.metric == "distance" or self.kind in ("trains", "collapses")) == (
            not self.reference
        ):
            allowed = "a curve's label for distance, trains and collapses, and for nothing else"
            raise InvalidParameterError(f"{name}: reference", self.reference, allowed)
        if self.kind in ("trains", "collapses") and self.metric != "accuracy":
            raise InvalidParameterError(f"{name}: metric", self.metric, "accuracy")
        if (self.kind == "close") != (self.within > 0):
            allowed = "a number above 0 for close, and for nothing else"
            raise InvalidParameterError(f"{name}: within", self.within, allowed)
        if self.kind == "dips" and self.metric == "best_x":
            raise InvalidParameterError(f"{name}: metric", self.metric, "what a point has")
        count = {"ordered": len(self.sides)}.get(self.kind, 1 if self.kind in _ALONE else 2)
        if len(self.sides) != count or count == 0 or not all(self.sides):
            raise InvalidParameterError(f"{name}: {self.kind}", self.sides, f"{count} curves")

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Claim":
        """Read a ``[[claim]]``: the kind is a key, with the labels of the curves.

        Raises
        ------
        InvalidParameterError
            As the class; also if a key is unknown.
        """
        entry = dict(table)
        name = f"claim {entry.get('id', '')}"
        kinds = [key for key in entry if key in KINDS]
        if len(kinds) != 1:
            raise InvalidParameterError(name, kinds, f"one of {', '.join(KINDS)}")
        labels = entry.pop(kinds[0])
        if kinds[0] in _ALONE:
            labels = [labels]
        entry["at_x"] = tuple(entry.get("at_x", ()))
        sides = tuple((side,) if isinstance(side, str) else tuple(side) for side in labels)
        if "target" in entry:
            entry["target"] = Target.of(entry["target"])
        known = {field.name for field in fields(cls)} - {"kind", "sides"}
        for key in entry:
            check_choice(name, key, known)
        if missing := {"id", "text"} - set(entry):
            raise InvalidParameterError(name, sorted(missing), "an id and a text")
        return cls(kind=kinds[0], sides=sides, **entry)

    @property
    def labels(self) -> list[str]:
        """Labels of all curves that it names."""
        return [label for side in self.sides for label in side] + [self.reference] * bool(
            self.reference
        )

    @property
    def measure(self) -> str:
        """What is compared, in words."""
        if self.target is not None:
            return f"{self.metric} until {self.target}"
        if self.metric == "distance":
            return f"distance from {self.reference}"
        if self.metric == "best_x":
            return "where the loss is least"
        if self.metric in (*COSTS, *MEASURES):
            return self.metric
        return f"{self.metric}, {f'round {self.at}' if isinstance(self.at, int) else self.at}"

    def pairs(self) -> list[tuple[str, str]]:
        """Return who is compared with whom; the first is to be the better one."""
        if self.kind in _ALONE:
            return [(label, self.reference) for label in self.sides[0]]
        if self.kind == "ordered":
            sides: Iterable[Sequence[Sequence[str]]] = zip(
                self.sides[:-1], self.sides[1:], strict=True
            )
        else:
            sides = [self.sides if self.kind != "worse" else self.sides[::-1]]
        return [(one, other) for first, second in sides for one in first for other in second]


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


def judge(claim: Claim, runs: Sequence[TrainedRun]) -> CheckedClaim:
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
        mean = float(np.mean(differences))
        alone = 0.0 if table.exact else math.nan
        spread = float(np.std(differences, ddof=1)) if len(differences) > 1 else alone
    error = spread / math.sqrt(len(differences))
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
        holds = mean - claim.margin > 2 * error
        fails = claim.margin - mean > 2 * error
    else:
        holds = bool(np.all(differences > claim.margin))
        fails = bool(np.all(differences < claim.margin))
    return REPRODUCED if holds else NOT_REPRODUCED if fails else UNDECIDED


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
