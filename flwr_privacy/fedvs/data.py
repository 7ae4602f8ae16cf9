"""A client's columns of rows that all clients share."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import DataError
from flwr_privacy.wire.channel import canonical

__all__ = ["TEST_PART", "TRAIN_PART", "VerticalData", "ids_digest"]

TRAIN_PART, TEST_PART = "train", "test"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerticalData:
    """The features that one client has of rows that all clients share, in the same order.

    That the rows of all clients are the same ones has been seen to before (private set
    intersection is no part of this library). Row counts are compared, and a hash of the identities
    where they are given.

    Parameters
    ----------
    train : (M, d) array of numbers
        Training rows.
    test : (m, d) array of numbers, optional
        Rows on which the model is evaluated.
    more : mapping of str to (k, d) array, optional
        Other rows to predict, by name.
    ids : mapping of str to sequence, optional
        Identities of the rows of each part, in their order: text, numbers or bytes.

    Attributes
    ----------
    parts : mapping of str to (rows, d) float64
        All of them by name; the first two are ``train`` and ``test``.

    Raises
    ------
    DataError
        If a part is no matrix of finite numbers, has no row, other columns than the training rows,
        or another number of identities than rows. The message has no value of the data.

    Examples
    --------
    >>> data = VerticalData(train=[[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]], test=[[0.2, 0.8]])
    >>> data.columns, sorted(data.parts)
    (2, ['test', 'train'])
    """

    train: ArrayLike
    test: ArrayLike | None = None
    more: Mapping[str, ArrayLike] = field(default_factory=dict)
    ids: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    parts: Mapping[str, NDArray[np.float64]] = field(init=False)

    def __post_init__(self) -> None:
        if taken := {TRAIN_PART, TEST_PART}.intersection(self.more):
            raise DataError(
                f"the parts {sorted(taken)} among more: they have parameters of their own"
            )
        given: dict[str, ArrayLike] = {TRAIN_PART: self.train, **self.more}
        if self.test is not None:
            given[TEST_PART] = self.test
        parts = {name: _matrix(name, array) for name, array in given.items()}
        object.__setattr__(self, "parts", parts)
        for name, array in parts.items():
            if array.shape[1] != self.columns:
                raise DataError(
                    f"the part '{name}' has {array.shape[1]} columns, the training rows have "
                    f"{self.columns}"
                )
            ids = self.ids.get(name)
            if ids is not None and len(ids) != len(array):
                raise DataError(f"the part '{name}' has {len(array)} rows and {len(ids)} ids")

    @property
    def columns(self) -> int:
        """Number of columns, d."""
        return int(self.parts[TRAIN_PART].shape[1])

    @property
    def size(self) -> int:
        """Bytes that the data take."""
        return sum(array.nbytes for array in self.parts.values())


def ids_digest(ids: Sequence[Any] | None) -> bytes:
    """Return a hash of identities in their order, 32 bytes; b"" where there are none.

    Examples
    --------
    >>> ids_digest(["a", "b"]) == ids_digest(["b", "a"])
    False
    """
    if ids is None:
        return b""
    plain = [value if isinstance(value, str | bytes) else str(value) for value in ids]
    return hashlib.sha256(canonical("fedvs ids", plain)).digest()


def _matrix(name: str, given: ArrayLike) -> NDArray[np.float64]:
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"the part '{name}' is no matrix of numbers") from error
    if array.ndim != 2 or 0 in array.shape:
        raise DataError(f"the part '{name}' has the shape {array.shape}: expected (rows, columns)")
    if missing := int((~np.isfinite(array)).any(axis=1).sum()):
        raise DataError(
            f"{missing} of {len(array)} rows of the part '{name}' have missing or infinite values"
        )
    return array
