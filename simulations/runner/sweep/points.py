"""Lists the runs of a sweep: each scheme at each of its settings with each seed."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flwr_privacy.errors import InvalidParameterError, KeywordError, check_integer
from flwr_privacy.simulations.app.server_app import build_strategy
from flwr_privacy.simulations.runner.complete_settings import own_parameters, settings_of
from flwr_privacy.simulations.settings.effect import without_effect
from flwr_privacy.simulations.settings.flat_values import budget_of
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.settings.schemes import scheme

__all__ = ["Point", "points", "seeds_of", "swept_values"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep.

    Parameters
    ----------
    label : str
        What the scheme is called.
    swept : Mapping
        The settings that differ from run to run, without the seed; a scheme lacks those that it
        does not have.
    epsilon : float or None
        The budget that was asked for, also where it is a default; None without a budget.
    seed : int
        Root of all draws.
    settings : Settings, optional
        What is trained; None for an app of the user's.
    """

    label: str
    swept: Mapping[str, Any]
    epsilon: float | None
    seed: int
    settings: Settings | None = None

    @property
    def folder(self) -> str:
        """Name of the run's folder: ``udp-epsilon-2-seed-0``."""
        swept = [f"{key}-{_text(value)}" for key, value in self.swept.items()]
        return "-".join([self.label.replace(" ", "-"), *swept, f"seed-{self.seed}"])


def points(
    schemes: Mapping[str, Mapping[str, Any]],
    *,
    common: Mapping[str, Any],
    sweep: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
) -> list[Point]:
    """Return the runs, the first seed of all schemes first, and refuse what would fail later.

    Parameters
    ----------
    schemes : Mapping
        Settings of each scheme with dotted keys, by its label.
    common : Mapping
        Settings that all runs share. A scheme runs without those that have no effect on it.
    sweep : Mapping
        Values of the settings that differ. A scheme that does not have one runs without it.
    seeds : Sequence of int
        Roots of all draws.

    Raises
    ------
    InvalidParameterError
        If a setting has an effect on no scheme, is given twice, or its value is not allowed.
    """
    used: set[str] = set()
    found: list[Point] = []
    for label, own in schemes.items():
        keys = {key: _key(own["scheme"], key) for key in sweep}
        for key, full in keys.items():
            if full in own:
                allowed = f"nothing: {key}={list(sweep[key])} gives it"
                raise InvalidParameterError(f"schemes[{label!r}]: {key}", own[full], allowed)
        shared = _with_effect(common, own)
        used.update(shared)
        mine = [key for key in sweep if _takes({**shared, **own}, keys[key], sweep[key][0])]
        used.update(mine)
        for values in itertools.product(*(sweep[key] for key in mine)):
            swept = dict(zip(mine, values, strict=True))
            full_keys = {keys[key]: value for key, value in swept.items()}
            for seed in seeds:
                settings = settings_of(
                    {**shared, **own, **full_keys, "seed": seed}, say=lambda line: None
                )
                epsilon = budget_of(build_strategy(settings, None))
                found.append(
                    Point(label=label, swept=swept, epsilon=epsilon, seed=seed, settings=settings)
                )
    for key in [*sweep, *common]:
        if key not in used:
            value = list(sweep[key]) if key in sweep else common[key]
            none = "no scheme has it" if key in sweep else "it has no effect on any scheme"
            allowed = f"nothing with {', '.join(schemes)}: {none}"
            raise InvalidParameterError(key, value, allowed)
    # What is broken off has all schemes with its first seeds.
    return sorted(found, key=lambda point: list(seeds).index(point.seed))


def seeds_of(seeds: Any) -> list[int]:
    """Return the seeds: so many from 0 on, or those that are listed.

    Raises
    ------
    InvalidParameterError
        If there is none, or one twice.
    """
    if not isinstance(seeds, list | tuple | range):
        return list(range(check_integer("seeds", seeds, minimum=1)))
    found = [check_integer("seeds", seed, minimum=0) for seed in seeds]
    if not found or len(set(found)) < len(found):
        raise InvalidParameterError("seeds", list(seeds), "different seeds, at least one")
    return found


def swept_values(name: str, values: Any) -> list[Any]:
    """Return the values of a setting, from a list of them or one.

    Raises
    ------
    InvalidParameterError
        If there is none, or one twice.
    """
    if hasattr(values, "tolist"):  # of NumPy
        values = values.tolist()
    listed = list(values) if isinstance(values, list | tuple | range) else [values]
    if not listed or any(value in listed[:place] for place, value in enumerate(listed)):
        raise InvalidParameterError(name, values, "different values, at least one")
    return listed


def _key(name: str, key: str) -> str:
    """Return the full name of a setting of a scheme."""
    own = own_parameters(scheme(name).strategy)
    settings = {entry.name for entry in fields(Settings)}
    return f"strategy.{key}" if key in own and key not in settings else key


def _with_effect(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common settings that have an effect on a scheme."""
    idle = without_effect(Settings().with_values({**common, **own}))
    return {
        key: value
        for key, value in common.items()
        if key not in own and idle.keys().isdisjoint((key, key.partition(".")[0]))
    }


def _takes(values: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether a scheme has a setting, with the choices that were made for it."""
    group, _, name = key.rpartition(".")
    if group != "strategy":
        if (group or name) not in {entry.name for entry in fields(Settings)}:
            return False
        return bool(_with_effect({key: value}, values))
    try:
        settings_of({**values, key: value}, say=lambda line: None)
    except KeywordError as error:
        if error.parameter == name:
            return False
        raise
    return True


def _text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in text)
