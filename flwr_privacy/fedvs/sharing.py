"""Deals coded shares of data and weights, and computes on them: FedVS, section 4.

Every owner cuts its expanded data into K segments and deals Lagrange-coded shares of them, once. In
every round it deals shares of its weights. A holder multiplies the coded rows of all owners with
the coded weights of all owners: the products lie on a polynomial of degree ``2 (K + T - 1)``, whose
values at the first K nodes are the sums over the owners of ``X_n W_n``. Any ``2 (K + T - 1) + 1``
holders' answers give them exactly.

All arrays are of elements of the field, as int64. What is shared lies in the order segment after
segment, as `flwr_privacy.fedvs.rows.Segments.real_rows` has it.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023). Random pads and the masks that vanish are not in the paper.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = [
    "check_matrix",
    "data_shares",
    "decode_rows",
    "evaluate",
    "maskers",
    "weight_shares",
    "zero_masks",
]

Elements = NDArray[np.int64]


# Dealing


def data_shares(code: LagrangeCode, elements: NDArray[Any], random: SecureRandom) -> Elements:
    """Deal shares of some of an owner's rows: FedVS, (2).

    An owner with many rows deals them in chunks: the rows of a chunk are those at
    `Segments.real_rows` of its coded rows.

    Parameters
    ----------
    code : LagrangeCode
        The code.
    elements : (K * count, e) ndarray of integers
        The rows, segment after segment, pads included.
    random : SecureRandom
        Where the T masks come from.

    Returns
    -------
    (N, count, e) ndarray of int64
        The share of each holder: `count` coded rows, one K-th of the data's size.

    Raises
    ------
    InvalidParameterError
        If the number of rows is no multiple of K.

    Notes
    -----
    **Guarantee.** *Protected*: the owner's rows, but not how many there are. *Against*: any T
    holders who put their shares together, of any computing power, for any prime (FedVS, Theorem
    5.2). *Covered*: the shares of data and weights, which are uniform and independent of what is
    shared. *Not covered*: what holders see besides shares, such as the gradients that the server
    sends them, which give away labels and how hard a row is; more holders than T, who have, if they
    are t, ``t - T`` linear relations between the K segments: enough to find small numbers by
    lattice reduction, binary ones from ``T + 1`` holders on; ``K + T``, who have all; shares that
    are kept, as a coalition formed later, or a breach of ``K + T`` machines, opens them; a relay
    that sees shares in the clear, so they travel encrypted; the server's view, for which see
    `zero_masks`.
    """
    check_matrix("elements", elements)
    rows, width = elements.shape
    if rows == 0 or rows % code.K:
        raise InvalidParameterError("elements", f"{rows} rows", f"a multiple of K = {code.K}")
    count = rows // code.K
    masks = code.field.uniform((code.T, count, width), random)
    return code.encode(elements.reshape(code.K, count, width), masks)


def weight_shares(code: LagrangeCode, elements: NDArray[Any], random: SecureRandom) -> Elements:
    """Deal shares of an owner's weights, with fresh masks: FedVS, (4).

    The same weights are at all K data nodes, so they are a constant plus T masks. The shares have
    the distribution of
    `flwr_privacy.simulations.research.fedvs.paper.sharing.weight_shares_paper` and are cheaper.

    Parameters
    ----------
    code : LagrangeCode
        The code.
    elements : (e, h) ndarray of integers
        The owner's quantised weights.
    random : SecureRandom
        Where the T masks come from.

    Returns
    -------
    (N, e, h) ndarray of int64
        The share of each holder, as large as the weights.

    Notes
    -----
    **Guarantee.** *Protected*: the owner's weights of one round. *Against*: any T holders who put
    their shares together (FedVS, Theorem 5.2). *Covered*: as of `data_shares`. *Not covered*:
    ``T + 1`` holders, who open the weights of every round, since they are the same at all data
    nodes (only about one coalition in p cannot); differences of weights, which give linear
    equations on the data, as the gradients are public; shares that are used for two batches, or
    dealt again with the same masks: they are for one evaluation only.
    """
    check_matrix("elements", elements)
    masks = code.field.uniform((code.T, *elements.shape), random)
    return code.encode_constant(elements, masks)


def zero_masks(code: LagrangeCode, b: int, h: int, random: SecureRandom) -> Elements:
    """Deal shares of a random polynomial that is zero at the data nodes. Not in the paper.

    Holders add them to their answers. What is decoded stays the same, and all else that the answers
    say is hidden. At least T + 1 owners deal them in every round (`maskers`), so that one of them
    is honest.

    Parameters
    ----------
    code : LagrangeCode
        The code.
    b : int
        Coded rows of the batch, at least 1.
    h : int
        Width of the embedding, at least 1.
    random : SecureRandom
        Where the K + 2T - 1 coefficients come from.

    Returns
    -------
    (N, b, h) ndarray of int64
        The share of each holder.

    Notes
    -----
    **Guarantee.** *Protected*: everything in the holders' answers but the K sums over the owners.
    *Against*: the server, also together with T holders (the paper does not look at them together),
    if an owner that is not among them deals a mask. *Covered*: the answers of one round, for any
    data and any prime. Without masks FedVS, Theorem 5.3, covers one holder's answer, and the server
    has at least ``2 (K + T - 1) + 1`` of them. *Not covered*: the sums themselves; over many rounds
    they give the server the inner products of all pairs of rows, by its own gradients; masks that
    are used twice.
    """
    check_integer("b", b, minimum=1)
    check_integer("h", h, minimum=1)
    return code.vanishing(code.field.uniform((code.vanishing_terms, b, h), random))


def maskers(N: int, T: int) -> int:
    """Return how many of N owners deal zero masks in a round: T + 2, so that one may be missing.

    Examples
    --------
    >>> maskers(28, 1), maskers(3, 2)
    (3, 3)
    """
    return min(N, T + 2)


# Evaluation


def evaluate(
    field: PrimeField,
    coded_rows: NDArray[Any],
    coded_weights: NDArray[Any],
    masks: Sequence[NDArray[Any]] = (),
) -> Elements:
    """Return a holder's answer to one batch: FedVS, (5).

    Parameters
    ----------
    field : PrimeField
        The field.
    coded_rows : (b, E) ndarray of integers
        The batch's rows of the holder's data shares, all owners' side by side.
    coded_weights : (E, h) ndarray of integers
        The holder's weight shares, all owners' one below the other, in the same order.
    masks : sequence of (b, h) ndarray, optional
        The holder's shares of `zero_masks`, one of each dealer. Default: none.

    Returns
    -------
    (b, h) ndarray of int64
        The answer, of the same size whatever the holder's own data.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit.
    """
    check_matrix("coded_rows", coded_rows)
    check_matrix("coded_weights", coded_weights)
    if coded_rows.shape[1] != len(coded_weights):
        raise InvalidParameterError(
            "coded_weights", f"{len(coded_weights)} rows", f"{coded_rows.shape[1]} rows"
        )
    answer = field.matmul(coded_rows, coded_weights)
    if len(masks) == 0:
        return answer
    total = answer.astype(np.int64)
    for mask in masks:
        if mask.shape != total.shape:
            raise InvalidParameterError("masks", mask.shape, f"arrays of shape {total.shape}")
        total += mask  # far below 2**63: every term is below 2**31
    return field.reduce(total)


def decode_rows(code: LagrangeCode, answers: Mapping[int, NDArray[Any]]) -> Elements:
    """Return the sums over all owners, a row for each row of the batch: FedVS, (6).

    Parameters
    ----------
    code : LagrangeCode
        The code.
    answers : Mapping of int to (b, h) ndarray
        Answers by the holder's position, from 0. The first ones that suffice count.

    Returns
    -------
    (K * b, h) ndarray of int64
        ``sum_n X_n W_n`` in the field, in the order of `Segments.real_rows`. Rows of pads are
        noise.

    Raises
    ------
    NotEnoughSharesError
        If there are too few answers.
    """
    blocks = code.decode(answers)
    return blocks.reshape(-1, blocks.shape[-1])


def check_matrix(name: str, elements: NDArray[Any]) -> None:
    """Refuse anything but a matrix of integers; the error calls it by this name."""
    if elements.ndim != 2 or elements.dtype.kind not in "iu":
        raise InvalidParameterError(name, "another kind of array", "a matrix of integers")
