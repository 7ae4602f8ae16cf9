"""The paper's lemma and bounds, what holds of them, and the roundings' variances."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.quantisation import round_stochastic
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.paper.theory import (
    batch_gradient_variance,
    convergence_bound_corrected,
    convergence_bound_paper,
    embedding_error_bound,
    lemma_b2_corrected,
    lemma_b2_paper,
    lemma_b2_paper_inner,
    rounding_variance,
    rounding_variance_bound,
    step_size_paper,
    whole_smoothness,
)

small = st.floats(-3, 3)


def test_F25_the_papers_factor_and_step_size() -> None:
    bound = convergence_bound_paper(L=1, rounds=100, gap=1, gamma=0, sigma=0, variances=[])
    assert bound == pytest.approx(0.17778, abs=5e-6)
    assert step_size_paper(1, 100) == pytest.approx(0.075)


def test_F25_lemma_b2_is_false_and_the_corrected_one_is_tight() -> None:
    # F(w) = w^2 / 2 at w = 1; the gradient is 1, that which is used is 1 - 1 = 0.
    eta, w, gradient, error = 0.5, 1.0, 1.0, -1.0
    truth = (w - eta * (gradient + error)) ** 2 / 2
    assert truth == 0.5
    numbers = {"eta": eta, "L": 1.0, "gradient": [gradient**2], "error": [error**2]}
    assert lemma_b2_paper_inner(w**2 / 2, **numbers) == 0.0
    assert lemma_b2_paper(w**2 / 2, **numbers) == 0.25
    assert lemma_b2_corrected(w**2 / 2, **numbers) == 0.5
    assert eta <= 3 / 4  # as the paper wants it


@given(
    st.lists(st.tuples(small, small, st.floats(0.01, 1)), min_size=1, max_size=4),
    st.floats(0.01, 1),
)
def test_the_corrected_lemma_holds_for_quadratics(
    blocks: list[tuple[float, float, float]], step: float
) -> None:
    """F is a sum of c w^2 / 2 with all c at most L = 1."""
    w, error, c = map(np.array, zip(*blocks, strict=True))
    gradient = c * w
    truth = float((c * (w - step * (gradient + error)) ** 2).sum()) / 2
    bound = lemma_b2_corrected(
        float((c * w**2).sum()) / 2, eta=step, L=1, gradient=gradient**2, error=error**2
    )
    assert truth <= bound + 1e-9


def test_the_corrected_lemma_takes_no_step_larger_than_it_holds_for() -> None:
    with pytest.raises(InvalidParameterError, match="eta"):
        lemma_b2_corrected(1.0, eta=0.6, L=2, gradient=[1], error=[0])


def test_blocks_that_are_smooth_make_a_whole_that_is_less_so() -> None:
    """F(w) = c (w_0 + ... + w_N)^2 / 2: each block's gradient is c times the sum."""
    clients, c = 3, 2.0
    move = np.ones(clients + 1)
    block = abs(c * move.sum()) / np.linalg.norm(move)
    whole = np.linalg.norm(np.full(clients + 1, c * move.sum())) / np.linalg.norm(move)
    assert whole == pytest.approx(whole_smoothness(block, clients))
    # From w = 0 the paper's first inequality in (16) fails with the blocks' constant.
    assert c * move.sum() ** 2 / 2 > block / 2 * (move**2).sum()
    assert c * move.sum() ** 2 / 2 <= whole_smoothness(block, clients) / 2 * (move**2).sum() + 1e-9


def test_the_corrected_bound_follows_from_its_lemma_over_a_run() -> None:
    rng = np.random.default_rng(0)
    w, eta, rounds, variance = 3.0, 0.3, 200, 0.25
    first, squares = w**2 / 2, []
    for _ in range(rounds):  # F(w) = w^2 / 2, with errors of one size in the gradient
        squares.append(w**2)
        w -= eta * (w + math.sqrt(variance) * rng.choice([-1, 1]))
    # V_n enters twice: once would do here, as there is no rounding.
    bound = convergence_bound_corrected(
        L=1, rounds=rounds, eta=eta, gap=first, rounding=0, variances=[variance / 2]
    )
    assert np.mean(squares) <= bound


def test_without_errors_the_corrected_bound_is_the_whole_gap_shared_by_the_rounds() -> None:
    bound = convergence_bound_corrected(
        L=2, rounds=50, eta=0.25, gap=3, rounding=0, variances=[0, 0]
    )
    decrease = 3 - lemma_b2_corrected(3, eta=0.25, L=2, gradient=[bound], error=[0])
    assert 50 * decrease == pytest.approx(3)


def test_more_rounds_lower_the_papers_bound_to_zero_and_the_corrected_one_to_a_floor() -> None:
    variances, floor = [0.5, 0.25], 2 * 4 * 0.01 * 2 + 2 * 0.75
    last = 10**12
    corrected = convergence_bound_corrected(
        L=2, rounds=last, eta=0.1, gap=1, rounding=0.01, variances=variances
    )
    assert corrected == pytest.approx(floor, rel=1e-9)
    paper = convergence_bound_paper(
        L=2, rounds=last, gap=1, gamma=0.1, sigma=1, variances=variances
    )
    assert paper == pytest.approx((32 / 9 + floor) / 1e6, rel=1e-9)


def test_a_batchs_variance_is_the_cited_formula() -> None:
    expected = 32 * 9 * (math.log(2 * 100 / 0.05) + 0.25) / 16
    assert batch_gradient_variance(3, 100, 0.05, 16) == pytest.approx(expected)


# Roundings


@pytest.mark.parametrize(("w", "bits"), [(0.3, 0), (-0.7, 2), (1.62, 3), (0.5, 1)])
def test_the_rounding_variance_is_what_rounding_has(w: float, bits: int) -> None:
    draws = 50_000
    random = SecureRandom.insecure(0, "variance", bits)
    values = round_stochastic(np.full(draws, w * 2**bits), random) / 2**bits
    squares = (values - w) ** 2
    expected = rounding_variance(w, bits)
    assert abs(squares.mean() - expected) <= 5 * squares.std() / math.sqrt(draws) + 1e-12
    assert expected <= rounding_variance_bound(bits)


def test_the_bound_on_the_rounding_variance_is_attained() -> None:
    assert rounding_variance(2.0**-9, 8) == rounding_variance_bound(8) == 4.0**-8 / 4


def test_no_multiple_of_a_weights_square_bounds_its_rounding_variance() -> None:
    """FedVS, Assumption 1, cannot be met: the ratio grows without bound towards zero."""
    ratios = [rounding_variance(z * 2.0**-8, 8) / (z * 2.0**-8) ** 2 for z in (0.1, 0.01, 1e-6)]
    assert ratios[1] == pytest.approx(99)
    assert ratios[2] > 9e5
    assert ratios == sorted(ratios)


@given(st.integers(0, 10), st.integers(0, 10), st.floats(0.1, 1), st.floats(0.1, 3))
def test_the_error_bound_covers_the_worst_roundings(
    data_bits: int, weight_bits: int, x: float, w: float
) -> None:
    """Of one product: the data off by half a step and the weight by one, with either sign."""
    worst = max(
        abs((x + s * 2.0 ** (-data_bits - 1)) * (w + t * 2.0**-weight_bits) - x * w)
        for s in (-1, 1)
        for t in (-1, 1)
    )
    bound = embedding_error_bound(
        1, x_max=x, w_max=w, data_bits=data_bits, weight_bits=weight_bits, divisor=1
    )
    assert worst <= bound * (1 + 1e-9)
