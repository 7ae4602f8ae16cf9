"""Groups equal siblings of a tree, so that a large tree can be drawn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .pieces import span_text
from .tree_nodes import TreeNode, children_of

__all__ = ["MOST_NODES", "Group", "accumulated", "tiers_of"]

MOST_NODES = 60
"""Nodes below the cloud from which on equal siblings are drawn as one."""
MOST_AGGREGATORS = 12
"""Aggregators of a tier from which on they are."""

Key = Callable[[TreeNode], object]


@dataclass(frozen=True)
class Group:
    """Siblings that are drawn as one.

    Parameters
    ----------
    members : tuple of TreeNode
        All of them, below all members of the group above.
    children : tuple of Group
        What is below them.
    least, most : int
        How many of them, or of their devices if they are leaves, a member of the group above has.
    """

    members: tuple[TreeNode, ...]
    children: tuple["Group", ...]
    least: int
    most: int

    @property
    def one(self) -> TreeNode:
        """The first member."""
        return self.members[0]

    @property
    def times(self) -> str:
        """How many there are; nothing if it is one."""
        if self.most == 1 and self.least == 1:
            return ""
        most = "" if self.least == self.most else f"\N{EN DASH}{self.most}"
        return f"\N{MULTIPLICATION SIGN} {self.least}{most}"

    @property
    def label(self) -> list[str]:
        """What noise the members add, in lines."""
        if not self.one.noise:
            return []
        sigmas = [node.sigma for node in self.members if node.sigma is not None]
        epsilons = [node.epsilon for node in self.members if node.epsilon is not None]
        lines = []
        if sigmas:
            lines.append(f"\N{GREEK SMALL LETTER SIGMA} {span_text(sigmas)}")
        if epsilons:
            lines.append(f"\N{GREEK SMALL LETTER EPSILON} {span_text(epsilons)}")
        return lines


def accumulated(nodes: Sequence[TreeNode]) -> Group:
    """Return a tree as it is, or with siblings drawn as one until there is room for it.

    Trees of more than 60 nodes, or 12 aggregators on a tier, are accumulated: first siblings that
    are equal, with all below them, where that is not enough those that differ in numbers alone, and
    at last all that have the same part in it.
    """
    children = children_of(nodes)

    def numbers(node: TreeNode) -> object:
        return [None if x is None else f"{x:.3g}" for x in (node.sigma, node.epsilon)]

    equal = _kinds_of_subtrees(nodes, children, lambda node: (_part(node), str(numbers(node))))
    alike = _kinds_of_subtrees(nodes, children, _part)
    keys: list[Key] = [
        lambda node: node.name,
        lambda node: equal[node.name],
        lambda node: alike[node.name],
        lambda node: (*_part(node), bool(children[node.name])),
    ]
    root = next(node for node in nodes if node.parent is None)
    for key in keys:
        tree = Group((root,), _groups((root,), children, key), 1, 1)
        if _fits(tree):
            break
    return tree


def _part(node: TreeNode) -> tuple[bool, bool]:
    return node.secure, node.noise


def _kinds_of_subtrees(
    nodes: Sequence[TreeNode], children: Mapping[str, Sequence[TreeNode]], key: Key
) -> dict[str, int]:
    """Return a number for each node: the same where nodes and all below them have equal keys."""
    numbers: dict[object, int] = {}
    kinds: dict[str, int] = {}
    for node in sorted(nodes, key=lambda node: -node.tier):
        below = tuple(sorted(kinds[child.name] for child in children[node.name]))
        kind = (key(node), node.devices, below)
        kinds[node.name] = numbers.setdefault(kind, len(numbers))
    return kinds


def _groups(
    members: Sequence[TreeNode], children: Mapping[str, Sequence[TreeNode]], key: Key
) -> tuple[Group, ...]:
    found: dict[object, dict[str, list[TreeNode]]] = {}
    for member in members:
        for child in children[member.name]:
            found.setdefault(key(child), {}).setdefault(member.name, []).append(child)
    groups = []
    for by_parent in found.values():
        counts = [
            sum(1 if children[child.name] else child.devices for child in by_parent.get(name, ()))
            for name in (member.name for member in members)
        ]
        together = tuple(child for siblings in by_parent.values() for child in siblings)
        below = _groups(together, children, key)
        groups.append(Group(together, below, min(counts), max(counts)))
    return tuple(groups)


def _fits(tree: Group) -> bool:
    tiers = tiers_of(tree)
    aggregators = max(sum(bool(group.children) for group in tier) for tier in tiers)
    return sum(map(len, tiers[1:])) <= MOST_NODES and aggregators <= MOST_AGGREGATORS


def tiers_of(tree: Group) -> list[list[Group]]:
    """Return the groups of each tier, the cloud's first."""
    tiers, current = [], [tree]
    while current:
        tiers.append(current)
        current = [child for group in current for child in group.children]
    return tiers
