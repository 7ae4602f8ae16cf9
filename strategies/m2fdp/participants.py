"""Draws the devices of a round under each lowest aggregator: in turns, or at random."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from flwr_privacy.m2fdp import M2FDPRoundPlan
from flwr_privacy.m2fdp.tree.exchanges import boundary_tier
from flwr_privacy.privacy.card import CardRelease
from flwr_privacy.privacy.cohorts import BALANCED
from flwr_privacy.strategies.turns import Turns
from flwr_privacy.wire.identity import derive_seed, fingerprints, places
from flwr_privacy.wire.message import EVALUATE

__all__ = ["TierParticipants"]

_ROUNDING = 1e-6  # relative; what a sum of shares, one by one, may come to beyond all at once


class TierParticipants:
    """The devices that take part in the rounds of one training.

    A device that was charged for all that is planned for it would decline. So it is not asked, and
    its place in a round is for one that was absent before.

    Parameters
    ----------
    sampling : {"balanced", "fixed"}
        Whether the devices of each lowest aggregator take turns, or every round draws anew.
    """

    def __init__(self, sampling: str) -> None:
        self._turns = Turns() if sampling == BALANCED else None
        self._spent = defaultdict[str, float](
            float
        )  # by device, the sum of 1 / z^2 of its trainings' charges
        self._counted = 0  # charges that are in it

    def drawn(
        self,
        there: Collection[str],
        *,
        plan: M2FDPRoundPlan,
        sizes: Mapping[str, int],
        releases: Sequence[CardRelease],
        seed: int | str,
    ) -> dict[str, list[str]]:
        """Draw devices under each lowest aggregator without replacement; return them by parent.

        Parameters
        ----------
        there : collection of str
            Who can be asked.
        plan : M2FDPRoundPlan
            The round, with its noise.
        sizes : Mapping of str to int
            How many devices of each lowest aggregator.
        releases : sequence of CardRelease
            All charges so far.
        seed : int or str
            Root seed of the experiment.
        """
        chosen, server_round = {}, plan.server_round
        there = set(there) - self._used_up(releases, plan)
        if self._turns is not None:
            self._turns.back_to(server_round)
        purpose = (server_round,) if self._turns is None else ()
        for leaf, size in sizes.items():
            present = [child for child in plan.tree.children(leaf) if child in there]
            if size < len(present):
                order = places(derive_seed(seed, "tiers", *purpose), fingerprints(present))
                present = [present[index] for index in np.argsort(order, kind="stable")]
                if self._turns is not None:  # those that have waited longest
                    present.sort(key=self._turns.place)
            if present:
                chosen[leaf] = sorted(present[:size])
        if self._turns is not None:
            self._turns.take(server_round, [d for devices in chosen.values() for d in devices])
        return chosen

    def _used_up(self, releases: Sequence[CardRelease], plan: M2FDPRoundPlan) -> set[str]:
        """Return the devices whose budget has no room for a round."""
        for release in releases[self._counted :]:
            if release.phase != EVALUATE:
                share = release.charge.count / release.charge.noise_multiplier**2
                for device in release.clients:
                    self._spent[device] += share
        self._counted = len(releases)
        if not plan.privacy.noised:
            return set()
        tree, shares = plan.tree, {tier: plan.shares(tier) for tier in plan.boundaries}
        used_up = set()
        for leaf in tree.tiers[tree.depth - 1]:
            one, planned = shares[boundary_tier(tree, leaf)]
            most = planned * (1 + _ROUNDING) - one
            used_up |= {device for device in tree.children(leaf) if self._spent[device] > most}
        return used_up

    def state(self) -> dict[str, Any]:
        """Return who was asked when; empty where nobody takes turns."""
        return {} if self._turns is None else self._turns.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        if self._turns is not None and state:
            self._turns.load(state)
