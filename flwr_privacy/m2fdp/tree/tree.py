"""The tree of aggregators between the cloud and the devices, and the trust in them.

Tier 0 is the cloud, tier 1 what stands right below it, and tier L, the depth, are the devices. A
secure node is one that all its children trust with what they hold. Noise enters a path from a
device to the cloud once, at the highest secure node of the path, or at the device where no node is
secure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from flwr_privacy.errors import InvalidParameterError, check_integer

from .file import read_nodes, read_tables
from .labels import check_ratios, label
from .shape import (
    CLOUD,
    add_leaves,
    breadth_first,
    check_name,
    check_names,
    check_parents,
    check_shape,
    check_trusted,
    children_of,
    cycle,
    read_fanouts,
)

__all__ = ["CLOUD", "TierTree"]


@dataclass(frozen=True, kw_only=True)
class TierTree:
    """A tree of aggregators with devices as leaves, and the trust in its aggregators.

    Parameters
    ----------
    parents : Mapping of str to str
        Parent of every aggregator and of every device: an aggregator, or `CLOUD`. Children have
        the order of their names here, devices that of `devices`.
    devices : sequence of str
        Names of the leaves, which are the identities of clients; at least one, all at the same
        depth. They are kept in the order of the tree, the children of a node side by side.
    trusted : iterable of str, optional
        Aggregators that all their children trust. Trust in one that has an insecure aggregator
        among its children is without effect: see `withdrawn`. By default nobody is trusted.
    named : bool, default True
        Whether the names of the leaves say which client is which; otherwise a strategy gives them
        the clients that are there, in the order of their names.

    Attributes
    ----------
    tiers : tuple of tuple of str
        Names by tier, breadth first: ``tiers[0] == (CLOUD,)``, ``tiers[depth] == devices``.

    Raises
    ------
    InvalidParameterError
        If a name is malformed or there twice, an aggregator has no device below it, a device has
        children or no parent, there is a cycle, devices lie at different depths, or what is
        trusted is no aggregator. The message names the node. All methods raise it, too, where they
        are asked about a node or a tier that is not there.

    Examples
    --------
    >>> tree = TierTree(
    ...     parents={"a": CLOUD, "b": CLOUD, "1": "a", "3": "a", "5": "b", "7": "b"},
    ...     devices=("1", "3", "5", "7"),
    ...     trusted=frozenset({"a"}),
    ... )
    >>> tree.depth, tree.injectors(), tree.boundary("3"), tree.weight("3")
    (2, ('a', '5', '7'), 'a', 0.25)
    """

    parents: Mapping[str, str] = field(hash=False)
    devices: tuple[str, ...]
    trusted: frozenset[str] = frozenset()
    named: bool = field(default=True, compare=False)
    tiers: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)
    _children: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        devices = check_names("devices", self.devices)
        parents = check_parents(self.parents, devices)
        children = children_of(parents, devices)
        tiers = breadth_first(children)
        check_shape(parents, devices, tiers)
        check_trusted(self.trusted, children)
        # Copies, and devices in the order of the tree: nothing changes them later.
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "devices", tiers[-1])
        object.__setattr__(self, "trusted", frozenset(self.trusted))
        object.__setattr__(self, "tiers", tiers)
        object.__setattr__(self, "_children", children)

    @classmethod
    def of_fanouts(
        cls,
        fanouts: Sequence[int] | int | str,
        *,
        p: float | Sequence[float] | None = None,
        devices: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> "TierTree":
        """Build a balanced tree, with a share of trusted nodes at every tier.

        Parameters
        ----------
        fanouts : sequence of int, int or str
            Children of every node by tier, the cloud's first: ``(10, 5)`` or ``"10,5"`` has ten
            aggregators with five devices each, 50 is a star. Aggregators are called
            ``t1-0``, ``t1-1``, ..., ``t2-0``, ...
        p : float or sequence of float, optional
            Shares p_1 to p_{L-1} of the children of an insecure node that are secure, one for
            every tier of aggregators or the same for all, from 0 to 1; rounded half up to whole
            nodes. Below a secure node everybody is secure. By default nobody is.
        devices : sequence of str, optional
            Names of the devices in the order of the tree; by default ``"0"``, ``"1"``, ...
        seed : int, optional
            Draws which children are secure. By default the first ones are.

        Raises
        ------
        InvalidParameterError
            If a value is not allowed, or `devices` has another length than there are leaves.

        Examples
        --------
        >>> tree = TierTree.of_fanouts("10,5", p=0.5)
        >>> [len(tier) for tier in tree.tiers], len(tree.injectors())
        ([1, 10, 50], 30)
        """
        counts = read_fanouts(fanouts)
        total = math.prod(counts)
        names = list(map(str, range(total))) if devices is None else devices
        parents: dict[str, str] = {}
        above: Sequence[str] = [CLOUD]
        for tier, count in enumerate(counts[:-1], start=1):
            level = [f"t{tier}-{i}" for i in range(len(above) * count)]
            parents.update((name, above[i // count]) for i, name in enumerate(level))
            above = level
        leaves = add_leaves(parents, names, above=[above[i // counts[-1]] for i in range(total)])
        tree = cls(parents=parents, devices=leaves, named=devices is not None)
        if p is None:
            return tree
        shares = check_ratios(p, tiers=len(counts) - 1)
        return replace(tree, trusted=frozenset(label(tree._children, shares, seed=seed)))

    @classmethod
    def of_edges(
        cls, edges: Iterable[tuple[str, str]], *, trusted: Iterable[str] = ()
    ) -> "TierTree":
        """Build a tree from pairs of a parent and its child; nodes without a child are devices.

        Raises
        ------
        InvalidParameterError
            As the constructor, and if a node has two parents or an edge is there twice.

        Examples
        --------
        >>> edges = [(CLOUD, "a"), (CLOUD, "b"), ("a", "1"), ("b", "2")]
        >>> TierTree.of_edges(edges, trusted={"b"}).injectors()
        ('b', '1')
        """
        parents: dict[str, str] = {}
        for edge in edges:
            if not isinstance(edge, Sequence) or isinstance(edge, str) or len(edge) != 2:
                raise InvalidParameterError("edges", edge, "pairs of a parent and its child")
            parent = check_name("edges", edge[0], or_cloud=True)
            child = check_name("edges", edge[1])
            if child in parents:
                allowed = f"a node with one parent, not {parents[child]!r} and {parent!r}"
                if parents[child] == parent:
                    allowed = f"a node that is there once below {parent!r}"
                raise InvalidParameterError("edges", child, allowed)
            parents[child] = parent
        above = set(parents.values())
        devices = tuple(node for node in parents if node not in above)
        if parents and not devices:
            raise cycle(parents, next(iter(parents)))
        return cls(parents=parents, devices=devices, trusted=frozenset(trusted))

    @classmethod
    def read(cls, path: str | Path) -> "TierTree":
        """Read a tree from a TOML file with one table for every aggregator.

        A table ``[nodes.NAME]`` has the keys ``parent`` (default ``"cloud"``), ``trusted``
        (default false) and, next to the devices, ``devices``, a list of names. A star has the one
        table ``[nodes.cloud]`` with its devices.

        Raises
        ------
        InvalidParameterError
            If the file cannot be read or is no TOML, a key is unknown (with the nearest names), or
            what it says is no tree. The message names the file and the node.
        """
        tables = read_tables(path)
        try:
            return cls(**read_nodes(tables))
        except InvalidParameterError as error:
            parameter = f"tree {path}: {error.parameter}"
            raise InvalidParameterError(parameter, error.value, error.allowed) from None

    def with_devices(self, devices: Sequence[str]) -> "TierTree":
        """Return the same tree with other names for its devices, in the order of the tree.

        Raises
        ------
        InvalidParameterError
            If the number of names is another one, or a name is not allowed.
        """
        parents = {node: self.parents[node] for tier in self.tiers[1:-1] for node in tier}
        leaves = add_leaves(parents, devices, above=[self.parents[old] for old in self.devices])
        return TierTree(parents=parents, devices=leaves, trusted=self.trusted)

    @property
    def depth(self) -> int:
        """Number of tiers below the cloud, L."""
        return len(self.tiers) - 1

    def tier(self, node: str) -> int:
        """Return the tier of a node: 0 for the cloud, `depth` for a device."""
        return self._places[self._known(node)][0]

    def position(self, node: str) -> int:
        """Return the position of a node in its tier: ``tiers[tier(node)][position]``."""
        return self._places[self._known(node)][1]

    def parent(self, node: str) -> str:
        """Return the parent of a node other than the cloud."""
        if node == CLOUD:
            raise InvalidParameterError("node", node, "a node below the cloud")
        return self.parents[self._known(node)]

    def children(self, node: str) -> tuple[str, ...]:
        """Return the children of a node in the order of the tree; a device has none."""
        return self._children.get(self._known(node), ())

    def ancestor(self, node: str, tier: int) -> str:
        """Return the node at `tier` on the path from the cloud to `node`, which may be itself."""
        own = self.tier(node)
        check_integer("tier", tier, minimum=0, maximum=own)
        for _ in range(own - tier):
            node = self.parents[node]
        return node

    def leaves(self, node: str) -> tuple[str, ...]:
        """Return the devices below a node, in the order of the tree; for a device itself."""
        start, stop = self.span(node)
        return self.devices[start:stop]

    def span(self, node: str) -> tuple[int, int]:
        """Return the range of the devices below a node: ``devices[start:stop]``."""
        first = last = self._known(node)
        while first in self._children:
            first, last = self._children[first][0], self._children[last][-1]
        return self.position(first), self.position(last) + 1

    @property
    def withdrawn(self) -> tuple[str, ...]:
        """Trusted aggregators that are insecure nevertheless, as one below them is."""
        return tuple(
            node
            for tier in self.tiers[1:-1]
            for node in tier
            if node in self.trusted and node not in self._secure
        )

    def secure(self, node: str) -> bool:
        """Return whether a node is secure once insecure children count: a device always is."""
        return self._known(node) in self._secure or node not in self._children

    def boundary(self, device: str) -> str:
        """Return the node that adds a device's noise: its highest secure ancestor, or itself."""
        if self.tier(device) != self.depth:
            raise InvalidParameterError("device", device, "a device of the tree")
        return self._boundaries[device]

    def injectors(self, event_tier: int = 0) -> tuple[str, ...]:
        """Return the nodes that add noise at an event up to a tier, breadth first.

        These are the secure nodes and the devices that have an insecure parent and send something,
        that is, lie below `event_tier`.

        Parameters
        ----------
        event_tier : int, default 0
            From 0, the global event, to ``depth - 1``.
        """
        check_integer("event_tier", event_tier, minimum=0, maximum=self.depth - 1)
        return tuple(node for tier in self._injectors[event_tier + 1 :] for node in tier)

    def fanouts(self, tier: int) -> tuple[int, ...]:
        """Return the numbers of children of the cloud (tier 0) or of a tier of aggregators."""
        check_integer("tier", tier, minimum=0, maximum=self.depth - 1)
        return self._fanouts[tier]

    def weight(self, node: str, under: str = CLOUD) -> float:
        """Return the weight of a node in the average of one above it, where everybody takes part.

        It is the product of 1 / number of children over the path from `under` down to `node`.

        `under` has to be on the path from the cloud to `node`.
        """
        steps = self.tier(node) - self.tier(under)
        product, above = 1, node
        for _ in range(steps):
            above = self.parents[above]
            product *= len(self._children[above])
        if above != under:
            raise InvalidParameterError("under", under, f"a node above {node!r}, or that one")
        return 1 / product

    def smallest_fanouts(self) -> tuple[int, ...]:
        """Return the smallest number of children by tier of aggregators, s_1 to s_{L-1}."""
        return tuple(map(min, self._fanouts[1:]))

    def ratios(self) -> tuple[float, ...]:
        """Return by tier of aggregators the largest share of secure children, p_1^max, ....

        The largest is over the insecure nodes one tier above; it is 1 where there are none.
        """
        return tuple(max(shares, default=1.0) for shares in self._shares)

    def ratios_min(self) -> tuple[float, ...]:
        """Return by tier of aggregators the smallest share of secure children; see `ratios`."""
        return tuple(min(shares, default=1.0) for shares in self._shares)

    def _known(self, node: str) -> str:
        if node not in self._places:
            raise InvalidParameterError("node", node, "a node of the tree")
        return node

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Tier and position of every node."""
        return {
            node: (tier, position)
            for tier, nodes in enumerate(self.tiers)
            for position, node in enumerate(nodes)
        }

    @cached_property
    def _fanouts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(len(self._children[node]) for node in tier) for tier in self.tiers[:-1])

    @cached_property
    def _secure(self) -> frozenset[str]:
        """Secure aggregators: trusted, and so is every aggregator below."""
        insecure = {CLOUD}
        for tier in reversed(self.tiers[1:-1]):
            for node in tier:
                if node not in self.trusted or node in insecure:
                    insecure |= {node, self.parents[node]}
        return frozenset(node for node in self._children if node not in insecure)

    @cached_property
    def _boundaries(self) -> dict[str, str]:
        """Highest secure node on the path to a node, by device and by secure aggregator."""
        boundaries: dict[str, str] = {}
        for tier in self.tiers[1:]:
            for node in tier:
                above = boundaries.get(self.parents[node])
                if above is not None:
                    boundaries[node] = above
                elif self.secure(node):
                    boundaries[node] = node
        return boundaries

    @cached_property
    def _injectors(self) -> tuple[tuple[str, ...], ...]:
        """Nodes that are boundaries, by tier."""
        return tuple(
            tuple(node for node in tier if self._boundaries.get(node) == node)
            for tier in self.tiers
        )

    @cached_property
    def _shares(self) -> tuple[tuple[float, ...], ...]:
        """Shares of secure children of the insecure nodes one tier above a tier of aggregators."""
        return tuple(
            tuple(
                sum(child in self._secure for child in children) / len(children)
                for children in (self._children[node] for node in above if node not in self._secure)
            )
            for above in self.tiers[:-2]
        )
