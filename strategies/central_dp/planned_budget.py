"""Plans the budget of a training under central DP, and counts what it has cost each client."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

from flwr_privacy.accounting import Charge
from flwr_privacy.central_dp.choice import CANDIDATES, NoiseChoice, choose
from flwr_privacy.central_dp.options import AUTO, AdaptiveClipping, DistributedNoise, ServerNoise
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.central_dp.sensitivity import DISTRIBUTED, SERVER, amplified
from flwr_privacy.central_dp.terms import CentralDPTerms
from flwr_privacy.errors import CheckpointError
from flwr_privacy.evaluation import EvaluationTerms, PrivateEvaluation
from flwr_privacy.evaluation.plan import planned_terms
from flwr_privacy.privacy.card import CardRelease
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.udp import participations
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import TRAIN

from .spent_budgets import participations_of, spent_clients, why_too_few

__all__ = ["PlannedBudget"]

logger = logging.getLogger("flwr.privacy")

_OTHER_VERSIONS = ". Other versions of SciPy or NumPy come to another factor: resume with the same"

_NO_MORE_ROUNDS = (
    ": their noise is correlated, and further ones are not in what they cost (plan more with "
    "`rounds`; with correlated=None clients may be asked as long as they have budget left)"
)


class PlannedBudget:
    """The noise plan of one training, made once the number of clients is known.

    Parameters
    ----------
    privacy : DistributedNoise or ServerNoise
        The budget and the clipping norm, and who adds the noise.
    clipping : AdaptiveClipping, optional
        How the clipping norm changes.
    evaluation : PrivateEvaluation, optional
        For which a part of the budget is set aside.
    secure_sum : SecureSum, optional
        How many honest clients there are in a sum.
    keep_back : sequence of str
        Arrays of which nothing is released.
    inner : bool
        Whether another strategy makes the model from the rounds' means.
    rounds : callable
        Returns the rounds over which the budget is spread.
    sample_sizes : callable
        Returns how many clients a round asks, how many an evaluation, and how many there are.
    model : callable
        Returns the arrays that are trained.

    Attributes
    ----------
    plan : CentralDPNoisePlan or None
        The plan; None before `planned`.
    population : int
        Number of clients that it was made for.
    amplified : bool
        Whether samples are secret: then everybody is charged who may have been drawn.
    """

    def __init__(
        self,
        privacy: DistributedNoise | ServerNoise,
        *,
        clipping: AdaptiveClipping | None,
        evaluation: PrivateEvaluation | None,
        secure_sum: SecureSum | None,
        keep_back: Sequence[str],
        inner: bool,
        rounds: Callable[[], int],
        sample_sizes: Callable[[], tuple[int, int, int]],
        model: Callable[[], Arrays],
    ) -> None:
        self._privacy = privacy
        self._clipping = clipping
        self._evaluation = evaluation
        self._secure_sum = secure_sum
        self._keep_back = list(keep_back)
        self._inner = inner
        self._rounds = rounds
        self._sample_sizes = sample_sizes
        self._model = model
        self.plan: CentralDPNoisePlan | None = None
        self.population = 0
        self.amplified = amplified(privacy.noise, privacy.sampling)
        self._counted: tuple[list[CardRelease], int] = [], 0  # and how many there were
        self._made = Counter[str]()  # trainings of each client, in those

    # -- The plan ----------------------------------------------------------------------------

    def planned(self) -> CentralDPNoisePlan:
        """Return the plan; it is made once the number of clients is known."""
        if self.plan is None:
            asked, evaluating, self.population = self._sample_sizes()
            choice = self.choice_of(
                self._model(),
                rounds=self._rounds(),
                q=min(1.0, asked / self.population),
                evaluation_q=min(1.0, evaluating / self.population),
            )
            self.plan = choice.plan
            if self._privacy.noise == SERVER:
                logger.info("%s", choice.text)
        return self.plan

    def choice_of(
        self, model: Arrays, *, rounds: int, q: float, evaluation_q: float = 1.0
    ) -> NoiseChoice:
        """Return the noise of a training, with how its rounds go together, and why.

        Parameters
        ----------
        model : Mapping of str to ndarray
            The model that is trained.
        rounds, q, evaluation_q
            As in `plan_of`.
        """
        plan = self.plan_of(rounds=rounds, q=q, evaluation_q=evaluation_q)
        if self._privacy.correlated != AUTO:
            return NoiseChoice(plan=plan, text=plan.text())
        return choose(
            plan,
            model,
            clipping_norm=self._privacy.clipping_norm,
            grid_bits=self._privacy.grid_bits,
            keep_back=self._keep_back,
            inner=self._inner,
        )

    def plan_of(self, *, rounds: int, q: float, evaluation_q: float = 1.0) -> CentralDPNoisePlan:
        """Return the noise of a training, independent where the default decides by the model.

        Parameters
        ----------
        rounds : int
            Rounds planned.
        q, evaluation_q : float
            Fractions of the clients that are asked in a round, and in an evaluation: this one says
            nothing where those evaluate who trained, or everybody is charged.
        """
        plan = self._privacy.plan(self._clipping, rounds=rounds, q=q)
        if self._evaluation is None:
            return plan
        count = self._evaluation.count(rounds)
        if self._secure_sum is not None:  # those evaluate who trained
            count = min(count, plan.releases)
        elif not self.amplified:
            count = participations(count, evaluation_q)
        return replace(plan, evaluation_share=self._evaluation.share, evaluations=count)

    def terms(
        self,
        asked: int,
        norm: float,
        *,
        members: Sequence[str] = (),
        block: int | None = None,
    ) -> CentralDPTerms:
        """Return the terms of a round.

        Parameters
        ----------
        asked : int
            Number of clients in its sum, members of a committee included.
        norm : float
            The clipping norm.
        members : sequence of str
            The members of the committee, if there is one.
        block : int, optional
            The round in which they began their streams.
        """
        parties = 1
        if self._privacy.noise == DISTRIBUTED and self._secure_sum is not None and not members:
            parties = self._secure_sum.parties_of(asked)
        return self.planned().terms(
            norm,
            parties=parties,
            grid_bits=self._privacy.grid_bits,
            keep_back=self._keep_back,
            members=members,
            block=block,
        )

    def evaluation_terms(self, parties: int) -> EvaluationTerms:
        """Return the terms of an evaluation; parties share the noise if the server adds none.

        Raises
        ------
        ValueError
            If no evaluation is planned.
        """
        plan = self.planned()
        if self._evaluation is None:
            raise ValueError("no evaluation is planned")
        return planned_terms(
            self._evaluation,
            unit="user",
            neighbours=plan.relation,
            noise_multiplier=plan.evaluation_multiplier,
            epsilon=float(plan.epsilon),
            delta=plan.delta,
            gap=plan.gap,
            parties=parties if plan.noise == DISTRIBUTED else 0,
            by_server=plan.noise == SERVER,
        )

    def evaluated(self, server_round: int) -> bool:
        """Tell whether the model of a round is evaluated."""
        evaluation = self._evaluation
        return evaluation is not None and evaluation.takes_place(
            server_round, rounds=self._rounds()
        )

    # -- What it has cost --------------------------------------------------------------------

    def cost(self, client: str, releases: list[CardRelease]) -> Charge:
        """Return what a client pays for its next training."""
        # Not before it is asked for: until its first reply a client may go by its node's address.
        counted, length = self._counted
        if counted is not releases or length != len(releases):
            self._counted, self._made = (releases, len(releases)), participations_of(releases)
        return self.planned().charge(self._made[client] + 1)

    def is_planned(self, server_round: int) -> bool:
        """Tell whether the cost of a round is planned, where rounds cost something together."""
        if self.plan is None or not (self.amplified or self.plan.correlated is not None):
            return True
        return server_round <= self.plan.rounds

    def spent(self, releases: Sequence[CardRelease]) -> set[str]:
        """Return the clients that were charged as often as their budget allows."""
        if self.plan is None or self.amplified:
            return set()
        return spent_clients(self.plan, releases)

    def why_stop(
        self, releases: Sequence[CardRelease], clients: Collection[str], spent: Collection[str]
    ) -> str:
        """Return why no further round can be asked for; "" if one can.

        Parameters
        ----------
        releases : sequence of CardRelease
            Every charge so far.
        clients : collection of str
            The connected clients.
        spent : collection of str
            Those whose budget is used up.
        """
        if self.plan is None:
            return ""
        last = max((r.server_round for r in releases if r.phase == TRAIN), default=0)
        if not self.is_planned(last + 1):
            over = f"the {self.plan.rounds} rounds that the budget is for are over"
            return over if self.plan.correlated is None else over + _NO_MORE_ROUNDS
        if self.amplified:
            return ""
        needed = 1 if self._secure_sum is None else self._secure_sum.threshold or 2
        return why_too_few(self.plan, releases, clients, spent, needed=needed)

    # -- The state of a resume ---------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything that the noise of the rounds was calibrated for."""
        clipping, evaluation = self._clipping, self._evaluation
        return {
            "plan": None if self.plan is None else self.plan.state(),
            "clipping": {
                "clipping_norm": self._privacy.clipping_norm,
                **({"quantile": None} if clipping is None else asdict(clipping)),
                "grid_bits": self._privacy.grid_bits,
                "keep_back": list(self._keep_back),
                "evaluation": None if evaluation is None else asdict(evaluation),
            },
            "population": self.population,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned.

        Raises
        ------
        CheckpointError
            If it was made for another budget, another number of rounds or other clipping.
        """
        made = state["plan"] or {}
        plan = self.plan_of(rounds=self._rounds(), q=made.get("q", 1.0))
        if self._privacy.correlated == AUTO:  # what was chosen at the start stays
            chosen = {repr(candidate): candidate for candidate in CANDIDATES}
            plan = replace(plan, correlated=chosen.get(made.get("correlated", "")))
        mine = {**plan.state(), **self.state()["clipping"]}
        theirs = {**made, **state["clipping"]}
        for key, value in mine.items():
            # Those two are not known before there are clients.
            if key not in ("q", "evaluations") and theirs.get(key, value) != value:
                raise CheckpointError(
                    f"the checkpoint was calibrated for {key} = {theirs[key]!r}, not {value!r}: "
                    "the noise of the rounds that are done cannot be changed"
                    + (_OTHER_VERSIONS if key == "factor" else "")
                )
        if state["plan"] is not None:
            self.plan = replace(plan, evaluations=made["evaluations"])
            self.population = state["population"]
