"""DP-SGD around the user's own training loop: the terms of its steps, their noise, its update.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1: every step takes a
Poisson sample of the records, clips the gradient of each, adds Gaussian noise to their sum, and
hands the user's optimiser that sum over the expected size of the sample. All that follows from the
noised sums (the optimiser's moments, the weights, the update) is post-processing.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting import REPLACE_ONE, Charge
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.pipeline.mechanism import Answer, Facts, Mechanism, ReleasePlan
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid, GridMean, check_gap, saturated
from flwr_privacy.privacy.noise import LARGEST_SCALE, discrete_gaussian, discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import Update, check_start, released_names
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS

from .budgets import check_budget
from .sensitivity import RECORD_UNIT, check_sampling

__all__ = [
    "DP_SGD",
    "LARGEST_CLIP",
    "MOST_STEPS",
    "SMALLEST_CLIP",
    "UPDATE_GRID",
    "PrivateStepsTerms",
    "PrivatelyTrained",
]

DP_SGD = "dp-sgd"
"""What the terms call the training that they ask for."""

MOST_STEPS = 2**20
SMALLEST_CLIP, LARGEST_CLIP = 1e-6, 1e6
"""Least and largest clipping norm: products with gradients in float32 keep their digits."""

_MOST_RECORDS = 2**20
_ROUNDING = 1e-3
"""Relative share of the clipping norm for the rounding of norms, factors and sums.

A gradient counts as the numbers that it is stored as, in float32 as a rule; norms, factors and
sums of gradients are computed in float64. A sum of n vectors of norm C is off by at most
``n 2**-53 n C`` in any order, and so is the one without a record: for n up to 2**20 both together
by ``2**-12 C``. Norms and factors are off by a relative ``d 2**-52``, for d up to 2**31 weights
2**-21. So the sums that ghost clipping leaves in float32, whose error is 2**29 times that, are not
what is noised.
"""

UPDATE_GRID = CodeGrid(-24)
"""Grid of the update as it travels: a weight moves by up to 128, in steps that float32 has at 1."""


class PrivatelyTrained(NamedTuple):
    """The result of a training whose steps were all private."""

    arrays: Arrays
    records: int


@dataclass(frozen=True, kw_only=True)
class PrivateStepsTerms(Mechanism):
    """The terms of a local training of noised steps, and the mechanism that answers it.

    Parameters
    ----------
    training : {"dp-sgd"}
        What is asked for.
    steps : int
        Steps of a training, 1 to 2**20.
    sampling_rate : float
        Rate of the Poisson sample of the records in a step, above 0 and at most 1.
    clipping_norm : float
        L2 bound of the gradient of a record over all trainable parameters, from 1e-6 to 1e6.
    noise_multiplier : float
        Standard deviation of a step's noise over the distance of two records; 0 for none.
    epsilon, delta : float
        Budget of a client in this experiment; it declines what would exceed it.
    gap : float
        Epsilon set aside per step for the grid.
    grid : int
        Exponent of the step of the grid on which the sum of a step gets its noise.
    keep_back : list of str
        Arrays of which nothing is released, beyond those that a client keeps back anyway.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    Adversary: whoever sees the update of the whole training, or the model after every step.
    Neighbours: data of equal size that differ in one record (``replace_one``).
    Covered: a record that is in a step's sample moves its sum by at most `shift`; the noise of the
    step is ``2 noise_multiplier`` times that, exact and discrete, fresh for each step. The charge
    is that of all steps, each with a Poisson sample of its own, made before the first one
    (`flwr_privacy.accounting.neighbours` has the theorem for samples and replaced records).
    Assumed: the gradient of a record follows from this record and the weights. A rehearsal on
    generated records refuses what it can find (docs/dp-sgd.md has what it cannot: losses that are
    linear on those records only, settings of the app's that follow its data, records mixed by
    chance or later on).
    Not covered: whether two gradients of *another* record, computed in batches with and without
    this one, are the same to the last digit. Where a kernel rounds differently for batches of
    another size, they are not, and no bound is stated for it. Nor the number of records, which is
    public; what the loop does with raw batches, losses and labels beside the model; and that a
    training fails as a whole, see `flwr_privacy.pipeline.answer`.

    Examples
    --------
    >>> terms = PrivateStepsTerms(
    ...     steps=100, sampling_rate=0.02, clipping_norm=1.0, noise_multiplier=0.5, epsilon=8.0,
    ...     delta=1e-5, gap=1e-6, grid=-27,
    ... )
    >>> terms.charge().count, round(terms.sigma(10_000), 6)
    (100, 1.001001)
    """

    training: str = DP_SGD
    steps: int
    sampling_rate: float
    clipping_norm: float
    noise_multiplier: float
    epsilon: float
    delta: float
    gap: float
    grid: int
    keep_back: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("training", self.training, (DP_SGD,))
        check_integer("steps", self.steps, minimum=1, maximum=MOST_STEPS)
        check_sampling(RECORD_UNIT, self.sampling_rate)
        check_number(
            "clipping_norm", self.clipping_norm, minimum=SMALLEST_CLIP, maximum=LARGEST_CLIP
        )
        check_number("noise_multiplier", self.noise_multiplier, minimum=0)
        check_budget(epsilon=self.epsilon, delta=self.delta)
        check_number("gap", self.gap, minimum=0)
        CodeGrid(self.grid)

    # -- A step --------------------------------------------------------------------------------

    def shift(self, dimension: int) -> float:
        """Return the L2 distance of the codes of a step's sum with a record from those without it.

        ``C (1 + 1e-3) + g sqrt(d)``: the clipped gradient, the rounding of norms and sums, and what
        truncation to a grid of step g adds in d weights.
        """
        apart = CodeGrid(self.grid).step * math.sqrt(dimension)
        return self.clipping_norm * (1 + _ROUNDING) + apart

    def sigma(self, dimension: int) -> float:
        """Return the standard deviation of the noise of a step's sum."""
        return self.noise_multiplier * 2 * self.shift(dimension)

    def noised(self, total: NDArray[np.float64], random: SecureRandom) -> NDArray[np.float64]:
        """Return a step's sum with its noise.

        Parameters
        ----------
        total : (d,) float64
            Sum of the clipped gradients of up to 2**20 records.
        random : SecureRandom
            Where the noise comes from.
        """
        grid = CodeGrid(self.grid)
        codes = np.trunc(total / grid.step).astype(np.int64)  # the quotient is exact
        if self.noise_multiplier:
            codes += discrete_gaussian(codes.size, self.sigma(total.size) / grid.step, random)
        return np.multiply(codes, grid.step, dtype=np.float64)

    def charge(self) -> Charge | None:
        """Return the charge of all steps; None if there is no noise to account for."""
        if self.noise_multiplier == 0:
            return None
        return Charge(
            noise_multiplier=self.noise_multiplier,
            neighbours=REPLACE_ONE,
            sampling=self.sampling_rate,
            gap=self.gap,
            count=self.steps,
        )

    # -- What the strategy asks of the terms of any training -----------------------------------

    @property
    def unit(self) -> str:
        """What is protected: a record."""
        return RECORD_UNIT

    @property
    def parties(self) -> int:
        """Clients who share the noise: none. That of others goes through their own optimisers."""
        return 0

    @property
    def count_failed(self) -> bool:
        """Whether failed trainings are counted: not where a record is protected."""
        return False

    @property
    def falls_with_records(self) -> bool:
        """Whether a client with more records needs less noise for an update of the same length."""
        return True

    def failed_sigma(self) -> float:
        """Return the noise of a count of failed trainings: there is no such count."""
        return 0.0

    def noise_ratio(self, clients: int) -> float:
        """Return the noise of a weight of a mean over the bound of that mean's L2 norm.

        For gradient descent, and a single record of each client.
        """
        expected = self.sampling_rate * math.sqrt(self.steps * clients)
        return 2 * self.noise_multiplier / expected

    # -- The mechanism -------------------------------------------------------------------------

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        check_start(start, released_names(start, self.keep_back))
        if facts.records is not None:
            check_integer("records", facts.records, minimum=1, maximum=_MOST_RECORDS)
        floats = released_names(start, statistics=True)
        dimension = sum(np.size(start[name]) for name in floats)
        if self.noise_multiplier:
            scale = self.sigma(dimension) / CodeGrid(self.grid).step
            if scale > LARGEST_SCALE:
                raise InvalidParameterError("grid", self.grid, "a coarser grid (less grid_bits)")
            check_gap(self.grid, discretisation_gap(dimension, scale), charged=self.gap)
        return ReleasePlan(
            unit=RECORD_UNIT,
            charge=self.charge(),
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            sigma=0.0,  # of a weight: it is up to the user's optimiser how much is left of it
            largest_code=CODE_LIMIT,
        )

    def measure(self, start: Arrays, outcome: Any) -> tuple[Update, int]:
        """Return the update of the training and its weight; what is not finite counts as unmoved.

        Raises
        ------
        ProtocolError
            If the training returned other arrays than the model has.
        """
        names = released_names(start, self.keep_back)
        trained = dict(outcome.arrays)
        for name in set(names) & set(trained):
            array, old = np.asarray(trained[name]), np.asarray(start[name])
            if array.shape == old.shape and not np.isfinite(array).all():
                trained[name] = np.where(np.isfinite(array), array, old)
        return Update.between(start, trained, names), outcome.records

    def noise(
        self, measured: tuple[Update, int], plan: ReleasePlan, random: SecureRandom
    ) -> Answer:
        """Return the codes of the update: its noise came in the steps."""
        update, records = measured
        limit = CODE_LIMIT * UPDATE_GRID.step
        codes = UPDATE_GRID.encode(np.clip(update.vector, -limit, limit))
        return update.arrays(saturated(codes)), {METRICS: {"num-examples": records}}

    def accumulator(self, start: Arrays) -> GridMean:
        """Return an empty sum of codes."""
        return GridMean(start, UPDATE_GRID, released_names(start, self.keep_back))
