"""Names the modes of central DP, and computes the sensitivity of a sum in each.

Symbols: C is the clipping norm, N the number of clients, q the fraction of them asked in a round, z
a noise multiplier (standard deviation over L2 sensitivity), n the number of contributions to a sum.
"""

from flwr_privacy.accounting import ADD_REMOVE, REPLACE_ONE, ZERO_OUT
from flwr_privacy.errors import check_choice, check_number
from flwr_privacy.privacy.adaptive_clipping import LARGEST_NORM
from flwr_privacy.privacy.cohorts import COHORTS, drawn_alone
from flwr_privacy.privacy.updates import SMALLEST_NORM

__all__ = ["DISTRIBUTED", "SERVER", "amplified", "relation", "sensitivity"]

DISTRIBUTED, SERVER = "distributed", "server"
"""Who adds the noise: each client a share of it, or a trusted server."""


def amplified(noise: str, sampling: str) -> bool:
    """Return whether samples are secret from the adversary, so that they amplify privacy.

    Raises
    ------
    InvalidParameterError
        If there is no such mode.
    """
    check_choice("noise", noise, (DISTRIBUTED, SERVER))
    check_choice("sampling", sampling, COHORTS)
    return noise == SERVER and drawn_alone(sampling)


def relation(neighbours: str | None, *, noise: str, sampling: str) -> str:
    """Return which data sets are neighbours.

    Parameters
    ----------
    neighbours : {"add_remove", "replace_one", "zero_out"}, optional
        What was asked for. By default ``add_remove`` where samples are secret, so that nobody
        learns whether a client is there, and ``replace_one`` otherwise.
    noise, sampling
        The mode, as of `amplified`.

    Raises
    ------
    InvalidParameterError
        If there is no such mode, or it has no guarantee for these neighbours.

    Examples
    --------
    >>> relation(None, noise="distributed", sampling="fixed")
    'replace_one'
    """
    own = ADD_REMOVE if amplified(noise, sampling) else REPLACE_ONE
    return own if neighbours is None else check_choice("neighbours", neighbours, (own, ZERO_OUT))


def sensitivity(clipping_norm: float, *, neighbours: str) -> float:
    """Return the L2 sensitivity of a sum of updates within a clipping norm.

    Parameters
    ----------
    clipping_norm : float
        Bound C of an update; truncation to the grid keeps to it. With 1, the result is the
        sensitivity of the count in half units (`count_code`).
    neighbours : {"add_remove", "replace_one", "zero_out"}
        Which data sets are neighbours.

    Returns
    -------
    float
        2C where the data of one client are replaced by any other; C where one client is there or
        not, or its update is zero.

    Raises
    ------
    InvalidParameterError
        If the norm is not allowed.

    Examples
    --------
    >>> sensitivity(0.5, neighbours="replace_one"), sensitivity(0.5, neighbours="zero_out")
    (1.0, 0.5)
    """
    check_number("clipping_norm", clipping_norm, minimum=SMALLEST_NORM, maximum=LARGEST_NORM)
    return 2 * clipping_norm if neighbours == REPLACE_ONE else clipping_norm
