"""Adapts the clipping norm to a quantile of the updates' norms, estimated by a noised count.

Each client says in half units whether its update was within the norm; the sum of that is noised and
released with the sum of the updates, as one release.

Source: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive
Clipping", NeurIPS 2021.
"""

import math

from flwr_privacy.errors import check_number

from .grid import CodeGrid
from .updates import SMALLEST_NORM

__all__ = [
    "COUNT_GRID",
    "COUNT_NAME",
    "LARGEST_NORM",
    "LARGEST_SHARE",
    "count_code",
    "fraction_below",
    "next_clipping_norm",
    "split",
]

LARGEST_NORM = 1e100
"""Largest norm to clip to."""

COUNT_GRID = CodeGrid(-16)
"""CodeGrid of the count of updates within the norm, in half units; see `count_code`."""

COUNT_NAME = "flwr-privacy.count"
"""Name of the count among the arrays of a reply."""

LARGEST_SHARE = 0.99
"""Most of a round's budget that may go to the count."""

_SMALLEST = math.ulp(0.0)


def split(noise_multiplier: float, count_share: float) -> tuple[float, float | None]:
    """Split a noise multiplier into one of the update and one of the count.

    Parameters
    ----------
    noise_multiplier : float
        Noise multiplier z of the two as one release.
    count_share : float
        Share of ``1 / z**2`` that goes to the count, from 0 to 0.99; with 0 there is no count.

    Returns
    -------
    update, count : float, float or None
        z_u and z_c.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    Divide the update by z_u times its sensitivity, and the count by z_c times its own. Then both
    have noise of standard deviation 1, so together they are one vector with one Gaussian noise; and
    one client moves the vector by at most sqrt(1/z_u^2 + 1/z_c^2) in L2. So the pair is one
    Gaussian mechanism of noise multiplier z, exactly, with

        1/z^2 = 1/z_u^2 + 1/z_c^2,   z_u = z / sqrt(1 - share),   z_c = z / sqrt(share),

    also after a Poisson sample, as both are of the same sample. Andrew et al. (theorem 1) have
    the same with z_c twice their sigma_b, which is in whole units. Nothing smaller holds: an update
    may turn round while the count falls.

    Examples
    --------
    >>> update, count = split(1.0, 0.01)
    >>> round(update, 4), round(count, 4)
    (1.005, 10.0)
    """
    check_number("noise_multiplier", noise_multiplier, minimum=_SMALLEST)
    check_number("count_share", count_share, minimum=0, maximum=LARGEST_SHARE)
    if count_share == 0:
        return noise_multiplier, None
    return noise_multiplier / math.sqrt(1 - count_share), noise_multiplier / math.sqrt(count_share)


def count_code(*, within: bool) -> int:
    """Return a client's contribution to the count, as a code on `COUNT_GRID`.

    Parameters
    ----------
    within : bool
        Whether the norm of its update was at most C.

    Returns
    -------
    int
        Code of 1 half unit if so, otherwise of -1: b - 1/2 in whole units, as Andrew et al. have
        it. So every client adds 1 half unit in absolute value, the least that tells the two cases
        apart: the sensitivity is 1 half unit for one client more or less, and 2 for one replaced
        (one whole unit). With 0 and 1, one client more would count for a whole unit.

    Notes
    -----
    The count is noised on a grid much finer than a half unit, because noise of a few steps would
    cost a gap, and has to be cut into shares of at least
    `flwr_privacy.privacy.distributed_noise.SMALLEST_SHARE` steps.

    Examples
    --------
    >>> COUNT_GRID.step * count_code(within=True), COUNT_GRID.step * count_code(within=False)
    (1.0, -1.0)
    """
    one = round(1 / COUNT_GRID.step)
    return one if within else -one


def fraction_below(sum_of_halves: float, count: float) -> float:
    """Return the fraction of updates within the norm, from the noised count.

    Parameters
    ----------
    sum_of_halves : float
        Sum of contributions and noise, in half units.
    count : float
        Number of contributions; for secret Poisson samples the expected one, q N.

    Returns
    -------
    float
        Without bias. Beyond [0, 1] where noise, or the number of contributions, makes it so.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> fraction_below(-20.0, 100)
    0.4
    """
    check_number("sum_of_halves", sum_of_halves)
    check_number("count", count, minimum=_SMALLEST)
    return 0.5 + sum_of_halves / count / 2


def next_clipping_norm(
    norm: float, below: float, *, quantile: float = 0.5, learning_rate: float = 0.2
) -> float:
    """Return the clipping norm of the next round: ``C exp(-eta (b - gamma))``.

    Andrew et al., algorithm 1. Made of released values only, so it costs no privacy.

    Parameters
    ----------
    norm : float
        Clipping norm C of this round, from 1e-100 to 1e100.
    below : float
        Noised fraction b of updates within it; what is beyond [0, 1] is moved to its end.
    quantile : float, default 0.5
        Fraction gamma to aim at, from 0 to 1.
    learning_rate : float, default 0.2
        Step eta, above 0 and at most 100.

    Returns
    -------
    float
        Kept from 1e-100 to 1e100.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> round(next_clipping_norm(1.0, 0.9), 4), round(next_clipping_norm(1.0, 0.1), 4)
    (0.9231, 1.0833)
    """
    check_number("norm", norm, minimum=SMALLEST_NORM, maximum=LARGEST_NORM)
    check_number("below", below)
    check_number("quantile", quantile, minimum=0, maximum=1)
    check_number("learning_rate", learning_rate, minimum=_SMALLEST, maximum=100)
    moved = norm * math.exp(-learning_rate * (min(1.0, max(0.0, below)) - quantile))
    return min(LARGEST_NORM, max(SMALLEST_NORM, moved))
