"""Step sizes: how far a round moves the model along the aggregated gradient."""

import math
from dataclasses import dataclass

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

__all__ = ["SCHEDULES", "StepSize"]

SCHEDULES = ("constant", "inverse", "shifted")
"""The names of the schedules."""

_SMALLEST = math.ulp(0.0)


@dataclass(frozen=True)
class StepSize:
    """The step size of every round t = 1, 2, ...

    Rounds count from 1. "Adaptive Coded Federated Learning: Privacy Preservation and Straggler
    Mitigation" (arXiv, 2024) lists them from 0, where its own step size divides by zero.

    Parameters
    ----------
    rate : float
        Above 0. The loss is a sum over the records of all devices, and so a rate that suits is of
        the order of one over their number.
    schedule : {"constant", "inverse", "shifted"}, default "constant"
        ``constant``: `rate`. ``inverse``: ``rate / t``; the paper has rate 1e-4 in its simulations
        and 1 / lambda in its theory, with lambda at most the least eigenvalue of the summed
        ``X^T X``. ``shifted``: ``rate / (1 + t / shift)``, not in the paper.
    shift : float, default 0.0
        Rounds after which ``shifted`` has halved the rate; above 0 for that schedule.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> StepSize(0.5, "inverse").at(2), StepSize(0.5, "shifted", shift=10).at(10)
    (0.25, 0.25)
    """

    rate: float
    schedule: str = "constant"
    shift: float = 0.0

    def __post_init__(self) -> None:
        check_number("learning_rate", self.rate, minimum=_SMALLEST)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_number("shift", self.shift, minimum=0)
        if self.schedule == "shifted" and not self.shift > 0:
            raise InvalidParameterError("shift", self.shift, "a number above 0")

    def at(self, t: int) -> float:
        """Return the step size of round t.

        Raises
        ------
        InvalidParameterError
            If `t` is not at least 1.
        """
        check_integer("t", t, minimum=1)
        if self.schedule == "inverse":
            return self.rate / t
        if self.schedule == "shifted":
            return self.rate / (1 + t / self.shift)
        return float(self.rate)
