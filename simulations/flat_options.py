"""Strategies from flat keys, as the command line and experiment files have them.

``--set seed=1 --set epsilon=2`` is ``loop=LoopOptions(seed=1)`` and ``epsilon=2`` of a strategy:
which object takes a key follows from the fields of the dataclasses.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from flwr_privacy.errors import InvalidParameterError, KeywordError, check_choice
from flwr_privacy.keywords import nearest, option_types
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.strategies import LoopOptions, SchemeStrategy
from flwr_privacy.udp import (
    ClientLosses,
    Discounting,
    LinearNoise,
    PlateauNoise,
    RecordLevel,
    UserLevel,
)

__all__ = ["flat_keys", "keywords_of", "strategy_of"]

S = TypeVar("S", bound=SchemeStrategy)

_TREE = ("fanouts", "p")
"""Keys that make a tree, in place of the name of its file under ``tree``."""

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "loop": ("", {"": LoopOptions}),
    "privacy": ("unit", {"user": UserLevel, "record": RecordLevel}),
    "schedule": (
        "schedule",
        {"discounting": Discounting, "linear": LinearNoise, "plateau": PlateauNoise},
    ),
    "judge": ("judge", {"clients": ClientLosses}),
}
"""By field: the key that chooses the kind of its options, and the kinds by that key's values."""

_REQUIRED = {
    "unit": "unit=user (all data of a client is protected) or unit=record (one record is)",
    "judge": "'clients', or a function on the server",
}
"""What is allowed for keys without a default."""


def flat_keys(kind: type) -> list[str]:
    """Return all keys that `strategy_of` takes for a strategy."""
    keys: list[str] = []
    for field in fields(kind):
        if field.name not in _groups(kind):
            keys += [field.name] if field.init else []
            continue
        key, kinds = _groups(kind)[field.name]
        keys += [key] if key else []
        keys += [own for option in kinds.values() for own in flat_keys(option)]
    return list(dict.fromkeys([*keys, *(_TREE if "tree" in keys else ())]))


def strategy_of(kind: type[S], values: Mapping[str, Any]) -> S:
    """Return a strategy with parameters that are given by flat keys.

    Raises
    ------
    InvalidParameterError
        If a key is unknown, a value is not allowed, or two do not go together.
    """
    return kind(**keywords_of(kind, values))


def keywords_of(kind: type[SchemeStrategy], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a strategy for parameters that are given by flat keys.

    Raises
    ------
    InvalidParameterError
        If a key is unknown, or the value of an option is not allowed.
    """
    given, known = dict(values), flat_keys(kind)
    for key in given:
        if key not in known and key not in _groups(kind):
            raise KeywordError(kind.__name__, key, nearest(key, known))
    chosen = _options(kind, given)
    if "tree" in known:
        chosen["tree"] = _tree_of(given)
    for key in given:
        if key not in {field.name for field in fields(kind)}:
            raise KeywordError(kind.__name__, key, _elsewhere(kind, key))
    return {**given, **chosen}


def _groups(kind: type) -> dict[str, tuple[str, dict[str, Any]]]:
    if kind is LoopOptions:
        return {}
    return {
        field.name: _KINDS[field.name] for field in fields(kind) if _has_kinds(kind, field.name)
    }


def _has_kinds(kind: type, name: str) -> bool:
    return name in _KINDS and set(_KINDS[name][1].values()) <= set(option_types(kind).get(name, ()))


def _options(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that some fields take, from what is given, which loses their keys."""
    chosen: dict[str, Any] = {}
    for name, (key, kinds) in _groups(kind).items():
        if name in given and not isinstance(given[name], str):
            chosen[name] = given.pop(name)  # as an object
            continue
        value = given.pop(key, None) if key else ""
        if value is None and _default(kind, name) is not MISSING:
            continue
        if value is None:
            raise InvalidParameterError(key, None, _REQUIRED[key])
        option = kinds[check_choice(key, value, kinds)]
        own = _options(option, given)
        own |= {f.name: given.pop(f.name) for f in fields(option) if f.name in given}
        chosen[name] = option(**own)
    return chosen


def _default(kind: type, name: str) -> Any:
    return next(field.default for field in fields(kind) if field.name == name)


def _elsewhere(kind: type, key: str) -> str:
    """Return with which choices a strategy has a key, where it has it not with those made."""
    having = [
        f"{selector}={value}"
        for owner in (kind, Discounting, PlateauNoise)
        for selector, kinds in _groups(owner).values()
        for value, option in kinds.items()
        if key in {field.name for field in fields(option)}
    ]
    return f"only with {' or '.join(dict.fromkeys(having))}"


def _tree_of(given: dict[str, Any]) -> TierTree:
    """Return the tree that ``fanouts`` and ``p`` make, or that lies in a file."""
    tree, fanouts, p = given.get("tree"), given.pop("fanouts", None), given.pop("p", None)
    if (fanouts is None) == (tree is None):
        raise InvalidParameterError(
            "fanouts", fanouts, "the tree of aggregators: either `fanouts` or `tree`"
        )
    if fanouts is not None:
        return TierTree.of_fanouts(fanouts, p=p)
    if p is not None:
        raise InvalidParameterError("p", p, "nothing beside `tree`, which says who is trusted")
    return tree if isinstance(tree, TierTree) else TierTree.read(str(tree))
