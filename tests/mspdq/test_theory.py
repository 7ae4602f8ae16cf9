"""The facts of the specification that are formulas."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq import (
    lambda_min_U,
    laplace_scale,
    largest_stable,
    max_coupling,
    pi_paper,
    residual,
    rounds_needed,
)
from flwr_privacy.mspdq.theory import k_rounds, lambda2_P
from flwr_privacy.simulations.research.mspdq.bounds import (
    D1,
    D2,
    D3,
    bound_msp,
    bound_mspdq,
    comm_complexity_bound,
    comm_count,
    nu2,
    round_complexity,
)
from flwr_privacy.simulations.research.mspdq.theory import (
    min_bits,
    quantizer_delta,
    stable,
    sum_bits,
    uplink_bits,
)

CONVEX = {"mu": 1.0, "L": 4.0, "E": 5}


def close(value: float, expected: float, rel: float = 1e-6) -> bool:
    return value == pytest.approx(expected, rel=rel)


def consensus_matrix(draws: int, kappa: float) -> np.ndarray:
    return (1 - kappa) * np.eye(draws) + kappa / draws


def joint_matrix(draws: int, kappa: float, a: float) -> np.ndarray:
    u, one = consensus_matrix(draws, kappa), np.eye(draws)
    return np.block([[u - a * one, a * one], [a * one, (1 - a) * one]])


def test_F1_the_spectrum_of_the_consensus_matrix_and_the_bound_of_the_coupling():
    for kappa in (0.1, 0.5, 0.9):
        values = np.linalg.eigvalsh(consensus_matrix(20, kappa))
        np.testing.assert_allclose(values[:-1], lambda_min_U(kappa), rtol=1e-12)
        assert close(values[-1], 1, 1e-12)
    assert lambda_min_U(0.5) == 0.5
    assert close(max_coupling(0.5), 1 / 3, 1e-12)
    assert close(max_coupling(0.1), 0.473684)
    assert close(np.linalg.eigvalsh(joint_matrix(20, 0.5, 0.33)).min(), 0.006, 0.02)
    assert close(np.linalg.eigvalsh(joint_matrix(20, 0.5, 0.34)).min(), -0.012, 0.02)


def test_F2_the_second_eigenvalue_of_the_joint_matrix():
    assert close(lambda2_P(0.5, 0.1), 0.9192582403567, 1e-12)
    assert close(lambda2_P(0.3, 0.2), 0.9, 1e-12)
    values = np.sort(np.linalg.eigvalsh(joint_matrix(20, 0.3, 0.2)))
    np.testing.assert_allclose(values, [0.4] * 19 + [0.6] + [0.9] * 19 + [1.0], rtol=1e-12)
    product, matrix = np.eye(40), joint_matrix(20, 0.5, 0.1)
    for k in range(1, 40):
        product = product @ matrix
        assert np.abs(product - 1 / 40).max() <= lambda2_P(0.5, 0.1) ** k * (1 + 1e-9)


@given(st.floats(0.01, 0.99), st.floats(0.01, 1.5), st.integers(1, 30))
def test_stable_is_a_spectral_radius_below_one_beside_the_average(kappa, a, m):
    u, one = consensus_matrix(2, kappa), np.eye(2)
    # Of (v, H) with H the sum of m hidden sub-states; one eigenvalue is 1, the average.
    matrix = np.block([[u - m * a * one, a * one], [m * a * one, (1 - a) * one]])
    second, largest = np.sort(np.abs(np.linalg.eigvals(matrix)))[-2:]
    if abs(a - largest_stable(kappa, m)) > 1e-6:  # there eigvals decides by rounding errors
        assert stable(kappa, a, m) == (second < 1 and largest < 1 + 1e-9)


def test_F7_the_residual_of_every_coupling():
    assert close(residual([0.1] * 4, 1), 0.4096, 1e-12)
    assert close(residual([0.1] * 10, 1), 0.1073741824, 1e-12)
    assert close(residual([0.1 / (k + 1) for k in range(10)], 1), 0.537678389, 1e-8)
    assert close(residual([0.1 / (k + 1) for k in range(20)], 1), 0.469923)
    assert close(residual([0.1] * 10, 3), 0.0060466, 1e-4)
    for gamma, row in ((0.1, "638 538 470 434"), (0.2, "374 264 201 172"), (0.3, "190 112")):
        for K, expected in zip((4, 10, 20, 30), row.split(), strict=False):
            # In closed form, by the gamma function.
            form = math.gamma(K + 1 - 2 * gamma) / math.gamma(K + 1) / math.gamma(1 - 2 * gamma)
            assert close(residual([gamma / (k + 1) for k in range(K)], 1), form, 1e-12)
            assert round(form * 1000) == int(expected)


def test_rounds_needed_is_the_first_step_below_the_tolerance():
    assert rounds_needed(0.1, lambda k: 0.1, 1) == 11
    assert rounds_needed(0.1, lambda k: 0.1 / (k + 1), 1) == 46753
    assert rounds_needed(0.1, lambda k: 0.2 / (k + 1), 1) == 117
    assert rounds_needed(0.1, lambda k: 0.3 / (k + 1), 1) == 13
    assert rounds_needed(0.1, lambda k: 0.3, 1) == 3
    assert rounds_needed(1.0, lambda k: 0.3, 1) == 0
    assert rounds_needed(1e-9, lambda k: 0.5, 1) == 1
    with pytest.raises(InvalidParameterError, match="1000000 mixing steps leave 1"):
        rounds_needed(0.1, lambda k: 1.0, 1)


def test_F15_the_papers_widths_and_bits():
    assert pi_paper(0.5, 10.0) == 184.0
    assert math.log2(1 + math.sqrt(20 * 2000) * 184) == pytest.approx(15.167, abs=1e-3)
    assert min_bits(20, 2000, 184.0, lag=False) == 16
    assert min_bits(20, 2000, 184.0) == 17


def test_F16_the_papers_number_of_mixing_steps():
    options = {"mu": 0.01, "L": 1.0, "E": 5, "t": 1, "lam": 0.9}
    assert k_rounds(**options, quantized=False) == k_rounds(**options, quantized=True) == 14
    options = {"mu": 1.0, "L": 4.0, "E": 10, "t": 200, "lam": 0.9}
    assert k_rounds(**options, quantized=False) == 46
    assert k_rounds(**options, quantized=True) == 116
    # eta is 1/40, and floats say that its inverse is a little more than 40; 0.2^3 is 1/125
    assert k_rounds(mu=0.27, L=10.0, E=1, t=1, lam=0.9, quantized=True) == 40
    assert k_rounds(mu=1.0, L=31.25, E=1, t=1, lam=0.2, quantized=False) == 3
    assert k_rounds(mu=1e-3, L=1e-4, E=1, t=1, lam=0.9, quantized=False) == 1  # eta is 2000


def theorem_2(eps_s: float = 0.3, *, t: int = 100, M: int = 20, **options: bool) -> float:
    d1 = D1(eps_s, C=1.0, w_max_squared=4.0)
    d2 = D2(d1, sum_p2_sigma=0.1, L=4.0, Gamma=0.2, E=5, G=1.0, M=M)
    return bound_msp(**CONVEX, t=t, x0=2.0, D2=d2, **options)


def test_F17_the_bounds_of_theorems_2_and_3():
    d1 = D1(0.3, C=1.0, w_max_squared=4.0)
    assert close(d1, 9.3066667)
    d2 = D2(d1, sum_p2_sigma=0.1, L=4.0, Gamma=0.2, E=5, G=1.0, M=20)
    assert close(d2, 147.2066667, 1e-9)
    assert close(theorem_2(), 80.955929, 1e-7)
    assert close(theorem_2(tight=True), 10.119491)
    d3 = D3(d=2000, gamma_max=0.1, pi=184.0, B=8, M=20)
    assert close(d3, 0.13016532, 1e-7)
    assert close(bound_mspdq(**CONVEX, t=100, x0=2.0, D2=d2, D3=d3), 81.019521, 1e-7)
    assert close(nu2(**CONVEX, x0=2.0, D=d2 + d3), 589.347328, 1e-8)
    assert close(round_complexity(0.1, **CONVEX, x0=2.0, D=d2 + d3), 2915.7366, 1e-7)


def test_F17_what_makes_the_bounds_smaller():
    splits = [D1(e, C=1.0, w_max_squared=1.0) for e in np.linspace(0, 1, 11)]
    assert np.diff(splits).max() < 0
    np.testing.assert_allclose(splits[:11:5], [8 / 3, 6.5 / 3, 2], rtol=1e-12)
    assert close(splits[3], 2.32666667)
    assert np.diff([theorem_2(t=t) for t in (1, 10, 100, 1000)]).max() < 0
    assert np.diff([theorem_2(M=M) for M in (1, 2, 20, 100)]).max() < 0
    shares = [D3(d=2000, gamma_max=0.1, pi=184.0, B=B, M=20) for B in range(1, 17)]
    assert np.diff(shares).max() < 0


def test_F18_the_papers_count_of_uploads_and_its_bound():
    assert comm_count(100, M=20, **CONVEX, lam=1 / math.e) == 84000
    assert close(comm_complexity_bound(100, M=20, **CONVEX), 165000, 1e-12)
    slow = {"mu": 0.01, "L": 1.0, "E": 5}
    assert comm_count(100, M=20, **slow, lam=0.9) == 30500
    # Proposition 3 takes the rate for 1/e: this "bound" is below the count.
    assert close(comm_complexity_bound(100, M=20, **slow), 18990, 1e-12)


def test_F19_uplink_bits_per_value_and_learning_round():
    def bits(scheme: str, K: int = 0, B: int = 8) -> float:
        return uplink_bits(scheme, 1000, K, B) / 1000

    assert bits("fedavg") == 32
    assert bits("msp", K=4) == 160
    assert [bits("mspdq", K=K, B=B) for K, B in ((10, 8), (20, 6), (30, 8))] == [88, 126, 248]
    assert bits("jopeq") == 8


def test_F20_what_one_rounded_value_tells():
    assert close(quantizer_delta(0.01, 184 * 0.1 / 255), 0.138587, 1e-5)
    assert close(quantizer_delta(0.01, 184 * 0.1 / 2 / 255), 0.277174, 1e-5)
    deltas = [quantizer_delta(0.01, 184 * 0.1 / (k + 1) / 255) for k in range(12)]
    assert [delta == 1 for delta in deltas] == [k >= 7 for k in range(12)]


@given(st.floats(0, 6.999), st.floats(0, 6.999))
def test_F20_the_total_variation_of_stochastic_rounding_is_at_most_delta(x, y):
    laws = np.zeros((2, 9))
    for law, value in zip(laws, (x, y), strict=True):
        law[int(value)] += 1 - value % 1
        law[int(value) + 1] += value % 1
    variation = np.abs(laws[0] - laws[1]).sum() / 2
    assert variation <= quantizer_delta(abs(x - y), 1.0) + 1e-12
    if int(x) == int(y):  # and there it is no less
        assert variation == pytest.approx(quantizer_delta(abs(x - y), 1.0), abs=1e-12)


def test_small_helpers():
    assert laplace_scale(0.5, 10.0) == 0.05
    for levels in (2, 3, 16, 255, 256):
        for draws in (1, 2, 3, 20, 64):
            bits = sum_bits(levels, draws)
            assert 2 ** (bits - 1) <= draws * (levels - 1) < 2**bits
            assert bits <= (levels - 1).bit_length() + math.ceil(math.log2(draws))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: max_coupling(1.0), "kappa = 1.0: expected a number between 0 and 1"),
        (lambda: lambda2_P(0.0, 0.1), "kappa = 0.0"),
        (lambda: stable(0.5, 0.1, 0), "m = 0: expected an integer of at least 1"),
        (lambda: rounds_needed(0.0, lambda k: 0.1, 1), "tolerance = 0.0"),
        (lambda: k_rounds(**CONVEX, t=0, lam=0.5, quantized=True), "t = 0"),
        (lambda: k_rounds(**CONVEX, t=1, lam=1.0, quantized=True), "lam = 1.0"),
        (lambda: quantizer_delta(0.1, 0.0), "step = 0.0"),
        (lambda: laplace_scale(1.0, 0.0), "eps_dp = 0.0"),
        (lambda: uplink_bits("fedprox", 1, 1, 1), "scheme = 'fedprox'"),
        (lambda: D1(1.5, C=1.0, w_max_squared=1.0), "eps_s = 1.5"),
        (lambda: round_complexity(0.0, **CONVEX, x0=1.0, D=1.0), "rho_acc = 0.0"),
    ],
)
def test_what_is_refused(call, text):
    with pytest.raises(InvalidParameterError, match=text):
        call()
