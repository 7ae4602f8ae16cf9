"""Reads an experiment from a file of the user's own, with a task of theirs in it."""

from pathlib import Path

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.settings.effect import check_effect, dotted, without_effect

from .description import ExperimentDescription, read

__all__ = ["is_own_file", "own_experiment"]


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
