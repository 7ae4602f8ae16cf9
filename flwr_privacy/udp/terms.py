"""A client's training under UDP: its fields on the wire, its plan, its bounds and noise."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting import REPLACE_ONE, Charge
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.keywords import check_usual
from flwr_privacy.pipeline.mechanism import Answer, Facts, Mechanism, ReleasePlan
from flwr_privacy.privacy.distributed_noise import SMALLEST_SHARE, share_sigma, summed_gap
from flwr_privacy.privacy.failures import FAILED_NAME, failed_code
from flwr_privacy.privacy.grid import (
    CODE_LIMIT,
    CodeGrid,
    EvenMean,
    GridMean,
    check_codes,
    check_gap,
    saturated,
)
from flwr_privacy.privacy.noise import discrete_gaussian, discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import SMALLEST_NORM, Update, check_start, released_names
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS, Fields

from .budgets import check_budget
from .sensitivity import BOUNDS, RECORD_UNIT, USER_UNIT, check_sampling, sensitivity
from .shared import RECORDS_NAME, SharedMean

__all__ = ["NUM_EXAMPLES", "Steps", "UDPTerms"]

NUM_EXAMPLES = "num-examples"
"""Name of the metric that is a reply's weight."""

_NOISE_REACH = 8  # standard deviations of noise that codes must hold; beyond, they saturate
_SHARE_REACH = 12  # of a share: what is beyond would show by itself

_MOST_RECORDS = 2**40
_MANY_RECORDS = 1024  # after which the noise of several steps hardly falls any further

_AT_RECORD_LEVEL = {
    "learning_rate": 1.0,
    "epochs": 1,
    "batch_size": 0,
    "bound": "general",
    "max_records": 0,
}
"""Options of the training at record level, with their only values at user level."""

_ROOM = 1 / 64
"""Relative share of the sensitivity of a sum that is there for the grid and for rounding."""


class Steps(NamedTuple):
    """The result of steps on gradients that were clipped per record."""

    arrays: Arrays
    records: int
    sensitivity: float


class _Measured(NamedTuple):
    """A bounded update, the weight of the reply, the update's sensitivity, and what it came of."""

    update: Update
    weight: int
    bound: float
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class UDPTerms(Mechanism):
    """The terms of a client's training, and the mechanism that answers it.

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
    count_failed : bool, default False
        Whether it is counted how many trainings fail (`flwr_privacy.privacy.failures`); at user
        level, with noise.
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
    count_failed: bool = False
    keep_back: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, (RECORD_UNIT, USER_UNIT))
        check_number("noise_multiplier", self.noise_multiplier, minimum=0)
        check_budget(epsilon=self.epsilon, delta=self.delta)
        check_number("gap", self.gap, minimum=0)
        check_number("clipping_norm", self.clipping_norm, minimum=SMALLEST_NORM)
        check_number("learning_rate", self.learning_rate, minimum=math.ulp(0.0))
        check_sampling(self.unit, self.sampling_rate)
        check_integer("epochs", self.epochs, minimum=1)
        check_integer("batch_size", self.batch_size, minimum=0)
        check_choice("bound", self.bound, BOUNDS)
        check_integer("max_records", self.max_records, minimum=0, maximum=_MOST_RECORDS)
        check_integer("parties", self.parties, minimum=0)
        if self.unit == USER_UNIT:
            check_usual(self, _AT_RECORD_LEVEL, "at user level: the training is the user's own")
        if self.parties:
            self._check_shared()
        if self.count_failed and (self.unit != USER_UNIT or not self.noise_multiplier):
            allowed = "false where a record is protected, or there is no noise"
            raise InvalidParameterError("count_failed", True, allowed)

    def reach(self, records: int) -> float:
        """Return the largest L2 norm of what a client with so many records noises."""
        if self.unit == USER_UNIT:
            return self.clipping_norm
        step = self.learning_rate * self.clipping_norm / self.sampling_rate
        if self.parties:
            return step * records
        return step * self.epochs * math.ceil(records / (self.batch_size or records))

    def counted(self, records: int) -> int:
        """Return how many of a client's records count: where noise is shared, `max_records`."""
        return min(records, self.max_records) if self.max_records else records

    def sensitivity(self, records: int) -> float:
        """Return the L2 sensitivity of a release of a client with so many records."""
        if self.unit == USER_UNIT:
            return sensitivity(USER_UNIT, clipping_norm=self.clipping_norm)
        return sensitivity(
            RECORD_UNIT,
            clipping_norm=self.clipping_norm,
            learning_rate=self.learning_rate,
            records=records,
            sampling_rate=self.sampling_rate,
            epochs=self.epochs,
            batch_size=self.batch_size or None,
            bound=self.bound,
        )

    def shared_sensitivity(self) -> float:
        """Return the L2 sensitivity of a sum of which each client noises its part.

        At user level that of an update. At record level the part of a client with n records is n
        times its update, so that every record weighs the same, and the sensitivity does not depend
        on n: ``2 learning_rate clipping_norm``, and 1/64 of it for the grid and for rounding.

        Examples
        --------
        >>> terms = UDPTerms(
        ...     unit="record", noise_multiplier=1.0, epsilon=8.0, delta=1e-5, gap=1e-3,
        ...     clipping_norm=0.5, learning_rate=4.0, grid=-20, max_records=4096, parties=5,
        ... )
        >>> terms.shared_sensitivity()
        4.0625
        """
        if self.unit == USER_UNIT:
            return self.sensitivity(1)
        return 2 * self.learning_rate * self.clipping_norm * (1 + _ROOM)

    @property
    def falls_with_records(self) -> bool:
        """Whether a client with more records needs less noise for an update of the same length."""
        one_step = self.epochs == 1 and not self.batch_size
        return self.unit == RECORD_UNIT and (one_step or self.bound != "general")

    def noise_ratio(self, clients: int) -> float:
        """Return the noise of a weight of a mean over the bound of that mean's L2 norm.

        Where it falls with the number of records: for a single one of each client.
        """
        records = max(1 if self.falls_with_records else _MANY_RECORDS, self.batch_size)
        noise = self.noise_multiplier * self.sensitivity(records)
        if self.parties:
            noise = self.noise_multiplier * self.shared_sensitivity() / math.sqrt(clients)
        ratio = noise / (self.reach(records) * math.sqrt(clients))
        return ratio * records if self.falls_with_records else ratio

    @property
    def proven(self) -> bool:
        """Whether the sensitivity of the training is proven."""
        return self.bound != "unproven" or (self.epochs == 1 and not self.batch_size)

    def charge(self) -> Charge | None:
        """Return the charge of one release; None if there is no noise to account for."""
        if self.noise_multiplier == 0:
            return None
        return Charge(
            noise_multiplier=self.noise_multiplier,
            neighbours=REPLACE_ONE,
            sampling=self.sampling_rate,
            gap=self.gap,
        )

    def failed_sigma(self) -> float:
        """Return the noise of one answer in the count of those that failed, in clients."""
        sigma = self.noise_multiplier * self.shared_sensitivity()
        return (share_sigma(sigma, self.parties) if self.parties else sigma) / self.clipping_norm

    # -- The mechanism -------------------------------------------------------------------------

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        names = self._names(start)
        check_start(start, names)
        dimension = sum(np.size(start[name]) for name in names) + bool(self._failed_code())
        sigma = self._least_sigma(dimension, facts)
        rounding = self._moves * _least_rounding(start, names) if self.unit == RECORD_UNIT else 0.0
        if self.parties:
            self._check_share(dimension, facts.records, rounding)
        elif sigma is not None and self.noise_multiplier:
            sigma += self.noise_multiplier * rounding
            step = CodeGrid(self.grid).step
            check_codes(self.grid, (self.reach(facts.records or 1) + _NOISE_REACH * sigma) / step)
            check_gap(self.grid, discretisation_gap(dimension, sigma / step), charged=self.gap)
        return ReleasePlan(
            unit=self.unit,
            charge=self.charge(),
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            sigma=sigma,
            proven=self.proven,
            parties=self.parties,
            largest_code=CODE_LIMIT,
        )

    def measure(self, start: Arrays, outcome: Any) -> _Measured:
        """Return the update: clipped as a whole at user level, of clipped steps at record level."""
        names = self._names(start)
        if self.unit == USER_UNIT:
            update = Update.between(start, outcome, names, clipping_norm=self.clipping_norm)
            # The number of records is not public at this level: everybody weighs the same.
            return _Measured(update, 1, self.sensitivity(1))
        update = Update.between(start, outcome.arrays, names)
        weight, bound = outcome.records, outcome.sensitivity
        if self.parties:
            self._check_room(weight, weight * bound + self._apart(update.vector.size))
        return _Measured(update, weight, bound)

    def failed(self, start: Arrays) -> _Measured | None:
        """Return the zero update, marked as that of a failed training."""
        if self.unit != USER_UNIT:
            return None
        return self.measure(start, start)._replace(failed=True)

    def noise(self, measured: _Measured, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the codes of the update with all of the noise, a share of it, or none."""
        update, weight, bound, _ = measured
        grid, vector = CodeGrid(self.grid), update.vector
        if self.parties:
            return self._shared(measured, random)
        if plan.charge is None:
            codes = grid.encode(vector, np.empty(vector.size, np.int32))
            return update.arrays(codes), {METRICS: {NUM_EXAMPLES: weight, "sigma": 0.0}}
        sigma = self.noise_multiplier * (bound + self._apart(vector.size))
        noised = grid.encode(vector, vector.view(np.int64))
        np.add(noised, discrete_gaussian(noised.size, sigma / grid.step, random), out=noised)
        counted = self._counted(measured, sigma / grid.step, random)
        arrays = update.arrays(saturated(noised))
        arrays |= {name: saturated(code) for name, code in counted.items()}
        return arrays, {METRICS: {NUM_EXAMPLES: weight, "sigma": sigma}}

    def accumulator(self, start: Arrays) -> GridMean:
        """Return an empty sum of codes."""
        names, grid, failed = self._names(start), CodeGrid(self.grid), self._failed_code()
        if self.parties:
            counts = self.unit == RECORD_UNIT
            return SharedMean(start, grid, names, counts=counts, failed_code=failed)
        kind = EvenMean if self.unit == USER_UNIT else GridMean
        return kind(start, grid, names, failed_code=failed)

    def _shared(self, measured: _Measured, random: SecureRandom) -> Answer:
        """Return codes that have a share of the noise, for one sum that is opened once.

        With the same share in two sums, or in none, the one or the difference of the two would have
        hardly any noise.
        """
        update, weight, _, _ = measured
        out: dict[str, NDArray[Any]] = {}
        if self.unit == RECORD_UNIT:
            np.multiply(update.vector, weight, out=update.vector)
            out[RECORDS_NAME] = np.array([weight], np.int64)
        grid = CodeGrid(self.grid)
        codes = grid.encode(update.vector)
        share = self._share() / grid.step
        codes += discrete_gaussian(codes.size, share, random)
        out |= self._counted(measured, share, random)
        own: Fields = {METRICS: {NUM_EXAMPLES: 1}}
        return {**update.arrays(codes), **out}, own

    def _counted(
        self, measured: _Measured, sigma: float, random: SecureRandom
    ) -> dict[str, NDArray[np.int64]]:
        """Return the coordinate that says whether the training failed, noised like the others."""
        if not self.count_failed:
            return {}
        code = self._failed_code() if measured.failed else 0
        return {FAILED_NAME: code + discrete_gaussian(1, sigma, random)}

    def _failed_code(self) -> int:
        return failed_code(self.clipping_norm, CodeGrid(self.grid).step) if self.count_failed else 0

    def _names(self, start: Arrays) -> list[str]:
        if self.count_failed and FAILED_NAME in start:
            raise InvalidParameterError("arrays", FAILED_NAME, "other names than this one")
        return released_names(start, self.keep_back)

    def _share(self) -> float:
        return share_sigma(self.noise_multiplier * self.shared_sensitivity(), self.parties)

    def _least_sigma(self, dimension: int, facts: Facts) -> float | None:
        """Return the least noise of the release; None at record level without a number of records.

        Rounding in the training adds to the sensitivity, and to the noise with it.
        """
        if self.parties:
            total = self.noise_multiplier * self.shared_sensitivity()
            if self.unit == USER_UNIT:
                return total
            return None if facts.records is None else total / self.counted(facts.records)
        if self.unit == USER_UNIT:
            return self.noise_multiplier * self.sensitivity(1)
        if facts.records is None:
            return None
        return self.noise_multiplier * (self.sensitivity(facts.records) + self._apart(dimension))

    def _apart(self, dimension: int) -> float:
        """Return what truncation to the grid may add to the sensitivity."""
        # It shortens a vector: two updates clipped as a whole stay within twice the norm.
        if self.unit == USER_UNIT:
            return 0.0
        return self._moves / 2 * CodeGrid(self.grid).step * math.sqrt(dimension)

    @property
    def _moves(self) -> int:
        """How many roundings move two releases apart, at record level."""
        # In a sample it is a record against none that must be within half of the sensitivity.
        return 2 if self.sampling_rate == 1 else 4

    def _check_share(self, dimension: int, records: int | None, rounding: float) -> None:
        """Refuse a grid on which shares of noise do not do what the charge says, or do not fit."""
        step, share = CodeGrid(self.grid).step, self._share()
        if share / step < SMALLEST_SHARE:
            raise InvalidParameterError(
                "grid",
                self.grid,
                f"a finer grid (more grid_bits): a share is {share / step:.3g} steps",
            )
        gap = summed_gap(dimension, share / step, self.parties)
        check_gap(self.grid, gap, charged=self.gap)
        weight = self.max_records if records is None else self.counted(records)
        check_codes(self.grid, (self.reach(weight) + _SHARE_REACH * share) / step)
        if rounding and records is not None:
            moved = 2 * self.learning_rate * self.clipping_norm + weight * rounding
            self._check_room(weight, moved + self._apart(dimension))

    def _check_room(self, weight: int, bound: float) -> None:
        """Refuse more than the noise of a sum was planned for."""
        if weight > self.max_records:
            raise InvalidParameterError(
                "max_records", self.max_records, f"at least the {weight} records of a client"
            )
        if bound > self.shared_sensitivity():
            raise InvalidParameterError(
                "grid",
                self.grid,
                "a finer grid (more grid_bits), or fewer records of a client: rounding moves the "
                "sum by more than the noise was planned for",
            )

    def _check_shared(self) -> None:
        plain = {"sampling_rate": 1.0, "epochs": 1, "batch_size": 0, "bound": "general"}
        check_usual(self, plain, "where noise is shared: all records in one step")
        if self.unit == RECORD_UNIT and not self.max_records:
            raise InvalidParameterError("max_records", 0, "at least 1 where noise is shared")
        if not self.noise_multiplier:
            raise InvalidParameterError("parties", self.parties, "0 where there is no noise")


def _least_rounding(start: Arrays, names: list[str]) -> float:
    """Return by how much a training moves a model at least because its numbers are rounded."""
    with np.errstate(over="ignore"):
        norms = [np.linalg.norm(start[name].astype(np.float64)) for name in names]
    least = min(float(np.finfo(start[name].dtype.name).eps) / 2 for name in names)
    return least * math.hypot(*norms)
