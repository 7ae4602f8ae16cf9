"""Computes the noise of the paper's rule, as printed.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
Proposition 1. The rule is not sound: it charges every local step as a release at rate q, and its
constant alpha only "exists". `flwr_privacy.m2fdp.calibration` has the sound ones, and
`flwr_privacy.simulations.research.m2fdp.paper_epsilons` computes what this one costs.
"""

import math

from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import check_integer, check_number

__all__ = ["noise_multiplier", "sigma"]

_SMALLEST = math.ulp(0.0)


def noise_multiplier(
    *, q: float, n_comp: int, eps: float, delta: float, alpha: float = 1.0
) -> float:
    """Return the paper's noise over the sensitivity, M2FDP, Proposition 1.

    ``alpha q sqrt(n_comp ln(1/delta)) / eps``. Claimed for ``eps < c_1 q n_comp`` with some c_1.

    Parameters
    ----------
    q : float
        Rate at which a local step samples a record, above 0 and at most 1.
    n_comp : int
        Compositions, at least 1: the largest number of local steps of a round times the rounds.
    eps, delta : float
        The budget of the whole training: eps above 0, delta strictly between 0 and 1.
    alpha : float, default 1.0
        The constant of the rule, above 0; the paper does not give it.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(noise_multiplier(q=0.05, n_comp=4000, eps=1, delta=1e-5), 6)
    10.72983
    """
    check_number("q", q, minimum=_SMALLEST, maximum=1)
    check_integer("n_comp", n_comp, minimum=1)
    check_number("eps", eps, minimum=_SMALLEST)
    check_delta(delta)
    check_number("alpha", alpha, minimum=_SMALLEST)
    return alpha * q * math.sqrt(n_comp * -math.log(delta)) / eps


def sigma(
    Delta: float, *, q: float, n_comp: int, eps: float, delta: float, alpha: float = 1.0
) -> float:
    """Return the paper's standard deviation of the noise on an entry, M2FDP, Proposition 1.

    Parameters
    ----------
    Delta : float
        L2 sensitivity, at least 0.
    q, n_comp, eps, delta, alpha
        As in `noise_multiplier`.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(sigma(0.4, q=0.05, n_comp=4000, eps=1, delta=1e-5), 6)
    4.291932
    """
    check_number("Delta", Delta, minimum=0)
    return Delta * noise_multiplier(q=q, n_comp=n_comp, eps=eps, delta=delta, alpha=alpha)
