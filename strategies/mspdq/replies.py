"""Reads the codes and numbers in a client's reply, which may come from an adversary."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import check_number
from flwr_privacy.mspdq import CODES
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import Fields

__all__ = ["numbers_of", "packed_codes"]


def packed_codes(arrays: Arrays) -> NDArray[Any]:
    """Return the array of packed codes.

    Raises
    ------
    ReplyRefusedError
        If there are other arrays, or none.
    """
    if set(arrays) != {CODES}:
        raise ReplyRefusedError("names", f"arrays {sorted(arrays)}, not '{CODES}'")
    return np.asarray(arrays[CODES])


def numbers_of(fields: Fields, name: str, count: int) -> list[float]:
    """Return the numbers that a client sends beside its codes.

    Raises
    ------
    ReplyRefusedError
        If there are more or fewer.
    InvalidParameterError
        If one is no finite number.
    """
    values = fields.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise ReplyRefusedError("malformed", f"the entry '{name}' is no list of {count} numbers")
    return [check_number(name, value) for value in values]
