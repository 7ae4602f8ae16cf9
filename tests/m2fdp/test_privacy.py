"""Equal budgets for all devices, and what the paper's noise truly costs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.accounting import Charge, new_accountant, spent
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.calibration import multiplier, record_multiplier
from flwr_privacy.m2fdp.paper_noise import noise_multiplier
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree
from flwr_privacy.simulations.research.m2fdp.noise_theory import (
    sensitivity,
    smooth_factor,
    variance_by_tier,
)
from flwr_privacy.simulations.research.m2fdp.paper_epsilons import (
    PaperEpsilons,
    boundary_classes,
    paper_epsilons,
    true_epsilon,
)

DELTA = 1e-5
ROUNDS = 200
MIXED = TierTree.of_fanouts((10, 5), p=0.5)
EVERY_5 = EventSchedule(steps=20, events={1: 5})


def any_batch(q: float, steps: int) -> float:
    return 1 - (1 - q) ** steps


def figures(q: float = 0.05, **changes: Any) -> PaperEpsilons:
    settings: dict[str, Any] = {"tree": MIXED, "schedule": EVERY_5, "rounds": ROUNDS, "q": q}
    return paper_epsilons(**{**settings, "epsilon": 1.0, "delta": DELTA, **changes})


# Classes


def test_A5_releases_of_the_default_tree() -> None:
    edge, device = boundary_classes(MIXED, EVERY_5)
    assert (edge.tier, edge.releases, edge.steps) == (1, 1, (20,))
    assert (device.tier, device.releases, device.steps) == (2, 4, (5, 5, 5, 5))
    assert edge.devices + device.devices == MIXED.devices


def test_classes_of_three_tiers() -> None:
    tree = TierTree.of_fanouts((4, 2, 3), p=(0.5, 0.5))
    schedule = EventSchedule(steps=20, events={1: [8], 2: 5})
    found = {c.tier: (len(c.devices), c.steps) for c in boundary_classes(tree, schedule)}
    assert found == {1: (12, (20,)), 2: (6, (8, 12)), 3: (6, (5, 3, 2, 5, 5))}
    star = boundary_classes(TierTree.of_fanouts((4,)), EventSchedule(steps=7))
    assert [(c.tier, c.releases, c.steps) for c in star] == [(1, 1, (7,))]


# Equal budgets


def test_multipliers_of_the_specification() -> None:
    """Section 8.3 has 52.78 for 200 releases and 105.63 for 800, by a rounded distribution."""
    once, often = (
        multiplier(epsilon=1, delta=DELTA, steps=steps, total_steps=4000) for steps in (20, 5)
    )
    assert once == pytest.approx(52.78, rel=2e-3)
    assert often == pytest.approx(105.63, rel=2e-3)
    assert often == pytest.approx(2 * once)


@given(
    rounds=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    periods=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    epsilon=st.floats(0.05, 30),
    delta=st.sampled_from([1e-9, 1e-5, 1e-2]),
)
@settings(deadline=None, max_examples=60)
def test_all_classes_spend_the_same_on_any_path_of_K(
    rounds: list[int], periods: tuple[int, int], epsilon: float, delta: float
) -> None:
    tree = TierTree.of_fanouts((4, 2, 3), p=(0.5, 0.5))
    schedule = EventSchedule(steps=1, events={1: periods[0], 2: periods[1]})
    total = sum(rounds)
    ledgers: dict[int, list[Charge]] = {}
    for steps in rounds:
        for found in boundary_classes(tree, schedule.with_steps(steps)):
            for covered in found.steps:
                z = multiplier(epsilon=epsilon, delta=delta, steps=covered, total_steps=total)
                ledgers.setdefault(found.tier, []).append(
                    Charge(neighbours="replace_one", noise_multiplier=z)
                )
    assert set(ledgers) == {1, 2, 3}
    paid = [spent(charges, delta=delta, accountant="gdp") for charges in ledgers.values()]
    assert paid == pytest.approx([paid[0]] * 3, rel=1e-9)
    assert paid[0] == pytest.approx(epsilon, rel=1e-7)
    assert max(paid) <= epsilon
    for *before, last in ledgers.values():  # as a device checks it
        accountant = new_accountant("gdp", before)
        assert not accountant.would_exceed(last, epsilon=epsilon, delta=delta)


def record_charges(z: float, q: float, periods: Sequence[int], rounds: int) -> list[Charge]:
    return [
        Charge(neighbours="add_remove", noise_multiplier=z, sampling=any_batch(q, steps))
        for _ in range(rounds)
        for steps in periods
    ]


@pytest.mark.parametrize("q", [0.01, 0.1])
@pytest.mark.parametrize("schedule", [EVERY_5, EventSchedule(steps=20, events={1: 8})])
def test_classes_keep_a_records_budget_alike(schedule: EventSchedule, q: float) -> None:
    rounds, epsilon = 20, 2.0
    for found in boundary_classes(MIXED, schedule):
        z = record_multiplier(
            epsilon=epsilon, delta=DELTA, rate=q, periods=found.steps, rounds=rounds
        )
        charges = record_charges(z, q, found.steps, rounds)
        paid = spent(charges, delta=DELTA, accountant="rdp")
        assert 0.99 * epsilon <= paid <= epsilon
        accountant = new_accountant("rdp", charges[:-1])
        assert not accountant.would_exceed(charges[-1], epsilon=epsilon, delta=DELTA)


def test_a_records_budget_by_the_exact_accountant() -> None:
    for periods in ((20,), (5, 5, 5, 5)):
        values: dict[str, Any] = {"rate": 0.05, "periods": periods, "rounds": ROUNDS}
        z = record_multiplier(epsilon=1.0, delta=DELTA, **values, accountant="pld")
        paid = spent(record_charges(z, 0.05, periods, ROUNDS), delta=DELTA, accountant="pld")
        assert 0.99 <= paid <= 1.0


def test_a_record_in_every_batch_is_a_device() -> None:
    z = record_multiplier(epsilon=1.0, delta=DELTA, rate=1.0, periods=[5] * 4, rounds=ROUNDS)
    assert z == pytest.approx(multiplier(epsilon=1, delta=DELTA, steps=5, total_steps=4000))


# The paper's noise


def test_A21_what_the_accountant_says() -> None:
    found = figures()
    assert found.multipliers == pytest.approx({1: 10.729830, 2: 10.729830}, rel=1e-6)
    assert found.idealised == pytest.approx(1.115, rel=0.03)
    assert found.record[1] == pytest.approx(3.63, rel=0.03)
    assert found.record[2] == pytest.approx(0.53, rel=0.03)
    assert found.drifted[1] == pytest.approx(20.1, rel=0.03)  # section 8.4
    assert found.drifted[2] == found.record[2]  # devices that noise themselves do not drift
    assert found.device[1] == true_epsilon(
        MIXED, EVERY_5, 1, multiplier=found.multipliers[1], rounds=ROUNDS, delta=DELTA
    )


@pytest.mark.parametrize(
    ("q", "z", "idealised", "secure", "insecure"),
    [(0.01, 2.146, 1.198, 6.02, 0.58), (0.1, 21.460, 1.112, 2.35, 0.47)],
)
def test_A21_the_table_of_section_8_3(
    q: float, z: float, idealised: float, secure: float, insecure: float
) -> None:
    found = figures(q)
    assert found.multipliers[1] == pytest.approx(z, rel=1e-3)
    assert found.idealised == pytest.approx(idealised, rel=0.03)
    assert found.record == pytest.approx({1: secure, 2: insecure}, rel=0.03)


@pytest.mark.parametrize(
    ("q", "idealised", "secure", "insecure"),
    [(0.01, 1.16, 4.53, 0.615), (0.05, 1.105, 3.16, 0.558), (0.1, 1.10, 2.16, 0.505)],
)
def test_the_alpha_that_a_true_epsilon_of_1_needs(
    q: float, idealised: float, secure: float, insecure: float
) -> None:
    """Section 8.3, in the paper's reading and in the real mechanism with Lemma 1."""
    z = noise_multiplier(q=q, n_comp=4000, eps=1.0, delta=DELTA)
    whole, part = any_batch(q, 20), any_batch(q, 5)
    for alpha, ratio, sampling, count in (
        (idealised, 1.0, q, 4000),
        (secure, 1.0, whole, 200),
        (insecure, 0.25, part, 800),
    ):
        charge = Charge(
            neighbours="add_remove",
            noise_multiplier=alpha * z / ratio,
            sampling=sampling,
            count=count,
        )
        assert spent([charge], delta=DELTA, accountant="pld") == pytest.approx(1, rel=0.02)


def exact_epsilon(mu: float) -> float:
    """Return the epsilon of a Gaussian mechanism by dp-accounting."""
    law = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=1e-3)
    return float(law.get_epsilon_for_delta(DELTA))


def test_true_epsilon_of_a_device_without_drift() -> None:
    """Section 8.3: 6.05 for the secure edge, 2.72 for the insecure one."""
    values: dict[str, Any] = {"multiplier": 10.72983, "rounds": ROUNDS, "delta": DELTA}
    secure, insecure = (
        true_epsilon(MIXED, EVERY_5, tier, **values, clean_events=False) for tier in (1, 2)
    )
    assert (secure, insecure) == pytest.approx((6.05, 2.72), rel=2e-3)
    assert secure == pytest.approx(exact_epsilon(math.sqrt(200) / 10.72983), rel=1e-3)
    assert insecure == pytest.approx(exact_epsilon(math.sqrt(800) / 4 / 10.72983), rel=1e-3)


def test_true_epsilon_with_the_worst_drift() -> None:
    values: dict[str, Any] = {"multiplier": 10.72983, "rounds": ROUNDS, "delta": DELTA}
    found = true_epsilon(MIXED, EVERY_5, 1, **values)
    assert found == pytest.approx(exact_epsilon(4 * math.sqrt(200) / 10.72983), rel=1e-3)
    assert true_epsilon(MIXED, EVERY_5, 2, **values) == pytest.approx(2.72, rel=2e-3)
    # The noise of a segment's sensitivity instead of a round's is four times smaller.
    counted = true_epsilon(MIXED, EVERY_5, 2, **values, release_steps="segment")
    assert counted == pytest.approx(exact_epsilon(math.sqrt(800) / 10.72983), rel=1e-3)


def test_true_epsilon_of_a_tree_whose_fanouts_differ() -> None:
    """The paper takes the smallest fan-out of a tier, which the worst case need not have."""
    edges = [(CLOUD, "a"), (CLOUD, "b")]
    edges += [("a", f"a{i}") for i in range(4)] + [("b", f"b{i}") for i in range(2)]
    schedule = EventSchedule(steps=4, events={1: [1]})
    values: dict[str, Any] = {"multiplier": 5.0, "rounds": 1, "delta": DELTA}
    tree = TierTree.of_edges(edges, trusted={"a"})
    found = true_epsilon(tree, schedule, 1, **values)
    worst = 2 * (1 / 4 + 3)
    paper = 2 * 4 / 2
    assert found == pytest.approx(exact_epsilon(worst / paper / 5), rel=1e-3)
    everybody = TierTree.of_edges(edges, trusted={"a", "b"})
    found = true_epsilon(everybody, schedule, 1, **values)
    assert found == pytest.approx(exact_epsilon(2 * (1 / 2 + 3) / paper / 5), rel=1e-3)


def test_true_epsilon_of_three_tiers() -> None:
    tree = TierTree.of_fanouts((4, 2, 3), p=(0.5, 0.5))
    schedule = EventSchedule(steps=10, events={1: [6], 2: [2, 4]})
    values: dict[str, Any] = {"multiplier": 5.0, "rounds": 3, "delta": DELTA}
    first = 2 * (2 / 6 + 4 / 2 + 4)  # from a third of a half to a half, and then all
    found = true_epsilon(tree, schedule, 1, **values)
    assert found == pytest.approx(exact_epsilon(math.sqrt(3) * first / (20 / 6) / 5), rel=1e-3)
    parts = [2 * (2 / 3 + 4), 2 * 4 / 3]
    found = true_epsilon(tree, schedule, 2, **values)
    mu = math.sqrt(3) * math.hypot(*parts) / (20 / 3) / 5
    assert found == pytest.approx(exact_epsilon(mu), rel=1e-3)


def test_figures_with_one_alpha_for_each_tier() -> None:
    few: dict[str, Any] = {"rounds": 5, "accountant": "rdp"}
    found, same = figures(alpha=[3.0, 1.0], **few), figures(**few)
    assert found.multipliers[1] == pytest.approx(3 * same.multipliers[1])
    assert (found.record[2], found.idealised) == (same.record[2], same.idealised)
    assert found.record[1] < same.record[1]
    assert figures(**few, n_comp=4000).multipliers[1] == pytest.approx(10.72983)


# Does trust help at equal privacy? Section 8.5


def ratio(once: float, often: float, factor: float = 1.0) -> float:
    """Return the noise of an insecure subnetwork over that of a secure one.

    `once` and `often` are the multipliers of one release a round and of four; `factor` is what
    drift adds to the secure one's sensitivity.
    """
    noise = [
        (once * factor * sensitivity(1, eta=1.0, K=20, G=1.0, fanouts=(5,))),
        (often * sensitivity(2, eta=1.0, K=5, G=1.0, fanouts=(5,))),
    ]
    secure, insecure = (
        sum(variance_by_tier(TierTree.of_fanouts((1, 5), p=p), {tier: std}, EVERY_5).values())
        for p, tier, std in ((1.0, 1, noise[0]), (0.0, 2, noise[1]))
    )
    return insecure / secure


def test_trust_at_one_alpha() -> None:
    """As the paper: one multiplier, and the sensitivity of a whole round for every release."""
    assert ratio(1.0, 4.0) == pytest.approx(20)


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, 5.0), (smooth_factor(20, 1 / 20), 1.83), (4.0, 0.31)]
)
def test_trust_at_equal_privacy_of_devices(factor: float, expected: float) -> None:
    once, often = (
        multiplier(epsilon=1, delta=DELTA, steps=steps, total_steps=4000) for steps in (20, 5)
    )
    assert ratio(once, often, factor) == pytest.approx(expected, abs=0.005)


def test_trust_at_equal_privacy_of_records() -> None:
    values: dict[str, Any] = {"epsilon": 1.0, "delta": DELTA, "rate": 0.05, "rounds": ROUNDS}
    once = record_multiplier(**values, periods=[20])
    often = record_multiplier(**values, periods=[5] * 4)
    assert ratio(once, often) == pytest.approx(0.62, abs=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: multiplier(epsilon=1, delta=DELTA, steps=5, total_steps=4),
            "steps = 5: expected an integer from 1 to 4",
        ),
        (
            lambda: multiplier(epsilon=0.0, delta=DELTA, steps=1, total_steps=4),
            "epsilon = 0.0: expected a finite number",
        ),
        (
            lambda: record_multiplier(epsilon=1, delta=DELTA, rate=0.1, periods=[], rounds=1),
            "periods = []: expected the steps of at least one release",
        ),
        (
            lambda: record_multiplier(epsilon=1, delta=DELTA, rate=0.0, periods=[1], rounds=1),
            "rate = 0.0: expected a finite number from",
        ),
        (
            lambda: record_multiplier(epsilon=1, delta=2.0, rate=0.1, periods=[1], rounds=1),
            "delta = 2.0: expected a number strictly between 0 and 1",
        ),
        (
            lambda: true_epsilon(MIXED, EVERY_5, 3, multiplier=1.0, rounds=1, delta=DELTA),
            "tier = 3: expected one at which noise enters: [1, 2]",
        ),
        (
            lambda: true_epsilon(
                MIXED, EVERY_5, 1, multiplier=1.0, rounds=1, delta=DELTA, release_steps="run"
            ),
            "release_steps = 'run': expected one of 'round', 'segment'",
        ),
        (lambda: figures(alpha=[1.0]), "alpha = [1.0]: expected one number, or 2 of them"),
        (lambda: figures(rounds=0), "rounds = 0: expected an integer of at least 1"),
        (
            lambda: boundary_classes(TierTree.of_fanouts((4,)), EVERY_5),
            "tier of events = 1: expected none",
        ),
    ],
)
def test_errors_name_the_parameter(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        call()
    assert message in str(caught.value)
