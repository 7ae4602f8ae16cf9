"""Views Flower's records as named NumPy arrays, encoded and decoded only when read."""

import copy
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.wire.arrays import HashedArrays, array_digest, decode_npy, encode_npy, npy_size

__all__ = [
    "LocalArray",
    "RecordArrays",
    "decoded",
    "first_array_record",
    "to_record",
    "with_content",
]

_NUMPY = "numpy.ndarray"  # Flower's name for arrays in npy bytes


class LocalArray(Array):
    """A NumPy array in a record, encoded only when its bytes are read.

    Flower encodes an array when a record is made and decodes it whenever somebody reads it. Where
    the one who writes a record and the one who reads it are the same process, both are copies for
    nothing. A pickled or copied one is Flower's Array.

    Parameters
    ----------
    values : ndarray
        The values. Whoever makes the record does not change them any more.
    encoded : bytes, optional
        Their npy bytes, where they are known.
    """

    def __init__(self, values: NDArray[Any], encoded: bytes | None = None) -> None:
        self.__dict__.update(
            dtype=_name_of(values.dtype),
            shape=values.shape,
            stype=_NUMPY,
            values=values,
            encoded=encoded,
        )

    @property
    def values(self) -> NDArray[Any]:
        """The values, which must not be changed."""
        values: NDArray[Any] = self.__dict__["values"]
        return values

    @property
    def encoded_size(self) -> int:
        """Number of bytes of `data`."""
        return npy_size(self.values)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The npy bytes."""
        if self.__dict__["encoded"] is None:
            self.__dict__["encoded"] = encode_npy(self.values)
        encoded: bytes = self.__dict__["encoded"]
        return encoded

    def numpy(self) -> NDArray[Any]:
        """Return a copy of the values, as Flower's arrays do."""
        return np.array(self.values, order="K")

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


class RecordArrays(HashedArrays):
    """Read-only view of an ArrayRecord; an array is decoded, without a copy, when it is read.

    A scheme that hands a model on untouched therefore costs neither decoding nor encoding.
    """

    def __init__(self, record: ArrayRecord) -> None:
        self.record = record

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        array = self.record[name]
        if isinstance(array, LocalArray):
            values: NDArray[np.generic] = array.values.view()
            values.flags.writeable = False
            return values
        try:
            return decode_npy(array.data)
        except ValueError as error:
            raise InvalidParameterError(name, str(error), "an array of real numbers") from error

    def digest(self, name: str) -> bytes:
        """Return the hash of an array; the record caches it for all clients."""
        array = self.record[name]
        own = vars(array)
        octets = own.get("data")
        if isinstance(array, LocalArray) and not array.values.flags.writeable:
            octets = own["encoded"]
        if octets is None:  # values that somebody may change
            return array_digest(self[name])
        known = own.get("_digest")
        if known is None or known[0] is not octets:
            known = own["_digest"] = octets, array_digest(self[name])
        digest: bytes = known[1]
        return digest

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)


def to_record(arrays: Mapping[str, NDArray[Any]], *, local: bool = False) -> ArrayRecord:
    """Return named arrays as an ArrayRecord; a `RecordArrays` returns the record it views.

    Parameters
    ----------
    arrays : Mapping of str to ndarray
        The arrays.
    local : bool, default False
        Whether the record is read before anybody changes the arrays, so that they need not be
        encoded for it.
    """
    if isinstance(arrays, RecordArrays):
        return arrays.record
    make = LocalArray if local else _encoded
    return _record({name: make(np.asarray(array)) for name, array in arrays.items()})


def decoded(content: RecordDict) -> RecordDict:
    """Return a message's records with their arrays decoded once, for all readers.

    Arrays that cannot be decoded stay as they are, for whoever reads them to say so.
    """
    records: dict[str, Any] = {
        name: _record({key: _decoded(array) for key, array in record.items()})
        if isinstance(record, ArrayRecord)
        else record
        for name, record in content.items()
    }
    return RecordDict(records)


@lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> str:
    return str(dtype)  # which takes longer than all else of a LocalArray


def _record(arrays: Mapping[str, Array]) -> ArrayRecord:
    record = ArrayRecord()
    for name, array in arrays.items():  # one by one: made of a dict, each would be made anew
        record[name] = array
    return record


def _encoded(array: NDArray[Any]) -> Array:
    return Array(str(array.dtype), array.shape, _NUMPY, encode_npy(array))


def _decoded(array: Array) -> Array:
    if isinstance(array, LocalArray) or array.stype != _NUMPY:
        return array
    try:
        return LocalArray(decode_npy(array.data), array.data)
    except ValueError:
        return array


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a copy of a message with other records."""
    copied = copy.copy(message)
    copied.content = content
    return copied


def first_array_record(content: RecordDict) -> ArrayRecord:
    """Return the arrays of a message, whatever their record's name; empty if there are none."""
    # Not through `content.array_records`, whose cyclic garbage would keep the arrays alive.
    records = (record for record in content.values() if isinstance(record, ArrayRecord))
    return next(records, ArrayRecord())
