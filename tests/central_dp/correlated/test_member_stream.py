"""A member's stream: what its sums are a function of, exactly, and what it refuses."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_privacy.central_dp.correlated import member_stream as module
from flwr_privacy.central_dp.correlated.factors import (
    FRACTION_BITS,
    BufferedToeplitzFactor,
    ToeplitzFactor,
    TreeFactor,
)
from flwr_privacy.central_dp.correlated.member_stream import MemberStream
from flwr_privacy.central_dp.correlated.options import BandedMF
from flwr_privacy.errors import InvalidParameterError, ProtocolError
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


def test_noise_that_would_leave_the_lattice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "discrete_gaussian_around", lambda centres, *_: centres + 2**37 + 1)
    stream = MemberStream(BANDED, 2)
    with pytest.raises(OverflowError, match="37 bits"):
        stream.draw(1, 50.0, SecureRandom())
