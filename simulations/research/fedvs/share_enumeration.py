"""Measures secrecy exactly: counts all views of FedVS in a field of a few elements.

A proof of secrecy can be checked where masks are few: go through all of them, and compare how often
each view comes up with one secret and with another. Half of the sum of the differences, the total
variation, is by how much the best guess beats a coin. 0 is perfect secrecy and 1 none at all, and
both are exact here.

- `enumerate_views`: a single number per owner and one round, by all masks; what is in view are the
  shares of some holders, the answers of all of them as the server has them, or both.
- `rounds_distance`: rows and columns, and many rounds on the same coded data, as the server sees
  them. Given the masks of the data, what a round shows is uniform on an affine subspace; views are
  drawn, and the chance of each is exact.

Source of the scheme: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning
for Split Models" (ICML 2023). Its theorems 5.2 and 5.3 are on shares of T holders and on one
answer. The rest is not in the paper, nor is the zero-mask.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError, check_flag, check_integer

__all__ = ["enumerate_views", "rounds_distance", "total_variation"]

Integers = NDArray[np.int64]

_MOST = 1_000_000  # views that are held at once
_LARGEST_TABLE = 200_000_000  # entries


def total_variation(first: ArrayLike, second: ArrayLike) -> float:
    """Return the total variation distance of two lists of equally likely views.

    Parameters
    ----------
    first, second : array_like of int, shape (views, parts)
        A view in each row, as often as it comes up.

    Returns
    -------
    float
        From 0 to 1.

    Raises
    ------
    InvalidParameterError
        If there is no view, or views have different parts.

    Examples
    --------
    >>> total_variation([[0], [0], [1], [2]], [[0], [1], [2], [2]])
    0.25
    """
    one, other = np.asarray(first, np.int64), np.asarray(second, np.int64)
    if one.ndim != 2 or not len(one):
        raise InvalidParameterError("first", one.shape, "a row for each view")
    if other.ndim != 2 or not len(other) or other.shape[1] != one.shape[1]:
        raise InvalidParameterError("second", other.shape, f"rows of {one.shape[1]} parts")
    places = _distinct(np.concatenate([one, other]))
    count = int(places.max()) + 1
    # Exact, as both are brought to one number of views.
    ours = np.bincount(places[: len(one)], minlength=count) * len(other)
    theirs = np.bincount(places[len(one) :], minlength=count) * len(one)
    return float(np.abs(ours - theirs).sum() / (2 * len(one) * len(other)))


def enumerate_views(
    code: LagrangeCode,
    data: ArrayLike,
    weights: ArrayLike,
    *,
    coalition: Sequence[int] = (),
    answers: Iterable[int] | None = None,
    dealers: Sequence[int] = (),
) -> Integers:
    """Return what a coalition sees of a round, for all masks of the others.

    Every client owns one number in each segment and one weight.

    Parameters
    ----------
    code : LagrangeCode
        The code; client n owns `data[n]` and holds the shares at its point n.
    data : array_like of int, shape (N, K)
        Elements of the field.
    weights : array_like of int, shape (N,)
        Elements of the field.
    coalition : sequence of int, default ()
        Clients that look at the shares that they hold. What they know of their own, and what it
        adds to the answers, is the same in all views and left out.
    answers : iterable of int, optional
        Clients whose answers are seen, all of them by default: what the server has. Empty without
        the server.
    dealers : sequence of int, default ()
        Clients that add a zero-mask.

    Returns
    -------
    ndarray of int64, shape (views, parts)
        One row for each choice of masks, all equally likely: the answers, then the shares of data,
        of weights and of zero-masks by owner.

    Raises
    ------
    InvalidParameterError
        If shapes do not fit, a client does not exist, or there are too many masks to go through.
    """
    p, clients = code.field.p, range(code.N)
    x, w = np.asarray(data, np.int64) % p, np.asarray(weights, np.int64) % p
    for name, values, shape in (("data", x, (code.N, code.K)), ("weights", w, (code.N,))):
        if values.shape != shape:
            raise InvalidParameterError(name, values.shape, f"shape {shape}")
    seen = list(clients) if answers is None else list(answers)
    for name, members in (("coalition", coalition), ("answers", seen), ("dealers", dealers)):
        for member in members:
            check_integer(name, member, minimum=0, maximum=code.N - 1)
    owners = [n for n in clients if n not in coalition]
    hiding = [n for n in dealers if n not in coalition]
    free = 2 * code.T * len(owners) + code.vanishing_terms * len(hiding)
    if p**free > _MOST:
        raise InvalidParameterError(
            "code", f"p = {p} with {free} masks", f"at most {_MOST} choices of masks"
        )
    masks = np.indices((p,) * free).reshape(free, -1)
    totals = np.zeros((code.N, masks.shape[1]), np.int64)
    held: list[Integers] = []
    inside, place = list(coalition), 0
    for n in owners:
        own, place = masks[place : place + 2 * code.T], place + 2 * code.T
        segments = np.broadcast_to(x[n, :, None], (code.K, masks.shape[1]))
        coded = code.encode(np.ascontiguousarray(segments), own[: code.T])
        models = code.encode_constant(np.full(masks.shape[1], w[n]), own[code.T :])
        totals = (totals + coded * models) % p
        held += [coded[inside], models[inside]]
    for _ in hiding:
        own, place = masks[place : place + code.vanishing_terms], place + code.vanishing_terms
        zeros = code.vanishing(own)
        totals = (totals + zeros) % p
        held.append(zeros[inside])
    return np.concatenate([totals[seen], *held]).T


def rounds_distance(
    p: int,
    first: tuple[ArrayLike, ArrayLike],
    second: tuple[ArrayLike, ArrayLike],
    *,
    samples: int = 2000,
    seed: int = 0,
    zero_mask: bool = False,
) -> NDArray[np.float64]:
    """Return how well the server tells two secrets apart after each of some rounds, with K = T = 1.

    All rounds are on the same coded rows, with fresh masks of the weights; the masks of the data
    stay. The embedding has one column.

    Parameters
    ----------
    p : int
        The prime; small.
    first, second : pair of array_like of int, shapes (b, E) and (rounds, E)
        Rows of all owners side by side, and their weights in each round, with the same products:
        these the server is to see.
    samples : int, default 2000
        Trainings to draw with either secret.
    seed : int, default 0
        Root of the draws.
    zero_mask : bool, default False
        Whether a zero-mask is added, by somebody who does not work with the server.

    Returns
    -------
    ndarray of float64, shape (rounds,)
        Total variation distance of the server's views up to each round: an average over the samples
        of likelihoods that are exact, by all masks of the data. Its standard error is at most
        ``1 / sqrt(8 samples)``; if the views are equally likely throughout it is exactly 0.

    Raises
    ------
    InvalidParameterError
        If shapes do not fit, products differ, or there are too many masks to go through.

    Notes
    -----
    With ``F = X l1 + Z l2`` and ``G = W + U l2``, where l1 and l2 are the basis and sum up to 1, is
    ``F G = XW l1 + (XU + ZW) l1 l2 + (ZU + ZW) l2^2``. XW is what the server is to have, and
    the rest, with U uniform, is uniform on the span of ``[X; Z]`` moved by ``[ZW; ZW]``. A
    zero-mask adds a uniform vector to both. Rounds are independent given Z.
    """
    check_integer("p", p, minimum=3)
    check_integer("samples", samples, minimum=1)
    check_integer("seed", seed, minimum=0)
    check_flag("zero_mask", zero_mask)
    pairs = [
        (np.asarray(rows, np.int64) % p, np.asarray(models, np.int64) % p)
        for rows, models in (first, second)
    ]
    (rows, models), (others, other_models) = pairs
    for name, (own, weights) in zip(("first", "second"), pairs, strict=True):
        if (
            own.ndim != 2
            or own.shape != rows.shape
            or weights.shape
            != (
                len(models),
                own.shape[1],
            )
        ):
            raise InvalidParameterError(
                name, (own.shape, weights.shape), "rows (b, E) and weights (rounds, E), as in both"
            )
    if ((rows @ models.T - others @ other_models.T) % p).any():
        raise InvalidParameterError("second", "other products", "the products of the first")
    b, width = rows.shape
    if p ** (b * width + 2 * b) * len(models) > _LARGEST_TABLE:
        raise InvalidParameterError("first", (b, width), f"fewer rows or columns for p = {p}")
    draws = np.random.default_rng(seed)
    tables = [_Table(p, *pair, zero_mask=zero_mask) for pair in pairs]
    distances = np.zeros(len(models))
    for drawn, against in (tables, tables[::-1]):
        for _ in range(samples):
            view = drawn.draw(draws)
            # How much less likely it is with the other secret.
            distances += np.maximum(0.0, 1 - against.chances(view) / drawn.chances(view))
    return distances / (2 * samples)


def _distinct(rows: Integers) -> Integers:
    """Return numbers from 0 that are equal for equal rows."""
    numbers = np.zeros(len(rows), np.int64)
    for column in rows.T:
        # With few numbers left for what came before, nothing overflows.
        values, own = np.unique(column, return_inverse=True)
        _, numbers = np.unique(numbers * len(values) + own, return_inverse=True)
    return numbers


class _Table:
    """Which views of each round are possible with which masks of the data."""

    def __init__(self, p: int, rows: Integers, models: Integers, *, zero_mask: bool) -> None:
        b, width = rows.shape
        self._base = (p,) * (2 * b)
        masks = _vectors(p, b * width).reshape(-1, b, width)
        moves = _vectors(p, width).T  # masks of the weights
        spread = np.concatenate(
            [np.broadcast_to((rows @ moves)[None], (len(masks), b, p**width)), masks @ moves],
            axis=1,
        )
        # For each round, view and mask of the data: whether it can come up.
        self._possible = np.ones((len(models), p ** (2 * b), len(masks)), np.bool_)
        for possible, model in zip(self._possible, models, strict=True):
            if not zero_mask:
                possible[:] = False
                middle = np.tile(masks @ model, 2)[:, :, None]
                views = np.ravel_multi_index(
                    tuple(np.moveaxis(spread + middle, 1, 0) % p), self._base
                )
                possible[views, np.arange(len(masks))[:, None]] = True
        # Of so many equally likely views; counted by that, so that equal chances are equal floats.
        sizes, kinds = np.unique(self._possible[0].sum(axis=0), return_inverse=True)
        self._kinds = np.eye(len(sizes))[kinds.reshape(-1)]
        self._chances = (1 / sizes) ** np.arange(1.0, len(models) + 1)[:, None] / len(masks)

    def draw(self, draws: np.random.Generator) -> Integers:
        """Return the views of all rounds of a training."""
        mask = int(draws.integers(self._possible.shape[2]))
        return np.array(
            [draws.choice(np.flatnonzero(possible[:, mask])) for possible in self._possible]
        )

    def chances(self, view: Integers) -> NDArray[np.float64]:
        """Return the chance of the views up to each round."""
        possible = self._possible[np.arange(len(view)), view]
        running = np.logical_and.accumulate(possible, axis=0)
        chances: NDArray[np.float64] = (running @ self._kinds * self._chances).sum(axis=1)
        return chances


def _vectors(p: int, n: int) -> Integers:
    """Return all vectors of n elements, one below the other."""
    return np.indices((p,) * n).reshape(n, -1).T
