"""Logs the tree of a run: noise, energy and delay of each round, and the tree as a file."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from flwr_privacy.m2fdp import (
    CLOUD,
    Exchange,
    M2FDPRoundPlan,
    ResourceModel,
    TierCounts,
    TierSums,
    TierTree,
)
from flwr_privacy.m2fdp.forecast import device_sigma
from flwr_privacy.wire.files import write_text

__all__ = ["TREE", "TierLog"]

TREE = "tree.json"
"""Name of the file in a run's folder."""

_MOST_NAMED = 500  # devices; beyond, those of one aggregator are one entry


class TierLog:
    """The numbers of the rounds of one tree.

    Parameters
    ----------
    tree : TierTree
        Who there is.
    resources : ResourceModel
        What a step and an upload cost.
    parameters : int
        Entries of what is uploaded.
    """

    def __init__(self, tree: TierTree, resources: ResourceModel, parameters: int) -> None:
        self._tree = tree
        self._resources = resources
        self._counts = TierCounts.of(tree)
        self.parameters = parameters
        self._metrics: dict[str, float] = {}
        self._noise: list[tuple[str, float]] = []  # what entered the round, node and variance
        self._heard: set[str] = set()  # insecure leaves and boundary nodes of the last event
        self._sigmas: dict[str, float] = {}  # of aggregators, and of the devices of insecure leaves
        self._edges: dict[str, float] = {}  # of insecure aggregators, in a baseline

    def begin(self, plan: M2FDPRoundPlan, drawn: dict[str, list[str]]) -> None:
        """Begin a round with the devices that were drawn, by their parent."""
        self._noise, self._heard, self._sigmas, self._edges = [], set(), {}, {}
        steps, tree = plan.schedule.steps, self._tree
        leaves = tree.tiers[tree.depth - 1]
        taking = [len(drawn.get(leaf, ())) for leaf in leaves]
        events = {
            tier: number for tier in range(1, tree.depth) if (number := len(plan.schedule.at(tier)))
        }
        cost = self._resources.round(
            self._counts,
            steps=steps,
            parameters=self.parameters,
            events=events,
            participants=taking,
        )
        shares: dict[bool, list[float]] = {True: [], False: []}
        for leaf, count in zip(leaves, taking, strict=True):
            shares[tree.secure(leaf)].append(count / len(tree.children(leaf)))
        self._metrics = {"steps": steps, "energy_j": cost.energy, "delay_s": cost.seconds}
        for secure, name in ((True, "secure"), (False, "insecure")):
            if shares[secure]:
                self._metrics[f"participation_{name}"] = float(np.mean(shares[secure]))

    def next_event(self) -> None:
        """Forget the devices and nodes that answered at the previous event."""
        self._heard = set()

    def answered(self, plan: M2FDPRoundPlan, exchange: Exchange, sums: TierSums) -> None:
        """Record the noise that the devices of insecure aggregators added."""
        for leaf in exchange.leaves:
            count = len(sums.answered(leaf))
            if count == 0 or self._tree.secure(leaf):
                continue
            self._heard.add(leaf)
            sigma = device_sigma(plan, exchange, leaf)
            self._sigmas[leaf] = sigma
            self._noise.append((leaf, sigma**2 / count))

    def noised(self, node: str, sigma: float) -> None:
        """Record the noise that a trusted aggregator, or one of a baseline, added."""
        (self._sigmas if self._tree.secure(node) else self._edges)[node] = sigma
        self._noise.append((node, sigma**2))
        self._heard.add(node)

    def planned_deviation(self, plan: M2FDPRoundPlan) -> float:
        """Return the noise per entry of the next global model if all devices add theirs."""
        exchange = plan.exchanges[-1]
        total = 0.0
        for leaf in exchange.leaves:
            if not self._tree.secure(leaf):
                share = self._tree.weight(leaf) * device_sigma(plan, exchange, leaf)
                total += share**2 / len(self._tree.children(leaf))
        return math.sqrt(total)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of the last round; empty before the first one.

        ``noise_var`` is the variance that the round's noise has in an entry of the global model,
        noise of local events included, with the weights of the last event; ``noise_sigma_t2``
        that of a node of tier 2, the mean over those that added some.
        """
        if not self._metrics:
            return {}
        by_tier: dict[int, list[float]] = {}
        for node, sigma in self._sigmas.items():
            secure = self._tree.secure(node)
            by_tier.setdefault(self._tree.tier(node) if secure else self._tree.depth, []).append(
                sigma
            )
        sigmas = {f"noise_sigma_t{t}": float(np.mean(s)) for t, s in sorted(by_tier.items())}
        if self._edges:
            sigmas["edge_noise_sigma"] = float(np.mean(list(self._edges.values())))
        variance = sum(self._weight(node) ** 2 * entered for node, entered in self._noise)
        return {**self._metrics, "noise_var": variance, **sigmas}

    def _weight(self, node: str) -> float:
        """Return the weight of a node in the global model, among those that answered last."""
        weight = float(self._is_heard(node))
        while node != CLOUD and weight:
            node = self._tree.parent(node)
            weight /= sum(map(self._is_heard, self._tree.children(node)))
        return weight

    def _is_heard(self, node: str) -> bool:
        if node in self._heard:
            return True
        lowest = self._tree.tier(node) >= self._tree.depth - 1
        return not lowest and any(map(self._is_heard, self._tree.children(node)))

    def write(self, run_dir: Path, plan: M2FDPRoundPlan) -> None:
        """Write the tree, with trust, noise and epsilon of each node, for the report."""
        nodes = [self._node(name, plan) for tier in self._tree.tiers[:-1] for name in tier]
        for leaf in self._tree.tiers[self._tree.depth - 1]:
            nodes += self._devices(leaf, plan)
        write_text(run_dir / TREE, json.dumps({"nodes": nodes}))

    def _node(self, name: str, plan: M2FDPRoundPlan) -> dict[str, Any]:
        tree = self._tree
        tier = tree.tier(name)
        noise = tier > 0 and tree.secure(name) and not tree.secure(tree.parent(name))
        return {
            "name": name,
            "parent": tree.parent(name) if tier else None,
            "tier": tier,
            "secure": tree.secure(name),
            "noise": noise and plan.privacy.noised,
            "sigma": self._sigmas.get(name) if noise else None,
            "epsilon": plan.epsilon(tier) if noise and plan.privacy.noised else None,
            "devices": len(tree.leaves(name)),
        }

    def _devices(self, leaf: str, plan: M2FDPRoundPlan) -> list[dict[str, Any]]:
        tree = self._tree
        noise = plan.privacy.noised and not tree.secure(leaf)
        entry = {
            "parent": leaf,
            "tier": tree.depth,
            "secure": True,
            "noise": noise,
            "sigma": self._sigmas.get(leaf) if noise else None,
            "epsilon": plan.epsilon(tree.depth) if noise else None,
        }
        children = tree.children(leaf)
        if len(tree.devices) > _MOST_NAMED:
            name = f"{children[0]} ... {children[-1]}"
            return [{"name": name, "devices": len(children), **entry}]
        return [{"name": name, "devices": 1, **entry} for name in children]
