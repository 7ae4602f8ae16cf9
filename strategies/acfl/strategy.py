"""ACFL on the server: coded data once, then in each round gradients mixed with coded ones.

The model is one matrix. What the clients send is a gradient; the server makes the step.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_privacy.acfl.descent import ACFLDescent, effective_rate
from flwr_privacy.acfl.guarantee import guarantee_of, setup_privacy
from flwr_privacy.acfl.members import CodedMembers
from flwr_privacy.acfl.options import (
    DataBounds,
    Exact,
    NoisedRecords,
    NoisedSetup,
    SetupVariances,
    Weighting,
)
from flwr_privacy.acfl.own_rates import OwnRates
from flwr_privacy.acfl.plan import ACFLOptions
from flwr_privacy.acfl.sums import RoundSums, gradient_sum, round_sums, sums_of
from flwr_privacy.acfl.terms import NO_NOISE, RECORD, GradientTerms
from flwr_privacy.errors import (
    CheckpointError,
    InvalidParameterError,
    ProtocolError,
    check_flag,
    check_integer,
)
from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.keywords import check_options, check_usual, checked_keywords
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.secure_sum import Bounds
from flwr_privacy.strategies.budget import budget_metrics
from flwr_privacy.strategies.private_evaluation import (
    EvaluationRequest,
    PrivateEvaluations,
    check_evaluation,
)
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.request_log import ClientReply, arrays_of
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.message import EVALUATE, TRAIN

from .coded_setup import SETUP, CodedSetup

__all__ = ["ACFL"]

_USUAL_SHIFT = 200.0


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class ACFL(CodedSetup):
    """Linear regression from coded gradients and those that arrive in time (adaptive coded FL).

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `SchemeStrategy`.
    privacy : NoisedRecords, NoisedSetup, SetupVariances or Exact, default NoisedRecords()
        What has noise: `NoisedRecords`, the setup and all gradients, for a budget per record;
        `NoisedSetup` and `SetupVariances`, the setup alone, as printed, while the gradients are
        exact; `Exact`, nothing.
    weighting : Weighting, default Weighting()
        How a round weighs the coded gradient against the gradients that came.
    data : DataBounds, default DataBounds()
        The features and labels, and the bounds that they keep to.
    model_bound : float, optional
        C, for ``alpha="bounds"``, ``split="optimal"`` and `project`.
    project : bool, default False
        Whether the model is kept within the norm `model_bound` (Assumption 3).
    encoding : {"moments", "scfl"}, default "moments"
        ``scfl`` is the baseline of random projections; ``alpha`` is a number then, the paper's 0.5.
    symmetric_noise : bool, default False
        Whether the noise of X^T X is symmetric, which halves what is sent.
    symmetrize : bool, default False
        Whether the server makes the coded features symmetric.
    learning_rate : float, optional
        Step size; the loss is a sum over all records. By default one over the largest eigenvalue of
        the coded features plus `ridge`.
    schedule : {"constant", "inverse", "shifted"}, default "constant"
        How it falls: `flwr_privacy.acfl.steps.StepSize`.
    shift : float, optional
        Rounds after which the step of ``schedule="shifted"`` is half of the first one, by default
        200. Refused with other schedules, where it would have no effect.
    ridge : float, default 0.0
        mu of a term ``mu/2 |W|^2`` of the loss.
    batch_fraction : float, default 1.0
        Rate at which records are drawn for a gradient.
    rounds : int, optional
        Rounds over which the budget is spread; by default those of `start`. Needed where a `start`
        of your own runs the rounds.
    evaluation : PrivateEvaluation, optional
        Has clients evaluate the model on the data that they train on, with `NoisedRecords` and
        one-hot labels, a part of the budget set aside for it. The loss is half of the squared error
        of a record, and `loss_cap` its cap. By default clients are not asked to evaluate.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.

    Notes
    -----
    The model is the only array, W, of shape (features, labels); use float64. The setup is an
    exchange before the first round that waits for everybody; who does not answer it takes no part
    in the training, because its data would miss in the coded gradient. Clients that join later are
    set up then, but not into a secure sum. Clients send no metrics. They are asked to evaluate with
    `evaluation` only: under a secure sum those who sent gradients, otherwise `fraction_evaluate` of
    all.

    Guarantee
    ---------
    Adversary: an honest-but-curious server; with a secure sum also the clients that collude with
    it. With `NoisedRecords`: the setup, all gradients and all evaluations of the training are
    (epsilon, delta)-differentially private for data sets that differ in one record that is added or
    removed, by Gaussian differential privacy over the releases that each client charges to its own
    ledger; gradients are clipped per record. Under a secure sum the noise is in shares.
    With the paper's noise the guarantee of the paper (mutual information of one entry in one setup
    upload) is void against a server that sees the gradients: two rounds that a client answered, or
    a few more where the model has fewer columns than rows, give its X^T X and X^T Y exactly,
    whatever the noise (`flwr_privacy.simulations.research.acfl.linear_gradients`). Under a secure
    sum the server has sums of exact gradients: the moments of all clients together, and in a long
    training with changing stragglers those of single ones too. Not covered: who takes part and
    when, and that values lie within their bounds.

    Examples
    --------
    >>> from flwr_privacy.strategies import ACFL, DataBounds, LoopOptions, NoisedSetup, Weighting
    >>> data = DataBounds(feature_norm=1.0, one_hot=True)
    >>> strategy = ACFL(data=data, loop=LoopOptions(deadline=30.0))
    >>> as_printed = ACFL(
    ...     privacy=NoisedSetup(mi_epsilon=1.0),
    ...     weighting=Weighting(straggler_rate=0.2),
    ...     learning_rate=1e-4,
    ... )
    """

    privacy: NoisedRecords | NoisedSetup | SetupVariances | Exact = field(
        default_factory=NoisedRecords
    )
    weighting: Weighting = field(default_factory=Weighting)
    data: DataBounds = field(default_factory=DataBounds)
    model_bound: float | None = None
    project: bool = False
    encoding: Literal["moments", "scfl"] = "moments"
    symmetric_noise: bool = False
    symmetrize: bool = False
    learning_rate: float | None = None
    schedule: Literal["constant", "inverse", "shifted"] = "constant"
    shift: float | None = None
    ridge: float = 0.0
    batch_fraction: float = 1.0
    rounds: int | None = None
    evaluation: PrivateEvaluation | None = None

    scheme: ClassVar[str] = "acfl"
    metrics_phases: ClassVar[frozenset[str]] = frozenset()
    summable: ClassVar[bool] = True
    sum_phases: ClassVar[frozenset[str]] = frozenset({SETUP, TRAIN, EVALUATE})
    weight_key = "num-examples"  # the clients' own: 1

    def __post_init__(self) -> None:
        if self.rounds is not None:
            check_integer("rounds", self.rounds, minimum=1)
        check_options(ACFL, self, "evaluation")
        check_flag("project", self.project)
        check_flag("symmetrize", self.symmetrize)
        if self.shift is not None and self.schedule in ("constant", "inverse"):
            raise InvalidParameterError("shift", self.shift, "None without schedule='shifted'")
        self.options = ACFLOptions(
            privacy=self.privacy,
            weighting=self.weighting,
            data=self.data,
            model_bound=self.model_bound,
            encoding=self.encoding,
            symmetric_noise=self.symmetric_noise,
            batch_fraction=self.batch_fraction,
            evaluation=self.evaluation,
        )
        check_evaluation(self, self.evaluation)
        optimal = isinstance(self.privacy, NoisedSetup) and self.privacy.split == "optimal"
        if not (self.project or optimal or self.weighting.alpha == "bounds"):
            where = "without project, alpha='bounds' or split='optimal', which use it"
            check_usual(self, {"model_bound": None}, where)
        if self.project and self.inner is not None:
            raise InvalidParameterError("project", self.project, "false with an inner strategy")
        if self.learning_rate is None and not self.weighting.needs_setup:
            raise InvalidParameterError(
                "learning_rate", None, "a step size, where there are no coded data to tell it"
            )
        asked = self.fraction_evaluate if self.evaluation is not None else 0.0
        super().__post_init__()
        self.fraction_evaluate = asked
        if self.evaluation is not None and self.secure_sum and self.weighting.coded_only:
            raise InvalidParameterError(
                "alpha",
                self.weighting.alpha,
                "below 1 with a private evaluation under a secure sum: it is the second sum of a "
                "round, and the clients of its first one are those who sent gradients",
            )
        if self.secure_sum is not None and self.weighting.own_rates is not None:
            raise InvalidParameterError(
                "straggler_rate",
                dict(self.weighting.own_rates),
                "one rate of all under a secure sum",
            )

    def _build(self) -> None:
        super()._build()
        self.descent = ACFLDescent(
            weighting=self.weighting,
            noise=self.privacy.noise,
            model_bound=self.model_bound,
            project=self.project,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            shift=_USUAL_SHIFT if self.shift is None else self.shift,
            ridge=self.ridge,
        )
        if self.privacy.noise != RECORD:  # the ledgers have a noised setup, and the card has none
            self.heads.leave_out()
        self._set_up = CodedMembers(symmetrised=self.symmetrize and not self.symmetric_noise)
        self._done = 0  # the last round that is over
        self._terms: GradientTerms | None = None
        self._quorum: tuple[int, int, int] | None = None
        self._trained = False
        self._evaluations: PrivateEvaluations | None = None
        if self.evaluation is not None:
            self._evaluations = PrivateEvaluations(self, self.evaluation)

    # -- A round -----------------------------------------------------------------------------

    def train_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Ask for gradients and make a step; if none arrive, step by the coded data alone."""
        if self.newcomers:
            self._take_in(grid, server_round, self.newcomers)
        if self.weighting.coded_only or not self.prepared(grid, server_round):
            arrays, _ = self.model_step.configure(server_round, arrays, config)
            self._template = arrays_of(arrays)
            return self._stepped(server_round, None, MetricRecord())
        messages = self.configure_train(server_round, arrays, config, grid)
        replies = self.messenger.exchange(grid, messages, phase=TRAIN)
        return self.aggregate_train(server_round, replies)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the requests for gradients.

        Raises
        ------
        ProtocolError
            If there was no setup: under a `start` of your own, which does not know it.
        """
        if self.weighting.needs_setup and self._set_up.coded is None:
            raise ProtocolError(
                "there was no setup: ACFL works only where this strategy's own start runs the "
                "rounds, or with alpha = 0"
            )
        return super().configure_train(server_round, arrays, config, grid)

    def instruct(self, server_round: int) -> Instruction:
        """Return the terms; gradients are summed, scaled by each client's own rate."""
        terms = self._planned().gradient_terms(self._model(), parties=self._parties())
        self._terms = terms
        charge = terms.charge() if self.privacy.noise == RECORD else None
        instruction = Instruction(
            fields=records.write(terms),
            accumulator=partial(gradient_sum, terms),
            cost=lambda client: charge,
            forecast=partial(terms.forecast, self._planned_rounds() or 1) if charge else None,
        )
        if self._evaluations is not None:
            due = self._evaluations.due(server_round, rounds=self._planned().rounds)
            instruction = self._evaluations.summed_next(instruction, server_round, due=due)
        if self.weighting.own_rates is None:
            return instruction
        rates = self._own_rates(terms)
        return replace(instruction, accumulator=rates.accumulator, take=self._take_scaled)

    def _take_scaled(self, mean: WeightedMean, reply: ClientReply) -> None:
        """Add a gradient, scaled by its client's rate.

        Raises
        ------
        ReplyRefusedError
            If the reply cannot be used.
        """
        terms = self._asked_terms()
        alone = gradient_sum(terms)
        self.take(alone, reply)
        self._own_rates(terms).add(mean, reply.client_id, alone)

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the codes, noise included; every client weighs 1."""
        if self.secure_sum is None:
            raise ProtocolError("there is no secure sum")
        self.secure_sum.parties_of(len(clients))  # what clients would refuse ends the run
        return self.secure_sum.bounds(len(clients), code_limit=CODE_LIMIT, largest_weight=1)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the gradients as they arrive, and make a step."""
        mean, metrics = self.collect(TRAIN, replies)
        if mean is None:
            return self._stepped(server_round, None, MetricRecord())
        terms = self._asked_terms()
        if self.weighting.own_rates is None:
            found = round_sums(sums_of(mean, terms), len(mean.clients), terms)
        else:
            found = self._own_rates(terms).round_sums(mean, mean.clients)
        return self._stepped(server_round, found, metrics or MetricRecord())

    def _stepped(
        self, server_round: int, found: RoundSums | None, metrics: MetricRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after the step of a round (ACFL, (9) and (10)); None to keep it."""
        self._done, self._trained = server_round, False
        new = self.descent.step(
            self._model(),
            found,
            t=server_round,
            devices=self._devices(),
            share=self._asked_share(),
            coded=self._set_up.coded,
            asked=self._terms,
        )
        if new is None:
            return None, None
        self._trained = True
        (name,), (like,) = self._template.keys(), self._template.values()
        answered = 0 if found is None else found.answered
        renewed = {name: new.astype(like.dtype)}
        return self.renewed(server_round, renewed, metrics, max(1, answered)), metrics

    # -- An evaluation -----------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask clients for noised counts, if they evaluate; otherwise ask nobody."""
        if self._evaluations is None:
            return []
        plan, parties = self._planned(), 0
        if self.secure_sum is not None and self._terms is not None:
            parties = self._terms.parties
        due = self._evaluations.due(server_round, rounds=plan.rounds)
        self._evaluations.trained = self._trained and due
        request = EvaluationRequest(
            terms=plan.evaluation_terms(parties=parties),
            without=self._evaluations.used_up(plan.evaluations),
        )
        return self._evaluations.configure(grid, server_round, arrays, config, request)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics of an evaluation, with their intervals."""
        if self._evaluations is None:
            return None
        return self._evaluations.aggregate(server_round, replies)

    # -- The privacy card and the history ----------------------------------------------------

    def stop(self) -> str:
        """Return why the training ends: all rounds that the budget is planned for are done."""
        if self.privacy.noise != RECORD or self.rounds is None or self._done < self.rounds:
            return ""
        return f"the {self.rounds} rounds that the budget is for are done"

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the weights of the round, their inputs, and the epsilon spent."""
        numbers = dict(self.descent.numbers)
        if numbers and self.weighting.needs_setup:
            numbers["members"] = len(self.members)
        if self._set_up.terms is not None and self.privacy.noise != NO_NOISE:
            privacy = setup_privacy(self._set_up.terms, bound=self.options.bound)
            numbers |= {f"setup_{name}": value for name, value in privacy.items()}
        return numbers | budget_metrics(card)

    def guarantee(self) -> Guarantee:
        """Return the guarantee."""
        epsilon, delta = self.privacy.budget
        exact_rounds = 2
        if self._template:
            features, labels = self._model().shape
            exact_rounds = math.ceil(features / labels) + 1
        return guarantee_of(
            noise=self.privacy.noise,
            epsilon=epsilon,
            delta=delta,
            setup=self._set_up.terms,
            bound=self.options.bound,
            exact_rounds=exact_rounds,
            summed=self.secure_sum is not None,
            quorum=self._quorum,
            coded_only=self.weighting.coded_only,
            insecure=self._insecure,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the coded data, their clients, and the state of the weights."""
        return {
            "wish": self.options.lasting(),
            "rounds": self._planned_rounds(),
            **self._set_up.state(),
            "weights": self.descent.state(),
            "done": self._done,
            "insecure": self._insecure,
            "trained": self._trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        CheckpointError
            If it was made for another budget, other noise or other bounds.
        """
        mine = {**self.options.lasting(), "rounds": self._planned_rounds()}
        theirs = {**state["wish"], "rounds": state["rounds"]}
        for key, value in mine.items():
            if (other := theirs.get(key)) != value:
                raise CheckpointError(
                    f"the checkpoint has {key} = {other!r}, not {value!r}: what was set up and "
                    "charged cannot be changed"
                )
        self._insecure = state["insecure"]
        self._set_up.load(state)
        self.descent.load(state["weights"])
        self._done = state["done"]
        self._trained = state.get("trained", False)

    # -- Parts -------------------------------------------------------------------------------

    def _own_rates(self, terms: GradientTerms) -> OwnRates:
        """Return how to sum gradients of clients that have their own rates.

        Raises
        ------
        ProtocolError
            If there is one rate for all.
        """
        rates = effective_rate(self.weighting.straggler_rate, self._asked_share())
        if not isinstance(rates, Mapping):
            raise ProtocolError("there is one rate for all")
        return OwnRates(rates, terms)

    def _asked_terms(self) -> GradientTerms:
        if self._terms is None:
            raise ProtocolError("no gradients were asked for yet")
        return self._terms
