"""When the tiers aggregate."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.schedule import EventSchedule, Segment


def test_A5_the_default_schedule() -> None:
    schedule = EventSchedule(steps=20, events={1: 5})
    assert schedule.at(1) == (5, 10, 15)
    assert schedule.segments() == tuple(
        Segment(index=i, start=5 * i, steps=5, tier=tier) for i, tier in enumerate((1, 1, 1, 0))
    )
    # One exchange for every segment: two rounds have eight.
    assert 2 * len(schedule.segments()) == 8
    assert (schedule.releases(1, 2), schedule.releases(2, 2)) == (1, 4)
    listed = EventSchedule(steps=20, events={1: [15, 5, 10]})
    assert listed.segments() == schedule.segments()


def test_without_events_a_round_is_one_segment() -> None:
    schedule = EventSchedule(steps=7)
    assert schedule.segments() == (Segment(index=0, start=0, steps=7, tier=0),)
    assert (schedule.at(1), schedule.releases(1, 1)) == ((), 1)
    assert EventSchedule().segments() == (Segment(index=0, start=0, steps=1, tier=0),)


def test_what_a_path_does_between_its_releases() -> None:
    schedule = EventSchedule(steps=12, events={1: [6], 2: [2, 9], 3: [4]})
    steps = {
        boundary: [[segment.steps for segment in period] for period in schedule.periods(boundary)]
        for boundary in (1, 2, 3, 4)
    }
    assert steps == {
        1: [[2, 2, 2, 3, 3]],
        2: [[2, 2, 2], [3, 3]],
        3: [[2], [2, 2], [3], [3]],
        4: [[2], [2], [2], [3], [3]],  # the devices: every segment by itself
    }
    # R = 1 + sum of |K_l| over the tiers above
    assert [schedule.releases(boundary, 4) for boundary in (1, 2, 3, 4)] == [1, 2, 4, 5]


def test_the_event_that_goes_further_up_takes_the_place_of_the_other() -> None:
    schedule = EventSchedule(steps=20, events={1: 10, 2: 5})
    assert (schedule.at(1), schedule.at(2)) == ((10,), (5, 15))
    assert [segment.tier for segment in schedule.segments()] == [2, 1, 2, 0]
    listed = EventSchedule(steps=20, events={2: 5, 1: [5, 7]})
    assert (listed.at(1), listed.at(2)) == ((5, 7), (10, 15))


def test_a_period_longer_than_the_round_has_no_events() -> None:
    assert EventSchedule(steps=5, events={1: 5}).at(1) == ()
    assert EventSchedule(steps=5, events={1: 50}).at(1) == ()


def test_another_number_of_steps() -> None:
    schedule = EventSchedule(steps=20, events={1: 5, 2: [3, 8]})
    shorter = schedule.with_steps(8)
    assert (shorter.at(1), shorter.at(2), shorter.steps) == ((5,), (3,), 8)
    assert (schedule.with_steps(31).at(1), schedule.with_steps(31).at(2)) == (
        (5, 10, 15, 20, 25, 30),
        (3, 8),
    )
    assert len(schedule.with_steps(1).segments()) == 1


@st.composite
def schedules(draw: st.DrawFn) -> EventSchedule:
    steps = draw(st.integers(1, 30))
    free = draw(st.permutations(range(1, steps)))
    cuts = sorted(draw(st.lists(st.integers(0, len(free)), min_size=3, max_size=3)))
    events: dict[int, Any] = {
        tier: list(free[start:stop])
        for tier, (start, stop) in enumerate([(0, cuts[0]), (cuts[0], cuts[1])], start=1)
    }
    events[3] = draw(st.integers(1, 40))
    if draw(st.booleans()):
        del events[1]
    return EventSchedule(steps=steps, events=events)


@given(schedules())
@settings(max_examples=200, deadline=None)
def test_segments_cover_the_round_and_no_step_has_two_events(schedule: EventSchedule) -> None:
    segments = schedule.segments()
    assert [segment.index for segment in segments] == list(range(len(segments)))
    ends = [segment.start + segment.steps for segment in segments]
    assert [segment.start for segment in segments] == [0, *ends[:-1]]
    assert all(segment.steps >= 1 for segment in segments)
    assert (ends[-1], segments[-1].tier) == (schedule.steps, 0)
    for tier in (1, 2, 3):
        listed = schedule.at(tier)
        assert listed == tuple(
            end for end, segment in zip(ends, segments, strict=True) if segment.tier == tier
        )
    for boundary in (1, 2, 3, 4):
        periods = schedule.periods(boundary)
        assert sum(periods, ()) == segments
        assert len(periods) == 1 + sum(len(schedule.at(tier)) for tier in range(1, boundary))
        for period in periods:
            assert [segment.tier < boundary for segment in period] == [False] * (
                len(period) - 1
            ) + [True]


@given(schedules(), st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_a_shorter_round_has_the_events_of_the_longer_one(
    schedule: EventSchedule, steps: int
) -> None:
    steps = min(steps, schedule.steps)
    shorter = schedule.with_steps(steps)
    for tier in (1, 2, 3):
        assert shorter.at(tier) == tuple(step for step in schedule.at(tier) if step < steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps = 0: expected an integer of at least 1"),
        ({"steps": 2.0}, "steps = 2.0: expected an integer of at least 1"),
        ({"events": 5}, "events = 5: expected a table of steps by tier"),
        ({"events": {0: 5}}, "tier of events = 0: expected an integer of at least 1"),
        ({"events": {"1": 5}}, "tier of events = '1': expected an integer of at least 1"),
        ({"events": {1: 0}}, "events of tier 1 = 0: expected an integer of at least 1"),
        ({"events": {1: True}}, "events of tier 1 = True: expected an integer of at least 1"),
        ({"events": {1: "5"}}, "events of tier 1 = '5': expected a period, or a list of differ"),
        ({"events": {1: 2.5}}, "events of tier 1 = 2.5: expected a period, or a list of differ"),
        ({"events": {1: [0]}}, "events of tier 1 = 0: expected an integer of at least 1"),
        ({"events": {1: [20]}}, "events of tier 1 = 20: expected steps below 20, after which"),
        ({"events": {1: [5, 25]}}, "events of tier 1 = 25: expected steps below 20"),
        ({"events": {1: [5, 5]}}, "events of tier 1 = [5, 5]: expected a period, or a list of d"),
        (
            {"events": {1: [5, 10], 2: [3, 10]}},
            "events of tier 2 = 10: expected no event of tier 1 after the same step",
        ),
        (
            {"events": {1: 5, 2: [3, 10]}},
            "events of tier 2 = 10: expected no event of tier 1 after the same step",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_what_is_no_schedule_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        EventSchedule(**{"steps": 20, **arguments})
    assert message in str(caught.value)


def test_events_of_tiers_that_a_tree_does_not_have() -> None:
    schedule = EventSchedule(steps=20, events={2: 5})
    schedule.check_depth(3)
    with pytest.raises(InvalidParameterError, match="tier of events = 2: expected a tier of aggre"):
        schedule.check_depth(2)
    with pytest.raises(InvalidParameterError, match="= 2: expected none: a tree of depth 1 has no"):
        schedule.check_depth(1)
    with pytest.raises(InvalidParameterError, match="tier of events = 2"):
        schedule.releases(1, 2)
    with pytest.raises(InvalidParameterError, match="boundary = 4: expected an integer from 1 to "):
        schedule.releases(4, 3)
    for ask in (schedule.at, schedule.periods):
        with pytest.raises(InvalidParameterError, match="= 0: expected an integer of at least 1"):
            ask(0)


def test_the_schedule_keeps_a_copy() -> None:
    events: dict[int, Any] = {1: [5]}
    schedule = EventSchedule(steps=20, events=events)
    events[1].append(10)
    events[2] = 3
    assert [segment.steps for segment in schedule.segments()] == [5, 15]
    assert hash(schedule) == hash(EventSchedule(steps=20, events={1: (5,)}))
