"""Averages updates whose noise the clients of a secure sum add in shares."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.privacy.grid import CodeGrid, EvenMean
from flwr_privacy.wire.arrays import Arrays

__all__ = ["RECORDS_NAME", "SharedMean"]

RECORDS_NAME = "flwr-privacy.records"
"""Name of the entry that counts records, beside those of the model's arrays."""


class SharedMean(EvenMean):
    """Mean of updates given as codes that have their share of the noise in them.

    At record level a client with n records sends n times its update, and n: so every record weighs
    the same, and the noise of the sum does for all. At user level everybody weighs the same.

    Parameters
    ----------
    start : Mapping of str to ndarray
        The model that the updates start from.
    grid : CodeGrid
        What the codes mean.
    names : list of str
        Which arrays of the model the updates are of.
    counts : bool
        Whether the clients send their numbers of records: at record level.
    failed_code : int, default 0
        As in `GridMean`.

    Notes
    -----
    **Guarantee.** See `flwr_privacy.privacy.distributed_noise.share_sigma`. The number of records
    in the sum has no noise: at record level it is public.

    Examples
    --------
    >>> mean = SharedMean({"w": np.zeros(1)}, CodeGrid(-1), ["w"], counts=True)
    >>> mean.accumulate("a", {"w": np.array([12]), RECORDS_NAME: np.array([3])}, weight=1)
    >>> mean.accumulate("b", {"w": np.array([0]), RECORDS_NAME: np.array([1])}, weight=1)
    >>> mean.finish()
    {'w': array([1.5])}
    """

    def __init__(
        self, start: Arrays, grid: CodeGrid, names: list[str], *, counts: bool, failed_code: int = 0
    ) -> None:
        super().__init__(start, grid, names, failed_code=failed_code)
        self._counts = counts
        if self._counts:
            self.template[RECORDS_NAME] = ((1,), np.dtype(np.int32))

    def from_state(self, arrays: Arrays, fields: Mapping[str, Any]) -> WeightedMean:
        """Return an accumulator with what `state` returned; see `WeightedMean.from_state`."""
        mean = super().from_state(arrays, fields)
        if self._counts and arrays and arrays[RECORDS_NAME][0] < 1:
            raise ReplyRefusedError("range", "a sum over no records")
        return mean

    def finish(self) -> dict[str, NDArray[np.generic]]:
        """Return the start plus the mean update.

        Raises
        ------
        ZeroDivisionError
            If there are no records.
        """
        if self._counts:
            self.weight = float(self._sums.pop(RECORDS_NAME)[0])
        return super().finish()
