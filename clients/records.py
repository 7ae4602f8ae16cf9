"""Flower's records seen as named NumPy arrays, decoded only when somebody looks."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from flwr_privacy.arrays import decode_npy

__all__ = ["RecordArrays", "first_array_record", "to_record"]


class RecordArrays(Mapping[str, NDArray[np.generic]]):
    """Read-only view of an ArrayRecord; an array is decoded, without a copy, when it is read.

    A scheme that hands a model on untouched therefore costs neither decoding nor encoding.
    """

    def __init__(self, record: ArrayRecord) -> None:
        self.record = record

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        return decode_npy(self.record[name].data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)


def to_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as an ArrayRecord; a `RecordArrays` gives back the record it views."""
    if isinstance(arrays, RecordArrays):
        return arrays.record
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def first_array_record(content: RecordDict) -> ArrayRecord:
    """Return the arrays of a message, whatever their record is called; none is an empty record."""
    # Not through `content.array_records`, whose cyclic garbage would keep the arrays alive.
    records = (record for record in content.values() if isinstance(record, ArrayRecord))
    return next(records, ArrayRecord())
