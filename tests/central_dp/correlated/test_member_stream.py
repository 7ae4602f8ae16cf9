"""A member's stream: what its sums are a function of, exactly, and what it refuses."""

import math
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.signal import convolve

from flwr_privacy.central_dp.correlated import member_stream as module
from flwr_privacy.central_dp.correlated.factors import (
    FRACTION_BITS,
    BufferedToeplitzFactor,
    ToeplitzFactor,
    TreeFactor,
)
from flwr_privacy.central_dp.correlated.member_stream import MemberStream, shown_gap
from flwr_privacy.central_dp.correlated.options import BandedMF
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.distributed_noise import log_ratio_bound, summed_gap
from flwr_privacy.privacy.noise import discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.documents import dumps, loads

ONE = 2**FRACTION_BITS
ROUNDS = 12
BANDED = BandedMF(optimised=False).factor(rounds=ROUNDS, separation=5, participations=3)


def matrix(factor: ToeplitzFactor, rounds: int = ROUNDS) -> NDArray[np.float64]:
    column = factor.column(rounds)
    lags = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    return np.where(lags >= 0, column[np.clip(lags, 0, None)], 0)


def test_a_round_is_drawn_around_what_the_past_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def around(centres: NDArray[np.int64], *others: Any) -> NDArray[np.int64]:
        asked.append((centres.copy(), *others))
        return np.random.default_rng(len(asked)).integers(-1000, 1000, centres.size)

    monkeypatch.setattr(module, "discrete_gaussian_around", around)
    stream, random = MemberStream(BANDED, 4), SecureRandom()
    noise = np.array([stream.draw(t, 50.0, random) for t in range(1, ROUNDS + 1)])
    past = matrix(BANDED) - np.eye(ROUNDS)
    assert (np.array([centres for centres, *_ in asked]) == -np.rint(past @ noise * ONE)).all()
    assert {tuple(others) for _, *others in asked} == {(FRACTION_BITS, 50.0, random)}


def test_what_c_makes_of_a_stream_has_the_stated_deviation_and_is_independent() -> None:
    size, sigma = 20_000, 20.0
    stream = MemberStream(BANDED, size)
    noise = [stream.draw(t, sigma, SecureRandom.insecure(1, t)) for t in range(1, ROUNDS + 1)]
    z = matrix(BANDED) @ np.array(noise) / sigma
    covariance = z @ z.T / size
    # Five standard errors of normal variances and covariances.
    assert np.abs(covariance - np.eye(ROUNDS)).max() < 5 * math.sqrt(2 / size)


def test_a_block_may_begin_in_any_round_and_has_no_past() -> None:
    early, late = MemberStream(BANDED, 5), MemberStream(BANDED, 5)
    for t in range(1, 5):
        pair = [
            stream.draw(first + t, 50.0, SecureRandom.insecure(2, t))
            for stream, first in ((early, 0), (late, 30))
        ]
        assert (pair[0] == pair[1]).all()
    assert late.drawn == 34


def test_a_stream_that_is_saved_goes_on_as_if_it_was_not() -> None:
    whole, first = MemberStream(BANDED, 5), MemberStream(BANDED, 5)
    for t in range(3, 8):
        drawn = [s.draw(t, 50.0, SecureRandom.insecure(5, t)) for s in (whole, first)]
    resumed = MemberStream(BANDED, 5)
    resumed.load(loads(dumps(first.state())))
    assert len(first.state()["vectors"]) == BANDED.bands - 1
    for t in range(8, ROUNDS + 1):
        drawn = [s.draw(t, 50.0, SecureRandom.insecure(5, t)) for s in (whole, resumed)]
        assert (drawn[0] == drawn[1]).all()
    with pytest.raises(ProtocolError, match="was drawn before"):
        resumed.draw(ROUNDS, 50.0, SecureRandom())


def test_nothing_is_drawn_twice_and_no_round_is_left_out() -> None:
    stream = MemberStream(BANDED, 2)
    stream.draw(3, 50.0, SecureRandom())
    stream.draw(4, 50.0, SecureRandom())
    for server_round in (1, 3, 4):
        with pytest.raises(ProtocolError, match="was drawn before"):
            stream.draw(server_round, 50.0, SecureRandom())
    with pytest.raises(ProtocolError, match="round 5 was left out"):
        stream.draw(6, 50.0, SecureRandom())
    stream.draw(5, 50.0, SecureRandom())


def test_what_is_refused_changes_nothing() -> None:
    stream = MemberStream(BANDED, 2)
    for sigma in (2.9, 2.0**24 * 1.01, math.nan):
        with pytest.raises(InvalidParameterError, match=r"sigma = .*from 3\.0 to 16777216"):
            stream.draw(7, sigma, SecureRandom())
    with pytest.raises(InvalidParameterError, match="server_round = 0"):
        stream.draw(0, 50.0, SecureRandom())
    assert stream.state() == {"drawn": 0, "vectors": {}}
    with pytest.raises(InvalidParameterError, match="size = -1"):
        MemberStream(BANDED, -1)


@pytest.mark.parametrize(
    "factor",
    [BufferedToeplitzFactor(scales=(20_000,), decays=(60_000,)), TreeFactor(rounds=4)],
    ids=["blt", "tree"],
)
def test_other_factors_are_refused(factor: Any) -> None:
    with pytest.raises(InvalidParameterError, match="expected a ToeplitzFactor: for states that"):
        MemberStream(factor, 3)


# What the server sees, enumerated: the laws of sums of one coordinate, over all paths of streams

REACH, BULK = 8, 2  # of the noise of a round, and of what is compared
SIGMA = 1.0  # so that the bounds are far above rounding, and below what a wrong law differs by
LOST = 1e-6  # by paths beyond the reach, relatively, where laws are compared
SHORT = ToeplitzFactor(coefficients=(ONE, ONE // 2, 3 * ONE // 10))


def gaussian(k: Any, sigma: float, centre: Any) -> Any:
    """Return the probability of k under the discrete Gaussian around a centre."""
    support = np.arange(-60, 61) + np.rint(np.asarray(centre))[..., np.newaxis]
    weights = np.exp(-(((support - np.asarray(centre)[..., np.newaxis]) / sigma) ** 2) / 2)
    return np.exp(-(((k - centre) / sigma) ** 2) / 2) / weights.sum(axis=-1)


def path_law(rounds: int, monkeypatch: pytest.MonkeyPatch) -> NDArray[np.float64]:
    """Return the chance of each (w_1, ..., w_T) of a member: index REACH stands for 0.

    A stream goes through all of them at once, each path in a coordinate of its own.
    """
    values = np.arange(-REACH, REACH + 1)
    paths = np.array(list(product(values, repeat=rounds))).T
    chances, rows = np.ones(paths.shape[1]), iter(paths)

    def around(
        centres: NDArray[np.int64], bits: int, sigma: float, _: SecureRandom
    ) -> NDArray[np.int64]:
        noise = next(rows).copy()
        chances[:] *= gaussian(noise, sigma, centres / 2**bits)
        return noise

    with monkeypatch.context() as patch:
        patch.setattr(module, "discrete_gaussian_around", around)
        patch.setattr(module, "SMALLEST_SHARE", SIGMA)
        stream = MemberStream(SHORT, paths.shape[1])
        for t in range(1, rounds + 1):
            stream.draw(t, SIGMA, SecureRandom())
    return chances.reshape([values.size] * rounds)


class Summed:
    """The law of the sum of the streams of some members, over all rounds."""

    def __init__(self, single: NDArray[np.float64], members: int) -> None:
        self.law = reduce(lambda a, b: convolve(a, b, method="direct"), [single] * members)
        self._middle = REACH * members

    def __call__(self, *sums: int) -> float:
        """Return the chance of the sums of the first rounds."""
        rest = self.law[tuple(total + self._middle for total in sums)]
        return float(np.sum(rest))


def past(values: tuple[int, ...]) -> float:
    """Return sum_{i >= 1} c_i w_{t-i} from the w before t."""
    column = SHORT.column(len(values) + 1)[1:]
    return float(sum(c * w for c, w in zip(column, values[::-1], strict=True)))


def both(data: tuple[int, ...], sums: tuple[int, ...], members: int) -> float:
    """Return the law of the first theorem for the opened sums, in product form."""
    chance = 1.0
    for t, y in enumerate(sums):
        centre = data[t] + past(data[:t]) - past(sums[:t])
        chance *= float(gaussian(y, SIGMA * math.sqrt(members), centre))
    return chance


@pytest.mark.parametrize(("members", "rounds"), [(1, 3), (2, 3), (3, 2), (4, 2)])
def test_sums_have_the_law_of_the_first_theorem(
    members: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, data = Summed(path_law(rounds, monkeypatch), members), (2, -1, 3)[:rounds]
    worst = 0.0
    for noise in product(range(-BULK, BULK + 1), repeat=rounds):
        seen = tuple(x + w for x, w in zip(data, noise, strict=True))
        for t in range(rounds):  # y_t, given y_1, ..., y_{t-1}
            given = summed(*noise[: t + 1]) / summed(*noise[:t])
            told = both(data, seen[: t + 1], members) / both(data, seen[:t], members)
            worst = max(worst, abs(math.log(given / told)))
    assert worst <= log_ratio_bound(SIGMA, members) + LOST
    assert members != 2 or worst > 10 * LOST  # so what is lost hides nothing


def shown(
    data: tuple[int, ...], sums: tuple[int, ...], stream: tuple[int, ...], members: int
) -> float:
    """Return the law of the second theorem for the stream of one of some members."""
    chance = 1.0
    for t, w in enumerate(stream):
        rest = sums[t] - data[t] + past(sums[:t]) - past(data[:t])
        parameter = SIGMA * math.sqrt((members - 1) / members)
        chance *= float(gaussian(w, parameter, rest / members - past(stream[:t])))
    return chance


@pytest.mark.parametrize("members", [2, 3, 4])
def test_a_stream_that_is_shown_has_the_law_of_the_second_theorem(
    members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = path_law(2, monkeypatch)
    summed, one, data = Summed(single, members - 1), Summed(single, 1), (1, -2)
    worst = 0.0
    for noise in product(range(-BULK, BULK + 1), repeat=4):
        total, stream = noise[:2], noise[2:]
        seen = tuple(x + w for x, w in zip(data, total, strict=True))
        given = one(*stream) * summed(*(a - b for a, b in zip(total, stream, strict=True)))
        told = both(data, seen, members) * shown(data, seen, stream, members)
        worst = max(worst, abs(math.log(given / told)))
    assert worst <= 2 * log_ratio_bound(SIGMA, members) + LOST


def test_members_that_are_shown_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, one after the first round and one after the second, which has two of them."""
    single, members = path_law(2, monkeypatch), 3
    alone, data = Summed(single, 1), (1, -2)
    worst = 0.0
    for first, second, early, *late in product(range(-BULK, BULK + 1), repeat=5):
        seen = data[0] + first, data[1] + second
        given = alone(early) * alone(*late) * alone(first - early - late[0], second - late[1])
        # What the first one added in the first round is known, and then taken for data.
        known = data[0] + early, data[1]
        told = both(data, seen[:1], members) * shown(data, seen[:1], (early,), members)
        told *= both(known, seen, members - 1) / both(known, seen[:1], members - 1)
        told *= shown(known, seen, tuple(late), members - 1)
        worst = max(worst, abs(math.log(given / told)))
    assert worst <= 2 * log_ratio_bound(SIGMA, members) + LOST


def delta_of(shift: float, sigma: float, epsilon: float) -> float:
    a, b = shift / (2 * sigma), epsilon * sigma / shift
    return float(stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b))


@pytest.mark.parametrize("shift", [1, 3, 8])
def test_a_loss_that_follows_from_the_sum_costs_as_if_it_had_been_there_before(shift: int) -> None:
    """One round, two members; one of them is shown if the sum is large, and not otherwise."""
    sigma, members, k = 6.0, 2, np.arange(-90, 91)
    one = gaussian(k, sigma, 0.0)
    gap = summed_gap(1, sigma, members) + shown_gap(1, sigma, members)
    sums = np.arange(-90, 91)[:, np.newaxis]
    laws = [one * gaussian(sums - x - k, sigma, 0.0) for x in (shift, 0)]
    here, there = (
        np.append(law[sums[:, 0] > 0].ravel(), law[sums[:, 0] <= 0].sum(axis=1)) for law in laws
    )
    costs = []
    for epsilon in np.linspace(0, 4, 21):
        for p, q in ((here, there), (there, here)):
            delta = np.maximum(p - math.exp(epsilon + gap) * q, 0).sum()
            allowed = delta_of(shift, sigma, epsilon) + 2 * math.exp(epsilon) * 1e-30
            assert delta <= math.exp(gap) * allowed + 1e-15
            bare = np.maximum(p - math.exp(epsilon) * q, 0).sum()
            costs.append(bare / delta_of(shift, sigma * math.sqrt(2), epsilon))
    assert max(costs) > 1.1  # it does cost more than if nobody could be lost


def test_the_gap_of_a_stream_that_is_shown() -> None:
    assert shown_gap(10, 8.0, 2) == pytest.approx(discretisation_gap(10, 32**0.5), rel=1e-12)
    assert shown_gap(10, 8.0, 10**9) == pytest.approx(discretisation_gap(10, 8.0), rel=1e-8)
    for members, sigma, name in ((1, 8.0, "members = 1"), (2, 5.6, r"sigma = 3\.9")):
        with pytest.raises(InvalidParameterError, match=name):
            shown_gap(10, sigma, members)


def test_the_steps_of_the_second_proof_lose_no_more_than_one_member_does() -> None:
    """The four partition functions, and what the bound grows by with a member more."""
    for sigma in (0.75, 1.0, 2.0, 3.0):
        q = math.exp(-((math.pi * sigma) ** 2))
        assert q <= 0.1
        for n in (2, 3, 10):
            sigmas = (1.0, math.sqrt(n - 1), math.sqrt(n), math.sqrt((n - 1) / n))
            errors = [
                2 * sum(math.exp(-2 * (math.pi * s * sigma * j) ** 2) for j in range(1, 9))
                for s in sigmas
            ]
            assert sum(-math.log1p(-error) for error in errors) <= 4 * q
            grown = log_ratio_bound(sigma, n) - log_ratio_bound(sigma, n - 1)
            assert grown >= 4 * q * (1 - 1e-12)


def test_noise_that_would_leave_the_lattice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "discrete_gaussian_around", lambda centres, *_: centres + 2**37 + 1)
    stream = MemberStream(BANDED, 2)
    with pytest.raises(OverflowError, match="37 bits"):
        stream.draw(1, 50.0, SecureRandom())
