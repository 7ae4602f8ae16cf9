"""What the nodes of a zone do with codes: averages, their reach, and noise on the grid."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp import Drift, TierTree, Upload, averaged, noised
from flwr_privacy.m2fdp.sensitivity import Reach
from flwr_privacy.m2fdp.zone_average import GAP, trained
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.privacy.noise import discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom

GRID = CodeGrid(-10)
OWN = Reach(anchor=2, own=2.0)

codes = st.lists(
    st.lists(st.integers(-CODE_LIMIT, CODE_LIMIT), min_size=3, max_size=3), min_size=1, max_size=6
)


def upload(values: list[int], reach: Reach = OWN) -> Upload:
    return Upload(np.array(values, np.int64), reach)


# -- Averages ------------------------------------------------------------------------------------


@given(codes)
@settings(max_examples=60, deadline=None)
def test_an_average_is_the_mean_to_the_nearest_code_halves_up(children: list[list[int]]) -> None:
    mean = averaged([upload(values) for values in children], Drift(), tier=1, grid=GRID)
    half = Fraction(1, 2)
    exact = [Fraction(sum(column), len(children)) for column in zip(*children, strict=True)]
    assert mean.codes.tolist() == [math.floor(value + half) for value in exact]


@given(codes, st.permutations(range(6)))
@settings(max_examples=40, deadline=None)
def test_an_average_does_not_depend_on_the_order_or_on_who_adds_up(
    children: list[list[int]], order: list[int]
) -> None:
    uploads = [upload(values) for values in children]
    shuffled = [uploads[i] for i in order if i < len(uploads)]
    total = np.sum([u.codes for u in uploads], axis=0)
    one, other, third = (
        averaged(given, Drift(), tier=1, grid=GRID)
        for given in (uploads, shuffled, (total, len(uploads), OWN))
    )
    np.testing.assert_array_equal(one.codes, other.codes)
    np.testing.assert_array_equal(one.codes, third.codes)
    assert one.reach == other.reach == third.reach


def test_an_average_has_the_highest_floor_and_is_wide_if_a_child_is() -> None:
    one, other = (replace(upload([1, 2]), floor=floor) for floor in (0.25, 0.5))
    mean = averaged([one, other], Drift(), tier=1, grid=GRID)
    assert (mean.floor, mean.wide) == (0.5, False)
    mean = averaged([one, replace(other, wide=True)], Drift(), tier=1, grid=GRID)
    assert (mean.floor, mean.wide) == (0.5, True)
    mean = averaged((np.array([1, 2]), 4, OWN), Drift(), tier=1, grid=GRID)
    assert (mean.floor, mean.wide) == (0.0, True)


def test_an_average_leaves_what_it_was_given_as_it_was() -> None:
    children = [upload([1, 2, 3]), upload([5, 5, 5])]
    averaged(children, Drift(), tier=1, grid=GRID)
    assert [child.codes.tolist() for child in children] == [[1, 2, 3], [5, 5, 5]]


def test_the_reach_of_an_average_is_a_share_and_what_rounding_adds() -> None:
    size = 25
    for count in (1, 2, 5):
        reach = averaged((np.zeros(size, np.int64), count, OWN), Drift(), tier=1, grid=GRID).reach
        assert reach.total == pytest.approx(2.0 / count + GRID.step * 5, rel=1e-12)


def test_rounding_moves_two_averages_apart_by_no_more_than_the_slack() -> None:
    """One device's codes differ as far as they may, in the worst entries for rounding."""
    size, count = 40, 7
    draws = np.random.default_rng(3)
    reach = averaged((np.zeros(size, np.int64), count, OWN), Drift(), tier=1, grid=GRID).reach
    most = 0.0
    for _ in range(200):
        others = draws.integers(-1000, 1000, size)
        one = draws.integers(-100, 100, size)
        move = draws.normal(size=size)
        move *= 2.0 / GRID.step / np.linalg.norm(move)
        other = one + np.trunc(move).astype(np.int64)  # at most 2.0 away
        means = [
            averaged((others + c, count, OWN), Drift(), tier=1, grid=GRID) for c in (one, other)
        ]
        apart = GRID.step * float(np.linalg.norm(means[0].codes - means[1].codes))
        most = max(most, apart)
        assert apart <= reach.total
    assert most > 2.0 / count  # so the slack is needed


def test_a_tree_of_averages_has_the_reach_of_lemma_1() -> None:
    """Two tiers of a zone, 3 and 4 children: a device's 2.0 becomes 2 / 12, plus rounding."""
    below = averaged(
        (np.zeros(4, np.int64), 4, Reach(anchor=3, own=2.0)), Drift(), tier=2, grid=GRID
    )
    top = averaged([below] * 3, Drift(), tier=1, grid=GRID)
    slack = GRID.step * 2
    assert top.reach.total == pytest.approx(2 / 12 + slack / 3 + slack, rel=1e-12)


def test_training_moves_codes_by_twice_the_bound_and_what_truncation_adds() -> None:
    first = trained(Drift(), Reach(anchor=2), 0.5, 3, GRID, 16)
    assert first.total == 1.0  # codes that are cut towards zero are no longer
    moved = Reach(anchor=1, shared=0.25)
    again = trained(Drift(), moved, 0.5, 3, GRID, 16)
    assert again.total == pytest.approx(1.25)
    lemma = trained(Drift(law="lemma"), moved, 0.5, 3, GRID, 16)
    assert lemma.shared == pytest.approx(0.25 + GRID.step * 4)


def test_nothing_is_bounded_where_nothing_is_clipped() -> None:
    assert trained(Drift(), Reach(anchor=2), 0.0, 3, GRID, 16).total == 0.0


# -- Noise ---------------------------------------------------------------------------------------


def test_noise_is_gaussian_on_the_grid_with_the_standard_deviation_that_was_asked() -> None:
    """20 000 samples of a seeded stream: the variance lies within 5 standard errors (5 %)."""
    size, sigma, grid = 20_000, 0.25, CodeGrid(-30)
    random = SecureRandom.insecure(7, "zone")
    start = np.arange(size, dtype=np.int64) - size // 2
    out = noised(start.copy(), sigma=sigma, grid=grid, random=random)
    assert out.dtype == np.int32
    noise = grid.step * (out - start)
    assert np.var(noise) == pytest.approx(sigma**2, rel=5 * math.sqrt(2 / size))
    assert abs(noise.mean()) < 5 * sigma / math.sqrt(size)
    assert stats.kstest(noise / sigma, "norm").pvalue > 1e-4


def test_two_drawings_differ() -> None:
    zeros = [np.zeros(50, np.int64) for _ in range(2)]
    one, other = (noised(z, sigma=1.0, grid=CodeGrid(-20), random=SecureRandom()) for z in zeros)
    assert (one != other).mean() > 0.9


def test_what_is_beyond_the_codes_saturates() -> None:
    edges = np.array([CODE_LIMIT, -CODE_LIMIT] * 50, np.int64)
    out = noised(edges, sigma=1.0, grid=CodeGrid(-25), random=SecureRandom.insecure(1))
    assert out.dtype == np.int32
    assert abs(out.astype(np.int64)).max() == CODE_LIMIT
    assert (abs(out.astype(np.int64)) == CODE_LIMIT).sum() > 20
    assert (np.sign(out) == [1, -1] * 50).all()


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_a_grid_too_coarse_for_what_is_charged_is_refused(size: int) -> None:
    """The charge has a gap of 1e-9 for the grid; noise of fewer steps would cost more."""
    grid = CodeGrid(-24)
    steps = next(s for s in np.geomspace(4, 1e7, 200) if discretisation_gap(size, s) <= GAP)
    fine = noised(
        np.zeros(size, np.int64), sigma=steps * grid.step, grid=grid, random=SecureRandom()
    )
    assert fine.size == size
    with pytest.raises(
        InvalidParameterError, match=r"^grid = -24: expected a finer grid: the noise"
    ):
        noised(
            np.zeros(size, np.int64),
            sigma=steps * grid.step / 2,
            grid=grid,
            random=SecureRandom(),
        )


# -- The reach of a whole walk is the one that the law of drift has --------------------------------


def test_A22_clean_events_of_a_zone_cost_four_times_the_lemma() -> None:
    tree = TierTree.of_fanouts((1, 5), p=1.0)
    grid, drift, reach = CodeGrid(-40), Drift(), Reach(anchor=tree.depth)
    for event in (1, 1, 1, 0):
        up = trained(drift, reach, 5.0, 5, grid, 10)
        mean = averaged((np.zeros(10, np.int64), 5, up), drift, tier=1, grid=grid)
        reach = drift.broadcast(mean.reach, tier=1) if event else mean.reach
    assert reach.total == pytest.approx(4.0 * (2 * 20 / 5), rel=1e-9)
