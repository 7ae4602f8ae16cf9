"""How long the rounds of a training over tiers are: planned, or chosen by a controller."""

from collections.abc import Mapping
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp import (
    AdaptiveController,
    Decision,
    EventSchedule,
    ResourceModel,
    RoundPlan,
    TierTree,
    Wish,
)

__all__ = ["TierCourse"]


class TierCourse:
    """The rounds of one training: their local steps, and what is left of them.

    Parameters
    ----------
    tree : TierTree
        Who there is.
    schedule : EventSchedule
        Local steps and events of a round; under control its periods.
    wish : Wish
        What the user wants.
    control : mapping, optional
        Parameters of the controller.
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
        wish: Wish,
        *,
        control: Mapping[str, Any] | None,
        parameters: int,
        min_children: int,
        resources: ResourceModel,
        rounds: int,
    ) -> None:
        self._tree = tree
        self._schedule = schedule
        self._wish = wish
        self._rounds = rounds
        self._least = min_children
        self._controller: AdaptiveController | None = None
        self.total_steps = schedule.steps * rounds
        if control is not None:
            given = {
                "parameters": parameters,
                "events": schedule,
                "resources": resources,
                "min_children": min_children,
                "epsilon": wish.epsilon,
                "delta": wish.delta,
                "sampling_rate": wish.sampling_rate or 1.0,
                "alphas": 1.0 if wish.alpha is None else wish.alpha,
            }
            self._controller = _controller(tree, wish, {**given, **control})
            self.total_steps = self._controller.total_steps
        self.steps_left = self.total_steps
        self.decision: Decision | None = None

    @property
    def over(self) -> bool:
        """Whether a controller's steps are used up."""
        return self._controller is not None and self.steps_left == 0

    def plan(self, server_round: int) -> RoundPlan:
        """Return the plan of the next round."""
        schedule = self._schedule
        if self._controller is not None and self.steps_left:
            self.decision = self._controller.decide(self.steps_left)
            schedule = schedule.with_steps(self.decision.steps)
        return RoundPlan(
            tree=self._tree,
            schedule=schedule,
            wish=self._wish,
            server_round=server_round,
            total_steps=self.total_steps,
            rounds=self._rounds,
            min_children=self._least,
        )

    def take(self, plan: RoundPlan) -> None:
        """Take the steps of a round off what is left."""
        if self._controller is not None:
            self.steps_left -= plan.schedule.steps

    def resume(self, *, total_steps: int, steps_left: int) -> None:
        """Go on with a training.

        Raises
        ------
        InvalidParameterError
            If it is to be of another length: the noise so far was for the one that was planned.
        """
        if total_steps != self.total_steps and self._wish.noised:
            raise InvalidParameterError(
                "num_rounds",
                self._rounds,
                f"rounds of {total_steps} local steps in all, as before, not {self.total_steps}: "
                "the noise so far was for that many",
            )
        self.steps_left = steps_left


def _controller(tree: TierTree, wish: Wish, parameters: Mapping[str, Any]) -> AdaptiveController:
    if wish.calibration == "record":
        raise InvalidParameterError(
            "control", dict(parameters), "nothing with calibration 'record', which needs a plan"
        )
    try:
        return AdaptiveController.of(tree, **parameters)
    except TypeError as error:
        raise InvalidParameterError("control", dict(parameters), f"known keys ({error})") from None
