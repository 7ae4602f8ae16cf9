import logging
import math
import random

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant as DpAccountingRdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from flwr_privacy.accounting import Charge, fitting, new_accountant, spent, supports
from flwr_privacy.accounting.curves import ORDERS, composed_pld, rdp_curve
from flwr_privacy.accounting.gaussian import delta_of, epsilon_of, mu_of
from flwr_privacy.errors import InvalidParameterError

NAMES = ("gdp", "rdp", "pld")


def gaussian(z, count=1, neighbours="add_remove", **options):
    return Charge(noise_multiplier=z, neighbours=neighbours, count=count, **options)


noises = st.floats(0.5, 100)
plain = st.builds(gaussian, noises, st.integers(1, 50), gap=st.sampled_from([0.0, 1e-4]))
charges = st.lists(plain, min_size=1, max_size=6)

# -- the three accountants against each other ------------------------------------------------------


@given(charges, charges, st.randoms(use_true_random=False))
def test_gdp_is_the_root_of_the_sum_of_squares_in_any_order_and_grouping(some, more, order):
    total = math.sqrt(math.fsum(c.count / c.noise_multiplier**2 for c in some + more))
    gap = math.fsum(c.count * c.gap for c in some + more)
    expected = epsilon_of(total, 1e-5 * math.exp(-gap)) + gap
    assert spent(some + more, delta=1e-5) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    singles = [gaussian(c.noise_multiplier, gap=c.gap) for c in some for _ in range(c.count)]
    shuffled = singles + more
    order.shuffle(shuffled)
    assert spent(shuffled, delta=1e-5) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(charges, plain, st.randoms(use_true_random=False))
def test_rdp_is_above_gdp_monotone_and_independent_of_the_order(some, more, order):
    before, after = (spent(c, delta=1e-5, accountant="rdp") for c in (some, [*some, more]))
    assert before <= after
    assert spent([*some, more], delta=1e-5, accountant="gdp") <= after * (1 + 1e-12)
    shuffled = [*some, more]
    order.shuffle(shuffled)
    assert spent(shuffled, delta=1e-5, accountant="rdp") == pytest.approx(after, rel=1e-12)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.builds(gaussian, st.floats(1, 50), st.integers(1, 50)), min_size=1, max_size=4))
def test_pld_is_gdp_to_a_thousandth_and_never_below(some):
    exact, numeric = (spent(some, delta=1e-5, accountant=name) for name in ("gdp", "pld"))
    assert exact <= numeric <= exact * 1.001 + 1e-6


def test_accounting_leaves_the_logging_of_the_process_as_it_was(monkeypatch):
    """Absl would add a handler to the root logger, which prints all logs once more."""
    monkeypatch.setattr(logging.root, "handlers", [])
    rdp_curve.cache_clear()
    rdp_curve("gaussian", 0.3, 0.9, "add_remove")
    assert logging.root.handlers == []


@pytest.mark.parametrize("mu", [0.3, 5, 20])
@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-11])
def test_the_rounding_of_a_pld_is_paid_for(mu, delta):
    """dp-accounting alone is 3e-4 too low for mu = 5 and delta = 1e-11."""
    numeric = spent([gaussian(100 / mu, 10_000)], delta=delta, accountant="pld")
    assert epsilon_of(mu, delta) <= numeric <= epsilon_of(mu, delta * 0.999 - 1e-12) + 1e-4


def test_a_pld_promises_nothing_for_a_delta_below_its_rounding():
    assert spent([gaussian(1.0)], delta=1e-13, accountant="pld") == math.inf


@pytest.mark.parametrize("z", [0.7, 2.0, 7.0])
def test_delta_and_epsilon_of_an_accountant_belong_together(z):
    for charge in (gaussian(z, 3), gaussian(z, 3, sampling=0.2), gaussian(z, 3, gap=0.01)):
        for name in NAMES:
            if supports(charge, name):
                accountant = new_accountant(name, [charge])
                epsilon = accountant.epsilon(1e-4)
                assert accountant.delta(epsilon) == pytest.approx(1e-4, rel=1e-6)
                assert accountant.delta(epsilon + 0.1) < 1e-4


# -- published figures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claimed", "server", "pld", "rdp"),
    [
        (1, 0.646, 0.646, 0.749),
        (4, 3.438, 3.438, 3.868),
        (8, 8.353, 8.353, 9.257),
        (12, 14.491, 14.491, 15.903),
        (16, 21.817, 21.817, 23.759),
        (20, 30.317, 30.317, 32.807),
    ],
)
def test_the_full_participation_rows_of_udp(claimed, server, pld, rdp):
    charge = gaussian(math.sqrt(2 * 200 * math.log(1000)) / claimed, 200)
    assert spent([charge], delta=1e-3, accountant="gdp") == pytest.approx(server, abs=6e-4)
    assert spent([charge], delta=1e-3, accountant="pld") == pytest.approx(pld, abs=6e-4)
    assert spent([charge], delta=1e-3, accountant="rdp") == pytest.approx(rdp, rel=2e-3)


@pytest.mark.parametrize(
    ("claimed", "pld", "rdp"),
    [
        (4, 2.521, 2.856),
        (8, 6.052, 6.759),
        (12, 10.417, 11.950),
        (16, 15.620, 17.196),
        (20, 21.689, 24.262),
    ],
)
def test_the_poisson_rows_of_udp(claimed, pld, rdp):
    z = math.sqrt(2 * 0.6 * 200 * math.log(1000)) / claimed
    charge = gaussian(z, 200, sampling=0.6)
    assert spent([charge], delta=1e-3, accountant="pld") == pytest.approx(pld, rel=1e-3)
    assert spent([charge], delta=1e-3, accountant="rdp") == pytest.approx(rdp, rel=1e-3)


def test_the_figures_for_flowers_example():
    full, sampled = gaussian(1.0, 80), gaussian(1.0, 80, sampling=0.05)
    assert spent([full], delta=1e-5, accountant="gdp") == pytest.approx(77.3, abs=0.05)
    assert spent([full], delta=1e-5, accountant="rdp") == pytest.approx(81.1, abs=0.05)
    assert spent([sampled], delta=1e-5, accountant="rdp") == pytest.approx(3.72, abs=0.005)
    assert spent([sampled], delta=1e-5, accountant="pld") == pytest.approx(3.20, abs=0.005)


# -- Rényi curves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("charge", "event"),
    [
        (gaussian(2.0, 7), dp_accounting.GaussianDpEvent(2.0)),
        (
            gaussian(1.0, 7, sampling=0.05),
            dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.0)),
        ),
        (gaussian(3.0, 7, mechanism="laplace"), dp_accounting.LaplaceDpEvent(3.0)),
    ],
)
def test_rdp_is_dp_accountings_on_the_same_orders(charge, event):
    oracle = DpAccountingRdp(ORDERS)
    oracle.compose(event, 7)
    ours = new_accountant("rdp", [charge])
    assert ours.epsilon(1e-5) == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-9)
    assert ours.delta(2.0) == pytest.approx(oracle.get_delta(2.0), rel=1e-9)


@pytest.mark.parametrize(("q", "z"), [(0.5, 50.0), (0.9, 2.0), (1e-3, 1e5), (0.01, 0.2), (0.3, 1)])
def test_a_sampled_curve_is_between_the_divergence_and_that_of_the_next_whole_order(q, z):
    """Against the integral of the definition; dp-accounting gives up some of the broken orders."""
    curve = rdp_curve("gaussian", z, q, "add_remove")
    x = np.linspace(-40 * z - 40, 40 * z + 70, 400_001)
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + (x - 0.5) / z**2)

    def divergence(order):
        exponent = norm.logpdf(x, 0, z) + order * ratio
        largest = exponent.max()
        integral = np.exp(exponent - largest).sum() * (x[1] - x[0])
        return (largest + math.log(integral)) / (order - 1)

    assert np.all(np.diff(curve) >= 0)
    for order in (1.5, 2.0, 7.5, 20.0):
        ours = curve[np.argmin(np.abs(ORDERS - order))]
        assert divergence(order) - 1e-10 <= ours
        assert ours <= divergence(math.ceil(order)) * (1 + 1e-6) + 1e-10


@pytest.mark.parametrize("z", [5e-324, 1e-200, 1e-9])
def test_next_to_no_noise_costs_infinitely_much_and_never_a_nan(z):
    for charge in (gaussian(z), gaussian(z, sampling=0.5), gaussian(z, mechanism="laplace")):
        for name in NAMES:
            if supports(charge, name):
                assert spent([charge], delta=1e-5, accountant=name) > 1e8
                assert new_accountant(name).would_exceed(charge, epsilon=1e8, delta=1e-5)


@pytest.mark.parametrize("z", [2e-6, 1e-4, 0.01])
@pytest.mark.parametrize("sampling", [0.5, 1])
def test_very_little_noise_costs_much(z, sampling):
    charge = gaussian(z, sampling=sampling)
    assert 0.5 / z**2 <= spent([charge], delta=1e-5, accountant="rdp") < math.inf


# -- Laplace ---------------------------------------------------------------------------------------


def test_one_laplace_release_has_the_closed_form():
    """delta = 1 - exp((epsilon - 1/b) / 2) for epsilon up to 1/b."""
    charge, delta = gaussian(2.0, mechanism="laplace"), 1e-3
    exact = 0.5 + 2 * math.log1p(-delta)
    assert spent([charge], delta=delta, accountant="pld") == pytest.approx(exact, abs=1e-5)
    assert exact <= spent([charge], delta=delta, accountant="rdp") <= 0.5 * 1.2


def test_a_sampled_laplace_release_is_pure_amplification_for_pld_alone():
    charge = gaussian(0.5, mechanism="laplace", sampling=0.1)
    amplified = math.log1p(0.1 * math.expm1(2.0))
    assert spent([charge], delta=1e-9, accountant="pld") == pytest.approx(amplified, abs=1e-4)
    with pytest.raises(InvalidParameterError, match="for 'rdp' Gaussian noise, or Laplace noise"):
        spent([charge], delta=1e-9, accountant="rdp")


# -- state and errors ------------------------------------------------------------------------------


def test_no_charges_cost_nothing():
    for name in NAMES:
        assert spent([], delta=1e-5, accountant=name) == 0.0
        assert new_accountant(name).delta(0.0) == 0.0


@pytest.mark.parametrize(
    "charge", [gaussian(1.0, sampling=0.5), gaussian(1.0, mechanism="laplace")]
)
def test_an_unknown_charge_is_refused_and_leaves_no_trace(charge):
    accountant = new_accountant("gdp", [gaussian(2.0, 3)])
    before = accountant.charges, accountant.epsilon(1e-5)
    text = r"charge = Charge\(noise_multiplier=1.0, .*: expected for 'gdp' Gaussian noise without"
    with pytest.raises(InvalidParameterError, match=text):
        accountant.compose(charge)
    with pytest.raises(InvalidParameterError, match=text):
        accountant.would_exceed(charge, epsilon=1.0, delta=1e-5)
    assert (accountant.charges, accountant.epsilon(1e-5)) == before


def test_equal_charges_are_merged_into_the_oldest():
    accountant = new_accountant("gdp", [gaussian(2.0), gaussian(3.0, 2), gaussian(2.0, 4)])
    assert accountant.charges == (gaussian(2.0, 5), gaussian(3.0, 2))


def test_fitting_is_the_tightest_with_a_proven_cap():
    assert fitting([]) == "gdp"
    assert fitting([gaussian(1.0), gaussian(2.0)]) == "gdp"
    assert fitting([gaussian(1.0), gaussian(1.0, sampling=0.5)]) == "rdp"
    assert fitting(iter([gaussian(1.0), gaussian(1.0, mechanism="laplace")])) == "rdp"
    with pytest.raises(InvalidParameterError, match="Laplace noise without sampling"):
        fitting([gaussian(1.0), gaussian(1.0, mechanism="laplace", sampling=0.5)])


def test_bad_values_are_named():
    accountant = new_accountant("gdp")
    with pytest.raises(InvalidParameterError, match="accountant = 'moments': expected one of"):
        new_accountant("moments")
    with pytest.raises(InvalidParameterError, match=r"delta = 1\.5"):
        accountant.epsilon(1.5)
    with pytest.raises(InvalidParameterError, match="epsilon = -1"):
        accountant.delta(-1)
    with pytest.raises(InvalidParameterError, match="epsilon = 0"):
        accountant.would_exceed(gaussian(1.0), epsilon=0, delta=1e-5)
    with pytest.raises(InvalidParameterError, match="delta = 0"):
        accountant.would_exceed(gaussian(1.0), epsilon=1, delta=0)


# -- gaps ------------------------------------------------------------------------------------------


def test_a_gap_adds_to_epsilon_and_multiplies_delta():
    """For every event, P(E) <= e^g1 P'(E) <= e^g1 (e^eps Q'(E) + delta), Q'(E) <= e^g2 Q(E)."""
    with_gap = new_accountant("gdp", [gaussian(2.0, 4, gap=0.05)])
    mu, gap = 1.0, 0.2
    assert with_gap.epsilon(1e-5) == pytest.approx(epsilon_of(mu, 1e-5 * math.exp(-gap)) + gap)
    assert with_gap.delta(3.0) == pytest.approx(math.exp(gap) * delta_of(mu, 3.0 - gap))
    assert with_gap.delta(0.1) == 1.0
    assert new_accountant("gdp", [gaussian(2.0, gap=101.0)]).epsilon(1e-5) == math.inf
    assert new_accountant("gdp", [gaussian(2.0, gap=101.0)]).delta(1e9) == 1.0


# -- caps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("name", "sampling", "mechanism"),
    [
        ("gdp", 1.0, "gaussian"),
        ("rdp", 1.0, "gaussian"),
        ("rdp", 0.1, "gaussian"),
        ("rdp", 1.0, "laplace"),
        ("pld", 0.1, "gaussian"),
    ],
)
def test_equal_releases_fit_as_long_as_their_total_keeps_the_cap(name, sampling, mechanism, gap):
    charge = gaussian(3.0, sampling=sampling, mechanism=mechanism, gap=gap)
    epsilon = (
        spent(
            [gaussian(3.0, 9, sampling=sampling, mechanism=mechanism, gap=gap)],
            delta=1e-5,
            accountant=name,
        )
        * 1.0001
    )
    accountant = new_accountant(name)
    for _ in range(9):
        assert not accountant.would_exceed(charge, epsilon=epsilon, delta=1e-5)
        accountant.compose(charge)
    before = accountant.charges
    assert accountant.would_exceed(charge, epsilon=epsilon, delta=1e-5)
    assert (
        accountant.charges
        == before
        == (gaussian(3.0, 9, sampling=sampling, mechanism=mechanism, gap=gap),)
    )


@pytest.mark.parametrize("name", ["gdp", "rdp", "pld"])
def test_gaps_count_towards_the_cap(name):
    charge, accountant = gaussian(3.0, gap=0.05), new_accountant(name, [gaussian(3.0, 9, gap=0.05)])
    total = spent([gaussian(3.0, 10, gap=0.05)], delta=1e-5, accountant=name)
    assert accountant.would_exceed(charge, epsilon=0.999 * total, delta=1e-5)
    assert not accountant.would_exceed(charge, epsilon=1.001 * total, delta=1e-5)


@given(st.lists(st.floats(0.3, 30), max_size=30), st.floats(0.1, 30))
def test_whatever_noise_is_chosen_gdp_never_passes_its_cap(noises, epsilon):
    accountant = new_accountant("gdp")
    for z in noises:
        if not accountant.would_exceed(gaussian(z), epsilon=epsilon, delta=1e-5):
            accountant.compose(gaussian(z))
    assert accountant.epsilon(1e-5) <= epsilon * (1 + 1e-12)
    # What is left really is left: noise for the rest of mu**2 fits.
    rest = mu_of(epsilon, 1e-5) ** 2 - math.fsum(
        c.count / c.noise_multiplier**2 for c in accountant.charges
    )
    if rest > 1e-6:
        last = gaussian(1 / math.sqrt(rest) * (1 + 1e-6))
        assert not accountant.would_exceed(last, epsilon=epsilon, delta=1e-5)


def test_the_order_of_an_rdp_cap_does_not_follow_the_charges():
    """With the oldest charge's order fixed, a sum at that order is bounded on every path."""
    oldest, epsilon, delta = gaussian(1.0, sampling=0.01), 3.0, 1e-5
    conversion = np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    order = np.argmax((epsilon - conversion) / rdp_curve("gaussian", 1.0, 0.01, "add_remove"))
    draws = random.Random(0)
    for _ in range(20):
        accountant = new_accountant("rdp", [oldest])
        for _ in range(300):
            charge = gaussian(draws.choice([0.7, 1.0, 4.0]), sampling=draws.choice([0.01, 0.2, 1]))
            if not accountant.would_exceed(charge, epsilon=epsilon, delta=delta):
                accountant.compose(charge)
        total = sum(
            c.count * rdp_curve("gaussian", c.noise_multiplier, c.sampling, c.neighbours)[order]
            for c in accountant.charges
        )
        assert total + conversion[order] <= epsilon
        assert accountant.epsilon(delta) <= epsilon
        assert total + conversion[order] > epsilon - 0.5


def test_a_repeated_check_builds_no_new_curve():
    charge = gaussian(1.1, sampling=0.02)
    accountant = new_accountant("rdp", [charge])
    rdp_curve.cache_clear()
    for _ in range(50):
        assert not accountant.would_exceed(charge, epsilon=8, delta=1e-5)
        accountant.compose(charge)
    assert rdp_curve.cache_info().misses == 1


def test_a_pld_is_kept_between_questions():
    accountant = new_accountant("pld", [gaussian(1.3, 5, sampling=0.3), gaussian(2.0)])
    composed_pld.cache_clear()
    accountant.epsilon(1e-5)
    accountant.delta(1.0)
    assert composed_pld.cache_info().misses == 1


@pytest.mark.parametrize("noise", [5e-324, 1e-30, 1e-4, 0.01, 1e50, 1e100])
@pytest.mark.parametrize("sampling", [1.0, 0.1])
@pytest.mark.parametrize("name", ["gdp", "rdp", "pld"])
def test_noise_that_nobody_would_choose_has_a_cost_all_the_same(
    name: str, sampling: float, noise: float
) -> None:
    charge = Charge(neighbours="replace_one", noise_multiplier=noise, sampling=sampling)
    if supports(charge, name):
        cost = spent([charge], delta=1e-5, accountant=name)
        assert cost == pytest.approx(0.0, abs=0.02) if noise > 1 else cost > 1000


def test_noise_whose_square_is_no_float_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"^noise_multiplier = 1e\+200"):
        Charge(neighbours="replace_one", noise_multiplier=1e200)
