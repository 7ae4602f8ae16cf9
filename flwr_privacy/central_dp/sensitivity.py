"""Names the modes of central DP, and computes the sensitivity of a sum in each.

Symbols: C is the clipping norm, N the number of clients, q the fraction of them asked in a round, z
a noise multiplier (standard deviation over L2 sensitivity), n the number of contributions to a sum.
"""

from flwr_privacy.errors import check_choice, check_number
from flwr_privacy.privacy.adaptive_clipping import LARGEST_NORM
from flwr_privacy.privacy.updates import SMALLEST_NORM

__all__ = ["DISTRIBUTED", "FIXED", "POISSON", "SERVER", "amplified", "sensitivity"]

DISTRIBUTED, SERVER = "distributed", "server"
"""Who adds the noise: each client a share of it, or a trusted server."""

FIXED, POISSON = "fixed", "poisson"
"""How a cohort is drawn: a fixed number of clients, or each client by itself with probability q."""


def amplified(noise: str, sampling: str) -> bool:
    """Return whether samples are secret from the adversary, so that they amplify privacy.

    Raises
    ------
    InvalidParameterError
        If there is no such mode.
    """
    check_choice("noise", noise, (DISTRIBUTED, SERVER))
    check_choice("sampling", sampling, (FIXED, POISSON))
    return noise == SERVER and sampling == POISSON


def sensitivity(clipping_norm: float, *, sampling: str, noise: str) -> float:
    """Return the L2 sensitivity of a sum of updates within a clipping norm.

    Parameters
    ----------
    clipping_norm : float
        Bound C of an update; truncation to the grid keeps to it. With 1, the result is the
        sensitivity of the count in half units (`count_code`).
    sampling : {"fixed", "poisson"}
        How a cohort is drawn.
    noise : {"distributed", "server"}
        Who adds the noise.

    Returns
    -------
    float
        C for secret Poisson samples (``poisson`` with ``server``), where neighbours have one client
        more or less; otherwise 2C, as one client's data are replaced by any other.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> sensitivity(0.5, sampling="fixed", noise="distributed")
    1.0
    >>> sensitivity(0.5, sampling="poisson", noise="server")
    0.5
    """
    check_number("clipping_norm", clipping_norm, minimum=SMALLEST_NORM, maximum=LARGEST_NORM)
    return clipping_norm if amplified(noise, sampling) else 2 * clipping_norm
