"""Which settings have no effect on a run, and what to set instead.

A scheme that makes its clients' steps itself does not use the training's own, a split by chance has
no skew, and so on. What is set and would do nothing is refused, and a run folder does not keep it.
`tests/simulations/settings/test_effect.py` holds this table to what runs read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import Any

from flwr_privacy.errors import InvalidParameterError

from .run_settings import PartitionSettings, Settings, TrainingSettings, flat_table
from .schemes import scheme

__all__ = ["changed", "check_effect", "dotted", "flat_settings", "without_effect"]

_SPLITS = {"alpha": ("dirichlet",), "shards": ("shards",), "labels": ("labels", "label-sets")}
"""Parameters of the partition that only some kinds have."""

_VALIDATED = ("discounting", "plateau")
"""Schedules that follow a validation loss."""


def check_effect(settings: Settings, given: Iterable[str]) -> None:
    """Refuse what was set and has no effect.

    Parameters
    ----------
    settings : Settings
        The settings of a run, complete.
    given : iterable of str
        Dotted keys of the settings that somebody chose.

    Raises
    ------
    InvalidParameterError
        If one has no effect; it says with what, and what to set instead.

    Examples
    --------
    >>> check_effect(Settings(), ["training.epochs"])
    >>> check_effect(Settings(), ["partition.alpha"])
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.InvalidParameterError: partition.alpha = 0.5: expected nothing with \
partition.kind 'iid', which does not use it: it is for partition.kind=dirichlet
    """
    idle = without_effect(settings)
    for key in given:
        for name in (key, key.partition(".")[0]):
            if name in idle:
                raise InvalidParameterError(key, attrgetter(key)(settings), idle[name])


def flat_settings(settings: Settings) -> dict[str, Any]:
    """Return what is set and has an effect, with dotted keys; where the data lies is left out.

    Examples
    --------
    >>> flat_settings(Settings())["partition.kind"]
    'iid'
    """
    idle = without_effect(settings)
    flat = {
        key: value
        for key, value in flat_table(asdict(replace(settings, data_root=None))).items()
        if idle.keys().isdisjoint((key, key.partition(".")[0]))
    }
    return flat if settings.secure_sum is None else {**flat, "secure_sum": True}


def without_effect(settings: Settings) -> dict[str, str]:
    """Return the settings that have no effect, by dotted key, with what is allowed in their place.

    Raises
    ------
    InvalidParameterError
        If there is no such scheme.
    """
    return dict([*_training(settings), *_data(settings), *_stragglers(settings)])


def changed(settings: Settings, *usual: Settings) -> list[str]:
    """Return the dotted keys whose values differ from those of all other settings.

    Examples
    --------
    >>> changed(Settings(rounds=3, training=TrainingSettings(epochs=2)), Settings())
    ['rounds', 'training.epochs']
    """
    keys = [
        key
        for entry in fields(Settings)
        for key in (
            [f"{entry.name}.{part.name}" for part in fields(_TABLES[entry.name])]
            if entry.name in _TABLES
            else [entry.name]
        )
    ]
    return [key for key in keys if all(_differ(key, settings, other) for other in usual)]


_TABLES: dict[str, Any] = {"partition": PartitionSettings, "training": TrainingSettings}


def _differ(key: str, one: Settings, other: Settings) -> bool:
    return bool(attrgetter(key)(one) != attrgetter(key)(other))


def dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of settings that may be nested; those of a scheme are left out.

    Examples
    --------
    >>> dotted({"rounds": 3, "training": {"epochs": 2}, "strategy.unit": "user"})
    ['rounds', 'training.epochs']
    """
    keys: list[str] = []
    for key, value in values.items():
        nested = isinstance(value, Mapping)
        keys += dotted(value, f"{prefix}{key}.") if nested else [prefix + key]
    return [key for key in keys if not key.startswith("strategy.")]


def _training(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the parameters of the clients' own training that a scheme does not use."""
    chosen = scheme(settings.scheme)
    own = {**settings.strategy, **chosen.fixed(settings)}
    name, unit = settings.scheme, own.get("unit")
    instead: dict[str, str] = {}
    case = f"under '{name}'"
    if chosen.vertical:
        instead = {"epochs": "a round is one batch: set rounds", "decay": "its steps do not fall"}
        if "learning_rate" in own:
            instead["learning_rate"] = "learning_rate is set (without 'training.')"
        if "batch_size" in own:
            instead["batch_size"] = "batch_size is set (without 'training.')"
    elif chosen.own_client:
        instead = {
            "epochs": "a round is one gradient: set rounds",
            "batch_size": "set batch_fraction",
            "decay": "set schedule=inverse",
        }
        if "learning_rate" in own:
            instead["learning_rate"] = "learning_rate is set, a step on the sum over all records"
    elif name == "udp" and unit == "record":
        case += " with unit=record, which makes the clients' steps itself"
        instead = {
            "epochs": "set local_epochs (without 'training.')",
            "batch_size": "set batch_size (without 'training.')",
            "learning_rate": "set learning_rate (without 'training.')",
            "decay": "its steps do not fall",
        }
    elif name == "udp" and unit == "dp-sgd":
        case += " with unit=dp-sgd, which draws the records of a step"
        instead = {"epochs": "set steps, those of a round", "batch_size": "set sampling_rate"}
    elif "steps" in own:  # M2FDP's schedule counts steps
        instead = {"epochs": "set steps, the local steps of a round"}
        if unit == "record":
            case += " with unit=record, which draws the records of a step"
            instead["batch_size"] = "set sampling_rate"
    for entry in fields(TrainingSettings):
        if entry.name in instead:
            yield f"training.{entry.name}", f"nothing {case}: {instead[entry.name]}"


def _data(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the settings about the clients' records and about who is asked that are not used."""
    chosen, own = scheme(settings.scheme), settings.strategy
    if chosen.vertical:
        allowed = f"nothing with '{settings.task}', whose clients have columns of all records"
        for name in ("partition", "fraction_evaluate", "validation_records"):
            yield name, allowed
        yield "per_round", f"{allowed}: all of them take part in every round"
        return
    split = settings.partition
    for entry in fields(PartitionSettings):
        kinds = _SPLITS.get(entry.name, (split.kind,))
        if split.kind not in kinds:
            these = " or ".join(f"partition.kind={kind}" for kind in kinds)
            yield (
                f"partition.{entry.name}",
                f"nothing with partition.kind '{split.kind}', which does not use it: it is for "
                f"{these}",
            )
    validates = chosen.validated and own.get("schedule") in _VALIDATED and "validation" not in own
    if not validates:
        yield (
            "validation_records",
            f"nothing under '{settings.scheme}' without a validation loss on the server: they are "
            "for udp with schedule=discounting or schedule=plateau; to train on fewer records set "
            "train_records",
        )


def _stragglers(settings: Settings) -> Iterator[tuple[str, str]]:
    law = settings.stragglers
    if law is None:
        return
    if law.kind == "constant":
        yield "stragglers.spread", "nothing with stragglers.kind 'constant', which varies nothing"
    if law.slow_fraction == 0:
        for name in ("slowdown", "persistent"):
            yield f"stragglers.{name}", "nothing without stragglers.slow_fraction above 0"
