"""A client's validation loss under UDP: its fields on the wire, its plan, and its noise."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr_privacy.accounting import REPLACE_ONE, Charge
from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_choice, check_number
from flwr_privacy.evaluation.caps import LARGEST_CAP, SMALLEST_CAP
from flwr_privacy.pipeline.mechanism import Answer, Facts, Mechanism, ReleasePlan
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.noise import discrete_gaussian, discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS

from .budgets import check_budget
from .sensitivity import RECORD_UNIT, USER_UNIT
from .terms import NUM_EXAMPLES

__all__ = ["LossTerms", "MeanLoss"]

_LOSS_STEPS = 1024  # at least so many steps of a loss's grid are its sensitivity
_LOSSES = ("loss", "eval_loss")


class MeanLoss(NamedTuple):
    """The mean of losses that were clipped record by record."""

    mean: float
    records: int
    sensitivity: float


class _Measured(NamedTuple):
    loss: float
    weight: int
    bound: float


@dataclass(frozen=True, kw_only=True)
class LossTerms(Mechanism):
    """The terms of a client's validation loss, and the mechanism that answers it.

    Parameters
    ----------
    unit : {"record", "user"}
        What is protected.
    cap : float
        Bound of a record's loss (record level), or of the client's mean loss (user level): losses
        lie between 0 and it.
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity; 0 for none, as the paper has it.
    epsilon, delta, gap : float
        As in `Terms`.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    unit: str
    cap: float
    noise_multiplier: float
    epsilon: float
    delta: float
    gap: float

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, (RECORD_UNIT, USER_UNIT))
        check_number("loss_cap", self.cap, minimum=SMALLEST_CAP, maximum=LARGEST_CAP)
        check_number("noise_multiplier", self.noise_multiplier, minimum=0)
        check_budget(epsilon=self.epsilon, delta=self.delta)
        check_number("gap", self.gap, minimum=0)

    def charge(self) -> Charge | None:
        """Return the charge of one loss; None if there is no noise to account for."""
        if self.noise_multiplier == 0:
            return None
        return Charge(noise_multiplier=self.noise_multiplier, neighbours=REPLACE_ONE, gap=self.gap)

    # -- The mechanism -------------------------------------------------------------------------

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        sigma = None
        if self.unit == USER_UNIT or facts.records is not None:
            bound = self.cap / (1 if self.unit == USER_UNIT else facts.records or 1)
            grid, sigma = self._noise_of(bound)
            gap = discretisation_gap(1, sigma / grid.step) if sigma else 0.0
            if gap > self.gap:
                raise InvalidParameterError("gap", self.gap, f"at least {gap:.3g}, for a loss")
        return ReleasePlan(
            unit=self.unit,
            charge=self.charge(),
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            sigma=sigma,
        )

    def measure(self, start: Arrays, outcome: Any) -> _Measured:
        """Return the clipped loss."""
        if self.unit == RECORD_UNIT:
            return _Measured(outcome.mean, outcome.records, outcome.sensitivity)
        loss = next((outcome[name] for name in _LOSSES if name in outcome), None)
        if isinstance(loss, bool) or not isinstance(loss, int | float):
            raise ProtocolError(f"the evaluation returned no loss: a number as one of {_LOSSES}")
        # What is no number counts as the cap, as it does at record level: a refusal would say more.
        clipped = self.cap if loss != loss else min(max(0, loss), self.cap)
        # The number of records is a secret here: everybody weighs the same.
        return _Measured(float(clipped), 1, self.cap)

    def failed(self, start: Arrays) -> _Measured | None:
        """Return the largest loss, at user level."""
        return _Measured(self.cap, 1, self.cap) if self.unit == USER_UNIT else None

    def noise(self, measured: _Measured, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the loss with its noise, or without any."""
        loss, weight, bound = measured
        if plan.charge is not None:
            grid, sigma = self._noise_of(bound)
            code = int(loss / grid.step) + int(discrete_gaussian(1, sigma / grid.step, random)[0])
            loss = code * grid.step
        return {}, {METRICS: {NUM_EXAMPLES: weight, "loss": loss}}

    def accumulator(self, start: Arrays) -> WeightedMean:
        """Return an empty mean of losses."""
        return WeightedMean({})

    def _noise_of(self, bound: float) -> tuple[CodeGrid, float]:
        grid = CodeGrid.below(bound / _LOSS_STEPS, bits=0)
        return grid, self.noise_multiplier * (bound + grid.step)  # a loss is truncated to the grid
