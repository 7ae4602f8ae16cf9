"""A paper's figure as an experiment: one TOML file says what to train and what is claimed.

``papers/<scheme>/<figure>.toml`` has a title, the settings that all curves share (``[base]``), what
the paper's own size puts over them (``[full]``), the curves (``[[curve]]``) and the claims
(``[[claim]]``, see `flwr_privacy.simulations.experiment.claims`). Each curve is trained once per
seed. Every setting that is not in the file is `Settings`' own default.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.simulations.experiment.claims import Claim, Target
from flwr_privacy.simulations.experiment.curves import METRICS
from flwr_privacy.simulations.settings import Settings

__all__ = ["AXES", "Curve", "Experiment", "experiment", "names", "read_seeds"]

PAPERS = Path(__file__).parent.parent / "papers"
AXES = ("rounds", "bits")


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
    """

    label: str
    settings: Mapping[str, Any]
    full: Mapping[str, Any]

    @property
    def slug(self) -> str:
        """The label as the start of a folder's name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a file in ``papers/`` says.

    Parameters
    ----------
    name : str
        ``<scheme>/<figure>``.
    title, paper, figure, about : str
        What it shows, where it is from, and what was left open there and chosen here.
    metrics : Sequence of str
        ``accuracy`` and ``loss``, as they are drawn.
    axes : Sequence of str
        ``rounds`` and ``bits``: cumulative uplink bits per value of the model and drawn client.
    base, full : Mapping
        Settings of all curves, and those of the paper's size.
    curves, claims, targets : Sequence of Curve, Claim, Target
        Targets are levels of which is said what reaching them costs.

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

    def __post_init__(self) -> None:
        for metric in self.metrics:
            check_choice("metrics", metric, METRICS)
        for axis in self.axes:
            check_choice("axes", axis, AXES)
        slugs = [curve.slug for curve in self.curves]
        if not slugs or "" in slugs or len(set(slugs)) < len(slugs):
            labels = [curve.label for curve in self.curves]
            raise InvalidParameterError("curve.label", labels, "labels that differ, one at least")
        for claim in self.claims:
            for label in claim.labels:
                check_choice(f"claim {claim.id}", label, [curve.label for curve in self.curves])

    def settings(
        self, curve: Curve, *, seed: int, full: bool = False, data_root: Path | None = None
    ) -> Settings:
        """Return the settings of a curve's run with a seed.

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
        path.relative_to(PAPERS).with_suffix("").as_posix() for path in PAPERS.glob("*/*.toml")
    )


def experiment(name: str) -> Experiment:
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
    return read(PAPERS / f"{check_choice('experiment', name, names())}.toml", name)


def read(path: Path, name: str) -> Experiment:
    """Read an experiment from a file; errors are those of `experiment`."""
    text = path.read_text(encoding="utf-8")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidParameterError("experiment", str(path), f"TOML ({error})") from error
    curves, claims, targets = (table.pop(key, []) for key in ("curve", "claim", "target"))
    values = {
        **{"about": "", "metrics": ["accuracy"], "axes": AXES, "base": {}, "full": {}},
        **table,
        "name": name,
        "curves": [_curve(entry) for entry in curves],
        "claims": [Claim.of(entry) for entry in claims],
        "targets": [Target.of(entry) for entry in targets],
    }
    try:
        return Experiment(**values)
    except TypeError as error:  # a key too many or too few
        raise InvalidParameterError("experiment", str(path), f"known keys ({error})") from error


def _curve(table: Mapping[str, Any]) -> Curve:
    settings = dict(table)
    return Curve(label=settings.pop("label", ""), full=settings.pop("full", {}), settings=settings)


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
