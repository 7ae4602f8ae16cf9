"""Recovers how similar the rows are from the sums of a split model's embeddings.

The server of a vertical split model computes the gradient Gamma that all clients move by, and gets
the mean of their embeddings, ``H = Xhat W / N``, as exactly as its secure sum computes it. On
the same rows the clients' steps, ``W <- W - eta Xhat^T Gamma / N``, turn that into

    H[t] = H[0] - eta / N^2  Xhat Xhat^T (Gamma[0] + ... + Gamma[t - 1]),

linear equations in the Gram matrix of the rows, of all clients' features together. So the server
learns all similarities of rows from its own gradients (`recover_gram`). No client is dishonest,
no share is opened and no more is decoded than what was meant to be. Only noise on the sums would be
in the way; the stochastic rounding of the weights is a little of it. What a Gram matrix says of
single rows is much: nearest neighbours, duplicates, clusters (`neighbours_found`), all of a row for
whom knows some others, and with one client's features in question and the others' known, the
client's own Gram matrix.

Source of the scheme: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning
for Split Models" (ICML 2023). The attack is not in the paper.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.wire.arrays import is_finite

__all__ = ["gram_correlation", "neighbours_found", "recover_gram"]

Matrix = NDArray[np.float64]


def recover_gram(
    embeddings: ArrayLike, gradients: ArrayLike, *, rate: float, noise: float = 0.0
) -> Matrix:
    """Return the Gram matrix of some rows from a training on them.

    Parameters
    ----------
    embeddings : array_like, shape (rounds, m, h)
        What the server decoded, in order. Rows are the same in all rounds.
    gradients : array_like, shape (rounds - 1, m, h) or (rounds, m, h)
        What it sent after each; the last one is not used.
    rate : float
        How far the embeddings of one client with one feature of 1 move: the clients' learning rate,
        divided by N^2 where embeddings and gradients are averaged.
    noise : float, default 0.0
        Standard deviation of an entry of the embeddings for fixed weights. With stochastic rounding
        at a scale of 2^l it is about ``2^-l norm / (N sqrt(6))`` for rows of that norm, which the
        server guesses from the range of the data.

    Returns
    -------
    ndarray of float64, shape (m, m)
        Symmetric. The one that fits best; with noise it is drawn to zero where little is known, as
        suits entries of the size of its own diagonal.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, or a value is not finite or out of range.

    Notes
    -----
    Least squares over all rounds, each with its own noise, and with the first embedding unknown:
    the mean round is taken off. In the basis U of a singular value decomposition of the summed
    gradients ``S = U diag(s) V^T``, with K those of the embeddings, the symmetric matrix that fits
    best has ``(K_ij s_j + K_ji s_i) / (s_i^2 + s_j^2 + 2 ridge)``. The ridge is ``noise^2`` by the
    mean square of the entries, which is estimated in a first pass.

    Examples
    --------
    >>> X, draws = np.array([[1.0, 2.0], [0.0, 3.0]]), np.random.default_rng(0)
    >>> W, embeddings, gradients = np.zeros((2, 4)), [], draws.normal(size=(3, 2, 4))
    >>> for gradient in gradients:
    ...     embeddings.append(X @ W)
    ...     W = W - 0.1 * X.T @ gradient
    >>> recover_gram(embeddings, gradients, rate=0.1).round(9)
    array([[5., 6.],
           [6., 9.]])
    """
    seen, sent = np.asarray(embeddings, np.float64), np.asarray(gradients, np.float64)
    if seen.ndim != 3 or len(seen) < 2 or not is_finite(seen):
        raise InvalidParameterError("embeddings", seen.shape, "(rounds, m, h), 2 rounds or more")
    if sent.ndim != 3 or sent.shape[1:] != seen.shape[1:] or not is_finite(sent):
        raise InvalidParameterError("gradients", sent.shape, f"gradients of {seen.shape[1:]}")
    if not len(seen) - 1 <= len(sent) <= len(seen):
        raise InvalidParameterError("gradients", len(sent), f"{len(seen) - 1} or {len(seen)}")
    if not check_number("rate", rate) > 0:
        raise InvalidParameterError("rate", rate, "a number above 0")
    variance = check_number("noise", noise, minimum=0) ** 2
    rounds, m, _ = seen.shape
    moves = np.zeros_like(seen)
    moves[1:] = -rate * np.cumsum(sent[: rounds - 1], axis=0)
    moves, heard = ((a - a.mean(axis=0)).transpose(1, 0, 2).reshape(m, -1) for a in (moves, seen))
    axes, squares = _spectrum(moves)
    scaled = axes.T @ heard @ moves.T @ axes  # K_ij s_j
    ridge = 0.0
    for _ in range(2 if variance else 1):
        divisor = squares[:, None] + squares + 2 * ridge
        core = np.divide(scaled + scaled.T, divisor, out=np.zeros((m, m)), where=divisor > 0)
        gram = axes @ core @ axes.T
        if variance:
            # The strong directions are known well and have most of the matrix.
            ridge = variance * m * m / max(float(np.sum(_strong(core, squares) ** 2)), 1e-300)
    symmetric: Matrix = (gram + gram.T) / 2  # to the last bit
    return symmetric


def gram_correlation(found: ArrayLike, true: ArrayLike) -> float:
    """Return the correlation of two Gram matrices off their diagonals.

    Raises
    ------
    InvalidParameterError
        If they are not square matrices of one size, 3 or more, or not finite.

    Examples
    --------
    >>> X = np.array([[0.0], [1.0], [3.0]])
    >>> round(gram_correlation(2 * X @ X.T + 1, X @ X.T), 9)
    1.0
    """
    one, other = _grams(found, true)
    off = ~np.eye(len(one), dtype=np.bool_)
    for name, values in (("found", one[off]), ("true", other[off])):
        if np.ptp(values) == 0:
            raise InvalidParameterError(name, "a constant", "entries that differ")
    return float(np.corrcoef(one[off], other[off])[0, 1])


def neighbours_found(found: ArrayLike, true: ArrayLike) -> float:
    """Return for how many of the rows the nearest other row is right, as a share.

    Parameters
    ----------
    found, true : array_like, shape (m, m)
        Gram matrices; distances are ``G_ii + G_jj - 2 G_ij``.

    Raises
    ------
    InvalidParameterError
        If they are not square matrices of one size, 3 or more, or not finite.

    Examples
    --------
    >>> X = np.array([[0.0], [1.0], [3.0]])
    >>> neighbours_found(X @ X.T, X @ X.T)
    1.0
    """
    nearest = []
    for gram in _grams(found, true):
        size = np.diagonal(gram)
        distances = size[:, None] + size - 2 * gram
        np.fill_diagonal(distances, np.inf)
        nearest.append(distances.argmin(axis=1))
    return float(np.mean(nearest[0] == nearest[1]))


def _spectrum(moves: Matrix) -> tuple[Matrix, Matrix]:
    """Return the directions of the rows in which they moved, and how much, squared."""
    squares, axes = np.linalg.eigh(moves @ moves.T)
    tiny = 1e-12 * squares.max(initial=0.0)
    kept: Matrix = np.where(squares > tiny, squares, 0.0)
    return axes * (kept > 0), kept


def _strong(core: Matrix, squares: Matrix) -> Matrix:
    """Return the entries of the Gram matrix between the directions known better than most."""
    median = np.median(squares)
    kept: Matrix = core * ((squares[:, None] >= median) & (squares >= median))
    return kept


def _grams(found: ArrayLike, true: ArrayLike) -> tuple[Matrix, Matrix]:
    one, other = np.asarray(found, np.float64), np.asarray(true, np.float64)
    for name, gram in (("found", one), ("true", other)):
        if gram.ndim != 2 or len(gram) < 3 or gram.shape != (len(one), len(one)):
            raise InvalidParameterError(name, gram.shape, "square matrices of one size, 3 or more")
        if not is_finite(gram):
            raise InvalidParameterError(name, "NaN or infinity", "finite values")
    return one, other
