"""Solves, over the field, for what a coalition of share holders knows together.

In FedVS every client holds a share of everybody's data and, in each round, of everybody's weights.
A share is a linear combination of secrets and of uniform masks, with public coefficients. So all
that a coalition of holders can say of the secrets from its shares are the combinations in which the
masks cancel: linear relations between the secrets over the field (`open_shares`). There are

- none for T holders or fewer, the T masks of a share being as many;
- t - T for t holders and the K segments of the data, and with K + T of them all segments;
- one for T + 1 holders and the weights, which are the same in all segments: the weights.

Between T and K + T holders this was called a ramp, on which (t - T) / K of the data become known.
That holds for data that are uniform over the field. Real data are small integers, a byte or less
in a field of 31 bits, and a few relations of 31 bits determine all K of them: `small_secrets` finds
them, as a vector of a lattice near to a point, by lattice reduction. How many holders it takes
depends on the data and on the code's points. Relations with large coefficients do with
``T + bits K / 31`` holders. With small points in a row, as FedVS has them here, holders near to the
nodes have relations with small coefficients, which other small vectors fit as well, and it takes
more of them; holders far from the nodes are almost as good as any.

Source of the scheme: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning
for Split Models" (ICML 2023), whose theorem 5.2 is about T holders. Reduction: Lenstra, Lenstra and
Lovász, "Factoring Polynomials with Rational Coefficients", 1982; nearest planes: Babai, "On Lovász'
Lattice Reduction and the Nearest Lattice Point Problem", 1986.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import galois
import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError, check_integer

__all__ = [
    "OpenedShares",
    "data_coefficients",
    "open_shares",
    "small_secrets",
    "weight_coefficients",
]

Integers = NDArray[np.int64]

_DELTA = 0.99  # of the Lovász condition


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OpenedShares:
    """Everything that the shares of a coalition say about the secrets.

    Parameters
    ----------
    field : PrimeField
        Of the shares.
    relations : ndarray of int64, shape (r, secrets)
        Independent linear relations between the secrets, in reduced row echelon form.
    values : ndarray of int64, shape (r, ...)
        ``relations @ secrets`` in the field. Whatever else the secrets are, the shares are as
        likely.
    """

    field: PrimeField
    relations: Integers
    values: Integers

    @property
    def secrets(self) -> dict[int, Integers]:
        """The secrets that are known, by their place."""
        return {
            int(np.flatnonzero(row)[0]): value
            for row, value in zip(self.relations, self.values, strict=True)
            if np.count_nonzero(row) == 1
        }


def data_coefficients(code: LagrangeCode, coalition: Sequence[int]) -> Integers:
    """Return what the shares of an owner's data are made of: K segments, then T masks.

    Parameters
    ----------
    code : LagrangeCode
        The code.
    coalition : sequence of int
        Holders, each from 0 to N - 1 and once.

    Returns
    -------
    ndarray of int64, shape (t, K + T)

    Raises
    ------
    InvalidParameterError
        If there is no such holder, or one is named twice.
    """
    holders = [
        check_integer("coalition", holder, minimum=0, maximum=code.N - 1) for holder in coalition
    ]
    if len(set(holders)) != len(holders):
        raise InvalidParameterError("coalition", tuple(coalition), "each holder once")
    rows: Integers = code.matrix[holders]
    return rows


def weight_coefficients(code: LagrangeCode, coalition: Sequence[int]) -> Integers:
    """Return what the shares of an owner's weights are made of: the weights, then T masks.

    The weights lie in all K segments, and the coefficients of a share sum up to 1.

    Parameters
    ----------
    code, coalition
        As for `data_coefficients`.

    Returns
    -------
    ndarray of int64, shape (t, 1 + T)

    Raises
    ------
    InvalidParameterError
        If there is no such holder, or one is named twice.
    """
    rows = data_coefficients(code, coalition)
    total = rows[:, : code.K].sum(axis=1, keepdims=True) % code.field.p
    return np.concatenate([total, rows[:, code.K :]], axis=1)


def open_shares(
    shares: ArrayLike, coefficients: ArrayLike, *, secrets: int, field: PrimeField
) -> OpenedShares:
    """Return all that shares say of secrets whatever the masks were.

    Parameters
    ----------
    shares : array_like of int, shape (t, ...)
        Elements of the field: the share of each holder.
    coefficients : array_like of int, shape (t, secrets + masks)
        What each is made of.
    secrets : int
        How many of the columns are secrets; the others are uniform masks.
    field : PrimeField
        The field.

    Returns
    -------
    OpenedShares
        The relations: by elimination of the masks.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit.

    Examples
    --------
    Two shares of a secret and one mask, ``x + 2 z`` and ``x + 3 z`` with x = 5 and z = 4:

    >>> opened = open_shares([[13], [17]], [[1, 2], [1, 3]], secrets=1, field=PrimeField(97))
    >>> opened.secrets
    {0: array([5])}
    >>> open_shares([[13]], [[1, 2]], secrets=1, field=PrimeField(97)).secrets
    {}
    """
    held, made = np.asarray(shares, np.int64), np.asarray(coefficients, np.int64)
    check_integer("secrets", secrets, minimum=1)
    if made.ndim != 2 or made.shape[1] < secrets:
        raise InvalidParameterError("coefficients", made.shape, f"{secrets} columns or more")
    if held.ndim < 1 or len(held) != len(made):
        raise InvalidParameterError("shares", held.shape, f"shares of {len(made)} holders")
    masks = made.shape[1] - secrets
    unknowns = made.shape[1]
    equations = np.concatenate(
        [made[:, secrets:], made[:, :secrets], held.reshape(len(held), -1)], axis=1
    )
    reduced = galois.GF(field.p)(field.reduce(equations)).row_reduce(ncols=unknowns)
    rows = np.asarray(reduced, np.int64)
    rows = rows[~rows[:, :masks].any(axis=1) & rows[:, masks:unknowns].any(axis=1)]
    return OpenedShares(
        field=field,
        relations=rows[:, masks:unknowns],
        values=rows[:, unknowns:].reshape(len(rows), *held.shape[1:]),
    )


def small_secrets(
    opened: OpenedShares, *, lowest: int, highest: int, step: int = 1
) -> tuple[Integers, NDArray[np.bool_], bool]:
    """Return the secrets if they are known to be small, from few relations.

    Vectors of secrets that fit the relations are a lattice, moved. It has one point in
    ``p ** relations``, and if fewer vectors are possible at all, most likely one of them fits.

    Parameters
    ----------
    opened : OpenedShares
        What is known.
    lowest, highest : int
        Between which the secrets lie, as signed integers.
    step : int, default 1
        Of which they are multiples, as are `lowest` and `highest`: pixels with 17 levels at a scale
        of 2^8 are multiples of 16.

    Returns
    -------
    secrets : ndarray of int64, shape (secrets, ...)
        The point of the lattice that the nearest planes lead to.
    fits : ndarray of bool, shape (...)
        Whether it lies between the bounds. Where it does not, nothing was found.
    certain : bool
        Whether all vectors between the bounds are found by this: what fits is the secret then,
        without doubt. Mostly it is found without this being so.

    Raises
    ------
    InvalidParameterError
        If a bound or the step is out of range.

    Examples
    --------
    Of two digits one relation in a large field is known, ``x + 1234567 y`` with (3, 9):

    >>> field = PrimeField(2**31 - 1)
    >>> value = np.array([[3 + 1234567 * 9]])
    >>> opened = OpenedShares(field=field, relations=np.array([[1, 1234567]]), values=value)
    >>> found, fits, certain = small_secrets(opened, lowest=0, highest=9)
    >>> found.ravel(), bool(fits.all()), certain
    (array([3, 9]), True, True)
    """
    p = opened.field.p
    check_integer("step", step, minimum=1, maximum=p - 1)
    check_integer("lowest", lowest, minimum=-(p - 1) // 2, maximum=(p - 1) // 2)
    check_integer("highest", highest, minimum=lowest, maximum=(p - 1) // 2)
    if lowest % step or highest % step:
        raise InvalidParameterError("step", step, f"a divisor of {lowest} and {highest}")
    rank, count = opened.relations.shape
    shape = opened.values.shape[1:]
    low, high = lowest // step, highest // step
    middle = (low + high) // 2
    pivots = [int(np.flatnonzero(row)[0]) for row in opened.relations]
    entries = int(np.prod(shape, dtype=np.int64))
    unit = np.array([[pow(step, -1, p)]], np.int64)
    scaled = opened.field.matmul(unit, opened.values.reshape(1, -1)).reshape(rank, entries)
    points = np.zeros((entries, count), np.int64)
    points[:, pivots] = opened.field.signed(scaled.T)
    basis, rests = _lovasz(_kernel(opened.relations, pivots, p))
    near = _nearest(points - middle, basis) + middle
    fits: NDArray[np.bool_] = np.all((near >= low) & (near <= high), axis=1)
    reach = max(high - middle, middle - low)
    certain = bool(rests.min() ** 2 > 4 * count * reach**2)
    return (near.T * step).reshape(count, *shape), np.reshape(fits, shape), certain


def _kernel(relations: Integers, pivots: Sequence[int], p: int) -> Integers:
    """Return a basis of the integer vectors that the relations map to 0 modulo p."""
    basis = np.eye(relations.shape[1], dtype=np.int64)
    for row, pivot in zip(relations, pivots, strict=True):
        basis[:, pivot] = -row
        basis[pivot, pivot] = p
    # In echelon form the column of a pivot is zero in the other relations.
    return basis


def _lovasz(basis: Integers) -> tuple[Integers, NDArray[np.float64]]:
    """Return a reduced basis, and how long each vector is beside those before it."""
    vectors = basis.copy()
    k = 1
    while k < len(vectors):
        upper = _triangle(vectors[: k + 1])
        column = upper[:, k].copy()
        for j in range(k - 1, -1, -1):
            times = np.rint(column[j] / upper[j, j])
            vectors[k] -= int(times) * vectors[j]
            column[: j + 1] -= times * upper[: j + 1, j]
        if column[k] ** 2 + column[k - 1] ** 2 >= _DELTA * upper[k - 1, k - 1] ** 2:
            k += 1
        else:
            vectors[[k - 1, k]] = vectors[[k, k - 1]]
            k = max(1, k - 1)
    rests = np.abs(np.diagonal(_triangle(vectors)))
    return vectors, rests


def _triangle(vectors: Integers) -> NDArray[np.float64]:
    """Return the triangular factor of vectors that are rows."""
    return np.asarray(np.linalg.qr(vectors.T.astype(np.float64), mode="r"), np.float64)


def _nearest(points: Integers, basis: Integers) -> Integers:
    """Return what is left of points, a row each, less a lattice point nearby (nearest planes)."""
    across, upper = np.linalg.qr(basis.T.astype(np.float64))
    left = points.copy()
    for _ in range(2):  # a second time, as the first has large numbers to round
        for k in range(len(basis) - 1, -1, -1):
            times = np.rint(left @ across[:, k] / upper[k, k]).astype(np.int64)
            left -= times[:, None] * basis[k]
    return left
