"""Lagrange coded computing: packed secret sharing, and products of shares that decode.

K segments and T uniform masks are the values of a polynomial of degree K + T - 1 at K + T nodes and
holder n has its value at a point of its own. Any T holders learn nothing. A polynomial of total
degree g in the shared values, computed on the shares, is a polynomial of degree ``g (K + T - 1)``
along the points: any ``g (K + T - 1) + 1`` holders' answers give its values at the nodes.

With K = 1 these are Shamir's shares, with the secret at a node of its own in place of 0.

Source: Yu et al., "Lagrange Coded Computing: Optimal Design for Resiliency, Security and Privacy",
AISTATS 2019, as used in section 4 of "FedVS: Straggler-Resilient and Privacy-Preserving Vertical
Federated Learning for Split Models", ICML 2023 (FedVS below).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import (
    InvalidParameterError,
    NotEnoughSharesError,
    ProtocolError,
    check_integer,
)

from .field import Elements, Operand, PrimeField
from .thresholds import check_holders, recovery_threshold

__all__ = [
    "LagrangeCode",
    "lagrange_basis",
]


def lagrange_basis(nodes: Sequence[int], points: Sequence[int], p: int) -> NDArray[np.int64]:
    """Return the values of the Lagrange polynomials of some nodes at some points, modulo p.

    Parameters
    ----------
    nodes, points : sequence of int
        Nodes must differ modulo p. A point may be a node.
    p : int
        A prime.

    Returns
    -------
    ndarray of int64, shape (len(points), len(nodes))
        Entry (j, k) is ``prod_{l != k} (points_j - nodes_l) / (nodes_k - nodes_l)``. A row times
        the values of a polynomial at the nodes, of degree below their number, is its value there.

    Raises
    ------
    InvalidParameterError
        If two nodes are the same modulo p.

    Examples
    --------
    >>> lagrange_basis([1, 2], [3, 4, 5], 97).tolist()
    [[96, 2], [95, 3], [94, 4]]
    """
    _check_distinct("nodes", nodes, p)
    scales = []
    for k, node in enumerate(nodes):
        denominator = 1
        for other in (*nodes[:k], *nodes[k + 1 :]):
            denominator = denominator * (node - other) % p
        scales.append(pow(denominator, -1, p))
    basis = np.empty((len(points), len(nodes)), np.int64)
    for j, point in enumerate(points):
        before = [1]  # products of the differences to the nodes before each
        for node in nodes:
            before.append(before[-1] * (point - node) % p)
        after = 1
        for k in reversed(range(len(nodes))):
            basis[j, k] = before[k] * after * scales[k] % p
            after = after * (point - nodes[k]) % p
    return basis


@dataclass(frozen=True, kw_only=True)
class LagrangeCode:
    """A code for N holders, K segments and T masks.

    Parameters
    ----------
    N : int
        Number of holders, at least `threshold`.
    K : int
        Number of segments, at least 1.
    T : int
        Number of masks, at least 1: any T holders learn nothing.
    field : PrimeField
        Of at least ``N + K + T`` elements.
    degree : int, default 2
        Total degree of what is computed on the shares.
    nodes : tuple of int, default 1 to K + T
        Where the polynomials have their segments, and then their masks.
    points : tuple of int, default K + T + 1 to K + T + N
        Where the holders have their shares. All nodes and points are different elements.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range, N is below the threshold, or nodes and points repeat.

    Notes
    -----
    **Guarantee.** *Protected*: the segments. *Against*: any T holders, of any computing power, who
    see their shares and nothing else. *Covered*: perfect secrecy, since every T rows of the masks'
    columns of `matrix` are invertible and so their shares are uniform for all segments (FedVS,
    Theorem 5.2), while the masks are uniform, independent and used once. *Not covered*: T + 1 to
    K + T - 1 holders learn a part of the segments and, but for rare coalitions, all of a value that
    `encode_constant` shared; K + T holders learn everything. Who sees answers learns what their
    polynomial says beyond its values at the nodes, unless a `vanishing` one was added.

    Examples
    --------
    >>> code = LagrangeCode(N=3, K=1, T=1, field=PrimeField(97))
    >>> x = code.encode(np.array([5]), np.array([10]))
    >>> w = code.encode(np.array([3]), np.array([40]))
    >>> code.decode(dict(enumerate(x * w % 97)))
    array([15])
    """

    N: int
    K: int
    T: int
    field: PrimeField
    degree: int = 2
    nodes: tuple[int, ...] = ()
    points: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_holders(self.N, self.K, self.T, self.degree)
        inner, p = self.K + self.T, self.field.p
        if p < self.N + inner:
            raise InvalidParameterError("p", p, f"at least N + K + T = {self.N + inner}")
        object.__setattr__(self, "nodes", tuple(self.nodes) or tuple(range(1, inner + 1)))
        following = (x % p for x in range(inner + 1, inner + self.N + 1))
        object.__setattr__(self, "points", tuple(self.points) or tuple(following))
        for name, places, count in (("nodes", self.nodes, inner), ("points", self.points, self.N)):
            if len(places) != count:
                raise InvalidParameterError(name, places, f"{count} of them")
            for place in places:
                check_integer(name, place, minimum=0, maximum=p - 1)
            _check_distinct(name, places, p)
        if common := sorted(set(self.nodes) & set(self.points)):
            raise InvalidParameterError(
                "points", self.points, f"no node: {', '.join(map(str, common))}"
            )

    @property
    def threshold(self) -> int:
        """Number of answers needed to decode."""
        return recovery_threshold(self.K, self.T, self.degree)

    @property
    def vanishing_terms(self) -> int:
        """Number of coefficients that `vanishing` takes: K + 2 T - 1 for products of two."""
        return self.threshold - self.K

    @cached_property
    def matrix(self) -> NDArray[np.int64]:
        """The share of each holder as a sum of segments and masks, shape (N, K + T)."""
        matrix = lagrange_basis(self.nodes, self.points, self.field.p)
        matrix.flags.writeable = False
        return matrix

    def encode(self, segments: Elements, masks: Elements) -> NDArray[np.int64]:
        """Encode segments as one share per holder (FedVS, (2)).

        Parameters
        ----------
        segments : ndarray of integers, shape (K, ...)
            Elements of the field.
        masks : ndarray of integers, shape (T, ...)
            Uniform elements, from `PrimeField.uniform`, that nothing else uses.

        Returns
        -------
        ndarray of int64, shape (N, ...)
            The share of each holder.

        Raises
        ------
        InvalidParameterError
            If the shapes do not fit, or a value is no element of the field.
        """
        shape = np.shape(segments)[1:]
        _check_shape("segments", segments, (self.K, *shape))
        _check_shape("masks", masks, (self.T, *shape))
        return self._combined(self._encoder, np.concatenate([segments, masks]))

    def encode_constant(self, value: Elements, masks: Elements) -> NDArray[np.int64]:
        """Encode one value that is the same for all segments (FedVS, (4)).

        It is added to the masks' part of the polynomial, which is zero at the nodes of segments. So
        the polynomial has it there, and at the other nodes it with a mask added. The shares have
        the same distribution as those of K copies, for less work.

        Parameters
        ----------
        value : ndarray of integers, shape (...)
            Elements of the field.
        masks : ndarray of integers, shape (T, ...)
            As for `encode`.

        Returns
        -------
        ndarray of int64, shape (N, ...)

        Raises
        ------
        InvalidParameterError
            If the shapes do not fit, or a value is no element of the field.
        """
        _check_shape("masks", masks, (self.T, *np.shape(value)))
        return self._combined(self._constant_encoder, np.concatenate([value[None], masks]))

    def vanishing(self, coefficients: Elements) -> NDArray[np.int64]:
        """Evaluate, for each holder, a polynomial that is zero at the segments' nodes.

        With uniform coefficients, added to the answers of all holders, it leaves what they decode
        to as it is, and hides everything else in them (Ben-Or, Goldwasser and Wigderson, STOC
        1988).

        Parameters
        ----------
        coefficients : ndarray of integers, shape (vanishing_terms, ...)
            Of the polynomial q, by rising power; elements of the field.

        Returns
        -------
        ndarray of int64, shape (N, ...)
            ``q(x) prod_{k <= K} (x - nodes_k)`` at the point x of each holder.

        Raises
        ------
        InvalidParameterError
            If the shape does not fit, or a value is no element of the field.
        """
        shape = np.shape(coefficients)[1:]
        _check_shape("coefficients", coefficients, (self.vanishing_terms, *shape))
        return self._combined(self._vanishing, coefficients)

    def decode(self, answers: Mapping[int, Elements]) -> NDArray[np.int64]:
        """Decode the holders' results on shares to the result on each segment (FedVS, (6)).

        Parameters
        ----------
        answers : Mapping of int to ndarray of integers, shape (...)
            The answer of each holder, from 0. The `threshold` first ones count.

        Returns
        -------
        ndarray of int64, shape (K, ...)

        Raises
        ------
        NotEnoughSharesError
            If there are fewer answers than the threshold.
        ProtocolError
            If answers differ in shape.
        InvalidParameterError
            If there is no such holder, or a value is no element of the field.

        Notes
        -----
        A wrong answer gives a wrong result without an error, see `inconsistent`.
        """
        self._check_answers(answers, self.threshold)
        return self._decode(answers, tuple(answers)[: self.threshold])

    def inconsistent(self, answers: Mapping[int, Elements]) -> NDArray[np.bool_]:
        """Find the entries that decode differently from the first and from the last answers.

        Parameters
        ----------
        answers : Mapping of int to ndarray of integers, shape (...)
            As for `decode`, but at least one more than the threshold.

        Returns
        -------
        ndarray of bool, shape (K, ...)
            True where some answer is wrong. With one answer more than the threshold, a single wrong
            one shows for all segments.

        Raises
        ------
        NotEnoughSharesError, ProtocolError, InvalidParameterError
            As `decode`.
        """
        self._check_answers(answers, self.threshold + 1)
        holders = tuple(answers)
        first = self._decode(answers, holders[: self.threshold])
        return np.not_equal(first, self._decode(answers, holders[-self.threshold :]))

    @cached_property
    def _encoder(self) -> Operand:
        return self.field.prepare(self.matrix)

    @cached_property
    def _constant_encoder(self) -> Operand:
        ones = np.ones((self.N, 1), np.int64)
        return self.field.prepare(np.concatenate([ones, self.matrix[:, self.K :]], axis=1))

    @cached_property
    def _vanishing(self) -> Operand:
        p, rows = self.field.p, []
        for point in self.points:
            value = 1
            for node in self.nodes[: self.K]:
                value = value * (point - node) % p
            rows.append([value * pow(point, e, p) % p for e in range(self.vanishing_terms)])
        return self.field.prepare(np.array(rows, np.int64))

    def _combined(self, matrix: Operand, values: Elements) -> NDArray[np.int64]:
        """Return linear combinations of some arrays, one for each row of a matrix."""
        shape = values.shape[1:]
        flat = values.reshape(len(values), math.prod(shape))
        return self.field.matmul(matrix, flat).reshape(matrix.shape[0], *shape)

    def _check_answers(self, answers: Mapping[int, Elements], needed: int) -> None:
        for holder in answers:
            check_integer("holder", holder, minimum=0, maximum=self.N - 1)
        if len(answers) < needed:
            missing = [str(holder) for holder in range(self.N) if holder not in answers]
            raise NotEnoughSharesError(needed, len(answers), missing)
        shapes = sorted({np.shape(answer) for answer in answers.values()})
        if len(shapes) > 1:
            raise ProtocolError(f"answers of shapes {shapes[0]} and {shapes[1]}: expected one")

    def _decode(
        self, answers: Mapping[int, Elements], holders: tuple[int, ...]
    ) -> NDArray[np.int64]:
        points = tuple(self.points[holder] for holder in holders)
        decoder = _decoder(points, self.nodes[: self.K], self.field)
        return self._combined(decoder, np.stack([answers[holder] for holder in holders]))


@lru_cache(maxsize=256)
def _decoder(points: tuple[int, ...], nodes: tuple[int, ...], field: PrimeField) -> Operand:
    """Return the matrix from answers at some points to values at some nodes."""
    return field.prepare(lagrange_basis(points, nodes, field.p))


def _check_distinct(name: str, places: Sequence[int], p: int) -> None:
    if len({place % p for place in places}) < len(places):
        raise InvalidParameterError(name, tuple(places), f"no two the same modulo p = {p}")


def _check_shape(name: str, array: Elements, shape: tuple[int, ...]) -> None:
    if np.shape(array) != shape:
        raise InvalidParameterError(name, f"an array of shape {np.shape(array)}", f"shape {shape}")
