"""The clients' polynomial networks: linear in their weights, with powers of the features as inputs.

The embedding of a row is ``sum_i x^i W^i`` over the powers i from 1 to the order, each taken entry
by entry (FedVS, (1)). With the powers side by side and the weights one below the other it is one
product, so it can be computed on shares. There are no products of different features: whatever
they have to do with one another, the server model has to learn.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), sections 3 and 4.2.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_flag, check_integer, check_number
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = [
    "embed",
    "expand",
    "expanded_width",
    "gradient_of",
    "initial_weights",
    "project",
]

_SMALLEST = math.ulp(0.0)

Array = NDArray[np.float64]


def expanded_width(features: int, order: int, *, bias: bool = False) -> int:
    """Return the columns of expanded data: ``features * order``, and one more for a bias.

    Parameters
    ----------
    features : int
        Columns of the owner's data, at least 1.
    order : int
        Highest power, at least 1.
    bias : bool, default False
        Whether there is a column of ones.
    """
    check_integer("features", features, minimum=1)
    check_integer("order", order, minimum=1)
    return features * order + int(check_flag("bias", bias))


def expand(X: NDArray[Any], order: int, *, bias: bool = False) -> Array:
    """Return the powers of the features side by side: ``[X^1 | ... | X^order]``, entry by entry.

    Parameters
    ----------
    X : (M, d) ndarray
        The owner's data.
    order : int
        Highest power, at least 1.
    bias : bool, default False
        Append a column of ones. FedVS, section 3, has a bias for each power, and (1) none; all of
        them together are one column.

    Returns
    -------
    (M, d * order) ndarray of float64
        The expanded data; one more column with a bias.

    Examples
    --------
    >>> expand(np.array([[0.5, -1.0]]), 2).tolist()
    [[0.5, -1.0, 0.25, 1.0]]
    """
    if X.ndim != 2:
        raise InvalidParameterError("X", f"an array of {X.ndim} axes", "a matrix")
    rows, features = X.shape
    expanded = np.ones((rows, expanded_width(features, order, bias=bias)))
    for i in range(order):
        block = expanded[:, i * features : (i + 1) * features]
        block[:] = X
        if i:
            block *= expanded[:, (i - 1) * features : i * features]
    return expanded


def embed(expanded: Array, weights: Array) -> Array:
    """Return one owner's embeddings, in the reals: FedVS, (1).

    Parameters
    ----------
    expanded : (m, e) ndarray
        Rows of expanded data.
    weights : (e, h) ndarray
        The owner's weights.

    Returns
    -------
    (m, h) ndarray
        The embeddings. The aggregate is their mean over the owners.
    """
    result: Array = expanded @ weights
    return result


def gradient_of(expanded: NDArray[Any], gradient: NDArray[Any], divisor: int) -> Array:
    """Return the gradient of the loss with respect to an owner's weights.

    Parameters
    ----------
    expanded : (m, e) ndarray
        Expanded data of the batch, in the order of the gradient's rows. Owners take the rounded
        data, divided by their scale: those are what the embeddings were computed from.
    gradient : (m, h) ndarray
        Gradient of the loss with respect to the aggregate.
    divisor : int
        Number of clients where the aggregate is a mean, else 1. (FedVS, Algorithm 1, writes the
        gradient with respect to the owner's own embedding, which is this part of it.)

    Returns
    -------
    (e, h) ndarray of float64
        ``expanded^T gradient / divisor``.

    Examples
    --------
    >>> gradient_of(np.array([[1.0, 2.0], [3.0, 4.0]]), np.ones((2, 1)), 2).tolist()
    [[2.0], [3.0]]
    """
    check_integer("divisor", divisor, minimum=1)
    result: Array = np.asarray(expanded, np.float64).T @ gradient
    result /= divisor
    return result


def initial_weights(width: int, h: int, random: SecureRandom) -> Array:
    """Return an owner's weights to start from: independent, normal, of variance ``1 / width``.

    They must be secret. The aggregate of the first round is ``sum_n X_n W_n``: who knows all
    weights has h linear equations on every row of the batch, and with h about as large as the
    number of features, powers not counted, the rows themselves. So they come from a secure source,
    never from a seed that others know. (The paper gives no rule for them.)

    Parameters
    ----------
    width : int
        Columns of the owner's expanded data, at least 1.
    h : int
        Width of the embedding, at least 1.
    random : SecureRandom
        Where they come from.

    Returns
    -------
    (width, h) ndarray of float64
        The weights.
    """
    check_integer("width", width, minimum=1)
    check_integer("h", h, minimum=1)
    half = -(-width * h // 2)
    uniform = (random.uint64(2 * half) >> np.uint64(11)) * 2.0**-53
    # Box and Muller's method; 1 - u is never 0.
    radius = np.sqrt(-2.0 * np.log1p(-uniform[:half]))
    angle = 2.0 * math.pi * uniform[half:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    weights: Array = normal[: width * h].reshape(width, h) / math.sqrt(width)
    return weights


def project(weights: Array, w_max: float) -> Array:
    """Return the weights cut to ``[-w_max, w_max]``: the bound that the field's range rests on.

    Not in the paper, whose weights may leave any bound.

    Examples
    --------
    >>> project(np.array([[-3.0, 0.5]]), 2.0).tolist()
    [[-2.0, 0.5]]
    """
    check_number("w_max", w_max, minimum=_SMALLEST)
    cut: Array = np.clip(weights, -w_max, w_max)
    return cut
