"""UDP on the server: computes the noise from a budget for the whole training.

The clients add the noise and keep the budget; the server plans it, adds up what they send, and
records the charges that the privacy card shows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_choice, check_integer
from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.keywords import check_options, checked_keywords
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.cohorts import BALANCED, FIXED, POISSON
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.updates import kept_back
from flwr_privacy.secure_sum import Bounds
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
from flwr_privacy.udp import (
    DPSGD,
    PLD_SECRET,
    USER_UNIT,
    Discounted,
    Discounting,
    LinearNoise,
    PlateauNoise,
    RecordLevel,
    UDPPlan,
    Uniform,
    UserLevel,
)
from flwr_privacy.udp.guarantee import guarantee_of
from flwr_privacy.udp.plan import TrainingTerms
from flwr_privacy.wire.message import EVALUATE, TRAIN

from .option_checks import check_combinations, check_evaluated
from .training_request import SpentBudgets, training_request
from .validation import client_losses, server_loss

__all__ = ["UDP"]


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class UDP(SchemeStrategy):
    """Noise on the clients from a budget over the whole training (Wei et al., algorithms 1 and 2).

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `SchemeStrategy`.
    privacy : UserLevel, RecordLevel or DPSGD
        What is protected, with its budget and its noise: `UserLevel`, all data of a client, around
        any training; `RecordLevel`, one record, with
        `flwr_privacy.clients.torch.train_per_record` inside the training; or `DPSGD`, one record,
        by noise in every step of a loop around `flwr_privacy.clients.torch.private_training`.
    schedule : Discounting, LinearNoise or PlateauNoise, optional
        How the noise changes from round to round, where it does: `Discounting` of the rounds where
        the validation loss does not fall (algorithm 2), or Lei's decaying noise. `Discounting` and
        `PlateauNoise` follow a validation loss: of a function on the server, or `ClientLosses`.
    client_sampling : {"fixed", "balanced", "poisson"}, default "balanced"
        Whether a round asks a fixed number of clients (a random set, or with ``balanced`` those
        that have waited longest, which takes less noise), or each by itself with that number in
        expectation: see `flwr_privacy.privacy.cohorts`.
    participants : {"visible", "secret"}, default "visible"
        Whether it may become known who takes part in a round; ``noise="pld_secret"`` needs them
        secret, with ``client_sampling="poisson"``, from everybody but the server.
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

    Attributes
    ----------
    T_history : list of int
        The rounds planned, T, before the first round and after each.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.

    Notes
    -----
    At user level an answer does not say whether its training failed: that is counted with noise
    (`flwr_privacy.privacy.failures`), but for ``noise="paper"`` and ``noise="none"``. The history
    has ``trained`` and ``trained_sigma`` for each round, and `start` raises `TooFewTrainedError`
    where it is certain that fewer than `LoopOptions.quorum` train (by default half of the answers).

    At user level every client weighs the same; at record level it weighs as many as its records,
    whose number is public. Clients send no metrics of the training. Of an evaluation they send
    noised counts, with `evaluation`, to which `fraction_evaluate` and `min_evaluate_nodes` apply
    (under a secure sum those evaluate who trained); or losses, with `ClientLosses`. With neither,
    clients are not asked to evaluate, whatever `fraction_evaluate` is.

    Guarantee
    ---------
    Adversary: an honest-but-curious server, and everybody who sees its messages. Each upload by
    itself is protected, whether it arrives in time or not; with `shared_noise` the sum of a round,
    against the server and the clients that collude with it. With `DPSGD` the noise is in the steps
    and the update of all of them has no more: `flwr_privacy.udp.PrivateStepsTerms`. What binds a
    server whose messages do not follow the protocol is the node's policy: see
    `flwr_privacy.clients.UDPClient`.
    Neighbours: at record level data of equal size that differ in one record; at user level any two
    data sets of one client.
    Covered: the uploads of the whole training and its evaluations together, (epsilon, delta) per
    client, by Gaussian differential privacy over the releases that each client charges to its own
    ledger. A client declines what would exceed the budget of the experiment, so the rounds and the
    noise to come may follow from everything before. What an evaluation assumes of the app says
    `flwr_privacy.evaluation.EvaluationTerms`.
    Not covered: the number of a client's records (record level); whether and when it takes part,
    declines or fails; what the user's own code sends elsewhere; timing. With ``noise="paper"`` the
    budget that was asked for is missed where formula (10) is too small; the guarantee then has the
    true figure, and with `ClientLosses` the losses that clients report have no noise and no
    promise at all (``unprotected_test_loss``). With ``noise="pld_secret"`` the adversary is
    somebody who does not learn who takes part, which the server does. With
    ``sensitivity_bound="unproven"`` and with ``noise="none"`` nothing is guaranteed.

    Examples
    --------
    >>> from flwr_privacy.strategies import UDP, Discounting, RecordLevel, UserLevel
    >>> strategy = UDP(fraction_train=0.5, privacy=UserLevel(epsilon=8.0, clipping_norm=0.5))
    >>> discounting = UDP(
    ...     privacy=RecordLevel(learning_rate=0.1),
    ...     schedule=Discounting(validation=lambda server_round, arrays: 0.0),
    ... )
    """

    privacy: UserLevel | RecordLevel | DPSGD
    schedule: Discounting | LinearNoise | PlateauNoise | None = None
    client_sampling: Literal["fixed", "balanced", "poisson"] = "balanced"
    participants: Literal["visible", "secret"] = "visible"
    rounds: int | None = None
    keep_back: Sequence[str] | None = None
    trainable: Sequence[str] | None = None
    evaluation: PrivateEvaluation | None = None

    scheme: ClassVar[str] = "udp"
    metrics_phases: ClassVar[frozenset[str]] = frozenset()
    summable: ClassVar[bool] = True
    sum_phases: ClassVar[frozenset[str]] = frozenset({TRAIN, EVALUATE})
    keeps_statistics: ClassVar[bool] = True
    weight_key = "num-examples"  # the clients' own: 1, or the number of records

    def __post_init__(self) -> None:
        check_options(UDP, self, "privacy", "schedule", "evaluation")
        check_evaluated(self.privacy, self.schedule, self.evaluation)
        check_evaluation(self, self.evaluation)
        if self.rounds is not None:
            check_integer("rounds", self.rounds, minimum=1)
        check_choice("client_sampling", self.client_sampling, (FIXED, BALANCED, POISSON))
        plan = self._plan_of(rounds=1, q=1.0)
        plan.check()
        self._clients_validate = plan.losses is not None
        check_choice("participants", self.participants, ("visible", "secret"))
        self._alone = self.client_sampling == POISSON
        self._secret = self.participants == "secret"
        asked = self.fraction_evaluate if self.evaluation is not None else 0.0
        super().__post_init__()
        self._keep_back_given = self.keep_back
        self.use_trainable(self.trainable)
        self.fraction_evaluate = 1.0 if self._clients_validate else asked
        check_combinations(
            self.privacy,
            self.schedule,
            alone=self._alone,
            secret=self._secret,
            summed=self.secure_sum is not None,
        )
        self._accountant = "pld" if self.privacy.noise == PLD_SECRET else None
        if self.privacy.own_terms:
            self._only_with_start["a noise or budget of each client"] = True

    def _build(self) -> None:
        super()._build()
        self.plan: UDPPlan | None = None
        self.terms: TrainingTerms | None = None
        self._participants = Participants(
            self.federation, cohorts=self.client_sampling, secret=self._secret
        )
        if self._secret:  # everybody is charged; the ledgers have what their clients were asked
            self.heads.leave_out()
        self._cohort = 0  # of the last sum that was asked for with noise in shares
        self._spent = SpentBudgets()
        self._loss: float | None = None
        self._trained = False
        self._evaluations: PrivateEvaluations | None = None
        if self.evaluation is not None:
            self._evaluations = PrivateEvaluations(self, self.evaluation)

    @property
    def T_history(self) -> list[int]:
        """The rounds planned, T, before the first round and after each."""
        return [] if self.plan is None else list(self.plan.T_history)

    # -- A round -----------------------------------------------------------------------------

    def setup(self, grid: Grid) -> None:
        """Check that every client has a budget.

        Raises
        ------
        InvalidParameterError
            If one has none. One that comes later without a budget is not asked.
        """
        for name, clients in self.privacy.lacking(self.federation.clients()).items():
            raise InvalidParameterError(name, clients, "a budget for each of these clients")

    def train_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train one round; it counts as done if secret sharing for its sum fails."""
        self._asked = False
        trained = super().train_round(grid, server_round, arrays, config)
        if not self._asked:
            self._trained = False
            self._settle(None)
        return trained

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample clients and return the messages to them; none once the training is over."""
        if not self.federation.met:  # a user's own start: the first replies will be the hello
            self.federation.wait(grid, self.messenger.timeout)
        pace = self._begun().pace
        if pace.over and server_round == 1:
            raise ProtocolError("this strategy has done a training: make a new one for another")
        if pace.over:
            return []
        if isinstance(pace, Discounted) and pace.done == 0:
            loss = server_loss(self.schedule, 0, self.whole(arrays))
            if loss is not None:
                pace.begin(loss)
        return super().configure_train(server_round, arrays, config, grid)

    def instruct(self, server_round: int) -> Instruction:
        """Return the terms, with noise and budget of clients that have their own."""
        self._asked = True
        self._loss = None  # of the round before
        honest = 0
        if self.secure_sum is not None and self.privacy.shared_noise:
            self._cohort = self.transport.cohort
            honest = self.secure_sum.parties_of(self._cohort)
        clients = self.privacy.named()
        if self.privacy.own_terms and not clients and self.federation.met:
            clients = self.federation.clients()
        self.terms, instruction = training_request(
            self._begun(),
            self._template,
            self._participants,
            clients=clients,
            spent=lambda: self._spent.after(self.releases),
            honest=honest,
        )
        if self._evaluations is not None:
            due = self._evaluated(server_round)
            instruction = self._evaluations.summed_next(instruction, server_round, due=due)
        return instruction

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the codes, noise included, and of the weights."""
        if self.secure_sum is None:
            raise ProtocolError("there is no secure sum")
        if self.privacy.shared_noise:
            # What clients would refuse ends the run before they are asked.
            self.secure_sum.parties_of(len(clients))
        alike = self.privacy.shared_noise or self.privacy.unit == USER_UNIT
        return self.secure_sum.bounds(
            len(clients), code_limit=CODE_LIMIT, largest_weight=1 if alike else None
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the replies; if the server evaluates the model, discount the rounds."""
        if self._begun().pace.over:  # under a user's own start, which goes on
            self._trained = False
            return None, None
        arrays, metrics = super().aggregate_train(server_round, replies)
        self._trained = arrays is not None
        if not self._clients_validate:
            # Before the checkpoint: a run that goes on gets the same bytes from the clients, whose
            # noise is their own, and any model made of them is paid for by what they charged.
            shown = None if arrays is None else self.whole(arrays)
            self._settle(server_loss(self.schedule, server_round, shown))
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask clients for noised counts or losses, if they evaluate; otherwise ask nobody."""
        if self._evaluations is not None:
            self._evaluations.trained = self._trained and self._evaluated(server_round)
            request = self._evaluation_request()
            return self._evaluations.configure(grid, server_round, arrays, config, request)
        if not self._clients_validate or not self._trained:
            return []
        config = ConfigRecord({**config, "server-round": server_round})
        assigned = self.messenger.sample(grid, server_round, EVALUATE, fraction=1.0, minimum=0)
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        lacking = self._without_budget()
        assigned = {
            node: kept
            for node, clients in assigned.items()
            if (kept := [client for client in clients if client not in lacking])
        }
        return self.put(server_round, EVALUATE, content, assigned, client_losses(self._begun()))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return what clients say of the model; if it is losses, discount the rounds."""
        if self._evaluations is not None:
            return self._evaluations.aggregate(server_round, replies)
        if not self._clients_validate:
            return None
        metrics = super().aggregate_evaluate(server_round, replies) if self._trained else None
        loss = None if metrics is None else metrics.get("loss")
        self._settle(float(loss) if isinstance(loss, int | float) else None)
        return metrics

    def stop(self) -> str:
        """Return why the training ends: all planned rounds are done."""
        return "" if self.plan is None else self.plan.ended

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the budget of the client that spent most, the noise, T and the loss."""
        numbers = budget_metrics(card)
        if self.terms is not None:
            numbers["noise_multiplier"] = self.terms.noise_multiplier
        if self.plan is not None and not isinstance(self.plan.pace, Uniform):
            numbers["T"] = self.plan.pace.planned
        if self._loss is not None:
            numbers["V"] = self._loss
        return numbers

    # -- The guarantee, and the state of a resume --------------------------------------------

    def guarantee(self) -> Guarantee:
        """Return the guarantee; before the first round it states the requested budget."""
        plan = self.plan or self._plan_of(rounds=self.rounds or self.planned_rounds or 1, q=1.0)
        quorum = None
        if self.secure_sum is not None and self._cohort:
            quorum = self.secure_sum.quorum_of(self._cohort)
        return guarantee_of(
            plan,
            quorum=quorum,
            kept_back=kept_back(self._template, self.keep_back),
            insecure=self._insecure,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the secret seed of the samples."""
        return {
            "plan": None if self.plan is None else self.plan.state(),
            "loss": self._loss,
            "trained": self._trained,
            "insecure": self._insecure,
            "participants": self._participants.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the plan and the secret seed of the samples.

        Raises
        ------
        CheckpointError
            If it was made for another budget, another number of rounds, or another validation.
        """
        self._insecure, self._trained = state["insecure"], state["trained"]
        self._participants.load(state["participants"], self.releases)
        if state["plan"] is None:
            return
        self.plan = self._plan_of(rounds=rounds_of(self.rounds, self.planned_rounds), q=1.0)
        self.plan.load(state["plan"])
        self._loss = state["loss"]

    # -- Parts -------------------------------------------------------------------------------

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the clients of a round's training."""
        return self._participants.drawn(
            self.messenger,
            grid,
            server_round,
            fraction=self.fraction_train,
            minimum=self.min_train_nodes,
            without=self._without_budget(),
            public_seed=self.experiment.seed,
            q=lambda: self._begun().q,
        )

    def _evaluated(self, server_round: int) -> bool:
        rounds = rounds_of(self.rounds, self.planned_rounds)
        return self._evaluations is not None and self._evaluations.due(server_round, rounds=rounds)

    def _evaluation_request(self) -> EvaluationRequest:
        """Return what clients are asked in an evaluation."""
        plan, evaluations = self._begun(), self._evaluations
        honest = self.terms.parties if self.terms is not None else 0
        without = self._without_budget()
        if evaluations is not None and plan.evaluations is not None:
            without |= evaluations.used_up(plan.evaluations)
        if self.privacy.sampling_rate != 1:
            # A ledger goes by its oldest charge: after that of a sample it adds up both kinds.
            without |= set(self.federation.clients()) - self._that_trained()
        terms = plan.evaluation_terms(honest=honest)
        own = {client: plan.evaluation_terms(client) for client in self.privacy.named()}
        # One grid for all, the finest that one of them needs: their codes are added up.
        grid = min(each.grid for each in (terms, *own.values()))
        return EvaluationRequest(
            terms=replace(terms, grid=grid),
            own={client: replace(each, grid=grid) for client, each in own.items()},
            without=without,
        )

    def _that_trained(self) -> set[str]:
        """Return the clients that have answered in a training."""
        trainings = (release for release in self.releases if release.phase == TRAIN)
        trained = {c for r in trainings for c in set(r.clients).difference(r.unanswered or ())}
        return self.charge_log.with_addresses(trained)

    def _without_budget(self) -> set[str]:
        return set().union(*self.privacy.lacking(self.federation.clients()).values())

    def _begun(self) -> UDPPlan:
        """Return the plan; it is made once the number of clients is known."""
        if self.plan is None:
            asked, population = self.messenger.sampler.sample_size(
                fraction=self.fraction_train, minimum=self.min_train_nodes
            )
            if asked == 0:
                raise InvalidParameterError(
                    "fraction_train", self.fraction_train, "some clients: nobody would be asked"
                )
            rounds, evaluating = rounds_of(self.rounds, self.planned_rounds), 0
            if self.evaluation is not None and self.secure_sum is None:
                evaluating, _ = self.messenger.sampler.sample_size(
                    fraction=self.fraction_evaluate, minimum=self.min_evaluate_nodes
                )
            self.plan = self._plan_of(
                rounds=rounds,
                q=min(1.0, asked / population),
                evaluation_q=min(1.0, evaluating / population),
            )
        return self.plan

    def _plan_of(self, *, rounds: int, q: float, evaluation_q: float = 0.0) -> UDPPlan:
        return UDPPlan(
            self.privacy,
            self.schedule,
            self.keep_back or (),
            self.evaluation,
            rounds=rounds,
            q=q,
            evaluation_q=evaluation_q,
            cohorts=self.client_sampling,
        )

    def _settle(self, loss: float | None) -> None:
        """Record that a round is over, and the loss of its model."""
        plan = self._begun()
        if not plan.pace.over:
            self._loss = loss
            plan.settle(loss)
