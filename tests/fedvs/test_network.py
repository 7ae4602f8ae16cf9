"""Polynomial networks: expanded data, embeddings, gradients, secret weights to start from."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.network import (
    embed,
    expand,
    expanded_width,
    gradient_of,
    initial_weights,
    project,
)
from flwr_privacy.privacy.randomness import SecureRandom

Array = NDArray[np.float64]


def data(rows: int, columns: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, columns))


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_expanded_data_are_the_powers_entry_by_entry_side_by_side(order: int) -> None:
    X = data(6, 3)
    expanded = expand(X, order)
    assert expanded.shape == (6, 3 * order)
    for i in range(order):
        for row in range(6):
            for column in range(3):
                value = expanded[row, i * 3 + column]
                assert value == pytest.approx(X[row, column] ** (i + 1), rel=1e-14)


def test_a_bias_is_one_column_of_ones_whatever_the_order() -> None:
    expanded = expand(data(4, 2), 3, bias=True)
    assert expanded.shape == (4, 7) == (4, expanded_width(2, 3, bias=True))
    assert (expanded[:, -1] == 1).all()
    np.testing.assert_array_equal(expanded[:, :-1], expand(data(4, 2), 3))


def test_an_embedding_is_the_sum_over_the_powers() -> None:
    X = data(5, 3)
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    result = embed(expand(X, 2), np.concatenate([first, second]))
    np.testing.assert_allclose(result, X @ first + X**2 @ second, rtol=1e-12)


def test_expanding_leaves_the_data_alone_and_takes_matrices_only() -> None:
    X = data(3, 2)
    before = X.copy()
    expand(X, 3)
    np.testing.assert_array_equal(X, before)
    with pytest.raises(InvalidParameterError, match="matrix"):
        expand(X[0], 2)


def test_F23_the_gradient_for_ones_is_the_sum_of_the_rows_over_the_clients() -> None:
    expanded = expand(data(7, 2), 2)
    result = gradient_of(expanded, np.ones((7, 3)), 3)
    for column in range(3):
        np.testing.assert_allclose(result[:, column], expanded.sum(axis=0) / 3, rtol=1e-12)


def test_F23_gradients_are_those_of_the_whole_split_model_by_finite_differences() -> None:
    clients, rows, h = 3, 6, 4
    rng = np.random.default_rng(2)
    expanded = [expand(data(rows, 2 + n, n), 2) for n in range(clients)]
    weights = [rng.normal(size=(part.shape[1], h)) for part in expanded]
    central, labels = rng.normal(size=h), rng.uniform(size=rows)

    def loss(of: list[Array]) -> float:
        H = sum(map(embed, expanded, of), np.zeros((rows, h))) / clients
        return float(np.mean((np.tanh(H) @ central - labels) ** 2))

    H = sum(map(embed, expanded, weights), np.zeros((rows, h))) / clients
    residual = np.tanh(H) @ central - labels
    gradient = 2 / rows * residual[:, None] * (central * (1 - np.tanh(H) ** 2))
    step = 1e-6
    for n in range(clients):
        result = gradient_of(expanded[n], gradient, clients)
        for place in np.ndindex(weights[n].shape):
            moved = [w.copy() for w in weights]
            moved[n][place] += step
            above = loss(moved)
            moved[n][place] -= 2 * step
            assert result[place] == pytest.approx((above - loss(moved)) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_float32_gradient_is_added_up_in_float64(dtype: type) -> None:
    expanded: NDArray[Any] = np.ones((1000, 1), dtype)
    gradient = np.full((1000, 1), 0.1, np.float32)
    exact = 1000 * float(np.float32(0.1))
    assert gradient_of(expanded, gradient, 1)[0, 0] == pytest.approx(exact, rel=1e-12)


# Weights to start from


def test_initial_weights_are_normal_with_variance_one_over_the_width() -> None:
    width, h = 50, 2000
    weights = initial_weights(width, h, SecureRandom.insecure(1, "initial")) * math.sqrt(width)
    count = weights.size
    # Within five standard errors of the moments of a standard normal variable.
    assert abs(weights.mean()) < 5 / math.sqrt(count)
    assert abs((weights**2).mean() - 1) < 5 * math.sqrt(2 / count)
    assert abs((weights**4).mean() - 3) < 5 * math.sqrt(96 / count)
    assert abs((weights[:, 1:] * weights[:, :-1]).mean()) < 5 / math.sqrt(count)
    beyond = (np.abs(weights) > 1.959964).mean()
    assert abs(beyond - 0.05) < 5 * math.sqrt(0.05 * 0.95 / count)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 2)])
def test_initial_weights_have_any_shape(shape: tuple[int, int]) -> None:
    weights = initial_weights(*shape, SecureRandom())
    assert weights.shape == shape
    assert np.isfinite(weights).all()
    assert len(set(weights.reshape(-1).tolist())) == weights.size


def test_initial_weights_differ_from_run_to_run() -> None:
    first, second = (initial_weights(3, 3, SecureRandom()) for _ in range(2))
    assert not np.array_equal(first, second)


def test_projected_weights_are_within_the_bound_and_others_unchanged() -> None:
    weights = np.array([[-5.0, -2.0, 0.25, 2.0, 7.0]])
    assert project(weights, 2.0).tolist() == [[-2.0, -2.0, 0.25, 2.0, 2.0]]
