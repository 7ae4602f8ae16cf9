"""The exchanges of a round: which devices of a tree are asked when, for how many local steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr_privacy.m2fdp.schedule import EventSchedule, Segment

from .tree import TierTree

__all__ = ["Asked", "Exchange", "boundary_tier", "exchanges", "steps_of"]


@dataclass(frozen=True)
class Asked:
    """The request to the devices of one lowest aggregator in an exchange.

    Parameters
    ----------
    steps : int
        Local steps.
    period : int
        Number of the exchange that began the period: the release is known by it.
    end : int
        Number of the exchange that ends it.
    """

    steps: int
    period: int
    end: int


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round: requests to devices, then an event.

    Parameters
    ----------
    index : int
        Number of the exchange in its round, from 0.
    tier : int
        Tier up to which the event goes.
    leaves : dict
        What the devices of each lowest aggregator are asked; those of the others are not.
    """

    index: int
    tier: int
    leaves: Mapping[str, Asked]

    def ends(self, leaf: str) -> bool:
        """Tell whether the event ends the period of a lowest aggregator's devices."""
        return self.leaves[leaf].end == self.index


def exchanges(
    tree: TierTree, schedule: EventSchedule, *, clean_events: bool
) -> tuple[Exchange, ...]:
    """Return the exchanges of a round, one for each segment of the schedule.

    Without clean events a secure subtree is asked once per period, with all steps of it: nothing
    would happen between its segments.

    Examples
    --------
    >>> tree = TierTree.of_fanouts((2, 3), p=0.5)
    >>> schedule = EventSchedule(steps=20, events={1: 10})
    >>> for exchange in exchanges(tree, schedule, clean_events=False):
    ...     print(exchange.tier, {leaf: asked.steps for leaf, asked in exchange.leaves.items()})
    1 {'t1-1': 10}
    0 {'t1-0': 20, 't1-1': 10}
    """
    schedule.check_depth(tree.depth)
    segments = schedule.segments()
    periods = {b: schedule.periods(b) for b in range(1, tree.depth + 1)}
    asked: list[dict[str, Asked]] = [{} for _ in segments]
    for leaf in tree.tiers[tree.depth - 1]:
        for period in periods[boundary_tier(tree, leaf)]:
            first, last = period[0].index, period[-1].index
            if clean_events:
                for segment in period:
                    asked[segment.index][leaf] = Asked(segment.steps, first, last)
            else:
                asked[last][leaf] = Asked(steps_of(period), last, last)
    return tuple(
        Exchange(segment.index, segment.tier, asked[segment.index]) for segment in segments
    )


def boundary_tier(tree: TierTree, leaf: str) -> int:
    """Return the tier at which the noise of a lowest aggregator's devices enters."""
    return tree.tier(tree.boundary(tree.children(leaf)[0]))


def steps_of(period: Sequence[Segment]) -> int:
    """Return the local steps of some segments."""
    return sum(segment.steps for segment in period)
