"""Sets the number of local steps per round over tiers, by a plan or a controller."""

from collections.abc import Sequence
from dataclasses import fields

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp import (
    AdaptiveControl,
    AdaptiveController,
    Decision,
    EventSchedule,
    ResourceModel,
    RoundPlan,
    TierPrivacy,
    TierTree,
)

__all__ = ["TierSchedule"]


class TierSchedule:
    """The rounds of one training: their local steps, and the steps that remain.

    Parameters
    ----------
    tree : TierTree
        Who there is.
    schedule : EventSchedule
        Local steps and events of a round; under control its periods.
    privacy : TierPrivacy
        What is protected, with which noise.
    step_rule : str
        How step and clipping go on from round to round.
    keep_back : sequence of str
        Arrays that are not sent.
    control : AdaptiveControl, optional
        What the controller is to do.
    parameters : int
        Entries of what is uploaded.
    min_children : int
        Fewest devices under a trusted aggregator.
    resources : ResourceModel
        What steps and uploads cost.
    rounds : int
        Most rounds.

    Raises
    ------
    InvalidParameterError
        If the parameters of the controller are not allowed.
    """

    def __init__(
        self,
        tree: TierTree,
        schedule: EventSchedule,
        privacy: TierPrivacy,
        *,
        step_rule: str,
        keep_back: Sequence[str],
        control: AdaptiveControl | None,
        parameters: int,
        min_children: int,
        resources: ResourceModel,
        rounds: int,
    ) -> None:
        self._tree = tree
        self._schedule = schedule
        self._privacy = privacy
        self._step_rule = step_rule
        self._keep_back = keep_back
        self._rounds = rounds
        self._least = min_children
        self._controller: AdaptiveController | None = None
        self.total_steps = schedule.steps * rounds
        if control is not None:
            self._controller = AdaptiveController.of(
                tree,
                parameters=parameters,
                events=schedule,
                resources=resources,
                min_children=min_children,
                epsilon=privacy.epsilon,
                delta=privacy.delta,
                sampling_rate=privacy.rate,
                alphas=[privacy.alpha_of(tier, tree.depth) for tier in range(1, tree.depth + 1)],
                **{field.name: getattr(control, field.name) for field in fields(control)},
            )
            self.total_steps = self._controller.total_steps
        self.steps_left = self.total_steps
        self.decision: Decision | None = None

    @property
    def ended(self) -> str:
        """Why the training ends: a controller's steps are used up; "" before."""
        if self._controller is None or self.steps_left:
            return ""
        return f"the {self.total_steps} local steps are used up"

    def plan(self, server_round: int) -> RoundPlan:
        """Return the plan of the next round."""
        schedule = self._schedule
        if self._controller is not None and self.steps_left:
            self.decision = self._controller.decide(self.steps_left)
            schedule = schedule.with_steps(self.decision.steps)
        return RoundPlan(
            tree=self._tree,
            schedule=schedule,
            privacy=self._privacy,
            step_rule=self._step_rule,
            keep_back=self._keep_back,
            server_round=server_round,
            total_steps=self.total_steps,
            rounds=self._rounds,
            min_children=self._least,
        )

    def take(self, plan: RoundPlan) -> None:
        """Subtract the steps of a round from those that remain."""
        if self._controller is not None:
            self.steps_left -= plan.schedule.steps

    def resume(self, *, total_steps: int, steps_left: int) -> None:
        """Resume a training.

        Raises
        ------
        InvalidParameterError
            If it is to be of another length: the noise so far was for the one that was planned.
        """
        if total_steps != self.total_steps and self._privacy.noised:
            raise InvalidParameterError(
                "num_rounds",
                self._rounds,
                f"rounds of {total_steps} local steps in all, as before, not {self.total_steps}: "
                "the noise so far was for that many",
            )
        self.steps_left = steps_left
