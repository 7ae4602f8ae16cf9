"""What one client's data can do to what it sends: the L2 sensitivity of a release."""

import math

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.updates import SMALLEST_NORM

__all__ = ["RECORD_UNIT", "USER_UNIT", "check_sampling", "sensitivity"]

RECORD_UNIT, USER_UNIT = "record", "user"
"""What is protected: one record of a client's data, or all of its data."""

_SMALLEST = math.ulp(0.0)


def sensitivity(
    unit: str,
    *,
    clipping_norm: float,
    learning_rate: float = 1.0,
    records: int = 1,
    sampling_rate: float = 1.0,
) -> float:
    """Return the L2 sensitivity of one release.

    Parameters
    ----------
    unit : {"record", "user"}
        At record level one full-batch step with gradients clipped per record, where neighbouring
        data differ in one record: ``2 * learning_rate * clipping_norm / records`` (section III.A
        of the paper). At user level an update clipped as a whole, where neighbouring data differ in
        everything: ``2 * clipping_norm``.
    clipping_norm : float
        Bound of a record's gradient, or of the update.
    learning_rate, records : float, int
        Step size and number of records; at record level only.
    sampling_rate : float, default 1.0
        Rate at which records are drawn; the sum is then divided by ``sampling_rate * records``.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> sensitivity("record", clipping_norm=1.0, learning_rate=1.0, records=800)
    0.0025
    """
    check_number("clipping_norm", clipping_norm, minimum=SMALLEST_NORM)
    check_sampling(check_choice("unit", unit, (RECORD_UNIT, USER_UNIT)), sampling_rate)
    if unit == USER_UNIT:
        return 2 * clipping_norm
    check_number("learning_rate", learning_rate, minimum=_SMALLEST)
    check_integer("records", records, minimum=1)
    return 2 * learning_rate * clipping_norm / (sampling_rate * records)


def check_sampling(unit: str, sampling_rate: float) -> None:
    """Check the rate at which records are drawn.

    Raises
    ------
    InvalidParameterError
        If it is not allowed.
    """
    check_number("sampling_rate", sampling_rate, minimum=_SMALLEST, maximum=1)
    if unit == USER_UNIT and sampling_rate != 1:
        raise InvalidParameterError(
            "sampling_rate", sampling_rate, "1 at user level: records are not sampled"
        )
