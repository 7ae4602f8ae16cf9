"""Checks, before any request, that the app has said which arrays are running statistics."""

import logging
from collections.abc import Sequence

from flwr_privacy.privacy.running_statistics import SETTLED, not_told, suspected
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import Fields

__all__ = ["settled"]

logger = logging.getLogger("flwr.privacy")


def settled(arrays: Arrays, keep_back: Sequence[str] | None, *, first: bool) -> Fields:
    """Return the request's fields that say which arrays are running statistics.

    Parameters
    ----------
    arrays : dict
        The arrays of the round.
    keep_back : sequence of str, optional
        The arrays of which nothing is sent; None if the app has not said.
    first : bool
        Whether the training starts from these arrays: later values say less, and nobody looks.

    Raises
    ------
    InvalidParameterError
        If some arrays look like statistics, and the app has not said what they are.
    """
    if not first:
        return {SETTLED: True}
    left = [name for name in suspected(arrays) if name not in (keep_back or ())]
    if left and keep_back is None:
        raise not_told(left)
    if left and keep_back:
        logger.warning(
            "keep_back leaves out %s, which look like running statistics: they are treated as "
            "weights",
            left,
        )
    return {SETTLED: True}
