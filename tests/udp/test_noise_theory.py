"""The facts of UDP's specification on the noise: the paper's formula, and what it truly gives."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from flwr_privacy.accounting import Charge, noise_multiplier, spent
from flwr_privacy.accounting.gaussian import delta_of, epsilon_of, mu_of
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.simulations.research.udp.noise_theory import (
    eps_paper,
    eps_spent,
    eps_zcdp,
    rounds_paper,
    sigma_zcdp,
)
from flwr_privacy.udp import (
    UDPNoisePlan,
    UDPTerms,
    participations,
    sensitivity,
    sigma_paper,
)
from flwr_privacy.udp.schedule import GRID_SHARE
from flwr_privacy.wire.fields import read, write

DELTA = 1e-3
LOG = math.log(1 / DELTA)
EPSILONS = [4.0, 8.0, 12.0, 16.0, 20.0]


def close(value: float, expected: float, rel: float = 1e-5) -> bool:
    return value == pytest.approx(expected, rel=rel)


@pytest.mark.parametrize(
    ("q", "rounds", "expected"),
    [
        (1.0, 200, [13.141304, 6.570652, 4.380435, 3.285326, 2.628261]),
        (0.6, 200, [10.179211, 5.089605, 3.393070, 2.544803, 2.035842]),
    ],
)
def test_F1_the_papers_noise_over_the_sensitivity(
    q: float, rounds: int, expected: list[float]
) -> None:
    for epsilon, value in zip(EPSILONS, expected, strict=True):
        assert close(sigma_paper(rounds=rounds, q=q, epsilon=epsilon, delta=DELTA), value)
    assert close(sigma_paper(rounds=150, q=1.0, epsilon=8.0, delta=DELTA), 5.690352)
    assert close(sigma_paper(rounds=300, q=1.0, epsilon=8.0, delta=DELTA), 8.047373)


def test_F2_the_papers_noise_in_units_of_the_weights() -> None:
    Dl = sensitivity("record", clipping_norm=1.0, learning_rate=1.0, records=800)
    assert Dl == 0.0025
    options = {"rounds": 200, "q": 1.0, "delta": DELTA}
    assert close(sigma_paper(epsilon=4.0, Dl=Dl, **options), 0.03285326)
    assert close(sigma_paper(epsilon=8.0, Dl=Dl, **options), 0.01642663)
    Dl = sensitivity("record", clipping_norm=1.8, learning_rate=0.02, records=800)
    assert close(Dl, 9e-5)
    sigma = sigma_paper(epsilon=4.0, Dl=Dl, **options)
    assert close(sigma, 1.182717e-3)
    assert close(sigma * math.sqrt(203530), 0.5336, rel=1e-4)
    assert close(sigma * math.sqrt(203530 / 50), 0.07546, rel=1e-4)


def test_F3_the_noise_is_inverse_in_the_number_of_records() -> None:
    expected = [0.03285326, 0.02190217, 0.01642663, 0.01314130, 0.01095109]
    for records, value in zip((400, 600, 800, 1000, 1200), expected, strict=True):
        Dl = sensitivity("record", clipping_norm=1.0, learning_rate=1.0, records=records)
        assert close(sigma_paper(rounds=200, q=1.0, epsilon=8.0, delta=DELTA, Dl=Dl), value)


def test_F4_how_the_noise_scales() -> None:
    def sigma(**changes: float) -> float:
        return sigma_paper(
            **{"rounds": 200, "q": 1.0, "epsilon": 8.0, "delta": DELTA, **changes}  # type: ignore[arg-type]
        )

    assert close(sigma(q=0.6) / sigma(), 0.7745967)
    assert close(sigma(rounds=800) / sigma(), 2.0, rel=1e-12)
    assert close(sigma(epsilon=16.0) / sigma(), 0.5, rel=1e-12)


def test_F9_what_the_papers_noise_truly_gives_in_every_round() -> None:
    truth = [3.4377, 8.3527, 14.4914, 21.8175, 30.3174]
    for epsilon, expected in zip(EPSILONS, truth, strict=True):
        for rounds in (1, 30, 200):  # independent of the number of rounds
            z = sigma_paper(rounds=rounds, q=1.0, epsilon=epsilon, delta=DELTA)
            assert close(epsilon_of(math.sqrt(rounds) / z, DELTA), expected, rel=2e-5)
    assert close(delta_of(math.sqrt(200) / 2.628261, 20.0), 0.1164, rel=1e-3)

    def excess(epsilon: float) -> float:
        mu = 1 / sigma_paper(rounds=1, q=1.0, epsilon=epsilon, delta=DELTA)
        return epsilon_of(mu, DELTA) - epsilon

    assert excess(6.97804 - 1e-3) < 0 < excess(6.97804 + 1e-3)


def test_F10_the_zcdp_bound_of_the_same_moments() -> None:
    expected = [4.5791, 10.3162, 17.2115, 25.2649, 34.4765]
    sigmas = [14.8274, 8.1116, 5.8138, 4.6340, 3.9078]
    for epsilon, bound, sigma in zip(EPSILONS, expected, sigmas, strict=True):
        assert close(eps_zcdp(a=epsilon**2 / (2 * LOG), delta=DELTA), bound, rel=2e-5)
        options = {"epsilon": epsilon, "delta": DELTA}
        zcdp = sigma_zcdp(rounds=200, q=1.0, **options)
        assert close(zcdp, sigma, rel=2e-5)
        assert close(eps_zcdp(a=200 / zcdp**2, delta=DELTA), epsilon, rel=1e-12)
        assert zcdp >= sigma_paper(rounds=200, q=1.0, **options)
        assert zcdp >= noise_multiplier(releases=200, neighbours="replace_one", **options)


def test_F11_gaussian_differential_privacy() -> None:
    mus = [1.2150, 2.0833, 2.8165, 3.4649, 4.0531]
    sigmas = [11.6401, 6.7884, 5.0212, 4.0815, 3.4892]
    for epsilon, mu, sigma in zip(EPSILONS, mus, sigmas, strict=True):
        assert close(mu_of(epsilon, DELTA), mu, rel=5e-5)
        z = noise_multiplier(releases=200, epsilon=epsilon, delta=DELTA, neighbours="replace_one")
        assert close(z, sigma, rel=2e-5)
        charges = [Charge(neighbours="replace_one", noise_multiplier=z, count=200)]
        assert close(spent(charges, delta=DELTA, accountant="pld"), epsilon, rel=1e-3)


def test_F12_the_server_sees_who_takes_part() -> None:
    """Averaged over the number of participations, which is no secret of the server's."""
    counts = np.arange(201)
    shares = binom.pmf(counts, 200, 0.6)
    assert binom.mean(200, 0.6) == 120
    assert close(binom.std(200, 0.6), 6.93, rel=1e-3)
    for epsilon, expected in zip(EPSILONS, [3.453, 8.411, 14.627, 22.074, 30.746], strict=True):
        z = sigma_paper(rounds=200, q=0.6, epsilon=epsilon, delta=DELTA)

        def delta(e: float, z: float = z) -> float:
            mu = np.sqrt(counts[1:]) / z
            deltas = norm.cdf(mu / 2 - e / mu) - np.exp(e + norm.logcdf(-mu / 2 - e / mu))
            return float(shares[1:] @ deltas)

        assert delta(expected * 0.99) > DELTA > delta(expected * 1.01)
    for epsilon, expected in zip(EPSILONS, [2.521, 6.052, 10.417, 15.620, 21.689], strict=True):
        z = sigma_paper(rounds=200, q=0.6, epsilon=epsilon, delta=DELTA)
        charges = [Charge(neighbours="add_remove", noise_multiplier=z, sampling=0.6, count=200)]
        assert close(spent(charges, delta=DELTA, accountant="pld"), expected, rel=1e-2)


def test_F13_one_round() -> None:
    for epsilon, paper, exact in ((1.0, 3.716922, 2.574657), (8.0, 0.464615, 0.480014)):
        assert close(sigma_paper(rounds=1, q=1.0, epsilon=epsilon, delta=DELTA), paper)
        assert close(
            noise_multiplier(releases=1, epsilon=epsilon, delta=DELTA, neighbours="replace_one"),
            exact,
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"epsilon": 0.0}, "epsilon = 0.0: expected a number above 0"),
        ({"epsilon": -1.0}, "epsilon = -1.0"),
        ({"epsilon": math.inf}, "epsilon = inf"),
        ({"delta": 0.0}, "delta = 0.0: expected a number strictly between 0 and 1"),
        ({"delta": 1.0}, "delta = 1.0"),
        ({"q": 0.0}, "q = 0.0"),
        ({"q": 1.5}, "q = 1.5"),
        ({"rounds": 0}, "rounds = 0"),
    ],
)
def test_F14_what_no_budget_can_be(change: dict[str, float], text: str) -> None:
    values = {"rounds": 10, "q": 1.0, "epsilon": 1.0, "delta": DELTA, **change}
    for function in (sigma_paper, sigma_zcdp):
        with pytest.raises(InvalidParameterError, match=text):
            function(**values)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match=text):
        UDPNoisePlan(noise="gdp_fixed", **values)  # type: ignore[arg-type]


def test_F14_no_noise_for_a_budget_without_end() -> None:
    assert sigma_paper(rounds=200, q=1.0, epsilon=1e9, delta=DELTA) < 1e-7
    assert noise_multiplier(releases=200, epsilon=1e6, delta=DELTA, neighbours="replace_one") < 0.02


@given(
    rounds=st.integers(1, 1000),
    q=st.floats(0.01, 1),
    epsilon=st.floats(0.1, 30),
    delta=st.floats(1e-9, 0.1),
)
def test_the_papers_formula_and_its_inverses_agree(
    rounds: int, q: float, epsilon: float, delta: float
) -> None:
    sigma = sigma_paper(rounds=rounds, q=q, epsilon=epsilon, delta=delta, Dl=0.3)
    assert close(eps_paper(sigma=sigma, rounds=rounds, q=q, delta=delta, Dl=0.3), epsilon, rel=1e-9)
    assert close(
        rounds_paper(sigma=sigma, q=q, epsilon=epsilon, delta=delta, Dl=0.3), rounds, rel=1e-9
    )


@pytest.mark.parametrize(("rounds", "q"), [(60, 1.0), (200, 0.6), (100, 0.05), (3, 0.2)])
def test_all_but_a_hundredth_of_the_clients_take_part_at_most_so_often(
    rounds: int, q: float
) -> None:
    most = participations(rounds, q)
    assert 1 <= most <= rounds
    assert binom.cdf(most, rounds, q) >= 0.99
    assert most == 1 or binom.cdf(most - 1, rounds, q) < 0.99


@pytest.mark.parametrize("sampling_rate", [1.0, 0.25])
@pytest.mark.parametrize("q", [1.0, 0.3])
def test_the_default_schedule_spends_its_budget_and_not_more(
    q: float, sampling_rate: float
) -> None:
    schedule = UDPNoisePlan(
        noise="gdp_fixed", epsilon=4.0, delta=1e-5, rounds=60, q=q, sampling_rate=sampling_rate
    )
    charge = Charge(
        neighbours="replace_one",
        noise_multiplier=schedule.noise_multiplier,
        sampling=sampling_rate,
        gap=schedule.gap,
    )
    accountant = "gdp" if sampling_rate == 1 else "rdp"
    whole = spent([charge] * schedule.releases, delta=1e-5, accountant=accountant)
    more = spent([charge] * (schedule.releases + 1), delta=1e-5, accountant=accountant)
    assert 4.0 * (1 - GRID_SHARE) < whole <= 4.0 * (1 + 1e-9) < more
    assert schedule.cap == 4.0


def test_the_papers_schedule_is_capped_at_what_it_truly_gives() -> None:
    schedule = UDPNoisePlan(noise="paper", epsilon=8.0, delta=DELTA, rounds=200, q=1.0)
    charge = Charge(
        neighbours="replace_one",
        noise_multiplier=schedule.noise_multiplier,
        gap=schedule.gap,
        count=200,
    )
    assert spent([charge], delta=DELTA) == pytest.approx(schedule.cap)
    assert schedule.cap == pytest.approx(8.3527 + 8e-3, rel=1e-3)
    with pytest.raises(InvalidParameterError, match=r"sampling_rate = 0\.5"):
        UDPNoisePlan(noise="paper", epsilon=8.0, delta=DELTA, rounds=2, q=1.0, sampling_rate=0.5)


TERMS = UDPTerms(
    unit="record",
    noise_multiplier=2.0,
    epsilon=4.0,
    delta=1e-5,
    gap=1e-4,
    clipping_norm=1.0,
    learning_rate=0.5,
    sampling_rate=0.5,
    grid=-20,
    keep_back=["a", "b"],
)


def test_terms_survive_the_wire() -> None:
    assert read(UDPTerms, write(TERMS)) == TERMS


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"epsilon": 0.0}, InvalidParameterError, "epsilon = 0.0"),
        ({"delta": 1.0}, InvalidParameterError, "delta = 1.0"),
        ({"clipping-norm": 0.0}, InvalidParameterError, "clipping_norm = 0.0"),
        ({"clipping-norm": -1.0}, InvalidParameterError, "clipping_norm = -1.0"),
        ({"noise-multiplier": math.nan}, InvalidParameterError, "noise_multiplier = nan"),
        ({"noise-multiplier": math.inf}, InvalidParameterError, "noise_multiplier = inf"),
        ({"noise-multiplier": -1.0}, InvalidParameterError, "noise_multiplier = -1.0"),
        ({"epochs": 0}, InvalidParameterError, "epochs = 0"),
        ({"batch-size": -1}, InvalidParameterError, "batch_size = -1"),
        ({"bound": "none"}, InvalidParameterError, "bound = 'none'"),
        ({"parties": 2}, InvalidParameterError, "sampling_rate = 0.5"),
        ({"learning-rate": 0.0}, InvalidParameterError, "learning_rate = 0.0"),
        ({"sampling-rate": 1.1}, InvalidParameterError, "sampling_rate = 1.1"),
        ({"unit": "client"}, InvalidParameterError, "unit = 'client'"),
        ({"unit": "user"}, InvalidParameterError, "sampling_rate = 0.5"),
        ({"gap": -1.0}, InvalidParameterError, "gap = -1.0"),
        ({"epsilon": "8"}, ProtocolError, "entry 'epsilon' of UDPTerms"),
        ({"epsilon": None}, ProtocolError, "entry 'epsilon' of UDPTerms"),
        ({"keep-back": "w"}, ProtocolError, "entry 'keep-back' of UDPTerms"),
    ],
)
def test_terms_that_are_refused(change: dict[str, object], error: type, text: str) -> None:
    fields = {k: v for k, v in {**write(TERMS), **change}.items() if v is not None}
    with pytest.raises(error, match=text):
        read(UDPTerms, fields)


def test_what_rounds_with_different_noise_cost_by_each_mode() -> None:
    z = [4.0] * 30 + [3.0] * 20
    a = 30 / 16 + 20 / 9
    assert close(eps_spent("gdp", z, delta=DELTA), epsilon_of(math.sqrt(a), DELTA), rel=1e-12)
    assert close(eps_spent("zcdp", z, delta=DELTA), a / 2 + math.sqrt(2 * a * LOG), rel=1e-12)
    claimed = eps_spent("paper", [5.089605] * 200, delta=DELTA, q=0.6)
    assert close(claimed, 8.0)
    hidden = eps_spent("pld_secret", [5.089605] * 200, delta=DELTA, q=0.6)
    assert close(hidden, 6.052, rel=1e-2)  # F12
    for mode in ("gdp", "zcdp", "paper"):
        assert eps_spent(mode, [], delta=DELTA) == 0
    with pytest.raises(InvalidParameterError, match="mode = 'rdp'"):
        eps_spent("rdp", z, delta=DELTA)
