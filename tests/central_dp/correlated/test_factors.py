import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.central_dp.correlated.factors import (
    LARGEST_SUM,
    BufferedToeplitzFactor,
    ToeplitzFactor,
    TreeFactor,
    inverse_column,
)
from flwr_privacy.central_dp.correlated.optimisation import square_root
from flwr_privacy.errors import InvalidParameterError

ONE = 2**16
BUFFERED = BufferedToeplitzFactor(scales=(2**14, 2**13), decays=(3 * 2**14, 2**14))


def lower_triangular(column):
    index = np.arange(len(column))
    lags = index[:, np.newaxis] - index
    return np.where(lags >= 0, column[lags.clip(0)], 0.0)


@st.composite
def toeplitz_factors(draw):
    falling = sorted(draw(st.lists(st.integers(0, ONE), max_size=9)), reverse=True)
    return ToeplitzFactor(coefficients=(ONE, *falling))


@st.composite
def buffered_factors(draw):
    count = draw(st.integers(1, 4))
    scales = draw(st.lists(st.integers(1, ONE // count), min_size=count, max_size=count))
    decays = draw(st.lists(st.integers(0, ONE - 1024), min_size=count, max_size=count))
    return BufferedToeplitzFactor(scales=tuple(scales), decays=tuple(decays))


@pytest.mark.parametrize(
    "coefficients",
    [(), (ONE - 1,), (ONE, 5, 6), (ONE, -1), (ONE, 0.5), (ONE, True), (ONE + 1, 1), (ONE,) * 128],
)
def test_coefficients_that_are_no_factor_are_refused(coefficients):
    with pytest.raises(InvalidParameterError, match="coefficients = "):
        ToeplitzFactor(coefficients=coefficients)


def test_coefficients_are_a_tuple():
    with pytest.raises(InvalidParameterError, match=r"a tuple of at least one integer"):
        ToeplitzFactor(coefficients=[ONE])


@pytest.mark.parametrize(
    ("scales", "decays", "wrong"),
    [
        ((), (), "scales"),
        ((0,), (1,), "scales"),
        ((1,), (ONE,), "decays"),
        ((1,), (-1,), "decays"),
        ((1, 1), (1,), "decays"),
        ((2**15, 2**15 + 1), (0, 0), "scales"),
        ((2**15,), (ONE - 1,), "decays"),  # their sum would be 2**15 + 1
    ],
)
def test_buffers_that_are_no_factor_are_refused(scales, decays, wrong):
    with pytest.raises(InvalidParameterError, match=f"{wrong} = "):
        BufferedToeplitzFactor(scales=scales, decays=decays)


def test_weighted_sums_of_noise_fit_into_64_bits():
    widest = ToeplitzFactor(coefficients=(ONE,) * LARGEST_SUM)
    assert sum(widest.coefficients) * 2**40 < 2**63


def test_a_column_is_cut_or_filled_up():
    factor = ToeplitzFactor(coefficients=(ONE, 3, 1))
    assert factor.bands == 3
    assert factor.column(2).tolist() == [1.0, 3 / ONE]
    assert factor.column(5).tolist() == [1.0, 3 / ONE, 1 / ONE, 0.0, 0.0]


def test_a_column_of_buffers_and_its_inverse_are_those_of_jax_privacy():
    # jax_privacy 2.3.0.dev0 (commit 8967688), jax 0.10.2, 64-bit floats: BufferedToeplitz.build(
    # buf_decay=[0.75, 0.25], output_scale=[0.25, 0.125]), toeplitz_coefs(6), inverse() thereof.
    column = [1.0, 0.375, 0.21875, 0.1484375, 0.107421875, 0.07958984375]
    inverse = [1, -0.375, -0.078125, -0.037109375, -0.020751953125, -0.01181030273437501]
    assert BUFFERED.column(6).tolist() == column
    assert inverse_column(BUFFERED, 6) == pytest.approx(inverse, rel=1e-12)


@given(toeplitz_factors() | buffered_factors(), st.integers(1, 40))
def test_a_factor_times_its_inverse_is_one(factor, rounds):
    column = factor.column(rounds)
    assert column[0] == 1.0
    assert column.min() >= 0
    assert np.all(np.diff(column) <= 0)
    product = lower_triangular(column) @ lower_triangular(inverse_column(factor, rounds))
    assert product == pytest.approx(np.eye(rounds), abs=1e-9)


@pytest.mark.parametrize("decays", [(65000, 65000, 65000), (65350, 65443, 65500), (0, 1, 65535)])
def test_the_inverse_of_slow_buffers_is_right_after_many_rounds(decays):
    factor = BufferedToeplitzFactor(scales=(90, 90, 90), decays=decays)
    product = np.convolve(factor.column(2000), inverse_column(factor, 2000))[:2000]
    assert product == pytest.approx(np.eye(1, 2000)[0], abs=1e-10)


@given(toeplitz_factors() | buffered_factors())
def test_sums_of_the_inverse_are_between_zero_and_one(factor):
    sums = np.cumsum(inverse_column(factor, 60))
    assert sums.min() >= -1e-9
    assert sums.max() <= 1 + 1e-9


def test_square_root_coefficients_multiply_to_prefix_sums():
    column = square_root(9).column(9)
    assert np.convolve(column, column)[:9] == pytest.approx(np.ones(9), abs=2**-13)


@pytest.mark.parametrize("rounds", [1, 2, 7, 8, 13])
def test_the_noise_of_a_prefix_of_the_tree_is_that_of_its_binary_expansion(rounds):
    matrix = TreeFactor(rounds=rounds).matrix()
    decoder = np.tri(rounds) @ np.linalg.inv(matrix)
    assert set(matrix.ravel()) | {1.0} <= {0.0, 1.0}
    for prefix in range(1, rounds + 1):
        ends, rest = [], prefix
        while rest:
            ends.append(rest)
            rest &= rest - 1  # without its lowest digit
        assert decoder[prefix - 1].tolist() == [float(e in ends) for e in range(1, rounds + 1)]


def test_a_tree_has_rounds():
    with pytest.raises(InvalidParameterError, match="rounds = 0"):
        TreeFactor(rounds=0)
