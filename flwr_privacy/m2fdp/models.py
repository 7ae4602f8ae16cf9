"""The models of a tree during a round: the start models of devices, and averaging at events.

It does what the cloud and the insecure aggregators do, and in a simulation also what the secure
ones do. Codes are summed and averaged exactly (`zone_average`). What is public is averaged in
float64, in the order of the tree, so that the result does not depend on who answered first.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
equations (8) to (14).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.m2fdp.tree.exchanges import Asked, Exchange
from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.layout import Layout

from .plan import M2FDPRoundPlan
from .sensitivity import Drift, Reach
from .zone_average import Upload, averaged, trained

__all__ = ["Noise", "TreeModels", "ZonePlace", "moved"]

Vector = NDArray[np.float64]

Noise = Callable[[str, Upload, Asked], NDArray[np.int32]]
"""Noises what a boundary node hands out: its name, its upload, what its devices were asked."""

Answers = Callable[[str], tuple[NDArray[Any], int] | None]
"""Sum of the codes of the devices of a lowest aggregator, and their number; None if nobody did.

It is asked once for each, so that it may forget what it gave.
"""


@dataclass(frozen=True)
class ZonePlace:
    """The state of a lowest aggregator's devices within a round.

    Parameters
    ----------
    start : Mapping of str to ndarray
        The public model of the last noised release.
    offset : (d,) int64, optional
        What the trusted zone has come to since then, in codes; None before its first clean event.
    reach : Reach
        How far the data of one device can move that.
    """

    start: Arrays
    offset: NDArray[np.int64] | None
    reach: Reach


class TreeModels:
    """The models of a round, from one global model to the next.

    Parameters
    ----------
    tree : TierTree
        Who hands what to whom.
    start : Mapping of str to ndarray
        The global model.
    layout : Layout
        Which arrays of it are trained.
    grids : Mapping of str to CodeGrid
        What a code of the devices of a lowest aggregator means; in a zone all have one.
    drift : Drift
        How models of a zone drift apart.
    min_children : int
        A secure node with fewer answers hands nothing on.
    bound : callable
        The largest norm of an update, by its number of local steps.
    edge_noise : callable, optional
        Adds noise of its own to the model of an insecure node of tier 1 at a global event.
    """

    def __init__(
        self,
        tree: TierTree,
        start: Arrays,
        layout: Layout,
        *,
        grids: Mapping[str, CodeGrid],
        drift: Drift,
        min_children: int,
        bound: Callable[[int], float],
        edge_noise: Callable[[str, Vector], None] | None = None,
    ) -> None:
        self._tree = tree
        self._layout = layout
        self._grids = grids
        self._drift = drift
        self._least = min_children
        self._bound = bound
        self._edge_noise = edge_noise
        self.start = start
        first = ZonePlace(start, None, Reach(anchor=tree.depth))
        self.places = dict.fromkeys(tree.tiers[tree.depth - 1], first)

    @classmethod
    def of(
        cls,
        plan: M2FDPRoundPlan,
        start: Arrays,
        layout: Layout,
        edge_noise: Callable[[str, Vector], None],
    ) -> "TreeModels":
        """Return the models of a planned round, with the noise of edges where that is chosen."""
        return cls(
            plan.tree,
            start,
            layout,
            grids=plan.grids,
            drift=plan.privacy.law,
            min_children=plan.min_children,
            bound=plan.bound,
            edge_noise=edge_noise if plan.privacy.edge_noise else None,
        )

    def model(self, leaf: str) -> Arrays:
        """Return the model from which the devices of a lowest aggregator start."""
        place = self.places[leaf]
        if place.offset is None:
            return place.start
        return moved(place.start, self._layout, self._grids[leaf].step * place.offset)

    def event(
        self,
        exchange: Exchange,
        answers: Answers,
        noise: Noise,
        released: Mapping[str, NDArray[np.int32]] | None = None,
    ) -> Vector | None:
        """Carry out an exchange's event: average the answers up to its tier, and pass models down.

        Parameters
        ----------
        exchange : Exchange
            Who was asked what.
        answers : callable
            What the devices of each lowest aggregator sent: with noise where it is insecure. Of
            those that are nodes of their own there is nothing.
        noise : callable
            Noises the average of a boundary node.
        released : Mapping, optional
            The noised codes of boundary nodes that are nodes of their own.

        Returns
        -------
        (d,) float64 or None
            At a global event the new global model, or None if nobody could hand anything on; at
            others None.
        """
        work = _Event(self, exchange, answers, noise, released or {})
        if exchange.tier == 0:
            return work.public(CLOUD)
        for node in self._tree.tiers[exchange.tier]:
            leaves = self._leaves_below(node)
            before = self.places[leaves[0]]  # all of them have one public start
            place = None
            if self._tree.secure(node):
                upload = work.upload(node)
                if upload is not None:
                    reach = self._drift.broadcast(upload.reach, tier=exchange.tier)
                    place = ZonePlace(before.start, upload.codes, reach)
            elif (model := work.public(node)) is not None:
                start = {**before.start, **self._layout.arrays(model)}
                place = ZonePlace(start, None, Reach(anchor=self._tree.depth))
            if place is not None:
                self.places |= dict.fromkeys(leaves, place)
        return None

    def _leaves_below(self, node: str) -> list[str]:
        """Return the lowest aggregators of a subtree."""
        nodes = [node]
        for _ in range(self._tree.tier(node), self._tree.depth - 1):
            nodes = [child for above in nodes for child in self._tree.children(above)]
        return nodes


_NOBODY = (np.zeros(0, np.int64), 0)


class _Event:
    """Averages the devices' answers up towards the cloud, once."""

    def __init__(
        self,
        models: TreeModels,
        exchange: Exchange,
        answers: Answers,
        noise: Noise,
        released: Mapping[str, NDArray[np.int32]],
    ) -> None:
        self._models = models
        self._tree = models._tree
        self._exchange = exchange
        self._answers = answers
        self._noise = noise
        self._released = released
        self._known: tuple[Arrays, Vector] | None = None

    def public(self, node: str) -> Vector | None:
        """Return the model of an insecure node: the mean of its children's models."""
        lowest = self._tree.tier(node) == self._tree.depth - 1
        if lowest:
            return self._of_devices(node)
        total: Vector | None = None
        count = 0
        for child in self._tree.children(node):
            model = self._from_zone(child) if self._tree.secure(child) else self.public(child)
            if model is not None:
                edge_noise = self._models._edge_noise
                if edge_noise and node == CLOUD and not self._tree.secure(child):
                    edge_noise(child, model)
                total = model if total is None else np.add(total, model, out=total)
                count += 1
        return None if total is None else np.divide(total, count, out=total)

    def upload(self, node: str) -> Upload | None:
        """Return the upload of a secure node; None if too few of its children sent one."""
        models, tree = self._models, self._tree
        grid = models._grids[models._leaves_below(node)[0]]
        if tree.tier(node) == tree.depth - 1:
            codes, count = self._answers(node) or _NOBODY
            if count < models._least:
                return None
            place, steps = models.places[node], self._exchange.leaves[node].steps
            if place.offset is not None:
                codes = codes + count * place.offset  # int64, as the offset
            reach = trained(
                models._drift, place.reach, models._bound(steps), steps, grid, codes.size
            )
            return averaged((codes, count, reach), models._drift, tier=tree.tier(node), grid=grid)
        uploads = [self.upload(child) for child in tree.children(node)]
        there = [upload for upload in uploads if upload is not None]
        if len(there) < models._least:
            return None
        return averaged(there, models._drift, tier=tree.tier(node), grid=grid)

    def _of_devices(self, leaf: str) -> Vector | None:
        codes, count = self._answers(leaf) or _NOBODY
        if count == 0:
            return None
        model = codes / count
        model *= self._models._grids[leaf].step  # exact: a power of two
        model += self._start(leaf)
        return model

    def _from_zone(self, node: str) -> Vector | None:
        """Return the noised model of a boundary node."""
        first = self._models._leaves_below(node)[0]
        codes = self._released.get(node)
        if codes is None:
            upload = self.upload(node)
            if upload is None:
                return None
            codes = self._noise(node, upload, self._exchange.leaves[first])
        model = codes.astype(np.float64)
        model *= self._models._grids[first].step  # exact: a power of two
        model += self._start(first)
        return model

    def _start(self, leaf: str) -> Vector:
        """Return the public start of a lowest aggregator's devices; many have the same."""
        start = self._models.places[leaf].start
        if self._known is None or self._known[0] is not start:
            self._known = (start, self._models._layout.vector(start))
        return self._known[1]


def moved(start: Arrays, layout: Layout, move: NDArray[np.floating]) -> dict[str, Any]:
    """Return a model that is some way from another one."""
    vector = layout.vector(start)
    vector += move
    return {**start, **layout.arrays(vector)}
