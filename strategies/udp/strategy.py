"""UDP on the server: computes the noise from a budget for the whole training.

The clients add the noise and keep the budget; the server plans it, adds up what they send, and
records the charges that the privacy card shows.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import (
    InvalidParameterError,
    ProtocolError,
    check_choice,
    check_integer,
)
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.secure_sum import Bounds
from flwr_privacy.strategies.loop.base import SchemeStrategy
from flwr_privacy.strategies.requests.instruction import Instruction, to_each
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.udp import (
    PLD_SECRET,
    USER_UNIT,
    Discounted,
    Discounting,
    LinearNoise,
    NoiseSchedule,
    PlateauNoise,
    RecordLevel,
    UDPPlan,
    UDPTerms,
    Uniform,
    UserLevel,
)
from flwr_privacy.udp.guarantee import guarantee_of
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.message import EVALUATE, TRAIN

from .judge import Judge
from .participants import Participants
from .together import check_together

__all__ = ["UDP"]

VISIBLE, SECRET = "visible", "secret"
FIXED, POISSON = "fixed", "poisson"

_OWN = ("noise-multiplier", "epsilon", "delta", "gap")  # what clients have of their own


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class UDP(SchemeStrategy):
    """Noise on the clients from a budget over the whole training (Wei et al., algorithms 1 and 2).

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `SchemeStrategy`.
    privacy : UserLevel or RecordLevel
        What is protected, with its budget and its noise: `UserLevel`, all data of a client, around
        any training; or `RecordLevel`, one record, with
        `flwr_privacy.clients.torch.train_per_record` inside the training.
    schedule : Discounting, LinearNoise or PlateauNoise, optional
        How the noise changes from round to round, where it does: `Discounting` of the rounds where
        the validation loss does not fall (algorithm 2), or Lei's decaying noise. `Discounting` and
        `PlateauNoise` take a judge of the model: a function on the server, or `ClientLosses`.
    client_sampling : {"fixed", "poisson"}, default "fixed"
        Whether a round asks a fixed number of clients, or each by itself with that number in
        expectation.
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
    whose number is public. Clients send no metrics of the training; of an evaluation only losses,
    with `ClientLosses`: `fraction_evaluate` has no effect.

    Guarantee
    ---------
    Adversary: an honest-but-curious server, and everybody who sees its messages. Each upload by
    itself is protected, whether it arrives in time or not; with `shared_noise` the sum of a round,
    against the server and the clients that collude with it. What binds a server that does not
    follow the protocol is the node's policy: see `flwr_privacy.clients.UDPClient`.
    Neighbours: at record level data of equal size that differ in one record; at user level any two
    data sets of one client.
    Covered: the uploads of the whole training, (epsilon, delta) per client, by Gaussian
    differential privacy over the releases that each client charges to its own ledger. A client
    declines what would exceed the budget of the experiment, so the rounds and the noise to come may
    follow from everything before.
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
    ...     schedule=Discounting(judge=lambda server_round, arrays: 0.0),
    ... )
    """

    privacy: UserLevel | RecordLevel
    schedule: Discounting | LinearNoise | PlateauNoise | None = None
    client_sampling: Literal["fixed", "poisson"] = "fixed"
    participants: Literal["visible", "secret"] = "visible"
    rounds: int | None = None
    keep_back: Sequence[str] | None = None

    scheme: ClassVar[str] = "udp"
    summable: ClassVar[bool] = True
    keeps_statistics: ClassVar[bool] = True
    weight_key = "num-examples"  # the clients' own: 1, or the number of records

    def __post_init__(self) -> None:
        if not isinstance(self.privacy, UserLevel | RecordLevel):
            allowed = "UserLevel(...) (all data of a client) or RecordLevel(...) (one record)"
            raise InvalidParameterError("privacy", self.privacy, allowed)
        if not isinstance(self.schedule, NoiseSchedule | None):
            allowed = "Discounting(...), LinearNoise(...), PlateauNoise(...) or None"
            raise InvalidParameterError("schedule", self.schedule, allowed)
        if self.rounds is not None:
            check_integer("rounds", self.rounds, minimum=1)
        self._judge = Judge(self.schedule)
        self._plan_of(rounds=1, q=1.0).check()
        self._drawn_by = check_choice("client_sampling", self.client_sampling, (FIXED, POISSON))
        self._participants_are = check_choice("participants", self.participants, (VISIBLE, SECRET))
        super().__post_init__()
        self._keep_back_given = self.keep_back
        self.fraction_evaluate = 1.0 if self._judge.are_clients else 0.0
        check_together(
            self.privacy,
            self.schedule,
            poisson=self._drawn_by == POISSON,
            secret=self._participants_are == SECRET,
            summed=self.secure_sum is not None,
            evaluate_metrics_fn=self._metrics_fns[EVALUATE],
        )
        self._accountant = "pld" if self.privacy.noise == PLD_SECRET else None
        if self.privacy.own_terms:
            self._only_with_start["a noise or budget of each client"] = True

    def _build(self) -> None:
        super()._build()
        self.plan: UDPPlan | None = None
        self.terms: UDPTerms | None = None
        self._taking_part = Participants(
            self.federation,
            alone=self._drawn_by == POISSON,
            secret=self._participants_are == SECRET,
        )
        self._cohort = 0  # of the last sum that was asked for with noise in shares
        self._squares: Counter[str] = Counter()  # what each client's trainings add up to
        self._counted = 0  # releases that are in it
        self._loss: float | None = None
        self._trained = False

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
        if isinstance(pace, Discounted) and pace.done == 0 and self._judge.is_server:
            pace.begin(self._judge.loss(0, arrays))
        return super().configure_train(server_round, arrays, config, grid)

    def instruct(self, server_round: int) -> Instruction:
        """Return the round config, with noise and budget of clients that have their own."""
        self._asked = True
        self._loss = None  # of the round before
        plan, honest = self._begun(), 0
        if self.secure_sum is not None and self.privacy.shared_noise:
            self._cohort = self.transport.cohort
            honest = self.secure_sum.parties_of(self._cohort)
        clients = self.privacy.named()
        if self.privacy.own_terms and not clients and self.federation.met:
            clients = self.federation.clients()
        terms, own_terms = plan.terms(clients, self._spent(), honest=honest)
        self.terms = terms
        written = {client: records.write(term) for client, term in own_terms.items()}
        charge = self._charged_as(terms)

        def cost(client: str) -> Charge | None:
            if not self.privacy.own_terms:
                return charge
            theirs = own_terms.get(client)
            if theirs is None:  # it was asked before the run broke off, and has left
                theirs = self._begun().own_terms(terms, client, self._spent()[client])
            return self._charged_as(theirs)

        def failed_sigma(clients: Collection[str]) -> float:
            return math.hypot(*(own_terms.get(c, terms).failed_sigma() for c in clients))

        return Instruction(
            fields=records.write(terms),
            own=to_each({c: {name: f[name] for name in _OWN} for c, f in written.items()}),
            accumulator=partial(terms.accumulator, self._template),
            cost=cost,
            charged=self._taking_part.charged,
            failed_sigma=failed_sigma if terms.count_failed else None,
            hidden=self._taking_part.secret,
        )

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the codes, noise included, and of the weights."""
        if self.secure_sum is None:
            raise ProtocolError("there is no secure sum")
        if (
            self.privacy.shared_noise
        ):  # what clients would refuse ends the run before they are asked
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
        if not self._judge.are_clients:
            # Before the checkpoint: a run that goes on gets the same bytes from the clients, whose
            # noise is their own, and any model made of them is paid for by what they charged.
            judged = arrays is not None and self._judge.is_server
            self._settle(self._judge.loss(server_round, arrays) if judged else None)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask all clients for their losses, if clients evaluate the model; otherwise ask nobody."""
        if not self._judge.are_clients or not self._trained:
            return []
        config = ConfigRecord({**config, "server-round": server_round})
        assigned = self.messenger.sample(grid, server_round, EVALUATE, fraction=1.0, minimum=0)
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        lacking, plan = self._without_budget(), self._begun()
        assigned = {
            node: kept
            for node, clients in assigned.items()
            if (kept := [client for client in clients if client not in lacking])
        }
        instruction = Instruction(
            fields=records.write(plan.loss_terms()),
            own=to_each({c: records.write(plan.loss_terms(c)) for c in self.privacy.named()}),
            accumulator=partial(WeightedMean, {}),
            cost=lambda client: plan.loss_terms(client).charge(),
        )
        return self.put(server_round, EVALUATE, content, assigned, instruction)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean loss; if clients evaluate the model, discount the rounds."""
        if not self._judge.are_clients:
            return None
        metrics = super().aggregate_evaluate(server_round, replies) if self._trained else None
        loss = None if metrics is None else metrics.get("loss")
        self._settle(float(loss) if isinstance(loss, int | float) else None)
        return metrics

    def stop(self) -> str:
        """Return why the training ends: all planned rounds are done."""
        pace = None if self.plan is None else self.plan.pace
        if pace is None or not pace.over or pace.done == 0:
            return ""
        if isinstance(pace, Discounted):
            return f"discounting left {pace.planned} of {pace.rounds} rounds, and they are done"
        return f"the {pace.planned} rounds that the budget is for are done"

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the budget of the client that spent most, the noise, T and the loss."""
        spent, cap = card.guarantee.spent, card.guarantee.epsilon
        numbers: dict[str, float] = {}
        if spent is not None and cap is not None:
            numbers |= {"epsilon": spent, "epsilon_left": max(0.0, cap - spent)}
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
        plan = self.plan or self._plan_of(rounds=self._planned(1), q=1.0)
        kept_back = set(self._template)
        if kept_back:
            kept_back -= set(released_names(self._template, self.keep_back or ()))
        quorum, secure_sum = None, self.secure_sum
        if secure_sum is not None and self._cohort:
            least = secure_sum.threshold_of(self._cohort)
            quorum = self._cohort, least, secure_sum.colluders_of(self._cohort)
        losses = ""
        if self._judge.are_clients:
            losses = "noised" if plan.validation_share else "bare"
        return guarantee_of(
            plan.weakest(),
            unit=self.privacy.unit,
            bound=self.privacy.sensitivity_bound,
            proven=self.privacy.one_step,
            quorum=quorum,
            shared=self.privacy.shared_noise,
            losses=losses,
            kept_back=kept_back,
            insecure=self._insecure,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the secret seed of the samples."""
        return {
            "plan": None if self.plan is None else self.plan.state(),
            "judged_by": self._judge.by,
            "loss": self._loss,
            "trained": self._trained,
            "insecure": self._insecure,
            "secret": self._taking_part.seed if self._taking_part.secret else b"",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the plan and the secret seed of the samples.

        Raises
        ------
        CheckpointError
            If it was made for another budget, another number of rounds, or another judge.
        """
        self._insecure, self._trained = state["insecure"], state["trained"]
        taking_part = self._taking_part
        taking_part.seed = state["secret"] or taking_part.seed
        if taking_part.secret:
            taking_part.known = {client for r in self.releases for client in r.clients}
        if state["plan"] is None:
            return
        self._judge.check_same(state["judged_by"])
        self.plan = self._plan_of(rounds=self._planned(), q=1.0)
        self.plan.load(state["plan"])
        self._loss = state["loss"]

    # -- Parts -------------------------------------------------------------------------------

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the clients of a round's training."""
        return self._taking_part.drawn(
            self.messenger,
            grid,
            server_round,
            fraction=self.fraction_train,
            minimum=self.min_train_nodes,
            without=self._without_budget(),
            seed=self.experiment.seed,
            q=lambda: self._begun().q,
        )

    def _without_budget(self) -> set[str]:
        if not self.privacy.own_budgets:
            return set()
        return set(self.federation.clients()).difference(self.privacy.named())

    def _planned(self, otherwise: int | None = None) -> int:
        """Return the number of rounds over which the budget is spread at first."""
        rounds = self.rounds or self.planned_rounds or otherwise
        if rounds is None:
            raise InvalidParameterError(
                "rounds", rounds, "the rounds to spread the budget over, under your own start"
            )
        return rounds

    def _begun(self) -> UDPPlan:
        """Return the plan; it is made once the number of clients is known."""
        if self.plan is None:
            asked, population = self.federation.sample_size(
                fraction=self.fraction_train, minimum=self.min_train_nodes
            )
            if asked == 0:
                raise InvalidParameterError(
                    "fraction_train", self.fraction_train, "some clients: nobody would be asked"
                )
            self.plan = self._plan_of(rounds=self._planned(), q=min(1.0, asked / population))
        return self.plan

    def _plan_of(self, *, rounds: int, q: float) -> UDPPlan:
        return UDPPlan(self.privacy, self.schedule, self.keep_back or (), rounds=rounds, q=q)

    def _settle(self, loss: float | None) -> None:
        """Record that a round is over, and the loss of its model."""
        plan = self._begun()
        if not plan.pace.over:
            self._loss = loss
            plan.settle(loss)

    def _spent(self) -> Counter[str]:
        """Return the budget that each client's trainings have spent; see `Schedule.multiplier`."""
        for release in self.releases[self._counted :]:
            if release.phase == TRAIN:
                cost = release.charge.count / release.charge.noise_multiplier**2
                self._squares.update(dict.fromkeys(release.clients, cost))
        self._counted = len(self.releases)
        return self._squares

    def _charged_as(self, terms: UDPTerms) -> Charge | None:
        """Return the charge of a training with some round config, by what the adversary sees."""
        charge = terms.charge()
        if charge is None or not self._taking_part.secret:
            return charge
        return replace(charge, sampling=self._begun().q)
