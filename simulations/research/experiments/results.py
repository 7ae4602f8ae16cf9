"""The results of an experiment: its runs and findings, as JSON knows them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr_privacy import __version__
from flwr_privacy.simulations.reports.comparison.spread import mean_and_error
from flwr_privacy.simulations.research.udp.theory import search_cost
from flwr_privacy.simulations.settings.effect import flat_settings

from .claims import Target
from .curves import Searched, TrainedRun
from .description import Curve, ExperimentDescription
from .functions import FUNCTIONS
from .verdicts import CheckedClaim, check_claim

__all__ = ["ExperimentResults"]

FULL = "paper's size"
SCALED = "scaled down"
AS_WRITTEN = "as written"
SIMULATED = "NumPy simulation"


@dataclass(frozen=True, kw_only=True)
class ExperimentResults:
    """An experiment with its runs and findings.

    Parameters
    ----------
    experiment : ExperimentDescription
        What was trained.
    full : bool
        Whether at the paper's size.
    runs : Sequence of TrainedRun
        For each curve one run per seed.
    """

    experiment: ExperimentDescription
    full: bool
    runs: Sequence[TrainedRun]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs."""
        return sorted({run.seed for run in self.runs})

    @property
    def size(self) -> str:
        """The size in words."""
        function = self.experiment.function
        if function and not FUNCTIONS[function].seeded:
            return "computed"
        if function:
            return f"{SIMULATED}, {SCALED}" if self._smaller else SIMULATED
        if not self.experiment.paper and not self.full:  # a file of the user's own
            return SCALED if self._smaller else AS_WRITTEN
        return FULL if self.full else SCALED

    @property
    def at_papers_size(self) -> bool:
        """Whether nothing was scaled down."""
        return SCALED not in self.size

    @property
    def seconds(self) -> float:
        """How long the runs took, one after the other; curves may share some."""
        shared = {(run.seed, run.model): run.seconds for run in self.runs if run.model != Path()}
        return sum(shared.values()) + sum(r.seconds for r in self.runs if r.model == Path())

    @property
    def _smaller(self) -> bool:
        return self.experiment.smaller and not self.full

    def findings(self) -> list[CheckedClaim]:
        """Check all claims."""
        return [check_claim(claim, self.runs) for claim in self.experiment.claims]

    def of(self, label: str) -> list[TrainedRun]:
        """Return the runs of a curve."""
        return [run for run in self.runs if run.curve == label]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON knows it; what is not finite is the text ``inf`` or ``nan``."""
        chosen = self.experiment
        table = {
            "experiment": chosen.name,
            "title": chosen.title,
            "source": f'"{chosen.paper}", {chosen.figure}' if chosen.paper else chosen.figure,
            "about": chosen.about.strip(),
            "size": self.size,
            "full": self.full and chosen.smaller,
            "failed": chosen.failed,
            "version": __version__,
            "seeds": self.seeds,
            "metrics": chosen.metrics,
            "curves": [self._curve(curve) for curve in chosen.curves],
            "sweep": asdict(chosen.sweep) if chosen.sweep else None,
            "targets": [self._target(target) for target in chosen.targets],
            "claims": [_claim(finding) for finding in self.findings()],
        }
        return _plain(table)  # type: ignore[no-any-return]

    def _curve(self, curve: Curve) -> dict[str, Any]:
        swept, own = self.experiment.sweep is not None, self.of(curve.label)
        return {
            "label": curve.label,
            "settings": self._settings(curve),
            "diverged": sum(run.diverged for run in own),
            "last": {} if swept else _last(own),
            "points": self._points(curve.label) if swept else [],
            "runs": [
                {"seed": run.seed, "diverged": run.diverged, "by_round": run.values}
                | ({} if run.x is None else {"x": run.x})
                for run in own
            ],
        }

    def _target(self, target: Target) -> dict[str, Any]:
        return {
            "target": str(target),
            "curves": {
                curve.label: {
                    cost: [target.cost(run, cost) for run in self.of(curve.label)]
                    for cost in ("uploads", "bits", "seconds")
                }
                for curve in self.experiment.curves
            },
        }

    def _settings(self, curve: Curve) -> Mapping[str, Any]:
        chosen = self.experiment
        if chosen.function:
            return curve.settings
        return flat_settings(chosen.settings(curve, seed=self.seeds[0], full=self.full))

    def _points(self, label: str) -> list[dict[str, Any]]:
        points = []
        for x in dict.fromkeys(run.x for run in self.of(label)):
            runs = [run for run in self.of(label) if run.x == x]
            searched = [run.searched for run in runs if run.searched is not None]
            points.append(
                {
                    "x": x,
                    "diverged": sum(run.diverged for run in runs),
                    "last": _last(runs),
                    "note": runs[0].note,
                    "search": _search(searched) if searched else None,
                }
            )
        return points


def _claim(finding: CheckedClaim) -> dict[str, Any]:
    return {
        "id": finding.claim.id,
        "text": finding.claim.text,
        "kind": finding.claim.kind,
        "share": finding.claim.share,
        "relative": finding.claim.relative,
        "measure": finding.claim.measure,
        "verdict": finding.verdict,
        "p": None if finding.exact else finding.p_values.two_sided,
        "comparisons": [{**asdict(one), "verdict": one.verdict} for one in finding.comparisons],
    }


def _last(runs: Sequence[TrainedRun]) -> dict[str, tuple[float, float]]:
    """Return the mean of the last values and its standard error; of runs that did not diverge."""
    whole = [run.values for run in runs if not run.diverged]
    last = {}
    for name in runs[0].values:
        last[name] = mean_and_error([value[name][-1] for value in whole])
    return last


def _search(searched: Sequence[Searched]) -> dict[str, Any]:
    """Return what a search chose for each seed, and what it cost."""
    spent = max(one.epsilon for one in searched)
    rounds = searched[0].rounds
    epsilon = 0.0
    if spent > 0:
        epsilon = search_cost(rounds, epsilon=spent, delta=searched[0].delta).epsilon
    return {
        "values": [one.value for one in searched],
        "runs": len(rounds),
        "rounds": sum(rounds),
        "epsilon": epsilon,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
