"""Checks the budget of a training, and says how much noise it allows to how many releases.

The sound noise for a number of releases is `flwr_privacy.accounting.noise_multiplier`, the paper's
`flwr_privacy.udp.paper_noise.sigma_paper`.
"""

import math

from flwr_privacy.accounting.gaussian import check_delta, mu_of
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

__all__ = ["budget", "check_budget"]


def budget(mode: str, *, epsilon: float, delta: float) -> float:
    """Return B, the largest allowed sum of squares of sensitivity over noise.

    Parameters
    ----------
    mode : {"paper", "zcdp", "gdp"}
        ``paper``: ``epsilon**2 / (2 ln(1/delta))``, equation (10) solved for it, where the sum is
        over the expected participations; ``zcdp``: what its own moments prove; ``gdp``: the
        square of `mu_of`, which is exact.
    epsilon, delta : float
        The budget.

    Examples
    --------
    >>> [round(budget(mode, epsilon=8, delta=1e-3), 5) for mode in ("paper", "zcdp", "gdp")]
    [4.63247, 3.03957, 4.34003]
    """
    check_choice("mode", mode, ("paper", "zcdp", "gdp"))
    check_budget(epsilon=epsilon, delta=delta)
    log = math.log(1 / delta)
    if mode == "paper":
        return epsilon**2 / (2 * log)
    if mode == "zcdp":
        return 2 * (epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))) ** 2
    return mu_of(epsilon, delta) ** 2


def check_budget(
    *,
    rounds: int | None = None,
    q: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> None:
    """Check what is given.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """
    if rounds is not None:
        check_integer("rounds", rounds, minimum=1)
    if q is not None and not 0 < check_number("q", q) <= 1:
        raise InvalidParameterError("q", q, "a number above 0 and of at most 1")
    if epsilon is not None and not check_number("epsilon", epsilon) > 0:
        raise InvalidParameterError("epsilon", epsilon, "a number above 0")
    if delta is not None:
        check_delta(delta)
