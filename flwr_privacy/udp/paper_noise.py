"""Computes the noise of the paper's rule, as printed.

The rule is not sound; `flwr_privacy.accounting.noise_multiplier` has the sound noise. Symbols: q is
the fraction of the clients that is asked in a round, T the number of rounds, Dl the L2 sensitivity
of one release.
"""

import math

from .budgets import check_budget

__all__ = ["sigma_paper"]


def sigma_paper(*, rounds: int, q: float, epsilon: float, delta: float, Dl: float = 1.0) -> float:
    """Return the paper's noise, equation (10): ``Dl * sqrt(2 q T ln(1/delta)) / epsilon``.

    It claims (epsilon, delta) for the whole training and does not give it: the proof uses an
    inequality backwards, and counts the expected number of participations, which the server sees.

    Examples
    --------
    >>> round(sigma_paper(rounds=200, q=1.0, epsilon=8.0, delta=1e-3), 6)
    6.570652
    """
    check_budget(rounds=rounds, q=q, epsilon=epsilon, delta=delta)
    return Dl * math.sqrt(2 * q * rounds * math.log(1 / delta)) / epsilon
