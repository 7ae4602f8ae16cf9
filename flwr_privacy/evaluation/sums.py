"""Adds up the answers of a private evaluation, as codes on a grid."""

import numpy as np

from flwr_privacy.privacy.grid import CodeGrid, EvenMean
from flwr_privacy.privacy.noise import discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = ["RECORDS_NAME", "STATISTICS_NAME", "EvaluationSum"]

STATISTICS_NAME = "flwr-privacy.evaluation"
"""Name of the array of an answer that has its statistics."""

RECORDS_NAME = "flwr-privacy.evaluated"
"""Name of the array of an answer that has the number of evaluated records, at record level."""


class EvaluationSum(EvenMean):
    """The sum of the answers of an evaluation.

    Parameters
    ----------
    size : int
        Number of statistics of an answer.
    grid : CodeGrid
        What their codes mean.
    counts : bool
        Whether answers have their number of records: at record level.

    Examples
    --------
    >>> total = EvaluationSum(2, CodeGrid(-1), counts=False)
    >>> total.accumulate("a", {STATISTICS_NAME: np.array([4, 1], np.int32)}, weight=1)
    >>> total.accumulate("b", {STATISTICS_NAME: np.array([2, 0], np.int32)}, weight=1)
    >>> total.statistics(), total.records
    (array([3. , 0.5]), 0)
    """

    def __init__(self, size: int, grid: CodeGrid, *, counts: bool) -> None:
        start = {STATISTICS_NAME: np.zeros(size)}
        super().__init__(start, grid, [STATISTICS_NAME])
        if counts:
            self.template[RECORDS_NAME] = ((1,), np.dtype(np.int32))

    def add_noise(self, sigma: float, random: SecureRandom) -> None:
        """Add a trusted server's noise to the sum, once, however few answers are in it.

        Parameters
        ----------
        sigma : float
            Standard deviation of each entry.
        random : SecureRandom
            Where it comes from.
        """
        shape, _ = self.template[STATISTICS_NAME]
        total = self._sums.setdefault(STATISTICS_NAME, np.zeros(shape, self.sum_dtype))
        total += discrete_gaussian(total.size, sigma / self._grid.step, random)

    def statistics(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the sums of the statistics."""
        (size,), _ = self.template[STATISTICS_NAME]
        codes = self._sums.get(STATISTICS_NAME, np.zeros(size, self.sum_dtype))
        return np.asarray(codes * self._grid.step).reshape(size)

    @property
    def records(self) -> int:
        """Number of evaluated records, at record level."""
        return int(self._sums[RECORDS_NAME][0]) if RECORDS_NAME in self._sums else 0
