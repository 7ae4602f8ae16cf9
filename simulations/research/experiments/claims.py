"""The claims of a paper about its curves, as an experiment's file has them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

from .curves import COSTS, MEASURES, METRICS, TrainedRun

__all__ = ["KINDS", "Claim", "Target"]

KINDS = ("better", "worse", "ordered", "close", "trains", "collapses", "dips")
_PLACES = ("last", "best", "mean_last_5")
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
        ``accuracy``, ``loss``; ``rounds``, ``bits``, ``uploads``, ``seconds``, and of M2FDP
        ``energy`` and ``delay``, until `target`, or in all;
        ``distance`` of the final model from the one of the curve `reference`, relative to its norm;
        over a sweep also ``best_x``, where a curve has the least loss (the less, the better); of
        a function what it has, as its ``value`` (the more, the better).
    at : str or int, default "last"
        Which value of accuracy or loss: ``last``, ``best``, ``mean_last_5`` or that of a round.
    target : Target, optional
        For costs.
    at_x : tuple of float, default ()
        The values of the sweep at which curves are compared, some of each size's; by default all.
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
    paper : str, default ""
        The paper's number, if it states one: for the table of verdicts.

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
    paper: str = ""

    def __post_init__(self) -> None:
        name = f"claim {self.id}"
        check_choice(f"{name}: metric", self.metric, (*METRICS, *COSTS, *_OTHERS, *MEASURES))
        if isinstance(self.at, str):
            check_choice(f"{name}: at", self.at, _PLACES)
        else:
            check_integer(f"{name}: at", self.at, minimum=0)
        if self.target is not None and self.metric not in COSTS:
            allowed = f"a target for {', '.join(COSTS)} only"
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
