"""The rounds of a simulated training: who takes part, which averages, how much noise.

The scheme is that of "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and
Evaluation", Algorithm 1. Everything here is known before any data is looked at: `Rounds` turns a
`M2FDPSettings` into numbers that `flwr_privacy.simulations.research.m2fdp.numpy_simulation` applies
to models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.m2fdp.calibration import multiplier, record_multiplier
from flwr_privacy.m2fdp.options import RELEASE_STEPS
from flwr_privacy.m2fdp.paper_noise import noise_multiplier
from flwr_privacy.m2fdp.schedule import EventSchedule, Segment
from flwr_privacy.m2fdp.sensitivity import Drift, Reach
from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree

__all__ = ["CALIBRATIONS", "STEP_RULES", "Event", "M2FDPSettings", "RoundResult", "Rounds"]

CALIBRATIONS = ("device", "record", "paper", "none")
"""The names of the ways to choose the noise."""

STEP_RULES = ("constant", "inv_sqrt")
"""How the step size goes on from round to round."""

Floats = NDArray[np.float32]
Choice = tuple[int, int, int]
"""Of a round: local steps, and participants under a lowest aggregator: secure and insecure."""


@dataclass(frozen=True, kw_only=True, eq=False)
class M2FDPSettings:
    """One training: a tree, a schedule, and what is noised how.

    The paper's systems are: M2FDP as it is by default, with a tree that
    has secure aggregators; hierarchical averaging without noise ``calibration="none"``; HFL-DP a
    tree in which nobody is trusted; PEDPFL a star; central noise a tree with one secure aggregator.

    Parameters
    ----------
    tree : TierTree
        Who stands under whom, and who is trusted.
    schedule : EventSchedule, default one step without local events
        Local steps K of a round, and when there are events.
    learning_rate : float, default 1.0
        Step size eta.
    step_rule : {"constant", "inv_sqrt"}, default "constant"
        ``inv_sqrt``: in round t, from 1, the step size is ``learning_rate / sqrt(t + 1)``.
    clip : float or None, default 1.0
        G, the largest norm of a batch's gradient. None, without noise only: gradients as they are.
    rate : float, default 0.05
        q: every record is in a batch with this probability.
    calibration : {"device", "record", "paper", "none"}, default "device"
        What the noise is for: see `flwr_privacy.m2fdp.calibration`. ``device`` and ``record`` hold
        (`epsilon`, `delta`) exactly on every path; ``paper`` is the rule of its Proposition 1 with
        the sensitivity of Lemma 1.
    epsilon, delta : float, default 1.0, 1e-5
        The budget of the whole training.
    alpha : float, default 1.0
        The constant in the paper's rule, which the paper does not give.
    drift : Drift, default ``worst``
        How far clean events let models drift apart; of no effect under ``paper``.
    clean_events : bool, optional
        Whether local events are held inside trusted subtrees, as in the paper. Without them, what
        leaves the subtree is as far apart as Lemma 1 says, whatever the loss. By default they are
        where the calibration is ``paper`` or ``none``.
    release_steps : {"round", "segment"}, default "round"
        Under ``paper``, the local steps that a release is charged for: those of the round, or
        those since the last release of the path.
    path : sequence of (int, int, int), optional
        For each round local steps and participants under a lowest aggregator whose ancestor at
        tier 1 is secure, and insecure: a controller's. The training ends with it. By default always
        K and everybody.
    edge_noise : bool, default False
        HFL-DP as its own authors have it: insecure aggregators of tier 1 add noise of their own
        at global events.
    perturb : float, default 0.0
        PEDPFL's regularisation: the weight of the loss at a model with noise as large as that of
        the round's average.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or the tree lacks a tier of an event.
    """

    tree: TierTree
    schedule: EventSchedule = field(default_factory=EventSchedule)
    learning_rate: float = 1.0
    step_rule: str = "constant"
    clip: float | None = 1.0
    rate: float = 0.05
    calibration: str = "device"
    epsilon: float = 1.0
    delta: float = 1e-5
    alpha: float = 1.0
    drift: Drift = field(default_factory=Drift)
    clean_events: bool | None = None
    release_steps: str = "round"
    path: Sequence[Choice] | None = None
    edge_noise: bool = False
    perturb: float = 0.0

    def __post_init__(self) -> None:
        self.schedule.check_depth(self.tree.depth)
        check_number("learning_rate", self.learning_rate, minimum=0)
        check_choice("step_rule", self.step_rule, STEP_RULES)
        check_choice("calibration", self.calibration, CALIBRATIONS)
        check_choice("release_steps", self.release_steps, RELEASE_STEPS)
        if self.clean_events is None:
            object.__setattr__(self, "clean_events", self.calibration in ("paper", "none"))
        for name in ("clean_events", "edge_noise"):
            check_flag(name, getattr(self, name))
        for name in ("epsilon", "delta", "rate", "alpha"):
            if check_number(name, getattr(self, name), minimum=0) == 0:
                raise InvalidParameterError(name, 0, "a number above 0")
        check_number("delta", self.delta, maximum=1 - 1e-9)
        check_number("rate", self.rate, maximum=1)
        check_number("perturb", self.perturb, minimum=0)
        if self.clip is not None:
            check_number("clip", self.clip, minimum=0)
        elif self.calibration != "none":
            raise InvalidParameterError("clip", None, "a number, as there is noise")
        if self.edge_noise and self.calibration != "paper":
            allowed = "false: only calibration = 'paper' has such noise"
            raise InvalidParameterError("edge_noise", True, allowed)
        if self.path is not None:
            if self.calibration == "record":
                allowed = "none: calibration = 'record' takes rounds that are alike"
                raise InvalidParameterError("path", self.path, allowed)
            for choice in self.path:
                for number in choice:
                    check_integer("path", number, minimum=1)

    def plan(self, rounds: int) -> list[Choice]:
        """Return the choices of all rounds, at most so many."""
        if self.path is not None:
            return list(self.path[:rounds])
        everybody = len(self.tree.devices)
        return [(self.schedule.steps, everybody, everybody)] * rounds

    def step_size(self, t: int) -> float:
        """Return the step size of round t, from 1."""
        falling = self.step_rule == "inv_sqrt"
        return self.learning_rate / ((t + 1) ** 0.5 if falling else 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Event:
    """One event of a round.

    Parameters
    ----------
    step : int
        The local step that it follows.
    tier : int
        Up to which tier it goes.
    std : ndarray of float64, shape (n,)
        For each node of that tier the standard deviation of the noise in its average, per value
        and for updates of length 1 a step; what all nodes below it have added.
    active : ndarray of bool, shape (N,)
        The devices that take its result over.
    """

    step: int
    tier: int
    std: NDArray[np.float64]
    active: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundResult:
    """What rounds with the same choice have in common.

    Parameters
    ----------
    events : sequence of Event
        In order; the last one is the global one.
    std : float
        Of the noise in the new global model, per value, for updates of length 1 a step.
    """

    events: Sequence[Event]
    std: float


class Rounds:
    """The rounds of one setting.

    Parameters
    ----------
    setting : M2FDPSettings
        What is trained.
    rounds : int
        For how many rounds; the noise depends on it.
    """

    def __init__(self, setting: M2FDPSettings, rounds: int) -> None:
        self.setting = setting
        self.plan = setting.plan(rounds)
        self._total = sum(steps for steps, _, _ in self.plan)
        self._rounds: dict[Choice, RoundResult] = {}
        self._multipliers: dict[tuple[int, int], float] = {}

    def of(self, choice: Choice) -> RoundResult:
        """Return what a round with this choice does."""
        if choice not in self._rounds:
            self._rounds[choice] = self._round(choice)
        return self._rounds[choice]

    def participants(self, choice: Choice, keys: NDArray[np.float64]) -> Floats:
        """Return by device how much more it weighs than if all took part; 0 for who does not.

        Parameters
        ----------
        choice : tuple of int
            Of the round.
        keys : ndarray of float64, shape (N,)
            Numbers of which the least take part under each lowest aggregator.
        """
        scale = np.zeros(len(keys), dtype=np.float32)
        for start, stop, limits in self._lowest:
            number = min(choice[limits], stop - start)
            least = np.argsort(keys[start:stop], kind="stable")[:number]
            scale[start + least] = (stop - start) / number
        return scale

    def counts(self, choice: Choice) -> list[int]:
        """Return the participants under each lowest aggregator."""
        return [min(choice[limits], stop - start) for start, stop, limits in self._lowest]

    @cached_property
    def weights(self) -> list[Floats]:
        """By tier of an event, the devices' weights in the averages of its nodes: (n, N)."""
        tree = self.setting.tree
        tables = []
        for nodes in tree.tiers[:-1]:
            table = np.zeros((len(nodes), len(tree.devices)), dtype=np.float32)
            for row, node in enumerate(nodes):
                start, stop = tree.span(node)
                table[row, start:stop] = [tree.weight(leaf, node) for leaf in tree.leaves(node)]
            tables.append(table)
        return tables

    @cached_property
    def node_of(self) -> list[NDArray[np.int64]]:
        """By tier of an event, the index of each device's ancestor there: (N,)."""
        return [np.argmax(table > 0, axis=0) for table in self.weights]

    @cached_property
    def _lowest(self) -> list[tuple[int, int, int]]:
        """For each lowest aggregator its devices, and which entry of a choice is for it."""
        tree = self.setting.tree
        found = []
        for node in tree.tiers[-2]:
            secure = tree.depth > 1 and tree.secure(tree.ancestor(node, 1))
            found.append((*tree.span(node), 1 if secure else 2))
        return found

    def _round(self, choice: Choice) -> RoundResult:
        setting, tree = self.setting, self.setting.tree
        schedule = setting.schedule.with_steps(choice[0])
        taking = dict(zip(tree.tiers[-2], self.counts(choice), strict=True))
        events, variance = [], 0.0
        for segment in schedule.segments():
            nodes = tree.tiers[segment.tier]
            squares = np.zeros(len(nodes))
            for row, node in enumerate(nodes):
                squares[row] = self._variance(node, segment, schedule, taking)
                share = self._weight(node, CLOUD, taking)
                variance += share**2 * squares[row]
            held = [setting.clean_events or not tree.secure(node) for node in nodes]
            active = np.array(held)[self.node_of[segment.tier]]
            events.append(
                Event(
                    step=segment.start + segment.steps,
                    tier=segment.tier,
                    std=np.sqrt(squares),
                    active=active,
                )
            )
        return RoundResult(events=events, std=float(np.sqrt(variance)))

    def _variance(
        self, node: str, segment: Segment, schedule: EventSchedule, taking: dict[str, int]
    ) -> float:
        """Return the variance in a node's average at the event that ends a segment."""
        setting, tree, total = self.setting, self.setting.tree, 0.0
        if setting.calibration == "none" or tree.secure(node):
            return total
        depth = tree.depth
        for injector in tree.injectors(segment.tier):
            tier = tree.tier(injector)
            if tree.ancestor(injector, segment.tier) != node:
                continue
            period = next(p for p in schedule.periods(tier) if p[-1].index == segment.index)
            share = self._weight(injector, node, taking)
            squares = (share * self._sigma(injector, period, schedule, taking)) ** 2
            if tier == depth:  # of the devices some take part
                parent = tree.parent(injector)
                squares *= taking[parent] / len(tree.children(parent))
            total += squares
        if setting.edge_noise and segment.tier == 0 and depth > 1:
            for edge in (one for one in tree.tiers[1] if not tree.secure(one)):
                reach = self._lemma(edge, schedule.steps, taking)
                total += (self._weight(edge, CLOUD, taking) * self._paper() * reach) ** 2
        return total

    def _sigma(
        self,
        injector: str,
        period: Sequence[Segment],
        schedule: EventSchedule,
        taking: dict[str, int],
    ) -> float:
        """Return the noise of a release, for updates of length 1 a step."""
        setting = self.setting
        steps = sum(segment.steps for segment in period)
        if setting.calibration == "paper":
            charged = schedule.steps if setting.release_steps == "round" else steps
            return self._paper() * self._lemma(injector, charged, taking)
        reach = self._lemma(injector, steps, taking)
        if setting.clean_events and len(period) > 1:
            reach = self._drifted(injector, period, taking)
        tier = setting.tree.tier(injector)
        return self._multiplier(tier, steps, schedule) * reach

    def _paper(self) -> float:
        one = self.setting
        return noise_multiplier(
            q=one.rate, n_comp=self._total, eps=one.epsilon, delta=one.delta, alpha=one.alpha
        )

    def _multiplier(self, tier: int, steps: int, schedule: EventSchedule) -> float:
        """Return the noise multiplier of a release that covers so many steps."""
        one = self.setting
        key = (steps, 0 if one.calibration == "device" else tier)
        if key not in self._multipliers:
            if one.calibration == "device":
                z = multiplier(
                    epsilon=one.epsilon, delta=one.delta, steps=steps, total_steps=self._total
                )
            else:
                periods = schedule.periods(tier)
                z = record_multiplier(
                    epsilon=one.epsilon,
                    delta=one.delta,
                    rate=one.rate,
                    periods=[sum(segment.steps for segment in period) for period in periods],
                    rounds=len(self.plan),
                )
            self._multipliers[key] = z
        return self._multipliers[key]

    def _lemma(self, injector: str, steps: int, taking: dict[str, int]) -> float:
        """Return Lemma 1: own steps alone, times the largest weight of a device."""
        leaves = self.setting.tree.leaves(injector)
        return 2 * steps * max(self._weight(leaf, injector, taking) for leaf in leaves)

    def _drifted(self, injector: str, period: Sequence[Segment], taking: dict[str, int]) -> float:
        """Return the sensitivity with clean events before the release."""
        tree, drift = self.setting.tree, self.setting.drift
        depth = tree.depth
        leaves = {leaf: Reach(anchor=depth) for leaf in tree.leaves(injector)}

        def mean(node: str) -> Reach:
            children = tree.children(node)
            if tree.tier(node) == depth - 1:
                children = children[: taking[node]]  # whoever takes part, all are alike
            own = [leaves[c] if tree.tier(c) == depth else mean(c) for c in children]
            share = 1 / len(own)
            return drift.averaged([(reach, share) for reach in own], tier=tree.tier(node))

        for segment in period:
            steps = segment.steps
            for leaf, reach in leaves.items():
                leaves[leaf] = drift.trained(reach, bound=float(steps), steps=steps)
            if segment is not period[-1]:
                for node in {tree.ancestor(leaf, segment.tier): None for leaf in leaves}:
                    result = drift.broadcast(mean(node), tier=segment.tier)
                    leaves |= dict.fromkeys(tree.leaves(node), result)
        return mean(injector).total

    def _weight(self, node: str, under: str, taking: dict[str, int]) -> float:
        """Return the weight of a node in an average; of a device, if it takes part."""
        tree = self.setting.tree
        weight = tree.weight(node, under)
        if node != under and tree.tier(node) == tree.depth:
            parent = tree.parent(node)
            weight *= len(tree.children(parent)) / taking[parent]
        return weight
