"""What leaves a device or an aggregator of a tree with noise: an update, or an average."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import WeightedMean
from flwr_privacy.errors import DataError, ProtocolError
from flwr_privacy.grid import Grid
from flwr_privacy.mechanism import Answer, Facts, Mechanism, Plan
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.updates import Update, check_start, released_names
from flwr_privacy.wire import METRICS, Fields

from .sums import TierSums
from .terms import CODES, VALUE_RANGE, Duty, Terms
from .zone import Codes, Upload, check_gap, noised

__all__ = ["DeviceUpdate", "ZoneAverage"]


@dataclass(frozen=True)
class DeviceUpdate(Mechanism):
    """The update of a device that trusts nobody above it: clipped, with all of the noise.

    Parameters
    ----------
    terms : Terms
        What was asked.
    groups : mapping of str to str
        The group of each device on the node.
    """

    terms: Terms
    groups: Mapping[str, str]

    def plan(self, start: Arrays, facts: Facts) -> Plan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        terms = self.terms
        names = released_names(start, terms.keep_back)
        check_start(start, names)
        sigma = terms.noise_multiplier * 2 * terms.clipping_norm
        charge = terms.charge()
        if charge is not None:
            dimension = sum(np.size(start[name]) for name in names)
            check_gap(dimension, sigma=sigma, grid=Grid(terms.grid))
        return Plan(
            unit=terms.unit,
            charge=charge,
            epsilon=terms.epsilon,
            delta=terms.delta,
            noise_multiplier=terms.noise_multiplier,
            sigma=sigma,
            proven=terms.proven or terms.noised,
        )

    def measure(self, start: Arrays, outcome: Any) -> Update:
        """Return the update, clipped if there is a norm to clip it to."""
        terms = self.terms
        norm = terms.clipping_norm or None
        names = released_names(start, terms.keep_back)
        update = Update.between(start, outcome, names, clipping_norm=norm)
        if norm is None and np.abs(update.vector).max(initial=0.0) > VALUE_RANGE:
            raise DataError(f"the update has values beyond {VALUE_RANGE:g}: clip it")
        return update

    def failed(self, start: Arrays) -> Update | None:
        """Return the update of a training that changed nothing, at user level.

        At record level a part of the privacy is the chance that a record had no part in a training
        that did its steps; of one that failed nobody knows which records had.
        """
        return self.measure(start, start) if self.terms.unit == "user" else None

    def noise(self, measured: Update, plan: Plan, random: SecureRandom) -> Answer:
        """Return the codes of the update with its noise, or without any."""
        grid, vector = Grid(self.terms.grid), measured.vector
        own: Fields = {METRICS: {"num-examples": 1}}
        if plan.charge is None:
            return measured.arrays(grid.encode(vector, np.empty(vector.size, np.int32))), own
        codes = grid.encode(vector, vector.view(np.int64))
        sent = noised(codes, sigma=plan.sigma or 0.0, grid=grid, random=random)
        return measured.arrays(sent), own

    def accumulator(self, start: Arrays) -> WeightedMean:
        """Return empty sums of codes, one for each group."""
        return TierSums(start, released_names(start, self.terms.keep_back), self.groups)


@dataclass(frozen=True)
class ZoneAverage(Mechanism):
    """The average that an aggregator hands out with noise, once a period.

    Parameters
    ----------
    duty : Duty
        What was asked.
    mean : Upload
        The average of what its children sealed for it, which they were charged for.
    """

    duty: Duty
    mean: Upload

    def plan(self, start: Arrays, facts: Facts) -> Plan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        duty, charge = self.duty, self.duty.charge()
        if charge is None:
            raise ProtocolError("there is no noise to charge")
        sigma = duty.noise_multiplier * self.mean.reach.total
        check_gap(self.mean.codes.size, sigma=sigma, grid=Grid(duty.grid))
        return Plan(
            unit=duty.unit,
            charge=charge,
            epsilon=duty.epsilon,
            delta=duty.delta,
            noise_multiplier=duty.noise_multiplier,
            sigma=sigma,
            proven=duty.proven,
        )

    def measure(self, start: Arrays, outcome: Any) -> Codes:
        """Return the codes of the average."""
        return self.mean.codes

    def noise(self, measured: Codes, plan: Plan, random: SecureRandom) -> Answer:
        """Return the codes with the noise of the zone."""
        sigma, grid = plan.sigma or 0.0, Grid(self.duty.grid)
        codes = noised(measured, sigma=sigma, grid=grid, random=random)
        return {CODES: codes}, {METRICS: {}, "sigma": sigma}

    def accumulator(self, start: Arrays) -> WeightedMean:
        """Refuse: an aggregator's answer is one."""
        raise ProtocolError("answers of aggregators are not summed")
