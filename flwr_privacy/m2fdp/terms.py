"""The terms of M2FDP: the fields that the server sends to devices and aggregators."""

from dataclasses import dataclass, field

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.pipeline.mechanism import ReleasePlan
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.privacy.policy import UNITS
from flwr_privacy.wire.identity import check_client_id
from flwr_privacy.wire.message import TRAIN

from .sensitivity import DRIFTS, Drift
from .zone_average import release_charge

__all__ = [
    "AGGREGATE",
    "CODES",
    "DELIVER",
    "DOWN",
    "EVENT",
    "NOISED",
    "RECORD",
    "SCHEME",
    "SEALED_FOR",
    "UP",
    "VALUE_RANGE",
    "Delivery",
    "Duty",
    "M2FDPTerms",
    "any_batch",
]

SCHEME = "m2fdp"
"""Name of the scheme."""

SEALED_FOR = "sealed for "
"""Begins the phase under which a device is charged for what its parent adds noise to."""

AGGREGATE, DELIVER = "aggregate", "deliver"
"""Phases in which an aggregator averages what its children sealed, and passes a model on."""

EVENT = "event"
"""Under this name the noise of an aggregator is drawn and its releases are charged."""

UP, NOISED, DOWN = "up", "noised", "down"
"""The ways of an average, one by one; see `WAYS`."""

WAYS = (UP, NOISED, DOWN)
"""Where an average goes: sealed to the parent, noised to everybody, sealed to the children."""

CODES = "codes"
"""Name of the array in which an aggregator hands out its noised codes."""

VALUE_RANGE = 2.0**6
"""Largest entry of an update that is not clipped, in units of the weights."""

RECORD = "record"
"""The unit of one record."""


def any_batch(rate: float, steps: int) -> float:
    """Return the probability that a record is in one of so many Poisson batches.

    Examples
    --------
    >>> round(any_batch(0.05, 20), 3)
    0.642
    """
    return 1 - (1 - rate) ** steps


@dataclass(frozen=True, kw_only=True)
class _Released:
    """The fields about a noised release that devices and aggregators share.

    Parameters
    ----------
    unit : {"user", "record"}
        What is protected: all data of a device, or one record.
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity; 0 for none, which protects nothing.
    epsilon, delta : float
        Budget of a device in this experiment; it refuses what would exceed it.
    grid : int
        Exponent of the grid's step.
    period : int
        Number of the exchange with which the release's period begins: with the round its name.
    law : {"worst", "smooth", "lemma"}
        How models drift apart, see `Drift`.
    growth : float
        Of the law ``smooth``.
    depth : int
        Tier of the devices.
    sampling : float, default 1.0
        Probability that a record is in any batch of the period; 1 counts no sampling.
    keep_back : list of str
        Arrays of which nothing is released, beyond those that a device keeps back anyway.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    unit: str
    noise_multiplier: float
    epsilon: float
    delta: float
    grid: int
    period: int
    law: str
    growth: float
    depth: int
    sampling: float = 1.0
    keep_back: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, UNITS)
        check_number("noise_multiplier", self.noise_multiplier, minimum=0)
        check_number("epsilon", self.epsilon, minimum=0)
        if not 0 < check_number("delta", self.delta) < 1:
            raise InvalidParameterError("delta", self.delta, "a number between 0 and 1")
        check_integer("grid", self.grid, minimum=-500, maximum=500)
        check_integer("depth", self.depth, minimum=1)
        check_integer("period", self.period, minimum=0)
        check_choice("law", self.law, DRIFTS)
        if not 0 < check_number("sampling", self.sampling) <= 1:
            raise InvalidParameterError("sampling", self.sampling, "above 0 and at most 1")
        _ = self.drift

    @property
    def drift(self) -> Drift:
        """The law by which models drift apart."""
        return Drift(law=self.law, growth=self.growth)

    @property
    def proven(self) -> bool:
        """Whether nothing is assumed of the losses."""
        return self.law == "worst"

    def plan(self) -> ReleasePlan:
        """Return what is known of the release without the model, or the answers of others."""
        return ReleasePlan(
            unit=self.unit,
            charge=self.charge(),
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            proven=self.proven,
        )

    def charge(self) -> Charge | None:
        """Return a device's charge for the release; None if there is no noise to account for."""
        return release_charge(self.noise_multiplier, self.sampling, unit=self.unit)


@dataclass(frozen=True, kw_only=True)
class M2FDPTerms(_Released):
    """The terms of a device's training.

    Parameters
    ----------
    unit, noise_multiplier, epsilon, delta, grid, period, law, growth, depth, sampling, keep_back
        Of the noised release that this training goes into.
    clipping_norm : float
        Largest L2 norm of the update; 0 does not clip, which protects nothing.
    steps : int
        Local steps of this training.
    parent : str
        To whom the answer goes.
    noised : bool
        Whether the device adds the noise itself: its parent is not trusted.
    sealed : bool
        Whether the answer is sealed to the parent, which is a node of its own; else the server
        simulates the aggregators.
    event, tier : int
        Number of the event that follows in this round, and the tier up to which it goes.
    siblings : list of str
        All children of the parent that were asked, this one among them, where answers are sealed.
    sampling_rate : float, default 1.0
        Rate of the Poisson sample of every local step, for the unit ``record``.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    clipping_norm: float
    steps: int
    parent: str
    noised: bool
    sealed: bool
    event: int
    tier: int
    siblings: list[str] = field(default_factory=list)
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("clipping_norm", self.clipping_norm, minimum=0)
        check_integer("steps", self.steps, minimum=1)
        check_client_id(self.parent, parameter="parent")
        check_integer("event", self.event, minimum=self.period)
        check_integer("tier", self.tier, minimum=0, maximum=self.depth - 1)
        # Whether an update fits into codes must not depend on the update.
        largest = self.clipping_norm or VALUE_RANGE
        if largest > CodeGrid(self.grid).step * CODE_LIMIT:
            allowed = f"a coarser grid: {largest:g} has no code, and an update may be as large"
            raise InvalidParameterError("grid", self.grid, allowed)
        if not 0 < check_number("sampling_rate", self.sampling_rate) <= 1:
            raise InvalidParameterError("sampling_rate", self.sampling_rate, "above 0, at most 1")
        if self.noise_multiplier and not self.clipping_norm:
            raise InvalidParameterError("clipping_norm", 0, "a number above 0 where there is noise")
        if self.unit == RECORD and self.event != self.period:
            allowed = f"{self.event}, the exchange itself: it is a period where unit = 'record'"
            raise InvalidParameterError("period", self.period, allowed)
        if self.unit == RECORD and self.sampling < any_batch(self.sampling_rate, self.steps):
            allowed = f"at least the probability that a record is in any of {self.steps} batches"
            raise InvalidParameterError("sampling", self.sampling, allowed)
        if self.unit != RECORD and (self.sampling, self.sampling_rate) != (1.0, 1.0):
            allowed = "1, as sampling_rate: nothing is sampled where unit = 'user'"
            raise InvalidParameterError("sampling", self.sampling, allowed)

    @property
    def hides(self) -> bool:
        """Whether the answer is sealed for a parent that adds the noise."""
        return self.sealed and bool(self.noise_multiplier) and not self.noised

    @property
    def way(self) -> str:
        """Where the answer goes, as the ledger calls it: what goes to two places is released twice.

        Within its round the release is named by this and by its period.
        """
        if self.hides:
            return f"{SEALED_FOR}{self.parent}"
        return TRAIN if self.noised or not self.noise_multiplier else "in the open"


@dataclass(frozen=True, kw_only=True)
class Duty(_Released):
    """The request to an aggregator to average its children's sealed answers.

    Parameters
    ----------
    unit, noise_multiplier, epsilon, delta, grid, period, law, growth, depth, sampling, keep_back
        Of the noised release that the average goes into.
    event, tier : int
        Number of the event in this round, and the tier up to which it goes.
    own_tier : int
        Tier of the aggregator.
    way : {"up", "noised", "down"}
        Where the average goes.
    parent : str
        To whom it goes, if it goes up.
    siblings : list of str
        All children of that parent that were asked.
    children : list of str
        All children that were asked.
    senders : list of str
        Those of them whose answers are here.
    sealed : list of bytes
        Their answers.
    round_model : bytes
        SHA-256 of the global model that the round began with; a kept average is for this one alone.
    min_children : int
        Fewer answers than that are not averaged.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    event: int
    tier: int
    own_tier: int
    way: str
    parent: str
    children: list[str]
    senders: list[str]
    sealed: list[bytes]
    round_model: bytes
    siblings: list[str] = field(default_factory=list)
    min_children: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("way", self.way, WAYS)
        check_client_id(self.parent, parameter="parent")
        check_integer("event", self.event, minimum=self.period)
        check_integer("own_tier", self.own_tier, minimum=1, maximum=self.depth - 1)
        check_integer("tier", self.tier, minimum=0, maximum=self.own_tier)
        check_integer("min_children", self.min_children, minimum=1)
        if (self.way == DOWN) != (self.tier == self.own_tier):
            raise InvalidParameterError("way", self.way, "'down' exactly where tier = own_tier")
        if len(set(self.senders)) != len(self.senders) or len(self.senders) != len(self.sealed):
            raise InvalidParameterError("senders", self.senders, "a different name for each answer")
        if len(set(self.children)) != len(self.children) or not set(self.senders) <= set(
            self.children
        ):
            raise InvalidParameterError("senders", self.senders, f"some of {self.children}")


@dataclass(frozen=True, kw_only=True)
class Delivery(_Released):
    """The request to an aggregator to pass on the model of a clean event above it.

    Parameters
    ----------
    unit, noise_multiplier, epsilon, delta, grid, period, law, growth, depth, sampling, keep_back
        Of the noised release that the model goes into.
    event : int
        Number of the event in this round.
    own_tier : int
        Tier of the aggregator.
    parent : str
        Whose model it is.
    siblings : list of str
        All children of that parent that were asked.
    children : list of str
        All children that were asked.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    event: int
    own_tier: int
    parent: str
    siblings: list[str]
    children: list[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_client_id(self.parent, parameter="parent")
        check_integer("event", self.event, minimum=self.period)
        check_integer("own_tier", self.own_tier, minimum=1, maximum=self.depth - 1)
