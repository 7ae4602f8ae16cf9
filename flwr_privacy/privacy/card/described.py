"""Says what a run trained, with which settings and versions, for its privacy card."""

import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any

from flwr_privacy import __version__

__all__ = ["Described", "settings_of"]

_PACKAGES = ("flwr", "numpy")
_MOST_ENTRIES = 20  # of a list or a table that is written out
_LEFT_OUT = {
    "insecure_seed",  # whoever knows it knows the noise
    *("run_dir", "pins", "write_card"),  # places on this machine
    *("name", "experiment_id"),  # the card has them
    # Of this process and not of the training:
    *("resume", "accept_lost_rounds", "forget_keys", "accept_ledgers"),
}


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a run trained.

    Parameters
    ----------
    name : str, default ""
        The app or the task.
    arrays, values : int, default 0
        Number of arrays of the model, and of numbers in them.
    began : str, default ""
        Date and time at which the run began, in UTC.
    versions : dict
        Versions of Python and of the packages that trained it.
    settings : dict
        The strategy's options that are not its defaults, as text.
    """

    name: str = ""
    arrays: int = 0
    values: int = 0
    began: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def now(cls, *, name: str, model: Mapping[str, Any], settings: dict[str, str]) -> "Described":
        """Return what is known when a run begins.

        Parameters
        ----------
        name : str
            The app or the task.
        model : mapping
            Its arrays by name.
        settings : dict
            The strategy's options, as `settings_of` tells them.
        """
        return cls(
            name=name,
            arrays=len(model),
            values=sum(array.size for array in model.values()),
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=dict(_versions()),
            settings=settings,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Described":
        """Read what `dataclasses.asdict` has written.

        Raises
        ------
        TypeError
            If a value is missing, unknown or of another type.
        """
        kinds: dict[str, Any] = {entry.name: entry.type for entry in fields(cls)}
        if set(values) != set(kinds):
            raise TypeError(f"{sorted(set(values) ^ set(kinds))} are missing or unknown")
        for name, value in values.items():
            plain = kinds[name] if kinds[name] in (str, int) else dict
            texts = value.items() if isinstance(value, dict) else ()
            if type(value) is not plain or not all(type(t) is str for pair in texts for t in pair):
                raise TypeError(f"{name} is no {plain.__name__} of texts")
        return cls(**values)


def settings_of(options: Any, *, without: Collection[str] = ()) -> dict[str, str]:
    """Return the fields of a dataclass that are not their defaults, as text.

    Arrays, functions and other objects are named and not written out: they may be data.

    Examples
    --------
    >>> from flwr_privacy.stragglers import StragglerModel
    >>> settings_of(StragglerModel(seconds=2.0))
    {'seconds': '2.0'}
    """
    told = {}
    for entry in fields(options):
        value = getattr(options, entry.name)
        hidden = entry.name.startswith("_") or entry.name in _LEFT_OUT or entry.name in without
        if not hidden and not _is_default(entry, value):
            told[entry.name] = _text(value)
    return told


def _is_default(entry: Any, value: Any) -> bool:
    default = entry.default
    return value is default or (type(value) is type(default) and _text(value) == _text(default))


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{name}={text}" for name, text in settings_of(value).items())
        return f"{type(value).__name__}({inside})"
    if isinstance(value, list | tuple | set | frozenset):
        if len(value) > _MOST_ENTRIES:
            return f"{len(value)} entries"
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        if len(value) > _MOST_ENTRIES:
            return f"{len(value)} entries"
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    packages = ((name, version(name)) for name in _PACKAGES)
    own = ("flwr-privacy", __version__)
    return (("python", platform.python_version()), own, *packages)
