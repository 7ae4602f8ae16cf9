"""Builds the shape of a tree from the parents of its nodes, and refuses other graphs."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.wire.identity import check_client_id

__all__ = [
    "CLOUD",
    "add_leaves",
    "breadth_first",
    "check_name",
    "check_names",
    "check_parents",
    "check_shape",
    "check_trusted",
    "children_of",
    "cycle",
    "read_fanouts",
]

CLOUD = "cloud"
"""Name of the root. It is never secure."""

_MOST_DEVICES = 10**7


def check_name(parameter: str, name: Any, *, or_cloud: bool = False) -> str:
    """Return `name` if it can name a node, with `or_cloud` the root too."""
    if not isinstance(name, str) or (name == CLOUD and not or_cloud):
        raise InvalidParameterError(parameter, name, f"names other than '{CLOUD}'")
    return check_client_id(name, parameter=parameter)


def check_names(parameter: str, names: Iterable[Any]) -> tuple[str, ...]:
    """Return `names` if they are different names of nodes, at least one."""
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise InvalidParameterError(parameter, names, "a list of names")
    checked = tuple(check_name(parameter, name) for name in names)
    if not checked:
        raise InvalidParameterError(parameter, list(checked), "at least one name")
    if len(set(checked)) < len(checked):
        twice = Counter(checked).most_common(1)[0][0]
        raise InvalidParameterError(parameter, twice, "different names: this one is there twice")
    return checked


def read_fanouts(fanouts: Sequence[int] | int | str) -> list[int]:
    """Return the numbers of children by tier."""
    given: Any = [fanouts] if isinstance(fanouts, int) else fanouts
    if isinstance(fanouts, str):
        try:
            given = [int(part) for part in fanouts.split(",")]
        except ValueError:
            raise InvalidParameterError("fanouts", fanouts, "numbers, as '10,5'") from None
    if not isinstance(given, Sequence) or not given:
        raise InvalidParameterError("fanouts", fanouts, "a number of children for every tier")
    counts = [check_integer("fanouts", count, minimum=1) for count in given]
    if math.prod(counts) > _MOST_DEVICES:
        raise InvalidParameterError("fanouts", fanouts, f"at most {_MOST_DEVICES} devices")
    return counts


def check_parents(parents: Any, devices: tuple[str, ...]) -> dict[str, str]:
    """Return a copy of `parents` if every name is one, and every parent an aggregator in it."""
    if not isinstance(parents, Mapping):
        raise InvalidParameterError("parents", parents, "a table of parents by node")
    leaves = frozenset(devices)
    for node, parent in parents.items():
        check_name("parents", node)
        if parent == CLOUD:
            continue
        if not isinstance(parent, str) or parent not in parents:
            allowed = f"'{CLOUD}' or a node that has a parent itself, as the parent of {node!r}"
            raise InvalidParameterError("parents", parent, allowed)
        if parent in leaves:
            allowed = f"an aggregator, not a device, as the parent of {node!r}"
            raise InvalidParameterError("parents", parent, allowed)
    for device in devices:
        if device not in parents:
            raise InvalidParameterError("devices", device, "a device that has a parent")
    return dict(parents)


def add_leaves(
    parents: dict[str, str], names: Iterable[str], *, above: Sequence[str]
) -> tuple[str, ...]:
    """Give devices of these names, one by one, the parents `above`, and return the names."""
    leaves = check_names("devices", names)
    if len(leaves) != len(above):
        allowed = f"{len(above)} names, one for every leaf"
        raise InvalidParameterError("devices", f"{len(leaves)} names", allowed)
    if both := parents.keys() & set(leaves):
        raise InvalidParameterError("devices", min(both), "no name of an aggregator")
    parents.update(zip(leaves, above, strict=True))
    return leaves


def children_of(parents: Mapping[str, str], devices: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the children of the cloud and of every aggregator, each of which has one."""
    leaves = frozenset(devices)
    aggregators = [node for node in parents if node not in leaves]
    children: dict[str, list[str]] = {node: [] for node in (CLOUD, *aggregators)}
    for node in (*aggregators, *devices):
        children[parents[node]].append(node)
    for node in aggregators:
        if not children[node]:
            raise InvalidParameterError("parents", node, "an aggregator with a child, or a device")
    return {node: tuple(below) for node, below in children.items()}


def breadth_first(children: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the nodes by tier, from the cloud down."""
    tiers: list[tuple[str, ...]] = [(CLOUD,)]
    # Everybody has one parent, so nobody is met twice and this ends.
    while level := tuple(child for node in tiers[-1] for child in children.get(node, ())):
        tiers.append(level)
    return tuple(tiers)


def check_shape(
    parents: Mapping[str, str], devices: tuple[str, ...], tiers: tuple[tuple[str, ...], ...]
) -> None:
    """Check that every node is below the cloud, and that all devices are on one tier."""
    if sum(map(len, tiers)) != len(parents) + 1:
        reached = {node for tier in tiers for node in tier}
        raise cycle(parents, next(node for node in parents if node not in reached))
    if len(tiers[-1]) != len(devices):
        leaves = frozenset(devices)
        tier, device = next(
            (i, node) for i, tier in enumerate(tiers) for node in tier if node in leaves
        )
        allowed = f"all devices on one tier, and it is on tier {tier}, {tiers[-1][0]!r} on tier "
        raise InvalidParameterError("devices", device, allowed + str(len(tiers) - 1))


def check_trusted(trusted: Any, aggregators: Container[str]) -> None:
    """Refuse labels of trust for anything but aggregators below the cloud."""
    if isinstance(trusted, str) or not isinstance(trusted, Iterable):
        raise InvalidParameterError("trusted", trusted, "a list of aggregators")
    for name in sorted(trusted, key=str):
        if name not in aggregators or name == CLOUD:
            allowed = "an aggregator below the cloud, which is never trusted"
            raise InvalidParameterError("trusted", name, allowed)


def cycle(parents: Mapping[str, str], node: str) -> InvalidParameterError:
    """Return the error for a node whose parents never come to the cloud."""
    seen: dict[str, None] = {}
    while node not in seen:
        seen[node] = None
        node = parents[node]
    circle = list(seen)[list(seen).index(node) :]
    allowed = f"a way to '{CLOUD}', not the cycle {' -> '.join([*circle[:8], node])}"
    return InvalidParameterError("parents", node, allowed)
