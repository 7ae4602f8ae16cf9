"""Each step of the proof in `rejection_sampler`, against arithmetic with many digits."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from flwr_privacy.privacy import rejection_sampler as columns
from flwr_privacy.privacy.noise import LARGEST_CENTRE, _Gaussian, _Laplace
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.rejection_sampler import RejectionSampler

SCALES = [2.0**-20, 0.1, 0.3, 1.0, 7.3, 100.0, 1e5, 2.0**23, 2.0**30, 2.0**40]
LAWS = [(kind(scale), 0) for kind in (_Gaussian, _Laplace) for scale in SCALES]
LAWS += [(_Gaussian(scale), bits) for bits in (1, 16) for scale in SCALES if scale >= 1]

COLUMN, V = 1 << 53, 1 << 32  # the values of the lowest bits of two fields of a word


class Script(SecureRandom):
    """A stream whose first words are given; the rest follow an insecure stream."""

    def __init__(self, *words: int) -> None:
        super().__init__()
        self._key, self.secure = bytes(32), False
        self._ready = b"".join(word.to_bytes(8, "little") for word in words)

    def fill(self, out):
        super().fill(out)
        octets = out.data.cast("B")
        given, self._ready = self._ready[: len(octets)], self._ready[len(octets) :]
        octets[: len(given)] = given


def density(law, k: Fraction | int) -> Decimal:
    energy = law.exact_energy(k)
    return (-Decimal(energy.numerator) / Decimal(energy.denominator)).exp()


def cells(table: RejectionSampler, n: int) -> int:
    return n << table.split if table.split >= 0 else n >> -table.split


def integer(table: RejectionSampler, z: int, *, last: bool = False) -> int:
    if table.split >= 0:
        return z >> table.split
    return ((z + last) << -table.split) - last


@pytest.fixture(params=LAWS, ids=str, scope="module")
def table(request):
    return RejectionSampler(*request.param)


def offsets(table: RejectionSampler) -> list[Fraction]:
    """Return the extremes of m, and 0."""
    return [Fraction(i, 2) for i in (-1, 0, 1)] if table.fraction_bits else [Fraction(0)]


def drawn_centres(table: RejectionSampler, size: int) -> np.ndarray:
    """Return centres up to 2^60 steps from 0; those of a table of integers are 0."""
    words = SecureRandom.insecure(12).uint64(size).view(np.int64)
    return words >> 3 if table.fraction_bits else np.zeros(size, np.int64)


def fraction(table: RejectionSampler, centre: int) -> Fraction:
    """Return m, by the definition."""
    exact = Fraction(int(centre), 2**table.fraction_bits)
    return exact - math.floor(exact + Fraction(1, 2))


def columns_of(table: RejectionSampler) -> list[tuple[int, int, int]]:
    """Return first cell, width and threshold of each column."""
    accept = [int(bound) // V % (1 << 21) for bound in table.bounds]
    entries = zip(table.bases.tolist(), table.widths.tolist(), accept, strict=True)
    return list(entries)[: table.count]


def test_the_columns_cover_all_cells_up_to_the_tails_once(table):
    end = cells(table, table.tail_start)
    assert integer(table, end) == table.tail_start
    position = -end
    for base, width, _ in sorted(columns_of(table)):
        assert base == position
        assert width >= 1
        position += width
    assert position == end
    assert table.count <= columns._TAILS


def test_no_acceptance_probability_exceeds_one_and_no_threshold_the_least_of_them(table):
    with localcontext(prec=60):
        for base, width, threshold in columns_of(table):
            first, last = integer(table, base), integer(table, base + width - 1, last=True)
            ends = [density(table.law, k - m) for k in (first, last) for m in offsets(table)]
            assert base >= 0 or base + width <= 0  # so the ends are the extremes
            fewest, most = 2**32 // width, -(-(2**32) // width)
            assert max(ends) * 2**32 <= table.constant * fewest
            assert Decimal(threshold) / 2**21 <= min(ends) * 2**32 / (table.constant * most)


def test_the_tails_are_below_their_proposals(table):
    n, h = table.tail_start, table.tail_bits
    assert 2**h >= table.law.scale
    assert n - max(offsets(table)) >= table.law.scale
    with localcontext(prec=60, Emin=-(10**17)):
        power = Decimal(2) ** (table.split + 22 + h)
        ends = ((n, 2**h), (-1 - n, -(2**h)))
        for start, step in ((k - m, step) for k, step in ends for m in offsets(table)):
            assert density(table.law, start) * power <= table.constant
            assert table.law.exact_energy(start + step) - table.law.exact_energy(start) > (
                Fraction(math.log(2))
            )


def test_a_proposal_is_its_words_column_and_offset(table):
    words = SecureRandom.insecure(3).uint64(2000)
    out, scratch = np.empty(2000, np.int64), np.empty((3, 2000), np.uint64)
    table._propose(out, scratch, Script(*words.tolist()))
    for word, k in zip(words.tolist(), out.tolist(), strict=True):
        column = word // COLUMN
        if column < table.count:
            base, width = int(table.bases[column]), int(table.widths[column])
            z = base + word % 2**32 * width // 2**32
            assert integer(table, z) <= k <= integer(table, z, last=True)


def test_the_exact_decision_is_given_the_exact_probability(table, monkeypatch):
    asked = []

    def record(factor, energy, random, *, known=0, bits=0):
        asked.append((factor * Fraction(1 << 53), energy, known, bits))
        return True

    monkeypatch.setattr(columns, "_MARGIN", 2.0)
    monkeypatch.setattr(columns, "_is_below", record)
    size = 500
    words = [word | (2**21 - 1) * V for word in SecureRandom.insecure(4).uint64(size).tolist()]
    words = [word for word in words if word // COLUMN < table.count]
    out, scratch = np.empty(len(words), np.int64), np.empty((3, len(words)), np.uint64)
    extra = SecureRandom.insecure(5).uint64(2 * len(words)).tolist()
    centres = drawn_centres(table, len(words))
    table._propose(out, scratch, Script(*words, *extra), centres)
    if table.split < 0:
        extra = extra[len(words) :]  # the others chose among the integers of a cell
    assert len(asked) == len(words)
    for word, k, more, centre, (factor, energy, known, bits) in zip(
        words, out, extra, centres, asked, strict=False
    ):
        width = int(table.widths[word // COLUMN])
        x = word % 2**32 * width // 2**32
        ways = first_above(x + 1, width) - first_above(x, width)
        assert factor == Fraction(2**85, table.constant * ways)
        assert energy == table.law.exact_energy(int(k) - fraction(table, centre))
        assert (known, bits) == (word // V % 2**21 << 32 | more >> 32, 53)


@pytest.mark.parametrize("distance", [2**18, 2**8])  # in units of 2^-53: beyond and in the margin
def test_the_decision_is_right_on_both_sides_of_the_acceptance_probability(table, distance):
    assert 2**8 < columns._MARGIN * 2**53 < 2**18
    decided = {True: 0, False: 0}
    pairs = SecureRandom.insecure(11).uint64(120).reshape(60, 2).tolist()
    for (word, more), centre in zip(pairs, drawn_centres(table, 60), strict=True):
        column, u = word // COLUMN, word % 2**32
        width = int(table.widths[column])
        x = u * width // 2**32
        ways = first_above(x + 1, width) - first_above(x, width)
        k = integer(table, int(table.bases[column]) + x)
        more >>= 64 - max(0, -table.split)
        with localcontext(prec=60):
            m = fraction(table, centre)
            alpha = density(table.law, k + more - m) * 2**32 / (table.constant * ways)
            middle = int(alpha * 2**53)
        for y, below in ((middle - distance, True), (middle + distance, False)):
            if column < table.count and 0 <= y < 2**53:
                script = [column * COLUMN + (y >> 32) * V + u, (y % 2**32) << 32]
                if table.split < 0:
                    script.insert(1, more << 64 + table.split)
                out, scratch = np.empty(1, np.int64), np.empty((3, 1), np.uint64)
                rejected = table._propose(out, scratch, Script(*script), np.array([centre]))
                assert (out[0], rejected.size) == (k + more, 0 if below else 1)
                decided[below] += 1
    assert min(decided.values()) > 10


def first_above(x: int, width: int) -> int:
    """Return how many of the 2**32 values of u have an offset below `x`, by bisection."""
    low, high = 0, 2**32
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle * width // 2**32 < x else (low, middle)
    return low


def test_columns_that_are_left_over_accept_nothing():
    table = RejectionSampler(_Gaussian(1.0))
    spare = list(range(table.count, columns._TAILS))
    assert spare  # else choose another law
    words = [j * COLUMN + v * V for j in spare for v in (0, 2**21 - 1)]
    out, scratch = np.empty(len(words), np.int64), np.empty((3, len(words)), np.uint64)
    rejected = table._propose(out, scratch, Script(*words))
    assert rejected.tolist() == list(range(len(words)))


@pytest.mark.parametrize("m", [Fraction(0), Fraction(3, 8), Fraction(-1, 2)])
@pytest.mark.parametrize("negative", [False, True])
def test_a_tail_proposes_halving_blocks_and_is_given_the_exact_probability(
    negative, m, monkeypatch
):
    asked = []

    def record(factor, energy, random):
        asked.append((factor, energy))
        return True

    monkeypatch.setattr(columns, "_is_below", record)
    table, random, size = RejectionSampler(_Gaussian(7.3), 3), SecureRandom.insecure(6), 4000
    width = 2**table.tail_bits
    proposals = [table._tail(random, negative=negative, m=m) for _ in range(size)]
    blocks = np.zeros(40, int)
    places = np.zeros(width, int)
    for k, (factor, energy) in zip(proposals, asked, strict=True):
        beyond = (-1 - k if negative else k) - table.tail_start
        block, place = divmod(beyond, width)
        blocks[block] += 1
        places[place] += 1
        chance = Fraction(1, 2 ** (block + 1) * width)
        assert factor * chance == Fraction(2) ** (table.split + 21) / table.constant
        assert energy == table.law.exact_energy(k - m)
    halves = np.array([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125])
    counted = [*blocks[:5], blocks[5:].sum()]
    assert stats.chisquare(counted, halves * size).pvalue > 1e-4
    assert stats.chisquare(places).pvalue > 1e-4


@pytest.mark.parametrize("negative", [False, True])
def test_what_a_tail_accepts_has_the_law_and_the_weight_of_the_tail(negative):
    table, random, tries = (
        RejectionSampler(_Laplace(7.3)),
        SecureRandom.insecure(7, negative),
        10_000,
    )
    values = [table._tail(random, negative=negative) for _ in range(tries)]
    n = np.array([-1 - k if negative else k for k in values if k is not None])
    support = np.arange(table.tail_start, table.tail_start + 300)
    f = np.exp(-table.law.energy(support + float(negative)))
    expected = f.sum() * 2.0 ** (table.split + 21) / table.constant
    assert abs(n.size / tries - expected) < 4.5 * math.sqrt(expected / tries)
    counts = np.bincount(n - table.tail_start, minlength=24)
    counted = [*counts[:24], counts[24:].sum()]
    chances = np.array([*f[:24], f[24:].sum()]) / f.sum()
    assert n.size > 200
    assert stats.chisquare(counted, chances * n.size).pvalue > 1e-4


def test_a_tail_is_reached_where_v_is_zero_and_only_there(monkeypatch):
    table = RejectionSampler(_Gaussian(7.3))
    monkeypatch.setattr(table, "_tail", lambda random, negative, m: -999 if negative else 999)
    words = [(columns._TAILS + side) * COLUMN + v * V for side in (0, 1) for v in (0, 1, 2**20)]
    out, scratch = np.empty(6, np.int64), np.empty((3, 6), np.uint64)
    assert table._propose(out, scratch, Script(*words)).tolist() == [1, 2, 4, 5]
    assert out[[0, 3]].tolist() == [999, -999]
    asked = []
    monkeypatch.setattr(table, "_tail", lambda random, negative, m: asked.append((negative, m)))
    assert table._propose(out, scratch, Script(*words)).tolist() == list(range(6))
    around = RejectionSampler(_Gaussian(7.3), 3)
    monkeypatch.setattr(around, "_tail", table._tail)
    around._propose(out, scratch, Script(*words), np.array([13, 0, 0, -5, 0, 0]))
    assert asked == [(False, 0), (True, 0), (False, Fraction(-3, 8)), (True, Fraction(3, 8))]


def test_a_tail_leaves_room_for_the_centre(monkeypatch):
    table, zeros = RejectionSampler(_Gaussian(2.0**40)), SecureRandom.insecure(0)
    monkeypatch.setattr(columns, "_is_below", lambda *_: True)
    monkeypatch.setattr(zeros, "bits", lambda count: 0)
    table.tail_start = columns._LARGEST
    for negative in (False, True):
        k = table._tail(zeros, negative=negative)
        for centre in (-LARGEST_CENTRE, LARGEST_CENTRE):
            assert (k + centre).bit_length() < 64 or k + centre == -(2**63)
    table.tail_start += 1
    with pytest.raises(OverflowError, match="leaves 64 bits"):
        table._tail(zeros, negative=False)


@pytest.mark.parametrize(("sigma", "most"), [(3.0, 0.25), (100.0, 0.02), (1e5, 0.012)])
def test_few_proposals_around_fractions_are_left_to_floats(sigma, most, monkeypatch):
    table, size, left = RejectionSampler(_Gaussian(sigma), 16), 100_000, []
    decide = table._reject

    def counted(places, *others):
        left.append(places.size)
        return decide(places, *others)

    monkeypatch.setattr(table, "_reject", counted)
    table.sample(size, SecureRandom.insecure(8), drawn_centres(table, size))
    assert left[0] < most * size


def test_exp_in_float64_keeps_the_stated_error():
    draws = np.random.default_rng(0)
    energies = np.concatenate(
        [[0.0, 700.0], draws.uniform(0, 700, 1000), draws.uniform(0, 2, 1000)]
    )
    with localcontext(prec=40):
        for energy, value in zip(energies, columns._exp_minus(energies), strict=True):
            exact = (-Decimal(float(energy))).exp()
            assert abs(Decimal(float(value)) / exact - 1) < Decimal(2) ** -42
    assert 0 < columns._exp_minus(np.array([1e6]))[0] < 2.0**-1000


@pytest.mark.parametrize(
    "energy",
    [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(2**53 - 1, 2**52), Fraction(699, 2)],
)
@pytest.mark.parametrize("precision", [1, 64, 700])
def test_the_rational_bounds_of_exp_hold_and_are_tight(energy, precision):
    low, high = columns._exp_bounds(energy, precision)
    with localcontext(prec=600):
        exact = (-Decimal(energy.numerator) / Decimal(energy.denominator)).exp() * 2**precision
        assert low <= exact <= high
    assert high - low <= 3


def test_bits_are_drawn_until_the_comparison_is_certain():
    with localcontext(prec=100):
        threshold = Decimal(-1).exp() * 3 / 4
        digits = [int(threshold * 2**192) >> shift & (2**64 - 1) for shift in (128, 64, 0)]
    first, second, third = digits
    below, above = Script(first, second, third - 1), Script(first, second, third + 1)
    for script, expected in ((below, True), (above, False)):
        # `bits` reads its eight octets as a big-endian number.
        script._ready = b"".join(
            int.from_bytes(script._ready[i : i + 8], "little").to_bytes(8, "big")
            for i in (0, 8, 16)
        )
        assert columns._is_below(Fraction(3, 4), Fraction(1), script) is expected
        assert script._ready == b""


def test_known_bits_count():
    random = SecureRandom.insecure(0)
    half = Fraction(1, 2)
    assert columns._is_below(half, Fraction(0), random, known=0b011, bits=3)
    assert not columns._is_below(half, Fraction(0), random, known=0b100, bits=3)
