"""The controller against nested loops over its points, and what it may not do."""

import dataclasses
import functools
import inspect
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.control.controller import AdaptiveController, Decision
from flwr_privacy.m2fdp.control.gap import GapCoefficients
from flwr_privacy.m2fdp.control.resources import DELAY_MODES, ResourceModel
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.tree.counts import TierCounts
from flwr_privacy.m2fdp.tree.tree import TierTree
from flwr_privacy.simulations.research.m2fdp.theory import stationarity_gap

MODEL = 7840
FANOUTS = (2, 4, 4, 8)
D5, D6 = (0.5, 0.0, 0.0), (0.5, 0.0, 1.0)
INSTANCE: dict[str, Any] = {
    "parameters": MODEL,
    "total_steps": 4000,
    "max_steps": 40,
    "weights": (1.0, 1.0, 1e-4),
    "normalise": False,
    "nu": "printed",
    "active_tiers": "all",
    "events": {1: 3},
    "sampling_rate": 0.05,
}
"""What A19 gives; the tree comes on top."""

Point = tuple[int, int, int]  # K, s_sec, s_ins


def controller(p: Sequence[float] = D5, **values: Any) -> AdaptiveController:
    return AdaptiveController.of(TierTree.of_fanouts(FANOUTS, p=p), **(INSTANCE | values))


def decided(control: AdaptiveController, steps_left: int = 4000) -> Point:
    decision = control.decide(steps_left)
    return decision.steps, decision.secure, decision.insecure


@functools.cache
def noise_sum(
    fanouts: tuple[int, ...],  # s_1 .. s_{L-2}
    p: tuple[float, ...],
    s_sec: int,
    s_ins: int,
    dedup: bool = False,
    tiers: tuple[int, ...] | None = None,
    alpha: tuple[float, ...] = (1.0,) * 9,
) -> float:
    """Add up A_l, B_l and C_l as Theorem 1 has them, product by product."""
    depth = len(fanouts) + 2
    p = (0.0, *p, 1.0)

    def s(tier: int, lowest: int) -> int:
        return lowest if tier == depth - 1 else fanouts[tier - 1]

    total = 0.0
    for low in tiers or range(1, depth + 1):
        own = s_sec if low == 1 else s_ins
        below = math.prod(s(k, own) for k in range(low, depth))
        terms = [p[low] * alpha[low - 1] ** 2 / below**2]  # A
        for m in range(low + 1 if dedup else low, depth):  # B
            lowest = s_sec if m == 1 else s_ins
            insecure = math.prod(1 - p[k] for k in range(low, m))
            between = math.prod(s(k, lowest) for k in range(low, m))
            below = math.prod(s(k, lowest) for k in range(m, depth))
            terms.append(insecure * p[m] * alpha[m - 1] ** 2 / (between * below**2))
        if not (dedup and low == depth):  # C
            insecure = math.prod(1 - p[k] for k in range(low, depth))
            below = math.prod(s(k, s_ins) for k in range(low, depth))
            terms.append(insecure * alpha[depth - 1] ** 2 / below)
        total += (1 - p[low - 1]) ** 2 * sum(terms)
    return total


def at(
    p: tuple[float, ...],
    point: Point,
    *,
    events: int,
    dedup: bool = False,
    tiers: tuple[int, ...] | None = None,
    mode: str = "paper_sum",
) -> tuple[float, float, float]:
    """Return joules and seconds of a round of the tree 2/4/4/8 with one secure half, and nu."""
    steps, s_sec, s_ins = point
    wireless, wired = 32 * MODEL / 35e6, 32 * MODEL / 100e6  # seconds
    devices, between = 16 * s_sec + 16 * s_ins, 8 + 32
    turns = {"paper_sum": devices + between, "tdma": 4 + 4 + max(s_sec, s_ins), "parallel": 3}
    at_the_cloud = {"paper_sum": 2, "tdma": 1, "parallel": 1}
    energy = (1 + events) * (devices + between) * 10**-0.6 * wireless
    energy += 2 * 10**0.8 * wired + steps * devices * 1e-3
    seconds = (1 + events) * turns[mode] * wireless + at_the_cloud[mode] * wired + steps * 0.2
    scale = 8 * 4 * MODEL * steps**4 * 0.05**2 * math.log(1e5)
    return energy, seconds, scale * noise_sum((4, 4), p, s_sec, s_ins, dedup, tiers)


def search(
    p: tuple[float, ...],
    *,
    weights: Sequence[float] = (1.0, 1.0, 1e-4),
    steps_left: int = 4000,
    normalise: bool = False,
    period: int | None = None,
    **variant: Any,
) -> Point:
    """Nested loops: the best K, s_sec and s_ins; of equals more devices, then fewer steps."""

    def objectives(point: Point) -> tuple[float, float, float]:
        events = 3 if period is None else (point[0] - 1) // period
        energy, seconds, nu = at(p, point, events=events, **variant)
        return steps_left / point[0] * energy, steps_left / point[0] * seconds, nu

    units = objectives((40, 8, 8)) if normalise else (1.0, 1.0, 1.0)
    best, found = math.inf, (0, 0, 0)
    for s_sec, s_ins in itertools.product(range(8, 0, -1), repeat=2):
        for steps in range(1, min(40, steps_left) + 1):
            point = (steps, s_sec, s_ins)
            parts = zip(weights, objectives(point), units, strict=True)
            value = sum(weight * part / unit for weight, part, unit in parts)
            if value < best * (1 - 1e-12):
                best, found = value, point
    return found


@pytest.mark.parametrize(("p", "best"), [(D5, (4, 1, 1)), (D6, (6, 1, 2))], ids=["D.5", "D.6"])
def test_A19_instance(p: tuple[float, ...], best: Point) -> None:
    assert decided(controller(p)) == best
    assert search(p) == best


NOISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # variant: (what the controller takes, what the loops take)
    "printed": ({"nu": "printed", "active_tiers": "all"}, {}),
    "dedup": ({"nu": "dedup", "active_tiers": "all"}, {"dedup": True}),
    "scheduled": ({"active_tiers": "scheduled"}, {"tiers": (1, 2)}),
    "both": ({"nu": "dedup", "active_tiers": "scheduled"}, {"dedup": True, "tiers": (1, 2)}),
    "tier 3": ({"nu": "dedup", "active_tiers": [3]}, {"dedup": True, "tiers": (3,)}),
}
WEIGHTS = [(1.0, 1.0, 1e-4), (1.0, 1.0, 1e-7), (1.0, 0.0, 1e-2), (0.0, 1.0, 1e-5), (0.0, 0.0, 1.0)]


@pytest.mark.parametrize("variant", list(NOISE))
@pytest.mark.parametrize("p", [D5, D6, (0.5, 0.25, 0.75)], ids=str)
def test_A19_nested_loops_find_the_same(p: tuple[float, ...], variant: str) -> None:
    takes, loops_take = NOISE[variant]
    found = set()
    for weights in WEIGHTS:
        best = decided(controller(p, weights=weights, **takes))
        assert best == search(p, weights=weights, **loops_take)
        found.add(best)
    assert len(found) > 2  # no corner that every objective would give


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("period", [None, 5])
@pytest.mark.parametrize("mode", DELAY_MODES)
def test_A19_nested_loops_with_other_costs(mode: str, period: int | None, normalise: bool) -> None:
    settings: dict[str, Any] = {"normalise": normalise, "weights": (0.3, 1.0, 2e-5)}
    if normalise:
        settings["weights"] = (0.3, 1.0, 5.0)
    events: Any = {1: 3} if period is None else EventSchedule(events={1: period})
    control = controller(D6, events=events, resources=ResourceModel(delay_mode=mode), **settings)
    for steps_left in (4000, 350, 17, 1):
        best = search(D6, steps_left=steps_left, period=period, mode=mode, **settings)
        assert decided(control, steps_left) == best


def test_A19_steps_add_up_to_the_budget() -> None:
    runs: list[tuple[int, dict[str, Any]]]
    runs = [(4000, {}), (777, {"initial_steps": 5}), (3, {"initial_steps": 40})]
    for total, settings in runs:
        control = controller(total_steps=total, **settings)
        left, taken = total, []
        while left:
            taken.append(control.decide(left).steps)
            assert 1 <= taken[-1] <= min(40, left)
            left -= taken[-1]
        assert sum(taken) == total


def test_A19_more_weight_on_noise_never_takes_more_steps() -> None:
    for p in (D5, D6):
        for nu, tiers in itertools.product(("printed", "dedup"), ("all", "scheduled")):
            weights = [(1.0, 1.0, 10.0**e) for e in range(-12, 2)]
            points = [decided(controller(p, weights=w, nu=nu, active_tiers=tiers)) for w in weights]
            steps = [steps for steps, _, _ in points]
            assert steps == sorted(steps, reverse=True)
            assert steps[0] == 40
            assert steps[-1] == 1
            for s in (1, 2):  # the limits only: in between K and s make up for each other
                assert points[-1][s] >= points[0][s]


def test_A19_more_weight_on_energy_never_takes_fewer_steps() -> None:
    for p in (D5, D6):
        for which in (0, 1):
            steps = []
            for e in range(-6, 7):
                weights = [1.0, 1.0, 1e-3]
                weights[which] = 10.0**e
                steps.append(decided(controller(p, weights=weights))[0])
            assert steps == sorted(steps)
            assert steps[-1] > steps[0]


def test_A19_fewer_noisy_devices_take_more_steps() -> None:
    for weight in (1e-7, 1e-5, 1e-4, 1e-2, 1.0):
        weights = (1.0, 1.0, weight)
        assert (
            decided(controller(D6, weights=weights))[0]
            >= (decided(controller(D5, weights=weights))[0])
        )


def test_normalised_decisions_depend_on_the_budget_only_at_its_end() -> None:
    control = controller(D6, normalise=True, weights=(1.0, 1.0, 1.0), events=EventSchedule())
    best = decided(control)
    assert best[0] < 40
    assert {decided(control, left) for left in range(best[0], 4001, 37)} == {best}
    assert control.decide(best[0] - 1).steps == best[0] - 1
    # and constants of the noise rule have no influence
    other = controller(
        D6, normalise=True, weights=(1.0, 1.0, 1.0), events=EventSchedule(), epsilon=9.0, delta=0.1
    )
    assert decided(other) == best


def test_unnormalised_decisions_count_on_what_is_left() -> None:
    control = controller()
    assert decided(control, 4000) == (4, 1, 1)
    assert decided(control, 40)[0] < 4  # fewer rounds remain to be paid for, the noise stays


def test_a_period_counts_events_before_the_last_step() -> None:
    schedule = EventSchedule(events={1: 5})
    control = controller(events=schedule, weights=(1.0, 0.0, 0.0), max_steps=12)
    upload = (32 * 8 + 40) * 10**-0.6 * 32 * MODEL / 35e6
    least = controller(events={}, max_steps=12)
    for steps, events in {1: 0, 5: 0, 6: 1, 10: 1, 11: 2, 12: 2}.items():
        # K at full participation: the first decision of a run is settled
        priced = dataclasses.replace(control, initial_steps=steps).decide(4000)
        free = dataclasses.replace(least, initial_steps=steps).decide(4000)
        assert priced.steps == steps
        assert priced.energy - free.energy == pytest.approx(events * upload, abs=1e-9)


def test_lists_and_tiers_of_a_schedule() -> None:
    schedule = EventSchedule(steps=40, events={1: [10, 30], 2: 10, 3: 5})
    numbers = {k: [len(schedule.with_steps(k).at(tier)) for tier in (1, 2, 3)] for k in (10, 31)}
    assert numbers == {10: [0, 0, 1], 31: [2, 1, 3]}
    model = ResourceModel()
    counts = TierCounts.of_fanouts(FANOUTS, secure=1)
    for steps, (first, second, third) in numbers.items():
        decision = controller(events=schedule, initial_steps=steps).decide(4000)
        cost = model.round(
            counts, steps=steps, events={1: first, 2: second, 3: third}, parameters=MODEL
        )
        assert decision.energy == pytest.approx(cost.energy, rel=1e-12)
        assert decision.delay == pytest.approx(cost.seconds, rel=1e-12)


def test_scheduled_tiers_are_those_with_events() -> None:
    weights = (1.0, 1.0, 1e-3)
    for events, tiers in [({}, [1]), ({1: 0}, [1]), ({1: 2}, [1, 2]), ({2: 1}, [1, 3])]:
        scheduled = controller(D6, events=events, weights=weights, active_tiers="scheduled")
        listed = controller(D6, events=events, weights=weights, active_tiers=tiers)
        other = controller(D6, events=events, weights=weights, active_tiers=[4])
        assert decided(scheduled) == decided(listed) != decided(other)
    late = EventSchedule(events={1: 40})  # a round of 40 steps has none
    assert decided(controller(D6, events=late, active_tiers="scheduled")) == (
        decided(controller(D6, events={}, active_tiers=[1]))
    )


def test_the_first_round_takes_everybody() -> None:
    control = controller(initial_steps=5)
    assert decided(control, 4000) == (5, 8, 8)
    assert decided(control, 3995) == decided(controller(), 3995) == (4, 1, 1)


def test_who_is_not_there_is_not_chosen() -> None:
    nobody, everybody = controller((0.0, 0.0, 0.0)), controller((1.0, 1.0, 1.0))
    # the objective is the same for all s of nobody: more devices win a tie
    assert nobody.decide(4000).secure == 8
    assert nobody.decide(4000).insecure < 8
    assert everybody.decide(4000).insecure == 8
    assert everybody.decide(4000).secure < 8


UNEVEN = [("cloud", "a"), ("cloud", "b"), ("a", "a0"), ("a", "a1"), ("b", "b0"), ("b", "b1")]
SIZES = {"a0": 2, "a1": 6, "b0": 3, "b1": 4}
UNEVEN += [(node, f"{node}-{i}") for node, size in SIZES.items() for i in range(size)]


@pytest.mark.parametrize("least", [1, 3, 5])
def test_aggregators_with_few_devices_take_all(least: int) -> None:
    tree = TierTree.of_edges(UNEVEN, trusted=["a", "a0", "a1"])
    model, counts = ResourceModel(delay_mode="tdma"), TierCounts.of(tree)
    found = set()
    for weights in ((1.0, 1.0, 1e-7), (1.0, 1.0, 1e-3), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)):
        control = AdaptiveController.of(
            tree,
            parameters=100,
            total_steps=400,
            max_steps=6,
            weights=weights,
            normalise=False,
            nu="printed",
            active_tiers="all",
            min_children=least,
            resources=model,
        )
        best, point = math.inf, (0, 0, 0)
        for s_sec in range(6, min(least, 6) - 1, -1):
            for s_ins in range(4, min(least, 4) - 1, -1):
                for steps in range(1, 7):
                    taking = [min(s_sec, 2), s_sec, min(s_ins, 3), s_ins]
                    cost = model.round(counts, steps=steps, parameters=100, participants=taking)
                    nu = 8 * 3 * 100 * steps**4 * math.log(1e5)
                    nu *= noise_sum((2,), (0.5, 0.0), min(s_sec, 2), min(s_ins, 2))
                    value = 400 / steps * (weights[0] * cost.energy + weights[1] * cost.seconds)
                    value += weights[2] * nu
                    if value < best * (1 - 1e-12):
                        best, point = value, (steps, s_sec, s_ins)
        decision = control.decide(400)
        assert (decision.steps, decision.secure, decision.insecure) == point
        assert min(point[1:]) >= min(least, 4)
        taking = [min(point[1], 2), point[1], min(point[2], 3), point[2]]
        cost = model.round(counts, steps=point[0], parameters=100, participants=taking)
        assert decision.energy == pytest.approx(cost.energy, rel=1e-12)
        assert decision.delay == pytest.approx(cost.seconds, rel=1e-12)
        found.add(point)
    assert len(found) > 2


GAPS = [
    ((5,), (0.5,), None),
    ((4, 4, 4), D5, None),
    ((2, 3), (0.5, 0.75), (0.25, 0.0)),
    ((3, 2, 5), (1.0, 1.0, 1.0), (0.0, 0.5, 1.0)),
]


@pytest.mark.parametrize(("fanouts", "p", "p_min"), GAPS, ids=str)
@pytest.mark.parametrize("dedup", [False, True])
def test_nu_is_the_stationarity_gap(
    fanouts: tuple[int, ...], p: tuple[float, ...], p_min: tuple[float, ...] | None, dedup: bool
) -> None:
    depth = len(fanouts) + 1
    alpha = [1.0, 0.5, 2.0, 0.25][:depth]
    variant: dict[str, Any] = {"p_min": p_min, "alpha": alpha, "dedup": dedup}
    unit: dict[str, Any] = {"M": 1, "K": 1, "q": 1.0, "eps": 1.0, "delta": math.exp(-1 / 8)}
    for tiers in ("all", [1], [1, 2], [depth]):
        factors = GapCoefficients.of(fanouts, p, active_tiers=tiers, **variant)
        for s_sec, s_ins in itertools.product((1, 2, 7), repeat=2):
            gap = stationarity_gap(
                (*fanouts[:-1], s_ins),
                p,
                secure_fanouts=(*fanouts[:-1], s_sec),
                active_tiers=tiers,
                **unit,
                **variant,
            )
            assert depth * factors.total(s_sec, s_ins) == pytest.approx(gap, rel=1e-12)
        equal = stationarity_gap((*fanouts[:-1], 3), p, active_tiers=tiers, **unit, **variant)
        assert depth * factors.total(3, 3) == pytest.approx(equal, rel=1e-12)


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("tiers", [None, (1,), (1, 2), (3, 4)], ids=str)
def test_the_factors_add_up_to_the_terms(dedup: bool, tiers: tuple[int, ...] | None) -> None:
    p, alpha = (0.5, 0.25, 0.75), (1.0, 0.5, 2.0, 0.25)
    factors = GapCoefficients.of(
        (3, 2, 9), p, alpha=alpha, dedup=dedup, active_tiers=tiers or "all"
    )
    for s_sec, s_ins in itertools.product((1, 2, 7), repeat=2):
        terms = noise_sum((3, 2), p, s_sec, s_ins, dedup, tiers, alpha)
        assert factors.total(s_sec, s_ins) == pytest.approx(terms, rel=1e-12)


@pytest.mark.parametrize(
    ("dedup", "two_tiers", "three_tiers"), [(False, 1.0, 0.6527778), (True, 0.625, 0.375)]
)
def test_A14_sums(dedup: bool, two_tiers: float, three_tiers: float) -> None:
    two = GapCoefficients.of([2], [0.5], dedup=dedup)
    assert two.total(2, 2) == pytest.approx(two_tiers, rel=1e-6)
    three = GapCoefficients.of([2, 3], [0.5, 0.5], dedup=dedup)
    assert three.total(3, 3) == pytest.approx(three_tiers, rel=1e-6)


@pytest.mark.parametrize(
    ("fanouts", "p", "nu"),
    [
        ((10, 5), (0.0,), 1.2708796e9),
        ((10, 5), (0.5,), 3.6971043e8),
        ((10, 5), (1.0,), 4.6213804e7),
        ((2, 4, 4, 4), (0.5, 0, 0), 2.6268869e9),
        ((2, 4, 4, 4), (0.5, 0, 1), 1.5146980e8),
        ((2, 4, 4, 4), (0.5, 1, 1), 3.1027334e6),
        ((2, 4, 4, 4), (1, 1, 1), 5.6413335e5),
    ],
    ids=str,
)
def test_A15_nu_of_the_controller(
    fanouts: tuple[int, ...], p: tuple[float, ...], nu: float
) -> None:
    values = INSTANCE | {"max_steps": 20, "initial_steps": 20, "events": {}}
    control = AdaptiveController.of(TierTree.of_fanouts(fanouts, p=p), **values)
    assert control.decide(4000).nu == pytest.approx(nu, rel=1e-6)


def test_nu_of_fewer_steps_and_of_another_budget() -> None:
    def nu(steps: int, **values: Any) -> float:
        return controller(initial_steps=steps, **values).decide(4000).nu

    assert nu(20) == pytest.approx(16 * nu(10), rel=1e-12)
    assert nu(10, sampling_rate=0.1) == pytest.approx(4 * nu(10), rel=1e-12)
    assert nu(10, epsilon=2.0) == pytest.approx(nu(10) / 4, rel=1e-12)
    assert nu(10, delta=1e-10) == pytest.approx(nu(10) * 2, rel=1e-12)
    assert nu(10, alphas=3.0) == pytest.approx(nu(10) * 9, rel=1e-12)
    assert nu(10, parameters=MODEL * 2) == pytest.approx(nu(10) * 2, rel=1e-12)


def test_a_decision_depends_on_public_numbers_only() -> None:
    # nobody's data, model or answers come in: the arguments are numbers that the operator has
    assert list(inspect.signature(AdaptiveController.decide).parameters) == ["self", "steps_left"]
    fresh, used = controller(), controller()
    for left in (4000, 10, 777):
        used.decide(left)
    assert used.decide(4000) == fresh.decide(4000)


def test_a_decision_is_kept_as_json() -> None:
    decision = controller().decide(4000)
    assert Decision(**json.loads(json.dumps(dataclasses.asdict(decision)))) == decision
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.steps = 40  # type: ignore[misc]


def test_the_controller_of_a_tree() -> None:
    tree = TierTree.of_edges(UNEVEN, trusted=["a", "a0", "a1", "b1"])
    control = AdaptiveController.of(tree, parameters=10, total_steps=10, max_steps=5)
    assert control.counts == TierCounts.of(tree)
    assert (control.ratios, control.ratios_min) == (tree.ratios(), tree.ratios_min())
    assert control.ratios == (0.5, 0.5)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"counts": TierCounts.of_fanouts((5,))}, "expected the counts of a tree with at least one"),
    ({"counts": (10, 5)}, "counts = (10, 5): expected the counts of a tree"),
    ({"ratios": (0.5, 0.5)}, "ratios = (0.5, 0.5): expected 1 numbers"),
    ({"ratios": 0.5}, "ratios = 0.5: expected 1 numbers"),
    ({"ratios": (1.5,)}, "ratios = 1.5: expected a finite number from 0 to 1"),
    ({"ratios_min": (0.75,)}, "ratios_min = 0.75: expected at most the largest, 0.5"),
    ({"parameters": 0}, "parameters = 0: expected an integer of at least 1"),
    ({"total_steps": 0}, "total_steps = 0: expected an integer of at least 1"),
    ({"max_steps": 2.5}, "max_steps = 2.5: expected an integer of at least 1"),
    ({"weights": (1.0, 1.0)}, "weights = (1.0, 1.0): expected 3 numbers"),
    ({"weights": "abc"}, "weights = 'abc': expected 3 numbers"),
    ({"weights": (1.0, -1.0, 1.0)}, "weights = -1.0: expected a finite number of at least 0"),
    ({"weights": (0, 0, 0)}, "weights = (0, 0, 0): expected at least one above 0"),
    ({"normalise": 1}, "normalise = 1: expected true or false"),
    ({"nu": "exact"}, "nu = 'exact': expected one of 'dedup', 'printed'"),
    ({"active_tiers": "some"}, "active_tiers = 'some': expected one of 'all', 'scheduled'"),
    ({"active_tiers": [3]}, "active_tiers = 3: expected an integer from 1 to 2"),
    ({"events": {2: 1}}, "events: tier = 2: expected an integer from 1 to 1"),
    ({"events": {1: -1}}, "events[1] = -1: expected an integer of at least 0"),
    ({"events": EventSchedule(events={2: 5})}, "tier of events = 2: expected a tier of"),
    ({"resources": None}, "resources = None: expected a ResourceModel"),
    ({"min_children": 0}, "min_children = 0: expected an integer of at least 1"),
    ({"initial_steps": 21}, "initial_steps = 21: expected an integer from 1 to 20"),
    ({"alphas": (1.0,)}, "alphas = (1.0,): expected 2 numbers"),
    ({"alphas": -1.0}, "alphas = -1.0: expected a finite number of at least 0"),
    ({"sampling_rate": 1.1}, "sampling_rate = 1.1: expected a finite number from"),
    ({"epsilon": 0}, "epsilon = 0: expected a finite number"),
    ({"delta": 1.0}, "delta = 1.0: expected a finite number from"),
]


@pytest.mark.parametrize(("values", "text"), BAD, ids=str)
def test_what_is_no_controller_is_refused(values: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {
        "counts": TierCounts.of_fanouts((10, 5), secure=5),
        "ratios": (0.5,),
        "parameters": 10,
        "total_steps": 100,
        "max_steps": 20,
    }
    AdaptiveController(**good)
    with pytest.raises(InvalidParameterError) as caught:
        AdaptiveController(**(good | values))
    assert text in str(caught.value)


@pytest.mark.parametrize("steps_left", [0, -1, 4001, 2.0, True])
def test_what_is_no_budget_is_refused(steps_left: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"steps_left = .*: expected an integer"):
        controller().decide(steps_left)
