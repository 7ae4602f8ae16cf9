import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.accounting.gaussian import delta_of, epsilon_of, mu_of
from flwr_privacy.errors import InvalidParameterError

mus = st.floats(-6, 3).map(lambda exponent: 10**exponent)
deltas = st.floats(-12, math.log10(0.5)).map(lambda exponent: 10**exponent)


def exact_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@given(mus, deltas)
def test_delta_is_the_closed_form_to_twelve_digits_and_epsilon_its_inverse(mu, delta):
    epsilon = epsilon_of(mu, delta)
    assert delta_of(mu, epsilon) <= delta
    exact = exact_delta(mu, epsilon)
    assert abs(delta_of(mu, epsilon) / exact - 1) < 1e-12
    if epsilon > 0:
        assert (
            exact_delta(mu, epsilon * (1 + 1e-11)) < delta < exact_delta(mu, epsilon * (1 - 1e-11))
        )


@given(mus, deltas)
def test_mu_is_the_inverse_too_and_never_too_large(mu, delta):
    epsilon = epsilon_of(mu, delta)
    if epsilon < 1e-9 * mu:
        return  # there delta hardly depends on epsilon
    largest = mu_of(epsilon, delta)
    assert delta_of(largest, epsilon) <= delta
    assert largest == pytest.approx(mu, rel=1e-11)


@given(mus, st.floats(0, 50), st.floats(0, 3))
def test_delta_falls_with_epsilon_and_grows_with_mu(mu, epsilon, more):
    assert delta_of(mu, epsilon + more) <= delta_of(mu, epsilon) * (1 + 1e-12)
    assert delta_of(mu * (1 + more), epsilon) >= delta_of(mu, epsilon) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("epsilon", "mu", "sigma"),
    [
        (4, 1.2150, 11.6401),
        (8, 2.0833, 6.7884),
        (12, 2.8165, 5.0212),
        (16, 3.4649, 4.0815),
        (20, 4.0531, 3.4892),
    ],
)
def test_the_mu_of_a_budget_and_the_noise_of_200_rounds_are_those_of_udp(epsilon, mu, sigma):
    assert mu_of(epsilon, 1e-3) == pytest.approx(mu, abs=5e-5)
    assert math.sqrt(200) / mu_of(epsilon, 1e-3) == pytest.approx(sigma, abs=5e-5)


@pytest.mark.parametrize(
    ("epsilon", "squared"),
    [(4, 1.47611), (8, 4.34003), (12, 7.93268), (16, 12.00577), (20, 16.42801)],
)
def test_the_budget_constants_are_those_of_udp(epsilon, squared):
    assert mu_of(epsilon, 1e-3) ** 2 == pytest.approx(squared, rel=1e-5)


def test_a_single_release_needs_the_noise_of_udp():
    assert 1 / mu_of(1, 1e-3) == pytest.approx(2.574657, rel=1e-6)
    assert 1 / mu_of(8, 1e-3) == pytest.approx(0.480014, rel=1e-5)


@pytest.mark.parametrize(
    ("claimed", "true"), [(4, 3.4377), (8, 8.3527), (12, 14.4914), (16, 21.8175), (20, 30.3174)]
)
def test_what_the_papers_noise_gives_is_what_udp_says(claimed, true):
    mu = claimed / math.sqrt(2 * math.log(1000))
    assert epsilon_of(mu, 1e-3) == pytest.approx(true, abs=5e-5)


def test_the_papers_noise_is_too_little_above_epsilon_7_at_delta_one_thousandth():
    def surplus(claimed):
        return epsilon_of(claimed / math.sqrt(2 * math.log(1000)), 1e-3) - claimed

    assert surplus(6.97803) < 0 < surplus(6.97806)
    assert delta_of(20 / math.sqrt(2 * math.log(1000)), 20) == pytest.approx(0.1164, abs=5e-5)


@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.9])
def test_a_budget_is_found_however_large_mu_and_epsilon_are(delta):
    """Of 5e20 the part of epsilon that depends on delta is less than a bit of the other."""
    for exponent in range(-30, 154):
        mu = 5.280373890944614 * 10.0**exponent
        epsilon = epsilon_of(mu, delta)
        assert math.isinf(epsilon) or delta_of(mu, epsilon) <= delta
    for exponent in range(-300, 308):
        epsilon = 1.318 * 10.0**exponent
        assert delta_of(mu_of(epsilon, delta), epsilon) <= delta


def test_extremes():
    assert delta_of(0.0, 0.0) == 0.0
    assert delta_of(0.0, 3.0) == 0.0
    assert delta_of(math.inf, 3.0) == 1.0
    assert delta_of(1e3, 0.0) == 1.0
    assert delta_of(1.0, 1e6) == 0.0
    assert epsilon_of(math.inf, 1e-5) == math.inf
    assert epsilon_of(0.0, 1e-5) == 0.0
    assert epsilon_of(1e200, 1e-5) == math.inf
    assert epsilon_of(1e-6, 1e-5) == 0.0
    assert mu_of(1e-12, 1e-12) > 0
    assert delta_of(mu_of(1e6, 0.999), 1e6) <= 0.999


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mu_of(0, 1e-5), "epsilon = 0: expected a finite number"),
        (lambda: mu_of(-1.0, 1e-5), "epsilon = -1.0"),
        (lambda: mu_of(math.nan, 1e-5), "epsilon = nan"),
        (lambda: mu_of(1.0, 0.0), "delta = 0.0: expected a number strictly between 0 and 1"),
        (lambda: mu_of(1.0, 1), "delta = 1: expected a number strictly between 0 and 1"),
        (lambda: epsilon_of(1.0, math.nan), "delta = nan"),
        (lambda: epsilon_of(-1.0, 1e-5), "mu = -1.0"),
        (lambda: epsilon_of(math.nan, 1e-5), "mu = nan"),
        (lambda: delta_of(1.0, -0.1), "epsilon = -0.1"),
    ],
)
def test_bad_values_are_named(call, text):
    with pytest.raises(InvalidParameterError) as error:
        call()
    assert text in str(error.value)
