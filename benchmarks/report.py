"""A comparison with a rival: what was measured on both sides, the ratio, and the verdict."""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Comparison", "print_comparisons"]

_UNITS = {
    "s": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)),
    "B": (("MB", 1e6), ("kB", 1e3), ("B", 1)),
    "1": (("", 1.0),),
}

_HEADER = (
    f"{'what':<44}{'ours':>13}{'rival':>14}{'ratio':>9}  {'target':<14}{'verdict':<8}rival's name"
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Repeated measurements of ours and of a rival, taken in turns.

    Parameters
    ----------
    what : str
        What was measured.
    rival : str
        Who the rival is.
    ours, theirs : sequence of float
        The measurements; less is better.
    unit : {"s", "B", "1"}
        Their unit; "1" for plain numbers.
    at_most : float, optional
        Target of ours divided by theirs.
    at_least : float, optional
        Target of theirs divided by ours. Without a target the ratio is ours divided by theirs.
    """

    what: str
    rival: str
    ours: Sequence[float]
    theirs: Sequence[float]
    unit: str = "s"
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ratio(self) -> float:
        """Ratio of the medians, in the direction of the target."""
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        return ours / theirs if self.at_least is None else theirs / ours

    @property
    def missed(self) -> bool:
        """Whether there is a target and it is missed."""
        too_much = self.at_most is not None and self.ratio > self.at_most
        too_little = self.at_least is not None and self.ratio < self.at_least
        return too_much or too_little

    def line(self) -> str:
        """Return the line of the table; values are medians with half their interquartile range."""
        target, verdict = "", ""
        if self.at_most is not None:
            target = f"at most {self.at_most:g}x"
        if self.at_least is not None:
            target = f"at least {self.at_least:g}x"
        if target:
            verdict = "MISSED" if self.missed else "met"
        return (
            f"{self.what:<44}{_shown(self.ours, self.unit):>13}{_shown(self.theirs, self.unit):>14}"
            f"{self.ratio:>8.3g}x  {target:<14}{verdict:<8}{self.rival}"
        )


def print_comparisons(comparisons: Iterable[Comparison]) -> None:
    """Print a line for each comparison as it comes, and then how many missed their targets.

    Parameters
    ----------
    comparisons : iterable of Comparison
        What is measured while it is iterated over.
    """
    began = time.monotonic()
    missed = 0
    print(_HEADER, flush=True)
    for comparison in comparisons:
        missed += comparison.missed
        print(comparison.line(), flush=True)
    verdict = f"{missed} MISSED" if missed else "all met"
    print(f"targets: {verdict}; {time.monotonic() - began:.0f} s in all")


def _shown(values: Sequence[float], unit: str) -> str:
    median = statistics.median(values)
    names = _UNITS[unit]
    name, factor = next((entry for entry in names if median >= entry[1]), names[-1])
    spread = 0.0
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        spread = (high - low) / 2 / median
    return f"{median / factor:.3g} {name} ±{spread:.0%}"
