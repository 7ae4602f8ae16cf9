"""The noise of a whole training, from its budget."""

import math
from dataclasses import dataclass
from functools import cached_property

from flwr_privacy.accounting import Charge, noise_multiplier, spent
from flwr_privacy.errors import InvalidParameterError, check_choice, check_number

from .formulas import check_budget, participations, sigma_paper

__all__ = ["GRID_SHARE", "NOISES", "Schedule"]

NOISES = ("gdp_fixed", "paper")
"""How the noise follows from the budget; see `Schedule`."""

GRID_SHARE, _LARGEST_GAP = 1e-3, 0.1
"""Share of epsilon, and at most how much of it, that is set aside for the grid; see `Charge`."""

_SMALLEST = math.ulp(0.0)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The noise of a training, from its budget.

    Parameters
    ----------
    noise : {"gdp_fixed", "paper"}
        ``gdp_fixed``: the least noise such that a client may take part as often as 99 % of the
        clients do at most; who is drawn more often declines. ``paper``: equation (10).
    epsilon, delta : float
        Budget of a client over the whole training; for ``paper`` what the formula claims.
    rounds : int
        Rounds planned, T.
    q : float
        Fraction of the clients that is asked in a round.
    sampling_rate : float, default 1.0
        Rate of the Poisson sample of a client's records in a round; 1: all records.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> schedule = Schedule(noise="paper", epsilon=8.0, delta=1e-3, rounds=200, q=1.0)
    >>> round(schedule.noise_multiplier, 6), round(schedule.cap, 2)
    (6.570652, 8.37)
    """

    noise: str
    epsilon: float
    delta: float
    rounds: int
    q: float
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        check_choice("noise", self.noise, NOISES)
        check_budget(rounds=self.rounds, q=self.q, epsilon=self.epsilon, delta=self.delta)
        check_number("sampling_rate", self.sampling_rate, minimum=_SMALLEST, maximum=1)
        if self.noise == "paper" and self.sampling_rate != 1:
            raise InvalidParameterError(
                "sampling_rate", self.sampling_rate, "1: the paper's formula knows full batches"
            )

    @property
    def releases(self) -> int:
        """Number of releases for which the budget of a client is meant."""
        return self.rounds if self.noise == "paper" else participations(self.rounds, self.q)

    @cached_property
    def noise_multiplier(self) -> float:
        """Noise over the sensitivity, in every round."""
        if self.noise == "paper":
            return sigma_paper(rounds=self.rounds, q=self.q, epsilon=self.epsilon, delta=self.delta)
        return noise_multiplier(
            epsilon=self.epsilon - self._set_aside,
            delta=self.delta * math.exp(-self._set_aside),
            releases=self.releases,
            sampling=self.sampling_rate,
            accountant="gdp" if self.sampling_rate == 1 else "rdp",
        )

    @property
    def gap(self) -> float:
        """Epsilon set aside per release for the grid."""
        return self._set_aside / self.releases

    @property
    def cap(self) -> float:
        """Epsilon that no client exceeds: for ``paper`` what a client in every round spends."""
        if self.noise != "paper":
            return self.epsilon
        charge = Charge(noise_multiplier=self.noise_multiplier, gap=self.gap, count=self.releases)
        return spent([charge], delta=self.delta)

    @property
    def _set_aside(self) -> float:
        return min(GRID_SHARE * self.epsilon, _LARGEST_GAP)
