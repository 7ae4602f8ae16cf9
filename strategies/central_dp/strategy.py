"""Central differential privacy on the server: DP-FedAvg with noise in shares, or by the server.

The noise follows from a budget for the whole training. The server records how often
each client was asked, in the releases of the privacy card. So the record survives a resume and
counts every client that was asked, whether its answer came or not.
"""

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_privacy.central_dp.guarantee import guarantee_of
from flwr_privacy.central_dp.joint_cost import JointCost
from flwr_privacy.central_dp.mean import AddNoise, CentralMean, add_noise
from flwr_privacy.central_dp.model_noise import ModelNoise
from flwr_privacy.central_dp.options import (
    AdaptiveClipping,
    DistributedNoise,
    NoiseCommittee,
    ServerNoise,
)
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.central_dp.sensitivity import DISTRIBUTED, SERVER, sensitivity
from flwr_privacy.central_dp.terms import CentralDPTerms
from flwr_privacy.errors import CheckpointError, InvalidParameterError, ProtocolError, check_integer
from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.keywords import check_options, checked_keywords
from flwr_privacy.privacy.adaptive_clipping import next_clipping_norm
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.cohorts import drawn_alone
from flwr_privacy.privacy.forecast import Forecast
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import kept_back
from flwr_privacy.secure_sum import Bounds, NotOpenedError, SecureSum
from flwr_privacy.strategies.budget import budget_metrics, rounds_of
from flwr_privacy.strategies.loop.base import SchemeStrategy
from flwr_privacy.strategies.participants import Participants
from flwr_privacy.strategies.private_evaluation import (
    EvaluationRequest,
    PrivateEvaluations,
    check_evaluation,
)
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.message import EVALUATE, TRAIN

from .noise_members import NoiseMembers
from .option_checks import check_committee, check_committee_sum, check_sum
from .planned_budget import PlannedBudget

__all__ = ["CentralDP"]

logger = logging.getLogger("flwr.privacy")

_WIDEST = math.nextafter(2.0, 0.0)
"""Norm that has most steps on a grid which is chosen for it."""


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class CentralDP(SchemeStrategy):
    """Federated averaging of clipped updates with noise on the sum (DP-FedAvg).

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `SchemeStrategy`.
    privacy : DistributedNoise or ServerNoise, default DistributedNoise()
        The budget and the clipping norm, and who adds the noise: the clients or a trusted server.
    clipping : AdaptiveClipping, optional
        How the clipping norm changes; by default it does not.
    rounds : int, optional
        Rounds over which the budget is spread; by default those of `start`. Needed where a
        `start` of your own runs the rounds.
    keep_back : sequence of str, optional
        Arrays of which nothing is released, beside integers and what torch calls running statistics
        of normalisation layers, which never are. The model keeps the server's values of them.
        Where it is left out and arrays that came as a list look like statistics, the first round is
        refused: see `flwr_privacy.clients.torch.statistics_of`; [] says that there are none.
    trainable : sequence of str, optional
        Names of the arrays that are trained, or patterns (``"*.lora_*"``): adapters, a head. The
        others are frozen: they never travel, and every client must have the same, which it checks.
        By default all arrays are trained. What ``requires_grad`` says is
        `flwr_privacy.clients.torch.trainable_names`; the clients call
        `flwr_privacy.clients.torch.load_trainable`.
    evaluation : PrivateEvaluation, optional
        Has clients evaluate the model, a part of the budget set aside for it. By default clients
        are not asked to evaluate.
    secure_sum : SecureSum, optional
        With noise in shares always there, by default with the usual parameters.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.

    Notes
    -----
    Every client weighs the same. Clients send no losses and no metrics of the training. They are
    asked to evaluate with `evaluation` only: under a secure sum those who trained, otherwise
    `fraction_evaluate` of all. A client whose releases are used up is not asked any more; the
    training ends when nobody is left to ask.

    With noise in shares an answer does not say whether its training failed: that is counted with
    noise (`flwr_privacy.privacy.failures`). The history has ``trained`` and ``trained_sigma`` for
    each round, and `start` raises `TooFewTrainedError` where it is certain that fewer than
    `LoopOptions.quorum` train (by default half of the answers).

    With a trusted server that draws in secret noise is released in every round, also if nobody was
    drawn or nobody answered: a round that is skipped then would say who was not there. The result
    is divided by the expected number of clients.

    With noise in shares a client answers a request once. A round that broke off after clients had
    answered is skipped on a resume, unless enough others are drawn: their answers were charged, and
    a second sum over the same round could give them away. A trusted server does such a round again,
    with other noise, as nobody has seen the model that was lost: a round has its checkpoint, with
    its charges, before `evaluate_fn` and `on_round`, and a resumed run shows the same model again.
    What an `aggregate_train` of your own hands out has left before that checkpoint. A `start` of
    your own has none at all: each time that it has a round aggregated is a release, on the card of
    the strategy that did it, and a strategy that is made anew knows nothing of those before.

    Guarantee
    ---------
    See `flwr_privacy.central_dp.plan.CentralDPNoisePlan` for adversary, neighbours and what is
    covered in each of the four modes; `guarantee` has it as text.

    Examples
    --------
    >>> from flwr_privacy.strategies import (
    ...     AdaptiveClipping, CentralDP, DistributedNoise, ServerNoise
    ... )
    >>> privacy = DistributedNoise(epsilon=8.0, delta=1e-5, clipping_norm=0.5)
    >>> strategy = CentralDP(fraction_train=0.2, privacy=privacy)
    >>> trusted = CentralDP(
    ...     fraction_train=0.2,
    ...     privacy=ServerNoise(sampling="poisson"),
    ...     clipping=AdaptiveClipping(quantile=0.5),
    ... )
    """

    privacy: DistributedNoise | ServerNoise = field(default_factory=DistributedNoise)
    clipping: AdaptiveClipping | None = None
    rounds: int | None = None
    keep_back: Sequence[str] | None = None
    trainable: Sequence[str] | None = None
    evaluation: PrivateEvaluation | None = None

    scheme: ClassVar[str] = "central-dp"
    metrics_phases: ClassVar[frozenset[str]] = frozenset()
    summable: ClassVar[bool] = True
    sum_phases: ClassVar[frozenset[str]] = frozenset({TRAIN, EVALUATE})
    keeps_statistics: ClassVar[bool] = True
    weight_key = "num-examples"  # the clients' own: 1

    def __post_init__(self) -> None:
        if self.rounds is not None:
            check_integer("rounds", self.rounds, minimum=1)
        check_options(CentralDP, self, "privacy", "clipping", "evaluation")
        check_evaluation(self, self.evaluation)
        if self.privacy.noise == DISTRIBUTED and self.secure_sum is None:
            self.secure_sum = SecureSum()
        check_sum(self.secure_sum, noise=self.privacy.noise, sampling=self.privacy.sampling)
        self.privacy.plan(self.clipping, rounds=1, q=1.0)  # or refuses the two together
        if self._committee is not None:
            beside = {"evaluation": self.evaluation, "quorum": self.loop.quorum}
            check_committee(self.secure_sum, **beside)
        asked = self.fraction_evaluate if self.evaluation is not None else 0.0
        super().__post_init__()
        self._keep_back_given = self.keep_back
        self.use_trainable(self.trainable)
        self.fraction_evaluate = asked

    def _build(self) -> None:
        super()._build()
        self.budget = PlannedBudget(
            self.privacy,
            clipping=self.clipping,
            evaluation=self.evaluation,
            secure_sum=self.secure_sum,
            keep_back=self.keep_back or (),
            inner=self.inner is not None,
            rounds=lambda: rounds_of(self.rounds, self.planned_rounds),
            sample_sizes=self._sample_sizes,
            model=lambda: self._template,
        )
        self.terms: CentralDPTerms | None = None
        self.clipping_norm = self.privacy.clipping_norm
        self._cohort = 0
        self._insecure = self.privacy.insecure_seed is not None
        self._participants = Participants(
            self.federation,
            cohorts=self.privacy.sampling,
            # Under a secure sum the clients of a cohort know each other.
            secret=self.budget.amplified,
            seed=f"insecure {self.privacy.insecure_seed}".encode() if self._insecure else None,
        )
        self._members = NoiseMembers(self.federation, self._committee)
        # A trusted server accounts for the rounds, and no ledger. With a committee what a client
        # charges depends on how many earlier requests reached it.
        if self.privacy.noise == SERVER or self._committee is not None:
            self.heads.leave_out()
        self._correlated: ModelNoise | None = None
        self._correlated_state: dict[str, Any] | None = None  # until the model is known
        self._of_round: dict[str, float] = {}
        self._releases = False  # whether noise is released whoever answers
        self._trained = False
        self._evaluations: PrivateEvaluations | None = None
        if self.evaluation is not None:
            self._evaluations = PrivateEvaluations(self, self.evaluation)

    @property
    def plan(self) -> CentralDPNoisePlan | None:
        """The noise plan of the training; None until the number of clients is known."""
        return self.budget.plan

    @property
    def _committee(self) -> NoiseCommittee | None:
        return None if isinstance(self.privacy, ServerNoise) else self.privacy.committee

    def _sample_sizes(self) -> tuple[int, int, int]:
        """Return how many clients a round asks, how many an evaluation, and how many there are."""
        size = self.messenger.sampler.sample_size
        asked, population = size(fraction=self._fraction(), minimum=self.min_train_nodes)
        evaluating, _ = size(fraction=self.fraction_evaluate, minimum=self.min_evaluate_nodes)
        return asked, evaluating, population - len(self._members.reserved)

    def _fraction(self) -> float:
        """Return the fraction of all connected clients that a round asks; members do not train."""
        if self._committee is None:
            return self.fraction_train
        clients = self.federation.clients()
        return self.fraction_train * self._members.others(clients) / max(1, len(clients))

    def needed(self) -> Collection[str]:
        """Return the members of the committee, if there is one."""
        return self._members.names

    def lacking(self, clients: Collection[str]) -> None:
        """Have others take the places of members that a sum lacked, if there are any."""
        self._members.replace(clients)

    # -- A round -----------------------------------------------------------------------------

    def instruct(self, server_round: int) -> Instruction:
        """Return the terms; the server's noise is added before the mean is computed."""
        self._cohort = self.transport.cohort
        members, block = self._members.names, self._members.block_of(server_round)
        terms = self.terms = self.budget.terms(
            self._cohort, self.clipping_norm, members=members, block=block
        )
        names = terms.names(self._template)
        terms.check_grid(sum(np.size(self._template[name]) for name in names))
        self._of_round = {}
        plan = self.budget.planned()
        spread = plan.effective_multiplier * sensitivity(1.0, neighbours=plan.relation)
        weights = sum(np.size(self._template[name]) for name in names)
        if plan.joint is not None and not members:
            self._begin_correlated(plan.joint, terms)

        def forecast(clients: int) -> Forecast:
            if members:  # who do not train
                clients = round(plan.q * self.budget.population)
            return Forecast(
                ratio=spread / clients,
                weights=weights,
                clients=clients,
                rounds=plan.rounds,
                own_noise=False,
                what="noise"
                if plan.correlated is None
                else f"correlated noise ({type(plan.correlated).__name__})",
            )

        instruction = Instruction(
            fields=records.write(terms),
            accumulator=partial(CentralMean, self._template, terms),
            cost=lambda client: self.budget.cost(client, self.releases),
            charged=self._charged,
            hidden=self.budget.amplified,
            released=partial(self._noised, server_round, terms),
            failed_sigma=terms.failed_sigma if terms.failed_code else None,
            forecast=forecast,
        )
        if self._evaluations is None:
            return instruction
        due = self.budget.evaluated(server_round)
        return self._evaluations.summed_next(instruction, server_round, due=due)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the replies, and the server's noise if it adds any; return the new model."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        self._trained = arrays is not None
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask clients to evaluate, if they do; otherwise ask nobody."""
        if self._evaluations is None:
            return []
        used_up = self._evaluations.used_up(self.budget.planned().evaluations)
        self._evaluations.trained = self._trained and self.budget.evaluated(server_round)
        if self.budget.amplified and used_up:  # everybody is charged for each
            return []
        by_server, random = self.privacy.noise == SERVER, None
        if by_server:
            random = self._random(server_round, "evaluation")
        request = EvaluationRequest(
            terms=self.budget.evaluation_terms(1 if self.terms is None else self.terms.parties),
            without=used_up,
            charged=self._participants.charged if self.budget.amplified else None,
            random=random,
        )
        return self._evaluations.configure(grid, server_round, arrays, config, request)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics of an evaluation, with their intervals."""
        if self._evaluations is None:
            return None
        return self._evaluations.aggregate(server_round, replies)

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the codes, noise included; every client weighs 1."""
        cohort = len(clients)
        if drawn_alone(self.privacy.sampling):
            # What does not fit the usual cohort ends the run; the others are skipped.
            self._bounds(max(2, round(self.budget.planned().q * self.budget.population)))
            try:
                return self._bounds(cohort)
            except InvalidParameterError as error:
                raise NotOpenedError(f"a cohort of {cohort} clients was drawn: {error}") from error
        return self._bounds(cohort)

    def _bounds(self, cohort: int) -> Bounds:
        if self.secure_sum is None:
            raise ProtocolError("there is no secure sum")
        # The clipping norm of the next round is not known when its secrets are dealt, but a grid
        # has the most steps up to this one.
        if self._committee is not None:
            check_committee_sum(self.secure_sum, cohort)
        terms = self.budget.terms(cohort, _WIDEST, members=self._members.names, block=1)
        limit = terms.code_limit()
        if self.evaluation is not None:
            limit = max(limit, self.budget.evaluation_terms(terms.parties).code_limit())
        return self.secure_sum.bounds(cohort, code_limit=min(limit, CODE_LIMIT), largest_weight=1)

    def _noised(
        self, server_round: int, terms: CentralDPTerms, mean: WeightedMean | None
    ) -> CentralMean | None:
        """Add the server's noise to the sum, if it adds any; choose the next clipping norm."""
        if mean is None and self._releases:
            mean = CentralMean(self._template, terms)
        if not isinstance(mean, CentralMean):
            self._members.end_block()
            return None
        mean.clients.difference_update(terms.members)  # their vectors are noise alone
        # What is divided by a secret number would tell it.
        number: float = len(mean.clients)
        # The same number in every round, or noise of two rounds would not cancel.
        if self.budget.amplified or self.budget.planned().correlated is not None:
            number = self.budget.planned().q * self.budget.population
        if terms.noise == SERVER:
            noise: AddNoise = add_noise
            if self._correlated is not None:
                noise = partial(self._correlated.add_to, server_round)
            mean.add_noise(self._random(server_round), noise)
        below = mean.settle(float(number))
        shares = len(terms.members or mean.clients) if terms.noise == DISTRIBUTED else 1
        self._of_round = {"sigma": terms.share_sigmas()[0] * math.sqrt(shares)}
        if below is not None and self.clipping is not None:
            self._of_round["fraction_below"] = below
            self.clipping_norm = next_clipping_norm(
                self.clipping_norm,
                below,
                quantile=self.clipping.quantile,
                learning_rate=self.clipping.clipping_learning_rate,
            )
        return mean

    def _begin_correlated(self, joint: JointCost, terms: CentralDPTerms) -> None:
        """Begin or resume the noise that goes over all rounds, once the model is known."""
        if self._correlated is None:
            model = {name: self._template[name] for name in terms.names(self._template)}
            self._correlated = ModelNoise(joint.factor, model)
            megabytes = self._correlated.kept_bytes / 1e6
            logger.info("correlated noise keeps %.3g MB, and so does each checkpoint", megabytes)
            if self._correlated_state is not None:
                self._correlated.load(self._correlated_state)
        self._correlated.check(terms)

    def _random(self, server_round: int, purpose: str = "noise") -> SecureRandom:
        if self.privacy.insecure_seed is None:
            return SecureRandom()
        return SecureRandom.insecure(self.privacy.insecure_seed, purpose, server_round)

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the clients of a round's training, except those whose budget is used up."""
        if not self.budget.is_planned(server_round):
            return {}
        members = set(self._members.choose() if self._committee is not None else ())
        cohort = self._participants.drawn(
            self.messenger,
            grid,
            server_round,
            fraction=self._fraction(),
            minimum=self.min_train_nodes,
            without=self._spent() | self._members.reserved,
            public_seed=self.experiment.seed,
            q=lambda: self.budget.planned().q,
            separation=lambda: self.budget.planned().separation,
        )
        if not members or not cohort:
            return cohort
        others = set(self.federation.clients()).difference(members)
        beside = self.messenger.sample(
            grid, server_round, TRAIN, fraction=1.0, minimum=0, without=others
        )
        nodes = [*cohort, *(node for node in beside if node not in cohort)]
        return {node: [*cohort.get(node, []), *beside.get(node, [])] for node in nodes}

    def _charged(self, request_log: RequestLog) -> set[str]:
        """Return the charged clients: those asked, or all clients where samples are secret."""
        budget = self.budget
        if budget.amplified:
            self._releases = budget.is_planned(request_log.header.server_round)
            if not self._releases:
                return set()
        charged = self._participants.charged(request_log, groups=budget.planned().separation)
        return charged.difference(() if self.terms is None else self.terms.members)

    def _spent(self) -> set[str]:
        """Return the clients that were charged as often as their budget allows."""
        return self.charge_log.with_addresses(self.budget.spent(self.releases))

    def stop(self) -> str:
        """Return why the training ends: the budget is used up."""
        if self.plan is None:
            return ""
        return self.budget.why_stop(self.releases, self.federation.clients(), self._spent())

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the epsilon spent, and the round's clipping norm, noise and unclipped fraction."""
        numbers = {**budget_metrics(card), **self._of_round}
        if self.terms is not None:
            numbers["clipping_norm"] = self.terms.clipping_norm
        return numbers

    # -- The guarantee, and the state of a resume --------------------------------------------

    def guarantee(self) -> Guarantee:
        """Return the guarantee; before the first round it states the requested budget."""
        quorum, secure_sum = None, self.secure_sum
        if secure_sum is not None and self.terms is not None and self.terms.noise == DISTRIBUTED:
            quorum = secure_sum.quorum_of(self._cohort)
        return guarantee_of(
            self.plan or self.budget.plan_of(rounds=1, q=1.0),
            summed=secure_sum is not None,
            quorum=quorum,
            kept_back=kept_back(self._template, self.keep_back),
            insecure=self._insecure,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, the clipping norm, and the secret seed of the samples."""
        return {
            **self.budget.state(),
            "clipping_norm": self.clipping_norm,
            "participants": self._participants.state(),
            "insecure": self._insecure,
            "trained": self._trained,
            "correlated": self._correlated.state() if self._correlated else self._correlated_state,
            "committee": self._members.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the plan, the clipping norm, and the secret seed of the samples.

        Raises
        ------
        CheckpointError
            If they were made for another budget, another number of rounds or other clipping.
        """
        self.budget.load(state)
        if self.experiment.lost_rounds and state["correlated"] is not None:
            raise CheckpointError(
                "the noise of the lost rounds was shown and its state is lost: a training with "
                "correlated noise cannot go on without it (one that has correlated=None from its "
                "start can)"
            )
        self._insecure |= state["insecure"]
        self._trained = state["trained"]
        self.clipping_norm = state["clipping_norm"]
        self._participants.load(state["participants"], self.releases)
        self._correlated_state = state["correlated"]
        self._members.load(state.get("committee", {}))  # older checkpoints have none
