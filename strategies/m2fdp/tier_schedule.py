"""Sets the number of local steps per round over tiers, by a plan or a controller."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from flwr_privacy.m2fdp import (
    AdaptiveControl,
    AdaptiveController,
    Decision,
    M2FDPRoundPlan,
    PaperNoise,
    ResourceModel,
    TierCohorts,
)

__all__ = ["TierSchedule"]


class TierSchedule:
    """The rounds of one training: their local steps, and the steps that remain.

    Parameters
    ----------
    first : M2FDPRoundPlan
        The plan of the first round; its schedule has the periods under control.
    control : AdaptiveControl, optional
        What the controller is to do.
    parameters : int
        Entries of what is uploaded.
    resources : ResourceModel
        What steps and uploads cost.
    cohorts : TierCohorts
        How many devices a round asks, and how often that is one device.

    Raises
    ------
    InvalidParameterError
        If the parameters of the controller are not allowed.
    """

    def __init__(
        self,
        first: M2FDPRoundPlan,
        *,
        control: AdaptiveControl | None,
        parameters: int,
        resources: ResourceModel,
        cohorts: TierCohorts,
    ) -> None:
        self._first = first
        self._cohorts = cohorts
        self._controller: AdaptiveController | None = None
        self.total_steps = first.total_steps
        if control is not None:
            tree, privacy = first.tree, first.privacy
            self._controller = AdaptiveController.of(
                tree,
                parameters=parameters,
                events=first.schedule,
                resources=resources,
                min_children=first.min_children,
                epsilon=privacy.epsilon,
                delta=privacy.delta,
                sampling_rate=privacy.rate,
                alphas=[privacy.alpha_of(tier, tree.depth) for tier in range(1, tree.depth + 1)],
                **control.parameters(printed=isinstance(privacy, PaperNoise)),
            )
            self.total_steps = self._controller.total_steps
            # What a device pays in all is known beforehand: a choice depends on nothing else than
            # the steps that are left.
            rounds = [
                (first.schedule.with_steps(decision.steps), decision)
                for decision in self._decisions(self._controller)
            ]
            schedules = {schedule.steps: schedule for schedule, _ in rounds}
            lengths = Counter(schedule.steps for schedule, _ in rounds)
            self._first = replace(
                first,
                course=tuple((schedules[steps], count) for steps, count in lengths.items()),
                participations=cohorts.participations(rounds),
            )
        self.steps_left = self.total_steps
        self.decision: Decision | None = None

    def _decisions(self, controller: AdaptiveController) -> Iterator[Decision]:
        """Yield the choices of all rounds."""
        left = controller.total_steps
        for _ in range(self._first.rounds):
            if left:
                yield (decision := controller.decide(left))
                left -= decision.steps

    @property
    def ended(self) -> str:
        """Why the training ends: a controller's steps are used up; "" before."""
        if self._controller is None or self.steps_left:
            return ""
        return f"the {self.total_steps} local steps are used up"

    def plan(self, server_round: int) -> M2FDPRoundPlan:
        """Return the plan of the next round."""
        schedule = self._first.schedule
        if self._controller is not None and self.steps_left:
            self.decision = self._controller.decide(self.steps_left)
            schedule = schedule.with_steps(self.decision.steps)
        return replace(
            self._first,
            schedule=schedule,
            server_round=server_round,
            total_steps=self.total_steps,
        )

    def sizes(self, server_round: int, *, seed: int | str) -> dict[str, int]:
        """Return how many devices of each lowest aggregator a round asks."""
        return self._cohorts.sizes(server_round, self.decision, seed=seed)

    def take(self, plan: M2FDPRoundPlan) -> None:
        """Subtract the steps of a round from those that remain."""
        if self._controller is not None:
            self.steps_left -= plan.schedule.steps

    def resume(self, steps_left: int, *, lost_rounds: int) -> None:
        """Resume a training.

        Parameters
        ----------
        steps_left : int
            Local steps that remained at the checkpoint.
        lost_rounds : int
            Number of rounds after it that were given up: the devices paid for their steps.
        """
        self.steps_left = steps_left
        for server_round in range(lost_rounds):
            if not self.ended:
                self.take(self.plan(server_round))
