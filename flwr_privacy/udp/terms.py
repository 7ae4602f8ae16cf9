"""What the server asks of a client in a round: the fields of UDP on the wire."""

import math
from dataclasses import dataclass, field

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_integer,
    check_number,
)
from flwr_privacy.updates import SMALLEST_NORM

from .formulas import check_budget
from .sensitivity import BOUNDS, RECORD_UNIT, USER_UNIT, check_sampling, sensitivity

__all__ = ["LossTerms", "Terms"]

SMALLEST_CAP, LARGEST_CAP = 1e-6, 1e6
"""Bounds of the cap of a loss."""

_SMALLEST = math.ulp(0.0)
_MOST_RECORDS = 2**40

_ROOM = 1 / 64
"""Relative share of the sensitivity of a sum that is there for the grid and for rounding."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the server asks of a client's training.

    Parameters
    ----------
    unit : {"record", "user"}
        What is protected.
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity; 0 for none, which protects nothing.
    epsilon, delta : float
        Budget of a client in this experiment; it declines what would exceed it.
    gap : float
        Epsilon set aside per release for the grid.
    clipping_norm : float
        Bound of a record's gradient, or of the update.
    grid : int
        Exponent of the grid's step.
    learning_rate : float, default 1.0
        Step size; at record level only, as are the next five.
    sampling_rate : float, default 1.0
        Rate of the Poisson sample of the records.
    epochs : int, default 1
        Passes over the records.
    batch_size : int, default 0
        Records of a step; 0 takes all of them.
    bound : {"general", "convex", "unproven"}, default "general"
        How the sensitivity follows; see `flwr_privacy.udp.sensitivity`.
    max_records : int, default 0
        Most records of a client, where noise is shared.
    parties : int, default 0
        Honest clients of a sum who share its noise; 0 if each adds the whole noise by itself.
    keep_back : list of str
        Arrays of which nothing is released, beyond those that a client keeps back anyway.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    unit: str
    noise_multiplier: float
    epsilon: float
    delta: float
    gap: float
    clipping_norm: float
    grid: int
    learning_rate: float = 1.0
    sampling_rate: float = 1.0
    epochs: int = 1
    batch_size: int = 0
    bound: str = "general"
    max_records: int = 0
    parties: int = 0
    keep_back: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, (RECORD_UNIT, USER_UNIT))
        check_number("noise_multiplier", self.noise_multiplier, minimum=0)
        check_budget(epsilon=self.epsilon, delta=self.delta)
        check_number("gap", self.gap, minimum=0)
        check_number("clipping_norm", self.clipping_norm, minimum=SMALLEST_NORM)
        check_number("learning_rate", self.learning_rate, minimum=_SMALLEST)
        check_sampling(self.unit, self.sampling_rate)
        check_integer("epochs", self.epochs, minimum=1)
        check_integer("batch_size", self.batch_size, minimum=0)
        check_choice("bound", self.bound, BOUNDS)
        check_integer("max_records", self.max_records, minimum=0, maximum=_MOST_RECORDS)
        check_integer("parties", self.parties, minimum=0)
        for name, usual in _AT_RECORD_LEVEL.items():
            if self.unit == USER_UNIT and getattr(self, name) != usual:
                raise InvalidParameterError(
                    name,
                    getattr(self, name),
                    f"{usual!r} at user level: the training is the user's own",
                )
        if self.parties:
            self._check_shared()

    def reach(self, records: int) -> float:
        """Return the largest L2 norm of what a client with so many records noises."""
        if self.unit == USER_UNIT:
            return self.clipping_norm
        step = self.learning_rate * self.clipping_norm / self.sampling_rate
        if self.parties:
            return step * records
        return step * self.epochs * math.ceil(records / (self.batch_size or records))

    def shared_sensitivity(self) -> float:
        """Return the L2 sensitivity of a sum of which each client noises its part.

        At user level that of an update. At record level the part of a client with n records is n
        times its update, so that every record weighs the same, and the sensitivity does not depend
        on n: ``2 learning_rate clipping_norm``, and 1/64 of it for the grid and for rounding.

        Examples
        --------
        >>> terms = Terms(
        ...     unit="record", noise_multiplier=1.0, epsilon=8.0, delta=1e-5, gap=1e-3,
        ...     clipping_norm=0.5, learning_rate=4.0, grid=-20, max_records=4096, parties=5,
        ... )
        >>> terms.shared_sensitivity()
        4.0625
        """
        if self.unit == USER_UNIT:
            return sensitivity(USER_UNIT, clipping_norm=self.clipping_norm)
        return 2 * self.learning_rate * self.clipping_norm * (1 + _ROOM)

    @property
    def proven(self) -> bool:
        """Whether the noise is for what the training does."""
        return self.bound != "unproven" or (self.epochs == 1 and not self.batch_size)

    def charge(self) -> Charge | None:
        """Return what one release costs; None where there is no noise and no account."""
        if self.noise_multiplier == 0:
            return None
        return Charge(
            noise_multiplier=self.noise_multiplier, sampling=self.sampling_rate, gap=self.gap
        )

    def _check_shared(self) -> None:
        plain = {"sampling_rate": 1.0, "epochs": 1, "batch_size": 0, "bound": "general"}
        for name, usual in plain.items():
            if getattr(self, name) != usual:
                raise InvalidParameterError(
                    name,
                    getattr(self, name),
                    f"{usual!r} where noise is shared: all records in one step",
                )
        if self.unit == RECORD_UNIT and not self.max_records:
            raise InvalidParameterError("max_records", 0, "at least 1 where noise is shared")
        if not self.noise_multiplier:
            raise InvalidParameterError("parties", self.parties, "0 where there is no noise")


_AT_RECORD_LEVEL = {
    "learning_rate": 1.0,
    "epochs": 1,
    "batch_size": 0,
    "bound": "general",
    "max_records": 0,
}


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What the server asks of a client's validation loss.

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
        """Return what one loss costs; None where there is no noise and no account."""
        if self.noise_multiplier == 0:
            return None
        return Charge(noise_multiplier=self.noise_multiplier, gap=self.gap)
