r"""Measures the error of correlated noise in the sums of all releases so far.

Gradient descent adds up what is released, so the error of the sums
:math:`\sum_{s \le t} y_s` over the rounds t is what matters, not that of one release.
"""

import math

import numpy as np

from flwr_privacy.errors import check_integer

from .factors import Factor, TreeFactor, inverse_column
from .sensitivity import joint_sensitivity, most_participations

__all__ = ["prefix_error", "relative_error"]


def prefix_error(factor: Factor, *, rounds: int) -> float:
    r"""Return the root mean squared error of the prefix sums, over all rounds.

    Parameters
    ----------
    factor : ToeplitzFactor, BufferedToeplitzFactor or TreeFactor
    rounds : int
        Number of rounds, >= 1; of a tree at most its own.

    Returns
    -------
    float
        For noise of standard deviation 1 on every coordinate of :math:`C x`: the root mean square
        of the norms of the rows of :math:`A C^{-1}`, where A has ones on and below the diagonal.
        Independent noise has :math:`\sqrt{(n + 1) / 2}`.

    Raises
    ------
    InvalidParameterError
        If the number of rounds is out of range.

    Examples
    --------
    >>> from flwr_privacy.central_dp.correlated.factors import ToeplitzFactor
    >>> prefix_error(ToeplitzFactor(coefficients=(2**16,)), rounds=7)
    2.0
    """
    check_integer("rounds", rounds, minimum=1)
    if isinstance(factor, TreeFactor):
        check_integer("rounds", rounds, maximum=factor.rounds)
        # A prefix sum of e rounds has the noise of a node per binary digit 1 of e.
        return math.sqrt(sum(e.bit_count() for e in range(1, rounds + 1)) / rounds)
    column = np.cumsum(inverse_column(factor, rounds))  # of A times the inverse
    appearances = np.arange(rounds, 0, -1)  # in how many rows each value is
    return math.sqrt(float(appearances @ column**2) / rounds)


def relative_error(factor: Factor, *, rounds: int, separation: int, participations: int) -> float:
    """Return the prefix error at equal privacy, relative to independent noise.

    Parameters
    ----------
    factor, rounds, separation, participations
        As in `joint_sensitivity`.

    Returns
    -------
    float
        Below 1 where the factor is better than independent noise.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> from flwr_privacy.central_dp.correlated.factors import ToeplitzFactor
    >>> one = ToeplitzFactor(coefficients=(2**16,))
    >>> round(relative_error(one, rounds=100, separation=10, participations=10), 9)
    1.0
    """
    sensitivity = joint_sensitivity(
        factor, rounds=rounds, separation=separation, participations=participations
    )
    most = min(participations, most_participations(rounds=rounds, separation=separation))
    independent = math.sqrt(most * (rounds + 1) / 2)
    return sensitivity * prefix_error(factor, rounds=rounds) / independent
