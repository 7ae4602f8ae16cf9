"""Reads experiments from their TOML files, a paper's by their names and a user's own."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.simulations.settings.effect import check_effect, dotted, without_effect
from flwr_privacy.simulations.settings.run_settings import flat_table

from .claims import Claim, Target
from .description import Curve, ExperimentDescription, Range, Sweep

__all__ = ["experiment", "is_own_file", "names", "own_experiment", "place_of", "read"]

RESEARCH = Path(__file__).parent.parent
USUAL_AXES = ("rounds", "bits")


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


def is_own_file(name: str) -> bool:
    """Return whether a name is that of a file rather than of a paper's figure."""
    return name.endswith(".toml")


def own_experiment(path: Path, *, full: bool) -> ExperimentDescription:
    """Read an experiment from a file; title and source may be left out.

    Parameters
    ----------
    path : Path
        The file, as described in `flwr_privacy.simulations.research.experiments.description`.
    full : bool
        Whether the settings of ``full`` count.

    Raises
    ------
    InvalidParameterError
        If there is no such file, or it says something that is not understood or has no effect:
        a setting of one curve, or a setting of all curves that has none for any of them.
    """
    if not path.is_file():
        raise InvalidParameterError("experiment", str(path), "a TOML file that exists")
    own = {"title": path.stem, "paper": "", "figure": path.name}
    chosen = read(path, path.stem, usual=own)
    if full and not chosen.smaller:
        raise InvalidParameterError("--full", True, f"a table [full] in {path.name}")
    if not chosen.function:
        _check_effect(chosen, full=full)
    return chosen


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


def _check_effect(chosen: ExperimentDescription, *, full: bool) -> None:
    plans = {plan.curve.label: plan for plan in chosen.planned(full=full)}
    of_all = set(dotted(chosen.base)) | (set(dotted(chosen.full)) if full else set())
    idle_for_all, settings = of_all, None
    for plan in plans.values():
        settings = chosen.settings(
            plan.curve, seed=0, full=full, x=plan.x, candidate=plan.candidate
        )
        own = dotted(plan.curve.settings) + (dotted(plan.curve.full) if full else [])
        check_effect(settings, own)
        idle = without_effect(settings)
        idle_for_all = {k for k in idle_for_all if k in idle or k.partition(".")[0] in idle}
    if settings is not None:
        check_effect(settings, sorted(idle_for_all))
