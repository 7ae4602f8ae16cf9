"""Moments of a linear regression: what a device encodes, and the gradients that they give.

Source: "Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv,
2024). The loss is the sum of squared residuals, ``f(W) = sum_i |X_i W - Y_i|^2 / 2`` (ACFL, (1)),
so all that its gradient needs of a device's data are two matrices, ``X^T X`` and ``X^T Y``.

Symbols: m records, d features, o labels; X is (m, d), Y (m, o), W (d, o), all float64.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

__all__ = [
    "Moments",
    "check_data",
    "clipped_gradient",
    "gradient",
    "mirrored",
    "moments",
    "moments_gradient",
    "one_hot",
    "symmetrise",
    "tables",
    "upper",
]

_SMALLEST = math.ulp(0.0)
_TOLERANCE = 1e-9  # relative: data that were brought to a bound may pass it by rounding

Array = NDArray[np.float64]


class Moments(NamedTuple):
    """Both moments of some records, exact or with noise; those of several devices are added."""

    features: Array
    """``X^T X``, shape (d, d)."""

    labels: Array
    """``X^T Y``, shape (d, o)."""


def moments(X: Array, Y: Array) -> Moments:
    """Return ``X^T X`` and ``X^T Y``, without noise.

    Examples
    --------
    >>> moments(np.array([[1.0, 2.0]]), np.array([[3.0]])).labels.tolist()
    [[3.0], [6.0]]
    """
    return Moments(X.T @ X, X.T @ Y)


def upper(matrix: Array) -> Array:
    """Return the upper triangle of a (d, d) matrix, row after row: ``d (d + 1) / 2`` values.

    Examples
    --------
    >>> upper(np.array([[1.0, 2.0], [2.0, 3.0]])).tolist()
    [1.0, 2.0, 3.0]
    """
    rows, columns = np.triu_indices(len(matrix))
    triangle: Array = matrix[rows, columns]
    return triangle


def mirrored(vector: Array, d: int) -> Array:
    """Return the symmetric (d, d) matrix that has a given upper triangle: `upper` the other way.

    Raises
    ------
    InvalidParameterError
        If the vector has not ``d (d + 1) / 2`` values.

    Examples
    --------
    >>> mirrored(np.array([1.0, 2.0, 3.0]), 2).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    check_integer("d", d, minimum=1)
    if vector.shape != (d * (d + 1) // 2,):
        raise InvalidParameterError("vector", vector.shape, f"{d * (d + 1) // 2} values")
    rows, columns = np.triu_indices(d)
    matrix = np.empty((d, d))
    matrix[rows, columns] = vector
    matrix[columns, rows] = vector
    return matrix


def symmetrise(matrix: Array) -> Array:
    """Return ``(M + M^T) / 2``: what a server may do to the sum of the encodings.

    Not in the paper. It costs no privacy, and takes nearly half of the noise's energy away.
    """
    mean: Array = (matrix + matrix.T) / 2
    return mean


def gradient(X: Array, Y: Array, W: Array) -> Array:
    """Return ``X^T (X W - Y)``, ACFL, (7): the gradient over all of a device's records."""
    result: Array = X.T @ (X @ W - Y)
    return result


def moments_gradient(coded: Moments, W: Array) -> Array:
    """Return the gradient that moments give: of a sum of encodings it is the coded one, ACFL, (8).

    Of exact moments it equals `gradient` up to rounding.
    """
    result: Array = coded.features @ W - coded.labels
    return result


def clipped_gradient(X: Array, Y: Array, W: Array, clipping_norm: float) -> tuple[Array, float]:
    """Return the sum of the records' gradients, each clipped, and the share of clipped records.

    Not in the paper, which sends `gradient`. One record adds to the result, or takes away, at most
    `clipping_norm` up to rounding. The share depends on the data: it is as private as they are.

    Parameters
    ----------
    X, Y, W : ndarray
        Features (m, d), labels (m, o), model (d, o); m may be 0.
    clipping_norm : float
        Bound of the Frobenius norm of ``x (x^T W - y)``, above 0.

    Returns
    -------
    tuple of ndarray and float
        The sum (d, o), and the share in [0, 1]. A record whose gradient is too large for a float
        (or no number) counts as clipped, and adds nothing.
    """
    check_number("clipping_norm", clipping_norm, minimum=_SMALLEST)
    with np.errstate(over="ignore", invalid="ignore"):  # of a model that diverges
        residuals = X @ W - Y
        # A record's gradient has rank one, so its norm is the product of two.
        norms = np.linalg.norm(X, axis=1) * np.linalg.norm(residuals, axis=1)
    lost = ~np.isfinite(norms)
    residuals[lost] = 0.0
    norms[lost] = math.inf
    residuals *= (clipping_norm / np.maximum(norms, clipping_norm))[:, None]
    share = float(np.mean(norms > clipping_norm)) if len(norms) else 0.0
    result: Array = X.T @ residuals
    return result, share


def one_hot(labels: ArrayLike, classes: int) -> Array:
    """Return a row for each label: 1 in the column of its class, 0 elsewhere.

    Parameters
    ----------
    labels : array_like
        Integers from 0 to ``classes - 1``, shape (m,).
    classes : int
        Number of classes, at least 1.

    Raises
    ------
    InvalidParameterError
        If a label is no class, or the labels are no vector of integers. It does not say which.

    Examples
    --------
    >>> one_hot([2, 0], 3).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    check_integer("classes", classes, minimum=1)
    values = np.asarray(labels)
    allowed = f"a vector of integers from 0 to {classes - 1}"
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InvalidParameterError("labels", "another kind of array", allowed)
    if values.size and (values.min() < 0 or values.max() >= classes):
        raise InvalidParameterError("labels", "a value outside", allowed)
    rows = np.zeros((len(values), classes))
    rows[np.arange(len(values)), values] = 1.0
    return rows


_TABLE = "a matrix of finite real numbers, one row for each record, at least one"


def check_data(
    X: ArrayLike,
    Y: ArrayLike,
    *,
    feature_bound: float,
    label_bound: float,
    feature_norm: float | None = None,
    label_norm: float | None = None,
    excess: str = "refuse",
    one_hot: bool = False,
) -> tuple[Array, Array]:
    """Return a device's data if they meet the bounds that the guarantee rests on.

    Data are never rescaled by anything that depends on them: the factor would leak.

    Parameters
    ----------
    X, Y : array_like
        Features (m, d) and labels (m, o): finite real numbers, at least one record.
    feature_bound, label_bound : float
        Bounds of the absolute value of an entry, above 0 (ACFL, Assumption 1, has 1).
    feature_norm, label_norm : float, optional
        Bounds of the L2 norm of a row, above 0 (not in the paper). Default: none.
    excess : {"refuse", "clip"}, default "refuse"
        What becomes of data beyond a bound. ``clip``: entries are cut to their bound, then rows
        that are too long are shortened to their norm, each row by itself.
    one_hot : bool, default False
        Whether each row of `Y` must be a single 1 among zeros.

    Returns
    -------
    tuple of ndarray
        X and Y as new C-contiguous float64 arrays. What passes a bound by rounding only is cut.

    Raises
    ------
    InvalidParameterError
        If the data are unfit. It names what is wrong and shows none of the data: the error goes to
        the server.

    Examples
    --------
    >>> check_data([[3.0]], [[1]], feature_bound=1, label_bound=1, excess="clip")[0].tolist()
    [[1.0]]
    """
    check_choice("excess", excess, ("refuse", "clip"))
    features, labels = tables(X, Y)
    for name, table in (("X", features), ("Y", labels)):
        if not np.isfinite(table).all():
            raise InvalidParameterError(name, "a value that is not finite", _TABLE)
    if one_hot and not (np.isin(labels, (0.0, 1.0)).all() and (labels.sum(axis=1) == 1).all()):
        raise InvalidParameterError("Y", "another row", "rows of zeros with a single 1")
    clip = excess == "clip"
    return (
        _bounded(("X", "feature"), features, feature_bound, feature_norm, clip=clip),
        _bounded(("Y", "label"), labels, label_bound, label_norm, clip=clip),
    )


def tables(X: ArrayLike, Y: ArrayLike) -> tuple[Array, Array]:
    """Return features and labels as two float64 matrices of as many rows (copies).

    Raises
    ------
    InvalidParameterError
        If they are none. It depends on no value.
    """
    features, labels = _table("X", X), _table("Y", Y)
    if len(features) != len(labels):
        raise InvalidParameterError("Y", "another number of records", "as many records as X has")
    return features, labels


def _table(name: str, values: ArrayLike) -> Array:
    """Return a copy of a matrix as float64."""
    allowed = _TABLE
    try:
        table = np.asarray(values)
    except ValueError:  # rows of different lengths
        raise InvalidParameterError(name, "rows that differ in length", allowed) from None
    if table.dtype.kind not in "biuf" or table.ndim != 2 or table.size == 0:
        raise InvalidParameterError(name, "another kind of array", allowed)
    return np.array(table, dtype=np.float64, order="C")


def _bounded(
    names: tuple[str, str], table: Array, bound: float, norm: float | None, *, clip: bool
) -> Array:
    """Return the table within its bounds, or refuse it; `names` are its own and its bounds'."""
    name, kind = names
    check_number(f"{kind}_bound", bound, minimum=_SMALLEST)
    if not clip and np.abs(table).max() > bound * (1 + _TOLERANCE):
        raise InvalidParameterError(name, "a value outside", f"entries from {-bound} to {bound}")
    table = np.clip(table, -bound, bound)
    if norm is None:
        return table
    check_number(f"{kind}_norm", norm, minimum=_SMALLEST)
    lengths = np.linalg.norm(table, axis=1)
    if not clip and lengths.max() > norm * (1 + _TOLERANCE):
        raise InvalidParameterError(name, "a row outside", f"rows of L2 norm at most {norm}")
    shortened: Array = table * (norm / np.maximum(lengths, norm))[:, None]
    return shortened
