"""Maps coded rows to rows of the data, and chooses the coded rows of a batch.

The rows are put in a common order, and cut into K segments of equal length; what is missing at the
end is padded. A coded row B of a share is made of the rows at places B of all segments, so every
batch of b coded rows decodes to K b rows, segment after segment (FedVS, section 4.2). K rows that
share a coded row stay together for all of training.

The order and the batches are public, and the same on all machines: they come from a seed by a
keystream, not from a generator whose output may change from one version to the next.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), section 4. Pads and the common order are not in the paper.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = ["Segments", "batch_of", "order"]

Places = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The K segments that some rows are cut into.

    Parameters
    ----------
    rows : int
        Number of rows M, at least 1.
    K : int
        Number of segments, at least 1.

    Examples
    --------
    >>> segments = Segments(rows=5, K=2)
    >>> segments.length, segments.pads
    (3, 1)
    >>> segments.real_rows(np.array([0, 2])).tolist()
    [0, 2, 3, 5]
    >>> segments.counted(np.array([0, 2])).tolist()
    [True, True, True, False]
    """

    rows: int
    K: int

    def __post_init__(self) -> None:
        check_integer("rows", self.rows, minimum=1)
        check_integer("K", self.K, minimum=1)

    @property
    def length(self) -> int:
        """Number of coded rows: rows of one segment, pads included."""
        return -(-self.rows // self.K)

    @property
    def pads(self) -> int:
        """Number of places at the end without a row."""
        return self.K * self.length - self.rows

    def real_rows(self, coded: NDArray[Any]) -> Places:
        """Return the places in the common order that some coded rows decode to.

        Parameters
        ----------
        coded : (b,) ndarray of integers
            Coded rows, 0 to ``length - 1``.

        Returns
        -------
        (K * b,) ndarray of int64
            ``k * length + coded`` for every segment k, one segment after the other. Places of at
            least `rows` are pads.

        Raises
        ------
        InvalidParameterError
            If a coded row is out of range, or they are no vector of integers.
        """
        if coded.ndim != 1 or coded.dtype.kind not in "iu":
            raise InvalidParameterError("coded", "another kind of array", "a vector of integers")
        if coded.size and (coded.min() < 0 or coded.max() >= self.length):
            raise InvalidParameterError(
                "coded", "a row outside", f"coded rows from 0 to {self.length - 1}"
            )
        starts = np.arange(self.K, dtype=np.int64) * self.length
        return (starts[:, None] + coded.astype(np.int64)).reshape(-1)

    def counted(self, coded: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which of `real_rows` are rows and no pads: those that count in the loss."""
        return self.real_rows(coded) < self.rows


def order(rows: int, seed: int) -> Places:
    """Return the common order: the row at each place.

    Without it a segment would be a stretch of the data as they lie, often of one class.

    Parameters
    ----------
    rows : int
        Number of rows, at least 1.
    seed : int
        The seed, which all parties know.

    Returns
    -------
    (rows,) ndarray of int64
        A permutation: place i holds row ``order[i]``.
    """
    return _permutation(check_integer("rows", rows, minimum=1), seed, "order")


def batch_of(length: int, size: int, seed: int, step: int) -> Places:
    """Return the batch of one step; an epoch has every coded row in one of its batches.

    Parameters
    ----------
    length : int
        Number of coded rows, at least 1.
    size : int
        Coded rows of a batch, at least 1. The last one of an epoch may have fewer.
    seed : int
        The seed, which all parties know; each epoch has a permutation of its own.
    step : int
        The step, from 1.

    Returns
    -------
    ndarray of int64
        Coded rows, in ascending order.
    """
    check_integer("size", size, minimum=1)
    check_integer("length", length, minimum=1)
    check_integer("step", step, minimum=1)
    epoch, place = divmod(step - 1, -(-length // size))
    start = place * size
    return np.sort(_epoch(length, seed, epoch + 1)[start : start + size])


@lru_cache(maxsize=8)
def _epoch(length: int, seed: int, epoch: int) -> Places:
    """Return an epoch's permutation, which all of its steps share."""
    shuffled = _permutation(length, seed, "epoch", epoch)
    shuffled.flags.writeable = False
    return shuffled


def _permutation(length: int, seed: int, *purpose: str | int) -> Places:
    """Return a permutation by sorting random keys; of equal ones the first stays first."""
    check_integer("seed", seed)
    keys = SecureRandom.insecure(seed, "fedvs rows", *purpose).uint64(length)
    # Little-endian on every machine, so that all parties have the same order.
    return np.argsort(keys.view("<u8"), kind="stable").astype(np.int64)
