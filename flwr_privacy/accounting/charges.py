"""A charge: the cost of one release as data, which accountants interpret."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

__all__ = [
    "ADD_REMOVE",
    "GAUSSIAN",
    "LAPLACE",
    "RELATIONS",
    "REPLACE_ONE",
    "ZERO_OUT",
    "Charge",
    "check_alike",
]

GAUSSIAN, LAPLACE = "gaussian", "laplace"

ADD_REMOVE, REPLACE_ONE, ZERO_OUT = "add_remove", "replace_one", "zero_out"
"""The relations, one by one; see `RELATIONS`."""

RELATIONS = (ADD_REMOVE, REPLACE_ONE, ZERO_OUT)
"""Which data sets are neighbours of a data set.

Those with one element (record or user) more or less, those in which one element is replaced by any
other, and those in which one element is replaced by one that contributes nothing. A noise
multiplier is the noise over the distance of neighbours: where an element contributes a vector of at
most norm C, that is C, 2C and C.
"""

_MOST_NOISE = 1e100  # accountants square it


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The cost of one release, or of several equal ones.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of Gaussian noise over the L2 sensitivity, or scale of Laplace noise over
        the L1 sensitivity, for these neighbours. Above 0 and at most 1e100.
    neighbours : {"add_remove", "replace_one", "zero_out"}
        Which data sets the cost is for, see `RELATIONS`. Whoever makes a charge says it.
    mechanism : {"gaussian", "laplace"}, default "gaussian"
        Kind of noise.
    sampling : float, default 1.0
        Rate of a Poisson sample of what is protected, hidden from the adversary; 1: no sample.
        For the neighbours ``replace_one`` an element that is in the sample moves the result by at
        most half the sensitivity, so that two elements move it apart by all of it.
    gap : float, default 0.0
        Epsilon by which noise on a grid may differ from the mechanism on the real line, at most
        (`flwr_privacy.privacy.noise.discretisation_gap`).
    count : int, default 1
        Number of equal releases, at most 2**53.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> Charge.from_dict(Charge(noise_multiplier=2.0, neighbours="replace_one").to_dict())
    Charge(noise_multiplier=2.0, neighbours='replace_one', mechanism='gaussian', sampling=1.0, \
gap=0.0, count=1)
    """

    noise_multiplier: float
    neighbours: str
    mechanism: str = GAUSSIAN
    sampling: float = 1.0
    gap: float = 0.0
    count: int = 1

    def __post_init__(self) -> None:
        check_choice("neighbours", self.neighbours, RELATIONS)
        check_choice("mechanism", self.mechanism, (GAUSSIAN, LAPLACE))
        check_number(
            "noise_multiplier", self.noise_multiplier, minimum=math.ulp(0.0), maximum=_MOST_NOISE
        )
        check_number("sampling", self.sampling, minimum=math.ulp(0.0), maximum=1)
        check_number("gap", self.gap, minimum=0)
        check_integer("count", self.count, minimum=1, maximum=2**53)

    def to_dict(self) -> dict[str, Any]:
        """Return the charge as plain values, for a file."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Charge":
        """Read a charge from plain values; all of them must be present.

        Raises
        ------
        InvalidParameterError
            If a value is missing, unknown or out of range.
        """
        names = [entry.name for entry in fields(cls)]
        if sorted(values) != sorted(names):
            raise InvalidParameterError("charge", sorted(values), f"the entries {names}")
        return cls(**values)


def check_alike(one: Charge, other: Charge) -> None:
    """Refuse to add up charges for different neighbours.

    Raises
    ------
    InvalidParameterError
        If they are.
    """
    if one.neighbours != other.neighbours:
        raise InvalidParameterError(
            "neighbours",
            other.neighbours,
            f"'{one.neighbours}', as of the charges before it: costs for different neighbours are "
            "not added up",
        )
