import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.distributed_noise import (
    MOST_PARTIES,
    SMALLEST_SHARE,
    log_ratio_bound,
    share_sigma,
    summed_gap,
)
from flwr_privacy.privacy.noise import discrete_gaussian, discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom

# Seeds are fixed; a right sampler would fail a chi-square test with one seed in 10,000.
LEAST_P = 1e-4

PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510"
    "58209749445923078164062862089986280348253421170679"
)
DIGITS = 90


def convolved(one: list[int], other: list[int]) -> list[int]:
    """Return the convolution of two rows of whole numbers, as a product of two long ones."""
    width = (max(one) * max(other) * min(len(one), len(other))).bit_length() // 8 + 1

    def packed(row: list[int]) -> int:
        return int.from_bytes(b"".join(value.to_bytes(width, "little") for value in row), "little")

    size = len(one) + len(other) - 1
    product = (packed(one) * packed(other)).to_bytes(width * size, "little")
    return [int.from_bytes(product[i * width : (i + 1) * width], "little") for i in range(size)]


def exact_log_ratios(sigma: float, centres: Sequence[float]) -> list[Decimal]:
    """Return ln P_S(k) / P_Y(k) for k from the centre to 2 n beyond, enumerated with 90 digits."""
    with localcontext(prec=DIGITS + 30):
        s, parties, far = Decimal(sigma), len(centres), sum(map(Decimal, centres))
        reach = int(sigma * math.sqrt(2 * math.log(10) * (DIGITS + 10))) + 2
        unit = Decimal(10) ** (DIGITS + 20)
        weights = [
            [
                int((-((k - Decimal(c)) ** 2) / (2 * s * s)).exp() * unit)
                for k in map(Decimal, range(-reach, reach + 1))
            ]
            for c in centres
        ]
        sums = reduce(convolved, weights)
        total, middle = Decimal(sum(sums)), len(sums) // 2
        wide = int(reach * math.sqrt(parties)) + 2 + parties
        variance = parties * s * s
        energies = {k: (k - far) ** 2 / (2 * variance) for k in range(-wide, wide + 1)}
        partition = sum((-energy).exp() for energy in energies.values())
        return [
            (sums[middle + k] / total * partition).ln() + energies[k]
            for k in range(int(far), int(far) + 2 * parties + 1)
        ]


@pytest.mark.parametrize("sigma", [1.0, 1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("parties", [1, 2, 3, 8])
def test_the_bound_covers_every_ratio_that_is_enumerated(sigma: float, parties: int) -> None:
    ratios = exact_log_ratios(sigma, [0.0] * parties)
    largest = max(map(abs, ratios))
    assert largest <= Decimal(log_ratio_bound(sigma, parties)) + Decimal(10) ** (5 - DIGITS)
    if parties > 1:  # the figure that Kairouz, Liu and Steinke give
        with localcontext(prec=DIGITS):
            theirs = 10 * sum(
                (-2 * PI * PI * Decimal(sigma) ** 2 * k / (k + 1)).exp() for k in range(1, parties)
            )
        assert largest <= theirs + Decimal(10) ** (5 - DIGITS)


@pytest.mark.parametrize("sigma", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_for_two_parties_the_bound_is_four_times_the_truth(sigma: float) -> None:
    largest = max(map(abs, exact_log_ratios(sigma, [0.0] * 2)))
    assert float(Decimal(log_ratio_bound(sigma, 2)) / largest) == pytest.approx(4, rel=1e-3)


CENTRES = {
    "halves": (0.5, 0.5),
    "a half beside an integer": (0.5, 0.0),
    "steps of 2^-16": (1 / 2**16, 40_000 / 2**16),
    "far apart": (0.25, -1.375),
    "three": (0.5, 0.25, 0.25),
    "thirds, nearly": (21_845 / 2**16, 21_845 / 2**16, 21_846 / 2**16),
    "four": (0.5, 0.5, 0.5, 0.5),
    "four others": (0.125, 0.3125, -0.4375, 0.75),
}


@pytest.mark.parametrize("sigma", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("name", CENTRES)
def test_the_bound_covers_sums_around_fractions(name: str, sigma: float) -> None:
    largest = max(map(abs, exact_log_ratios(sigma, CENTRES[name])))
    bound = log_ratio_bound(sigma, len(CENTRES[name]))
    assert largest <= Decimal(bound) + Decimal(10) ** (5 - DIGITS)


def test_sums_around_fractions_are_no_discrete_gaussians_either() -> None:
    """What the tests above compare differs by more than their digits, and with the centres."""
    largest = {max(map(abs, exact_log_ratios(1.5, CENTRES[name]))) for name in CENTRES}
    assert max(largest) > Decimal(10) ** -10
    assert len(largest) == len(CENTRES)


def test_a_sum_of_discrete_gaussians_is_none() -> None:
    ratios = exact_log_ratios(1.0, [0.0] * 2)
    assert min(ratios) < 0 < max(ratios)
    assert abs(float(max(ratios))) > 1e-4


def test_where_the_proof_ends_the_bound_is_infinite() -> None:
    assert log_ratio_bound(0.3, 2) == math.inf
    assert log_ratio_bound(2.0**-20, 2) == math.inf
    assert log_ratio_bound(2.0**40, MOST_PARTIES) == 0.0


def test_the_smallest_share_costs_nothing_to_speak_of() -> None:
    assert 2 * 2**40 * log_ratio_bound(SMALLEST_SHARE, MOST_PARTIES) < 1e-12
    # What the proof of `summed_gap` takes from the margin of the tail, 3.001 / 3.
    assert math.exp(2**63 * log_ratio_bound(SMALLEST_SHARE, MOST_PARTIES)) < 3.001 / 3


@given(total=st.floats(1e-6, 1e12), parties=st.integers(1, 10**6))
def test_shares_of_all_parties_have_the_variance_of_the_whole(total: float, parties: int) -> None:
    share = Fraction(share_sigma(total, parties))
    assert float(parties * share**2 / Fraction(total) ** 2) == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize(("total", "parties"), [(1.5, 3), (6.0, 9), (40.0, 100)])
def test_sums_of_sampled_shares_are_the_noise_that_was_asked_for(
    total: float, parties: int
) -> None:
    size = 200_000
    random = SecureRandom.insecure(0, "shares", parties)
    share = share_sigma(total, parties)
    values = sum(discrete_gaussian(size, share, random) for _ in range(parties))
    # The exact law of the sum, from the parameter of a share.
    reach = int(12 * share) + 1
    k = np.arange(-reach, reach + 1)
    law = np.exp(-((k / share) ** 2) / 2)
    law = reduce(np.convolve, [law / law.sum()] * parties)
    middle = law.size // 2
    counts = np.bincount(values + middle, minlength=law.size)
    often = np.flatnonzero(law * size >= 10)
    cuts = [0, *range(often[0] + 1, often[-1] + 1)]
    expected = np.add.reduceat(law, cuts) * size
    observed = np.add.reduceat(counts, cuts)
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > LEAST_P
    # Five standard errors of the second moment of a normal sample. A share of 0.87 steps has a
    # variance that is 2e-5 below its parameter's.
    assert abs((values.astype(float) ** 2).mean() / total**2 - 1) < 5 * math.sqrt(2 / size) + 2e-5


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def around(sigma: float, centre: float) -> np.ndarray:
    k = np.arange(-int(13 * sigma), int(13 * sigma) + 1) - centre
    law = np.exp(-((k / sigma) ** 2) / 2)
    return law / law.sum()


@pytest.mark.parametrize("shift", [0.25, 1.0, 1.5, 5.3])
@pytest.mark.parametrize("centres", [(0.5, 0.5), (0.25, 0.5, 0.1), (0.125, 0.375, -0.25, 0.5)])
def test_the_gap_covers_shares_around_fractions(centres: tuple[float, ...], shift: float) -> None:
    """Moving the data moves the sum of the centres by any amount, not by integers alone."""
    sigma, parties = 3.0, len(centres)
    q = reduce(np.convolve, [around(sigma, c) for c in centres])
    p = reduce(np.convolve, [around(sigma, c + shift / parties) for c in centres])
    gap = summed_gap(1, sigma, parties)
    total = sigma * math.sqrt(parties)
    for epsilon in np.linspace(0, 4, 41):
        allowed = continuous_delta(shift, total, epsilon) + math.exp(epsilon) * 1e-30
        assert hockey_stick(p, q, epsilon + gap) <= math.exp(gap) * allowed + 1e-15


def summed_law(sigma: float, parties: int) -> np.ndarray:
    k = np.arange(-int(13 * sigma), int(13 * sigma) + 1)
    law = np.exp(-((k / sigma) ** 2) / 2)
    return reduce(np.convolve, [law / law.sum()] * parties)


def continuous_delta(shift: float, sigma: float, epsilon: float) -> float:
    a, b = shift / (2 * sigma), epsilon * sigma / shift
    return float(stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b))


def exceeds(law: np.ndarray, shift: int, sigma: float, gap: float) -> bool:
    """Return whether noise is less private than continuous noise of parameter sigma and a gap."""
    p, q = np.append(law, np.zeros(shift)), np.append(np.zeros(shift), law)
    return any(
        hockey_stick(p, q, epsilon + gap)
        > math.exp(gap) * (continuous_delta(shift, sigma, epsilon) + math.exp(epsilon) * 1e-30)
        + 1e-15
        for epsilon in np.linspace(0, 4, 41)
    )


@pytest.mark.parametrize("shift", [1, 2, 5, 17])
@pytest.mark.parametrize(("sigma", "parties"), [(3.0, 2), (3.0, 7), (5.5, 3), (4.0, 1)])
def test_the_gap_covers_what_shares_on_the_grid_cost(
    sigma: float, parties: int, shift: int
) -> None:
    total, gap = sigma * math.sqrt(parties), summed_gap(1, sigma, parties)
    assert not exceeds(summed_law(sigma, parties), shift, total, gap)
    # More shares than were counted on are post-processing.
    assert not exceeds(summed_law(sigma, parties + 3), shift, total, gap)


def test_with_one_share_too_few_the_gap_does_not_cover_it() -> None:
    gap = summed_gap(1, 12.0, 4)
    assert not exceeds(summed_law(12.0, 4), 17, 24.0, gap)
    assert exceeds(summed_law(12.0, 3), 17, 24.0, gap)


def test_the_gap_is_that_of_one_discrete_gaussian_and_what_the_ratio_adds() -> None:
    assert summed_gap(1000, 50.0, 4) == discretisation_gap(1000, 100.0)
    d, added = 2**63, 2 * 2**63 * log_ratio_bound(3.0, MOST_PARTIES)
    whole = discretisation_gap(d, 3.0 * 2**20)
    assert summed_gap(d, 3.0, MOST_PARTIES) == pytest.approx(whole + added, rel=1e-12)
    assert added > 1e-8 * whole  # so the assertion above sees it


def test_the_gap_grows_with_the_dimension_and_falls_with_sigma_and_parties() -> None:
    gaps = np.array(
        [
            [[summed_gap(10**d, 3.0 * 2**s, 2 * 4**n) for n in range(5)] for s in range(15)]
            for d in range(0, 12, 2)
        ]
    )
    assert (np.diff(gaps, axis=0) > 0).all()
    assert (np.diff(gaps, axis=1) < 0).all()
    assert (np.diff(gaps, axis=2) < 0).all()


@pytest.mark.parametrize(
    ("dimension", "sigma", "parties", "message"),
    [
        (10, 2.9, 9, r"sigma = 2\.9: expected a finite number from 3\.0 to"),
        (10, 3.5, 1, r"sigma = 3\.5: expected a finite number from 4\.0 to"),
        (10, math.nan, 2, "sigma = nan: expected a finite number from 3"),
        (10, 2.0**40, 4, r"sigma = 1\S+: expected a finite number from 3\.0 to 549755813888\.0"),
        (0, 10.0, 2, "dimension = 0: expected an integer from 1 to"),
        (10, 10.0, 0, "parties = 0: expected an integer from 1 to"),
        (10, 10.0, 2.0, r"parties = 2\.0: expected an integer from 1 to"),
    ],
)
def test_a_gap_without_a_proof_is_refused(dimension, sigma, parties, message) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        summed_gap(dimension, sigma, parties)


@pytest.mark.parametrize(
    ("total", "parties", "message"),
    [
        (0.0, 2, r"total = 0\.0: expected a finite number"),
        (math.inf, 2, "total = inf"),
        (1.0, 0, "parties = 0: expected an integer from 1"),
        (1.0, -3, "parties = -3"),
        (1.0, True, "parties = True"),
    ],
)
def test_a_share_of_nothing_or_among_nobody_is_refused(total, parties, message) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        share_sigma(total, parties)
