from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.central_dp.correlated import sensitivity
from flwr_privacy.central_dp.correlated.factors import (
    BufferedToeplitzFactor,
    ToeplitzFactor,
    TreeFactor,
)
from flwr_privacy.central_dp.correlated.optimisation import square_root
from flwr_privacy.central_dp.correlated.options import BLT, BandedMF
from flwr_privacy.central_dp.correlated.sensitivity import joint_sensitivities, joint_sensitivity
from flwr_privacy.errors import InvalidParameterError

ONE = 2**16
ROUNDS = 8
SETTING = {"rounds": ROUNDS, "separation": 3, "participations": 3}
TOEPLITZ = {
    "independent": ToeplitzFactor(coefficients=(ONE,)),
    "square root": square_root(ROUNDS),
    "three bands": square_root(3),
    "plateau": ToeplitzFactor(coefficients=(ONE, ONE, ONE, 40000, 40000, 1)),
    "longer than the rounds": square_root(20),
    "optimised": BandedMF().factor(**SETTING),
    "optimised, more bands": BandedMF(bands=6).factor(**SETTING),
    "buffered": BufferedToeplitzFactor(scales=(20000, 9000), decays=(60000, 30000)),
    "optimised buffers": BLT().factor(**SETTING),
}


@cache
def patterns(rounds):
    """Return every pattern with a sign per participation, its participations and least distance."""
    every = np.array(list(product((-1, 0, 1), repeat=rounds)))
    every = every[np.abs(every).sum(axis=1) > 0]
    distances = [np.diff(np.flatnonzero(u)).min(initial=10 * rounds) for u in every]
    return every.T, np.abs(every).sum(axis=1), np.array(distances)


def brute_force(matrix, separation):
    """Return the largest norm of the matrix times a pattern, for 1, 2, ... participations."""
    every, counts, distances = patterns(matrix.shape[1])
    norms = np.linalg.norm(matrix @ every, axis=0)
    allowed = distances >= separation
    return [norms[allowed & (counts <= k)].max() for k in range(1, matrix.shape[1] + 1)]


def lower_triangular(column):
    index = np.arange(len(column))
    lags = index[:, np.newaxis] - index
    return np.where(lags >= 0, column[lags.clip(0)], 0.0)


@pytest.mark.parametrize("separation", range(1, ROUNDS + 2))
@pytest.mark.parametrize("name", TOEPLITZ)
def test_a_toeplitz_factor_has_the_sensitivity_of_its_worst_pattern(name, separation):
    factor = TOEPLITZ[name]
    ours = joint_sensitivities(factor, rounds=ROUNDS, separation=separation, participations=ROUNDS)
    truth = brute_force(lower_triangular(factor.column(ROUNDS)), separation)
    assert ours == pytest.approx(truth, rel=1e-11)
    assert (ours >= truth).all()


@settings(max_examples=60)
@given(st.lists(st.integers(0, ONE), max_size=7), st.integers(1, 7), st.integers(1, ROUNDS))
def test_any_toeplitz_factor_has_the_sensitivity_of_its_worst_pattern(tail, separation, rounds):
    factor = ToeplitzFactor(coefficients=(ONE, *sorted(tail, reverse=True)))
    ours = joint_sensitivities(factor, rounds=rounds, separation=separation, participations=rounds)
    truth = brute_force(lower_triangular(factor.column(rounds)), separation)
    assert ours == pytest.approx(truth, rel=1e-11)
    assert (ours >= truth).all()


@pytest.mark.parametrize("one_by_one", [0, 2, 64])
@pytest.mark.parametrize("rounds", [1, 3, 6, 7, 8])
def test_the_bound_of_a_tree_is_never_below_its_worst_pattern(monkeypatch, rounds, one_by_one):
    monkeypatch.setattr(sensitivity, "_ONE_BY_ONE", one_by_one)
    for separation in range(1, rounds + 2):
        ours = joint_sensitivities(
            TreeFactor(rounds=rounds),
            rounds=rounds,
            separation=separation,
            participations=rounds,
        )
        truth = np.array(brute_force(TreeFactor(rounds=rounds).matrix(), separation))
        assert (ours >= truth).all()
        assert ours[0] == pytest.approx(truth[0], rel=1e-11)
        assert (ours <= truth * (1.03 if one_by_one == 64 else 1.2)).all()


@pytest.mark.parametrize("factor", [*TOEPLITZ.values(), TreeFactor(rounds=ROUNDS)])
def test_vectors_in_any_direction_move_no_more(factor):
    rng = np.random.default_rng(5)
    tree = isinstance(factor, TreeFactor)
    matrix = factor.matrix() if tree else lower_triangular(factor.column(ROUNDS))
    for separation in (1, 3):
        chosen = np.zeros((ROUNDS, 4))
        chosen[::separation] = rng.standard_normal(chosen[::separation].shape)
        chosen /= np.maximum(np.linalg.norm(chosen, axis=1, keepdims=True), 1e-300)
        ours = joint_sensitivity(
            factor, rounds=ROUNDS, separation=separation, participations=ROUNDS
        )
        assert np.linalg.norm(matrix @ chosen) <= ours


@pytest.mark.parametrize(
    ("rounds", "bands", "separation", "participations", "expected"),
    [
        (100, 10, 10, 10, 4.232427130602596),
        (100, 30, 10, 5, 4.362302916343018),
        (47, 47, 6, 5, 5.214514416463011),
        (2000, 2000, 100, 20, 17.190574670512067),
    ],
)
def test_sensitivities_are_those_of_jax_privacy(
    rounds, bands, separation, participations, expected
):
    # jax_privacy 2.3.0.dev0 (commit 8967688), jax 0.10.2, 64-bit floats: sqrt of
    # toeplitz.minsep_sensitivity_squared(toeplitz.optimal_max_error_strategy_coefs(bands),
    # separation, n=rounds, max_participations=participations).
    ours = joint_sensitivity(
        square_root(bands), rounds=rounds, separation=separation, participations=participations
    )
    assert ours == pytest.approx(expected, rel=2e-5)  # coefficients are rounded to 2^-17


def test_the_sensitivity_of_buffers_is_that_of_jax_privacy():
    # As above, of BufferedToeplitz.build(buf_decay=[0.75, 0.25], output_scale=[0.25, 0.125])
    # .toeplitz_coefs(50), with separation 7 and 4 participations.
    factor = BufferedToeplitzFactor(scales=(2**14, 2**13), decays=(3 * 2**14, 2**14))
    ours = joint_sensitivity(factor, rounds=50, separation=7, participations=4)
    assert ours == pytest.approx(2.3232101957300944, rel=1e-11)


@pytest.mark.parametrize(
    ("rounds", "separation", "participations", "bound", "excess"),
    [
        (16, 4, 4, 5.477225575051661, 1e-11),
        (47, 6, 5, 7.0710678118654755, 0.011),
        (64, 10, 3, 5.5677643628300215, 1e-11),
        (14, 11, 2, 2.449489742783178, 1e-11),
    ],
)
def test_the_bound_of_a_tree_is_close_to_that_of_jax_privacy(
    rounds, separation, participations, bound, excess
):
    # As above, sensitivity.get_min_sep_sensitivity_upper_bound(matrix, separation, participations)
    # of the same matrix: it has the best pattern of each row by a programme of its own.
    ours = joint_sensitivity(
        TreeFactor(rounds=rounds),
        rounds=rounds,
        separation=separation,
        participations=participations,
    )
    assert bound <= ours <= bound * (1 + excess)


@pytest.mark.parametrize("separation", [1, 4, 40])
@pytest.mark.parametrize("factor", [square_root(300), TreeFactor(rounds=300)])
def test_more_participations_never_move_less(factor, separation):
    every = joint_sensitivities(factor, rounds=300, separation=separation, participations=310)
    possible = -(-300 // separation)
    assert np.all(np.diff(every) >= 0)
    assert np.all(every[possible:] == every[possible - 1])
    for k in (1, 2, possible, 310):
        alone = joint_sensitivity(factor, rounds=300, separation=separation, participations=k)
        assert alone == pytest.approx(every[k - 1], rel=1e-12)


def test_rounding_never_makes_a_sensitivity_smaller():
    # Coefficients and sums are exact in integers: 65,536^2 times the squared norm.
    coefficients = square_root(50).coefficients
    total = np.zeros(500, dtype=object)
    for start in range(0, 500, 30):
        cut = coefficients[: 500 - start]
        total[start : start + len(cut)] += np.array(cut, dtype=object)
    exact = sum(int(v) ** 2 for v in total)
    ours = joint_sensitivity(square_root(50), rounds=500, separation=30, participations=17)
    numerator, denominator = ours.as_integer_ratio()
    assert numerator**2 * ONE**2 >= exact * denominator**2
    assert numerator**2 * ONE**2 * 10**11 <= exact * denominator**2 * (10**11 + 1)


@pytest.mark.parametrize("wrong", ["rounds", "separation", "participations"])
@pytest.mark.parametrize("measure", [joint_sensitivity, joint_sensitivities])
def test_wrong_settings_are_refused(measure, wrong):
    with pytest.raises(InvalidParameterError, match=f"{wrong} = 0"):
        measure(square_root(2), **{**SETTING, wrong: 0})


def test_a_tree_has_no_more_rounds_than_its_own():
    with pytest.raises(InvalidParameterError, match="rounds = 8"):
        joint_sensitivity(TreeFactor(rounds=7), **SETTING)
