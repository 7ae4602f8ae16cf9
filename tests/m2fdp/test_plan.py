"""What the server settles before a round: who is asked when, and with which noise."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp import Drift, EventSchedule, M2FDPRoundPlan, TierPrivacy, TierTree
from flwr_privacy.m2fdp.paper_noise import sigma
from flwr_privacy.m2fdp.sensitivity import sensitivity_worst_case
from flwr_privacy.m2fdp.terms import any_batch
from flwr_privacy.m2fdp.tree.exchanges import boundary_tier, exchanges
from flwr_privacy.m2fdp.zone_average import GAP, NOISE_REACH
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.privacy.noise import discretisation_gap
from flwr_privacy.simulations.research.m2fdp.paper_epsilons import true_epsilon
from flwr_privacy.simulations.research.m2fdp.theory import step_size
from flwr_privacy.simulations.settings.flat_options import keywords_of
from flwr_privacy.strategies import M2FDP

EDGES = TierTree.of_fanouts((10, 5), p=0.5)
DEEP = TierTree.of_fanouts((4, 2, 3), p=(0.5, 0.5))
EVERY_5 = EventSchedule(steps=20, events={1: 5})
MIXED = EventSchedule(steps=12, events={1: [6], 2: [2, 9]})

PAPER = {"unit": "paper", "alpha": 1.0, "sampling_rate": 0.05, "clean_events": True}
WORST = {True: "worst", False: None}
RECORD = {"unit": "record", "sampling_rate": 0.1}


def privacy(**changes: Any) -> TierPrivacy:
    flat = {"fanouts": (2, 2), "unit": "device", "clipping_norm": 0.25, **changes}
    chosen: TierPrivacy = keywords_of(M2FDP, flat)["privacy"]
    return chosen


def plan(
    tree: TierTree = EDGES,
    schedule: EventSchedule = EVERY_5,
    *,
    server_round: int = 1,
    rounds: int = 10,
    total_steps: int | None = None,
    step_rule: str = "constant",
    **changes: Any,
) -> M2FDPRoundPlan:
    return M2FDPRoundPlan(
        tree=tree,
        schedule=schedule,
        privacy=privacy(**changes),
        step_rule=step_rule,
        server_round=server_round,
        total_steps=schedule.steps * rounds if total_steps is None else total_steps,
        rounds=rounds,
    )


# -- What may be wished --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, r"^epsilon = 0\.0: expected a number above 0"),
        ({"epsilon": -1.0}, r"^epsilon = -1\.0: expected a number above 0"),
        ({"epsilon": "8"}, "^epsilon = '8'"),
        ({"delta": 0.0}, r"^delta = 0\.0"),
        ({"delta": 1.0}, r"^delta = 1\.0"),
        ({"unit": "rdp"}, "^unit = 'rdp': expected one of"),
        ({"clean_events": "none"}, "^clean_events = 'none': expected one of"),
        ({"clean_events": True}, "^clean_events = True: expected one of"),
        ({**PAPER, "clean_events": "yes"}, "^clean_events = 'yes': expected true or false"),
        ({"unit": "none", "clean_events": "yes"}, "^clean_events = 'yes': expected true or false"),
        ({**PAPER, "release_steps": "event"}, "^release_steps = 'event': expected one of"),
        ({"clipping_norm": None}, "^clipping_norm = None"),
        ({"clipping_norm": 0.0}, r"^clipping_norm = 0\.0: expected a number above 0"),
        ({"unit": "none", "clipping_norm": -1.0}, r"^clipping_norm = -1\.0"),
        ({**PAPER, "alpha": None}, "^alpha = None"),
        ({"alpha": 1.0}, "^M2FDP has no 'alpha': only with unit=paper$"),
        ({"unit": "paper", "alpha": 1.0}, "^PaperNoise needs 'sampling_rate': it is required"),
        ({"unit": "record"}, "^RecordNoise needs 'sampling_rate': it is required"),
        ({"sampling_rate": 0.1}, "has no 'sampling_rate': only with unit=record or unit=paper"),
        ({**RECORD, "sampling_rate": 0.0}, r"^sampling_rate = 0\.0: expected above 0, at most 1"),
        ({**RECORD, "sampling_rate": 1.5}, r"^sampling_rate = 1\.5: expected above 0, at most 1"),
        ({**RECORD, "clean_events": "worst"}, "has no 'clean_events': only with unit="),
        ({"clean_events": "smooth"}, "^SmoothDrift needs 'smoothness': it is required"),
        ({"clean_events": "smooth", "smoothness": -1.0}, "^smoothness = -1.0"),
        ({"smoothness": 0.1}, "has no 'smoothness': only with clean_events=smooth$"),
        ({"unit": "none", "epsilon": 1.0}, "has no 'epsilon': only with unit=device"),
    ],
)
def test_what_is_not_allowed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        privacy(**changes)


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        ([1.0], r"^alpha = \[1\.0\]: expected a number, or 2, one per tier"),
        ([1.0, 1.0, 1.0], "expected a number, or 2, one per tier"),
        ([1.0, 0.0], r"^alpha = 0\.0: expected above 0"),
        (-1.0, r"^alpha = -1\.0: expected above 0"),
        (["1", "1"], "^alpha = '1'"),
    ],
)
def test_the_constants_of_the_paper_are_one_or_one_for_each_tier(alpha: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        [privacy(**{**PAPER, "alpha": alpha}).alpha_of(tier, 2) for tier in (1, 2)]


def test_a_drift_that_is_declared_is_allowed() -> None:
    smooth = privacy(clean_events="smooth", smoothness=0.05).law
    assert (smooth.law, smooth.growth) == ("smooth", 1.05)
    assert privacy(clean_events="lemma").law.law == "lemma"
    # Without clean events nothing drifts, and nothing is declared.
    assert privacy().law == privacy(clean_events="worst").law == Drift()


def test_the_paper_is_charged_for_the_worst_drift() -> None:
    assert privacy(**PAPER).law == Drift()


def test_steps_that_fall_scale_the_clipping() -> None:
    falling = plan(server_round=8, step_rule="inv_sqrt")
    assert (falling.scale, falling.bound(20)) == (
        pytest.approx(1 / 3),
        pytest.approx(20 * 0.25 / 3),
    )
    assert plan(server_round=8).bound(20) == 5.0


def test_codes_have_room_for_what_smooth_losses_may_add_up_to() -> None:
    """After each clean event the distance grows with every step, and own data add to it."""
    release = plan(clean_events="smooth", smoothness=0.05).release(1, 3)
    moved, own = 0.0, 2 * 5 * 0.25 / 5
    for _ in range(4):
        moved = moved * 1.05**5 + own
    assert release.sensitivity == pytest.approx(moved, rel=1e-9)


def test_A17_steps_of_the_theorem_are_the_papers() -> None:
    """The training's own step is 1 / beta, and its clipping norm goes with it."""
    theorem = plan(server_round=8, step_rule="theorem", total_steps=400)
    beta = 2.0
    printed = step_size(beta=beta, previous_steps=20, total_steps=400, t=8)
    assert theorem.scale / beta == pytest.approx(printed, rel=1e-12)
    assert theorem.bound(20) == pytest.approx(5.0 / 400 / 3)


# -- Who is asked when ---------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [EDGES, DEEP])
@pytest.mark.parametrize("clean", [False, True])
def test_every_device_does_all_steps_of_the_round_and_every_period_ends_in_a_release(
    tree: TierTree, clean: bool
) -> None:
    schedule = EVERY_5 if tree is EDGES else MIXED
    one = plan(tree, schedule, clean_events=WORST[clean])
    assert one.exchanges == exchanges(tree, schedule, clean_events=clean)
    for leaf in tree.tiers[tree.depth - 1]:
        asked = [
            (exchange, exchange.leaves[leaf])
            for exchange in one.exchanges
            if leaf in exchange.leaves
        ]
        assert sum(single.steps for _, single in asked) == schedule.steps
        boundary = boundary_tier(tree, leaf)
        releases = [single for exchange, single in asked if exchange.ends(leaf)]
        assert len(releases) == schedule.releases(boundary, tree.depth)
        assert len({single.period for single in releases}) == len(releases)
        for exchange, single in asked:
            assert exchange.ends(leaf) == (exchange.tier < boundary)
            assert single.period <= exchange.index <= single.end
            same = [other for _, other in asked if other.period == single.period]
            assert {other.end for other in same} == {single.end}
            assert one.release_of(leaf, exchange).steps == sum(other.steps for other in same)
            if not clean:
                assert len(same) == 1
                assert single.period == single.end


def test_A5_exchanges_of_the_default_tree() -> None:
    secure, insecure = "t1-0", "t1-9"
    for clean, counts in ((True, (4, 4)), (False, (1, 4))):
        found = exchanges(EDGES, EVERY_5, clean_events=clean)
        assert [exchange.tier for exchange in found] == [1, 1, 1, 0]
        asked = [[e.leaves[n].steps for e in found if n in e.leaves] for n in (secure, insecure)]
        assert tuple(map(len, asked)) == counts
        assert list(map(sum, asked)) == [20, 20]


def test_an_exchange_that_concerns_nobody_has_nobody() -> None:
    trusted = TierTree.of_fanouts((2, 2), p=1.0)
    found = exchanges(trusted, EventSchedule(steps=4, events={1: 2}), clean_events=False)
    assert [len(exchange.leaves) for exchange in found] == [0, 2]


# -- Noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 50.0])
def test_a_release_has_its_share_of_the_budget(epsilon: float) -> None:
    """z = sqrt(tau / k) / mu, and what the grid may cost is set aside before."""
    one = plan(epsilon=epsilon)
    for boundary, steps in ((1, 20), (2, 5)):
        release = one.release(boundary, 3)
        assert release.steps == steps
        expected = math.sqrt(200 / steps) / mu_of(epsilon, 1e-5)
        assert release.multiplier == pytest.approx(expected, rel=1e-6)
        assert release.multiplier > expected
        charge = release.charge()
        assert charge == Charge(
            neighbours="replace_one", noise_multiplier=release.multiplier, gap=GAP
        )
        total = spent([replace(charge, count=200 // steps)], delta=1e-5, accountant="gdp")
        assert epsilon * (1 - 1e-6) < total <= epsilon


def test_a_budget_that_the_grid_takes_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"^epsilon = 1e-09: expected above 4e-08"):
        plan(epsilon=1e-9).release(1, 3)


def test_a_record_has_the_sampling_of_a_period() -> None:
    one = plan(**RECORD)
    assert one.release(2, 3).sampling == any_batch(0.1, 5) == pytest.approx(1 - 0.9**5)
    assert one.release(1, 3).sampling == any_batch(0.1, 20)
    assert plan().release(2, 3).sampling == 1.0
    charge = one.release(2, 3).charge()
    assert charge is not None
    assert charge.sampling == any_batch(0.1, 5)
    whole = replace(charge, count=40)
    total = spent([whole], delta=1e-5, accountant="rdp")
    assert 8.0 * (1 - 1e-4) < total <= 8.0


def test_without_noise_there_is_nothing_to_charge() -> None:
    release = plan(unit="none").release(1, 3)
    assert (release.multiplier, release.charge()) == (0.0, None)


def weights_of(tree: TierTree, top: str) -> dict[int, float]:
    """Return by tier the largest weight of a node in the average of `top`."""
    weights = {tree.tier(top): 1.0}
    nodes = {top: 1.0}
    while (tier := min(map(tree.tier, nodes))) < tree.depth:
        nodes = {
            child: weight / len(tree.children(node))
            for node, weight in nodes.items()
            for child in tree.children(node)
        }
        weights[tier + 1] = max(nodes.values())
    return weights


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize(
    ("tree", "schedule"), [(EDGES, EVERY_5), (DEEP, MIXED)], ids=["edges", "deep"]
)
def test_the_sensitivity_of_a_release_is_that_of_the_worst_drift(
    tree: TierTree, schedule: EventSchedule, clean: bool
) -> None:
    one = plan(tree, schedule, clean_events=WORST[clean])
    for top in (node for tier in tree.tiers[1:-1] for node in tier):
        if not tree.secure(top) or tree.secure(tree.parent(top)):
            continue
        for period in schedule.periods(tree.tier(top)):
            parts = [(segment.steps, segment.tier) for segment in period]
            if not clean:
                parts = [(sum(steps for steps, _ in parts), parts[-1][1])]
            expected = sensitivity_worst_case(parts, weights=weights_of(tree, top), eta=0.25, G=1.0)
            release = one.release(tree.tier(top), period[-1].index)
            assert release.sensitivity == pytest.approx(expected)
    for segment in schedule.segments():
        release = one.release(tree.depth, segment.index)
        assert (release.steps, release.sensitivity) == (segment.steps, 0.5 * segment.steps)


def test_A22_clean_events_make_the_sensitivity_four_times_that_of_the_lemma() -> None:
    lemma = 2 * 0.25 * 20 / 5
    for clean, factor in ((True, 4.0), (False, 1.0)):
        assert plan(clean_events=WORST[clean]).release(1, 3).sensitivity == pytest.approx(
            factor * lemma
        )
    declared = plan(clean_events="lemma")
    assert declared.release(1, 3).sensitivity == pytest.approx(lemma)
    smooth = plan(clean_events="smooth", smoothness=0.01)
    assert lemma < smooth.release(1, 3).sensitivity < 4 * lemma


@pytest.mark.parametrize("counted", ["round", "segment"])
def test_the_papers_noise_is_as_printed_and_charged_for_what_it_is_worth(counted: str) -> None:
    one = plan(**{**PAPER, "epsilon": 1.0, "alpha": [0.5, 2.0], "release_steps": counted})
    rule = {"q": 0.05, "n_comp": 200, "eps": 1.0, "delta": 1e-5}
    for boundary, steps, alpha, share in ((1, 20, 0.5, 1 / 5), (2, 5, 2.0, 1.0)):
        seen = 20 if counted == "round" else steps
        printed = sigma(2 * 0.25 * seen * share, alpha=alpha, **rule)
        release = one.release(boundary, 3)
        assert release.multiplier * release.sensitivity == pytest.approx(printed, rel=1e-9)


def test_A7_the_papers_noise_multiplier() -> None:
    """Of Lemma 1's sensitivity: 10.73; the secure edge's is worth a fourth of that."""
    one = plan(**{**PAPER, "epsilon": 1.0, "clipping_norm": 0.01}, rounds=200, total_steps=4000)
    edge, device = one.release(1, 3), one.release(2, 3)
    assert edge.multiplier * edge.sensitivity == pytest.approx(0.858386)
    assert edge.multiplier == pytest.approx(10.729830 / 4)
    assert device.multiplier == pytest.approx(10.729830 * 4)


def test_A21_the_papers_budget_is_what_it_costs() -> None:
    one = plan(**{**PAPER, "epsilon": 1.0}, rounds=200, total_steps=4000)
    for boundary in (1, 2):
        true = true_epsilon(EDGES, EVERY_5, boundary, multiplier=10.729830, rounds=200, delta=1e-5)
        # The plan has 1e-9 per release on top, for the grid.
        assert one.epsilon(boundary) == pytest.approx(true, rel=1e-5)
    assert one.epsilon(1) == pytest.approx(35.65, rel=1e-3)
    assert plan().epsilon(1) == 8.0


def test_periods_of_equal_length_may_differ_in_their_clean_events() -> None:
    """A zone of tier 2: four steps with a clean event inside, four steps without."""
    tree = TierTree.of_fanouts((1, 1, 3), p=(0.0, 1.0))
    schedule = EventSchedule(steps=8, events={1: [4], 2: [2]})
    first, second = schedule.periods(2)
    assert [sum(s.steps for s in period) for period in (first, second)] == [4, 4]
    one = plan(tree, schedule, **PAPER)
    printed = sigma(2 * 0.25 * 8 / 3, q=0.05, n_comp=80, eps=8.0, delta=1e-5, alpha=1.0)
    releases = [one.release(2, period[-1].index) for period in (first, second)]
    assert [r.multiplier * r.sensitivity for r in releases] == pytest.approx([printed] * 2)
    assert releases[0].sensitivity == pytest.approx(2 * releases[1].sensitivity)


# -- The grid ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("epsilon", [0.01, 8.0, 1e3])
@pytest.mark.parametrize(
    ("tree", "schedule"), [(EDGES, EVERY_5), (DEEP, MIXED)], ids=["edges", "deep"]
)
def test_the_grid_has_codes_for_all_updates_and_their_noise(
    tree: TierTree, schedule: EventSchedule, epsilon: float, clean: bool
) -> None:
    one = plan(tree, schedule, epsilon=epsilon, clean_events=WORST[clean])
    for boundary in one.boundaries:
        for period in schedule.periods(boundary):
            release = one.release(boundary, period[-1].index)
            noise = release.multiplier * release.sensitivity
            reach = one.bound(release.steps) + NOISE_REACH * noise
            assert CODE_LIMIT * release.grid.step >= reach
            assert discretisation_gap(10**5, noise / release.grid.step) <= GAP


@pytest.mark.parametrize("children", [100, 1000, 10_000])
def test_the_grid_is_fine_enough_for_the_noise_of_a_large_zone(children: int) -> None:
    """Central DP as a tree: one node that all devices trust, and the model of the paper."""
    tree = TierTree.of_fanouts((1, children), p=1.0)
    one = plan(tree, EventSchedule(steps=20), epsilon=1.0, rounds=200)
    release = one.release(1, 0)
    noise = release.multiplier * release.sensitivity
    assert discretisation_gap(7840, noise / release.grid.step) <= GAP
    one.check(7840)


def test_noise_that_the_grid_does_no_justice_to_is_refused() -> None:
    """Noise far below the updates has too few steps of a grid that holds both."""
    tree = TierTree.of_fanouts((1, 4), p=1.0)
    one = plan(tree, EventSchedule(steps=20), epsilon=1e8)
    with pytest.raises(
        InvalidParameterError, match=r"^clipping_norm = 0\.25: expected more noise at tier 1"
    ):
        one.check(10**6)
    one.check(10)


def test_without_clipping_the_grid_holds_what_is_allowed() -> None:
    one = plan(unit="none", clipping_norm=None, clean_events=True)
    assert one.bound(20) == 0.0
    for boundary in one.boundaries:
        assert CODE_LIMIT * one.release(boundary, 3).grid.step >= 64 * len(one.exchanges)


def test_boundaries_are_the_tiers_at_which_noise_enters() -> None:
    assert plan().boundaries == (1, 2)
    assert plan(DEEP, MIXED).boundaries == (1, 2, 3)
    assert plan(TierTree.of_fanouts((3,)), EventSchedule()).boundaries == (1,)
    assert np.all([boundary_tier(DEEP, leaf) in (1, 2, 3) for leaf in DEEP.tiers[2]])


def test_a_star_is_ldp() -> None:
    star = plan(TierTree.of_fanouts((4,)), EventSchedule(steps=3), rounds=7)
    assert star.exchanges[0].leaves.keys() == {"cloud"}
    release = star.release(1, 0)
    assert (release.steps, release.sensitivity) == (3, 2 * 0.25 * 3)
    assert release.charge() == Charge(
        neighbours="replace_one", noise_multiplier=release.multiplier, gap=GAP
    )
