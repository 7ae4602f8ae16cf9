"""The noise of a whole training, from its budget: F23 and the constants of each way to spend it."""

import math
import random
from typing import Any

import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.accounting import Charge, new_accountant, noise_multiplier, spent
from flwr_privacy.accounting.accountants import GdpAccountant
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.udp.noise_theory import sigma_zcdp
from flwr_privacy.udp import UDPNoisePlan, budget, participations, sigma_paper
from flwr_privacy.udp.schedule import NOISES

DELTA = 1e-3
SPENDING = ("gdp", "gdp_worst", "zcdp")


def schedule(noise: str, **changes: Any) -> UDPNoisePlan:
    options: dict[str, Any] = {"epsilon": 8.0, "delta": DELTA, "rounds": 200, "q": 1.0}
    return UDPNoisePlan(**{"noise": noise, **options, **changes})


@given(
    st.sampled_from(SPENDING),
    st.floats(0.05, 50.0),
    st.sampled_from([1e-9, 1e-5, 1e-3, 0.3]),
    st.integers(1, 40),
    st.floats(0.02, 1.0),
    st.randoms(use_true_random=False),
)
def test_F23_no_way_to_choose_T_is_refused_or_crosses_the_cap(
    noise: str, epsilon: float, delta: float, rounds: int, q: float, draws: random.Random
) -> None:
    """T may even grow again here, and who takes part follows no rule."""
    plan = UDPNoisePlan(noise=noise, epsilon=epsilon, delta=delta, rounds=rounds, q=q)
    accountant, square = GdpAccountant(), 0.0
    for _ in range(rounds):
        z = plan.multiplier(draws.choice([1, rounds, draws.randint(1, rounds)]), square)
        if z is None:  # nothing is left to speak of
            assert accountant.epsilon(delta) > 0.9 * epsilon or noise == "zcdp"
            continue
        if draws.random() < 0.7:
            charge = Charge(neighbours="replace_one", noise_multiplier=z, gap=plan.gap)
            assert not accountant.would_exceed(charge, epsilon=plan.cap, delta=delta)
            accountant.compose(charge)
            square += z**-2
    assert square <= mu_of(epsilon, delta) ** 2
    assert accountant.epsilon(delta) <= epsilon


@given(st.integers(1, 60), st.floats(0.02, 1.0), st.randoms(use_true_random=False))
def test_F23_gdp_worst_never_declines_while_T_does_not_grow(
    rounds: int, q: float, draws: random.Random
) -> None:
    plan, planned, square = schedule("gdp_worst", rounds=rounds, q=q), rounds, 0.0
    for t in range(rounds):
        if t >= planned:
            break
        z = plan.multiplier(planned - t, square)
        assert z is not None
        square += z**-2
        planned = draws.choice([planned, draws.randint(t + 1, max(planned, t + 1))])
    assert square <= budget("gdp", epsilon=8.0, delta=DELTA)


@pytest.mark.parametrize("noise", ["gdp", "gdp_worst"])
@pytest.mark.parametrize("epsilon", [1.0, 8.0, 20.0])
def test_F23_with_everybody_and_no_trigger_the_budget_is_spent_to_the_last(
    noise: str, epsilon: float
) -> None:
    plan, square, noises = schedule(noise, epsilon=epsilon), 0.0, []
    for t in range(200):
        z = plan.multiplier(200 - t, square)
        assert z is not None
        noises.append(z)
        square += z**-2
    aside = min(1e-3 * epsilon, 0.1)
    exact = mu_of(epsilon - aside, DELTA * math.exp(-aside)) ** 2
    assert square == pytest.approx(exact, rel=1e-6)
    assert noises == pytest.approx([noises[0]] * 200, rel=1e-5)
    assert plan.noise_multiplier == noises[0]
    charges = [Charge(neighbours="replace_one", noise_multiplier=z, gap=plan.gap) for z in noises]
    assert epsilon * (1 - 1e-6) < spent(charges, delta=DELTA) <= epsilon
    assert plan.multiplier(1, square) is None


def test_F23_who_never_takes_part_has_spent_nothing_and_has_all_of_it_in_the_last_round() -> None:
    for noise in SPENDING:
        plan = schedule(noise, q=0.1)
        z = plan.multiplier(1, 0.0)
        assert z is not None
        charge = Charge(neighbours="replace_one", noise_multiplier=z, gap=plan.gap)
        cost = spent([charge], delta=DELTA)
        assert cost <= 8.0
        assert noise == "zcdp" or cost > 8.0 * 0.998


def test_F23_the_noise_is_spread_over_the_rounds_to_come() -> None:
    """``max(1, q (T - t)) / (B - S)``, and ``(T - t) / (B - S)`` for gdp_worst."""
    whole = schedule("gdp", q=0.25).multiplier(1, 0.0)
    assert whole is not None
    B = whole**-2
    for left, shares in ((200, 50.0), (40, 10.0), (4, 1.0), (3, 1.0), (1, 1.0)):
        z = schedule("gdp", q=0.25).multiplier(left, B / 2)
        assert z == pytest.approx(math.sqrt(shares / (B / 2)), rel=1e-6)
        z = schedule("gdp_worst", q=0.25).multiplier(left, B / 2)
        assert z == pytest.approx(math.sqrt(left / (B / 2)), rel=1e-6)


BUDGETS = {
    4: (1.15812, 0.90971, 1.47611),
    8: (4.63247, 3.03957, 4.34003),
    12: (10.42307, 5.91710, 7.93268),
    16: (18.52990, 9.31344, 12.00577),
    20: (28.95297, 13.09704, 16.42801),
}


@pytest.mark.parametrize("epsilon", BUDGETS)
def test_the_budget_constants_of_each_way(epsilon: int) -> None:
    """Section 7.3 at delta = 1e-3; schedules have that less what the grid gets of epsilon."""
    paper, zcdp, gdp = BUDGETS[epsilon]
    for mode, expected in (("paper", paper), ("zcdp", zcdp), ("gdp", gdp)):
        assert budget(mode, epsilon=epsilon, delta=DELTA) == pytest.approx(expected, rel=5e-6)
    for noise, whole in (("gdp", gdp), ("gdp_worst", gdp), ("zcdp", zcdp)):
        z = schedule(noise, epsilon=float(epsilon)).multiplier(1, 0.0)
        assert z is not None
        assert 0.99 * whole < z**-2 < whole
    z = schedule("paper", epsilon=float(epsilon)).noise_multiplier
    assert 200 / z**2 == pytest.approx(paper, rel=5e-6)


def test_with_everybody_gdp_is_the_exact_noise_apart_from_the_grids_share() -> None:
    for epsilon in (0.5, 4.0, 8.0, 20.0):
        exact = noise_multiplier(
            releases=200, epsilon=epsilon, delta=DELTA, neighbours="replace_one"
        )
        noises = [
            schedule(noise, epsilon=epsilon).noise_multiplier
            for noise in ("gdp", "gdp_worst", "gdp_fixed")
        ]
        assert noises == pytest.approx([noises[0]] * 3, rel=1e-8)
        assert exact < noises[0] < exact * 1.002


@given(st.floats(0.01, 100.0), st.floats(1e-12, 0.2), st.floats(0.05, 1.0))
@settings(max_examples=50)
def test_zcdp_has_at_least_the_noise_of_gdp(epsilon: float, delta: float, q: float) -> None:
    options = {"epsilon": epsilon, "delta": delta, "rounds": 50, "q": q}
    zcdp = UDPNoisePlan(noise="zcdp", **options)  # type: ignore[arg-type]
    gdp = UDPNoisePlan(noise="gdp", **options)  # type: ignore[arg-type]
    for left in (50, 20, 1):
        ours, least = zcdp.multiplier(left, 0.0), gdp.multiplier(left, 0.0)
        assert ours is not None
        assert least is not None
        assert ours >= least
    own = sigma_zcdp(rounds=50, q=1.0, epsilon=epsilon, delta=delta)
    everybody = UDPNoisePlan(noise="zcdp", **{**options, "q": 1.0})  # type: ignore[arg-type]
    assert own < everybody.noise_multiplier < own * 1.05


@pytest.mark.parametrize(
    ("epsilon", "true"), [(4, 3.4377), (8, 8.3527), (12, 14.4914), (16, 21.8175), (20, 30.3174)]
)
def test_F9_the_papers_cap_is_what_its_noise_gives(epsilon: int, true: float) -> None:
    plan = schedule("paper", epsilon=float(epsilon))
    assert plan.noise_multiplier == sigma_paper(rounds=200, q=1.0, epsilon=epsilon, delta=DELTA)
    assert true - 1e-4 < plan.cap < true + 3 * min(1e-3 * epsilon, 0.1)
    accountant = GdpAccountant()
    charge = Charge(neighbours="replace_one", noise_multiplier=plan.noise_multiplier, gap=plan.gap)
    for _ in range(200):
        assert not accountant.would_exceed(charge, epsilon=plan.cap * (1 + 1e-9), delta=DELTA)
        accountant.compose(charge)
    assert accountant.would_exceed(charge, epsilon=plan.cap * (1 + 1e-9), delta=DELTA)


def test_the_papers_cap_is_for_a_client_that_is_in_every_round() -> None:
    """Section 7.2: with q = 0.6 and T = 200 that is 4.737 where 4 is claimed."""
    plan = schedule("paper", epsilon=4.0, q=0.6)
    assert plan.noise_multiplier == pytest.approx(10.179211, rel=1e-6)
    assert 4.737 - 1e-3 < plan.cap < 4.737 + 8e-3


def test_F23_one_noise_for_as_many_rounds_as_most_take_part_in() -> None:
    plan = schedule("gdp_fixed", q=0.6)
    assert plan.releases == participations(200, 0.6) == 136
    accountant = GdpAccountant()
    charge = Charge(neighbours="replace_one", noise_multiplier=plan.noise_multiplier, gap=plan.gap)
    for _ in range(136):
        assert not accountant.would_exceed(charge, epsilon=plan.cap, delta=DELTA)
        accountant.compose(charge)
    assert accountant.would_exceed(charge, epsilon=plan.cap * (1 + 1e-9), delta=DELTA)


def test_pld_secret_is_what_privacy_loss_distributions_say() -> None:
    """Section 7.2: q = 0.6, T = 200, epsilon 4 takes 7.027; the server sees more than that."""
    plan = schedule("pld_secret", epsilon=4.0, q=0.6)
    z = plan.noise_multiplier
    assert z == pytest.approx(7.027, rel=1e-2)
    exact = privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=0.6, value_discretization_interval=1e-3
    ).self_compose(200)
    assert 4.0 * 0.99 < exact.get_epsilon_for_delta(DELTA) <= 4.0 * 1.001
    server = spent([Charge(neighbours="replace_one", noise_multiplier=z, count=136)], delta=DELTA)
    assert server < plan.cap < server + 0.01
    assert plan.cap > 4.0


def test_pld_secret_keeps_its_budget_where_everybody_is_charged_in_every_round() -> None:
    plan = schedule("pld_secret", epsilon=1.0, q=0.25, rounds=20)
    charge = Charge(
        neighbours="add_remove",
        noise_multiplier=plan.noise_multiplier,
        sampling=0.25,
        gap=plan.gap,
        count=20,
    )
    assert 0.99 < spent([charge], delta=DELTA, accountant="pld") <= 1 + 1e-6
    assert plan.gap * 20 <= 1e-3 * (1 + 1e-9)


@pytest.mark.parametrize("noise", ["gdp_fixed", *SPENDING])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.9])
def test_trainings_and_losses_together_use_the_budget_and_no_more(noise: str, share: float) -> None:
    plan = schedule(noise, rounds=30, validation_share=share)
    accountant, square, losses = GdpAccountant(), 0.0, 0.0
    for t in range(30):
        z = plan.multiplier(30 - t, square) if plan.spends else plan.noise_multiplier
        assert z is not None
        for own in (z, plan.validation_multiplier):
            charge = Charge(neighbours="replace_one", noise_multiplier=own, gap=plan.gap)
            assert not accountant.would_exceed(charge, epsilon=plan.cap, delta=DELTA)
            accountant.compose(charge)
        square += z**-2
        losses += plan.validation_multiplier**-2
    total = accountant.epsilon(DELTA)
    if noise == "zcdp":
        assert total < 8.0
        whole = budget("zcdp", epsilon=8.0, delta=DELTA)
        assert 0.99 * whole * (1 - share) < square < whole * (1 - share)
    else:
        assert 8.0 * (1 - 1e-6) < total <= 8.0
        assert losses / (losses + square) == pytest.approx(share, rel=1e-6)
    assert losses <= share * budget("gdp", epsilon=8.0, delta=DELTA)


def test_without_a_share_there_is_no_noise_of_losses() -> None:
    assert schedule("gdp_fixed").validation_multiplier == 0.0
    less = schedule("gdp_fixed", validation_share=0.36)
    more = schedule("gdp_fixed").noise_multiplier
    assert less.noise_multiplier == pytest.approx(more / 0.8, rel=1e-6)


def test_nothing_is_planned_where_there_is_no_noise() -> None:
    plan = schedule("none")
    assert (plan.noise_multiplier, plan.gap, plan.validation_multiplier) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("noise", "options", "text"),
    [
        ("gdp2", {}, "noise = 'gdp2'"),
        ("gdp", {"rounds": 0}, "rounds = 0"),
        ("gdp", {"rounds": 2.5}, "rounds = 2.5"),
        ("gdp", {"q": 0.0}, "q = 0.0"),
        ("gdp", {"q": 1.5}, "q = 1.5"),
        ("gdp", {"epsilon": 0.0}, "epsilon = 0.0"),
        ("gdp", {"epsilon": math.inf}, "epsilon = inf"),
        ("gdp", {"delta": 0.0}, "delta = 0.0"),
        ("gdp", {"delta": 1.0}, "delta = 1.0"),
        ("gdp_fixed", {"sampling_rate": 0.0}, "sampling_rate = 0.0"),
        ("gdp_fixed", {"sampling_rate": 1.5}, "sampling_rate = 1.5"),
        ("gdp_fixed", {"validation_share": -0.1}, "validation_share = -0.1"),
        ("gdp_fixed", {"validation_share": 1.0}, "validation_share = 1.0"),
        ("gdp_fixed", {"validation_share": math.nan}, "validation_share = nan"),
        ("paper", {"validation_share": 0.1}, "validation_share = 0.1: expected 0 with noise"),
        ("pld_secret", {"validation_share": 0.1}, "validation_share = 0.1: expected 0"),
        ("none", {"validation_share": 0.1}, "validation_share = 0.1: expected 0"),
    ],
)
def test_parameters_that_are_refused(noise: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        schedule(noise, **options)
    assert text in str(error.value)


@pytest.mark.parametrize("noise", sorted(set(NOISES) - {"gdp_fixed"}))
def test_samples_of_records_are_for_one_noise_only(noise: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"sampling_rate = 0\.5: expected 1: noise"):
        schedule(noise, sampling_rate=0.5)


def test_samples_of_records_keep_the_budget_with_the_accountant_that_knows_them() -> None:
    plan = schedule("gdp_fixed", sampling_rate=0.05, rounds=10)
    charge = Charge(
        neighbours="replace_one",
        noise_multiplier=plan.noise_multiplier,
        sampling=0.05,
        gap=plan.gap,
    )
    accountant = new_accountant("rdp")
    for _ in range(10):
        assert not accountant.would_exceed(charge, epsilon=plan.cap, delta=DELTA)
        accountant.compose(charge)
    assert 7.9 < accountant.epsilon(DELTA) <= 8.0
