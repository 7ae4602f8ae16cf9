import math

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.noise import discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom
from tests.shared.lattice import (
    FIRST,
    SECOND,
    UNDECIDED,
    BoxMuller,
    tell_apart,
)

SIZE = 4_000_000
GRID = 2.0**-20


def box_muller(size: int, dtype: type, seed: int) -> np.ndarray:
    """Return ``size`` normal samples, neighbours in pairs, from 24-bit uniforms."""
    bits = np.random.default_rng(seed).integers(2**24, size=(2, size // 2))
    u, w = ((bits + np.array([[1], [0]])) / 2**24).astype(dtype)
    radius = np.sqrt(dtype(-2) * np.log(u))
    angle = dtype(2 * math.pi) * w
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def candidates(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two vectors on the grid that differ a little in every coordinate."""
    draws = np.random.default_rng(1)
    first = draws.integers(-(2**17), 2**17, size)
    return first * GRID, (first + draws.integers(1, 1000, size)) * GRID


def tail(noise: np.ndarray) -> np.ndarray:
    radius = np.hypot(noise[0::2], noise[1::2])
    return np.repeat(radius > 4.5, 2)


@pytest.mark.parametrize("truth", [FIRST, SECOND])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_float32_sampler_gives_its_tail_away_even_after_rounding_to_a_grid(rounded, truth):
    vectors = candidates(SIZE)
    noise = box_muller(SIZE, np.float32, seed=2)
    released = vectors[truth - 1].astype(np.float32) + noise
    if rounded:
        released = np.rint(released / GRID) * GRID
    # Floats below 8 lie at most 2^-21 apart.
    sampler = BoxMuller(scale=1.0, spacing=GRID if rounded else 2.0**-21)
    verdict = tell_apart(released, *vectors, sampler)
    assert set(np.unique(verdict)) == {UNDECIDED, truth}  # never wrong
    in_tail = verdict[tail(noise)]
    assert in_tail.size > 100
    # At 4.5 the other candidate's radius is near a circle with a chance of some 2 %.
    assert np.mean(in_tail == truth) > 0.95


def test_a_float64_sampler_gives_nearly_every_coordinate_away():
    vectors = candidates(20_000)
    released = vectors[1] + 3.0 * box_muller(20_000, np.float64, seed=3)
    sampler = BoxMuller(scale=3.0, spacing=2.0**-48, error=2.0**-48)
    assert np.mean(tell_apart(released, *vectors, sampler) == SECOND) > 0.999


@pytest.mark.parametrize("truth", [FIRST, SECOND])
def test_against_the_discrete_gaussian_the_attack_guesses(truth):
    vectors = candidates(SIZE)
    sigma = 1 / GRID
    noise = discrete_gaussian(SIZE, sigma, SecureRandom.insecure(4, truth)) * GRID
    released = vectors[truth - 1] + noise
    verdict = tell_apart(released, *vectors, BoxMuller(scale=1.0, spacing=GRID))
    right, wrong = (np.count_nonzero(verdict == answer) / 2 for answer in (truth, 3 - truth))
    assert right + wrong > 500  # pairs on which it says something
    # Either candidate is ruled out with the same chance: Binomial(right + wrong, 1/2).
    assert abs(right - wrong) < 4 * math.sqrt(right + wrong)


def test_pairs_may_lie_apart_and_a_last_coordinate_alone_is_never_ruled_out():
    noise = box_muller(32, np.float64, seed=5)
    spread = noise.reshape(2, 8, 2).transpose(0, 2, 1).reshape(-1)  # in blocks of sixteen
    far = BoxMuller(scale=1.0, spacing=0.0, partner=8, error=2.0**-48)
    near = BoxMuller(scale=1.0, spacing=0.0, partner=1, error=2.0**-48)
    assert far.can_make(spread).all()
    assert near.can_make(noise).all()
    assert not near.can_make(spread).any()
    assert near.can_make(np.append(spread, 1e9)).tolist() == [False] * 32 + [True]


def test_zero_noise_can_be_made():
    assert BoxMuller(scale=1.0, spacing=GRID).can_make(np.zeros(2)).all()


def test_where_the_candidates_agree_nothing_is_decided():
    verdict = tell_apart(np.ones(6), np.zeros(6), np.zeros(6), BoxMuller(scale=1.0, spacing=GRID))
    assert not verdict.any()


@pytest.mark.parametrize(
    ("released", "second", "message"),
    [
        (np.zeros(4), np.zeros(3), r"second = \(3,\): expected the shape of one vector, \(4,\)"),
        (np.zeros((2, 2)), np.zeros(4), r"released = \(2, 2\): expected the shape of one vector"),
    ],
)
def test_vectors_of_other_shapes_are_refused(released, second, message):
    with pytest.raises(InvalidParameterError, match=message):
        tell_apart(released, np.zeros(4), second, BoxMuller(scale=1.0, spacing=GRID))


@pytest.mark.parametrize(
    "change",
    [{"scale": 0.0}, {"spacing": -1.0}, {"uniform_bits": 40}, {"partner": 0}, {"error": 0.0}],
)
def test_a_sampler_out_of_range_is_refused(change):
    with pytest.raises(InvalidParameterError, match=next(iter(change))):
        BoxMuller(**{"scale": 1.0, "spacing": GRID, **change})
