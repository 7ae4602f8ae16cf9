"""Recovers records from their Gram matrix; works for few records.

``A = X^T X`` and ``B = X^T Y`` of a device (see
`flwr_privacy.simulations.research.acfl.linear_gradients` for how a server gets them) are often
called statistics, as if they were far from the records. With fewer records than features they are
not. Exact statements, if A and B are exact and the m records, m at most d, are linearly
independent:

- A has rank m: the number of records.
- Every record of the device lies in the row space of A. A record of somebody else lies in it by
  chance only (`span_distance`).
- A record x of the device has ``x^T A^+ x = 1`` (`leverage`); of any device with any number of
  records no own record has more than 1.
- ``B^T A^+ B = Y^T Y``. With one-hot labels these are the counts of the classes, and the columns of
  B are the sums of each class; of a class with a single record, the record.
- A single record is known up to its sign, and where Y says which, with it.
- Records whose values are multiples of a known step, as all pixels and most tables are, span a
  lattice in which they are the vectors with ``x^T A^+ x = 1``. Lattice reduction finds them, all of
  them and exactly (`integer_records`), for as many records as it can handle, some forty; B then
  gives the label of each.

A guess is what is left for more records than features: a leverage above 1 still proves that a
record is none of the device's, one below proves nothing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.wire.arrays import is_finite

__all__ = ["Leak", "integer_records", "leaked_records", "leverage", "span_distance"]

Matrix = NDArray[np.float64]
Integers = NDArray[np.int64]

_TOLERANCE = 1e-9
_WHOLE = 0.1  # how far from an integer a value may be that is taken for one
_LARGEST = 2**40  # entries for which the reduction's integers stay below 2^63
_DELTA = 0.99  # of the Lovász condition


@dataclass(frozen=True, kw_only=True, eq=False)
class Leak:
    """What was recovered about the records of a device from its moments.

    Parameters
    ----------
    rank : int
        Rank of A: the number of records if they are linearly independent, else fewer.
    class_sums : ndarray of float64, shape (o, d)
        The rows of ``B^T``: with one-hot labels the sum of the records of each class.
    counts : ndarray of int64, shape (o,), or None
        Records of each class, if the labels are one-hot. None if ``B^T A^+ B`` is not diagonal with
        integers that sum up to `rank`: the records are not linearly independent then, A is not
        exact, or the labels are not one-hot.
    records : ndarray of float64, shape (k, d)
        Records that are known one by one.
    labels : ndarray of float64, shape (k, o)
        Their labels.
    """

    rank: int
    class_sums: Matrix
    counts: NDArray[np.int64] | None
    records: Matrix
    labels: Matrix


def leaked_records(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    one_hot: bool = False,
    step: float | None = None,
    tolerance: float = _TOLERANCE,
) -> Leak:
    """Return what the moments of a device say of its records.

    Parameters
    ----------
    features : array_like, shape (d, d)
        A.
    labels : array_like, shape (d, o)
        B.
    one_hot : bool, default False
        Whether each record is of one class.
    step : float, optional
        A step of which all values of the records are multiples.
    tolerance : float, default 1e-9
        Eigenvalues of A below this share of the largest count as 0.

    Returns
    -------
    Leak
        `records` has all of them if `step` is given and `integer_records` finds as many as A has
        rank, or if there is just one. Otherwise it has those that are alone in their class. Signs
        are right with one-hot labels; without them each record has the sign with which its sum is
        not negative, a guess unless the values are not negative.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.

    Examples
    --------
    >>> X, Y = np.array([[1.0, 2.0, 0.0], [0.0, 1.0, 5.0]]), np.eye(2)
    >>> leak = leaked_records(X.T @ X, X.T @ Y, one_hot=True)
    >>> leak.rank, leak.counts, leak.records.round(9)
    (2, array([1, 1]), array([[1., 2., 0.],
           [0., 1., 5.]]))
    """
    gram = _gram(features)
    products = np.asarray(labels, np.float64)
    if products.ndim != 2 or len(products) != len(gram) or not is_finite(products):
        raise InvalidParameterError("labels", products.shape, f"({len(gram)}, o) finite values")
    weights, axes = _spectrum(gram, tolerance)
    scaled = (axes.T @ products) / np.sqrt(weights)[:, None]
    counts = _counts(scaled.T @ scaled, len(weights)) if one_hot else None
    if step is not None:
        records = integer_records(gram, step=step, tolerance=tolerance)
    elif len(weights) == 1:
        records = _upright(axes.T * np.sqrt(weights)[:, None])
    else:
        records = np.zeros((0, len(gram)))
    if len(records) == len(weights):
        own: Matrix = np.asarray(np.linalg.lstsq(records.T, products, rcond=None)[0], np.float64)
        if one_hot:
            records, own = _turned(records, own.sum(axis=1)), _turned(own, own.sum(axis=1))
    else:
        alone = np.flatnonzero(counts == 1) if counts is not None else np.zeros(0, np.int64)
        records, own = products.T[alone], np.eye(products.shape[1])[alone]
    return Leak(
        rank=len(weights), class_sums=products.T, counts=counts, records=records, labels=own
    )


def span_distance(
    features: ArrayLike, candidates: ArrayLike, *, tolerance: float = _TOLERANCE
) -> Matrix:
    """Return how far candidates are from the row space of A, as a share of their length.

    Exact as a proof of absence: a record of the device has 0, to the accuracy of A. Nothing is said
    where A has full rank, as everything has 0 then.

    Parameters
    ----------
    features : array_like, shape (d, d)
        A.
    candidates : array_like, shape (n, d)
        Records that may be the device's.
    tolerance : float, default 1e-9
        Eigenvalues of A below this share of the largest count as 0.

    Returns
    -------
    ndarray of float64, shape (n,)
        Sine of the angle between candidate and row space, from 0 to 1; 0 for a candidate of zeros.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.

    Examples
    --------
    >>> span_distance(np.diag([4.0, 1.0, 0.0]), [[1.0, 2.0, 0.0], [0.0, 3.0, 4.0]]).round(9)
    array([0. , 0.8])
    """
    gram = _gram(features)
    offered = _candidates(candidates, len(gram))
    _, axes = _spectrum(gram, tolerance)
    lengths = np.linalg.norm(offered, axis=1)
    outside = np.linalg.norm(offered - (offered @ axes) @ axes.T, axis=1)
    shares: Matrix = np.divide(outside, lengths, out=np.zeros(len(offered)), where=lengths > 0)
    return shares


def leverage(
    features: ArrayLike, candidates: ArrayLike, *, tolerance: float = _TOLERANCE
) -> Matrix:
    """Return ``x^T A^+ x`` of candidates x.

    Exact as a proof of absence: a record of the device has at most 1, however many records there
    are; with linearly independent ones exactly 1.

    Parameters
    ----------
    features, candidates, tolerance
        As for `span_distance`. What a candidate has outside of the row space does not count here.

    Returns
    -------
    ndarray of float64, shape (n,)
        At least 0.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.

    Examples
    --------
    >>> leverage(np.diag([4.0, 1.0]), [[2.0, 0.0], [1.0, 1.0]])
    array([1.  , 1.25])
    """
    gram = _gram(features)
    offered = _candidates(candidates, len(gram))
    weights, axes = _spectrum(gram, tolerance)
    values: Matrix = np.sum((offered @ axes) ** 2 / weights, axis=1)
    return values


def integer_records(
    features: ArrayLike, *, step: float, most: int = 48, tolerance: float = _TOLERANCE
) -> Matrix:
    """Return the records behind A whose values are multiples of a step, one by one.

    In units of the step the rows of A are integer combinations of the records. With as many
    features as there usually are, they generate all of these: the lattice of the records, which in
    the form ``x^T A^+ y`` is that of the integers, with the records for an orthonormal basis. The
    lattice is reduced (Lenstra, Lenstra and Lovász, 1982) and vectors of length 1 are returned.

    Parameters
    ----------
    features : array_like, shape (d, d)
        A, to within a tenth of ``step**2`` in each entry.
    step : float
        The step, above 0: 1/16 for the digits of scikit-learn scaled to [0, 1].
    most : int, default 48
        Do not try if A has a larger rank. Up to 40 the reduction took seconds; beyond that it finds
        fewer and fewer.
    tolerance : float, default 1e-9
        Eigenvalues of A below this share of the largest count as 0.

    Returns
    -------
    ndarray of float64, shape (k, d)
        As many as A has rank: all records, exactly, each up to its sign, which is chosen so that
        the sum is not negative. Fewer, down to none, if the reduction fails, the records are not
        linearly independent, or A is not integer in units of ``step**2``.

    Raises
    ------
    InvalidParameterError
        If A is not a square matrix of finite values, `step` is not positive, or the entries of A
        are larger than 2^40 squared steps.

    Examples
    --------
    >>> X = np.array([[0.5, 0.25, 0.0, 1.0], [0.0, 0.75, 0.25, 0.5]])
    >>> integer_records(X.T @ X, step=0.25)
    array([[0.  , 0.75, 0.25, 0.5 ],
           [0.5 , 0.25, 0.  , 1.  ]])
    """
    gram = _gram(features)
    if not check_number("step", step) > 0:
        raise InvalidParameterError("step", step, "a number above 0")
    scaled = gram / step**2
    if np.abs(scaled).max(initial=0.0) > _LARGEST:
        raise InvalidParameterError("step", step, "a step with A below 2^40 of its squares")
    whole = np.rint(scaled).astype(np.int64)
    weights, axes = _spectrum(whole.astype(np.float64), tolerance)
    if np.abs(scaled - whole).max(initial=0.0) > _WHOLE or not 0 < len(weights) <= most:
        return np.zeros((0, len(gram)))
    form = axes / np.sqrt(weights)  # x^T A^+ y = (x form) (y form)^T
    basis = np.zeros((0, len(gram)), np.int64)
    generators = whole[whole.any(axis=1)]
    for row in generators[np.argsort(np.linalg.norm(generators @ form, axis=1), kind="stable")]:
        basis = _with_generator(basis, row, form)
        lengths = np.sum((basis @ form) ** 2, axis=1)
        if len(basis) == len(weights) and np.all(np.abs(lengths - 1) < _WHOLE):
            break
    found = basis[np.abs(np.sum((basis @ form) ** 2, axis=1) - 1) < _WHOLE]
    upright = _upright(found.astype(np.float64)) * step
    return upright[np.lexsort(upright.T[::-1])]


def _with_generator(basis: Integers, row: Integers, form: Matrix) -> Integers:
    """Return a reduced basis of the lattice that a reduced basis and one more vector generate.

    Vectors are integers and exact; only their products in the form are floats.
    """
    vectors = np.concatenate([basis, row[None]])
    k = max(1, len(basis))
    while k < len(vectors):
        upper: Matrix = np.asarray(np.linalg.qr((vectors[: k + 1] @ form).T, mode="r"))
        column = upper[:, k].copy()
        for j in range(min(k, len(upper)) - 1, -1, -1):
            if abs(upper[j, j]) > _WHOLE**2:
                times = np.rint(column[j] / upper[j, j])
                vectors[k] -= int(times) * vectors[j]
                column[: j + 1] -= times * upper[: j + 1, j]
        if not vectors[k].any():  # it was a combination of the others
            vectors = np.delete(vectors, k, axis=0)
            continue
        rest = column[k] ** 2 if k < len(column) else 0.0
        if rest >= _DELTA * upper[k - 1, k - 1] ** 2 - column[k - 1] ** 2:
            k += 1
        else:
            vectors[[k - 1, k]] = vectors[[k, k - 1]]
            k = max(1, k - 1)
    return vectors


def _counts(products: Matrix, rank: int) -> NDArray[np.int64] | None:
    """Return the diagonal of Y^T Y of one-hot labels, if it is one for so many records."""
    counts = np.rint(np.diagonal(products)).astype(np.int64)
    exact = np.abs(products - np.diag(counts)).max(initial=0.0) < _WHOLE
    return counts if exact and counts.sum() == rank else None


def _upright(records: Matrix) -> Matrix:
    return _turned(records, records.sum(axis=1))


def _turned(vectors: Matrix, by: Matrix) -> Matrix:
    """Return vectors with the sign of those changed that have a negative number."""
    turned: Matrix = vectors * np.where(by < 0, -1.0, 1.0)[:, None] + 0.0  # no zero is negative
    return turned


def _spectrum(gram: Matrix, tolerance: float) -> tuple[Matrix, Matrix]:
    """Return the eigenvalues above the tolerance, and their eigenvectors in columns."""
    limit = check_number("tolerance", tolerance, minimum=0, maximum=1)
    weights, axes = np.linalg.eigh(gram)
    kept = weights > limit * weights.max(initial=0.0)
    return weights[kept], axes[:, kept]


def _gram(features: ArrayLike) -> Matrix:
    array = np.asarray(features, np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not is_finite(array):
        raise InvalidParameterError("features", array.shape, "a square matrix of finite values")
    symmetric: Matrix = (array + array.T) / 2
    return symmetric


def _candidates(candidates: ArrayLike, features: int) -> Matrix:
    array = np.asarray(candidates, np.float64)
    if array.ndim != 2 or array.shape[1] != features or not is_finite(array):
        raise InvalidParameterError(
            "candidates", array.shape, f"finite records of {features} features"
        )
    return array
