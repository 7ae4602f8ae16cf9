"""Computes the noise of a whole training from its budget."""

import math
from dataclasses import dataclass
from functools import cached_property, partial

from flwr_privacy.accounting import ADD_REMOVE, REPLACE_ONE, Charge, noise_multiplier, spent
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.privacy.cohorts import planned_participations

from .budgets import budget, check_budget
from .paper_noise import sigma_paper

__all__ = [
    "FIXED",
    "GRID_SHARE",
    "NOISES",
    "NONE",
    "PAPER",
    "PLD_SECRET",
    "SECRET_NEIGHBOURS",
    "UDPNoisePlan",
    "set_aside",
]

FIXED, NONE, PAPER, PLD_SECRET = "gdp_fixed", "none", "paper", "pld_secret"
"""Some of `NOISES` that other modules name."""

NOISES = (FIXED, "gdp", "gdp_worst", "zcdp", PAPER, PLD_SECRET, NONE)
"""How the noise follows from the budget; see `UDPNoisePlan`."""

SECRET_NEIGHBOURS = ADD_REMOVE
"""Neighbours of the guarantee with `PLD_SECRET`: one client more or less.

The noise is over twice what a client can add. Where a client is replaced by another, the cost of a
secret sample is not known: its noise comes with its update, and a sum without it has less noise.
"""

_SPENDING = ("gdp", "gdp_worst", "zcdp")

GRID_SHARE, _LARGEST_GAP = 1e-3, 0.1
"""Share of epsilon, and at most how much of it, that is set aside for the grid; see `Charge`."""

_SMALLEST = math.ulp(0.0)
_MARGIN = 1 + 1e-9  # for the rounding of whoever adds the releases up one by one
_LEAST_LEFT = 1e-6  # of a budget; with less, a client's noise would say nothing


def set_aside(epsilon: float) -> float:
    """Return how much of a budget's epsilon pays for the grid of all releases together."""
    return min(GRID_SHARE * epsilon, _LARGEST_GAP)


@dataclass(frozen=True, kw_only=True)
class UDPNoisePlan:
    """The noise of a training, from its budget.

    Parameters
    ----------
    noise : str
        How the noise follows from the budget.

        ==============  ====================================================================
        ``gdp_fixed``   one noise for all rounds, the least with which a client may take part
                        as often as 99 % of the clients do at most, or as often as balanced
                        cohorts ask it; who is drawn more often declines
        ``gdp``         a client's noise follows from what it has left, spread over its expected
                        rounds to come: late rounds may be noisier; see `multiplier`
        ``gdp_worst``   the same, spread over all rounds to come: nobody ever declines
        ``zcdp``        as ``gdp``, with the budget that the paper's own moments prove
        ``paper``       equation (10), which misses its budget where it is too small
        ``pld_secret``  one noise for all rounds, against somebody who does not learn who takes
                        part; the server is no such adversary
        ``none``        no noise: nothing is protected
        ==============  ====================================================================
    epsilon, delta : float
        Budget of a client over the whole training; for ``paper`` what the formula claims.
    rounds : int
        Rounds planned, T.
    q : float
        Fraction of the clients that is asked in a round.
    cohorts : {"fixed", "balanced", "poisson"}, default "fixed"
        How they are drawn: see `flwr_privacy.privacy.cohorts`.
    sampling_rate : float, default 1.0
        Rate of the Poisson sample of a client's records in a round; 1: all records. Below 1 with
        ``gdp_fixed`` only.
    steps : int, default 1
        Releases of a client in a round, each with a sample and noise of its own. Above 1 with
        ``gdp_fixed`` only.
    validation_share : float, default 0.0
        Share of the budget B (see `flwr_privacy.udp.budget`) for what clients say of the model on
        their own data; at least 0 and below 1. A client has one cap for both: one that is drawn
        more often than planned for pays for trainings out of what is there for evaluations.
    validations : int, optional
        Evaluations that this share is for; by default one in every round.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> schedule = UDPNoisePlan(noise="paper", epsilon=8.0, delta=1e-3, rounds=200, q=1.0)
    >>> round(schedule.noise_multiplier, 6), round(schedule.cap, 2)
    (6.570652, 8.37)
    """

    noise: str
    epsilon: float
    delta: float
    rounds: int
    q: float
    cohorts: str = "fixed"
    sampling_rate: float = 1.0
    steps: int = 1
    validation_share: float = 0.0
    validations: int | None = None

    def __post_init__(self) -> None:
        check_choice("noise", self.noise, NOISES)
        check_budget(rounds=self.rounds, q=self.q, epsilon=self.epsilon, delta=self.delta)
        check_number("sampling_rate", self.sampling_rate, minimum=_SMALLEST, maximum=1)
        check_number("validation_share", self.validation_share, minimum=0, maximum=0.99)
        if self.validations is not None:
            check_integer("validations", self.validations, minimum=1)
        check_integer("steps", self.steps, minimum=1)
        if self.sampling_rate != 1 and self.noise != FIXED:
            raise InvalidParameterError(
                "sampling_rate", self.sampling_rate, f"1: noise '{self.noise}' is for full batches"
            )
        if self.steps != 1 and self.noise != FIXED:
            raise InvalidParameterError(
                "steps", self.steps, f"1: noise '{self.noise}' is for one release in a round"
            )
        if self.validation_share and not self._planned_late:
            allowed = f"0 with noise '{self.noise}'"
            raise InvalidParameterError("validation_share", self.validation_share, allowed)

    @property
    def spends(self) -> bool:
        """Whether a client's noise follows from what it has left; see `multiplier`."""
        return self.noise in _SPENDING

    @cached_property
    def releases(self) -> int:
        """Number of trainings that a client's budget is planned for."""
        known = (FIXED, PLD_SECRET)
        if self.noise not in known:
            return self.rounds
        return planned_participations(self.cohorts, rounds=self.rounds, q=self.q)

    @cached_property
    def noise_multiplier(self) -> float:
        """Noise over the sensitivity: in every round, or where `spends` in the first one."""
        sound = partial(noise_multiplier, epsilon=self._epsilon, delta=self._delta)
        if self.noise == NONE:
            return 0.0
        if self.noise == PAPER:
            return sigma_paper(rounds=self.rounds, q=self.q, epsilon=self.epsilon, delta=self.delta)
        if self.noise == PLD_SECRET:
            return sound(
                releases=self.rounds,
                neighbours=SECRET_NEIGHBOURS,
                sampling=self.q,
                accountant="pld",
            )
        if self.spends:
            return math.sqrt(self._to_come(self.rounds) / self._budget) * _MARGIN
        if self.sampling_rate == 1:
            z = sound(releases=self.releases * self.steps, neighbours=REPLACE_ONE)
            return z / math.sqrt(1 - self.validation_share)
        return sound(
            releases=self.releases * self.steps,
            neighbours=REPLACE_ONE,
            sampling=self.sampling_rate,
            accountant="rdp",
            beside=self._beside,
        )

    @property
    def validation_multiplier(self) -> float:
        """Noise over the sensitivity of one evaluation by a client."""
        if self.validation_share and self.sampling_rate != 1:
            # By the accountant that adds it to the trainings; a share of its squared noise.
            alone = noise_multiplier(
                epsilon=self._epsilon,
                delta=self._delta,
                releases=self._validations,
                neighbours=REPLACE_ONE,
                accountant="rdp",
            )
            return alone / math.sqrt(self.validation_share)
        share = self.validation_share * budget("gdp", epsilon=self._epsilon, delta=self._delta)
        return math.sqrt(self._validations / share) * _MARGIN if share else 0.0

    def multiplier(self, left: int, spent: float) -> float | None:
        """Return a client's noise over the sensitivity, from what it has left; None if nothing is.

        The square is ``max(1, q (T - t)) / (B - S)``, or ``(T - t) / (B - S)`` for ``gdp_worst``.
        As no round spends more than what is left, the cap holds whatever the rounds to come are.

        Parameters
        ----------
        left : int
            Rounds to come, T - t, this one included.
        spent : float
            S: the squares of sensitivity over noise of the client's trainings so far, added up.

        Examples
        --------
        >>> schedule = UDPNoisePlan(noise="gdp", epsilon=8.0, delta=1e-3, rounds=200, q=1.0)
        >>> round(schedule.multiplier(200, 0.0), 2), schedule.multiplier(1, 4.34)
        (6.8, None)
        """
        rest = self._budget - spent
        if rest <= _LEAST_LEFT * self._budget:
            return None
        return math.sqrt(self._to_come(left) / rest) * _MARGIN

    @property
    def gap(self) -> float:
        """Epsilon set aside per release for the grid."""
        if self.noise == NONE:
            return 0.0
        # Where nobody learns who takes part, everybody is charged in every round.
        trainings = self.rounds if self.noise == PLD_SECRET else self.releases
        evaluations = self._validations if self.validation_share else 0
        return self._set_aside / (trainings * self.steps + evaluations)

    @property
    def cap(self) -> float:
        """Epsilon that no client exceeds against the server.

        For ``paper`` what a client in every round spends, for ``pld_secret`` what one spends that
        takes part as often as 99 % do at most.
        """
        if self.noise not in (PAPER, PLD_SECRET):
            return self.epsilon
        charge = Charge(
            noise_multiplier=self.noise_multiplier,
            neighbours=REPLACE_ONE,
            gap=self.gap,
            count=self.releases,
        )
        return spent([charge], delta=self.delta)

    @property
    def _validations(self) -> int:
        return self.rounds if self.validations is None else self.validations

    @property
    def _beside(self) -> tuple[Charge, ...]:
        """The evaluations that trainings with samples leave room for."""
        if not self.validation_share:
            return ()
        charge = Charge(
            noise_multiplier=self.validation_multiplier,
            neighbours=REPLACE_ONE,
            count=self._validations,
        )
        return (charge,)

    @property
    def _planned_late(self) -> bool:
        # A noise of a loss is on top of a plan that leaves room for it.
        return self.noise == FIXED or self.spends

    @property
    def _set_aside(self) -> float:
        return set_aside(self.epsilon)

    @property
    def _epsilon(self) -> float:
        return self.epsilon - self._set_aside

    @property
    def _delta(self) -> float:
        return self.delta * math.exp(-self._set_aside)

    @cached_property
    def _budget(self) -> float:
        """B of the trainings, where noise follows from what is left."""
        whole = budget("gdp", epsilon=self._epsilon, delta=self._delta)
        if self.noise == "zcdp":
            whole = budget("zcdp", epsilon=self._epsilon, delta=self._delta)
        return whole * (1 - self.validation_share)

    def _to_come(self, left: int) -> float:
        return left if self.noise == "gdp_worst" else max(1.0, self.q * left)
