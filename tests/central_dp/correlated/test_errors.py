import numpy as np
import pytest

from flwr_privacy.central_dp.correlated.errors import prefix_error, relative_error
from flwr_privacy.central_dp.correlated.factors import (
    BufferedToeplitzFactor,
    ToeplitzFactor,
    TreeFactor,
)
from flwr_privacy.central_dp.correlated.optimisation import square_root
from flwr_privacy.central_dp.correlated.options import BandedMF, TreeNoise
from flwr_privacy.errors import InvalidParameterError

BUFFERED = BufferedToeplitzFactor(scales=(2**14, 2**13), decays=(3 * 2**14, 2**14))


def matrix_of(factor, rounds):
    if isinstance(factor, TreeFactor):
        return factor.matrix()[:rounds, :rounds]
    index = np.arange(rounds)
    lags = index[:, np.newaxis] - index
    return np.where(lags >= 0, factor.column(rounds)[lags.clip(0)], 0.0)


@pytest.mark.parametrize(
    "factor", [square_root(4), square_root(40), BUFFERED, TreeFactor(rounds=40)]
)
@pytest.mark.parametrize("rounds", [1, 7, 16, 33])
def test_the_error_is_that_of_the_rows_of_the_decoder(factor, rounds):
    decoder = np.tri(rounds) @ np.linalg.inv(matrix_of(factor, rounds))
    rows = np.square(decoder).sum(axis=1)
    assert prefix_error(factor, rounds=rounds) == pytest.approx(np.sqrt(rows.mean()), rel=1e-10)


def test_errors_are_those_of_jax_privacy():
    # jax_privacy 2.3.0.dev0 (commit 8967688), jax 0.10.2, 64-bit floats: sqrt of the mean of
    # toeplitz.per_query_error(strategy_coef=..., n=...), of the buffers with output_scale
    # [0.25, 0.125] and buf_decay [0.75, 0.25], and of optimal_max_error_strategy_coefs(10).
    assert prefix_error(BUFFERED, rounds=50) == pytest.approx(2.563858782794572, rel=1e-11)
    assert prefix_error(square_root(10), rounds=100) == pytest.approx(2.2708008931013683, rel=1e-5)


@pytest.mark.parametrize(
    ("rounds", "separation", "banded", "optimised"),
    [(100, 10, 2.34, 2.41), (200, 20, 3.06, 3.18), (1000, 100, 5.85, 6.11)],
)
def test_banded_noise_beats_independent_noise(rounds, separation, banded, optimised):
    setting = {"rounds": rounds, "separation": separation, "participations": 10}
    for options, gain in ((BandedMF(optimised=False), banded), (BandedMF(), optimised)):
        ours = 1 / relative_error(options.factor(**setting), **setting)
        assert ours == pytest.approx(gain, abs=0.00501)


def test_independent_noise_is_the_measure():
    independent = ToeplitzFactor(coefficients=(2**16,))
    for participations in (1, 4, 9):  # no more than 4 fit
        ours = relative_error(independent, rounds=20, separation=6, participations=participations)
        assert ours == pytest.approx(1, rel=1e-11)


def test_a_tree_is_better_than_independent_noise_and_worse_than_bands():
    setting = {"rounds": 200, "separation": 20, "participations": 10}
    tree = relative_error(TreeNoise().factor(**setting), **setting)
    assert relative_error(BandedMF().factor(**setting), **setting) < tree < 1


@pytest.mark.parametrize(("factor", "rounds"), [(TreeFactor(rounds=4), 5), (BUFFERED, 0)])
def test_wrong_rounds_are_refused(factor, rounds):
    with pytest.raises(InvalidParameterError, match=f"rounds = {rounds}"):
        prefix_error(factor, rounds=rounds)
