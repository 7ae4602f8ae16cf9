"""Counts the nodes of a tree by tier; its costs depend on these public counts alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flwr_privacy.errors import InvalidParameterError, check_flag, check_integer

from .tree import TierTree

__all__ = ["TierCounts"]


@dataclass(frozen=True, kw_only=True)
class TierCounts:
    """The numbers of nodes and children of a tree, on which alone its costs depend.

    Parameters
    ----------
    children : sequence of sequence of int
        For each tier from the cloud down to the lowest aggregators the number of children of each
        of its nodes, at least 1, with the children of a node next to each other:
        ``((2,), (3, 1))`` is a cloud over one aggregator with three devices and one with one.
    secure : sequence of bool, default ()
        For each node of tier 1 whether all its children trust it. Empty: nobody does. A star has
        no aggregators and so no labels.

    Raises
    ------
    InvalidParameterError
        If the counts of a tier do not fit those of the tier above, or a value is not allowed.

    Examples
    --------
    >>> counts = TierCounts.of_fanouts((2, 3, 4), secure=1)
    >>> counts.nodes, counts.lowest, counts.lowest_secure
    ((2, 6, 24), (4, 4, 4, 4, 4, 4), (True, True, True, False, False, False))
    """

    children: Sequence[Sequence[int]]
    secure: Sequence[bool] = ()

    def __post_init__(self) -> None:
        children = tuple(tuple(tier) for tier in self.children)
        nodes = 1  # of the tier at hand
        for number, tier in enumerate(children):
            if len(tier) != nodes:
                allowed = f"{nodes} counts, as many as tier {number} has nodes"
                raise InvalidParameterError(f"children[{number}]", tier, allowed)
            for count in tier:
                check_integer(f"children[{number}]", count, minimum=1)
            nodes = sum(tier)
        if not children:
            raise InvalidParameterError("children", children, "at least the cloud's")
        secure = tuple(check_flag("secure", label) for label in self.secure)
        if not secure and len(children) > 1:
            secure = (False,) * len(children[1])
        labels = len(children[1]) if len(children) > 1 else 0
        if len(secure) != labels:
            raise InvalidParameterError(
                "secure", secure, f"{labels} labels, one for each in tier 1"
            )
        object.__setattr__(self, "children", children)
        object.__setattr__(self, "secure", secure)

    @classmethod
    def of_fanouts(cls, fanouts: Sequence[int], *, secure: int = 0) -> "TierCounts":
        """Return the counts of a balanced tree.

        Parameters
        ----------
        fanouts : sequence of int
            Children of the cloud, of each node of tier 1, and so on; the last are devices.
        secure : int, default 0
            How many nodes of tier 1 are secure, the first ones.

        Raises
        ------
        InvalidParameterError
            If a fan-out is not at least 1, or there are fewer nodes than `secure`.
        """
        children, nodes = [], 1
        for number, fanout in enumerate(fanouts):
            check_integer(f"fanouts[{number}]", fanout, minimum=1)
            children.append((fanout,) * nodes)
            nodes *= fanout
        first = len(children[1]) if len(children) > 1 else 0
        check_integer("secure", secure, minimum=0, maximum=first)
        labels = (True,) * secure + (False,) * (first - secure)
        return cls(children=children, secure=labels)

    @classmethod
    def of(cls, tree: TierTree) -> "TierCounts":
        """Return the counts of a tree, with its labels after the closure."""
        children = [[len(tree.children(node)) for node in tier] for tier in tree.tiers[:-1]]
        secure = [tree.secure(node) for node in tree.tiers[1]] if tree.depth > 1 else []
        return cls(children=children, secure=secure)

    @property
    def depth(self) -> int:
        """Number of tiers below the cloud, L."""
        return len(self.children)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Number of nodes of tier 1 to L, the last are the devices."""
        return tuple(sum(tier) for tier in self.children)

    @property
    def lowest(self) -> tuple[int, ...]:
        """Number of devices under each lowest aggregator (under the cloud in a star)."""
        return tuple(self.children[-1])

    @cached_property
    def lowest_secure(self) -> tuple[bool, ...]:
        """For each lowest aggregator whether its ancestor in tier 1 is secure."""
        if self.depth == 1:
            return (False,)
        labels = np.array(self.secure, dtype=bool)
        for tier in self.children[1:-1]:
            labels = np.repeat(labels, tier)
        return tuple(labels.tolist())
