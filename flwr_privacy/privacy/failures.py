"""Counts failed trainings in one more coordinate of a clipped update, noised and charged with it.

Where all data of a client are protected, a training that fails is answered like every other, so the
answer does not say that it failed. A federation in which most trainings crash then looks like one
that learns little. So a client releases a pair (update, failure): a training that worked gives
(u, 0), the update u clipped to the norm C, and one that failed gives (0, C).

Guarantee. Neighbours: one client's data are replaced by any other, or are there or not. Every pair
is a vector of L2 norm at most C, as the update alone was. So two of them are at most 2 C apart (one
that worked and one that failed at most sqrt(2) C), and one more or less moves a sum by at most C.
The coordinate is on the grid of the update, truncated towards zero like it, and has noise of the
same standard deviation. So sensitivity, noise and charge are those of the update alone, and the
update is clipped no further. Only what the grid costs counts one coordinate more. What is made of
the noised sums (`flwr_privacy.privacy.trained_count`) costs nothing.
Not covered: a client that lies. It may hide its failure or make up others', as it may send any
update within the range of the codes.
"""

import math

from flwr_privacy.errors import InvalidParameterError

__all__ = ["FAILED_NAME", "failed_code"]

FAILED_NAME = "flwr-privacy.failed"
"""Name of the coordinate among the arrays of a reply."""


def failed_code(clipping_norm: float, step: float) -> int:
    """Return the code of a failed training, the largest within the norm; other trainings send 0.

    Parameters
    ----------
    clipping_norm : float
        Norm C of an update.
    step : float
        Step of its grid, a power of two.

    Raises
    ------
    InvalidParameterError
        If the grid is so coarse that there is none.

    Examples
    --------
    >>> failed_code(0.7, 2.0**-3)
    5
    """
    code = math.floor(clipping_norm / step)
    if code < 1:
        allowed = f"a step of at most the clipping norm, {clipping_norm:g} (more grid_bits)"
        raise InvalidParameterError("grid", step, allowed)
    return code
