"""A paper's figure as an experiment: one TOML file says what to train and what is claimed.

``<scheme>/figures/<figure>.toml``, or a file in a folder of ``figures``, has a title, the settings
that all curves share (``[base]``), what the paper's own size puts over them (``[full]``), the
curves (``[[curve]]``) and the claims (``[[claim]]``, see
`flwr_privacy.simulations.research.experiments.claims`). Each curve is trained once per seed. Every
setting that is not in the file is `Settings`' own default; those whose default may change, and with
it a verdict, must be there (``tests/simulations/research/experiments``, ``test_pins.py``).

A ``[sweep]`` names a setting and its values: each curve is then trained once per seed and value,
and shows what the runs came to over that setting. A curve with ``search`` is trained with each
value of another setting too, and shows the best. A file with a ``function`` trains no model of the
app: its curves are those of a function (`flwr_privacy.simulations.research.experiments.functions`),
for each seed if that depends on one.

A file with ``extends = "figure"`` has what that figure of its folder has, without its claims and
``[full]``. Settings in its own ``[base]``, and in curves of the same label, are put over those of
the figure; everything else that it has takes the place of the figure's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice, check_number
from flwr_privacy.simulations.settings.run_settings import Settings

from .claims import Claim, Target
from .curves import END, MEASURES, SHOWN, TREE_COSTS, point
from .functions import FUNCTIONS

__all__ = ["AXES", "Curve", "ExperimentDescription", "Planned", "Range", "Sweep"]

AXES = ("rounds", "bits", "seconds")
SCALES = ("linear", "log")


@dataclass(frozen=True, kw_only=True)
class Range:
    """A setting and its values.

    Parameters
    ----------
    key : str
        The setting, dotted.
    values : tuple of float
        Numbers that differ, at least one.
    full : tuple of float, default ()
        Those of the paper's size, if others.
    """

    key: str
    values: tuple[float, ...]
    full: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("values", "full"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or len(set(values)) < len(values):
                raise InvalidParameterError(f"{self.key}: {name}", values, "numbers that differ")
            for value in values:
                check_number(f"{self.key}: {name}", value)
            object.__setattr__(self, name, tuple(values))
        if not self.values:
            raise InvalidParameterError(f"{self.key}: values", [], "one number at least")

    def of(self, *, full: bool) -> tuple[float, ...]:
        """Return the values of a size."""
        return self.full if full and self.full else self.values


@dataclass(frozen=True, kw_only=True)
class Sweep(Range):
    """The setting over which curves are drawn.

    Parameters
    ----------
    key, values, full
        As of a `Range`.
    label : str
        Its name in the figure.
    scale : {"linear", "log"}, default "linear"
        Of its axis.
    """

    label: str
    scale: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("sweep.scale", self.scale, SCALES)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One training for each seed.

    Parameters
    ----------
    curve : Curve
        Whose point it is.
    x : float or None
        The value of the setting of the sweep.
    candidate : float or None
        The value of the setting that is searched.
    """

    curve: "Curve"
    x: float | None = None
    candidate: float | None = None

    @property
    def slug(self) -> str:
        """What it is as the start of a folder's name."""
        values = [value for value in (self.x, self.candidate) if value is not None]
        return "-".join([self.curve.slug, *(f"{value:g}" for value in values)])


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a figure.

    Parameters
    ----------
    label : str
        Its name in the figure and in claims.
    settings : Mapping
        What it has beside the settings that all curves share; keys nested or dotted.
    full : Mapping
        What the paper's size puts over them.
    search : Range, optional
        Another setting, of whose values the curve shows the best: that with the least last loss.
        Each seed shows the value that is best for the others: a run has no part in its own choice.
    """

    label: str
    settings: Mapping[str, Any]
    full: Mapping[str, Any]
    search: Range | None = None

    @property
    def slug(self) -> str:
        """The label as the start of a folder's name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class ExperimentDescription:
    """An experiment, as its TOML file describes it.

    Parameters
    ----------
    name : str
        ``<scheme>/<figure>``.
    title, paper, figure, about : str
        What it shows, where it is from, and what was left open there and chosen here.
    metrics : Sequence of str
        What is drawn: ``accuracy`` and ``loss``; ``planned``, the rounds that a run plans as it
        goes on; ``rounds``, those that it took; of a function some of its own.
    axes : Sequence of str
        ``rounds``; ``bits``: cumulative uplink bits per value of the model and drawn client;
        ``seconds`` of the virtual clock, where answers take some. The first two by default.
    base, full : Mapping
        Settings of all curves, and those of the paper's size.
    curves, claims, targets : Sequence of Curve, Claim, Target
        Targets are levels of which is said what reaching them costs.
    sweep : Sweep, optional
        The setting over which the curves show what runs came to, in place of `axes`.
    function : str, default ""
        Which function the curves are of, if the app is to train nothing; it needs a sweep.

    Raises
    ------
    InvalidParameterError
        If two curves have one label, or a claim names a curve that is not there.
    """

    name: str
    title: str
    paper: str
    figure: str
    about: str
    metrics: Sequence[str]
    axes: Sequence[str]
    base: Mapping[str, Any]
    full: Mapping[str, Any]
    curves: Sequence[Curve]
    claims: Sequence[Claim]
    targets: Sequence[Target]
    sweep: Sweep | None = None
    function: str = ""

    def __post_init__(self) -> None:
        if self.function:
            check_choice("function", self.function, FUNCTIONS)
        if self.function and self.sweep is None:
            raise InvalidParameterError("sweep", None, "the argument of the function")
        if self.targets and self.sweep is not None:
            raise InvalidParameterError("target", list(self.targets), "none over a sweep")
        for metric in self.metrics:
            check_choice("metrics", metric, self._measured if self.function else SHOWN)
        for axis in self.axes:
            check_choice("axes", axis, AXES)
        slugs = [curve.slug for curve in self.curves]
        if not slugs or "" in slugs or len(set(slugs)) < len(slugs):
            labels = [curve.label for curve in self.curves]
            raise InvalidParameterError("curve.label", labels, "labels that differ, one at least")
        labels = [curve.label for curve in self.curves]
        sizes = [self.xs(full=full) for full in (False, True)]
        known = [*labels, *(f"{label} @ {END}" for label in labels if self.sweep is not None)]
        known += [point(label, x) for x in sizes[0] if x in sizes[1] for label in labels]
        for claim in self.claims:
            for label in claim.labels:
                check_choice(f"claim {claim.id}", label, known)
            of_each = all({*claim.at_x} & {*xs} for xs in sizes)
            if claim.at_x and not (of_each and {*claim.at_x} <= {*sizes[0], *sizes[1]}):
                allowed = f"some of {sizes[0]}, and at the paper's size some of {sizes[1]}"
                raise InvalidParameterError(f"claim {claim.id}: at_x", claim.at_x, allowed)
            self._check_kind(claim)

    def _check_kind(self, claim: Claim) -> None:
        """Refuse what a claim compares if the curves do not have it."""
        name = f"claim {claim.id}"
        if self.sweep is None and claim.kind == "dips":
            raise InvalidParameterError(f"{name}: dips", claim.labels, "curves over a sweep")
        if self.function and claim.metric not in self._measured:
            allowed = " or ".join(self._measured)
            raise InvalidParameterError(f"{name}: metric", claim.metric, allowed)
        if self.function and claim.target is not None:
            raise InvalidParameterError(f"{name}: target", claim.target, "one of trainings only")
        if not self.function and claim.metric in MEASURES:
            raise InvalidParameterError(f"{name}: metric", claim.metric, "it for a function only")
        if not self.function and claim.metric in TREE_COSTS and self._schemes != {"m2fdp"}:
            raise InvalidParameterError(f"{name}: metric", claim.metric, "it for M2FDP only")
        if self.sweep is None and claim.metric == "best_x":
            raise InvalidParameterError(f"{name}: metric", "best_x", "it over a sweep only")
        if self.sweep is not None and claim.metric == "distance":
            allowed = "anything else: a sweep has no one model to be near to"
            raise InvalidParameterError(f"{name}: metric", "distance", allowed)

    @property
    def _schemes(self) -> set[str]:
        """Schemes of all curves."""
        return {{**self.base, **curve.settings}.get("scheme", "") for curve in self.curves}

    @property
    def _measured(self) -> Sequence[str]:
        """What the function has for a point."""
        return list(FUNCTIONS[self.function].measures)

    @property
    def failed(self) -> str:
        """What it means that a run has no value, in a word or two."""
        return FUNCTIONS[self.function].failed if self.function else "diverged"

    @property
    def smaller(self) -> bool:
        """Whether the paper's size is another one than the usual."""
        sweep = self.sweep is not None and bool(self.sweep.full)
        return bool(self.full) or sweep or any(curve.full for curve in self.curves)

    def xs(self, *, full: bool) -> tuple[float | None, ...]:
        """Return the values of the sweep; without one, only None."""
        return (None,) if self.sweep is None else self.sweep.of(full=full)

    def planned(self, *, full: bool) -> list[Planned]:
        """Return what is trained for each seed."""
        return [
            Planned(curve=curve, x=x, candidate=candidate)
            for curve in self.curves
            for x in self.xs(full=full)
            for candidate in ((None,) if curve.search is None else curve.search.of(full=full))
        ]

    def settings(
        self,
        curve: Curve,
        *,
        seed: int,
        full: bool = False,
        data_root: Path | None = None,
        x: float | None = None,
        candidate: float | None = None,
    ) -> Settings:
        """Return the settings of a curve's run with a seed; `x` and `candidate` as in `Planned`.

        Raises
        ------
        InvalidParameterError
            If a key is unknown or a value is not allowed.
        """
        settings = Settings().with_values(self.base)
        if full:
            settings = settings.with_values(self.full)
        settings = settings.with_values(curve.settings)
        if full:
            settings = settings.with_values(curve.full)
        if self.sweep is not None and x is not None:
            settings = settings.with_values({self.sweep.key: x})
        if curve.search is not None and candidate is not None:
            settings = settings.with_values({curve.search.key: candidate})
        root = None if data_root is None else str(data_root.expanduser().absolute())
        return replace(settings, seed=seed, data_root=root)
