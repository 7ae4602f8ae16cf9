"""Labels from the update of the last layer.

With cross entropy the bias of class c moves by the step size times the share of its records, less
the mean of the model's own guesses. So a class that the client has goes up, and the others go down.
The step size need not be known: some class is assumed to be absent, and the model to guess all
classes alike.

Sources: Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020; Wainakh et al.,
"User-Level Label Leakage from Gradients in Federated Learning", PoPETs 2022.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.wire.arrays import is_finite

from .evidence import Upload

__all__ = ["class_moves", "label_counts", "label_shares", "overlap"]

Vectors = NDArray[np.float64]


def class_moves(upload: Upload, layer: str) -> Vectors | None:
    """Return by how much each class moved in the last layer: its bias, or the sum of its weights.

    Parameters
    ----------
    upload : Upload
        What left the node.
    layer : str
        The last layer's name.

    Returns
    -------
    ndarray, shape (classes,), or None
        None where neither was uploaded. The sum of the weights has the sign of the bias's move
        where the layer's inputs are not negative, as behind a ReLU.
    """
    bias, weight = (upload.change.get(f"{layer}.{part}") for part in ("bias", "weight"))
    if bias is not None:
        return bias
    return None if weight is None else weight.sum(axis=1)


def label_shares(moves: ArrayLike) -> Vectors:
    """Return the share of each class in a client's records.

    Parameters
    ----------
    moves : array_like, shape (classes,)
        See `class_moves`.

    Raises
    ------
    InvalidParameterError
        If it is no vector of two finite numbers or more.

    Examples
    --------
    >>> label_shares([0.3, -0.1, -0.1, -0.1])
    array([1., 0., 0., 0.])
    """
    moved = np.asarray(moves, np.float64)
    if moved.ndim != 1 or len(moved) < 2 or not is_finite(moved):
        raise InvalidParameterError("moves", moved.shape, "two finite numbers or more")
    moved = moved - moved.mean()
    lowest = -float(moved.min())
    even = np.full(len(moved), 1 / len(moved))
    return even if lowest <= 0 else even + moved / (lowest * len(moved))


def label_counts(moves: ArrayLike, records: int) -> NDArray[np.int64]:
    """Return how many records of each class there are, where their number is known.

    Parameters
    ----------
    moves : array_like, shape (classes,)
        See `class_moves`.
    records : int
        How many records the client has.

    Examples
    --------
    >>> label_counts([0.2, 0.1, -0.1, -0.2], 3)
    array([2, 1, 0, 0])
    """
    check_integer("records", records, minimum=1)
    wanted = records * label_shares(moves)
    counts = np.floor(wanted + 1e-9).astype(np.int64)
    left = records - int(counts.sum())
    counts[np.argsort(-(wanted - counts), kind="stable")[:left]] += 1
    return counts


def overlap(counts: ArrayLike, truth: ArrayLike) -> int:
    """Return for how many records the label is right, whatever their order.

    Examples
    --------
    >>> overlap([2, 0, 1], [1, 1, 1])
    2
    """
    return int(np.minimum(counts, truth).sum())
