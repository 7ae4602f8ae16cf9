"""How the noise goes over the rounds: discounting and Lei's decays."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.simulations.research.udp.noise_theory import m_t, sigma_crd
from flwr_privacy.udp import (
    Discounted,
    LinearDecay,
    Uniform,
    budget,
    discount_T,
    sigma_paper,
)
from flwr_privacy.udp.pace import Pace, PlateauDecay

DELTA = 1e-3


def close(value: float, expected: float, rel: float = 1e-6) -> bool:
    return value == pytest.approx(expected, rel=rel)


def run(pace: Pace, triggers: object = "all") -> tuple[list[int], list[float]]:
    """Do all rounds; return T in force in each and after the last, and the factor of each.

    The loss falls by 1 a round, but in the rounds of `triggers`, where it stays.
    """
    loss = 1000.0
    if isinstance(pace, Discounted):
        pace.begin(loss)
    planned, factors = [pace.planned], []
    while not pace.over:
        factors.append(pace.factor)
        if triggers != "all" and pace.done not in triggers:  # type: ignore[operator]
            loss -= 1.0
        pace.after(loss)
        planned.append(pace.planned)
    return planned, factors


def test_F5_without_a_change_the_noise_stays_and_the_budget_is_spent_exactly() -> None:
    z = sigma_paper(rounds=200, q=1.0, epsilon=8.0, delta=DELTA)
    spent = 0.0
    for t in range(200):
        now = sigma_crd(T=200, t=t, spent=spent, q=1.0, epsilon=8.0, delta=DELTA)
        assert close(now, z, rel=1e-9)
        spent += now**-2
    assert close(spent, 4.632474)
    assert close(budget("paper", epsilon=8.0, delta=DELTA), spent)


def test_F6_a_run_with_three_discounts() -> None:
    planned, factors = run(Discounted(200, beta=0.9), triggers={9, 19, 29})
    assert planned[0] == 200
    assert planned[10] == 180
    assert planned[20] == 163
    assert planned[30] == 149
    assert len(factors) == 149
    sigmas = [6.570652 * factor for factor in factors]
    expected = [6.570652] * 10 + [6.215215] * 10 + [5.875762] * 10 + [5.557914] * 119
    assert all(close(a, b) for a, b in zip(sigmas, expected, strict=True))
    assert close(math.fsum(s**-2 for s in sigmas), 4.632474)
    assert close(m_t(planned[:11]), 178.947368, rel=1e-8)


def test_F7_a_discount_after_every_round() -> None:
    planned, factors = run(Discounted(200, beta=0.9))
    expected = [200, 180, 162, 146, 131, 118, 106, 96, 87, 79, 72, 65, 59, 54, 49, 45, 42, 39]
    assert planned == [*expected, 36, 34, 32, 30, 29, 28, 27, 26, 25]
    assert close(factors[-1], 0.1447, rel=5e-4)
    rounds = {0.5: 7, 0.6: 8, 0.7: 11, 0.8: 15, 0.9: 26, 0.95: 40}
    for beta, count in rounds.items():
        assert len(run(Discounted(200, beta=beta))[1]) == count
    for beta, share in ((0.9, 1.0), (0.6, 0.6534), (0.8, 0.7762)):
        spent = math.fsum(f**-2 for f in run(Discounted(200, beta=beta))[1]) / 200
        assert close(spent, share, rel=1e-4)
    assert [len(run(Discounted(T, beta=0.9))[1]) for T in (150, 300)] == [23, 29]


def test_F8_the_edges_of_discounting() -> None:
    for beta in (0.01, 0.5, 0.9, 0.999999):
        assert all(discount_T(t + 1, t, beta) == t for t in (0, 7, 100))
    assert discount_T(7, 5, 0.9) == 6
    assert discount_T(90, 0, 0.7) == 63
    assert math.floor(0.7 * 90) == 62
    assert [discount_T(T, 0, 0.7) for T in (170, 180)] == [119, 126]
    planned, factors = run(Discounted(50, beta=0.9), triggers=())
    assert set(planned) == {50}
    assert factors == [1.0] * 50


@given(
    st.integers(1, 300),
    st.floats(0.01, 0.99),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_F8_T_never_grows_and_the_noise_is_that_of_equation_25(
    rounds: int, beta: float, patience: int, draws: random.Random
) -> None:
    pace = Discounted(rounds, beta=beta, patience=patience)
    planned, spent, done = [rounds], 0.0, 0
    z = sigma_paper(rounds=rounds, q=0.5, epsilon=3.0, delta=DELTA)
    while not pace.over:
        now = pace.factor * z
        told = sigma_crd(T=pace.planned, t=pace.done, spent=spent, q=0.5, epsilon=3.0, delta=DELTA)
        assert close(now, told, rel=1e-6)
        assert close(pace.factor**2 * rounds, m_t(planned), rel=1e-9)
        spent += now**-2
        pace.after(draws.choice([0.0, draws.random(), math.nan, math.inf]))
        done += 1
        assert pace.planned <= planned[-1]
        planned.append(pace.planned)
    assert done == pace.done <= rounds
    assert 0.5 * spent <= budget("paper", epsilon=3.0, delta=DELTA) * (1 + 1e-9)


def test_patience_waits_for_rounds_in_a_row() -> None:
    pace = Discounted(100, beta=0.5, patience=3)
    for loss in (1.0, 1.0, 1.0, 0.5, 0.5, 0.5):
        pace.after(loss)
    assert pace.planned == 100
    pace.after(0.5)
    assert pace.planned == discount_T(100, 6, 0.5)


def test_patience_begins_anew_after_a_discount() -> None:
    pace = Discounted(100, beta=0.5, patience=2)
    pace.begin(1.0)
    planned = []
    for _ in range(6):
        pace.after(1.0)
        planned.append(pace.planned)
    first = discount_T(100, 1, 0.5)
    second = discount_T(first, 3, 0.5)
    assert planned == [100, first, first, second, second, discount_T(second, 5, 0.5)]


def test_an_improvement_of_just_zeta_is_one() -> None:
    """The paper discounts where the loss falls by less than zeta."""
    for loss, planned in ((0.75, 100), (math.nextafter(0.75, 1), discount_T(100, 0, 0.5))):
        pace = Discounted(100, beta=0.5, zeta=0.25)
        pace.begin(1.0)
        pace.after(loss)
        assert pace.planned == planned


def test_a_round_of_which_nothing_is_known_discounts_nothing() -> None:
    pace = Discounted(10)
    pace.begin(1.0)
    pace.after(None)
    assert (pace.done, pace.planned) == (1, 10)
    pace.after(1.0)
    assert pace.planned == discount_T(10, 1, 0.9)


def test_the_first_round_discounts_nothing_where_the_first_loss_is_unknown() -> None:
    pace = Discounted(10)
    pace.after(5.0)
    assert pace.planned == 10
    unsure = Discounted(10)
    unsure.begin(1.0)
    unsure.after(math.nan)  # no improvement
    assert unsure.planned == 9


def test_F24_lei_until_the_budget_is_spent() -> None:
    ends = (0.0, 0.25, 0.5, 0.75, 1.0)
    assert [len(run(LinearDecay(200, end=e))[1]) for e in ends] == [100, 114, 133, 160, 200]
    assert run(LinearDecay(200, end=1.0))[1] == [1.0] * 200
    for end in ends:
        factors = run(LinearDecay(200, end=end))[1]
        spent = math.fsum(f**-2 for f in factors)
        following = LinearDecay(200, end=end)._share(len(factors))
        assert spent <= 200 * (1 + 1e-9)
        assert len(factors) == 200 or spent + following**-2 > 200


def test_F24_lei_over_all_rounds() -> None:
    for end, first in ((0.25, 1.9907), (0.5, 1.4116), (0.75, 1.1539)):
        factors = run(LinearDecay(200, end=end, calibrated=True))[1]
        assert len(factors) == 200
        assert close(factors[0], first, rel=5e-5)
        assert close(math.fsum(f**-2 for f in factors), 200.0, rel=1e-9)


@given(st.integers(1, 200), st.lists(st.floats(0, 1), min_size=200, max_size=200))
def test_a_plateau_lowers_the_noise_and_never_passes_the_budget(
    rounds: int, losses: list[float]
) -> None:
    pace, spent, falls = PlateauDecay(rounds), 0.0, 0
    last = math.inf
    while not pace.over:
        assert close(pace.factor, 0.8**falls)
        spent += pace.factor**-2
        loss = losses[pace.done]
        pace.after(loss)
        falls += loss >= last
        last = loss
    assert spent <= rounds * (1 + 1e-9)
    assert pace.done == rounds or spent + pace.factor**-2 > rounds


PACES = [
    lambda: Uniform(9),
    lambda: Discounted(40, beta=0.7, patience=2),
    lambda: LinearDecay(30, end=0.2),
    lambda: PlateauDecay(30),
]


@pytest.mark.parametrize("kind", range(len(PACES)))
def test_a_resumed_pace_goes_on_as_if_nothing_had_happened(kind: int) -> None:
    draws = random.Random(1)
    losses = [draws.random() for _ in range(40)]
    whole, first, second = PACES[kind](), PACES[kind](), PACES[kind]()
    for loss in losses[:4]:
        whole.after(loss)
        first.after(loss)
    second.load(first.state())
    while not whole.over:
        assert (second.planned, second.factor) == (whole.planned, whole.factor)
        whole.after(losses[whole.done])
        second.after(losses[second.done])
    assert second.over


def test_a_checkpoint_of_another_pace_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'beta': 0\.9.*'beta': 0\.8"):
        Discounted(10, beta=0.8).load(Discounted(10).state())
    with pytest.raises(CheckpointError):
        Discounted(10).load(Uniform(10).state())
    with pytest.raises(CheckpointError, match="'rounds': 11"):
        Uniform(10).load(Uniform(11).state())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: Uniform(0), "rounds = 0"),
        (lambda: Discounted(5, beta=1.0), "beta = 1.0: expected a number between 0 and 1, neither"),
        (lambda: Discounted(5, beta=0.0), "beta = 0.0"),
        (lambda: Discounted(5, beta=math.nan), "beta = nan"),
        (lambda: Discounted(5, zeta=-0.1), "zeta = -0.1"),
        (lambda: Discounted(5, patience=0), "patience = 0"),
        (lambda: LinearDecay(5, end=1.5), "end = 1.5"),
    ],
)
def test_parameters_that_are_refused(made: Callable[[], Pace], text: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        made()
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("planned", "text"),
    [
        ([], "a number of rounds for each round so far"),
        ([5, 6], "planned = 6"),  # it grew
        ([5, 1], "planned = 1"),  # over before
        ([0], "planned = 0"),
    ],
)
def test_histories_that_cannot_be(planned: list[int], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        m_t(planned)


def test_no_noise_is_left_for_a_round_beyond_the_plan_or_the_budget() -> None:
    with pytest.raises(InvalidParameterError, match="T = 5"):
        sigma_crd(T=5, t=5, spent=0.0, q=1.0, epsilon=1.0, delta=DELTA)
    with pytest.raises(InvalidParameterError, match=r"spent = 4\.7"):
        sigma_crd(T=5, t=1, spent=4.7, q=1.0, epsilon=8.0, delta=DELTA)
