"""The releases of a tree's nodes: a device's update, or an aggregator's average.

It has its noise, or it goes into a release of the zone, which gets it from a parent that the node
trusts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flwr_privacy.errors import DataError, DeclinedError, ProtocolError
from flwr_privacy.pipeline.mechanism import Answer, Facts, Mechanism, ReleasePlan
from flwr_privacy.pipeline.sealed import SEALED
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import Update, check_start, released_names
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.layout import Layout
from flwr_privacy.wire.message import METRICS, Fields

from .messages import packed
from .models import moved
from .sensitivity import Reach
from .sums import TierSums
from .terms import CODES, VALUE_RANGE, Duty, M2FDPTerms
from .zone_average import Codes, Upload, check_gap, noised, trained

__all__ = ["DeviceUpdate", "SealedUpdate", "ZoneAverage"]


@dataclass(frozen=True)
class DeviceUpdate(Mechanism):
    """The update of a device: clipped, with all of the noise if it trusts nobody above it.

    Otherwise the noise follows, where the answers of its zone leave it.

    Parameters
    ----------
    terms : M2FDPTerms
        What was asked.
    groups : mapping of str to str
        The group of each device on the node.
    """

    terms: M2FDPTerms
    groups: Mapping[str, str]

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        terms = self.terms
        names = released_names(start, terms.keep_back)
        check_start(start, names)
        sigma = terms.noise_multiplier * 2 * terms.clipping_norm
        plan = terms.plan()
        if plan.charge is not None and terms.noised:
            dimension = sum(np.size(start[name]) for name in names)
            check_gap(dimension, sigma=sigma, grid=CodeGrid(terms.grid))
        return replace(
            plan,
            sigma=sigma,
            proven=terms.proven or terms.noised,
            noise_follows=plan.charge is not None and not terms.noised,
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

    def noise(self, measured: Update, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the codes of the update with its noise, or without any."""
        grid, vector = CodeGrid(self.terms.grid), measured.vector
        own: Fields = {METRICS: {"num-examples": 1}}
        if plan.charge is None or plan.noise_follows:
            return measured.arrays(grid.encode(vector, np.empty(vector.size, np.int32))), own
        codes = grid.encode(vector, vector.view(np.int64))
        sent = noised(codes, sigma=plan.sigma or 0.0, grid=grid, random=random)
        return measured.arrays(sent), own

    def accumulator(self, start: Arrays) -> WeightedMean:
        """Return empty sums of codes, one for each group."""
        return TierSums(start, released_names(start, self.terms.keep_back), self.groups)


@dataclass(frozen=True)
class SealedUpdate(DeviceUpdate):
    """The update of a device for a parent that it trusts, which adds the noise.

    Parameters
    ----------
    terms, groups
        As of `DeviceUpdate`.
    zone : Upload, optional
        How far the zone has come since its public start, after a clean event.
    floor : float, default 0.0
        Least standard deviation of the noise that the device allows, in units of the weights.
    """

    zone: Upload | None = None
    floor: float = 0.0

    def model(self, start: Arrays) -> Arrays:
        """Return the model that the device trains.

        Raises
        ------
        ProtocolError
            If what came from the zone has another size than the model.
        """
        if self.zone is None:
            return start
        layout = Layout.of(start, released_names(start, self.terms.keep_back))
        if self.zone.codes.size != layout.size:
            raise ProtocolError("the sealed start has another size than the model")
        return moved(start, layout, CodeGrid(self.terms.grid).step * self.zone.codes)

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        plan = super().plan(start, facts)
        self.model(start)
        return plan

    def measure(self, start: Arrays, outcome: Any) -> Update:
        """Return the update of the model that the device trained, clipped."""
        return super().measure(self.model(start), outcome)

    def failed(self, start: Arrays) -> Update | None:
        """Return the update of a training that changed nothing, at user level."""
        return self.measure(start, self.model(start)) if self.terms.unit == "user" else None

    def noise(self, measured: Update, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the content to seal: the codes of the zone with this update, without noise."""
        terms, grid = self.terms, CodeGrid(self.terms.grid)
        codes = grid.encode(measured.vector)
        reach = Reach(anchor=terms.depth) if self.zone is None else self.zone.reach
        reach = trained(terms.drift, reach, terms.clipping_norm, terms.steps, grid, codes.size)
        if self.zone is not None:
            codes += self.zone.codes
        upload = Upload(codes, reach, self.floor, wide=self.zone is not None)
        content = packed(upload, terms)
        return {}, {METRICS: {"num-examples": 1}, SEALED: content}


@dataclass(frozen=True)
class ZoneAverage(Mechanism):
    """The noised average that an aggregator releases, once a period.

    Parameters
    ----------
    duty : Duty
        What was asked.
    mean : Upload
        The average of what its children sealed for it, which they were charged for.
    """

    duty: Duty
    mean: Upload

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        sigma, floor = self.duty.noise_multiplier * self.mean.reach.total, self.mean.floor
        check_gap(self.mean.codes.size, sigma=sigma, grid=CodeGrid(self.duty.grid))
        if sigma < floor:
            raise DeclinedError(
                f"the noise would be {sigma:.6g}: a member of the zone has min_sigma = {floor:.6g}"
            )
        return replace(self.duty.plan(), sigma=sigma)

    def measure(self, start: Arrays, outcome: Any) -> Codes:
        """Return the codes of the average."""
        return self.mean.codes

    def noise(self, measured: Codes, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the codes with the noise of the zone."""
        sigma, grid = plan.sigma or 0.0, CodeGrid(self.duty.grid)
        codes = noised(measured, sigma=sigma, grid=grid, random=random)
        return {CODES: codes}, {METRICS: {}, "sigma": sigma}

    def accumulator(self, start: Arrays) -> WeightedMean:
        """Raise an error: an aggregator's answer is not summed with others."""
        raise ProtocolError("answers of aggregators are not summed")
