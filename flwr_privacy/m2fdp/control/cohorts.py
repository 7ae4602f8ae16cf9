"""Says how many devices of each lowest aggregator a round asks, and how often the same device.

A budget has to suffice for the rounds in which a device takes part, not for all rounds: what a
round releases does not depend on the data of devices that it did not ask. So the plan counts the
rounds of a device, and its own ledger refuses more of them.

``balanced``
    The devices of each lowest aggregator take turns: those that have waited longest are asked.
``fixed``
    A random set of them in every round.

Not in "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
whose devices are drawn at random and whose noise is for all rounds.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.m2fdp.schedule import Course, EventSchedule
from flwr_privacy.m2fdp.tree.exchanges import boundary_tier
from flwr_privacy.m2fdp.tree.tree import TierTree
from flwr_privacy.privacy.cohorts import BALANCED, FIXED, POISSON, participations
from flwr_privacy.wire.identity import derive_seed

from .controller import Decision

__all__ = ["TIER_COHORTS", "RoundSize", "TierCohorts"]

TIER_COHORTS = (FIXED, BALANCED)
"""Ways to draw the devices of a lowest aggregator."""

RoundSize = tuple[EventSchedule, Decision | None]
"""A round: its schedule, and what the controller decided, if there is one."""

_ROUNDING = 1e-9  # a share is a quotient


@dataclass(frozen=True, kw_only=True)
class TierCohorts:
    """How many devices of each lowest aggregator take part in the rounds of a training.

    Parameters
    ----------
    tree : TierTree
        Who there is.
    sampling : {"fixed", "balanced"}
        How they are drawn.
    share : float
        Share of the devices under each aggregator in a round, but for rounding; one device at
        least.
    least : int
        Fewest devices of a trusted aggregator.

    Raises
    ------
    InvalidParameterError
        If there is no such way to draw them.

    Notes
    -----
    A share of all devices is rounded down. What rounding leaves over goes to some aggregators, one
    device each: with ``balanced`` they take turns too, with ``fixed`` chance draws them.
    """

    tree: TierTree = field(repr=False)
    sampling: str
    share: float
    least: int

    def __post_init__(self) -> None:
        if self.sampling == POISSON:
            allowed = (
                "'balanced' or 'fixed': a trusted aggregator averages no fewer than min_children "
                "devices, and no noise is saved by who takes part"
            )
            raise InvalidParameterError("client_sampling", self.sampling, allowed)
        check_choice("client_sampling", self.sampling, TIER_COHORTS)

    def sizes(
        self, server_round: int, decision: Decision | None, *, seed: int | str
    ) -> dict[str, int]:
        """Return how many devices of each lowest aggregator a round asks.

        Parameters
        ----------
        server_round : int
            The round.
        decision : Decision, optional
            How many the controller wants, in place of the share.
        seed : int or str
            Root seed of the experiment, for ``fixed``.
        """
        leaves, extra = self._leaves, self._left_over
        if self.sampling == FIXED:
            chosen = sorted(
                leaves, key=lambda leaf: derive_seed(seed, "left over", server_round, leaf)
            )[:extra]
        else:
            chosen = [leaves[(server_round - 1) * extra % len(leaves) - i] for i in range(extra)]
        return {
            leaf: self._size(leaf, self._planned(leaf) + (leaf in chosen), decision)
            for leaf in leaves
        }

    def participations(self, rounds: Sequence[RoundSize]) -> dict[int, tuple[Course, ...]]:
        """Return the rounds that a device's budget has to suffice for, if all devices are there.

        Parameters
        ----------
        rounds : sequence of (EventSchedule, Decision or None)
            All rounds of the training, in order.

        Returns
        -------
        dict
            For each tier at which noise enters, the courses that its devices may have. With
            ``balanced`` they are those of all places in the queues, and no device has another
            one. With ``fixed`` there is one for each aggregator: of the rounds that are alike, as
            many as 99 % of its devices take part in at most.

        Examples
        --------
        >>> from flwr_privacy.privacy.cohorts import BALANCED
        >>> tree = TierTree.of_fanouts((2, 50), p=0.5)
        >>> cohorts = TierCohorts(tree=tree, sampling=BALANCED, share=0.1, least=2)
        >>> found = cohorts.participations([(EventSchedule(), None)] * 100)
        >>> {tier: [[n for _, n in course] for course in c] for tier, c in found.items()}
        {1: [[10]], 2: [[10]]}
        """
        schedules = {schedule.steps: schedule for schedule, _ in rounds}
        kinds = {steps: kind for kind, steps in enumerate(schedules)}
        kind_of = np.array([kinds[schedule.steps] for schedule, _ in rounds])
        found: dict[int, set[tuple[int, ...]]] = {}
        known: dict[tuple[object, ...], set[tuple[int, ...]]] = {}
        for place, leaf in enumerate(self._leaves):
            count = len(self.tree.children(leaf))
            if self.sampling == FIXED:
                counts = self._by_chance(leaf, rounds, kinds)
            else:
                asked = self._in_turns(place, rounds)
                key = (count, asked.tobytes())
                if key not in known:
                    known[key] = _of_places(asked, kind_of, count=count, kinds=len(kinds))
                counts = known[key]
            boundary = boundary_tier(self.tree, leaf)
            found.setdefault(boundary, set()).update(counts)
        return {
            boundary: tuple(
                tuple((s, n) for s, n in zip(schedules.values(), counts, strict=True) if n)
                for counts in sorted(places)
            )
            for boundary, places in found.items()
        }

    @property
    def _leaves(self) -> Sequence[str]:
        """The lowest aggregators."""
        return self.tree.tiers[self.tree.depth - 1]

    def _planned(self, leaf: str) -> int:
        return int(self.share * len(self.tree.children(leaf)) + _ROUNDING)

    @property
    def _left_over(self) -> int:
        """Devices of a round that rounding leaves over: fewer than there are aggregators."""
        planned = sum(map(self._planned, self._leaves))
        return int(self.share * len(self.tree.devices) + _ROUNDING) - planned

    def _size(self, leaf: str, planned: int, decision: Decision | None) -> int:
        """Return how many devices of an aggregator are asked, of a planned number or a decision."""
        tree, size = self.tree, max(1, planned)
        if decision is not None:
            first = tree.ancestor(leaf, 1) if tree.depth > 1 else leaf
            size = decision.secure if tree.secure(first) else decision.insecure
        if tree.secure(leaf):
            size = max(size, self.least)
        return min(size, len(tree.children(leaf)))

    def _in_turns(self, place: int, rounds: Sequence[RoundSize]) -> NDArray[np.int64]:
        """Return how many devices of an aggregator each round asks, with ``balanced``."""
        leaf, extra, leaves = self._leaves[place], self._left_over, len(self._leaves)
        usual, more = (self._size(leaf, self._planned(leaf) + n, None) for n in (0, 1))
        # As in `sizes`: the aggregators that get one more end at this place of the round.
        ends = np.arange(len(rounds)) * extra % leaves
        asked = np.where((ends - place) % leaves < extra, more, usual)
        for number, (_, decision) in enumerate(rounds):
            if decision is not None:
                asked[number] = self._size(leaf, 0, decision)
        return asked.astype(np.int64)

    def _by_chance(
        self, leaf: str, rounds: Sequence[RoundSize], kinds: dict[int, int]
    ) -> set[tuple[int, ...]]:
        """Return the rounds of most devices of an aggregator, by schedule, with ``fixed``."""
        children, chance = len(self.tree.children(leaf)), self._left_over / len(self._leaves)
        counts = [0] * len(kinds)
        alike = Counter((schedule.steps, decision) for schedule, decision in rounds)
        for (steps, decision), count in alike.items():
            usual, more = (self._size(leaf, self._planned(leaf) + n, decision) for n in (0, 1))
            q = (usual + chance * (more - usual)) / children
            counts[kinds[steps]] += participations(count, min(1.0, q))
        return {tuple(counts)}


def _of_places(
    asked: NDArray[np.int64], kind_of: NDArray[np.int64], *, count: int, kinds: int
) -> set[tuple[int, ...]]:
    """Return for each place in a queue how many rounds of each kind ask the device there.

    Parameters
    ----------
    asked : (T,) int64
        How many devices each round asks, from 1 to `count`.
    kind_of : (T,) int64
        Of which kind each round is.
    count : int
        Devices in the queue.
    kinds : int
        Number of kinds.
    """
    if kinds == 1:  # the first place has the most turns
        return {(math.ceil(int(asked.sum()) / count),)}
    turns = np.zeros((kinds, count), np.int64)
    start = 0
    for size, kind in zip(asked.tolist(), kind_of.tolist(), strict=True):
        end = start + size
        turns[kind, start:end] += 1
        turns[kind, : max(0, end - count)] += 1  # round the end of the queue
        start = end % count
    return set(map(tuple, turns.T.tolist()))
