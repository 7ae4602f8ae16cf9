"""What the server asks of a client in a round: the fields of UDP on the wire."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_choice, check_number
from flwr_privacy.updates import SMALLEST_NORM

from .formulas import check_budget
from .sensitivity import RECORD_UNIT, USER_UNIT, check_sampling

__all__ = ["Terms"]

_SMALLEST = math.ulp(0.0)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the server asks of a client in a round; the fields of UDP on the wire.

    Parameters
    ----------
    unit : {"record", "user"}
        What is protected.
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity.
    epsilon, delta : float
        Budget of a client in this experiment; it declines what would exceed it.
    gap : float
        Epsilon set aside per release for the grid.
    clipping_norm : float
        Bound of a record's gradient, or of the update.
    learning_rate : float
        Step size; at record level only.
    sampling_rate : float
        Rate of the Poisson sample of the records; at record level only.
    grid : int
        Exponent of the grid's step.
    keep_back : tuple of str
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
    learning_rate: float = 1.0
    sampling_rate: float = 1.0
    grid: int
    keep_back: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, (RECORD_UNIT, USER_UNIT))
        check_number("noise_multiplier", self.noise_multiplier, minimum=_SMALLEST)
        check_budget(epsilon=self.epsilon, delta=self.delta)
        check_number("gap", self.gap, minimum=0)
        check_number("clipping_norm", self.clipping_norm, minimum=SMALLEST_NORM)
        check_number("learning_rate", self.learning_rate, minimum=_SMALLEST)
        check_sampling(self.unit, self.sampling_rate)
        if self.unit == USER_UNIT and self.learning_rate != 1:
            raise InvalidParameterError(
                "learning_rate", self.learning_rate, "1 at user level: the user's training has it"
            )

    def charge(self) -> Charge:
        """Return what one release costs."""
        return Charge(
            noise_multiplier=self.noise_multiplier, sampling=self.sampling_rate, gap=self.gap
        )

    def write(self) -> dict[str, Any]:
        """Return the fields of a message."""
        return {
            "unit": self.unit,
            "noise-multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "gap": self.gap,
            "clipping-norm": self.clipping_norm,
            "learning-rate": self.learning_rate,
            "sampling-rate": self.sampling_rate,
            "grid": self.grid,
            "keep-back": list(self.keep_back),
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Terms":
        """Read the fields of a message.

        Raises
        ------
        ProtocolError
            If a field is missing.
        InvalidParameterError
            If a value is not allowed.
        """
        names = [name for name in cls.__dataclass_fields__ if name != "keep_back"]
        keys = {name: name.replace("_", "-") for name in names}
        if missing := sorted(key for key in keys.values() if key not in fields):
            raise ProtocolError(f"the question of UDP has no {missing}")
        keep_back = fields.get("keep-back", [])
        if not isinstance(keep_back, list) or not all(isinstance(n, str) for n in keep_back):
            raise ProtocolError("the entry 'keep-back' is no list of names")
        return cls(**{n: fields[k] for n, k in keys.items()}, keep_back=tuple(keep_back))
