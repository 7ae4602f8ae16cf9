"""Samples a law on the integers exactly, by rejection from a histogram of columns.

The law is P(k) = f(k) / sum f with f(k) = exp(-E(k)), where the energy E(k) is a rational number,
even in k, zero at k = 0, convex and growing. (Gaussian: k^2 / (2 sigma^2). Laplace: |k| / scale.)
A Gaussian may have a centre between the integers: see "Centres" below. What follows shows, step by
step, that no rounding error decides which k comes out.

**Cells.** The integers are cut into cells, numbered by z. With ``split = r >= 0`` an integer k has
2^r cells, those with ``z >> r == k``. With ``r < 0`` a cell holds the 2^-r integers k with
``k >> -r == z``, and one of them is drawn uniformly from bits of its own. The shift rounds down, so
both hold for negative z too. The negative half mirrors the other by ``z -> ~z = -1 - z``.

**Columns.** The cells in [-end, end) are cut into columns: column j has the w_j cells from base_j
on. One 64-bit word makes one proposal::

    | column j: 11 bits | v: 21 bits | u: 32 bits |

with the cell z = base_j + x, x = floor(u w_j / 2^32). The 2^32 values of u do not fall evenly on
w_j cells: x comes from n_x = ceil((x + 1) 2^32 / w_j) - ceil(x 2^32 / w_j) of them, which is floor
or ceil of 2^32 / w_j. So the cell is proposed with probability exactly n_x / 2^32 / 2^11.

**Acceptance.** The proposal k is accepted with probability

    alpha = f(k) 2^32 / (C n_x),      C an integer, the same for all columns.        (1)

A proposal then gives k with probability 2^-11 2^r f(k) / C (the sum over 2^r cells, or one cell
times 2^r): proportional to f(k), as it must be. C is large enough that alpha <= 1 everywhere: f is
largest at the end of a column that is next to 0, and n_x >= floor(2^32 / w_j). How the columns were
chosen decides the speed, not the law.

**Tail.** The law has no end, so neither may the proposals. Two columns stand for the rest, k at or
beyond n_T = end / 2^r on either side (k = n or k = ~n with n >= n_T). Such a proposal goes on only
if v = 0. It then draws G with P(G = g) = 2^-(g+1) by tossing coins, and n uniformly from the
2^h integers from n_T + G 2^h on, so n is proposed with probability 2^-11 2^-21 2^-(G+1) 2^-h. It is
accepted with

    alpha = f(k) 2^(r + 21 + G + 1 + h) / C,                                          (2)

which gives k with the same probability 2^-11 2^r f(k) / C as under (1). Here alpha <= 1 because

- 2^h >= scale and n_T >= scale, so that E grows by at least 1/2 + 1 > ln 2 (Gaussian) or 1 > ln 2
  (Laplace) over 2^h integers beyond n_T: f(n_T + G 2^h) <= 2^-G f(n_T); and
- n_T is chosen with E(n_T) >= 0.7 (r + 22 + h - 13), where 0.7 > ln 2, and C >= 2^13 because
  f(0) = 1 and the first column has at least 2^13 cells: f(n_T) 2^(r + 22 + h) <= C.

Columns left over are never accepted. A rejected proposal is drawn again from fresh bits.

**Centres.** A sample around c = c' + m, with c' an integer, |m| <= 1/2 and m a multiple of 2^-F, is
c' plus a sample of the law P(k) proportional to f(k - m). Cells, columns, words, C, t_j and n_T
are the same for every m, and (1) and (2) have f(k - m) in place of f(k). So each proposal gives k
with a probability proportional to f(k - m), as it must be, if no alpha exceeds 1 for any m. With m
the distance |k - m| lies between max(0, |k| - 1/2) and |k| + 1/2. C is made for the least distance
in each column, t_j for the largest, and n_T for E(n_T - 1/2). The first column has a distance of 0,
so C >= 2^13 as before; and n_T - 1/2 >= scale, because E(n_T - 1/2) >= 1/2. This leaves more
proposals to step 2 below: 2 % at sigma = 100, and a quarter at sigma = 3.

**Deciding without rounding.** Accepting with probability alpha means: a uniform variate Y on [0, 1)
is below alpha. The 21 bits v are the first bits of Y; more are drawn when they are needed.

1. *By table.* t_j / 2^21 is at most the smallest alpha of column j. If v < t_j then
   Y < (v + 1) / 2^21 <= alpha whatever the other bits are: accept. About 99 % end here.
2. *By float64.* 32 more bits give 53, so that y <= Y < y + 2^-53. `_exp_minus` and (1) give alpha
   with an error below 2^-40, as shown below. With MARGIN = 2^-38, y < alpha - MARGIN accepts and
   y > alpha + MARGIN rejects; what these two sums round off (2^-53) cannot matter. That leaves a
   fraction of 2^-37 undecided.
3. *By integers.* `_is_below` encloses alpha between two rationals and draws bits of Y until it is
   on one side of both. It ends with probability 1, and each answer is exact.

**Error of alpha in step 2.** Only IEEE 754's correctly rounded operations are used, each with a
relative error of at most e = 2^-53; no library's exp.

a. E takes one division and, for the Gaussian, one product; halving is exact. |k - m| is an integer
   below 2^60 over 2^F: rounding it adds e to the quotient. The relative error of E is below 5.02 e.
   E is cut off at 700, beyond which both f and the result are below 2^-1000. So its absolute error
   is below 5.02 * 700 e < 2^-41.2.
b. exp(-E) = 2^-n exp(s) with n = rint(E / ln 2) <= 1010 and s = n ln 2 - E, |s| < 0.35. The
   constant ln 2 is wrong by at most 2^-54, the product by 1010 times that and by 2^-44 of rounding,
   the difference by 2^-54 more. The error of s is below 2^-42.9.
c. Taylor's series to s^13 leaves out less than 0.35^14 / 14! * 1.1 < 2^-57. A Horner step
   s p / i + 1 shrinks the error of p by |s| / i <= 0.35, and the steps add less than 8 e relative
   to the result; ldexp is exact here.
d. C n_x < 2^53 is exact, and the quotient adds e.

In all, relative to alpha <= 1, less than 2^-41.2 + 2^-42.9 + 10 e < 2^-40.8, so below 2^-40 with
room for the products of these errors. The tables are made by the same function, with C rounded up
by 2^-36 and t_j lowered by MARGIN.

Sources: rejection from a histogram is folklore (Devroye, *Non-Uniform Random Variate Generation*,
1986, II.3 and VIII); comparing lazily drawn bits with an exact probability is von Neumann's and
Karney's ("Sampling exactly from the normal distribution", ACM TOMS 2016); the laws are those of
Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", 2020.
"""

import math
from fractions import Fraction
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .randomness import SecureRandom

__all__ = ["Law", "RejectionSampler"]

_COLUMN_BITS, _V_BITS, _U_BITS = 11, 21, 32
_COLUMNS = 1 << _COLUMN_BITS
_TAILS = _COLUMNS - 2  # the last two columns: the positive tail and the negative one
_U_MASK = (1 << _U_BITS) - 1
_V_MASK = (1 << _V_BITS) - 1
_FIRST_COLUMN = 1 << 13  # cells it has at least; C is no smaller
_MARGIN = 2.0**-38
_LARGEST_ENERGY = 700.0
_LN2 = 0.6931471805599453
_TAYLOR_DEGREE = 13
_BLOCK = 1 << 17  # proposals at a time: 3 MB of scratch
_LARGEST = (1 << 63) - (1 << 60) - 1  # of n: int64 also holds the centre

_Number = TypeVar("_Number", float, NDArray[np.float64])


class Law(Protocol):
    """A law on the integers by its energy; see the module's conditions on it."""

    @property
    def scale(self) -> float:
        """Standard deviation or scale, in integers."""

    def energy(self, magnitude: _Number) -> _Number:
        """Return E at ``|k|`` by at most one division and one product, apart from halving."""

    def exact_energy(self, k: Fraction) -> Fraction:
        """Return E at `k`."""


class RejectionSampler:
    """The columns of one law, ready to sample from; read-only, so threads may share them.

    Parameters
    ----------
    law : Law
        The law, with a scale of at most 2^40.
    fraction_bits : int, default 0
        F, from 0 to 16: centres are multiples of ``2**-F``.
    """

    def __init__(self, law: Law, fraction_bits: int = 0) -> None:
        self.law = law
        self.fraction_bits = fraction_bits
        self._reach = 0.5 if fraction_bits else 0.0  # of m: the largest |m|
        spread = math.frexp(max(1.0, 2 * law.scale))[1]  # 2^spread > 2 * scale
        self.split = 25 - spread
        self.tail_bits = math.frexp(law.scale)[1] if law.scale > 1 else 0  # h
        self.tail_start = self._find_tail_start()
        starts, ends, negative = self._cut()
        self.count = starts.size
        widths = (ends - starts).astype(np.uint64)
        fewest = (1 << _U_BITS) // widths
        nearest, farthest = self._ends(starts, ends, negative)
        nearest, farthest = np.maximum(nearest - self._reach, 0), farthest + self._reach
        largest = _exp_minus(law.energy(nearest)) * 2.0**_U_BITS / fewest
        self.constant = math.ceil(float(largest.max()) * (1 + 2.0**-36))
        most = -(-(1 << _U_BITS) // widths.astype(np.int64))
        smallest = _exp_minus(law.energy(farthest)) * 2.0**_U_BITS / (self.constant * most)
        accept = np.clip((smallest - _MARGIN) * 2**_V_BITS, 0, _V_MASK).astype(np.uint64)

        self.widths = np.ones(_COLUMNS, np.uint64)
        self.widths[: self.count] = widths
        self.bases = np.zeros(_COLUMNS, np.int64)
        self.bases[: self.count] = np.where(negative, -ends, starts)
        # Compared with a whole word: the column's own number in front makes v < t_j of it.
        self.bounds = np.arange(_COLUMNS, dtype=np.uint64) << (_V_BITS + _U_BITS)
        self.bounds[: self.count] += accept << _U_BITS

    def sample(
        self, size: int, random: SecureRandom, centres: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return `size` independent samples, around 0 or each around a centre of its own.

        Centres are in steps of ``2**-F``, at most 2^60 of them from 0.
        """
        values = np.empty(size, np.int64)
        scratch = np.empty((3, min(size, _BLOCK)), np.uint64)
        rejected = []
        for start in range(0, size, _BLOCK):
            block = values[start : start + _BLOCK]
            around = None if centres is None else centres[start : start + _BLOCK]
            rejected.append(start + self._propose(block, scratch, random, around))
            if around is not None:
                whole = scratch[2, : block.size].view(np.int64)
                block += self._whole(around, whole)
        again = np.concatenate(rejected) if rejected else np.empty(0, np.int64)
        if again.size:
            around = None if centres is None else centres[again]
            values[again] = self.sample(again.size, random, around)
        return values

    def _whole(self, centres: NDArray[np.int64], out: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write the integers next to the centres to `out`, and return it."""
        np.add(centres, (1 << self.fraction_bits) >> 1, out=out)
        out >>= self.fraction_bits
        return out

    def _propose(
        self,
        out: NDArray[np.int64],
        scratch: NDArray[np.uint64],
        random: SecureRandom,
        centres: NDArray[np.int64] | None = None,
    ) -> NDArray[np.intp]:
        """Write a proposal around m to each place of `out`; return the places that are rejected."""
        words, column, looked_up = scratch[:, : out.size]
        random.fill(words)
        np.right_shift(words, _V_BITS + _U_BITS, out=column)
        places = column.view(np.int64)
        np.take(self.bounds, places, out=looked_up, mode="clip")
        open_ = np.flatnonzero(words >= looked_up)
        np.take(self.widths, places, out=looked_up, mode="clip")
        offset = out.view(np.uint64)
        np.bitwise_and(words, _U_MASK, out=offset)
        offset *= looked_up
        offset >>= _U_BITS
        np.take(self.bases, places, out=looked_up.view(np.int64), mode="clip")
        out += looked_up.view(np.int64)
        if self.split >= 0:
            out >>= self.split
        else:
            out <<= -self.split
            random.fill(looked_up)
            looked_up >>= 64 + self.split
            out += looked_up.view(np.int64)
        if centres is None:
            m = np.zeros(open_.size, np.int64)
        else:
            around = centres[open_]
            m = around - (self._whole(around, np.empty_like(around)) << self.fraction_bits)
        return self._reject(open_, words[open_], m, out, random)

    def _reject(
        self,
        places: NDArray[np.intp],
        words: NDArray[np.uint64],
        m: NDArray[np.int64],
        out: NDArray[np.int64],
        random: SecureRandom,
    ) -> NDArray[np.intp]:
        """Decide the proposals at `places`; return those that are rejected."""
        column = (words >> (_V_BITS + _U_BITS)).view(np.int64)
        v = (words >> _U_BITS) & _V_MASK
        width = self.widths[column]
        first = ((words & _U_MASK) * width >> _U_BITS << _U_BITS).view(np.uint64)  # x 2^32
        ways = _divide_up(first + (1 << _U_BITS), width) - _divide_up(first, width)
        steps = np.abs((out[places] << self.fraction_bits) - m)
        magnitude = steps.astype(np.float64) * 2.0**-self.fraction_bits
        density = _exp_minus(self.law.energy(magnitude))
        alpha = density * 2.0**_U_BITS / (self.constant * ways.astype(np.float64))
        # Words of the tails, and of unused columns, are no proposals of a column.
        alpha[column >= self.count] = -np.inf
        known = (v << 32) | (random.uint64(places.size) >> 32)
        y = known.astype(np.float64) * 2.0**-53
        accepted = y < alpha - _MARGIN
        # Too close for floats, whose error the margin bounds: decided exactly.
        for i in np.flatnonzero(~accepted & (y <= alpha + _MARGIN)):
            accepted[i] = _is_below(
                Fraction(1 << _U_BITS, self.constant * int(ways[i])),
                self.law.exact_energy(int(out[places[i]]) - self._exact(m[i])),
                random,
                known=int(known[i]),
                bits=53,
            )
        for i in np.flatnonzero((column >= _TAILS) & (v == 0)):
            negative = bool(column[i] > _TAILS)
            k = self._tail(random, negative=negative, m=self._exact(m[i]))
            if k is not None:
                out[places[i]], accepted[i] = k, True
        return places[~accepted]

    def _exact(self, m: np.int64) -> Fraction:
        return Fraction(int(m), 1 << self.fraction_bits)

    def _tail(
        self, random: SecureRandom, *, negative: bool, m: Fraction = Fraction(0)
    ) -> int | None:
        """Make one proposal beyond the columns; return it if it is accepted."""
        blocks = 0
        # A geometric number of blocks: the tail has no end.
        while random.bits(1):
            blocks += 1
        n = self.tail_start + (blocks << self.tail_bits) + random.bits(self.tail_bits)
        k = ~n if negative else n
        power = self.split + _V_BITS + blocks + 1 + self.tail_bits
        factor = Fraction(2) ** power / self.constant
        if not _is_below(factor, self.law.exact_energy(k - m), random):
            return None
        if n > _LARGEST:
            raise OverflowError("a value of the noise leaves 64 bits")
        return k

    def _find_tail_start(self) -> int:
        """Return n_T: far enough out, and a multiple of a cell that holds several integers."""
        energy = 0.7 * (self.split + _V_BITS + 1 + self.tail_bits - 13)
        n = math.ceil(max(1.0, self.law.scale))
        while self.law.exact_energy(n - Fraction(self._reach)) < energy:
            n += n // 8 + 1
        return -(-n >> -self.split) << -self.split if self.split < 0 else n

    def _cut(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Cut both halves into columns; return their first and last cells, mirrored, and the half.

        They have nearly the same area, width times the largest f, which grows until they are few
        enough.
        """
        area = float(_FIRST_COLUMN)
        while True:
            halves = [self._boundaries(area, negative) for negative in (False, True)]
            count = sum(len(half) - 1 for half in halves)
            if count <= _TAILS:
                break
            area *= max(1.0005, count / _TAILS)
        starts = np.array(halves[0][:-1] + halves[1][:-1])
        ends = np.array(halves[0][1:] + halves[1][1:])
        return starts, ends, np.arange(count) >= len(halves[0]) - 1

    def _boundaries(self, area: float, negative: bool) -> list[int]:
        # Thousands of steps, which follow from one another: what does not change is looked up once.
        end, split, reach = self._cells(self.tail_start), self.split, self._reach
        energy_of, exp, most = self.law.energy, math.exp, _LARGEST_ENERGY
        found, cell = list[int](), 0
        while cell < end:
            found.append(cell)
            magnitude = (cell >> split if split >= 0 else cell << -split) + negative - reach
            energy = energy_of(magnitude) if magnitude > 0 else 0.0
            width = int(min(area * exp(min(energy, most)), end))
            cell += width if width > 1 else 1
        return [*found, end]

    def _cells(self, n: int) -> int:
        """Return the first cell of the integer n >= 0."""
        return n << self.split if self.split >= 0 else n >> -self.split

    def _ends(
        self, starts: NDArray[np.int64], ends: NDArray[np.int64], negative: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the smallest and the largest ``|k|`` of each column."""
        if self.split >= 0:
            nearest, farthest = starts >> self.split, (ends - 1) >> self.split
        else:
            nearest, farthest = starts << -self.split, (ends << -self.split) - 1
        return (nearest + negative).astype(np.float64), (farthest + negative).astype(np.float64)


def _exp_minus(energy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp(-energy) by IEEE 754's basic operations; the module's text bounds the error."""
    energy = np.minimum(energy, _LARGEST_ENERGY)
    halvings = np.rint(energy / _LN2)
    rest = halvings * _LN2 - energy
    series = np.ones_like(rest)
    for i in range(_TAYLOR_DEGREE, 0, -1):  # rest * series / i + 1, without copies
        series *= rest
        series /= i
        series += 1.0
    return np.ldexp(series, -halvings.astype(np.int32))


def _divide_up(numerator: NDArray[np.uint64], divisor: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (numerator + divisor - 1) // divisor


def _is_below(
    factor: Fraction, energy: Fraction, random: SecureRandom, *, known: int = 0, bits: int = 0
) -> bool:
    """Return whether a uniform variate on [0, 1) is below ``factor * exp(-energy)``.

    The first `bits` bits of the variate are the integer `known`; the others are drawn here.
    """
    while True:
        known, bits = known << 64 | random.bits(64), bits + 64
        precision = bits + 8 + max(0, math.ceil(factor)).bit_length()
        low, high = _exp_bounds(energy, precision)
        # The variate is in [known, known + 1) / 2^bits, the threshold in [low, high] * unit.
        unit = factor * Fraction(1 << bits, 1 << precision)
        if known + 1 <= low * unit:
            return True
        if known >= high * unit:
            return False


def _exp_bounds(energy: Fraction, precision: int) -> tuple[int, int]:
    """Return integers around ``2**precision * exp(-energy)``, for energy >= 0.

    With m such that r = energy / 2^m < 1/2, exp(-energy) is exp(-r) squared m times. All numbers
    are integers in units of 2^-q, rounded down. Term i of Taylor's series is the last one times
    r / i, so it is wrong by at most 1 + (error of the last) / 2 < 2 units. The series stops at term
    N = 0; what follows is below twice that term's true size, hence below 4 units. Rounding r moves
    exp(-r) by at most one unit. So exp(-r) is within 2 N + 5 units of the sum.
    """
    if energy >= precision:  # exp(-energy) < 2^-precision
        return 0, 1
    squarings = max(0, (math.floor(energy) + 1).bit_length() + 1)
    q = precision + squarings + 32
    r = math.floor(energy * (1 << q) / (1 << squarings))
    total = term = 1 << q
    i = 0
    while term:
        i += 1
        term = (term * r >> q) // i
        total += -term if i % 2 else term
    low, high = max(0, total - 2 * i - 5), total + 2 * i + 5
    for _ in range(squarings):
        low, high = low * low >> q, (high * high >> q) + 1
    return low >> (q - precision), (high >> (q - precision)) + 1
