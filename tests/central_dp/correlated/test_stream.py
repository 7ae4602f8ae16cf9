"""Correlated noise, exactly: what is released follows from C x + z alone, whatever x is."""

import json
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_privacy.central_dp.correlated import stream as module
from flwr_privacy.central_dp.correlated.factors import (
    FRACTION_BITS,
    BufferedToeplitzFactor,
    Factor,
    ToeplitzFactor,
    TreeFactor,
)
from flwr_privacy.central_dp.correlated.options import BandedMF
from flwr_privacy.central_dp.correlated.stream import (
    check_size,
    digest_of,
    margin,
    new_stream,
    vectors_kept,
)
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.documents import dumps, loads

ONE = 2**FRACTION_BITS
ROUNDS = 12
BANDED = BandedMF(optimised=False).factor(rounds=ROUNDS, separation=5, participations=3)
BUFFERED = BufferedToeplitzFactor(scales=(20_000, 9_000), decays=(60_000, 20_000))
TREE = TreeFactor(rounds=ROUNDS)
FACTORS = {"banded": BANDED, "blt": BUFFERED, "tree": TREE}


def given(values: NDArray[np.int64]) -> Any:
    """Return a sampler that gives rows of z one after the other."""
    rows = iter(values)
    return lambda size, sigma, random: next(rows).copy()


def noise_of(factor: Factor, z: NDArray[np.int64], monkeypatch: Any) -> NDArray[np.int64]:
    monkeypatch.setattr(module, "discrete_gaussian", given(z))
    stream = new_stream(factor, z.shape[1])
    return np.array([stream.draw(t, 1.0, SecureRandom()) for t in range(1, len(z) + 1)])


def exact_matrix(factor: Factor) -> NDArray[np.int64]:
    """Return C over 2^-F, or the tree's matrix, in integers."""
    if isinstance(factor, TreeFactor):
        return factor.matrix().astype(np.int64)
    column = np.rint(factor.column(ROUNDS) * ONE).astype(np.int64)
    lags = np.subtract.outer(np.arange(ROUNDS), np.arange(ROUNDS))
    return np.where(lags >= 0, column[np.clip(lags, 0, None)], 0)


@pytest.mark.parametrize("name", ["banded", "tree"])
def test_the_release_is_a_function_of_the_noised_product_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two data sets and two noises with the same C x + z give the same release, bit for bit."""
    factor, generator = FACTORS[name], np.random.default_rng(1)
    matrix = exact_matrix(factor)
    for _ in range(20):
        x, other = generator.integers(-1000, 1000, (2, ROUNDS, 4))
        z = generator.integers(-(2**24), 2**24, (ROUNDS, 4))
        z_other = z + matrix @ (x - other)
        released = x + noise_of(factor, z, monkeypatch)
        assert (released == other + noise_of(factor, z_other, monkeypatch)).all()


def test_rounding_to_even_would_tell_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: with numpy's rounding the theorem is false, and this test sees it."""

    def to_even(steps: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.rint(steps / ONE).astype(np.int64)

    monkeypatch.setattr(module, "_rounded", to_even)
    factor = ToeplitzFactor(coefficients=(ONE, ONE // 2))
    z = np.full((2, 1), ONE // 2)
    noise = noise_of(factor, z, monkeypatch)
    moved = 1 + noise_of(factor, z - exact_matrix_2(factor), monkeypatch)
    assert (noise != moved).any()


def exact_matrix_2(factor: ToeplitzFactor) -> NDArray[np.int64]:
    """Return C times ones, in two rounds."""
    return np.cumsum(factor.coefficients)[:, np.newaxis]


def test_banded_noise_is_the_inverse_of_the_factor_up_to_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    z = np.random.default_rng(2).integers(-(2**30), 2**30, (ROUNDS, 3))
    noise = noise_of(BANDED, z, monkeypatch)
    again = exact_matrix(BANDED) @ noise
    assert (np.abs(again - z) <= ONE // 2).all()


def test_truncated_states_move_a_coordinate_by_less_than_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, generator = 200, np.random.default_rng(3)
    z = generator.integers(-(2**30), 2**30, (rounds, 50))
    noise = noise_of(BUFFERED, z, monkeypatch)
    column = BUFFERED.column(rounds)
    bound = module._truncated(BUFFERED)
    for t in range(1, rounds):
        exact = column[1 : t + 1] @ noise[t - 1 :: -1][:t]
        # w is z less the truncated sum, rounded: what is beyond half a step was truncated.
        lost = z[t] / ONE - noise[t] - exact
        assert np.abs(lost).max() <= 0.5 + bound
    assert bound < 1e-3
    assert margin(BUFFERED) > 1 == margin(BANDED) == margin(TREE)


def test_too_many_weights_for_the_grid_are_refused() -> None:
    check_size(BUFFERED, size=50_000, rounds=100, largest=2.0**18)
    check_size(BANDED, size=10**9, rounds=10**6, largest=1.0)
    with pytest.raises(InvalidParameterError, match="grid_bits = 10: expected more, or BandedMF"):
        check_size(BUFFERED, size=50_000, rounds=100_000, largest=2.0**10)


@pytest.mark.parametrize("name", FACTORS)
def test_prefix_sums_have_the_stated_error(name: str) -> None:
    """Standard deviation of the prefix sums, within five standard errors, per round."""
    factor, size, sigma = FACTORS[name], 4000, 300.0
    stream = new_stream(factor, size)
    sums = np.cumsum(
        [stream.draw(t, sigma, SecureRandom.insecure(4, t)) for t in range(1, ROUNDS + 1)], axis=0
    )
    if isinstance(factor, TreeFactor):
        expected = [math.sqrt(t.bit_count()) for t in range(1, ROUNDS + 1)]
    else:
        inverse = np.linalg.inv(exact_matrix(factor) / ONE)
        expected = list(np.linalg.norm(np.tril(np.ones((ROUNDS, ROUNDS))) @ inverse, axis=1))
    for measured, norm in zip(np.mean((sums / sigma) ** 2, axis=1), expected, strict=True):
        assert abs(measured / norm**2 - 1) < 5 * math.sqrt(2 / size)


@pytest.mark.parametrize("name", FACTORS)
def test_a_stream_that_is_saved_goes_on_as_if_it_was_not(name: str) -> None:
    factor = FACTORS[name]
    whole, first = new_stream(factor, 5), new_stream(factor, 5)
    for t in range(1, 8):
        drawn = [s.draw(t, 50.0, SecureRandom.insecure(5, t)) for s in (whole, first)]
        assert (drawn[0] == drawn[1]).all()
    resumed = new_stream(factor, 5)
    resumed.load(loads(dumps(first.state())))
    for t in range(8, ROUNDS + 1):
        drawn = [s.draw(t, 50.0, SecureRandom.insecure(5, t)) for s in (whole, resumed)]
        assert (drawn[0] == drawn[1]).all()


@pytest.mark.parametrize("name", FACTORS)
def test_nothing_is_drawn_twice_and_what_is_left_out_is_drawn(name: str) -> None:
    stream = new_stream(FACTORS[name], 2)
    stream.draw(3, 50.0, SecureRandom())
    assert stream.drawn == 3
    for server_round in (0, 1, 3):
        with pytest.raises(ProtocolError, match="was drawn before"):
            stream.draw(server_round, 50.0, SecureRandom())
    stream.draw(4, 50.0, SecureRandom())


@pytest.mark.parametrize(
    ("factor", "vectors"), [(BUFFERED, 2), (BANDED, 4), (TREE, 4)], ids=["blt", "banded", "tree"]
)
def test_the_state_does_not_grow_with_the_rounds(factor: Factor, vectors: int) -> None:
    stream = new_stream(factor, 3)
    sizes = []
    for t in range(1, 13):
        stream.draw(t, 50.0, SecureRandom())
        sizes.append(len(stream.state()["vectors"]))
    assert max(sizes) <= vectors == vectors_kept(factor)


def test_a_state_is_plain_and_digests_tell_factors_apart() -> None:
    assert len({digest_of(factor) for factor in FACTORS.values()}) == 3
    assert digest_of(BANDED) == digest_of(ToeplitzFactor(coefficients=BANDED.coefficients))
    stream = new_stream(BANDED, 1)
    assert json.dumps(stream.state()["drawn"]) == "0"
