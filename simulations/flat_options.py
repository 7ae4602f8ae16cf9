"""Strategies from flat keys, as the command line and experiment files have them.

``--set seed=1 --set epsilon=2`` is ``loop=LoopOptions(seed=1)`` and ``epsilon=2`` of a strategy:
which object takes a key follows from the fields of the dataclasses.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from flwr_privacy.errors import InvalidParameterError, KeywordError
from flwr_privacy.keywords import nearest, option_types
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.strategies import SchemeStrategy

__all__ = ["flat_keys", "keywords_of", "strategy_of"]

S = TypeVar("S", bound=SchemeStrategy)

_TREE = ("fanouts", "p")
"""Keys that make a tree, in place of the name of its file under ``tree``."""

_FLAT = ("loop",)
"""Fields whose options have flat keys."""


def flat_keys(kind: type[SchemeStrategy]) -> list[str]:
    """Return all keys that `strategy_of` takes for a strategy."""
    keys = [field.name for field in fields(kind) if field.init]
    for name, options in _options(kind).items():
        keys.remove(name)
        keys += [field.name for option in options for field in fields(option)]
    return [*keys, *(_TREE if "tree" in keys else ())]


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
    given = dict(values)
    known, groups = flat_keys(kind), _options(kind)
    for key in given:
        if key not in known and key not in groups:
            raise KeywordError(kind.__name__, key, nearest(key, known))
    for name, options in groups.items():
        if name not in given:
            (option,) = options
            own = {f.name: given.pop(f.name) for f in fields(option) if f.name in given}
            given[name] = option(**own)
    if "fanouts" in known:
        given["tree"] = _tree_of(given)
    return given


def _options(kind: type[SchemeStrategy]) -> dict[str, list[type]]:
    return {name: options for name, options in option_types(kind).items() if name in _FLAT}


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
