"""Writes a strategy as the flat keys that make it: the inverse of `flat_options`."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.strategies import SchemeStrategy

from .flat_options import Choice, choices_of, strategy_of

__all__ = ["budget_of", "flat_values"]

_COMMON = {entry.name for entry in fields(SchemeStrategy)} - {"secure_sum"}
_BY_NAME = "give the scheme by its name and keys: {'scheme': ..., key: value}"


def flat_values(strategy: SchemeStrategy, *, defaults: bool = False) -> dict[str, Any]:
    """Return the flat keys and values that make a strategy, as settings files keep them.

    Parameters
    ----------
    strategy : SchemeStrategy
        One that has trained nothing yet.
    defaults : bool, default False
        Whether what is at its default is there, too; what is None never is.

    Raises
    ------
    InvalidParameterError
        If an option is no number, text, list or table, such as a function; or if one is set that
        all strategies have (seed, clients, run folder, ...), as runs have settings for those.

    Examples
    --------
    >>> from flwr_privacy.strategies import UDP, UserLevel
    >>> flat_values(UDP(privacy=UserLevel(epsilon=4.0)))
    {'unit': 'user', 'epsilon': 4.0}
    """
    kind = type(strategy)
    values = _values(strategy, defaults=False)
    # What a strategy found out by itself, from None, is not chosen.
    for entry in fields(kind):
        chosen = entry.name in values and entry.name not in choices_of(kind)
        if chosen and entry.default is None:
            without = {key: value for key, value in values.items() if key != entry.name}
            usual = strategy_of(kind, {**without, "secure_sum": strategy.secure_sum})
            if getattr(usual, entry.name) == values[entry.name]:
                values = without
    again = strategy_of(kind, {**values, "secure_sum": strategy.secure_sum})
    for entry in fields(kind):
        if not entry.init:
            continue
        value, same = getattr(strategy, entry.name), getattr(again, entry.name)
        if value == same:
            continue
        if entry.name in _COMMON:
            allowed = "its default: what all schemes share is set for the run, not in a strategy"
            raise InvalidParameterError(entry.name, value, allowed)
        raise InvalidParameterError(entry.name, value, f"keys that tell it apart; {_BY_NAME}")
    return _values(strategy, defaults=True) if defaults else values


def budget_of(strategy: SchemeStrategy) -> float | None:
    """Return the epsilon that a strategy was given; None if it has no single one.

    Examples
    --------
    >>> from flwr_privacy.strategies import FedAvg, UDP, UserLevel
    >>> budget_of(UDP(privacy=UserLevel())), budget_of(FedAvg())
    (8.0, None)
    """
    options = [getattr(strategy, entry.name) for entry in fields(strategy) if entry.init]
    for owner in (strategy, *filter(is_dataclass, options)):
        if any(entry.name == "epsilon" for entry in fields(owner)):
            epsilon = owner.epsilon  # type: ignore[union-attr]
            return float(epsilon) if isinstance(epsilon, int | float) else None
    return None


def _values(options: Any, *, defaults: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    choices = choices_of(type(options))
    for entry in fields(options):
        value = getattr(options, entry.name)
        if not entry.init or entry.name in (*_COMMON, "secure_sum"):
            continue
        choice = choices.get(entry.name)
        if choice is not None and is_dataclass(value) and not isinstance(value, type):
            own = _of_choice(options, entry, choice, value, defaults=defaults)
        elif value is None or (not defaults and _is_default(entry, value)):
            continue
        else:
            own = {choice.key if choice is not None else entry.name: _plain(entry.name, value)}
        if clashing := found.keys() & own.keys():
            raise InvalidParameterError(min(clashing), own[min(clashing)], f"once; {_BY_NAME}")
        found |= own
    return found


def _of_choice(
    owner: Any, entry: "Field[Any]", choice: Choice, value: Any, *, defaults: bool
) -> dict[str, Any]:
    """Return the key that chooses an option, and the option's own keys."""
    name = next((name for name, kind in choice.kinds.items() if kind is type(value)), None)
    if name is None:
        raise InvalidParameterError(entry.name, value, f"one of the kinds of ours; {_BY_NAME}")
    # Where no key says that the option is there, its own keys do.
    every = defaults or (not choice.key and entry.default is None)
    own = _values(value, defaults=every)
    if choice.key and (defaults or name != choice.usual(type(owner))):
        own = {choice.key: name, **own}
    return own


def _is_default(entry: "Field[Any]", value: Any) -> bool:
    if entry.default_factory is not MISSING:
        return bool(value == entry.default_factory())
    return entry.default is not MISSING and bool(value == entry.default)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(name, part) for key, part in value.items()}
    allowed = f"a number, text, a list or a table, as a run folder keeps it; {_BY_NAME}"
    raise InvalidParameterError(name, type(value).__name__, allowed)
