"""The controller of M2FDP: weighs local steps and participation of a round against their noise.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
its problem (P). The paper searches line by line; here every point is tried, which is exact and
takes less than a millisecond. Energies, rates, the shape of the tree, the budget of steps and the
privacy parameters are public, and nothing else is looked at, so that a decision tells nothing about
anybody's data.

The noise term is nu of the paper's Theorem 1 (`gap`), which is a cost and no bound. The paper's
controller also sets a step size (`flwr_privacy.simulations.research.m2fdp.theory.step_size`), which
is too small to train with.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.tree.counts import TierCounts
from flwr_privacy.m2fdp.tree.tree import TierTree

from .gap import GapCoefficients
from .resources import ResourceModel, checked_events

__all__ = ["NU_VARIANTS", "AdaptiveController", "Decision"]

NU_VARIANTS = ("printed", "dedup")
"""The noise term as printed, or with what it counts twice counted once."""

_TINY = 1e-300  # the least positive number that is allowed
_TIE = 1e-12  # relative difference of two objectives that rounding may make


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision for a round, and its cost.

    Parameters
    ----------
    steps : int
        Local steps, K.
    secure, insecure : int
        Devices that take part under each lowest aggregator below a secure node of tier 1, and
        below an insecure one; an aggregator with fewer takes all of its own.
    energy : float
        Joules of this round.
    delay : float
        Seconds of this round.
    nu : float
        The noise term of the objective, without a weight.
    """

    steps: int
    secure: int
    insecure: int
    energy: float
    delay: float
    nu: float


@dataclass(frozen=True, kw_only=True)
class AdaptiveController:
    """Choose the local steps K and the participation of the next round.

    Minimises ``a1 E + a2 D + a3 nu`` over K and over the number of devices under each lowest
    aggregator below a secure node of tier 1 (s_sec) and below an insecure one (s_ins). With tau
    steps left, E and D are the joules and seconds of tau / K rounds like the next one, and nu is
    the noise term of the paper's Theorem 1 at K, s_sec and s_ins. Every point is tried. Of points
    that are equally good the one with more devices counts, and of those the one with fewer steps.

    Parameters
    ----------
    counts : TierCounts
        The tree: at least one tier of aggregators.
    ratios, ratios_min : sequence of float
        Largest and smallest share of secure nodes among the children of an insecure one, for tier
        1 to L-1. `ratios_min` is `ratios` by default.
    parameters : int
        Parameters of the model, M.
    total_steps : int
        Local steps of the whole run, tau. Every run of decisions adds up to it.
    max_steps : int
        Most local steps of a round, K^max.
    weights : (float, float, float), default (1, 1, 1)
        Of energy, delay and noise; not negative, not all 0.
    normalise : bool, default True
        Divide each of the three by its value at `max_steps` steps and full participation, so that
        the weights compare. Without, joules and seconds of the order of a thousand stand beside a
        noise term of 1e5 to 1e9: the paper does not say which weights it used.
    nu : {"dedup", "printed"}, default "dedup"
        The noise term as printed counts some parts twice; ``dedup`` counts them once.
    active_tiers : "scheduled", "all" or sequence of int, default "scheduled"
        Which tiers the noise term sums over. ``all``, as printed, has noise of local events that
        the schedule does not have. ``scheduled``: tier 1, for the global event, and the tier below
        each one with local events.
    events : EventSchedule or mapping from int to int, default {}
        The local events of a round. Of a schedule, a round of K steps has those before step K:
        with a period, ``(K - 1) // period``. A mapping has the number of events by tier, from 1 to
        L-1, whatever K, as the paper's formula has it.
    resources : ResourceModel
        Energies and rates, by default the paper's.
    min_children : int, default 1
        Fewest devices under one aggregator; an aggregator with fewer takes all of its own.
    initial_steps : int, optional
        The first decision of a run: so many steps and everybody. None: it is like the others. The
        paper starts with 5.
    alphas : float or sequence of float, default 1.0
        Constants of the noise rule, one for all tiers or one for each of tier 1 to L. Not the
        weights.
    sampling_rate, epsilon, delta : float, defaults 1.0, 1.0 and 1e-5
        Of the noise rule. They scale the noise term as a whole, and so have no influence when it
        is normalised.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> controller = AdaptiveController(
    ...     counts=TierCounts.of_fanouts((10, 5), secure=5),
    ...     ratios=(0.5,),
    ...     parameters=7840,
    ...     total_steps=50,
    ...     max_steps=20,
    ...     events=EventSchedule(events={1: 5}),
    ... )
    >>> left, path = 50, []
    >>> while left:
    ...     decision = controller.decide(left)
    ...     path.append((decision.steps, decision.secure, decision.insecure))
    ...     left -= decision.steps
    >>> path
    [(8, 1, 1), (8, 1, 1), (8, 1, 1), (8, 1, 1), (8, 1, 1), (8, 1, 1), (2, 1, 1)]
    """

    counts: TierCounts
    ratios: Sequence[float]
    ratios_min: Sequence[float] | None = None
    parameters: int
    total_steps: int
    max_steps: int
    weights: Sequence[float] = (1.0, 1.0, 1.0)
    normalise: bool = True
    nu: str = "dedup"
    active_tiers: str | Sequence[int] = "scheduled"
    events: EventSchedule | Mapping[int, int] = field(default_factory=dict)
    resources: ResourceModel = field(default_factory=ResourceModel)
    min_children: int = 1
    initial_steps: int | None = None
    alphas: float | Sequence[float] = 1.0
    sampling_rate: float = 1.0
    epsilon: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not isinstance(self.counts, TierCounts) or self.counts.depth < 2:
            allowed = "the counts of a tree with at least one tier of aggregators"
            raise InvalidParameterError("counts", self.counts, allowed)
        if not isinstance(self.resources, ResourceModel):
            raise InvalidParameterError("resources", self.resources, "a ResourceModel")
        for name in ("parameters", "total_steps", "max_steps", "min_children"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.initial_steps is not None:
            check_integer("initial_steps", self.initial_steps, minimum=1, maximum=self.max_steps)
        check_flag("normalise", self.normalise)
        check_choice("nu", self.nu, NU_VARIANTS)
        check_number("sampling_rate", self.sampling_rate, minimum=_TINY, maximum=1)
        check_number("epsilon", self.epsilon, minimum=_TINY)
        check_number("delta", self.delta, minimum=_TINY, maximum=1 - 1e-9)
        self._check_tiers()
        weights = _numbers("weights", self.weights, 3)
        if not any(weights):
            raise InvalidParameterError("weights", self.weights, "at least one above 0")
        object.__setattr__(self, "weights", weights)

    def _check_tiers(self) -> None:
        """Check the parameters that have one value per tier."""
        depth = self.counts.depth
        for name in ("ratios", "ratios_min"):
            values = getattr(self, name)
            if values is None:  # of ratios_min only
                values = self.ratios
            object.__setattr__(self, name, _numbers(name, values, depth - 1, maximum=1))
        for low, high in zip(self.ratios_min or (), self.ratios, strict=True):
            if low > high:
                raise InvalidParameterError("ratios_min", low, f"at most the largest, {high}")
        if isinstance(self.alphas, Sequence):
            object.__setattr__(self, "alphas", _numbers("alphas", self.alphas, depth))
        else:
            check_number("alphas", self.alphas, minimum=0)
        if isinstance(self.events, EventSchedule):
            self.events.check_depth(depth)
        else:
            object.__setattr__(self, "events", checked_events(self.events, depth))
        if isinstance(self.active_tiers, str):
            check_choice("active_tiers", self.active_tiers, ("all", "scheduled"))
            return
        tiers = tuple(sorted(set(self.active_tiers)))
        for tier in tiers:
            check_integer("active_tiers", tier, minimum=1, maximum=depth)
        object.__setattr__(self, "active_tiers", tiers)

    @classmethod
    def of(cls, tree: TierTree, **parameters: Any) -> "AdaptiveController":
        """Return the controller of a tree, with its labels after the closure.

        Parameters
        ----------
        tree : TierTree
            The tree, which gives `counts`, `ratios` and `ratios_min`.
        **parameters
            All other parameters of the class.

        Raises
        ------
        InvalidParameterError
            If a value is not allowed.
        """
        shape: dict[str, Any] = {"counts": TierCounts.of(tree)}
        shape |= {"ratios": tree.ratios(), "ratios_min": tree.ratios_min()}
        return cls(**shape, **parameters)

    def decide(self, steps_left: int) -> Decision:
        """Return the decision for the next round.

        Parameters
        ----------
        steps_left : int
            What is left of `total_steps`, at least 1. A round never takes more.

        Raises
        ------
        InvalidParameterError
            If `steps_left` is not from 1 to `total_steps`.
        """
        check_integer("steps_left", steps_left, minimum=1, maximum=self.total_steps)
        tables = self._tables
        if self.initial_steps is not None and steps_left == self.total_steps:
            point = (0, 0, min(self.initial_steps, steps_left) - 1)
        else:
            values = self._objective(steps_left)
            # The first of the best points is the one that wins a tie: see the order of the axes.
            best = values <= values.min() * (1 + _TIE)
            index = np.unravel_index(int(np.argmax(best)), values.shape)
            point = (int(index[0]), int(index[1]), int(index[2]))
        secure, insecure, steps = point
        return Decision(
            steps=steps + 1,
            secure=int(tables.secure[secure]),
            insecure=int(tables.insecure[insecure]),
            energy=float(tables.energy[point]),
            delay=float(tables.delay[point]),
            nu=float(tables.noise[point]),
        )

    def _objective(self, steps_left: int) -> NDArray[np.float64]:
        """Return the objective of all points with no more steps than there are left."""
        tables = self._tables
        steps = np.arange(1, min(self.max_steps, steps_left) + 1)
        a1, a2, a3 = self.weights
        kept = (..., slice(len(steps)))
        if self.normalise:  # the steps that are left cancel
            rounds = self.max_steps / steps
            energy = tables.energy[kept] * _share(a1, tables.energy[0, 0, -1])
            delay = tables.delay[kept] * _share(a2, tables.delay[0, 0, -1])
            noise = tables.noise[kept] * _share(a3, tables.noise[0, 0, -1])
        else:
            rounds = steps_left / steps
            energy, delay = a1 * tables.energy[kept], a2 * tables.delay[kept]
            noise = a3 * tables.noise[kept]
        objective: NDArray[np.float64] = rounds * (energy + delay) + noise
        return objective

    @cached_property
    def _tables(self) -> "_Tables":
        """Cost of one round and noise at every point."""
        counts = self.counts
        lowest, labels = np.array(counts.lowest), np.array(counts.lowest_secure)
        # Largest first on both axes of participation, fewest steps first: so ties are broken.
        secure, secure_devices = self._participation(lowest[labels])
        insecure, insecure_devices = self._participation(lowest[~labels])
        devices = (secure_devices[:, None] + insecure_devices)[..., None]
        most = np.maximum(
            np.minimum(secure, lowest[labels].max(initial=0))[:, None],
            np.minimum(insecure, lowest[~labels].max(initial=0)),
        )[..., None]
        steps = np.arange(1, self.max_steps + 1)
        work: dict[str, Any] = {"steps": steps, "events": self._events_of(steps)}
        work["parameters"] = self.parameters
        smallest = lowest.min()
        factors = self._factors.total(
            np.minimum(secure, smallest)[:, None].astype(np.float64),
            np.minimum(insecure, smallest).astype(np.float64),
        )
        scale = 8 * counts.depth * self.parameters * self.sampling_rate**2
        scale *= math.log(1 / self.delta) / self.epsilon**2
        return _Tables(
            secure=secure,
            insecure=insecure,
            energy=self.resources.energy(counts, devices=devices, **work),
            delay=self.resources.seconds(counts, devices=devices, most=most, **work),
            noise=scale * factors[..., None] * steps.astype(np.float64) ** 4,
        )

    def _events_of(self, steps: NDArray[Any]) -> dict[int, NDArray[Any]]:
        """Return the number of local events by tier, for rounds of so many steps."""
        if not isinstance(self.events, EventSchedule):
            return {tier: np.full_like(steps, number) for tier, number in self.events.items()}
        longest = self.events.with_steps(self.max_steps)
        # A shorter round has the same events, up to the one before its last step.
        return {tier: np.searchsorted(longest.at(tier), steps) for tier in longest.events}

    def _participation(self, sizes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the choices of s for aggregators of these sizes, and how many devices it makes."""
        largest = int(sizes.max(initial=0))
        if largest == 0:  # there is no such aggregator, and nothing to choose
            largest = int(max(self.counts.lowest))
            return np.array([largest]), np.array([0])
        choices = np.arange(largest, min(self.min_children, largest) - 1, -1)
        return choices, np.minimum(sizes[:, None], choices).sum(axis=0)

    @property
    def _factors(self) -> GapCoefficients:
        """The noise term but for steps and constants."""
        tiers = self.active_tiers
        if tiers == "scheduled":
            numbers = self._events_of(np.array([self.max_steps]))
            tiers = sorted({1} | {tier + 1 for tier, number in numbers.items() if number[0]})
        return GapCoefficients.of(
            [min(tier) for tier in self.counts.children[1:]],
            self.ratios,
            p_min=self.ratios_min,
            alpha=self.alphas,
            dedup=self.nu == "dedup",
            active_tiers=tiers,
        )


@dataclass(frozen=True)
class _Tables:
    """Cost and noise of one round at every point of the search.

    Attributes
    ----------
    secure, insecure : arrays of shape (S,) and (I,)
        The choices of participation, largest first.
    energy, delay, noise : arrays of shape (S, I, K)
        For 1 to K steps.
    """

    secure: NDArray[Any]
    insecure: NDArray[Any]
    energy: NDArray[np.float64]
    delay: NDArray[np.float64]
    noise: NDArray[np.float64]


def _share(weight: float, value: float) -> float:
    """Return a weight over the value that it is normalised by; what is always 0 stays 0."""
    return weight / value if value > 0 else 0.0


def _numbers(
    name: str, values: Any, length: int, *, maximum: float | None = None
) -> tuple[float, ...]:
    """Return `length` numbers of at least 0."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != length:
        raise InvalidParameterError(name, values, f"{length} numbers")
    return tuple(check_number(name, value, minimum=0, maximum=maximum) for value in values)
