"""Reads the tree of a run: which nodes the devices trust, and where noise is added.

The strategy writes it into the run folder as ``tree.json``:

    {"nodes": [{"name": "t1-0", "parent": "cloud", "tier": 1, "secure": true, "noise": true,
                "sigma": 0.86, "epsilon": 8.0, "devices": 5}, ...]}

``noise`` says whether the node adds noise to what it sends to its parent, with standard deviation
``sigma`` per coordinate and up to ``epsilon`` over the whole training; both may be null. The cloud
may be left out, and a leaf may stand for several ``devices``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flwr_privacy.errors import (
    DataError,
    InvalidParameterError,
    check_flag,
    check_integer,
    check_number,
)

__all__ = ["TREE_FILE", "TreeNode", "children_of", "read_tree", "variances"]

TREE_FILE = "tree.json"
"""Name of the file in a run folder."""


@dataclass(frozen=True, kw_only=True)
class TreeNode:
    """A node of the tree, as ``tree.json`` has it.

    Parameters
    ----------
    name : str
        Its name, unique in the tree.
    parent : str or None
        Name of the node above; None for the cloud.
    tier : int
        0 for the cloud, one more on each level.
    secure : bool
        Whether all its children trust it; true for devices.
    noise : bool
        Whether it adds noise to what it sends up.
    sigma : float or None
        Standard deviation of that noise per coordinate.
    epsilon : float or None
        What its devices spend over the whole training.
    devices : int
        Number of devices at or below it.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    name: str
    parent: str | None
    tier: int
    secure: bool
    noise: bool
    sigma: float | None = None
    epsilon: float | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidParameterError("name", self.name, "text")
        if self.parent is not None and not isinstance(self.parent, str):
            raise InvalidParameterError("parent", self.parent, "text or null")
        check_integer("tier", self.tier, minimum=0)
        check_flag("secure", self.secure)
        check_flag("noise", self.noise)
        for name in ("sigma", "epsilon"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), minimum=0)
        check_integer("devices", self.devices, minimum=0)


def read_tree(path: Path) -> tuple[TreeNode, ...] | None:
    """Return the nodes of a tree, the cloud first; None where there is no such file.

    Raises
    ------
    DataError
        If the file is damaged; the message names it and what is wrong.
    """
    if not path.exists():
        return None
    try:
        entries = json.loads(path.read_bytes())["nodes"]
        nodes = [_node(entry) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no tree ({error})") from error
    names = {node.name: node for node in nodes}
    above = {node.parent for node in nodes} - set(names)
    if len(names) != len(nodes) or len(above) != 1:
        raise DataError(f"{path}: no tree (a name comes twice, or there is not one root)")
    (root,) = above
    if root is not None:  # the cloud was left out
        count = sum(node.devices for node in nodes if node.parent == root)
        cloud = TreeNode(name=root, parent=None, tier=0, secure=False, noise=False, devices=count)
        nodes, names[root] = [cloud, *nodes], cloud
    for node in nodes:
        if node.tier != (0 if node.parent is None else names[node.parent].tier + 1):
            raise DataError(f"{path}: no tree (the tier of {node.name!r} does not follow)")
    return tuple(sorted(nodes, key=lambda node: node.tier))


def _node(entry: Mapping[str, Any]) -> TreeNode:
    known = [field.name for field in fields(TreeNode)]
    return TreeNode(**{name: entry[name] for name in known if name in entry})


def variances(nodes: Sequence[TreeNode], *, answered: float = 1.0) -> dict[int, float]:
    """Return, by tier, the noise variance of a coordinate of the average at the cloud.

    It is that of one aggregation up to the cloud in which every aggregator takes part.

    Parameters
    ----------
    nodes : Sequence of TreeNode
        As `read_tree` returns them.
    answered : float, default 1.0
        Share of the devices, above 0, that take part where devices add noise, equally many under
        each node.

    Examples
    --------
    >>> cloud = TreeNode(name="c", parent=None, tier=0, secure=False, noise=False)
    >>> a, b = (
    ...     TreeNode(name=name, parent="c", tier=1, secure=True, noise=True, sigma=2.0)
    ...     for name in "ab"
    ... )
    >>> variances([cloud, a, b])
    {1: 2.0}
    """
    children = children_of(nodes)
    weights: dict[str, float] = {}
    totals: dict[int, float] = {}
    for node in sorted(nodes, key=lambda node: node.tier):
        siblings = 1 if node.parent is None else len(children[node.parent])
        weights[node.name] = (1.0 if node.parent is None else weights[node.parent]) / siblings
        if node.noise and node.sigma is not None:
            # A leaf that stands for several devices has the mean of their noise.
            sources = 1.0 if children[node.name] else answered * node.devices
            added = (weights[node.name] * node.sigma) ** 2 / sources
            totals[node.tier] = totals.get(node.tier, 0.0) + added
    return totals


def children_of(nodes: Sequence[TreeNode]) -> dict[str, list[TreeNode]]:
    """Return the children of each node by its name, in their order."""
    children: dict[str, list[TreeNode]] = {node.name: [] for node in nodes}
    for node in nodes:
        if node.parent is not None:
            children[node.parent].append(node)
    return children
