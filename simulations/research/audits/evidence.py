"""Tests of releases against the noise that was paid for, each with its p-value.

The p-value of a test is the chance that a correct scheme gives such evidence or stronger, at most
(by Bonferroni's inequality over all places that a test looks at). Noise is tested for being too
little in any part, of another shape, correlated and repeated; canaries for reaching too far. Too
much noise, or clipping to less, is no breach of a guarantee, and no test looks for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc
from scipy.stats import binom, chi2, kstest, norm

from .observed import Released, Session

__all__ = ["Evidence", "evidence"]

Vector = NDArray[np.float64]

_SAME = 1e-9  # of a standard deviation, within which two numbers are one
_TAIL = 3.0  # standard deviations beyond which values are counted
_LEAST_COMPARED = 32  # coordinates of a release that is compared with others


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one test says.

    Parameters
    ----------
    name : str
        What would be wrong.
    p : float
        Chance of it in a correct scheme, at most.
    found : str, default ""
        What was seen.
    """

    name: str
    p: float
    found: str = ""


def evidence(sessions: Sequence[Session]) -> list[Evidence]:
    """Return what all tests say of some sessions that asked the same."""
    releases = [release for session in sessions for release in session.releases]
    broken = [r for r in releases if not np.isfinite(r.values).all()]
    found = [
        _certain(
            "not finite",
            bool(broken),
            f"{len(broken)} of {len(releases)} releases have NaN or infinity",
        )
    ]
    sound = [r for r in releases if np.isfinite(r.values).all()]
    if sound:
        found += _of_noise(sound)
        found += _of_canaries(sound)
        found += _of_pairs(sessions)
        found += _side_channels(sound)
    for session in sessions:
        found += _of_charges(session)
    found += _of_coins([s.coins.thrown for s in sessions if s.coins is not None], sessions)
    return found


def _of_noise(releases: Sequence[Released]) -> list[Evidence]:
    """Test variance (of all, of each array, release, client, round, coordinate), and shape."""
    all_of_it = np.concatenate([r.noise for r in releases])
    found = [_too_little("noise as a whole", [all_of_it])]
    for name, parts in (
        ("noise of an array", _by_array(releases)),
        ("noise of a release", [r.noise for r in releases]),
        ("noise of a participant", _grouped(releases, 0)),
        ("noise of a round", _grouped(releases, 1)),
        ("noise after a kind of data", _of_kinds(releases)),
        ("noise of a coordinate", _by_coordinate(releases)),
    ):
        found.append(_too_little(name, parts))
    still = int(np.count_nonzero(np.abs(all_of_it) < _SAME))
    # On the grid noise is zero too, with the chance of one step; the grids are far finer.
    found.append(
        Evidence(
            name="entries without noise",
            p=float(binom.sf(still - 1, all_of_it.size, 1e-4)),
            found=f"{still} of {all_of_it.size}",
        )
    )
    found.append(_shape(all_of_it))
    beyond = int(np.count_nonzero(np.abs(all_of_it) > _TAIL))
    chance = 2 * float(norm.sf(_TAIL))
    found.append(
        Evidence(
            name="tails of the noise",
            p=_two_sided(
                float(binom.cdf(beyond, all_of_it.size, chance)),
                float(binom.sf(beyond - 1, all_of_it.size, chance)),
            ),
            found=f"{beyond} beyond {_TAIL:g} sigma, expected {chance * all_of_it.size:.0f}",
        )
    )
    found.append(_within(releases))
    return found


def _too_little(name: str, parts: Sequence[Vector]) -> Evidence:
    """Test whether the variance of some part is too small."""
    sums = np.array([part @ part for part in parts])
    sizes = np.array([part.size for part in parts])
    chances = chi2.cdf(sums, sizes)
    worst = int(np.argmin(chances))
    return Evidence(
        name=name,
        p=min(1.0, float(chances[worst]) * len(parts)),
        found=f"{math.sqrt(sums[worst] / sizes[worst]):.3f} of what was paid for",
    )


def _shape(noise: Vector) -> Evidence:
    """Test the shape of the noise by Kolmogorov and Smirnov's statistic."""
    result = kstest(noise, "norm")
    return Evidence(
        name="shape of the noise",
        p=float(result.pvalue),
        found=f"distance {result.statistic:.4f} from the normal law",
    )


def _within(releases: Sequence[Released]) -> Evidence:
    """Test whether noise repeats within a release: its correlation with itself, at any shift."""
    chance, worst = 1.0, 0.0
    lags = sum(max(0, _size(r) - _LEAST_COMPARED) for r in releases)
    for release in releases:
        noise, size = release.noise, _size(release)
        squares = np.concatenate([[0.0], np.cumsum(noise**2)])
        if size <= _LEAST_COMPARED or squares[-1] == 0:
            continue
        shifts = np.arange(1, size - _LEAST_COMPARED + 1)
        power = np.abs(np.fft.rfft(noise, 2 * size)) ** 2
        products = np.fft.irfft(power, 2 * size)[shifts]
        lengths = np.sqrt(squares[size - shifts] * (squares[-1] - squares[shifts]))
        scores = np.abs(products) / np.maximum(lengths, 1e-300)
        chances = _chance_of(scores, size - shifts)
        chance, worst = min(chance, float(chances.min())), max(worst, float(scores.max()))
    return Evidence(
        name="noise repeats within a release",
        p=min(1.0, chance * lags),
        found=f"largest correlation at a shift: {worst:.2f}",
    )


def _chance_of(correlation: Vector, size: NDArray[np.int64] | int) -> Vector:
    """Return the chance that independent normal vectors are correlated as much, either way.

    The direction of one is uniform, whatever the other is: half of one plus the correlation has the
    law Beta((d - 1) / 2, (d - 1) / 2).
    """
    half = (np.asarray(size) - 1) / 2
    chances: Vector = 2 * betainc(half, half, (1 - np.minimum(correlation, 1.0)) / 2)
    return chances


def _of_canaries(releases: Sequence[Released]) -> list[Evidence]:
    """Test how far canaries reach, for all of them and for each kind."""
    found = []
    for name, those in _kinds(releases):
        scores = np.concatenate([r.excess for r in those])
        if scores.size:
            total = float(scores.sum() / math.sqrt(scores.size))
            found.append((name, total, float(norm.sf(total))))
    if not found:
        return []
    worst = min(found, key=lambda one: one[2])
    return [
        Evidence(
            name="a canary reaches too far",
            p=min(1.0, worst[2] * len(found)),
            found=f"'{worst[0]}': {worst[1]:.1f} standard errors beyond its clipping",
        )
    ]


def _of_pairs(sessions: Sequence[Session]) -> list[Evidence]:
    """Test whether two releases have noise in common, within a session or from one to another."""
    found = []
    by_size = [_by_size(session) for session in sessions]
    within = [
        (size, _correlations(those, those)[np.triu_indices(len(those), 1)])
        for own in by_size
        for size, those in own.items()
    ]
    across = [
        (size, _correlations(those, other[size]).reshape(-1))
        for place, own in enumerate(by_size)
        for other in by_size[place + 1 :]
        for size, those in own.items()
        if size in other
    ]
    for name, pairs in (
        ("the same noise in two releases", within),
        ("noise that comes again in another training", across),
    ):
        count = sum(scores.size for _, scores in pairs)
        if not count:
            continue
        worst = max(float(scores.max(initial=0.0)) for _, scores in pairs)
        chance = min(float(_chance_of(s, size).min(initial=1.0)) for size, s in pairs)
        found.append(
            Evidence(
                name=name,
                p=min(1.0, chance * count),
                found=f"largest correlation of {count} pairs: {worst:.2f}",
            )
        )
    return found


def _correlations(one: Sequence[Released], other: Sequence[Released]) -> Vector:
    """Return the correlations of the noise of all pairs, without their signs."""

    def units(releases: Sequence[Released]) -> Vector:
        noise = np.array([r.noise for r in releases])
        lengths = np.linalg.norm(noise, axis=1, keepdims=True)
        scaled: Vector = noise / np.where(lengths > 0, lengths, 1.0)
        return scaled

    return np.abs(units(one) @ units(other).T)


def _side_channels(releases: Sequence[Released]) -> list[Evidence]:
    """Test whether anything else in the answers depends on the data."""
    said = {repr(r.said) for r in releases}
    return [
        _certain(
            "something beside the noised values depends on data",
            len(said) > 1,
            f"{len(said)} different answers: {' | '.join(sorted(said))[:160]}",
        )
    ]


def _of_charges(session: Session) -> list[Evidence]:
    """Test whether each release is charged, and the charges stay within the budget."""
    claim, answered = session.claim, sum(session.answered.values())
    if math.isinf(claim.epsilon) and not claim.charged and not session.uncharged:
        return []  # nothing is promised
    uneven = len(set(session.weights.values())) > 1
    return [
        _certain(
            "a release is not charged",
            answered > claim.charged or bool(session.uncharged),
            "; ".join(session.uncharged) or f"{answered} releases, {claim.charged} charges",
        ),
        _certain(
            "the charges exceed the budget",
            claim.charged > 0 and claim.epsilon > claim.budget * (1 + 1e-6),
            f"epsilon {claim.epsilon:.4g} of {claim.budget:.4g}",
        ),
        _certain(
            "whether there is an answer depends on data", bool(session.silent), f"{session.silent}"
        ),
        _certain("clients that count alike weigh differently", uneven, str(session.weights)),
    ]


def _of_coins(thrown: Sequence[NDArray[np.bool_]], sessions: Sequence[Session]) -> list[Evidence]:
    """Test whether secret samples have their rate, differ, and do not depend on each other."""
    if not thrown:
        return []
    rate = next(s.coins.rate for s in sessions if s.coins is not None)
    heads, coins = sum(int(t.sum()) for t in thrown), sum(t.size for t in thrown)
    found = [
        Evidence(
            name="more are sampled than was paid for",
            p=float(binom.sf(heads - 1, coins, rate)),
            found=f"{heads} of {coins}, at rate {rate:g}",
        )
    ]
    rounds = [row for t in thrown for row in t]
    # Sizes of samples: of coins they vary, of fixed samples they do not.
    members = rounds[0].size
    spread = float(np.sum([(row.sum() - rate * members) ** 2 for row in rounds]))
    spread /= members * rate * (1 - rate)
    found.append(
        Evidence(
            name="samples of a fixed size",
            p=float(chi2.cdf(spread, len(rounds))),
            found=f"variance {spread / len(rounds):.2f} of that of coins",
        )
    )
    agree = rate**2 + (1 - rate) ** 2
    pairs = [(a, b) for i, a in enumerate(rounds) for b in rounds[i + 1 :]]
    same = [int(np.count_nonzero(a == b)) for a, b in pairs]
    chances = [
        _two_sided(float(binom.cdf(s, members, agree)), float(binom.sf(s - 1, members, agree)))
        for s in same
    ]
    found.append(
        Evidence(
            name="samples that depend on each other",
            p=min(1.0, min(chances, default=1.0) * max(1, len(chances))),
            found=f"two of them agree on {max(same, default=0)} of {members}",
        )
    )
    return found


def _certain(name: str, wrong: bool, found: str) -> Evidence:
    """Return what is plain to see: it never happens to a correct scheme."""
    return Evidence(name=name, p=0.0 if wrong else 1.0, found=found if wrong else "")


def _two_sided(below: float, above: float) -> float:
    return min(1.0, 2 * min(below, above))


def _size(release: Released) -> int:
    return int(release.values.size)


def _by_size(session: Session) -> dict[int, list[Released]]:
    """Return the releases whose noise can be compared, entry by entry."""
    sizes: dict[int, list[Released]] = {}
    for release in session.releases:
        if np.isfinite(release.values).all() and _size(release) >= _LEAST_COMPARED:
            sizes.setdefault(_size(release), []).append(release)
    return sizes


def _kinds(releases: Sequence[Released]) -> list[tuple[str, list[Released]]]:
    kinds = sorted({r.kind for r in releases})
    return [("all", list(releases))] + [(k, [r for r in releases if r.kind == k]) for k in kinds]


def _of_kinds(releases: Sequence[Released]) -> list[Vector]:
    return [np.concatenate([r.noise for r in those]) for _, those in _kinds(releases)[1:]]


def _grouped(releases: Sequence[Released], entry: int) -> list[Vector]:
    """Return the noise of each participant (entry 0 of a place), or of each round (entry 1)."""
    names = sorted({str(r.place[entry]) for r in releases})
    return [
        np.concatenate([r.noise for r in releases if str(r.place[entry]) == name]) for name in names
    ]


def _by_array(releases: Sequence[Released]) -> list[Vector]:
    parts: dict[tuple[tuple[int, ...], int], list[Vector]] = {}
    for release in releases:
        ends = np.cumsum(release.blocks)[:-1]
        for place, part in enumerate(np.split(release.noise, ends)):
            parts.setdefault((release.blocks, place), []).append(part)
    return [np.concatenate(those) for those in parts.values()]


def _by_coordinate(releases: Sequence[Released]) -> list[Vector]:
    rows: list[Vector] = []
    for _, those in groupby(sorted(releases, key=_size), key=_size):
        rows += list(np.array([r.noise for r in those]).T)
    return rows
