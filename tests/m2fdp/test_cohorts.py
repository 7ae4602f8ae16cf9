"""Whose turn it is under each lowest aggregator, and for how many rounds a budget suffices."""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, record, run_strategy, same
from conformance import Killed
from tier_training import (
    HALF,
    Model,
    charges_of,
    check_ledgers,
    descend,
    entries_of,
    nodes_of,
    run,
    spent_of,
    stay,
)
from zones import zone_nodes

from flwr_privacy.accounting import spent
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.m2fdp import Decision, EventSchedule, M2FDPRoundPlan, TierCohorts, TierTree
from flwr_privacy.m2fdp.calibration import record_multiplier
from flwr_privacy.m2fdp.tree.exchanges import boundary_tier
from flwr_privacy.privacy.card import CardRelease
from flwr_privacy.strategies import (
    M2FDP,
    AdaptiveControl,
    DeviceNoise,
    NoNoise,
    PaperNoise,
    RecordNoise,
)
from flwr_privacy.strategies.m2fdp.participants import TierParticipants
from flwr_privacy.wire.documents import dumps, loads

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")

SMALL = TierTree.of_edges(
    [
        *[("cloud", "A"), ("cloud", "B"), ("cloud", "C")],
        *[("A", name) for name in "0123"],
        *[("B", name) for name in "456"],
        *[("C", name) for name in "78"],
    ],
    trusted={"A"},
)
DEEP = TierTree.of_fanouts((2, 2, 3), p=(0.5, 0.5))
SCHEDULE = EventSchedule(steps=4, events={1: 2})
TENS = TierTree.of_fanouts((2, 10), p=0.5)


def decided(steps: int, secure: int, insecure: int) -> Decision:
    return Decision(steps=steps, secure=secure, insecure=insecure, energy=0.0, delay=0.0, nu=0.0)


def rounds_of(decisions: list[Decision]) -> list[tuple[EventSchedule, Decision | None]]:
    return [(SCHEDULE.with_steps(each.steps), each) for each in decisions]


def courses_of(
    cohorts: TierCohorts, rounds: list[tuple[EventSchedule, Decision | None]], seed: int
) -> dict[str, Counter[int]]:
    """Draw all rounds; return for each device the rounds that it was in, by their local steps."""
    participants = TierParticipants(cohorts.sampling)
    found: dict[str, Counter[int]] = {device: Counter() for device in cohorts.tree.devices}
    for server_round, (schedule, decision) in enumerate(rounds, start=1):
        plan = plan_of(cohorts, server_round, len(rounds), privacy=None)
        chosen = participants.drawn(
            cohorts.tree.devices,
            plan=plan,
            sizes=cohorts.sizes(server_round, decision, seed=seed),
            releases=[],
            seed=seed,
        )
        for device in itertools.chain(*chosen.values()):
            found[device][schedule.steps] += 1
    return found


def plan_of(
    cohorts: TierCohorts, server_round: int, rounds: int, *, privacy: Any, **options: Any
) -> M2FDPRoundPlan:
    return M2FDPRoundPlan(
        tree=cohorts.tree,
        schedule=SCHEDULE,
        privacy=privacy or NoNoise(),
        server_round=server_round,
        total_steps=SCHEDULE.steps * rounds,
        rounds=rounds,
        **options,
    )


def planned(cohorts: TierCohorts, rounds: Any) -> dict[int, set[tuple[tuple[int, int], ...]]]:
    """Return the planned courses by tier, with local steps in place of schedules."""
    return {
        tier: {tuple(sorted((s.steps, n) for s, n in course)) for course in courses}
        for tier, courses in cohorts.participations(rounds).items()
    }


# -- The plan, against all draws ------------------------------------------------------------------


@pytest.mark.parametrize("tree", [SMALL, DEEP, TierTree.of_fanouts((7,), p=0.0)])
@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("rounds", [1, 5, 13])
def test_in_turns_nobody_takes_part_more_often_than_planned(
    tree: TierTree, share: float, rounds: int
) -> None:
    cohorts = TierCohorts(tree=tree, sampling="balanced", share=share, least=2)
    alike: Any = [(SCHEDULE, None)] * rounds
    for seed in range(8):
        counts = courses_of(cohorts, alike, seed)
        for tier, courses in planned(cohorts, alike).items():
            devices = [d for d in tree.devices if boundary_tier(tree, tree.parent(d)) == tier]
            most = max(n for ((_, n),) in courses)
            assert max(counts[device].total() for device in devices) == most


@pytest.mark.parametrize("tree", [SMALL, DEEP])
@pytest.mark.parametrize("seed", range(6))
def test_under_control_every_device_has_a_planned_course(tree: TierTree, seed: int) -> None:
    """Rounds of different steps and sizes: the courses are those of the places in the queues."""
    rng = np.random.default_rng(seed)
    choices = [decided(*(int(n) for n in rng.integers(1, 4, 3))) for _ in range(9)]
    cohorts = TierCohorts(tree=tree, sampling="balanced", share=1.0, least=2)
    rounds = rounds_of(choices)
    found: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    for device, counts in courses_of(cohorts, rounds, seed).items():
        tier = boundary_tier(tree, tree.parent(device))
        found.setdefault(tier, set()).add(tuple(sorted(counts.items())))
    assert planned(cohorts, rounds) == found


def test_at_random_the_plan_suffices_for_most_of_all_draws() -> None:
    """All 3^6 draws of one of three devices in six rounds, each as likely as any other."""
    tree = TierTree.of_fanouts((1, 3), p=0.0)
    cohorts = TierCohorts(tree=tree, sampling="fixed", share=0.34, least=1)
    ((((_, most),),),) = cohorts.participations([(SCHEDULE, None)] * 6).values()
    draws = [draw.count(0) for draw in itertools.product(range(3), repeat=6)]
    within = [np.mean(np.array(draws) <= most - fewer) for fewer in (0, 1)]
    assert most == 5
    assert within[0] >= 0.99 > within[1]
    counted = [courses_of(cohorts, [(SCHEDULE, None)] * 6, seed)["0"][4] for seed in range(60)]
    assert 1 < np.mean(counted) < 3
    assert min(counted) < max(counted)


def test_what_rounding_leaves_over_goes_to_aggregators_in_turns() -> None:
    """A fifth of 3 x 4 devices is 2.4: two of the three aggregators ask a second one in a round."""
    tree = TierTree.of_fanouts((3, 4), p=0.0)
    cohorts = TierCohorts(tree=tree, sampling="balanced", share=0.7, least=1)
    sizes = [list(cohorts.sizes(r, None, seed=0).values()) for r in range(1, 7)]
    assert {sum(each) for each in sizes} == {8}
    assert np.sum(sizes, axis=0).tolist() == [16, 16, 16]


@pytest.mark.parametrize("control", [None, "varied"])
def test_the_plan_has_the_budget_of_the_device_that_takes_part_most(control: str | None) -> None:
    cohorts = TierCohorts(tree=SMALL, sampling="balanced", share=0.3, least=2)
    rounds: Any = [(SCHEDULE, None)] * 9
    if control is not None:
        rounds = rounds_of([decided(4, 2, 1), decided(2, 3, 2), decided(1, 2, 1)] * 3)
    plan = plan_of(
        cohorts,
        1,
        9,
        privacy=DeviceNoise(epsilon=2.0),
        participations=cohorts.participations(rounds),
    )
    paid: dict[int, list[float]] = {}
    for device, counts in courses_of(cohorts, rounds, 3).items():
        tier = boundary_tier(SMALL, SMALL.parent(device))
        course = tuple((SCHEDULE.with_steps(steps), n) for steps, n in counts.items())
        total = sum(c.count / c.noise_multiplier**2 for c in plan._charges(tier, course))
        paid.setdefault(tier, []).append(total)
    for tier, totals in paid.items():
        assert max(totals) == pytest.approx(mu_of(2.0, 1e-5) ** 2, rel=1e-6)
        assert max(totals) <= mu_of(2.0, 1e-5) ** 2
        assert plan.shares(tier)[1] == pytest.approx(max(totals))


def test_a_tenth_of_the_devices_in_turns_takes_a_third_of_the_noise() -> None:
    """What calibrate prints: 10 releases in place of 100, and 18 with random sets."""
    tree = TierTree.of_fanouts((4, 50), p=0.5)
    found = {}
    for sampling in ("fixed", "balanced"):
        strategy = make_m2fdp(tree=tree, fraction_train=0.1, client_sampling=sampling)
        plan = strategy.first_plan(100)
        assert plan.boundaries == (1, 2)
        found[sampling] = [plan.rounds_of_device(tier) for tier in (1, 2)]
        found[sampling] += [round(plan.release(tier, 0).multiplier, 3) for tier in (1, 2)]
    everybody = make_m2fdp(tree=tree, fraction_train=1.0).first_plan(100)
    assert round(everybody.release(1, 0).multiplier, 3) == 6.002
    assert found == {"fixed": [18, 18, 2.547, 2.547], "balanced": [10, 10, 1.898, 1.898]}


@pytest.mark.parametrize("kind", [RecordNoise, PaperNoise])
def test_records_and_the_papers_noise_are_counted_by_the_rounds_of_a_device(kind: Any) -> None:
    own = {"alpha": 1.0} if kind is PaperNoise else {}
    privacy = kind(sampling_rate=0.1, **own)
    options: dict[str, Any] = {"tree": TENS, "privacy": privacy, "min_train_nodes": 0}
    every, turns = (
        make_m2fdp(**options, fraction_train=fraction).first_plan(20) for fraction in (1.0, 0.2)
    )
    assert [plan.rounds_of_device(1) for plan in (every, turns)] == [20, 4]
    multipliers = [plan.release(1, 0).multiplier for plan in (every, turns)]
    epsilons = [plan.epsilon(1) for plan in (every, turns)]
    if kind is RecordNoise:
        expected = [
            record_multiplier(epsilon=8.0, delta=1e-5, rate=0.1, periods=[1], rounds=rounds)
            for rounds in (20, 4)
        ]
        assert multipliers == pytest.approx(expected, rel=1e-5)
        assert epsilons == [8.0, 8.0]
    else:  # its noise is as printed; what it costs a device is less
        assert multipliers[0] == multipliers[1]
        assert epsilons[1] < 0.6 * epsilons[0]


def make_m2fdp(**options: Any) -> Any:
    return M2FDP(**{"privacy": DeviceNoise(), **options})


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ("poisson", "'poisson': expected 'balanced' or 'fixed': a trusted aggregator averages no"),
        ("turns", "client_sampling = 'turns'"),
    ],
)
def test_other_ways_to_draw_are_refused_when_the_strategy_is_made(
    sampling: str, message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        make_m2fdp(tree=HALF, client_sampling=sampling)


# -- Trainings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"steps": 4, "events": 2}], ids=["plain", "events"])
def test_devices_take_turns_and_spend_their_budget(options: Any, tmp_path: Path) -> None:
    engine = {"state": tmp_path}
    result, strategy = run(TENS, stay, num_rounds=10, **FIFTH, engine=engine, **options)
    assert {line["accumulated"] for line in result.history[1:]} == {4}
    assert not any(line["refused"] for line in result.history[1:])
    check_ledgers(strategy, tmp_path)
    for device in TENS.devices:
        first, second = rounds_in(tmp_path, device)
        assert second - first == 5
    each = spent_of(strategy)
    assert list(each.values()) == pytest.approx([8.0] * 20, rel=1e-6)
    assert max(each.values()) <= 8.0


FIFTH: dict[str, Any] = {"fraction_train": 0.2, "min_train_nodes": 0}


def rounds_in(folder: Path, device: str) -> list[int]:
    """Return the rounds that a device's ledger has charges of."""
    return sorted({entry.question.server_round for entry in entries_of(folder, device)})


def test_a_random_set_costs_more_noise(tmp_path: Path) -> None:
    result, strategy = run(TENS, stay, num_rounds=10, **FIFTH, client_sampling="fixed")
    assert {line["asked"] for line in result.history[1:]} == {4}
    ((charge, *_), *_) = charges_of(strategy).values()
    assert charge.noise_multiplier == pytest.approx(math.sqrt(5) / mu_of(8.0, 1e-5), rel=1e-6)
    assert len({len(found) for found in charges_of(strategy).values()}) > 1
    assert max(spent_of(strategy).values()) <= 8.0


def test_under_control_nobody_exceeds_the_budget_and_one_device_has_all_of_it() -> None:
    tree = TierTree.of_fanouts((2, 5), p=0.5)
    control = AdaptiveControl(
        total_steps=11, max_steps=3, weights=(1e6, 0.0, 1e-6), initial_steps=2
    )
    result, strategy = run(tree, stay, num_rounds=9, steps=3, control=control)
    schemes = [line["scheme"] for line in result.history[1:]]
    assert sum(int(line["steps"]) for line in schemes) == 11
    assert len({line["steps"] for line in schemes}) > 1
    assert not any(line["refused"] for line in result.history[1:])
    each = spent_of(strategy)
    for devices in ("01234", "56789"):
        assert max(each[device] for device in devices) == pytest.approx(8.0, rel=1e-6)
    assert max(each.values()) <= 8.0
    one = {c.noise_multiplier for c in charges_of(strategy)["5"]}
    every = min(math.sqrt(11 / steps) / mu_of(8.0, 1e-5) for steps in (1, 2, 3))
    assert min(one) < 0.9 * every  # as if each device took part in all rounds


def killed_after(server_round: int) -> Any:
    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == server_round:
            raise Killed

    return on_round


@pytest.mark.parametrize("sampling", ["balanced", "fixed"])
def test_a_resumed_training_goes_on_with_the_queue(sampling: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_rounds": 6, "insecure_seed": 5, "client_sampling": sampling}
    options |= FIFTH
    for name in ("run", "nodes", "other"):
        (tmp_path / name).mkdir()
    engine = {"insecure_seed": 5, "state": tmp_path / "other"}
    unbroken, whole = run(TENS, descend, engine=engine, **options)
    options |= {"run_dir": tmp_path / "run"}
    options |= {"engine": {"insecure_seed": 5, "state": tmp_path / "nodes"}}
    with pytest.raises(Killed):
        run(TENS, descend, on_round=killed_after(2), **options)
    with pytest.raises(Killed):
        run(TENS, descend, resume=True, on_round=killed_after(4), **options)
    resumed, strategy = run(TENS, descend, resume=True, **options)
    assert same(unbroken.arrays, resumed.arrays)
    assert charges_of(strategy) == charges_of(whole)
    check_ledgers(strategy, tmp_path / "nodes")


@pytest.mark.parametrize(
    ("change", "key"),
    [({"fraction_train": 0.5}, "share"), ({"client_sampling": "fixed"}, "client_sampling")],
)
def test_a_resume_with_other_turns_is_refused(
    change: dict[str, Any], key: str, tmp_path: Path
) -> None:
    for name in ("run", "nodes"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {"num_rounds": 3, "run_dir": tmp_path / "run", **FIFTH}
    options["engine"] = {"state": tmp_path / "nodes"}
    with pytest.raises(Killed):
        run(TENS, stay, on_round=killed_after(1), **options)
    with pytest.raises(CheckpointError, match=f"calibrated for {key} = "):
        run(TENS, stay, resume=True, **{**options, **change})


# -- A server that asks too often, and devices that are not there ---------------------------------


def test_a_device_that_is_asked_out_of_turn_declines_what_is_beyond_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server asks the same four of twenty devices in every round; the plan has two rounds."""
    trained: list[tuple[str, int]] = []

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        trained.append((name, config["server-round"]))
        return model

    def greedy(self: Any, there: Any, **_: Any) -> dict[str, list[str]]:
        return {"t1-0": ["0", "1"], "t1-1": ["10", "11"]}

    monkeypatch.setattr(TierParticipants, "drawn", greedy)
    result, _ = run(TENS, train, num_rounds=10, **FIFTH, engine={"state": tmp_path})
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4] + [0] * 8
    assert {str(line["refused"]) for line in result.history[3:]} == {"{'declined': 4}"}
    assert sorted(trained) == sorted((d, r) for d in ("0", "1", "10", "11") for r in (1, 2))
    for device in ("0", "1", "10", "11"):
        assert rounds_in(tmp_path, device) == [1, 2]


def releases_of(plan: M2FDPRoundPlan, chosen: dict[str, list[str]]) -> list[CardRelease]:
    """Return the charges of a round."""
    found = []
    for leaf, devices in chosen.items():
        charges = plan._charges(boundary_tier(plan.tree, leaf), ((plan.schedule, 1),))
        for request, charge in enumerate(charges):
            found.append(
                CardRelease(
                    phase="train",
                    server_round=plan.server_round,
                    request=request,
                    charge=charge,
                    clients=tuple(devices),
                    unanswered=(),
                )
            )
    return found


def drawn_with(
    tree: TierTree, there: Callable[[int], set[str]], rounds: int, **options: Any
) -> list[set[str]]:
    """Draw all rounds with the devices that are there in each of them."""
    cohorts = TierCohorts(**{"tree": tree, "sampling": "balanced", "least": 1, **options})
    alike: Any = [(SCHEDULE, None)] * rounds
    participants, releases, found = TierParticipants(cohorts.sampling), [], []
    for server_round in range(1, rounds + 1):
        plan = plan_of(
            cohorts,
            server_round,
            rounds,
            privacy=DeviceNoise(),
            participations=cohorts.participations(alike),
        )
        if server_round == rounds // 2:  # a checkpoint: it has the queue, and the card the charges
            state = loads(dumps(participants.state()))
            participants = TierParticipants(cohorts.sampling)
            participants.load(state)
        chosen = participants.drawn(
            there(server_round),
            plan=plan,
            sizes=cohorts.sizes(server_round, None, seed=1),
            releases=releases,
            seed=1,
        )
        releases += releases_of(plan, chosen)
        found.append({device for devices in chosen.values() for device in devices})
    return found


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_device_that_was_absent_is_asked_in_place_of_those_that_have_had_their_turns(
    p: float,
) -> None:
    """Five devices, one a round, ten rounds: each has two turns. One comes in round 7."""
    tree = TierTree.of_fanouts((1, 5), p=p)
    everybody = set(tree.devices)
    rounds = drawn_with(tree, lambda r: everybody - ({"4"} if r < 7 else set()), 10, share=0.2)
    counts = Counter(itertools.chain(*rounds))
    assert rounds[6] == {"4"}  # who was never asked comes first
    assert counts == dict.fromkeys("01234", 2)
    assert all(len(each) == 1 for each in rounds)


def test_nobody_is_asked_once_all_that_are_there_have_had_their_turns() -> None:
    tree = TierTree.of_fanouts((1, 5), p=0.0)
    rounds = drawn_with(tree, lambda _: {"0", "1"}, 10, share=0.2)
    assert [len(each) for each in rounds] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_a_training_of_which_most_devices_are_gone_ends_without_a_model(tmp_path: Path) -> None:
    """The named tree has devices that never come; the others' budgets are used up, and that is it.

    Rounds in which nobody can be asked leave the model as it is.
    """
    tree = TierTree.of_edges(
        [("cloud", "A"), *[("A", name) for name in "0123456789"]], trusted={"A"}
    )
    nodes = nodes_of(tree)[:3]
    result, strategy = run(
        tree, stay, num_rounds=10, **FIFTH, engine={"state": tmp_path, "nodes": nodes}
    )
    assert [line.get("accumulated", 0) for line in result.history[1:]] == [2, 2, 2] + [0] * 7
    assert [line["skipped"] for line in result.history[1:]] == [False] * 3 + [True] * 7
    assert {name: len(found) for name, found in charges_of(strategy).items()} == {
        **{"0": 2, "1": 2, "2": 2}
    }


def test_an_aggregators_ledger_has_all_rounds_and_each_device_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = TierTree.of_fanouts((1, 5), p=1.0)
    strategy = make(
        M2FDP, tree=tree, relay=True, experiment_id="e", fraction_train=0.4, min_train_nodes=0
    )
    caplog.set_level(logging.INFO, "flwr.privacy")
    result = run_strategy(
        strategy,
        message_app([as_mod(M2FDPClient)]),
        nodes=zone_nodes(tree, tmp_path, **{"privacy-state": str(tmp_path)}),
        arrays=record({"w": np.zeros(5)}),
        num_rounds=10,
    )
    assert [line["accumulated"] for line in result.history[1:]] == [2] * 10
    assert not any(line["refused"] for line in result.history[1:])
    assert not any(line["skipped"] for line in result.history[1:])
    assert [len(entries_of(tmp_path, device)) for device in tree.devices] == [4] * 5
    all_rounds = [entry.charge for entry in entries_of(tmp_path, "t1-0")]
    assert len(all_rounds) == 10
    told = f"they come to epsilon {spent(all_rounds, delta=1e-5):.4g}"
    assert told in caplog.text
    assert list(spent_of(strategy).values()) == pytest.approx([8.0] * 5, rel=1e-6)


def test_a_device_under_a_trusted_aggregator_keeps_to_its_own_limit_whatever_the_server_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server asks the same three of five devices in each round, and claims any budget.

    The noise is for four of ten rounds. Device 0 has max_epsilon = 8 in its policy, and declines
    the fifth; the aggregator and the others have none.
    """
    tree = TierTree.of_fanouts((1, 5), p=1.0)
    strategy = make(
        M2FDP, tree=tree, relay=True, experiment_id="e", fraction_train=0.4, min_train_nodes=0
    )
    monkeypatch.setattr(
        TierParticipants, "drawn", lambda self, there, **_: {"t1-0": ["0", "1", "2"]}
    )
    monkeypatch.setattr(M2FDPRoundPlan, "epsilon", lambda self, boundary: 1e6)
    policy = {"trusted_parents": ["t1-0"], "max_epsilon": 8.0}
    state = {"privacy-state": str(tmp_path)}
    result = run_strategy(
        strategy,
        message_app([as_mod(M2FDPClient)]),
        nodes=zone_nodes(tree, tmp_path, policies={"0": policy}, **state),
        arrays=record({"w": np.zeros(5)}),
        num_rounds=10,
    )
    assert [line["accumulated"] for line in result.history[1:]] == [3] * 4 + [2] * 6
    assert [len(entries_of(tmp_path, device)) for device in "012"] == [4, 10, 10]
    assert len(entries_of(tmp_path, "t1-0")) == 10
