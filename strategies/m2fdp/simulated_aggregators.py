"""Adds the noise of aggregators that the server simulates."""

import logging
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.m2fdp import EVENT, Asked, Exchange, M2FDPRoundPlan, TierSums, Upload, noised
from flwr_privacy.m2fdp.zone_average import NOISE_REACH
from flwr_privacy.privacy.grid import CodeGrid, saturated
from flwr_privacy.privacy.randomness import SecureRandom

from .tiers import TierLog

__all__ = ["SimulatedAggregators"]

logger = logging.getLogger("flwr.privacy")


@dataclass(eq=False)
class SimulatedAggregators:
    """The aggregators of one round.

    Parameters
    ----------
    plan : M2FDPRoundPlan
        The round, with its noise.
    log : TierLog
        Where noise is noted.
    experiment_id : str
        The experiment.
    insecure_seed : int, optional
        Seed of the noise, for tests.
    """

    plan: M2FDPRoundPlan
    log: TierLog
    experiment_id: str
    insecure_seed: int | None
    insecure: bool = field(default=False, init=False)  # whether noise came from the seed

    def noised(self, node: str, upload: Upload, asked: Asked) -> NDArray[np.int32]:
        """Add noise to the average that a trusted aggregator passes on."""
        release = self.plan.release(self.plan.tree.tier(node), asked.end)
        if release.multiplier == 0:
            return saturated(upload.codes)
        sigma = release.multiplier * upload.reach.total
        self.log.noised(node, sigma)
        random = self._random("noise", node, asked.period)
        return noised(upload.codes, sigma=sigma, grid=release.grid, random=random)

    def warn_of_small_zones(self, exchange: Exchange, sums: TierSums | None, *, least: int) -> None:
        """Warn of lowest aggregators that pass nothing on, as too few of their devices answered."""
        small = [
            leaf
            for leaf in exchange.leaves
            if self.plan.tree.secure(leaf)
            and (0 if sums is None else len(sums.answered(leaf))) < least
        ]
        if small:
            logger.warning(
                "round %d: fewer than min_children = %d answered under %s: nothing of them is used",
                *(self.plan.server_round, least, ", ".join(small[:10])),
            )

    def at_the_edge(self, node: str, model: NDArray[np.float64]) -> None:
        """Add the noise that a baseline's insecure node of tier 1 adds to that of the devices."""
        sigma = self.plan.edge_sigma(node)
        grid = CodeGrid.holding(NOISE_REACH * sigma)
        random = self._random("edge noise", node, 0)
        codes = np.zeros(model.size, np.int64)
        model += grid.step * noised(codes, sigma=sigma, grid=grid, random=random)
        self.log.noised(node, sigma)

    def _random(self, purpose: str, node: str, period: int) -> SecureRandom:
        if self.insecure_seed is None:
            return SecureRandom()
        self.insecure = True
        # As the node itself would draw it, see `flwr_privacy.pipeline.node_store.NodeRules.random`.
        place = (self.experiment_id, EVENT, self.plan.server_round, period)
        return SecureRandom.insecure(self.insecure_seed, purpose, node, *place)
