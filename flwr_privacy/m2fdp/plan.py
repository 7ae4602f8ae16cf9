"""The server's plan of a round: the devices of each exchange, and their noise.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
sections III and IV; what is ours is said where it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from flwr_privacy.accounting import Charge, fitting, new_accountant, noise_multiplier, spent
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.evaluation import EvaluationTerms, PrivateEvaluation
from flwr_privacy.evaluation.plan import planned_terms
from flwr_privacy.m2fdp.tree.exchanges import Exchange, boundary_tier, exchanges, steps_of
from flwr_privacy.m2fdp.tree.tree import TierTree
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.noise import discretisation_gap

from .calibration import multiplier, record_multiplier
from .options import PaperNoise, RecordNoise, TierPrivacy
from .paper_noise import sigma
from .schedule import Course, EventSchedule, Segment
from .sensitivity import largest_weights, sensitivity_worst_case
from .terms import RECORD, VALUE_RANGE, any_batch
from .zone_average import GAP, NEIGHBOURS, NOISE_REACH, release_charge

__all__ = [
    "STEP_RULES",
    "M2FDPRoundPlan",
    "ZoneRelease",
]

CONSTANT, THEOREM = "constant", "theorem"
STEP_RULES = (CONSTANT, "inv_sqrt", THEOREM)
"""How step and clipping go on from round to round."""

ROUND = "round"

_MOST_ROOM = 64.0  # for noise, over that of a zone in which everybody takes part
_ROUNDING = 1 + 1e-6  # what a sum of charges, one by one, may come to beyond all at once


@dataclass(frozen=True, kw_only=True)
class ZoneRelease:
    """A planned noised release of a round.

    Parameters
    ----------
    unit : {"user", "record"}
        What is protected.
    steps : int
        Local steps that it is about.
    multiplier : float
        Noise over sensitivity; 0 without noise.
    sampling : float
        Probability that a record is in any of their batches; 1 counts none.
    sensitivity : float
        L2 sensitivity when everybody takes part, without rounding.
    grid : CodeGrid
        The finest grid that holds the codes and the noise of all releases of a round at this tier.
    """

    unit: str
    steps: int
    multiplier: float
    sampling: float
    sensitivity: float
    grid: CodeGrid

    def charge(self) -> Charge | None:
        """Return the charge of a device; None without noise."""
        return release_charge(self.multiplier, self.sampling, unit=self.unit)


@dataclass(frozen=True, kw_only=True)
class M2FDPRoundPlan:
    """A round with its noise.

    Parameters
    ----------
    tree : TierTree
        Who there is.
    schedule : EventSchedule
        Local steps and events of the round.
    privacy : TierPrivacy
        What is protected, with which noise.
    server_round : int
        Number of the round.
    total_steps : int
        Local steps of the whole training.
    rounds : int
        Most rounds of the training.
    min_children : int, default 1
        Fewest children that a trusted aggregator averages.
    step_rule : {"constant", "inv_sqrt", "theorem"}, default "constant"
        How step and clipping go on from round to round.
    keep_back : sequence of str
        Arrays that are not sent.
    course : sequence of (EventSchedule, int), optional
        The schedules of all rounds of the training, each with its number of rounds, where they
        differ; by default all rounds are like this one.
    participations : mapping of int to sequence of Course, optional
        For each tier at which noise enters, the rounds that a device's budget has to suffice for:
        those of the device that takes part most often, of several courses whichever costs most
        (`flwr_privacy.m2fdp.control.cohorts.TierCohorts`). By default all rounds.
    evaluation : PrivateEvaluation, optional
        What devices say of the model, from a share of the budget; by default nothing.
    """

    tree: TierTree = field(repr=False)
    schedule: EventSchedule
    privacy: TierPrivacy
    server_round: int
    total_steps: int
    rounds: int
    min_children: int = 1
    step_rule: str = CONSTANT
    keep_back: Sequence[str] = ()
    course: Course = field(default=(), repr=False)
    participations: Mapping[int, Sequence[Course]] = field(default_factory=dict, repr=False)
    evaluation: PrivateEvaluation | None = None

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of the round."""
        return exchanges(self.tree, self.schedule, clean_events=self.privacy.clean)

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The tiers at which noise enters."""
        leaves = self.tree.tiers[self.tree.depth - 1]
        return tuple(sorted({boundary_tier(self.tree, leaf) for leaf in leaves}))

    @property
    def scale(self) -> float:
        """Factor of step and clipping in this round."""
        if self.step_rule == CONSTANT:
            return 1.0
        falling = 1 / math.sqrt(self.server_round + 1)
        return falling / self.total_steps if self.step_rule == THEOREM else falling

    def bound(self, steps: int) -> float:
        """Return the largest norm of an update of so many steps; 0 where nothing is clipped."""
        return (self.privacy.clipping_norm or 0.0) * self.scale * steps

    def release(self, boundary: int, end: int) -> ZoneRelease:
        """Return the release of nodes at a tier that an exchange ends."""
        return self._releases[boundary, end]

    def release_of(self, leaf: str, exchange: Exchange) -> ZoneRelease:
        """Return the release that the answers of a lowest aggregator's devices go into."""
        return self.release(boundary_tier(self.tree, leaf), exchange.leaves[leaf].end)

    def of_zone(self, leaf: str, exchange: Exchange) -> dict[str, Any]:
        """Return the fields that an aggregator gets about the release; see `zone_epsilon`."""
        budget = self.zone_epsilon(boundary_tier(self.tree, leaf))
        return {**self.of_release(leaf, exchange), "epsilon": float(budget)}

    def of_release(self, leaf: str, exchange: Exchange) -> dict[str, Any]:
        """Return the fields that all nodes of a zone get about the release of their answers."""
        privacy, release = self.privacy, self.release_of(leaf, exchange)
        return {
            "unit": privacy.unit,
            "noise_multiplier": float(release.multiplier),
            "epsilon": float(self.epsilon(boundary_tier(self.tree, leaf))),
            "delta": float(privacy.delta),
            "grid": release.grid.exponent,
            "period": exchange.leaves[leaf].period,
            "law": privacy.law.law,
            "growth": privacy.law.growth,
            "depth": self.tree.depth,
            "sampling": float(release.sampling),
            "keep_back": list(self.keep_back),
        }

    @cached_property
    def grids(self) -> dict[str, CodeGrid]:
        """The grid of the devices of each lowest aggregator."""
        last = self.exchanges[-1]
        return {leaf: self.release_of(leaf, last).grid for leaf in last.leaves}

    def epsilon(self, boundary: int) -> float:
        """Return the budget of the devices whose noise enters at a tier: in paper mode the truth.

        The paper's noise does not keep the budget that it is named after; what it costs by the
        sensitivity that holds is known beforehand, and is the budget of the devices then.
        """
        if not isinstance(self.privacy, PaperNoise):
            return self.privacy.epsilon
        return self._true[boundary]

    def check(self, size: int) -> None:
        """Refuse a grid that is too coarse for the noise, before any request.

        Parameters
        ----------
        size : int
            Entries of the model.

        Raises
        ------
        InvalidParameterError
            If a release would lose more than `GAP` to the grid.
        """
        for (boundary, _), release in self._releases.items():
            steps = release.multiplier * release.sensitivity / release.grid.step
            if release.multiplier and discretisation_gap(size, steps) > GAP:
                raise InvalidParameterError(
                    "clipping_norm",
                    self.privacy.clipping_norm,
                    f"more noise at tier {boundary}: it would be {steps:.3g} steps of the grid",
                )

    def zone_epsilon(self, boundary: int) -> float:
        """Return the budget of an aggregator's own ledger, which counts every round.

        An aggregator does not know which devices are in the averages of aggregators below it. So
        its ledger has all of its releases, as if one device were in every one of them. It is each
        device's own ledger that keeps the device's budget.
        """
        charges = self._charges(boundary, self._all_rounds)
        *before, last = charges
        total, delta = fitting(charges), self.privacy.delta
        adding = new_accountant(total, before)
        found = self.epsilon(boundary)
        if adding.would_exceed(last, epsilon=found, delta=delta):
            found = max(found, _ROUNDING * spent(charges, delta=delta, accountant=total))
        step = _ROUNDING
        while adding.would_exceed(last, epsilon=found, delta=delta):  # what the cap loses
            found, step = found * step, step**2
        return found

    def rounds_of_device(self, boundary: int) -> int:
        """Return the most rounds that a device is planned for whose noise enters at a tier."""
        return max(sum(count for _, count in course) for course in self._courses(boundary))

    def shares(self, boundary: int) -> tuple[float, float]:
        """Return what a round of a device costs, and all that it is planned for, as sums of 1/z^2.

        Only their ratio has a meaning: the releases of an M2FDP training add up by these squares.
        """
        one = self._charges(boundary, ((self.schedule, 1),))
        return _squares(one), _squares(self._dearest(boundary))

    @cached_property
    def _true(self) -> dict[int, float]:
        charges = {boundary: self._dearest(boundary) for boundary in self.boundaries}
        return {
            boundary: _ROUNDING * spent(found, delta=self.privacy.delta, accountant=fitting(found))
            for boundary, found in charges.items()
        }

    def _dearest(self, boundary: int) -> list[Charge]:
        """Return the charges of the device at a tier that pays most."""
        courses = self._courses(boundary)
        return max((self._charges(boundary, course) for course in courses), key=_squares)

    def _charges(self, boundary: int, course: Course) -> list[Charge]:
        """Return what the releases at a tier cost in some rounds; nothing without noise."""
        found = []
        for schedule, count in course:
            plan = self if schedule == self.schedule else replace(self, schedule=schedule)
            for (tier, _), release in plan._releases.items():
                if tier == boundary and (charge := release.charge()):
                    found.append(replace(charge, count=count))
        return found

    @property
    def _all_rounds(self) -> Course:
        return self.course or ((self.schedule, self.rounds),)

    def _courses(self, boundary: int) -> Sequence[Course]:
        """Return the rounds that a device may take part in, whose noise enters at a tier."""
        return self.participations.get(boundary) or [self._all_rounds]

    def _steps_of_device(self, boundary: int) -> int:
        """Return the local steps of the device that has the most."""
        if boundary not in self.participations:
            return self.total_steps
        courses = self.participations[boundary]
        return max(sum(schedule.steps * count for schedule, count in c) for c in courses)

    @cached_property
    def _releases(self) -> dict[tuple[int, int], ZoneRelease]:
        releases = {}
        for boundary in self.boundaries:
            periods = self.schedule.periods(boundary)
            planned = [self._release(boundary, period) for period in periods]
            # One grid for all periods of a round: the coarsest.
            grid = CodeGrid(max(release.grid.exponent for release in planned))
            for period, release in zip(periods, planned, strict=True):
                releases[boundary, period[-1].index] = replace(release, grid=grid)
        return releases

    def _release(self, boundary: int, period: Sequence[Segment]) -> ZoneRelease:
        steps = steps_of(period)
        sensitivity = self._sensitivity(boundary, period)
        multiplier = self._multiplier(boundary, period, sensitivity)
        grid = CodeGrid.holding(VALUE_RANGE * len(self.exchanges))
        if self.privacy.clipping_norm is not None:
            # With room for the noise of zones in which few take part. What is beyond saturates,
            # and more room would leave the noise of large zones few steps of the grid.
            worst = min(2 * self.bound(steps), sensitivity * self._thinning(boundary))
            grid = CodeGrid.holding(self.bound(steps) + NOISE_REACH * multiplier * worst)
        record = isinstance(self.privacy, RecordNoise)
        return ZoneRelease(
            unit=self.privacy.unit,
            steps=steps,
            multiplier=multiplier,
            sampling=any_batch(self.privacy.rate, steps) if record else 1.0,
            sensitivity=sensitivity,
            grid=grid,
        )

    def _thinning(self, boundary: int) -> float:
        """Return how much more a device may weigh in a zone from which others are missing."""
        factor = 1.0
        for tier in range(boundary, self.tree.depth):
            most = max(map(len, map(self.tree.children, self.tree.tiers[tier])))
            factor *= max(1.0, most / self.min_children)
        return min(factor, _MOST_ROOM)

    def _multiplier(self, boundary: int, period: Sequence[Segment], sensitivity: float) -> float:
        privacy, steps = self.privacy, steps_of(period)
        if not privacy.noised:
            return 0.0
        if isinstance(privacy, PaperNoise):
            weight = largest_weights(self.tree, boundary)[self.tree.depth]
            return self._printed_sigma(privacy, boundary, steps, weight) / sensitivity
        return self._calibrated(boundary, steps)

    def _calibrated(self, boundary: int, steps: int) -> float:
        """Return the noise over the sensitivity of a release, for the budget that is left."""
        privacy, evaluation = self.privacy, self.evaluation
        budget, delta = self._without_gap()
        if isinstance(privacy, RecordNoise):
            beside: tuple[Charge, ...] = ()
            if evaluation is not None:
                z = self.evaluation_multiplier
                charge = Charge(
                    noise_multiplier=z,
                    neighbours=NEIGHBOURS[privacy.unit],
                    count=self.evaluations,
                )
                beside = (charge,)
            return record_multiplier(
                epsilon=budget,
                delta=delta,
                rate=privacy.sampling_rate,
                periods=[steps_of(other) for other in self.schedule.periods(boundary)],
                rounds=self.rounds_of_device(boundary),
                beside=beside,
            )
        return multiplier(
            epsilon=budget,
            delta=delta,
            steps=steps,
            total_steps=self._steps_of_device(boundary),
            share=1.0 if evaluation is None else 1 - evaluation.share,
        )

    # -- Evaluations -----------------------------------------------------------------------------

    @property
    def evaluations(self) -> int:
        """Evaluations that the budget of a device is planned for: it may be asked in all."""
        return 0 if self.evaluation is None else self.evaluation.count(self.rounds)

    @property
    def evaluation_multiplier(self) -> float:
        """Noise over the sensitivity of an evaluation; 0 where there is none."""
        if self.evaluation is None:
            return 0.0
        budget, delta = self._without_gap()
        z = noise_multiplier(
            epsilon=budget,
            delta=delta,
            releases=self.evaluations,
            neighbours=NEIGHBOURS[self.privacy.unit],
            # By the accountant that adds it to the trainings.
            accountant="rdp" if self.privacy.unit == RECORD and self.privacy.rate < 1 else "gdp",
        )
        return z / math.sqrt(self.evaluation.share)

    def evaluation_terms(self) -> EvaluationTerms:
        """Return the terms of an evaluation.

        Each device adds all of its noise: also those that trust an aggregator.

        Raises
        ------
        ValueError
            If none is planned.
        """
        if self.evaluation is None:
            raise ValueError("no evaluation is planned")
        return planned_terms(
            self.evaluation,
            unit=self.privacy.unit,
            neighbours=NEIGHBOURS[self.privacy.unit],
            noise_multiplier=self.evaluation_multiplier,
            epsilon=float(self.privacy.epsilon),
            delta=float(self.privacy.delta),
            gap=GAP,
        )

    def edge_sigma(self, node: str) -> float:
        """Return the noise that a baseline's node of tier 1 adds at a global event, by Lemma 1.

        It is that of a trusted node that releases the steps since the event before.
        """
        privacy, tree = self.privacy, self.tree
        steps = self.schedule.segments()[-1].steps
        weight = max(tree.weight(leaf, node) for leaf in tree.leaves(node))
        if isinstance(privacy, PaperNoise):
            return self._printed_sigma(privacy, 1, steps, weight)
        return self._calibrated(tree.depth, steps) * 2 * self.bound(steps) * weight

    def _sensitivity(self, boundary: int, period: Sequence[Segment]) -> float:
        """Return the sensitivity of a release by the law of drift, when everybody takes part."""
        law, weights = self.privacy.law, largest_weights(self.tree, boundary)
        weight = weights[self.tree.depth]
        if not self.privacy.clean or law.law == "lemma":
            return 2 * self.bound(steps_of(period)) * weight
        if law.law == "worst":
            parts = [(segment.steps, segment.tier) for segment in period]
            return sensitivity_worst_case(parts, weights=weights, eta=1.0, G=self.bound(1))
        moved = 0.0
        for segment in period:
            moved = moved * law.growth**segment.steps + 2 * self.bound(segment.steps) * weight
        return moved

    def _printed_sigma(self, privacy: PaperNoise, tier: int, steps: int, weight: float) -> float:
        """Return the paper's noise (Proposition 1, Lemma 1); `weight` is a device's largest."""
        counted = self.schedule.steps if privacy.release_steps == ROUND else steps
        return sigma(
            2 * self.bound(counted) * weight,
            q=privacy.sampling_rate,
            n_comp=self.total_steps,
            eps=privacy.epsilon,
            delta=privacy.delta,
            alpha=privacy.alpha_of(tier, self.tree.depth),
        )

    def _without_gap(self) -> tuple[float, float]:
        """Return the budget that is left for the noise beside what the grid takes."""
        most = max(
            sum(len(schedule.periods(tier)) * count for schedule, count in course)
            for tier in self.boundaries
            for course in self._courses(tier)
        )
        gap = GAP * (most + self.evaluations)
        budget = self.privacy.epsilon - gap
        if budget <= 0:
            raise InvalidParameterError(
                "epsilon", self.privacy.epsilon, f"above {gap:g}, which is set aside for the grid"
            )
        return budget, self.privacy.delta * math.exp(-gap)


def _squares(charges: Sequence[Charge]) -> float:
    return sum(charge.count / charge.noise_multiplier**2 for charge in charges)
