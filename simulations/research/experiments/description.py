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
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice, check_number
from flwr_privacy.simulations.settings.run_settings import Settings, flat_table

from .claims import Claim, Target
from .curves import END, MEASURES, SHOWN, TREE_COSTS, point
from .functions import FUNCTIONS

__all__ = [
    "AXES",
    "Curve",
    "ExperimentDescription",
    "Planned",
    "Range",
    "Sweep",
    "experiment",
    "names",
    "place_of",
    "read_seeds",
]

RESEARCH = Path(__file__).parent.parent
AXES = ("rounds", "bits", "seconds")
USUAL_AXES = ("rounds", "bits")
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


def names() -> list[str]:
    """Return the names of all experiments, sorted.

    Examples
    --------
    >>> "mspdq/figure2" in names()
    True
    """
    return sorted(
        f"{path.relative_to(RESEARCH).parts[0].replace('_', '-')}/{path.stem}"
        for path in RESEARCH.glob("*/figures/**/*.toml")
    )


def _file_of(name: str) -> Path:
    """Return the file of an experiment, in the figures of its scheme or a folder of them."""
    scheme, figure = check_choice("experiment", name, names()).split("/")
    room = scheme.replace("-", "_")  # central-dp, as the command line has it
    return next((RESEARCH / room / "figures").rglob(f"{figure}.toml"))


def place_of(name: str) -> str:
    """Return where the file of an experiment is in the repository.

    Examples
    --------
    >>> place_of("acfl/figure1")
    'simulations/research/acfl/figures/figure1.toml'
    """
    return f"simulations/research/{_file_of(name).relative_to(RESEARCH).as_posix()}"


def experiment(name: str) -> ExperimentDescription:
    """Read an experiment by its name.

    Raises
    ------
    InvalidParameterError
        If there is none of that name, or its file says something that is not understood.

    Examples
    --------
    >>> [curve.label for curve in experiment("mspdq/convex").curves][0]
    'FedAvg'
    """
    return read(_file_of(name), name)


def read(path: Path, name: str, *, usual: Mapping[str, Any] | None = None) -> ExperimentDescription:
    """Read an experiment from a file, with `usual` for what is not in it; see `experiment`."""
    table = _table(path)
    curves, claims, targets = (table.pop(key, []) for key in ("curve", "claim", "target"))
    values: dict[str, Any] = {
        **{"about": "", "metrics": ["accuracy"], "axes": USUAL_AXES, "base": {}, "full": {}},
        **(usual or {}),
        **table,
        "name": name,
        "claims": [Claim.of(entry) for entry in claims],
        "targets": [Target.of(entry) for entry in targets],
    }
    try:
        values["curves"] = [_curve(entry) for entry in curves]
        if "sweep" in values:
            values["sweep"] = Sweep(**values["sweep"])
        return ExperimentDescription(**values)
    except TypeError as error:  # a key too many or too few
        raise InvalidParameterError("experiment", str(path), f"known keys ({error})") from error


def _table(path: Path) -> dict[str, Any]:
    """Return what a file says, over what the file says that it extends."""
    table = _toml(path)
    if "extends" not in table:
        return table
    files = {other.stem: _toml(other) for other in path.parent.glob("*.toml") if other != path}
    allowed = [name for name, other in files.items() if "extends" not in other]
    earlier = files[check_choice("extends", table.pop("extends"), allowed)]
    for name in ("full", "claim"):
        earlier.pop(name, None)
    own = {curve.get("label", ""): curve for curve in table.pop("curve", [])}
    for label in own:
        check_choice("curve.label", label, [curve["label"] for curve in earlier["curve"]])
    for curve in earlier["curve"]:
        curve.pop("full", None)
    return {
        **earlier,
        **table,
        "base": _over(earlier.get("base", {}), table.get("base", {})),
        "curve": [_over(curve, own.get(curve["label"], {})) for curve in earlier["curve"]],
    }


def _over(earlier: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others put over them, whether nested or dotted."""
    return {**_flat(earlier), **_flat(own)}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    search = {name: settings[name] for name in ("search",) if name in settings}
    return {**flat_table({**settings, "search": None}), **search}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidParameterError("experiment", str(path), f"TOML ({error})") from error


def _curve(table: Mapping[str, Any]) -> Curve:
    settings = dict(table)
    search = settings.pop("search", None)
    return Curve(
        label=settings.pop("label", ""),
        full=settings.pop("full", {}),
        search=None if search is None else Range(**search),
        settings=settings,
    )


def read_seeds(text: str) -> list[int]:
    """Read seeds as the command line has them.

    Raises
    ------
    InvalidParameterError
        If they are not whole numbers that differ, at least 0.

    Examples
    --------
    >>> read_seeds("0,1,2")
    [0, 1, 2]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise InvalidParameterError("--seeds", text, "whole numbers that differ, as in 0,1,2")
    return [int(part) for part in parts]
