"""What embeddings and weights say of features if one of the two is known, against closed forms."""

import numpy as np
import pytest

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.network import expand
from flwr_privacy.fedvs.quantisation import quantise, quantise_stochastic
from flwr_privacy.fedvs.sharing import data_shares, decode_rows, evaluate, weight_shares
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.known_weights import (
    features_from_moves,
    features_from_sum,
    missing_embedding,
)

Matrix = np.ndarray


def data(m: int, d: int, order: int, h: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return rows of multiples of 1/16 from -1 to 1, weights, and the sums of the first round."""
    draws = np.random.default_rng(d * h)
    X = draws.integers(-16, 17, (m, d)) / 16
    W = draws.normal(size=(order, d, h))
    return X, W, expand(X, order) @ W.reshape(order * d, h)


def solved(sums: Matrix, W: Matrix, *, noise: float = 1e-6, step: float | None = None) -> Matrix:
    d = W.shape[1]
    return features_from_sum(
        sums, W, mean=np.zeros(d), covariance=np.eye(d) / 3, noise=noise, step=step
    )


@pytest.mark.parametrize(("order", "h"), [(1, 12), (1, 20), (2, 18), (2, 24), (3, 24)])
def test_known_weights_open_the_rows_once_there_are_as_many_columns_as_features(
    order: int, h: int
) -> None:
    """Powers are no unknowns of their own: for order 3 there are 36 columns, and 24 are enough."""
    X, W, sums = data(30, 12, order, h)
    exact = (solved(sums, W, step=1 / 16) == X).all(axis=1)
    # With few more columns than features Newton's method ends elsewhere for some rows.
    assert exact.all() if order == 1 or h == 2 * 12 else exact.mean() > 0.5


def test_the_rounding_of_weights_is_little_noise() -> None:
    X, W, _ = data(30, 12, 1, 24)
    field = PrimeField()
    codes = quantise_stochastic(W[0], 8, field, SecureRandom.insecure(0, "known weights"))
    rounded = field.signed(codes) / 2**8
    assert 0 < np.abs(rounded - W[0]).max() < 2**-8
    noise = 2**-8 * np.sqrt(np.mean(np.sum(X**2, axis=1)) / 6)
    found = solved(X @ rounded, W, noise=float(noise), step=1 / 16)
    np.testing.assert_array_equal(found, X)


def test_with_fewer_columns_the_rows_are_right_in_as_many_dimensions() -> None:
    X, W, sums = data(30, 12, 1, 5)
    found = features_from_sum(
        sums, W, mean=np.zeros(12), covariance=np.eye(12), noise=1e-6, span=(-9, 9)
    )
    axes = np.linalg.qr(W[0])[0]  # what the columns span
    np.testing.assert_allclose(found @ axes, X @ axes, atol=1e-6)
    np.testing.assert_allclose(found, X @ axes @ axes.T, atol=1e-6)  # and nothing elsewhere


def test_other_weights_open_nothing() -> None:
    X, W, sums = data(30, 12, 1, 24)
    other = np.random.default_rng(1).normal(size=W.shape)
    wrong = np.sqrt(np.mean((solved(sums, other) - X) ** 2))
    assert wrong > np.sqrt(np.mean(X**2))  # worse than the mean


@pytest.mark.parametrize("noise", [0.0, 2**-12 / np.sqrt(6)])
def test_weights_of_many_rounds_open_the_rows(noise: float) -> None:
    draws = np.random.default_rng(2)
    m, e, h, rate = 8, 5, 6, 0.1
    X, W = draws.uniform(-1, 1, (m, e)), draws.normal(size=(e, h))
    gradients, weights = draws.normal(size=(60, m, h)), []
    for gradient in gradients:
        weights.append(W + noise * draws.normal(size=W.shape))
        W = W - rate * X.T @ gradient
    found = features_from_moves(weights, gradients, rate=rate, noise=noise)
    np.testing.assert_allclose(found, X, atol=1e-6 if noise == 0 else 1e-3)
    if noise == 0:
        still = np.broadcast_to(weights[0], (3, e, h))  # nothing moved: nothing but the mean
        found = features_from_moves(still, 0 * gradients[:2], rate=rate, noise=1.0, mean=X[0])
        np.testing.assert_array_equal(found, np.broadcast_to(X[0], X.shape))
    few = features_from_moves(weights[:2], gradients[:1], rate=rate, noise=noise)
    # One round has 6 equations for the 8 rows of a column.
    assert np.linalg.norm(few - X) > 0.1 * np.linalg.norm(X)


def test_two_sums_with_and_without_a_client_are_its_embedding() -> None:
    random, field = SecureRandom.insecure(0, "missing"), PrimeField()
    code, draws = LagrangeCode(N=7, K=2, T=1, field=field), np.random.default_rng(3)
    data = [quantise(draws.uniform(-1, 1, (6, 3)), 8, field) for _ in range(7)]
    weights = [quantise(draws.normal(size=(3, 4)), 8, field) for _ in range(7)]
    X, W = (
        [deal(code, block, random) for block in blocks]
        for deal, blocks in ((data_shares, data), (weight_shares, weights))
    )
    sums = []
    for there in (range(7), [0, 1, 3, 4, 5, 6]):
        answers = {
            j: evaluate(
                field,
                np.concatenate([X[n][j] for n in there], axis=1),
                np.concatenate([W[n][j] for n in there]),
            )
            for j in range(7)
        }
        sums.append(decode_rows(code, answers))
    expected = field.signed(data[2]) @ field.signed(weights[2])
    np.testing.assert_array_equal(missing_embedding(*sums, field=field), expected)
    assert np.abs(expected).max() > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weights": np.zeros((2, 3))}, "weights = "),
        ({"sums": np.zeros((2, 3))}, "sums = "),
        ({"mean": np.zeros(2)}, "mean = "),
        ({"covariance": np.zeros((3, 3))}, "a positive definite one"),
        ({"covariance": np.eye(2)}, "covariance = "),
        ({"noise": 0.0}, "noise = 0.0"),
        ({"step": 0.0}, "step = 0.0"),
    ],
)
def test_what_is_not_allowed_is_named(change: dict[str, object], text: str) -> None:
    given = {
        "sums": np.zeros((2, 4)),
        "weights": np.ones((1, 3, 4)),
        "mean": np.zeros(3),
        "covariance": np.eye(3),
        "noise": 1.0,
        **change,
    }
    with pytest.raises(InvalidParameterError, match=text):
        features_from_sum(**given)  # type: ignore[arg-type]


def test_moves_and_sums_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidParameterError, match="weights = "):
        features_from_moves(np.zeros((1, 2, 3)), np.zeros((1, 4, 3)), rate=1.0)
    with pytest.raises(InvalidParameterError, match="gradients = "):
        features_from_moves(np.zeros((3, 2, 3)), np.zeros((1, 4, 3)), rate=1.0)
    with pytest.raises(InvalidParameterError, match="rate = 0"):
        features_from_moves(np.zeros((2, 2, 3)), np.zeros((1, 4, 3)), rate=0)
    with pytest.raises(InvalidParameterError, match="without = "):
        missing_embedding([[1]], [[1, 2]], field=PrimeField())
