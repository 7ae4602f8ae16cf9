"""What the server settles before a round: who is asked when, and with which noise.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
sections III and IV; what is ours is said where it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from flwr_privacy.accounting import Charge, fitting, spent
from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_number,
)
from flwr_privacy.grid import Grid
from flwr_privacy.noise import discretisation_gap

from .noise import sigma
from .privacy import (
    CALIBRATIONS,
    RELEASE_STEPS,
    largest_weights,
    multiplier,
    record_multiplier,
)
from .schedule import EventSchedule, Segment
from .sensitivity import DRIFTS, Drift, sensitivity_worst_case
from .terms import VALUE_RANGE, any_batch
from .tree import TierTree
from .zone import GAP, NOISE_REACH

__all__ = ["Asked", "Exchange", "Release", "RoundPlan", "Wish", "boundary_tier", "exchanges"]

CONSTANT, INV_SQRT = "constant", "inv_sqrt"
ROUND = "round"

_MOST_ROOM = 64.0  # for noise, over that of a zone in which everybody takes part
_ROUNDING = 1 + 1e-6  # what a sum of charges, one by one, may come to beyond all at once


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user wants of a training, checked.

    Parameters
    ----------
    epsilon, delta : float
        Budget of a device.
    calibration : {"device", "record", "paper", "none"}
        How the noise follows from it.
    drift : {"worst", "smooth", "lemma"}
        How models of one zone drift apart after a clean event.
    smoothness : float, optional
        Smoothness of the losses times the step size of the training, for ``smooth``.
    convex : bool
        Whether the losses are convex and smooth, which ``lemma`` takes for granted.
    clean_events : bool
        Whether secure subtrees average inside at local events.
    clipping_norm : float, optional
        Largest L2 norm of the update of one local step (``eta G``); None only without noise.
    step_rule : {"constant", "inv_sqrt"}
        How step and clipping go on from round to round.
    sampling_rate : float, optional
        Share of a device's records in a batch.
    alpha : float or sequence of float, optional
        The constants of the paper's noise, one for all tiers or one for each.
    release_steps : {"segment", "round"}
        Whose steps the paper's sensitivity counts.
    keep_back : sequence of str
        Arrays that are not sent.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or one is missing.
    """

    epsilon: float
    delta: float
    calibration: str
    drift: str
    smoothness: float | None
    convex: bool
    clean_events: bool
    clipping_norm: float | None
    step_rule: str
    sampling_rate: float | None
    alpha: float | Sequence[float] | None
    release_steps: str
    keep_back: Sequence[str]

    def __post_init__(self) -> None:
        if check_number("epsilon", self.epsilon) <= 0:
            raise InvalidParameterError("epsilon", self.epsilon, "a number above 0")
        check_delta(self.delta)
        check_choice("calibration", self.calibration, CALIBRATIONS)
        check_choice("drift", self.drift, DRIFTS)
        check_flag("convex", self.convex)
        check_flag("clean_events", self.clean_events)
        check_choice("step_rule", self.step_rule, (CONSTANT, INV_SQRT))
        check_choice("release_steps", self.release_steps, RELEASE_STEPS)
        paper, record = self.calibration == "paper", self.calibration == "record"
        if self.clipping_norm is None:
            if self.noised:
                raise InvalidParameterError("clipping_norm", None, "a number where there is noise")
        elif check_number("clipping_norm", self.clipping_norm) <= 0:
            raise InvalidParameterError("clipping_norm", self.clipping_norm, "a number above 0")
        if (paper or record) != (self.sampling_rate is not None):
            wanted = "the share of the records in a batch" if paper or record else "nothing"
            allowed = f"{wanted} with calibration '{self.calibration}'"
            raise InvalidParameterError("sampling_rate", self.sampling_rate, allowed)
        if (
            self.sampling_rate is not None
            and not 0 < check_number("sampling_rate", self.sampling_rate) <= 1
        ):
            raise InvalidParameterError("sampling_rate", self.sampling_rate, "above 0, at most 1")
        if paper != (self.alpha is not None):
            wanted = "the constant of the noise, which the paper does not give" if paper else "None"
            allowed = f"{wanted} with calibration '{self.calibration}'"
            raise InvalidParameterError("alpha", self.alpha, allowed)
        if record and self.clean_events:
            raise InvalidParameterError(
                "clean_events", True, "false with calibration 'record', which counts batches"
            )
        if paper or not self.noised or not self.clean_events:
            return
        if self.drift == "smooth" and self.smoothness is None:
            allowed = "'worst', or the smoothness of the losses times the step as `smoothness`"
            raise InvalidParameterError("drift", self.drift, allowed)
        if self.drift == "lemma" and not self.convex:
            allowed = "'worst', or losses that are declared convex and smooth (`convex`)"
            raise InvalidParameterError("drift", self.drift, allowed)

    @property
    def noised(self) -> bool:
        """Whether there is noise at all."""
        return self.calibration != "none"

    @property
    def unit(self) -> str:
        """What is protected."""
        return "record" if self.calibration == "record" else "user"

    @property
    def law(self) -> Drift:
        """How models drift apart: what the noise is for, and what is charged."""
        if self.calibration == "paper":
            return Drift()  # the noise is for the Lemma; what it costs is not
        if self.drift == "smooth":
            return Drift(law="smooth", growth=1 + (self.smoothness or 0.0))
        return Drift(law=self.drift)

    def scale(self, server_round: int) -> float:
        """Return the factor of step and clipping in a round."""
        return 1.0 if self.step_rule == CONSTANT else 1 / math.sqrt(server_round + 1)

    def alpha_of(self, tier: int, depth: int) -> float:
        """Return the constant of a tier's noise.

        Raises
        ------
        InvalidParameterError
            If it is missing or not above 0.
        """
        alpha = self.alpha
        if isinstance(alpha, Sequence):
            if len(alpha) != depth:
                raise InvalidParameterError("alpha", alpha, f"a number, or {depth}, one per tier")
            alpha = alpha[tier - 1]
        if check_number("alpha", alpha) <= 0:
            raise InvalidParameterError("alpha", alpha, "above 0")
        return float(alpha or 0)


@dataclass(frozen=True)
class Asked:
    """What the devices of one lowest aggregator are asked in an exchange.

    Parameters
    ----------
    steps : int
        Local steps.
    period : int
        Number of the exchange that began the period: the release is known by it.
    end : int
        Number of the exchange that ends it.
    """

    steps: int
    period: int
    end: int


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round: questions to devices, then an event.

    Parameters
    ----------
    index : int
        Number of the exchange in its round, from 0.
    tier : int
        Tier up to which the event goes.
    leaves : dict
        What the devices of each lowest aggregator are asked; those of the others are not.
    """

    index: int
    tier: int
    leaves: Mapping[str, Asked]

    def ends(self, leaf: str) -> bool:
        """Tell whether the event ends the period of a lowest aggregator's devices."""
        return self.leaves[leaf].end == self.index


def exchanges(
    tree: TierTree, schedule: EventSchedule, *, clean_events: bool
) -> tuple[Exchange, ...]:
    """Return the exchanges of a round, one for each segment of the schedule.

    Without clean events a secure subtree is asked once per period, with all steps of it: nothing
    would happen between its segments.

    Examples
    --------
    >>> tree = TierTree.of_fanouts((2, 3), p=0.5)
    >>> schedule = EventSchedule(steps=20, events={1: 10})
    >>> for exchange in exchanges(tree, schedule, clean_events=False):
    ...     print(exchange.tier, {leaf: asked.steps for leaf, asked in exchange.leaves.items()})
    1 {'t1-1': 10}
    0 {'t1-0': 20, 't1-1': 10}
    """
    schedule.check_depth(tree.depth)
    segments = schedule.segments()
    periods = {b: schedule.periods(b) for b in range(1, tree.depth + 1)}
    asked: list[dict[str, Asked]] = [{} for _ in segments]
    for leaf in tree.tiers[tree.depth - 1]:
        for period in periods[boundary_tier(tree, leaf)]:
            first, last = period[0].index, period[-1].index
            if clean_events:
                for segment in period:
                    asked[segment.index][leaf] = Asked(segment.steps, first, last)
            else:
                asked[last][leaf] = Asked(_steps(period), last, last)
    return tuple(
        Exchange(segment.index, segment.tier, asked[segment.index]) for segment in segments
    )


def boundary_tier(tree: TierTree, leaf: str) -> int:
    """Return the tier at which the noise of a lowest aggregator's devices enters."""
    return tree.tier(tree.boundary(tree.children(leaf)[0]))


@dataclass(frozen=True, kw_only=True)
class Release:
    """A noised release of a round, as it is planned.

    Parameters
    ----------
    steps : int
        Local steps that it is about.
    multiplier : float
        Noise over sensitivity; 0 without noise.
    sampling : float
        Probability that a record is in any of their batches; 1 counts none.
    sensitivity : float
        L2 sensitivity when everybody takes part, without rounding.
    grid : Grid
        The finest grid that holds the codes and the noise of all releases of a round at this tier.
    """

    steps: int
    multiplier: float
    sampling: float
    sensitivity: float
    grid: Grid

    def charge(self) -> Charge | None:
        """Return what it costs a device; None without noise."""
        if self.multiplier == 0:
            return None
        return Charge(noise_multiplier=self.multiplier, sampling=self.sampling, gap=GAP)


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """A round with its noise.

    Parameters
    ----------
    tree : TierTree
        Who there is.
    schedule : EventSchedule
        Local steps and events of the round.
    wish : Wish
        What the user wants.
    server_round : int
        Number of the round.
    total_steps : int
        Local steps of the whole training.
    rounds : int
        Most rounds of the training.
    min_children : int, default 1
        Fewest children that a trusted aggregator averages.
    """

    tree: TierTree = field(repr=False)
    schedule: EventSchedule
    wish: Wish
    server_round: int
    total_steps: int
    rounds: int
    min_children: int = 1

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of the round."""
        return exchanges(self.tree, self.schedule, clean_events=self.wish.clean_events)

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The tiers at which noise enters."""
        leaves = self.tree.tiers[self.tree.depth - 1]
        return tuple(sorted({boundary_tier(self.tree, leaf) for leaf in leaves}))

    @property
    def scale(self) -> float:
        """Factor of step and clipping in this round."""
        return self.wish.scale(self.server_round)

    def bound(self, steps: int) -> float:
        """Return the largest norm of an update of so many steps; 0 where nothing is clipped."""
        return (self.wish.clipping_norm or 0.0) * self.scale * steps

    def release(self, boundary: int, end: int) -> Release:
        """Return the release of nodes at a tier that an exchange ends."""
        return self._releases[boundary, end]

    def release_of(self, leaf: str, exchange: Exchange) -> Release:
        """Return the release that the answers of a lowest aggregator's devices go into."""
        return self.release(boundary_tier(self.tree, leaf), exchange.leaves[leaf].end)

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """The grid of the devices of each lowest aggregator."""
        last = self.exchanges[-1]
        return {leaf: self.release_of(leaf, last).grid for leaf in last.leaves}

    def epsilon(self, boundary: int) -> float:
        """Return the budget of the devices whose noise enters at a tier: in paper mode the truth.

        The paper's noise does not keep the budget that it is named after; what it costs by the
        sensitivity that holds is known beforehand, and is the budget of the devices then.
        """
        if self.wish.calibration != "paper":
            return self.wish.epsilon
        return self._true[boundary]

    def check(self, size: int) -> None:
        """Refuse noise that its grid does not do justice to, before anybody is asked.

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
                    self.wish.clipping_norm,
                    f"more noise at tier {boundary}: it would be {steps:.3g} steps of the grid",
                )

    @cached_property
    def _true(self) -> dict[int, float]:
        true = {}
        for boundary in self.boundaries:
            single = [r.charge() for (tier, _), r in self._releases.items() if tier == boundary]
            charges = [replace(charge, count=self.rounds) for charge in single if charge]
            cost = spent(charges, delta=self.wish.delta, accountant=fitting(charges))
            true[boundary] = cost * _ROUNDING
        return true

    @cached_property
    def _releases(self) -> dict[tuple[int, int], Release]:
        releases = {}
        for boundary in self.boundaries:
            periods = self.schedule.periods(boundary)
            planned = [self._release(boundary, period) for period in periods]
            # One grid for all periods of a round: the coarsest.
            grid = Grid(max(release.grid.exponent for release in planned))
            for period, release in zip(periods, planned, strict=True):
                releases[boundary, period[-1].index] = replace(release, grid=grid)
        return releases

    def _release(self, boundary: int, period: Sequence[Segment]) -> Release:
        steps = _steps(period)
        sensitivity = self._sensitivity(boundary, period)
        multiplier = self._multiplier(boundary, period, sensitivity)
        grid = Grid.holding(VALUE_RANGE * len(self.exchanges))
        if self.wish.clipping_norm is not None:
            # With room for the noise of zones in which few take part. What is beyond saturates,
            # and more room would leave the noise of large zones few steps of the grid.
            worst = min(2 * self.bound(steps), sensitivity * self._thinning(boundary))
            grid = Grid.holding(self.bound(steps) + NOISE_REACH * multiplier * worst)
        record = self.wish.calibration == "record"
        rate = self.wish.sampling_rate or 1.0
        return Release(
            steps=steps,
            multiplier=multiplier,
            sampling=any_batch(rate, steps) if record else 1.0,
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
        wish, steps = self.wish, _steps(period)
        if wish.calibration == "none":
            return 0.0
        if wish.calibration == "paper":
            return self._printed_sigma(boundary, steps) / sensitivity
        budget, delta = self._without_gap()
        if wish.calibration == "record":
            return record_multiplier(
                epsilon=budget,
                delta=delta,
                rate=wish.sampling_rate or 1.0,
                periods=[_steps(other) for other in self.schedule.periods(boundary)],
                rounds=self.rounds,
            )
        return multiplier(epsilon=budget, delta=delta, steps=steps, total_steps=self.total_steps)

    def _sensitivity(self, boundary: int, period: Sequence[Segment]) -> float:
        """Return the sensitivity of a release by the law of drift, when everybody takes part."""
        law, weights = self.wish.law, largest_weights(self.tree, boundary)
        weight = weights[self.tree.depth]
        if not self.wish.clean_events or law.law == "lemma":
            return 2 * self.bound(_steps(period)) * weight
        if law.law == "worst":
            parts = [(segment.steps, segment.tier) for segment in period]
            return sensitivity_worst_case(parts, weights=weights, eta=1.0, G=self.bound(1))
        moved = 0.0
        for segment in period:
            moved = moved * law.growth**segment.steps + 2 * self.bound(segment.steps) * weight
        return moved

    def _printed_sigma(self, boundary: int, steps: int) -> float:
        """Return the paper's noise (Proposition 1, Lemma 1)."""
        wish, depth = self.wish, self.tree.depth
        counted = self.schedule.steps if wish.release_steps == ROUND else steps
        weight = largest_weights(self.tree, boundary)[depth]
        return sigma(
            2 * self.bound(counted) * weight,
            q=wish.sampling_rate or 1.0,
            n_comp=self.total_steps,
            eps=wish.epsilon,
            delta=wish.delta,
            alpha=wish.alpha_of(boundary, depth),
        )

    def _without_gap(self) -> tuple[float, float]:
        """Return the budget that is left for the noise beside what the grid takes."""
        most = max(len(self.schedule.periods(tier)) for tier in self.boundaries)
        gap = GAP * most * self.rounds
        budget = self.wish.epsilon - gap
        if budget <= 0:
            raise InvalidParameterError("epsilon", self.wish.epsilon, f"above {gap:g}")
        return budget, self.wish.delta * math.exp(-gap)


def _steps(period: Sequence[Segment]) -> int:
    return sum(segment.steps for segment in period)
