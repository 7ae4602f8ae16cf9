"""Recovers features from embeddings when the weights are known: embeddings are linear in both.

A client of a vertical split model owns the features ``Xhat`` and the weights ``W``, and both are
secret; what others see is made of products. Whoever gets one of the two has equations in the other:

- `features_from_sum`: the sum of all clients' embeddings is ``sum_n Xhat_n W_n``. If the first
  weights come from a seed that everybody knows, the server has h equations on every row in the
  first round. As the powers of a feature are no unknowns of their own, all features of all clients
  follow once h reaches their number, and h dimensions of them otherwise.
- `features_from_moves`: weights move by ``-eta Xhat^T Gamma / N`` with a Gamma that all clients
  are sent. Who opens a client's weights round by round, as T + 1 holders of shares do, gets the
  features of the rows that it was trained on.
- `missing_embedding`: two sums of the same rows and weights, one without some clients, differ by
  these clients' embeddings: a sum over one client is no sum.

Secret first weights, T large enough, and one set of clients for each set of shares stop them.

Source of the scheme: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning
for Split Models" (ICML 2023), which says nothing of the first weights. None of the attacks is in
the paper.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.wire.arrays import is_finite

__all__ = ["features_from_moves", "features_from_sum", "missing_embedding"]

Matrix = NDArray[np.float64]

_ITERATIONS = 30
_SETTLED = 1e-9
_SMALLEST_RIDGE = 1e-12  # relative to the equations: for directions that are not in them


def features_from_sum(
    sums: ArrayLike,
    weights: ArrayLike,
    *,
    mean: ArrayLike,
    covariance: ArrayLike,
    noise: float,
    span: tuple[float, float] = (-1.0, 1.0),
    step: float | None = None,
) -> Matrix:
    """Return the features of rows from the sum of their embeddings and all weights.

    Parameters
    ----------
    sums : array_like, shape (m, h)
        Sum of the embeddings over the clients, not their mean.
    weights : array_like, shape (order, d, h)
        Weights of the powers 1 to `order` of all features.
    mean : array_like, shape (d,)
        What everybody expects of a row.
    covariance : array_like, shape (d, d)
        How features are expected to vary about that; positive definite.
    noise : float
        Standard deviation of a sum, above 0: with weights rounded at random at a scale of 2^l about
        ``2^-l norm / sqrt(6)`` for expanded rows of that norm.
    span : tuple of float, default (-1.0, 1.0)
        Least and largest value of a feature.
    step : float, optional
        What features are known to be multiples of. By default nothing is known.

    Returns
    -------
    ndarray of float64, shape (m, d)
        The most likely rows, for normal features and noise. With h of d or more and little noise
        they are the clients' rows; with fewer they are right in h dimensions, and expected
        elsewhere.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, or a value is not finite or out of range.

    Notes
    -----
    Gauss's and Newton's method from the mean on. For order 1 it is one linear solution.

    Examples
    --------
    >>> W = np.array([[[1.0, 2.0], [0.0, 1.0]]])
    >>> features_from_sum([[0.5, 0.75]], W, mean=[0, 0], covariance=np.eye(2), noise=1e-6).round(6)
    array([[ 0.5 , -0.25]])
    """
    seen, layers = np.asarray(sums, np.float64), np.asarray(weights, np.float64)
    if layers.ndim != 3 or not layers.size or not is_finite(layers):
        raise InvalidParameterError("weights", layers.shape, "(order, d, h) finite values")
    order, d, h = layers.shape
    if seen.ndim != 2 or seen.shape[1] != h or not is_finite(seen):
        raise InvalidParameterError("sums", seen.shape, f"(m, {h}) finite values")
    expected = np.asarray(mean, np.float64)
    if expected.shape != (d,) or not is_finite(expected):
        raise InvalidParameterError("mean", expected.shape, f"({d},) finite values")
    if not check_number("noise", noise) > 0:
        raise InvalidParameterError("noise", noise, "a number above 0")
    variation = np.asarray(covariance, np.float64)
    if variation.shape != (d, d) or not is_finite(variation):
        raise InvalidParameterError("covariance", variation.shape, f"({d}, {d}) finite values")
    if np.linalg.eigvalsh(variation).min() <= 0:
        raise InvalidParameterError("covariance", "another matrix", "a positive definite one")
    low, high = span
    root = np.linalg.cholesky(variation)
    prior, nothing = noise * np.eye(d), np.zeros(d)
    rows = np.empty((len(seen), d))
    powers = np.arange(1, order + 1)[:, None]
    for place, total in enumerate(seen):
        row = np.clip(expected, low, high)
        for _ in range(_ITERATIONS if order > 1 else 1):
            slopes = np.einsum("id,idh->hd", powers * row ** (powers - 1), layers)
            missed = total - np.einsum("id,idh->h", row**powers, layers)
            # What the sum would be at the mean is extrapolated from the present row.
            left = np.concatenate([slopes @ root, prior])
            right = np.concatenate([missed + slopes @ (row - expected), nothing])
            before = row
            row = np.clip(expected + root @ np.linalg.lstsq(left, right)[0], low, high)
            if np.abs(row - before).max() < _SETTLED:
                break
        rows[place] = row
    if step is None:
        return rows
    if not check_number("step", step) > 0:
        raise InvalidParameterError("step", step, "a number above 0")
    rounded: Matrix = np.rint(rows / step) * step
    return rounded


def features_from_moves(
    weights: ArrayLike,
    gradients: ArrayLike,
    *,
    rate: float,
    noise: float = 0.0,
    mean: ArrayLike = 0.0,
    spread: float = 1.0,
) -> Matrix:
    """Return the features that a client's weights were moved by.

    Parameters
    ----------
    weights : array_like, shape (rounds, e, h)
        The client's weights in each round, as they were opened.
    gradients : array_like, shape (rounds - 1, m, h) or (rounds, m, h)
        What all clients were sent after each, for the same m rows; a row that was not in the batch
        has zeros. The last one is not used.
    rate : float
        The client's learning rate, divided by N where embeddings are averaged.
    noise : float, default 0.0
        Standard deviation of the rounding of a weight: ``2^-l / sqrt(6)`` at a scale of 2^l.
    mean : array_like, shape () or (e,), default 0.0
        What everybody expects of a row.
    spread : float, default 1.0
        Standard deviation of features about that, above 0.

    Returns
    -------
    ndarray of float64, shape (m, e)
        Least squares with a ridge for the noise. Exact to rounding without noise, if the summed
        gradients of the rows are linearly independent.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, or a value is not finite or out of range.
    """
    opened, sent = np.asarray(weights, np.float64), np.asarray(gradients, np.float64)
    if opened.ndim != 3 or len(opened) < 2 or not is_finite(opened):
        raise InvalidParameterError("weights", opened.shape, "(rounds, e, h), 2 rounds or more")
    rounds, e, h = opened.shape
    if sent.ndim != 3 or not rounds - 1 <= len(sent) <= rounds or sent.shape[2] != h:
        raise InvalidParameterError("gradients", sent.shape, f"({rounds - 1}, m, {h})")
    if not is_finite(sent):
        raise InvalidParameterError("gradients", "NaN or infinity", "finite values")
    for name, value in (("rate", rate), ("spread", spread)):
        if not check_number(name, value) > 0:
            raise InvalidParameterError(name, value, "a number above 0")
    variance = (check_number("noise", noise, minimum=0) / spread) ** 2
    m = sent.shape[1]
    moves = np.zeros((rounds, m, h))
    moves[1:] = -rate * np.cumsum(sent[: rounds - 1], axis=0)
    moves -= moves.mean(axis=0)
    heard = opened - opened.mean(axis=0)
    across = moves.transpose(1, 0, 2).reshape(m, -1)
    products = across @ heard.transpose(1, 0, 2).reshape(e, -1).T
    squares = across @ across.T
    ridge = max(variance, _SMALLEST_RIDGE * float(np.trace(squares)) / m)
    prior = np.broadcast_to(np.asarray(mean, np.float64), (m, e))
    missed = np.linalg.solve(squares + ridge * np.eye(m), products - squares @ prior)
    rows: Matrix = prior + missed
    return rows


def missing_embedding(
    everybody: ArrayLike, without: ArrayLike, *, field: PrimeField
) -> NDArray[np.int64]:
    """Return by what two decoded sums differ: the embeddings of those who are in the first alone.

    Parameters
    ----------
    everybody, without : array_like of int, shape (m, h)
        Elements of the field, decoded from answers to the same rows and weights.
    field : PrimeField
        The field.

    Returns
    -------
    ndarray of int64, shape (m, h)
        ``Xbar W`` of the missing clients, as signed integers.

    Raises
    ------
    InvalidParameterError
        If the shapes differ.

    Examples
    --------
    >>> missing_embedding([[3, 1]], [[1, 96]], field=PrimeField(97))
    array([[2, 2]])
    """
    one, other = np.asarray(everybody, np.int64), np.asarray(without, np.int64)
    if one.shape != other.shape:
        raise InvalidParameterError("without", other.shape, f"shape {one.shape}")
    return field.signed(field.reduce(one - other))
