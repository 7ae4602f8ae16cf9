"""Schedules when tiers aggregate: events cut the local steps of a round into segments.

A round has K local steps. After the steps in K_l there is an event up to tier l, after step K the
global one, up to tier 0 (Algorithm 1 of the paper).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.keywords import checked_keywords

__all__ = ["Course", "EventSchedule", "Segment"]

_STEPS = "a period, or a list of different steps"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Local steps without an event, and the event that follows them.

    Parameters
    ----------
    index : int
        Number of the segment in its round, from 0.
    start : int
        Local steps of the round before it: it has the steps ``start + 1`` to ``start + steps``.
    steps : int
        Number of its local steps.
    tier : int
        Tier up to which the event goes; 0 is the global one.
    """

    index: int
    start: int
    steps: int
    tier: int


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class EventSchedule:
    """Local steps and aggregation events of a round.

    Parameters
    ----------
    steps : int, default 1
        Local steps of the round, K, at least 1.
    events : Mapping of int to int or sequence of int, optional
        By tier from 1 on: a period in local steps, or the steps after which there is an event up
        to that tier (K_l), from 1 to ``steps - 1``. By default the global event is the only one.
        An event of a period is left out where another one goes further up: the global one at
        step K, or one of a tier nearer to the cloud, which aggregates the lower tiers as well.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or a listed step has an event of another tier too.

    Examples
    --------
    >>> schedule = EventSchedule(steps=20, events={1: 5})
    >>> schedule.at(1), [segment.tier for segment in schedule.segments()]
    ((5, 10, 15), [1, 1, 1, 0])
    >>> schedule.releases(1, 2), schedule.releases(2, 2)
    (1, 4)
    """

    steps: int = 1
    events: Mapping[int, int | Sequence[int]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, minimum=1)
        if not isinstance(self.events, Mapping):
            raise InvalidParameterError("events", self.events, "a table of steps by tier")
        events: dict[int, int | Sequence[int]] = {}
        for tier, steps in self.events.items():
            check_integer("tier of events", tier, minimum=1)
            events[tier] = self._checked(tier, steps)
        # A copy: nothing changes the schedule later.
        object.__setattr__(self, "events", dict(sorted(events.items())))
        _ = self._tier_after  # finds lists that overlap

    def _checked(self, tier: int, steps: int | Sequence[int]) -> int | tuple[int, ...]:
        name = f"events of tier {tier}"
        if isinstance(steps, int):
            return check_integer(name, steps, minimum=1)
        if not isinstance(steps, Sequence) or isinstance(steps, str | bytes):
            raise InvalidParameterError(name, steps, _STEPS)
        for step in steps:
            check_integer(name, step, minimum=1)
            if step >= self.steps:
                allowed = f"steps below {self.steps}, after which the global event is"
                raise InvalidParameterError(name, step, allowed)
        if len(set(steps)) < len(steps):
            raise InvalidParameterError(name, list(steps), _STEPS)
        return tuple(sorted(steps))

    @cached_property
    def _tier_after(self) -> dict[int, int]:
        """Tier of the event after a step, for the steps that have one."""
        after = {self.steps: 0}
        for tier, steps in self.events.items():  # the tier next to the cloud comes first
            if isinstance(steps, int):
                for step in range(steps, self.steps, steps):
                    after.setdefault(step, tier)
                continue
            for step in steps:
                if step in after:
                    allowed = f"no event of tier {after[step]} after the same step"
                    raise InvalidParameterError(f"events of tier {tier}", step, allowed)
                after[step] = tier
        return dict(sorted(after.items()))

    def check_depth(self, depth: int) -> None:
        """Check that a tree of `depth` tiers below the cloud has the tiers of all events.

        Raises
        ------
        InvalidParameterError
            If there are events up to the devices' tier or below.
        """
        for tier in self.events:
            if tier >= depth:
                allowed = f"a tier of aggregators, from 1 to {depth - 1}"
                if depth == 1:
                    allowed = "none: a tree of depth 1 has no aggregators but the cloud"
                raise InvalidParameterError("tier of events", tier, allowed)

    def at(self, tier: int) -> tuple[int, ...]:
        """Return the local steps after which there is an event up to `tier` and no further, K_l.

        Raises
        ------
        InvalidParameterError
            If `tier` is no integer of at least 1.
        """
        check_integer("tier", tier, minimum=1)
        return tuple(step for step, reached in self._tier_after.items() if reached == tier)

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments of a round, in order; the last one ends with the global event."""
        return self._segments

    @cached_property
    def _segments(self) -> tuple[Segment, ...]:
        starts = (0, *self._tier_after)
        return tuple(
            Segment(index=index, start=starts[index], steps=step - starts[index], tier=tier)
            for index, (step, tier) in enumerate(self._tier_after.items())
        )

    def periods(self, boundary: int) -> tuple[tuple[Segment, ...], ...]:
        """Return the segments of a round, grouped by the noised release that ends the group.

        Parameters
        ----------
        boundary : int
            Tier of the node that adds the noise of a path. It sends something at every event that
            goes further up than its own tier; for a device these are all events.

        Raises
        ------
        InvalidParameterError
            If `boundary` is no integer of at least 1.

        Examples
        --------
        >>> periods = EventSchedule(steps=20, events={1: [8], 2: 5}).periods(2)
        >>> [[segment.steps for segment in period] for period in periods]
        [[5, 3], [2, 5, 5]]
        """
        check_integer("boundary", boundary, minimum=1)
        periods: list[tuple[Segment, ...]] = []
        period: list[Segment] = []
        for segment in self._segments:
            period.append(segment)
            if segment.tier < boundary:
                periods.append(tuple(period))
                period = []
        return tuple(periods)

    def releases(self, boundary: int, depth: int) -> int:
        """Return the number of noised releases of a path in a round, R.

        ``R = 1 + sum over l < boundary of |K_l|``.

        Parameters
        ----------
        boundary : int
            Tier of the node that adds the noise, from 1 to `depth`.
        depth : int
            Tiers of the tree below the cloud, L.

        Raises
        ------
        InvalidParameterError
            If there is no such tier, or the tree lacks a tier of an event.
        """
        check_integer("boundary", boundary, minimum=1, maximum=depth)
        self.check_depth(depth)
        return len(self.periods(boundary))

    def with_steps(self, steps: int) -> "EventSchedule":
        """Return the schedule of a round with another number of local steps.

        Periods stay; lists lose the steps at which or after which the round now ends.

        Raises
        ------
        InvalidParameterError
            If `steps` is no integer of at least 1.

        Examples
        --------
        >>> EventSchedule(steps=20, events={1: 5}).with_steps(10).at(1)
        (5,)
        """
        check_integer("steps", steps, minimum=1)
        events = {
            tier: listed if isinstance(listed, int) else [step for step in listed if step < steps]
            for tier, listed in self.events.items()
        }
        return EventSchedule(steps=steps, events=events)


Course = tuple[tuple[EventSchedule, int], ...]
"""Rounds by their schedules, each with the number of rounds that have it."""
