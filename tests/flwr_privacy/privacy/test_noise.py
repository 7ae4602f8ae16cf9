import itertools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy import stats

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy import noise, rejection_sampler
from flwr_privacy.privacy.noise import (
    discrete_gaussian,
    discrete_gaussian_around,
    discrete_laplace,
    discretisation_gap,
)
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.parts import PART

# Seeds are fixed; a right sampler would fail a chi-square test with one seed in 10,000.
LEAST_P = 1e-4


@pytest.fixture
def fresh_samplers():
    """Forget the tables before and after a test that changes how they are made."""
    noise._sampler.cache_clear()
    yield
    noise._sampler.cache_clear()


def probabilities(sample, scale: float, reach: int) -> np.ndarray:
    """Return P(k) for |k| <= reach, from 50 digits."""
    with localcontext(prec=50):
        s = Decimal(scale)
        if sample is discrete_gaussian:
            half = [(-(k * k) / (2 * s * s)).exp() for k in map(Decimal, range(reach + 1))]
        else:
            half = [(-k / s).exp() for k in map(Decimal, range(reach + 1))]
        whole = half[:0:-1] + half
        total = sum(whole)
        return np.array([float(weight / total) for weight in whole])


def p_value(values: np.ndarray, sample, scale: float, reach: int) -> float:
    return p_value_of(values, probabilities(sample, scale, reach))


def p_value_of(values: np.ndarray, chances: np.ndarray) -> float:
    """Chi-square over the integers expected ten times; the outermost take in what is beyond."""
    reach = chances.size // 2
    assert np.abs(values).max() <= reach
    counts = np.bincount(values + reach, minlength=chances.size)
    often = np.flatnonzero(chances * values.size >= 10)
    cuts = [0, *range(often[0] + 1, often[-1] + 1)]
    expected = np.add.reduceat(chances, cuts) * values.size
    return float(stats.chisquare(np.add.reduceat(counts, cuts), expected).pvalue)


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize("sample", [discrete_gaussian, discrete_laplace])
def test_samples_are_int64_of_the_asked_size(sample, size):
    values = sample(size, 5.0, SecureRandom.insecure(0))
    assert values.dtype == np.int64
    assert values.shape == (size,)
    assert sample(0, 5.0, SecureRandom.insecure(0)).shape == (0,)


@pytest.mark.parametrize(
    ("sample", "scale", "reach"),
    [
        (discrete_gaussian, 0.3, 20),
        (discrete_gaussian, 1.0, 30),
        (discrete_gaussian, 7.3, 150),
        (discrete_gaussian, 100.0, 1500),
        (discrete_laplace, 0.3, 30),
        (discrete_laplace, 1.0, 60),
        (discrete_laplace, 7.3, 400),
        (discrete_laplace, 100.0, 4000),
    ],
)
def test_frequencies_are_the_exact_probabilities(sample, scale, reach):
    values = sample(2_000_000, scale, SecureRandom.insecure(1, sample.__name__))
    assert p_value(values, sample, scale, reach) > LEAST_P


def test_a_small_sigma_gives_almost_always_zero():
    values = discrete_gaussian(1_000_000, 0.2, SecureRandom.insecure(2))
    # P(|k| = 1) = 2 exp(-12.5) = 7.45e-6: Poisson(7.45), above 25 with probability 5e-8.
    assert 0 < np.count_nonzero(values) < 25
    assert not discrete_gaussian(100_000, 2.0**-20, SecureRandom.insecure(2)).any()


@pytest.mark.parametrize("sample", [discrete_gaussian, discrete_laplace])
def test_frequencies_over_many_grid_steps(sample):
    scale = 1e5
    values = sample(2_000_000, scale, SecureRandom.insecure(3, sample.__name__))
    reach = int(12 * scale if sample is discrete_gaussian else 40 * scale)
    k = np.arange(-reach, reach + 1, dtype=float)
    f = np.exp(-((k / scale) ** 2) / 2 if sample is discrete_gaussian else -np.abs(k) / scale)
    below = np.concatenate([[0.0], np.cumsum(f)]) / f.sum()
    edges = np.unique(np.searchsorted(below, np.linspace(0, 1, 400)[1:-1]))
    counts = np.diff([0, *np.searchsorted(np.sort(values), edges - reach), values.size])
    chances = np.diff([0.0, *below[edges], 1.0])
    assert stats.chisquare(counts, chances * values.size).pvalue > LEAST_P
    # The last digits are uniform up to 1e-8, far less than a sample shows.
    assert stats.chisquare(np.bincount(values & 15, minlength=16)).pvalue > LEAST_P


@pytest.mark.parametrize("sigma", [2.0**23, 2.0**30, 2.0**40])
def test_moments_where_a_cell_holds_many_integers(sigma):
    size = 2_000_000
    values = discrete_gaussian(size, sigma, SecureRandom.insecure(4, int(sigma)))
    x = values / sigma
    # Five standard errors of the mean, the second and the fourth moment of a normal sample.
    assert abs(x.mean()) < 5 / math.sqrt(size)
    assert abs((x**2).mean() - 1) < 5 * math.sqrt(2 / size)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / size)
    assert stats.kstest(x[:200_000], "norm").pvalue > LEAST_P
    for digits in (values & 255, values >> 3 & 255):
        assert stats.chisquare(np.bincount(digits, minlength=256)).pvalue > LEAST_P


def test_neighbours_and_halves_are_independent():
    values = discrete_gaussian(2_000_000, 3.0, SecureRandom.insecure(5))
    classes = np.digitize(values, [-2, 0, 3])
    for lag in (1, 2, 7, 1000, rejection_sampler._BLOCK, 1_000_000):
        table = np.bincount(classes[lag:] * 4 + classes[:-lag], minlength=16).reshape(4, 4)
        assert stats.chi2_contingency(table).pvalue > LEAST_P


def test_every_place_in_a_block_follows_the_law(monkeypatch):
    monkeypatch.setattr(rejection_sampler, "_BLOCK", 7)
    random = SecureRandom.insecure(6)
    values = np.stack([discrete_gaussian(23, 1.0, random) for _ in range(3000)])
    for place in (0, 5, 6, 7, 13, 14, 20, 21, 22):
        assert p_value(values[:, place], discrete_gaussian, 1.0, 30) > LEAST_P
    # No value is a copy of another place's: nothing was left unwritten or written twice.
    correlations = np.corrcoef(values.T) - np.eye(23)
    assert np.abs(correlations).max() < 5 / math.sqrt(3000)


# Around fractions


def centred(sigma: float, m: Decimal, reach: int) -> np.ndarray:
    """Return P(k) for |k| <= reach around m, from 50 digits."""
    with localcontext(prec=50):
        s = Decimal(sigma)
        weights = [(-((k - m) ** 2) / (2 * s * s)).exp() for k in range(-reach, reach + 1)]
        total = sum(weights)
        return np.array([float(weight / total) for weight in weights])


AROUND = [(1.0, 30), (3.0, 60), (7.3, 150), (100.0, 1500)]


@pytest.mark.parametrize(("sigma", "reach"), AROUND)
@pytest.mark.parametrize(
    ("centre", "bits"), [(0, 16), (1, 1), (-1, 1), (3, 3), (-19_000, 16), (1, 16), (5, 0)]
)
def test_frequencies_around_a_centre_are_the_exact_probabilities(centre, bits, sigma, reach):
    centres = np.full(500_000, centre)
    random = SecureRandom.insecure(1, "around", centre)
    values = discrete_gaussian_around(centres, bits, sigma, random)
    chances = centred(sigma, Decimal(centre) / 2**bits, reach)
    assert p_value_of(values, chances) > LEAST_P


@pytest.mark.parametrize(("sigma", "reach"), AROUND)
def test_every_centre_of_a_vector_has_its_own_law(sigma, reach):
    """Five centres in turns, far from each other, over several blocks."""
    bits, wanted = 4, np.array([0, 5, -8, 16 * 10**6 + 7, -(16 * 10**12) - 3])
    centres = np.tile(wanted, 100_000)
    values = discrete_gaussian_around(centres, bits, sigma, SecureRandom.insecure(2, "turns"))
    for place, centre in enumerate(wanted.tolist()):
        whole = (centre + 8) // 16
        chances = centred(sigma, Decimal(centre) / 16 - whole, reach)
        assert p_value_of(values[place::5] - whole, chances) > LEAST_P
    # Neighbours, and values of one centre, are independent.
    rest = (values - centres / 16) / sigma
    for lag in (1, 5, rejection_sampler._BLOCK):
        assert abs(np.corrcoef(rest[lag:], rest[:-lag])[0, 1]) < 5 / math.sqrt(centres.size)


@pytest.mark.parametrize("sigma", [3.0, 100.0, 2.0**30])
@pytest.mark.parametrize("bits", [1, 16])
def test_a_centre_that_is_moved_by_integers_moves_its_sample(bits, sigma):
    """Bit for bit, up to the largest centres."""
    random = np.random.default_rng(0)
    centres = random.integers(-(2**bits), 2**bits, 200_000)
    most = (2**60 >> bits) - 1
    moves = random.integers(-most, most + 1, centres.size)

    def draw(centres):
        return discrete_gaussian_around(centres, bits, sigma, SecureRandom.insecure(3))

    assert (draw(centres + (moves << bits)) - moves == draw(centres)).all()


@pytest.mark.parametrize("sigma", [1.0, 50.0, 2.0**40])
def test_without_fractions_a_sample_is_the_centre_and_centred_noise(sigma):
    centres = np.random.default_rng(1).integers(-(2**60), 2**60, 200_000)
    values = discrete_gaussian_around(centres, 0, sigma, SecureRandom.insecure(4))
    assert (values - centres == discrete_gaussian(200_000, sigma, SecureRandom.insecure(4))).all()


@pytest.mark.parametrize("sigma", [1e5, 2.0**24, 2.0**40])
def test_moments_around_fractions_where_a_sample_has_many_steps(sigma):
    size, bits = 500_000, 16
    centres = np.random.default_rng(2).integers(-(2**60), 2**60, size)
    values = discrete_gaussian_around(centres, bits, sigma, SecureRandom.insecure(5, int(sigma)))
    x = (values - (centres >> bits) - (centres & 65535) / 65536) / sigma
    assert abs(x.mean()) < 5 / math.sqrt(size)
    assert abs((x**2).mean() - 1) < 5 * math.sqrt(2 / size)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / size)
    assert stats.kstest(x[:200_000], "norm").pvalue > LEAST_P
    assert stats.chisquare(np.bincount(values & 255, minlength=256)).pvalue > LEAST_P


def test_samples_around_fractions_that_are_all_decided_by_integers_have_the_law_too(
    monkeypatch, fresh_samplers
):
    monkeypatch.setattr(rejection_sampler, "_MARGIN", 2.0)
    centres = np.full(6_000, 3)
    values = discrete_gaussian_around(centres, 3, 3.0, SecureRandom.insecure(6))
    assert p_value_of(values, centred(3.0, Decimal("0.375"), 60)) > LEAST_P


def test_samples_around_fractions_are_the_same_for_the_same_stream_and_leave_centres_alone():
    centres = np.arange(-(10**5), 2 * 10**5)
    kept = centres.copy()

    def draw(seed):
        return discrete_gaussian_around(centres, 5, 50.0, SecureRandom.insecure(seed))

    np.testing.assert_array_equal(draw(0), draw(0))
    assert np.mean(draw(0) == draw(1)) < 0.03
    np.testing.assert_array_equal(centres, kept)
    assert draw(0).dtype == np.int64
    assert discrete_gaussian_around(centres[:0], 5, 50.0, SecureRandom()).shape == (0,)
    # A view with strides is read as it is.
    one, other = (
        discrete_gaussian_around(some, 5, 50.0, SecureRandom.insecure(2))
        for some in (centres[::3], centres[::3].copy())
    )
    np.testing.assert_array_equal(one, other)


def test_what_cannot_be_sampled_around_is_refused():
    random, centres = SecureRandom.insecure(0), np.arange(3)

    def refused(message, centres=centres, bits=16, sigma=5.0, random=random):
        with pytest.raises(InvalidParameterError, match=message):
            discrete_gaussian_around(centres, bits, sigma, random)

    for wrong in (np.arange(3.0), np.arange(3, dtype=np.int32), [1, 2], np.zeros((2, 2), np.int64)):
        refused("centres = <class .*>: expected a one-dimensional array of int64", centres=wrong)
    for far in (2**60 + 1, -(2**60) - 1, -(2**63), 2**63 - 1):
        refused(r"centres = 'larger ones': .* from -2\^60 to 2\^60", centres=np.array([0, far, 1]))
    for bits in (-1, 17, 2.0, True):
        refused(f"fraction_bits = {bits}: expected an integer from 0 to 16", bits=bits)
    for sigma in (0.0, 0.99, 2.0**41, math.nan, "3"):
        refused("sigma = .*a finite number from 1.0 to 1099511627776", sigma=sigma)
    refused(r"random = .*expected a \S*SecureRandom", random=np.random.default_rng(0))


@pytest.mark.parametrize("change", [-1, 0, 1])
def test_the_last_block_may_have_any_size(change):
    size = rejection_sampler._BLOCK + change
    values = discrete_gaussian(size, 1e5, SecureRandom.insecure(7))
    assert values.size == size
    assert np.abs(values).max() < 8e5
    assert stats.kstest(values[-3000:] / 1e5, "norm").pvalue > LEAST_P


@pytest.mark.parametrize(
    ("sample", "scale", "reach"),
    [(discrete_gaussian, 0.3, 20), (discrete_gaussian, 7.3, 150), (discrete_laplace, 3.3, 200)],
)
def test_samples_that_are_all_decided_by_integers_have_the_law_too(
    sample, scale, reach, monkeypatch, fresh_samplers
):
    decided = []

    def counting(*arguments, **known):
        decided.append(exact(*arguments, **known))
        return decided[-1]

    exact = rejection_sampler._is_below
    monkeypatch.setattr(rejection_sampler, "_is_below", counting)
    monkeypatch.setattr(rejection_sampler, "_MARGIN", 2.0)
    values = sample(12_000, scale, SecureRandom.insecure(8, sample.__name__))
    assert sum(decided) == 12_000
    assert p_value(values, sample, scale, reach) > LEAST_P


def test_samples_that_are_all_decided_by_floats_are_those_decided_by_tables(
    monkeypatch, fresh_samplers
):
    tables = discrete_gaussian(100_000, 7.3, SecureRandom.insecure(9))
    floats = noise._sampler(noise._Gaussian(7.3))
    bounds = floats.bounds >> 53 << 53
    monkeypatch.setattr(floats, "bounds", bounds)
    values = discrete_gaussian(100_000, 7.3, SecureRandom.insecure(9))
    # The same words make the same proposals; the bits drawn between them move the later ones.
    assert np.mean(values == tables) > 0.9
    assert p_value(values, discrete_gaussian, 7.3, 150) > LEAST_P


def test_equal_streams_give_equal_noise_and_others_do_not():
    def draw(*purpose):
        return discrete_gaussian(1000, 50.0, SecureRandom.insecure(*purpose))

    np.testing.assert_array_equal(draw(0, "noise", 1), draw(0, "noise", 1))
    for other in ((1, "noise", 1), (0, "noise", 2), (0, "noise")):
        # Two independent values are equal with probability 1 / (2 sqrt(pi) 50) = 0.0056.
        assert np.mean(draw(0, "noise", 1) == draw(*other)) < 0.03
    stream = SecureRandom.insecure(0)
    first, second = (discrete_gaussian(1000, 50.0, stream) for _ in range(2))
    assert np.mean(first == second) < 0.03


@pytest.mark.parametrize("size", [PART, PART + 1000, PART * 3 + 5])
def test_large_vectors_are_the_same_on_any_number_of_threads(size, monkeypatch):
    drawn = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        stream = SecureRandom.insecure(11)
        drawn.append((discrete_gaussian(size, 50.0, stream), stream.uint64(3)))
    (values, rest), (others, other_rest) = drawn
    np.testing.assert_array_equal(values, others)
    np.testing.assert_array_equal(rest, other_rest)
    assert values.std() == pytest.approx(50.0, rel=0.01)
    assert p_value(values[-100_000:], discrete_gaussian, 50.0, 1000) > LEAST_P
    # No part is another one.
    parts = [values[start : start + 1000] for start in range(0, size - 1000, PART)]
    for one, other in itertools.combinations(parts, 2):
        assert np.mean(one == other) < 0.03


def test_spawned_streams_differ_and_keep_what_their_parent_is():
    first, second = (SecureRandom.insecure(3).spawn(3) for _ in range(2))
    words = [tuple(stream.uint64(2)) for stream in first]
    assert words == [tuple(stream.uint64(2)) for stream in second]
    parent = SecureRandom.insecure(3)
    words += [tuple(stream.uint64(2)) for _ in range(2) for stream in parent.spawn(1)]
    assert words[3] == words[0]  # the first child of the same bits
    assert len(set(words)) == 4
    assert not any(stream.secure for stream in first)
    assert all(stream.secure for stream in SecureRandom().spawn(2))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 2.0**41, 2.0**-21, "1", True])
def test_a_scale_out_of_range_is_refused(scale):
    random = SecureRandom.insecure(0)
    with pytest.raises(InvalidParameterError, match=r"sigma = .*a finite number from 9.5\S+ to 1"):
        discrete_gaussian(3, scale, random)
    with pytest.raises(InvalidParameterError, match=r"scale = .*a finite number from 9.5\S+ to 1"):
        discrete_laplace(3, scale, random)


@pytest.mark.parametrize("sample", [discrete_gaussian, discrete_laplace])
def test_a_bad_size_or_generator_is_refused(sample):
    for size in (-1, 2.0, True):
        with pytest.raises(InvalidParameterError, match=f"size = {size}: expected an integer of"):
            sample(size, 1.0, SecureRandom.insecure(0))
    with pytest.raises(InvalidParameterError, match=r"random = .*expected a \S*SecureRandom"):
        sample(3, 1.0, np.random.default_rng(0))


def rounded_over_discrete(k: np.ndarray, sigma: float) -> np.ndarray:
    """Return ln P_X(k) / P_Y(k) by quadrature."""
    t, weights = np.polynomial.legendre.leggauss(40)
    c = k[:, None] / sigma**2
    a = (np.exp(-((t / 2) ** 2) / (2 * sigma**2)) * np.cosh(c * t / 2)) @ weights / 2
    partition = 1 + 2 * math.exp(-2 * (math.pi * sigma) ** 2)
    return np.log(a) + math.log(partition)


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def continuous_delta(shift: float, sigma: float, epsilon: float) -> float:
    a, b = shift / (2 * sigma), epsilon * sigma / shift
    return float(stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b))


def discrete_pair(shift: tuple[int, ...], sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the law of the noise and of the noise shifted, enumerated over a box."""
    laws = []
    for move in (0, 1):
        law = np.ones(1)
        for s in shift:
            k = np.arange(-int(13 * sigma), int(13 * sigma) + s + 1) - move * s
            f = np.exp(-((k / sigma) ** 2) / 2)
            law = np.multiply.outer(law, f / f.sum())
        laws.append(law)
    return laws[1], laws[0]


@pytest.mark.parametrize("sigma", [4.0, 5.5, 9.0])
@pytest.mark.parametrize("shift", [(1,), (2,), (5,), (17,), (1, 1), (3, 2), (6, 1)])
def test_the_gap_covers_what_the_grid_costs(sigma, shift):
    p, q = discrete_pair(shift, sigma)
    gap = discretisation_gap(len(shift), sigma)
    norm = math.hypot(*shift)
    for epsilon in np.linspace(0, 4, 41):
        allowed = math.exp(gap) * (
            continuous_delta(norm, sigma, epsilon) + math.exp(epsilon) * 1e-30
        )
        assert hockey_stick(p, q, epsilon + gap) <= allowed + 1e-15


def law_around(centre: float, sigma: float) -> np.ndarray:
    k = np.arange(-int(13 * sigma), int(13 * sigma) + 20) - centre
    f = np.exp(-((k / sigma) ** 2) / 2)
    return f / f.sum()


@pytest.mark.parametrize("sigma", [4.0, 5.5, 9.0])
@pytest.mark.parametrize("centre", [0.0, 0.25, 0.5, -0.375])
@pytest.mark.parametrize("shift", [2.0**-16, 0.5, 1.0, 2.3, 5.75, 17.0])
def test_the_gap_covers_what_the_grid_costs_around_fractions(sigma, centre, shift):
    p, q = law_around(centre, sigma), law_around(centre + shift, sigma)
    gap = discretisation_gap(1, sigma)
    for epsilon in np.linspace(0, 4, 41):
        allowed = continuous_delta(shift, sigma, epsilon) + math.exp(epsilon) * 1e-30
        for one, other in ((p, q), (q, p)):
            assert hockey_stick(one, other, epsilon + gap) <= math.exp(gap) * allowed + 1e-15


@pytest.mark.parametrize("centre", [0.0, 0.25, 0.5])
def test_rounding_around_fractions_is_between_the_bounds_of_the_derivation(centre):
    """ln P_X / P_Y from its definition, with the centre's own partition function."""
    sigma = 4.0
    k = np.arange(-60, 61) - centre
    x = stats.norm.sf((np.abs(k) - 0.5) / sigma) - stats.norm.sf((np.abs(k) + 0.5) / sigma)
    f = np.exp(-((k / sigma) ** 2) / 2)
    log_ratio = np.log(x * f.sum() / f)
    h, c = 1 / (24 * sigma**2), k / sigma**2
    assert (log_ratio <= -h + c**2 / 24 + 1 / (640 * sigma**4) + 1e-11).all()
    assert (log_ratio >= -h + np.maximum(0, c**2 / 24 - c**4 / 960) - 1e-11).all()


@pytest.mark.parametrize("centre", [0.25, 0.5])
@pytest.mark.parametrize("sigma", [4.0, 4.0 / math.sqrt(2)])
def test_partition_functions_around_fractions_differ_by_less_than_the_derivation_says(
    centre, sigma
):
    with localcontext(prec=160):

        def partition(middle):
            energies = ((Decimal(k) - Decimal(middle)) ** 2 / 2 for k in range(-160, 161))
            return sum((-energy / Decimal(sigma) ** 2).exp() for energy in energies)

        log_ratio = (partition(centre) / partition(0.0)).ln()
    assert Decimal(10) ** -140 < abs(log_ratio) < Decimal("1e-66")


def test_without_the_gap_the_discrete_mechanism_is_less_private():
    for sigma, shift, epsilon in ((4.0, 1, 2.5), (5.0, 2, 3.97), (8.0, 4, 3.91)):
        p, q = discrete_pair((shift,), sigma)
        assert hockey_stick(p, q, epsilon) > 1.03 * continuous_delta(shift, sigma, epsilon)


@pytest.mark.parametrize("sigma", [4.0, 10.0, 300.0])
def test_one_coordinate_is_between_the_bounds_of_the_derivation(sigma):
    k = np.arange(0, int(20 * sigma), max(1, int(sigma) // 8)).astype(float)
    log_ratio = rounded_over_discrete(k, sigma)
    h, c = 1 / (24 * sigma**2), k / sigma**2
    upper = -h + c**2 / 24 + 1 / (640 * sigma**4)
    lower = -h + np.maximum(0, c**2 / 24 - c**4 / 960)
    assert (log_ratio <= upper + 1e-14).all()
    assert (log_ratio >= lower - 1e-14).all()


@pytest.mark.parametrize(
    ("dimension", "sigma"), [(1, 4.0), (300, 4.0), (10**4, 8.0), (10**6, 40.0)]
)
def test_the_loss_of_a_whole_vector_stays_within_the_gap_and_comes_near(dimension, sigma):
    random = SecureRandom.insecure(10)
    support = np.arange(0, 12 * sigma)
    by_magnitude = rounded_over_discrete(support, sigma)
    losses = [
        by_magnitude[np.abs(discrete_gaussian(dimension, sigma, random))].sum() for _ in range(30)
    ]
    gap = discretisation_gap(dimension, sigma)
    # The gap holds but for 1e-30 on both sides: about 2 * 12 standard deviations and then some.
    assert max(map(abs, losses)) < gap / 2
    if dimension > 1000:
        assert gap < 40 * np.std(losses) + dimension / sigma**4


@pytest.mark.parametrize(("d", "sigma"), [(10**4, 4.0), (10**6, 5.0), (10**6, 100.0)])
def test_the_gap_is_that_of_the_derivation(d, sigma):
    """Its two inequalities, with the equation for y solved by repetition."""
    h, x = 1 / (24 * sigma**2), math.log(3.001e30)
    b = (x + math.log(2 * d)) / (480 * sigma**4)
    first = h * d - max(0.0, h - b) * (d - 2 * math.sqrt(d * x))
    y = x
    for _ in range(200):
        y = x + d / (640 * sigma**4) + h * (2 * math.sqrt(d * y) + 2 * y)
    second = h * (2 * math.sqrt(d * y) + 2 * y) + d / (640 * sigma**4)
    assert discretisation_gap(d, sigma) == pytest.approx(first + second, rel=2e-9)


def test_the_gap_grows_with_the_dimension_and_falls_with_sigma():
    gaps = [[discretisation_gap(10**d, 4.0 * 2**s) for s in range(20)] for d in range(12)]
    assert (np.diff(gaps, axis=0) > 0).all()
    assert (np.diff(gaps, axis=1) < 0).all()
    assert discretisation_gap(10**6, 2.0**20) < 2e-9


@pytest.mark.parametrize(
    ("dimension", "sigma", "message"),
    [
        (0, 10.0, "dimension = 0: expected an integer from 1 to"),
        (2.0, 10.0, "dimension = 2.0: expected an integer from 1 to"),
        (10, 3.9, "sigma = 3.9: expected a finite number from 4"),
        (10, math.nan, "sigma = nan: expected a finite number from 4"),
    ],
)
def test_a_gap_without_a_proof_is_refused(dimension, sigma, message):
    with pytest.raises(InvalidParameterError, match=message):
        discretisation_gap(dimension, sigma)
