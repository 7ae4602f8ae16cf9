"""Names runs by what tells them apart: the settings in which they differ."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.stragglers import StragglerModel

from .card_run import CardRun
from .run_folder import RunFolder
from .run_settings import Settings, flat_table

__all__ = ["differing_settings", "labels"]

_SAID = ("strategy.epsilon", "strategy.alpha")
_NAMES = ("scheme", "task")  # which a label shows without their keys


def differing_settings(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return, for each run, the settings in which the runs differ.

    The keys are dotted (``partition.alpha``), the same for every run and in the order of
    `Settings`; None stands for what a run leaves unset.
    """
    tables = [run.told for run in runs]
    keys = _keys(tables)
    differing = [key for key in keys if any(t.get(key) != tables[0].get(key) for t in tables)]
    return [{key: table.get(key) for key in differing} for table in tables]


def labels(runs: Sequence[RunFolder], *, without: Container[str] = ()) -> list[str]:
    """Return a short name for each run: the scheme and what tells the run from the others.

    What most runs have in common is left out, but for a budget, and for the weight that tells
    ACFL from its rivals. Runs with equal names get that of their folder, or a number, in addition.

    Parameters
    ----------
    runs : sequence of RunFolder
        The runs.
    without : container of str, default ()
        Dotted keys of settings that no name has.
    """
    tables = [
        {key: value for key, value in table.items() if key not in without}
        for table in differing_settings(runs)
    ]
    usual = {key: _usual([table[key] for table in tables], key) for key in _keys(tables)}
    for key in _SAID:
        usual.pop(key, None)
    names = [
        _label({"scheme": run.settings.scheme, **table}, usual)
        for run, table in zip(runs, tables, strict=True)
    ]
    names = [
        # The name of a card's folder is a time, which tells nothing.
        f"{name} ({run.path.resolve().name})"
        if names.count(name) > 1 and not isinstance(run, CardRun)
        else name
        for run, name in zip(runs, names, strict=True)
    ]
    return [
        f"{name} #{names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


_NOTHING = object()
_DEFAULTS = flat_table(asdict(Settings(stragglers=StragglerModel(), secure_sum=SecureSum())))


def _keys(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table))


def _usual(values: Sequence[Any], key: str) -> Any:
    # What more than half of the runs have. What half of them leave unset is at its default where
    # it is in use at all; if all that use it have one value, it tells nothing apart.
    used = [value for value in values if value is not None]
    if key.startswith("training.") and len(set(map(str, used))) == 1:
        return used[0]
    if 2 * values.count(None) >= len(values):
        return _DEFAULTS.get(key)
    most = max(values, key=values.count)
    return most if 2 * values.count(most) > len(values) else _NOTHING


def _label(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    shown = {
        key: value
        for key, value in settings.items()
        if key in _NAMES or value not in (None, usual.get(key, _NOTHING))
    }
    # The last part of a key says enough, unless another key ends alike or it is a "kind".
    endings = Counter(key.rpartition(".")[2] for key in shown)
    parts = []
    for key, value in shown.items():
        ending = key.rpartition(".")[2]
        name = key if ending == "kind" or endings[ending] > 1 else ending
        parts.append(str(value) if key in _NAMES else name if value is True else f"{name} {value}")
    return ", ".join(parts)
