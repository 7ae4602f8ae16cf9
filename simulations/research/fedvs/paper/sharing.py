"""Pads whole data sets, and shares weights as the paper has it: for simulations and comparisons.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), section 4. A node pads the rows of a message at a time, and shares weights by
`flwr_privacy.fedvs.sharing.weight_shares`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.rows import Segments
from flwr_privacy.fedvs.sharing import check_matrix
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = ["pad_rows", "pad_rows_paper", "weight_shares_paper"]

Elements = NDArray[np.int64]


def pad_rows(
    elements: NDArray[Any], segments: Segments, field: PrimeField, random: SecureRandom
) -> Elements:
    """Return the rows with uniform random elements at the places of the pads.

    Parameters
    ----------
    elements : (M, e) ndarray of integers
        The owner's quantised data, in the common order.
    segments : Segments
        How they are cut; its `rows` are M.
    field : PrimeField
        The field.
    random : SecureRandom
        Where the pads come from.

    Returns
    -------
    (K * length, e) ndarray of int64
        The rows, then the pads. They decode to noise, of loss weight 0.

    Notes
    -----
    **Guarantee.** Random pads say nothing of the data. In a batch of fewer rows than columns they
    are linearly independent of the other rows, but for a chance of at most about 1 / p. Rows of
    zeros, as of `pad_rows_paper`, never are, and without masks that vanish the server then learns
    more than the sums.
    """
    _check_rows(elements, segments.rows)
    pads = field.uniform((segments.pads, elements.shape[1]), random)
    return np.concatenate([elements.astype(np.int64, copy=False), pads])


def pad_rows_paper(elements: NDArray[Any], segments: Segments) -> Elements:
    """Return the rows with zeros at the places of the pads.

    The paper takes M for a multiple of K; zeros are the usual way. See `pad_rows` for what is wrong
    with them.
    """
    _check_rows(elements, segments.rows)
    pads = np.zeros((segments.pads, elements.shape[1]), np.int64)
    return np.concatenate([elements.astype(np.int64, copy=False), pads])


def weight_shares_paper(
    code: LagrangeCode, elements: NDArray[Any], random: SecureRandom
) -> Elements:
    """Deal shares of an owner's weights as FedVS, (4), is written: K equal segments and T masks.

    Parameters, returned value and guarantee are those of `weight_shares`.
    """
    check_matrix("elements", elements)
    masks = code.field.uniform((code.T, *elements.shape), random)
    segments = np.broadcast_to(elements.astype(np.int64), (code.K, *elements.shape))
    return code.encode(segments, masks)


def _check_rows(elements: NDArray[Any], rows: int) -> None:
    check_matrix("elements", elements)
    if len(elements) != rows:
        raise InvalidParameterError("elements", f"{len(elements)} rows", f"{rows} rows")
