"""Plans the server's requests of each round: from budgets and pace to terms and grid."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr_privacy.accounting import REPLACE_ONE
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.evaluation.options import PrivateEvaluation
from flwr_privacy.evaluation.plan import planned_terms
from flwr_privacy.evaluation.terms import EvaluationTerms
from flwr_privacy.privacy.cohorts import participations, planned_participations
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid

from .loss import LossTerms
from .options import DPSGD, ClientLosses, NoiseSchedule, PrivacyLevel
from .pace import Discounted, Pace, Uniform
from .private_steps import PrivateStepsTerms
from .schedule import FIXED, NONE, PAPER, UDPNoisePlan
from .sensitivity import RECORD_UNIT, USER_UNIT
from .terms import UDPTerms

__all__ = ["TrainingTerms", "UDPPlan"]

TrainingTerms = UDPTerms | PrivateStepsTerms
"""The terms of a training: one noise after it, or noise in its steps."""

_GRID_BITS = {RECORD_UNIT: 27, USER_UNIT: 18}
"""Steps of the grid up to the bound of what is noised, as a power of two, if noise leaves room."""

_FEWEST_RECORDS, _MANY_RECORDS = 16, 1024
"""Records of the clients for whose noise the grid leaves room in a code, at record level."""

_NOISE_REACH = 8  # standard deviations of noise for which codes have room
_SHARE_REACH = 12  # the same, of a share of noise
_TOO_MUCH = 1.01  # times a budget's mu


class UDPPlan:
    """The rounds of one training.

    Parameters
    ----------
    privacy : PrivacyLevel
        The unit, the budget and the noise.
    schedule : NoiseSchedule, optional
        How the noise changes; by default it does not.
    keep_back : sequence of str
        Arrays of which nothing is released.
    evaluation : PrivateEvaluation, optional
        What clients say of the model; by default nothing.
    rounds : int
        Rounds over which the budget is spread at first.
    q : float
        Fraction of the clients that is asked in a round.
    evaluation_q : float, default 0.0
        Fraction of the clients that is asked in an evaluation; with 0 those who trained are.
    cohorts : {"fixed", "balanced", "poisson"}, default "fixed"
        How the cohort of a training is drawn: see `flwr_privacy.privacy.cohorts`.

    Attributes
    ----------
    pace : Pace
        How the noise goes over the rounds.
    T_history : list of int
        Rounds planned, before the first round and after each.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    def __init__(
        self,
        privacy: PrivacyLevel,
        schedule: NoiseSchedule | None = None,
        keep_back: Sequence[str] = (),
        evaluation: PrivateEvaluation | None = None,
        *,
        rounds: int,
        q: float,
        evaluation_q: float = 0.0,
        cohorts: str = "fixed",
    ) -> None:
        self.privacy, self.changes, self.keep_back = privacy, schedule, list(keep_back)
        self.evaluation = evaluation
        self.q, self.evaluation_q, self.cohorts = q, evaluation_q, cohorts
        self.pace: Pace = Uniform(rounds) if schedule is None else schedule.pace(rounds)
        self.T_history = [self.pace.planned]
        self._schedules: dict[tuple[float, float], UDPNoisePlan] = {}

    @property
    def losses(self) -> ClientLosses | None:
        """The options of the clients' losses; None if clients do not evaluate the model."""
        validation = None if self.changes is None else self.changes.validation
        return validation if isinstance(validation, ClientLosses) else None

    @property
    def validation_share(self) -> float:
        """Share of the budget for losses or evaluations, 0 where none are noised."""
        if self.evaluation is not None:
            return self.evaluation.share
        noised = self.losses is not None and self.privacy.noise not in (PAPER, NONE)
        return self.losses.share if noised and self.losses else 0.0

    @property
    def evaluations(self) -> int | None:
        """Evaluations that a client's budget is planned for; None if it is not asked for any."""
        if self.evaluation is None:
            return None
        count, rounds = self.evaluation.count(self.pace.rounds), self.pace.rounds
        if self.evaluation_q:
            return participations(count, self.evaluation_q)
        # Nobody evaluates more often than it trains.
        trainings = rounds
        if self.privacy.noise == FIXED:
            trainings = planned_participations(self.cohorts, rounds=rounds, q=self.q)
        return min(count, trainings)

    @property
    def ended(self) -> str:
        """Why the training ends: all planned rounds are done; "" before."""
        pace = self.pace
        if not pace.over or pace.done == 0:
            return ""
        if isinstance(pace, Discounted):
            return f"discounting left {pace.planned} of {pace.rounds} rounds, and they are done"
        return f"the {pace.planned} rounds that the budget is for are done"

    def check(self) -> None:
        """Refuse options that do not go together, or whose values have no room in codes.

        Raises
        ------
        InvalidParameterError
            If there is such a thing.
        """
        if isinstance(self.privacy, DPSGD) and self.changes is not None:
            allowed = "None with DPSGD: its noise is planned for all steps of all rounds"
            raise InvalidParameterError("schedule", self.changes, allowed)
        if self.privacy.sampling_rate != 1 and self.changes is not None:
            raise InvalidParameterError(
                "sampling_rate",
                self.privacy.sampling_rate,
                "1 with a schedule: with samples a round costs something else than it counts",
            )
        for client in self.privacy.named() or [""]:
            self.schedule(client)
        self.plain_terms(self.privacy.parties_of(2), noise_multiplier=1.0)
        if self.evaluation is not None:
            self.evaluation_terms()

    def settle(self, loss: float | None) -> None:
        """Record that a round is over, and the loss of its model."""
        self.pace.after(loss)
        self.T_history.append(self.pace.planned)

    def schedule(self, client: str) -> UDPNoisePlan:
        """Return a client's schedule; clients with one budget share it."""
        return self._schedule(*self.privacy.budget(client))

    def weakest(self) -> UDPNoisePlan:
        """Return the schedule of a budget that covers every client's."""
        schedules = [self.schedule(client) for client in self.privacy.named() or [""]]
        return self._schedule(max(s.epsilon for s in schedules), max(s.delta for s in schedules))

    def terms(
        self, clients: Collection[str], spent: Mapping[str, float], *, honest: int
    ) -> tuple[TrainingTerms, dict[str, TrainingTerms]]:
        """Return the terms of all clients, and those of clients with their own.

        Parameters
        ----------
        clients : collection of str
            The clients, where they have terms of their own.
        spent : Mapping of str to float
            What each of them has spent so far; see `UDPNoisePlan.multiplier`.
        honest : int
            How many honest clients are at least in a secure sum, where there is one.
        """
        own = list(clients) if self.privacy.own_terms else []
        multipliers = {c: self._multiplier(c, spent.get(c, 0.0)) for c in own or [""]}
        noisiest = max(multipliers, key=lambda client: multipliers[client])
        # One grid for all, with room for the largest noise.
        shared = self.plain_terms(
            self.privacy.parties_of(honest), noise_multiplier=multipliers[noisiest], client=noisiest
        )
        return shared, {c: self.own_terms(shared, c, spent.get(c, 0.0)) for c in own}

    def own_terms(self, shared: TrainingTerms, client: str, spent: float) -> TrainingTerms:
        """Return the terms of a client that has its own, from the shared one."""
        noise_multiplier = self._multiplier(client, spent)
        return replace(shared, noise_multiplier=noise_multiplier, **self._budget(client))

    def plain_terms(
        self, parties: int, *, noise_multiplier: float, client: str = ""
    ) -> TrainingTerms:
        """Return the terms for one budget and noise, with a grid that has room for them."""
        privacy = self.privacy
        if isinstance(privacy, DPSGD):
            bits = privacy.grid_bits or _GRID_BITS[RECORD_UNIT]
            return PrivateStepsTerms(
                steps=privacy.steps,
                sampling_rate=float(privacy.sampling_rate),
                clipping_norm=float(privacy.clipping_norm),
                noise_multiplier=0.0 if privacy.noise == NONE else noise_multiplier,
                **self._budget(client),
                grid=CodeGrid.below(privacy.clipping_norm, bits=bits).exponent,
                keep_back=list(self.keep_back),
            )
        terms = UDPTerms(
            unit=privacy.unit,
            noise_multiplier=0.0 if privacy.noise == NONE else noise_multiplier,
            **self._budget(client),
            clipping_norm=float(privacy.clipping_norm),
            grid=0,
            learning_rate=float(privacy.learning_rate),
            sampling_rate=float(privacy.sampling_rate),
            epochs=privacy.local_epochs,
            batch_size=privacy.batch_size or 0,
            bound=privacy.sensitivity_bound,
            max_records=privacy.max_records if parties and privacy.unit == RECORD_UNIT else 0,
            parties=parties,
            count_failed=privacy.unit == USER_UNIT and privacy.noise not in (PAPER, NONE),
            keep_back=list(self.keep_back),
        )
        return replace(terms, grid=self._grid(terms).exponent)

    def loss_terms(self, client: str = "") -> LossTerms:
        """Return the terms of a client's loss."""
        return LossTerms(
            unit=self.privacy.unit,
            cap=float(self.losses.loss_cap if self.losses else ClientLosses.loss_cap),
            noise_multiplier=self._plan_of(client).validation_multiplier,
            **self._budget(client),
        )

    def evaluation_terms(self, client: str = "", *, honest: int = 0) -> EvaluationTerms:
        """Return the terms of a client's evaluation.

        Parameters
        ----------
        client : str
            The client, where each has its own budget.
        honest : int, default 0
            How many honest clients are at least in a secure sum, where there is one.
        """
        if self.evaluation is None:
            raise ValueError("no evaluation is planned")
        return planned_terms(
            self.evaluation,
            unit=self.privacy.unit,
            neighbours=REPLACE_ONE,
            noise_multiplier=self._plan_of(client).validation_multiplier,
            **self._budget(client),
            parties=self.privacy.parties_of(honest),
        )

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed training needs."""
        return {
            "made_for": self._made_for(),
            "q": self.q,
            "evaluation_q": self.evaluation_q,
            "pace": self.pace.state(),
            "T_history": list(self.T_history),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the plan of a resumed training.

        Raises
        ------
        CheckpointError
            If it was made for other options or another number of rounds.
        """
        mine, made_for = self._made_for(), state.get("made_for", {})
        for key in [*mine, *made_for]:
            value, theirs = mine.get(key), made_for.get(key)
            if theirs != value:
                raise CheckpointError(
                    f"the checkpoint was calibrated for {key} = {theirs!r}, not {value!r}:"
                    " the noise of the rounds that are done cannot be changed"
                )
        self.q, self.evaluation_q = state["q"], state["evaluation_q"]
        self._schedules.clear()
        self.pace.load(state["pace"])
        self.T_history = list(state["T_history"])

    def _made_for(self) -> dict[str, Any]:
        """Return all that the noise follows from, as plain values."""
        changes: dict[str, Any] = {}
        if self.changes is not None:
            changes = {"schedule": type(self.changes).__name__, **vars(self.changes)}
            changes["validation"] = None if self.losses is None else vars(self.losses)
        values = {"unit": self.privacy.unit, **vars(self.privacy), **changes}
        values |= {"keep_back": self.keep_back, "rounds": self.pace.rounds}
        values["evaluation"] = None if self.evaluation is None else vars(self.evaluation)
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}

    def _plan_of(self, client: str) -> UDPNoisePlan:
        """Return a client's noise plan; of any client, if one is named but none is meant."""
        return self.schedule(client or next(iter(self.privacy.named()), ""))

    def _budget(self, client: str) -> dict[str, Any]:
        plan = self._plan_of(client)
        return {"epsilon": float(plan.cap), "delta": float(plan.delta), "gap": float(plan.gap)}

    def _schedule(self, epsilon: float, delta: float) -> UDPNoisePlan:
        if (epsilon, delta) not in self._schedules:
            self._schedules[epsilon, delta] = self.privacy.schedule(
                epsilon,
                delta,
                rounds=self.pace.rounds,
                q=self.q,
                cohorts=self.cohorts,
                validation_share=self.validation_share,
                validations=self.evaluations,
            )
        return self._schedules[epsilon, delta]

    def _multiplier(self, client: str, spent: float) -> float:
        """Return a client's noise over the sensitivity in the next round."""
        schedule = self.schedule(client)
        if not schedule.spends:
            return schedule.noise_multiplier * self.pace.factor
        z = None
        if client:
            z = schedule.multiplier(self.pace.planned - self.pace.done, spent)
            if z is None:  # with nothing left, what is more than a whole budget: it declines
                z = 1 / (_TOO_MUCH * mu_of(schedule.epsilon, schedule.delta))
        return schedule.noise_multiplier if z is None else z

    def _grid(self, terms: UDPTerms) -> CodeGrid:
        if terms.parties:
            reach = terms.reach(terms.max_records)
            sigma = terms.noise_multiplier * terms.shared_sensitivity() / math.sqrt(terms.parties)
            spread, most = _SHARE_REACH * sigma / reach, 30
        else:
            reach = terms.reach(_MANY_RECORDS)
            counts = (_FEWEST_RECORDS, _MANY_RECORDS)
            bound = max(terms.sensitivity(max(count, terms.batch_size)) for count in counts)
            sigma = terms.noise_multiplier * bound
            spread, most = _NOISE_REACH * sigma / reach, _GRID_BITS[terms.unit]
        room = math.floor(math.log2(CODE_LIMIT / (1 + spread))) - 1
        return CodeGrid.below(reach, bits=self.privacy.grid_bits or max(1, min(most, room)))
