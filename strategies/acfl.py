"""ACFL on the server: coded data once, then gradients, mixed as the stragglers leave them.

The model is one matrix. What the clients send is a gradient; the server makes the step.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid as FlowerGrid
from numpy.typing import NDArray

from flwr_privacy import fields as records
from flwr_privacy.acfl.descent import CodedData, Descent, effective_rate
from flwr_privacy.acfl.encoding import Moments
from flwr_privacy.acfl.features import FeatureMap
from flwr_privacy.acfl.plan import Plan, Wish
from flwr_privacy.acfl.promise import promise, setup_privacy
from flwr_privacy.acfl.sums import (
    GRADIENT,
    SIZE,
    Heard,
    coded_sum,
    gradient_sum,
    heard,
    moments_of,
    sums_of,
)
from flwr_privacy.acfl.terms import (
    NO_NOISE,
    RAW,
    RECORD,
    GradientTerms,
    SetupTerms,
)
from flwr_privacy.averaging import EvenWeights, ReplyRefusedError, WeightedMean
from flwr_privacy.card import PrivacyCard
from flwr_privacy.errors import (
    CheckpointError,
    InvalidParameterError,
    ProtocolError,
    check_flag,
    check_integer,
)
from flwr_privacy.grid import CODE_LIMIT
from flwr_privacy.guarantee import Guarantee
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.secure_sum import Bounds, NotOpenedError
from flwr_privacy.wire import TRAIN

from .base import SchemeStrategy
from .conversation import Assigned, only
from .instruction import Instruction
from .round import ClientReply, arrays_of

__all__ = ["ACFL"]

logger = logging.getLogger("flwr.privacy")

SETUP = "setup"


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class ACFL(SchemeStrategy):
    """Linear regression by coded gradients and those that come in time (adaptive coded FL).

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `SchemeStrategy`.
    noise : {"record", "paper", "none"}, default "record"
        What is noised. ``record``: the setup and all gradients, for a budget per record. ``paper``:
        the setup alone, as printed; the gradients are exact. ``none``: nothing.
    epsilon, delta : float, default 8.0 and 1e-5
        Budget of a record over the whole training, with ``noise="record"``.
    setup_share : float, default 0.5
        Share of the budget (of mu squared, see `flwr_privacy.acfl.plan.Plan`) for the setup.
    mi_epsilon : float, optional
        With ``noise="paper"``: level in nats of the mutual information that the setup upload of a
        client may give away of an entry; the variances follow (ACFL, (17)). By default 1, unless
        `sigma1_sq` and `sigma2_sq` are given.
    bound : {"paper", "tight"}, default "paper"
        Which bound of it: (17), or a smaller one that is proven too.
    split : {"equal", "optimal"}, default "equal"
        Whether both variances are equal, or best for a model of norm `model_bound`.
    sigma1_sq, sigma2_sq : float, optional
        The variances themselves, of the entries of X^T X and X^T Y.
    alpha : {"estimated", "bounds", "horizon"} or float, default "estimated"
        Weight of the coded gradient: `flwr_privacy.acfl.weights.AlphaPolicy`. A number is a fixed
        weight: 0.5 is the paper's NA, 0 rescales what came and needs no setup, 1 uses the coded
        data alone and asks for no gradient.
    predictable : bool, default False
        Whether a round is weighed by what was seen before it.
    straggler_rate : float or dict, optional
        Probability that a client does not answer in time, of all or of each by its name; by default
        estimated. With ``alpha=0`` and a rate of 0 stragglers are ignored.
    gradient_bound, model_bound : float, optional
        beta and C, for ``alpha="bounds"``.
    project : bool, default False
        Whether the model is kept within the norm `model_bound` (Assumption 3).
    encoding : {"moments", "scfl"}, default "moments"
        ``scfl`` is the baseline of random projections; ``alpha`` is a number then, the paper's 0.5.
    symmetric_noise : bool, default False
        Whether the noise of X^T X is symmetric, which halves what is sent.
    symmetrize : bool, default False
        Whether the server makes the coded features symmetric.
    feature_bound, label_bound : float, default 1.0
        Bounds of an entry (Assumption 1); that of the features by default what a feature map has.
    feature_norm, label_norm : float, optional
        Bounds of the L2 norm of a row; by default what a feature map has, one-hot labels have, or
        the bounds of the entries allow. The noise of ``noise="record"`` follows from them.
    features : FeatureMap or str, optional
        What makes features of the clients' raw data, or its identity; every client must have the
        same. By default their data are features.
    one_hot : bool, default False
        Whether labels must be one-hot, for classification.
    learning_rate : float, optional
        Step size; the loss is a sum over all records. By default one over the largest eigenvalue of
        the coded features plus `ridge`.
    schedule : {"constant", "inverse", "shifted"}, default "constant"
        How it falls: `flwr_privacy.acfl.steps.StepSize`.
    shift : float, default 200.0
        Of ``schedule="shifted"``, in rounds.
    ridge : float, default 0.0
        mu of a term ``mu/2 |W|^2`` of the loss.
    clipping_norm : float, default 1.0
        L2 bound of the gradient of a record, with ``noise="record"``.
    batch_fraction : float, default 1.0
        Rate at which records are drawn for a gradient.
    max_records : int, default 16384
        Most records of a client: codes have room for so many.
    rounds : int, optional
        Rounds over which the budget is spread; by default those of `start`. Needed where a `start`
        of your own runs the rounds.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.

    Notes
    -----
    The model is the only array, W, of shape (features, labels); use float64. The setup is an
    exchange before the first round that waits for everybody; who does not answer it takes no part
    in the training, because its data would miss in the coded gradient. Clients that join later are
    set up then, but not into a secure sum. Clients send no metrics and are not asked to evaluate.

    Guarantee
    ---------
    Adversary: an honest-but-curious server; with a secure sum also the clients that collude with
    it. With ``noise="record"``: the setup and all gradients of the training are
    (epsilon, delta)-differentially private for data sets that differ in one record that is added or
    removed, by Gaussian differential privacy over the releases that each client charges to its own
    ledger; gradients are clipped per record. Under a secure sum the noise is in shares.
    With ``noise="paper"`` the promise of the paper (mutual information of one entry in one setup
    upload) is void against a server that sees the gradients: two rounds that a client answered, or
    a few more where the model has fewer columns than rows, give its X^T X and X^T Y exactly,
    whatever the noise (`flwr_privacy.attacks.linear_gradients`). Under a secure sum the server has
    sums of exact gradients: the moments of all clients together, and in a long training with
    changing stragglers those of single ones too.
    Not covered: who takes part and when, and that values lie within their bounds.

    Examples
    --------
    >>> from flwr_privacy.strategies import ACFL, LoopOptions
    >>> strategy = ACFL(feature_norm=1.0, one_hot=True, loop=LoopOptions(deadline=30.0))
    >>> as_printed = ACFL(noise="paper", mi_epsilon=1.0, straggler_rate=0.2, learning_rate=1e-4)
    """

    noise: Literal["record", "paper", "none"] = "record"
    epsilon: float = 8.0
    delta: float = 1e-5
    setup_share: float = 0.5
    mi_epsilon: float | None = None
    bound: Literal["paper", "tight"] = "paper"
    split: Literal["equal", "optimal"] = "equal"
    sigma1_sq: float | None = None
    sigma2_sq: float | None = None
    alpha: Literal["estimated", "bounds", "horizon"] | float = "estimated"
    predictable: bool = False
    straggler_rate: float | Mapping[str, float] | None = None
    gradient_bound: float | None = None
    model_bound: float | None = None
    project: bool = False
    encoding: Literal["moments", "scfl"] = "moments"
    symmetric_noise: bool = False
    symmetrize: bool = False
    feature_bound: float | None = None
    label_bound: float = 1.0
    feature_norm: float | None = None
    label_norm: float | None = None
    features: FeatureMap | str | None = None
    one_hot: bool = False
    learning_rate: float | None = None
    schedule: Literal["constant", "inverse", "shifted"] = "constant"
    shift: float = 200.0
    ridge: float = 0.0
    clipping_norm: float = 1.0
    batch_fraction: float = 1.0
    max_records: int = 2**14
    rounds: int | None = None

    scheme: ClassVar[str] = "acfl"
    summable: ClassVar[bool] = True
    sum_phases: ClassVar[frozenset[str]] = frozenset({SETUP, TRAIN})
    weight_key = "num-examples"  # the clients' own: 1

    def __post_init__(self) -> None:
        if self.rounds is not None:
            check_integer("rounds", self.rounds, minimum=1)
        self._rounds = self.rounds
        flags = {
            "predictable": self.predictable,
            "project": self.project,
            "symmetrize": self.symmetrize,
        }
        for name, flag in flags.items():
            check_flag(name, flag)
        self._wish = Wish(
            noise=self.noise,
            epsilon=self.epsilon,
            delta=self.delta,
            setup_share=self.setup_share,
            mi_epsilon=self.mi_epsilon,
            bound=self.bound,
            split=self.split,
            sigma1_sq=self.sigma1_sq,
            sigma2_sq=self.sigma2_sq,
            alpha=self.alpha,
            model_bound=self.model_bound,
            encoding=self.encoding,
            symmetric_noise=self.symmetric_noise,
            feature_bound=_bound_of(self.features, "bound", self.feature_bound, otherwise=1.0),
            label_bound=self.label_bound,
            feature_norm=_bound_of(self.features, "norm", self.feature_norm),
            label_norm=self.label_norm,
            feature_map=_identity(self.features),
            one_hot=self.one_hot,
            clipping_norm=self.clipping_norm,
            batch_fraction=self.batch_fraction,
            max_records=self.max_records,
        )
        self._symmetrised = self.symmetrize and not self.symmetric_noise
        if self.project and self.inner is not None:
            raise InvalidParameterError("project", self.project, "false with an inner strategy")
        if self.learning_rate is None and not self._wish.needs_setup:
            raise InvalidParameterError(
                "learning_rate", None, "a step size, where there are no coded data to tell it"
            )
        self._rate = self.straggler_rate
        self._steps: dict[str, Any] = {
            "policy": self.alpha,
            "straggler_rate": self.straggler_rate,
            "predictable": self.predictable,
            "gradient_bound": self.gradient_bound,
            "model_bound": self.model_bound,
            "learning_rate": self.learning_rate,
            "schedule": self.schedule,
            "shift": self.shift,
            "ridge": self.ridge,
            "project": self.project,
        }
        super().__post_init__()
        self.fraction_evaluate = 0.0
        if self.secure_sum is not None and isinstance(self.straggler_rate, Mapping):
            raise InvalidParameterError(
                "straggler_rate", dict(self.straggler_rate), "one rate of all under a secure sum"
            )

    def _build(self) -> None:
        super()._build()
        self.descent = Descent(**self._steps)
        self._coded: CodedData | None = None
        self.members: list[str] = []
        self._done = 0  # the last round that is over
        self._setup_terms: SetupTerms | None = None
        self._terms: GradientTerms | None = None
        self._quorum: tuple[int, int, int] | None = None

    @property
    def coded(self) -> Moments | None:
        """The global coded data set, once there is one."""
        return None if self._coded is None else self._coded.moments

    # -- The setup ---------------------------------------------------------------------------

    def setup(self, grid: FlowerGrid) -> None:
        """Have every client encode its data, once for an experiment.

        Raises
        ------
        ProtocolError
            If no client does, or too few for a secure sum.
        InvalidParameterError
            If the noise is too little for the codes, or there is no one matrix to train.
        """
        self._check_begin()
        if not self._wish.needs_setup:
            return
        if self._coded is not None:  # resumed; clients may have come meanwhile
            self._take_in(grid, 0, self.federation.clients())
            return
        with self.conversation.patiently():
            try:
                self.transport.prepare(grid, 0)
            except NotOpenedError as error:
                raise ProtocolError(f"the setup cannot be summed: {error}") from error
            self._ask_for_codes(grid, 0, self.transport.clients(grid, 0))
        if self._coded is None:
            said = "; ".join(self.conversation.book(SETUP).details) or "their sum was not opened"
            raise ProtocolError(f"the setup failed, there are no coded data: {said}")

    def _take_in(self, grid: FlowerGrid, server_round: int, clients: list[str]) -> None:
        """Have clients that come later encode their data; a secure sum has no place for them."""
        if lacking := sorted(self._without_rate().intersection(clients)):
            logger.warning("clients %s have no straggler_rate and take no part", lacking)
        new = set(clients) - set(self.members) - self._without_rate()
        if not self._wish.needs_setup or not new:
            return
        if self.secure_sum is not None:
            logger.warning("clients %s came after the setup and take no part", sorted(new))
            return
        self._ask_for_codes(grid, server_round, only(self._everybody(grid, server_round), new))

    def _check_begin(self) -> None:
        """Refuse what would fail later, before anything is asked or charged.

        Raises
        ------
        InvalidParameterError
            If the model is no finite matrix, a client has no rate, or a secure sum does not fit
            the clients of a round.
        """
        self._model()
        if lacking := sorted(self._without_rate()):
            raise InvalidParameterError(
                "straggler_rate", "a dict", f"a rate for every client, {lacking} among them"
            )
        if self.secure_sum is not None and not self._wish.coded_only:
            asked, _ = self.federation.sample_size(
                fraction=self.fraction_train, minimum=self.min_train_nodes
            )
            self.secure_sum.bounds(asked, code_limit=CODE_LIMIT, largest_weight=1)

    def _ask_for_codes(self, grid: FlowerGrid, server_round: int, assigned: Assigned) -> None:
        self._setup_terms = terms = self._planned().setup_terms(parties=self._parties())
        self.announce()
        set_up = {c for r in self.releases if r.phase == SETUP for c in r.clients}
        charge = terms.charge() if self._wish.noise == RECORD else None
        instruction = Instruction(
            fields=records.write(terms),
            accumulator=partial(coded_sum, terms),
            # Whoever is asked again sends the same bytes.
            cost=lambda client: None if client in set_up else charge,
        )
        mean, _ = self.ask(grid, server_round, SETUP, RecordDict(), assigned, instruction)
        asked = {client for clients in assigned.values() for client in clients}
        came = set() if mean is None else set(mean.clients)
        if missing := sorted(asked - came):
            logger.warning("no setup came from %s: they take no part in the training", missing)
        if mean is None:
            return
        moments = moments_of(sums_of(mean, terms), terms)
        if self._coded is None:
            self._coded = CodedData(
                moments=moments, terms=terms, devices=len(came), symmetrised=self._symmetrised
            )
        else:
            self._coded = self._coded.joined(moments, len(came))
        self.members = sorted({*self.members, *came})
        self.descent.renew()

    # -- A round -----------------------------------------------------------------------------

    def train_round(
        self, grid: FlowerGrid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Ask for gradients and make a step; without any, one by the coded data alone."""
        if self.newcomers:
            self._take_in(grid, server_round, self.newcomers)
        if self._wish.coded_only or not self.prepared(grid, server_round):
            arrays, _ = self.model_step.configure(server_round, arrays, config)
            self._template = arrays_of(arrays)
            return self._stepped(server_round, None, MetricRecord())
        messages = self.configure_train(server_round, arrays, config, grid)
        replies = self.conversation.exchange(grid, messages, phase=TRAIN)
        return self.aggregate_train(server_round, replies)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: FlowerGrid
    ) -> list[Message]:
        """Return the questions for gradients.

        Raises
        ------
        ProtocolError
            If there was no setup: under a `start` of your own, which does not know it.
        """
        if self._wish.needs_setup and self._coded is None:
            raise ProtocolError(
                "there was no setup: ACFL works only where this strategy's own start runs the "
                "rounds, or with alpha = 0"
            )
        return super().configure_train(server_round, arrays, config, grid)

    def instruct(self, server_round: int) -> Instruction:
        """Return the terms of a round; gradients are added up, scaled by each client's own rate."""
        terms = self._planned().gradient_terms(self._model(), parties=self._parties())
        self._terms = terms
        charge = terms.charge() if self._wish.noise == RECORD else None
        instruction = Instruction(
            fields=records.write(terms),
            accumulator=partial(gradient_sum, terms),
            cost=lambda client: charge,
        )
        if not isinstance(self._rate, Mapping):
            return instruction
        zeros = {GRADIENT: np.zeros_like(self._model()), SIZE: np.zeros(1)}
        return replace(instruction, accumulator=partial(EvenWeights, zeros), take=self._take_scaled)

    def _take_scaled(self, mean: WeightedMean, reply: ClientReply) -> None:
        """Add a gradient, scaled by its client's rate.

        Raises
        ------
        ReplyRefusedError
            If the reply cannot be used.
        """
        rates, terms = self._rates(), self._asked_terms()
        if reply.client_id not in rates:
            raise ReplyRefusedError("unknown client", f"{reply.client_id} has no straggler_rate")
        alone = gradient_sum(terms)
        self.take(alone, reply)
        sums, p = sums_of(alone, terms), rates[reply.client_id]
        scaled = {GRADIENT: sums[GRADIENT] / (1 - p), SIZE: sums[SIZE] * self._size_scale(p)}
        mean.fold(reply.client_id, scaled, weight=1, metrics=alone.metrics())

    def _size_scale(self, p: float) -> float:
        """Return by what the size of a gradient is scaled where its client has a rate of its own.

        So that the squares come to ``sum_i I_i p_i / (1 - p_i)^2 |G_i|^2``; with noise the size is
        a norm.
        """
        norm = self._asked_terms().noise == RECORD
        return math.sqrt(p) / (1 - p) if norm else p / (1 - p) ** 2

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the codes, noise included; everybody weighs 1."""
        if self.secure_sum is None:
            raise ProtocolError("there is no secure sum")
        self.secure_sum.parties_of(len(clients))  # what clients would refuse ends the run
        return self.secure_sum.bounds(len(clients), code_limit=CODE_LIMIT, largest_weight=1)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the gradients as they come, and make a step."""
        mean, metrics = self.collect(TRAIN, replies)
        if mean is None:
            return self._stepped(server_round, None, MetricRecord())
        terms = self._asked_terms()
        answered = len(mean.clients)
        if isinstance(self._rate, Mapping):
            rates = self._rates()
            scales = [self._size_scale(rates[client]) ** 2 for client in mean.clients]
            noise = sum(scales) * terms.share_of(terms.sigma) ** 2
            found = heard(mean.sums, answered, terms, size_noise=noise)
        else:
            found = heard(sums_of(mean, terms), answered, terms)
        return self._stepped(server_round, found, metrics or MetricRecord())

    def _stepped(
        self, server_round: int, found: Heard | None, metrics: MetricRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after the step of a round (ACFL, (9) and (10)); None to keep it."""
        self._done = server_round
        new = self.descent.step(
            self._model(),
            found,
            t=server_round,
            devices=self._devices(),
            share=self._asked_share(),
            coded=self._coded,
            asked=self._terms,
        )
        if new is None:
            return None, None
        (name,), (like,) = self._template.keys(), self._template.values()
        answered = 0 if found is None else found.answered
        renewed = {name: new.astype(like.dtype)}
        return self.renewed(server_round, renewed, metrics, max(1, answered)), metrics

    # -- What the books and the history say --------------------------------------------------

    def stop(self) -> str:
        """Return why the training ends: the rounds that the budget is for are done."""
        if self._wish.noise != RECORD or self._rounds is None or self._done < self._rounds:
            return ""
        return f"the {self._rounds} rounds that the budget is for are done"

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the weights of the round and what they follow from; what was spent."""
        numbers = dict(self.descent.numbers)
        if numbers and self._wish.needs_setup:
            numbers["members"] = len(self.members)
        if self._setup_terms is not None and self._wish.noise != NO_NOISE:
            privacy = setup_privacy(self._setup_terms, bound=self._wish.bound)
            numbers |= {f"setup_{name}": value for name, value in privacy.items()}
        spent, cap = card.guarantee.spent, card.guarantee.epsilon
        if spent is not None and cap is not None:
            numbers |= {"epsilon": spent, "epsilon_left": max(0.0, cap - spent)}
        return numbers

    def guarantee(self) -> Guarantee:
        """Return the promise."""
        exact_rounds = 2
        if self._template:
            features, labels = self._model().shape
            exact_rounds = math.ceil(features / labels) + 1
        return promise(
            noise=self._wish.noise,
            epsilon=self._wish.epsilon,
            delta=self._wish.delta,
            setup=self._setup_terms,
            bound=self._wish.bound,
            exact_rounds=exact_rounds,
            summed=self.secure_sum is not None,
            quorum=self._quorum,
            coded_only=self._wish.coded_only,
            insecure=self._insecure,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the coded data, who is in them, and what the weights follow from."""
        return {
            "wish": self._wish.lasting(),
            "rounds": self._planned_rounds(),
            "coded": None if self._coded is None else self._coded.moments._asdict(),
            "members": self.members,
            "setup": None if self._setup_terms is None else records.write(self._setup_terms),
            "weights": self.descent.state(),
            "done": self._done,
            "insecure": self._insecure,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned.

        Raises
        ------
        CheckpointError
            If it was made for another budget, other noise or other bounds.
        """
        mine = {**self._wish.lasting(), "rounds": self._planned_rounds()}
        theirs = {**state["wish"], "rounds": state["rounds"]}
        for key, value in mine.items():
            if theirs[key] != value:
                raise CheckpointError(
                    f"the checkpoint has {key} = {theirs[key]!r}, not {value!r}: what was set up "
                    "and charged cannot be changed"
                )
        self._insecure = state["insecure"]
        self.members = list(state["members"])
        if state["setup"] is not None:
            self._setup_terms = records.read(SetupTerms, state["setup"])
        if state["coded"] is not None and self._setup_terms is not None:
            self._coded = CodedData(
                moments=Moments(**state["coded"]),
                terms=self._setup_terms,
                devices=len(self.members),
                symmetrised=self._symmetrised,
            )
        self.descent.load(state["weights"])
        self._done = state["done"]

    # -- Parts -------------------------------------------------------------------------------

    def _everybody(self, grid: FlowerGrid, server_round: int) -> Assigned:
        return self.conversation.sample(grid, server_round, SETUP, fraction=1.0, minimum=1)

    def drawn(self, grid: FlowerGrid, server_round: int) -> Assigned:
        """Draw the clients of a round among those that were set up; of the setup, everybody."""
        if server_round == 0:
            return self._everybody(grid, 0)
        if self.fraction_train == 0:
            return {}
        left_out = self._without_rate()
        if self._wish.needs_setup:
            # Under a secure sum the first round's clients are drawn before the setup is opened.
            members = self.members or self.conversation.book(SETUP).used
            left_out |= set(self.federation.clients()).difference(members)
        return self.conversation.sample(
            grid,
            server_round,
            TRAIN,
            fraction=self.fraction_train,
            minimum=self.min_train_nodes,
            without=left_out,
        )

    def _planned(self) -> Plan:
        features, labels = self._model().shape
        return Plan(
            wish=self._wish, features=features, labels=labels, rounds=self._planned_rounds() or 1
        )

    def _planned_rounds(self) -> int | None:
        rounds = self._rounds or self.planned_rounds
        if rounds is None and self._wish.noise == RECORD:
            raise InvalidParameterError(
                "rounds", rounds, "the rounds to spread the budget over, under your own start"
            )
        return rounds if self._wish.noise == RECORD else None

    def _parties(self) -> int:
        """Return how many honest clients share the noise of a sum; 0 without a secure sum."""
        if self.secure_sum is None:
            return 0
        cohort, settings = self.transport.cohort, self.secure_sum
        self._quorum = cohort, settings.threshold_of(cohort), settings.colluders_of(cohort)
        return settings.parties_of(cohort)

    def _model(self) -> NDArray[np.float64]:
        """Return the model as it is before the step."""
        shapes = {name: np.shape(array) for name, array in self._template.items()}
        if len(shapes) != 1 or any(len(shape) != 2 for shape in shapes.values()):
            raise InvalidParameterError(
                "initial_arrays", shapes, "one matrix of shape (features, labels)"
            )
        (array,) = self._template.values()
        if not np.issubdtype(array.dtype, np.floating):
            raise InvalidParameterError("initial_arrays", str(array.dtype), "a matrix of floats")
        model = np.array(array, np.float64)
        if not np.isfinite(model).all():
            raise InvalidParameterError("initial_arrays", "NaN or infinity", "finite values")
        return model

    def _devices(self) -> int:
        """Return over how many clients the objective is a sum."""
        if self._wish.needs_setup:
            return len(self.members)
        if self.federation.met:
            return len(self.federation.clients())
        # Under a user's own start, where nobody has said who it is.
        return self.federation.sample_size(fraction=1.0, minimum=0)[1]

    def _without_rate(self) -> set[str]:
        """Return the clients that are there and have no rate, where each has its own."""
        if not isinstance(self._rate, Mapping):
            return set()
        return set(self.federation.clients()).difference(self._rate)

    def _rates(self) -> Mapping[str, float]:
        """Return at which rate the gradient of each client is missing.

        Raises
        ------
        ProtocolError
            If there is one rate for all.
        """
        rates = effective_rate(self._rate, self._asked_share())
        if not isinstance(rates, Mapping):
            raise ProtocolError("there is one rate for all")
        return rates

    def _asked_share(self) -> float:
        """Return the share of the clients that a round asks, whoever is there just now."""
        devices = max(1, self._devices())
        asked = max(math.floor(devices * self.fraction_train + 1e-9), self.min_train_nodes)
        return min(1.0, asked / devices)

    def _asked_terms(self) -> GradientTerms:
        if self._terms is None:
            raise ProtocolError("no question was asked yet")
        return self._terms


def _identity(features: FeatureMap | str | None) -> str:
    if features is None:
        return RAW
    identity = features if isinstance(features, str) else getattr(features, "identity", None)
    if not isinstance(identity, str):
        raise InvalidParameterError("features", features, "a feature map, or its identity")
    return identity


def _bound_of(
    features: Any, name: str, given: float | None, *, otherwise: float | None = None
) -> Any:
    """Return a bound that was given, else the one that a feature map has, if any."""
    return getattr(features, name, otherwise) if given is None else given
