"""The base of all strategies: the methods a scheme overrides, and those its rounds call.

`SchemeStrategy` takes FedAvg's constructor arguments, keeps the signature of Flower's
``Strategy.start`` and returns its ``Result``, so it replaces FedAvg in place. A scheme overrides
`instruct`, which says as data what clients are told, how their answers add up and what an answer
costs; it then also works under a user's own ``start`` that calls only Flower's abstract methods. A
scheme that talks to the clients several times a round overrides `train_round` with a program that
calls `ask`, and goes on with the sum of the answers.

The parts of a strategy have modules of their own: the rounds (`server_loop`), requests and replies
(`messenger`), plain replies or secure sums (`transport`), charges and privacy card (`charge_log`),
the step to the new model (`model_step`), and what is kept across runs (`experiment`).
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy.clients.profiling.recorder import of_server
from flwr_privacy.errors import (
    InvalidParameterError,
    ProtocolError,
    TooFewTrainedError,
    check_integer,
    check_number,
)
from flwr_privacy.evaluation.caps import WITHOUT_BUDGET
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.card import CardRelease, Described, PrivacyCard, settings_of
from flwr_privacy.privacy.grid import GridMean
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.trained_count import TrainedCount, noticed
from flwr_privacy.privacy.updates import check_names
from flwr_privacy.secure_sum import Bounds, NotOpenedError, SecureSum
from flwr_privacy.strategies.options.fedavg_arguments import FedAvgArguments
from flwr_privacy.strategies.options.loop_options import LoopOptions
from flwr_privacy.strategies.requests.federation import Federation
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.ledger_heads import LedgerHeads
from flwr_privacy.strategies.requests.messenger import Assigned, Messenger
from flwr_privacy.strategies.requests.replies import add_up
from flwr_privacy.strategies.requests.request_log import ClientReply, arrays_of
from flwr_privacy.strategies.state.experiment import Experiment, SchemeResult
from flwr_privacy.strategies.transport.summed import Summed, check_summed
from flwr_privacy.strategies.transport.transport import Plain, Transport
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import EVALUATE, INSECURE, TRAIN, Fields

from .charge_log import ChargeLog
from .frozen import Frozen, check_trainable, split
from .model_step import ModelStep
from .running_statistics import settled
from .server_loop import EvaluateFn, ServerLoop

__all__ = ["SchemeStrategy"]

logger = logging.getLogger("flwr.privacy")


@checked_keywords
@dataclass(eq=False, repr=False)
class SchemeStrategy(FedAvgArguments):
    """Base of the strategies: FedAvg's parameters and, by keyword, those of the shared loop.

    Parameters
    ----------
    fraction_train, fraction_evaluate, min_train_nodes, min_evaluate_nodes, \
min_available_nodes, weighted_by_key, arrayrecord_key, configrecord_key, \
train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        As in `flwr.serverapp.strategy.FedAvg`; "nodes" are clients here. The functions see records
        without their arrays, which are gone once they are summed up.
    loop : LoopOptions, optional
        Seed, identity, simulated clients, deadlines, run folder.
    inner : flwr.serverapp.strategy.FedAvg, optional
        A Flower strategy (FedAdam, FedProx, ...) that takes the scheme's aggregate as one reply.
    secure_sum : SecureSum, optional
        Has the clients' answers summed so that nobody sees a single one; for schemes whose answers
        are codes on a grid. The clients are not asked to evaluate then.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.
    """

    _: KW_ONLY
    loop: LoopOptions = LoopOptions()  # noqa: RUF009 - it is frozen
    inner: FlowerFedAvg | None = None
    secure_sum: SecureSum | None = None

    scheme: ClassVar[str]
    summable: ClassVar[bool] = False  # whether answers are codes that a secure sum can take
    sum_phases: ClassVar[frozenset[str]] = frozenset({TRAIN})  # whose answers it takes
    untimed: ClassVar[frozenset[str]] = frozenset({EVALUATE})  # phases without virtual time
    weight_key: ClassVar[str | None] = None  # where replies are not weighted by weighted_by_key
    metrics_phases: ClassVar[frozenset[str]] = frozenset({TRAIN, EVALUATE})
    """Phases in which the app's own metrics leave a client's node."""
    keeps_statistics: ClassVar[bool] = False  # whether running statistics are never uploaded
    not_here: ClassVar[Mapping[str, str]] = {"evaluation": WITHOUT_BUDGET}
    """Keywords that other schemes have, with what to do here."""
    not_called: ClassVar[frozenset[str]] = frozenset()
    """Methods of Flower's strategies that the scheme's rounds do not call. A class of your own that
    overrides `train_round` and calls them there sets it to an empty set."""

    def __post_init__(self) -> None:
        if not isinstance(self.loop, LoopOptions):
            raise InvalidParameterError("loop", self.loop, "LoopOptions(...)")
        super().__post_init__()
        self._check_metrics_fns()
        self._check_own_methods()
        self.planned_rounds: int | None = None
        self.quorum = self.loop.quorum
        self._virtual_clients = self.loop.clients
        self._keep_back_given: Sequence[str] | None = None  # None: the app has said nothing of it
        self._trainable: Sequence[str] | None = None  # None: all of the model
        if self.secure_sum is not None:
            check_summed(self.secure_sum, self.scheme, self.summable)
            self.fraction_evaluate = 0.0  # what clients say of their data is not summed
        self._accountant: str | None = None  # None: the tightest that knows the charges
        self._build()
        self._only_with_start: dict[str, Any] = {
            "clients": self.loop.clients,
            "quorum": self.loop.quorum,
            "deadline": self.loop.deadline,
            "on_round": self.loop.on_round,
            "logger": self.loop.logger,
            "stragglers": self.loop.stragglers,
            "run_dir": self.loop.run_dir,
            "pins": self.loop.pins,
            "secure_sum": self.secure_sum,
        }
        self.model_step = ModelStep(self.inner)
        self._template: Arrays = {}

    def _build(self) -> None:
        """Make the parts that belong to one training; a second `start` makes new ones."""
        self.experiment = Experiment(self.scheme, self.loop)
        self.heads = LedgerHeads(
            self.experiment, lambda client: self.federation.keys.key_of(client)
        )
        self.federation = Federation(
            virtual_clients=self._virtual_clients,
            min_available_nodes=self.min_available_nodes,
            pins=self.loop.read_pins(),
            heads=self.heads,
        )
        self.messenger = Messenger(
            scheme=self.scheme,
            experiment=self.experiment,
            federation=self.federation,
            stragglers=self.loop.stragglers,
            deadline=self.loop.deadline,
            weighted_by=self.weight_key or self.weighted_by_key,
            max_reply_bytes=self.loop.max_reply_bytes,
            untimed=self.untimed,
        )
        self.transport: Transport = Plain(self.drawn)
        if self.secure_sum is not None:
            self.transport = Summed(
                self.secure_sum,
                self.messenger,
                self.experiment,
                phases=self.sum_phases,
                draw=self.drawn,
                is_last=self._is_last,
                bounds_of=self.bounds_of,
                needed=self.needed,
                lacking=self.lacking,
                pins=self.loop.read_pins(),
            )
        self.charge_log = ChargeLog(self.experiment, self.heads)
        self.trained = TrainedCount()
        self._instructions: dict[str, Instruction] = {}  # the last of each phase
        self.newcomers: list[str] = []  # clients that came since the round before
        self._insecure = False  # whether a client said that its noise is from a seed
        self._announced = False
        self.frozen: Frozen | None = None  # of the model, where a part of it is trained

    # -- What a scheme overrides -------------------------------------------------------------

    def setup(self, grid: Grid) -> None:
        """Prepare the scheme before the first round of a run; by default does nothing.

        A resumed run calls it again, after `load_state_dict`. Clients that come later are in
        `newcomers` when their first round is trained.
        """

    def train_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train one round: by default one exchange with the sampled clients.

        Returns
        -------
        arrays : ArrayRecord or None
            The new global arrays; None if no reply could be used (the round is skipped).
        metrics : MetricRecord or None
            Aggregated metrics of the clients.
        """
        if not self.prepared(grid, server_round):
            return None, None
        messages = self.configure_train(server_round, arrays, config, grid)
        replies = self.messenger.exchange(grid, messages, phase=TRAIN)
        return self.aggregate_train(server_round, replies)

    def instruct(self, server_round: int) -> Instruction:
        """Return the instruction of a round: fields to send, how answers add up, what they cost.

        By default nothing but the model, and the answers are averaged.
        """
        return Instruction(accumulator=partial(WeightedMean, self._template))

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the clients of a round's training.

        Under a secure sum those of the next round are drawn before a round is over.
        """
        return self.messenger.sample(
            grid,
            server_round,
            TRAIN,
            fraction=self.fraction_train,
            minimum=self.min_train_nodes,
        )

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the vectors in a round's secure sum.

        Parameters
        ----------
        clients : list of str
            The clients drawn for a round, before any is missing; for a later sum of the round
            those whose vectors are in the one before.
        server_round : int
            The round.

        Raises
        ------
        InvalidParameterError
            If the parameters of the secure sum do not fit the clients.
        """
        raise NotImplementedError

    def needed(self) -> Collection[str]:
        """Return the clients without whom the secure sum of the next round is not opened.

        It is called after `drawn`, which has them among the others; by default there are none.
        """
        return ()

    def lacking(self, clients: Collection[str]) -> None:
        """Take note of needed clients that a sum lacked: they sent nothing, or one of them lies."""

    def guarantee(self) -> Guarantee:
        """Return the scheme's guarantee, as far as it is known."""
        raise NotImplementedError

    def stop(self) -> str:
        """Return why the training ends before the next round; "" (the default) if it goes on.

        A budget that is spent, for example.
        """
        return ""

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the scheme's own numbers of a round, for the history; by default none.

        Parameters
        ----------
        card : PrivacyCard
            The charges so far, this round's included.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what the scheme itself needs to resume; by default nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    # -- A training --------------------------------------------------------------------------

    @of_server
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> SchemeResult:
        """Train; parameters and result are those of Flower's ``Strategy.start``.

        Raises
        ------
        InvalidParameterError
            If `num_rounds` is less than 1, or more clients are to be sampled than there are.
        ProtocolError
            If too few nodes connect within `timeout`, or remain when each has said who it is.
        CheckpointError
            If the checkpoint to resume from is damaged, belongs to another experiment or is older
            than the rest of its folder.
        NothingTrainedError
            If no round gave a model; its `result` has the history.
        TooFewTrainedError
            If it is certain that too few of the clients' trainings work; it has a `result` too.
        """
        check_integer("num_rounds", num_rounds, minimum=1)
        if self.messenger.recorded:
            # A second training is a new experiment: under the old identity clients would answer
            # its requests from their reply caches.
            self.loop = replace(
                self.loop,
                experiment_id=None,
                resume=False,
                accept_lost_rounds=False,
                forget_keys=(),
                accept_ledgers=(),
            )
            self._build()
        self.messenger.timeout = check_number("timeout", timeout, minimum=1e-9)
        self.messenger.recorded = True
        self.planned_rounds = num_rounds
        self.frozen, initial_arrays = split(initial_arrays, self._trainable)
        loop = ServerLoop(
            self,
            grid,
            rounds=num_rounds,
            train_config=train_config,
            evaluate_config=evaluate_config,
            evaluate_fn=evaluate_fn,
        )
        with nullcontext() if self.loop.logger is None else closing(self.loop.logger):
            arrays = loop.begin(initial_arrays)
            self._template = arrays_of(arrays)
            check_names(self._template, self._keep_back_given or ())  # before a node is spoken to
            logger.info("%s: %d rounds, experiment %s", self.scheme, num_rounds, self.experiment.id)
            self.federation.wait(grid, timeout)
            self.messenger.meet(grid)
            self._begin_card(grid)
            self.setup(grid)
            return loop.run(arrays)

    def card(self, *, final: bool = False) -> PrivacyCard:
        """Return the privacy card: the guarantee, every charge so far, and their epsilon.

        Parameters
        ----------
        final : bool, default False
            Whether to state epsilon by every accountant; some take seconds.
        """
        self.charge_log.note_late(self.messenger.came_late())
        return self.charge_log.card(
            self._extended_guarantee, accountant=self._accountant, final=final
        )

    @property
    def releases(self) -> list[CardRelease]:
        """Every charge so far."""
        return self.charge_log.releases

    # -- Flower's abstract methods -----------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample clients and return the messages to their nodes."""
        if not self.messenger.recorded:
            # A user's own start: this class's loop is not there to refuse or stop.
            self._check_own_start()
            if self.trained.too_few:
                raise TooFewTrainedError(self.trained.text(), [])
        self._template = arrays_of(arrays)
        if not self.messenger.recorded:
            self._begin_card(grid)
        told = self._settled_statistics()
        config = ConfigRecord({**config, "server-round": server_round})
        arrays, config = self.model_step.configure(server_round, arrays, config)
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        # Under a secure sum only clients that dealt are asked, and the quorum suffices to open it.
        assigned = self.transport.clients(grid, server_round)
        quorum = self.transport.quorum(self.quorum)
        instruction = self.instruct(server_round)
        instruction = replace(instruction, fields={**instruction.fields, **told})
        messages = self.put(server_round, TRAIN, content, assigned, instruction, quorum=quorum)
        self._tell_detection(assigned, instruction)
        self.announce()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the replies as they arrive; return the new global arrays and the mean metrics."""
        mean, metrics = self.collect(TRAIN, replies)
        if mean is None or metrics is None:
            return None, None
        weight, arrays = mean.weight, self._instructions[TRAIN].finish(mean)
        del mean  # the sums are twice as large as the model
        return self.renewed(server_round, arrays, metrics, weight), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample clients and return the messages that ask them to evaluate on their own data."""
        config = ConfigRecord({**config, "server-round": server_round})
        assigned = self.messenger.sample(
            grid,
            server_round,
            EVALUATE,
            fraction=self.fraction_evaluate,
            minimum=self.min_evaluate_nodes,
        )
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        instruction = Instruction(accumulator=partial(WeightedMean, {}))
        return self.put(server_round, EVALUATE, content, assigned, instruction)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean metrics of the clients' evaluations."""
        return self.collect(EVALUATE, replies)[1]

    # -- What the rounds are made of ---------------------------------------------------------

    def prepared(self, grid: Grid, server_round: int) -> bool:
        """Run secret sharing if there is a secure sum; return whether enough clients took part."""
        try:
            self.transport.prepare(grid, server_round)
        except NotOpenedError as error:
            logger.warning("%s", error)
            return False
        return True

    def ask(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        content: RecordDict,
        assigned: Assigned,
        instruction: Instruction,
        *,
        quorum: int | None = None,
    ) -> tuple[WeightedMean | None, MetricRecord | None]:
        """Ask some clients and add up their answers: one exchange of a round.

        Parameters
        ----------
        grid, server_round, phase, content, assigned, quorum
            As in `Messenger.ask`.
        instruction : Instruction
            What they are told, and what becomes of their answers.

        Returns
        -------
        mean : WeightedMean or None
            The sum of the answers; None if none could be used.
        metrics : MetricRecord or None
            Aggregated metrics of the clients.
        """
        messages = self.put(server_round, phase, content, assigned, instruction, quorum=quorum)
        return self.collect(phase, self.messenger.exchange(grid, messages, phase=phase))

    def put(
        self,
        server_round: int,
        phase: str,
        content: RecordDict,
        assigned: Assigned,
        instruction: Instruction,
        *,
        quorum: int | None = None,
    ) -> list[Message]:
        """Return the messages of a request (see `ask`), after its cost is on disk."""
        self._instructions[phase] = instruction
        self._foresee(instruction)
        content, own = self.transport.question(phase, content, instruction.own)
        adds_up = instruction.adds_up
        if adds_up is None:
            # A scheme with its own `take` needs every reply by itself, unless it says otherwise.
            adds_up = instruction.take is None
        messages = self.messenger.ask(
            server_round,
            phase,
            content,
            assigned,
            fields={**instruction.fields, **({} if self.frozen is None else self.frozen.fields())},
            own=own,
            groups=instruction.groups,
            of_group=instruction.of_group,
            # A metrics function of the user is to see every reply.
            summed=adds_up and not self._metrics_fns.get(phase),
            large=instruction.large,
            quorum=quorum,
        )
        # Durable before a message leaves: a run that breaks off now has asked.
        self.charge_log.note(self.messenger.request_log(phase), instruction)
        return messages

    def collect(
        self, phase: str, messages: Iterable[Message]
    ) -> tuple[WeightedMean | None, MetricRecord | None]:
        """Add up the replies of a phase as they arrive; None if no reply could be used."""
        found = self._collected(phase, messages)
        if not self.messenger.recorded:
            # A user's own start: nothing else tells that a round is over.
            self.experiment.keep_card(self.card())
        return found

    def _collected(
        self, phase: str, messages: Iterable[Message]
    ) -> tuple[WeightedMean | None, MetricRecord | None]:
        request_log, instruction = self.messenger.request_log(phase), self._instructions[phase]
        mean = self.transport.accumulator(phase, instruction.accumulator())
        take = instruction.take or self.take
        metrics_fn = self._metrics_fns.get(phase)
        contents = add_up(mean, request_log, messages, take=take, keep=metrics_fn is not None)
        # Also where the sum is not opened: the answers have left the nodes.
        self.charge_log.charge(request_log, instruction)
        mean = self.transport.opened(mean, request_log, instruction)
        # A trusted server adds its noise here: nobody below gets a sum without it.
        released = instruction.released(mean if mean.weight else None)
        if released is None:
            return None, None
        mean = released
        if instruction.failed_sigma is not None and isinstance(mean, GridMean):
            self.trained.add(
                request_log.header.server_round,
                answers=len(mean.clients),
                failed=mean.failed,
                sigma=instruction.failed_sigma(mean.clients),
                quorum=self.quorum,
            )
        # One client whose noise comes from a seed is enough to void the guarantee.
        self._insecure |= INSECURE in mean.metrics()
        if metrics_fn is not None and contents:
            return mean, metrics_fn(contents, self.weighted_by_key)
        return mean, MetricRecord(mean.metrics())

    def take(self, mean: WeightedMean, reply: ClientReply) -> None:
        """Add a client's reply to an accumulator, with the client's weight."""
        arrays = reply.arrays() if mean.template else {}
        weighted_by = self.weight_key or self.weighted_by_key
        mean.take(reply.client_id, arrays, reply.metrics(), weighted_by)

    def renewed(
        self, server_round: int, averaged: Arrays, metrics: MetricRecord, weight: float
    ) -> ArrayRecord:
        """Return the new global arrays: the average, or what the inner strategy makes of it.

        What is not in the average keeps the server's values, and all arrays keep their dtypes.
        """
        return self.model_step.take(server_round, self._template, averaged, metrics, weight)

    def whole(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the whole model, where the arrays of a round are a part of it."""
        return arrays if self.frozen is None else self.frozen.whole(arrays)

    def use_trainable(self, trainable: Sequence[str] | None) -> None:
        """Have a part of the model trained; call it in ``__post_init__``, after `SchemeStrategy`'s.

        Parameters
        ----------
        trainable : sequence of str, optional
            Names or patterns of the arrays that are trained; None: all.

        Raises
        ------
        InvalidParameterError
            If it is none of these.
        """
        check_trainable(trainable)
        self._trainable = trainable
        self._only_with_start["trainable"] = trainable

    def _begin_card(self, grid: Grid) -> None:
        """Make the folder of the card and describe the run, once."""
        if self.charge_log.described.began:
            return
        self.experiment.make_card_folder()
        # Flower puts functions of its own where the user gave none.
        flowers = [f"{phase}_metrics_aggr_fn" for phase, fn in self._metrics_fns.items() if not fn]
        self.charge_log.described = Described.now(
            name=self.loop.name or _app_of(grid),
            model=self._template,
            settings=settings_of(self, without=flowers),
        )

    def _foresee(self, instruction: Instruction) -> None:
        """Log, once, whether the model can learn through the noise; the privacy card has it too."""
        if self.charge_log.forecast or instruction.forecast is None:
            return
        # Not the clients of this round: how many they are may be secret.
        asked, _ = self.messenger.sampler.sample_size(
            fraction=self.fraction_train, minimum=self.min_train_nodes
        )
        forecast = instruction.forecast(max(1, asked))
        self.charge_log.forecast = forecast.text()
        logger.log(logging.WARNING if forecast.warns else logging.INFO, forecast.text())

    def _tell_detection(self, assigned: Assigned, instruction: Instruction) -> None:
        """Log, once, after how many rounds failing trainings of the clients would be noticed."""
        clients = [client for clients in assigned.values() for client in clients]
        if self._announced or instruction.failed_sigma is None or not clients:
            return
        sigma = instruction.failed_sigma(clients)
        text, in_time = noticed(len(clients), sigma, self.quorum, self.planned_rounds)
        logger.log(logging.INFO if in_time else logging.WARNING, text)

    def announce(self) -> None:
        """Log the guarantee, once; call it when the clients of a secure sum are known."""
        if not self._announced:
            logger.info("%s", self._extended_guarantee().text())
            self._announced = True

    # -- Parts -------------------------------------------------------------------------------

    def _settled_statistics(self) -> Fields:
        """Return the fields about running statistics, if the scheme never uploads them."""
        if not self.keeps_statistics:
            return {}
        return settled(self._template, self._keep_back_given, first=not self._announced)

    def _check_metrics_fns(self) -> None:
        """Refuse functions for metrics of the app that no client sends.

        Raises
        ------
        InvalidParameterError
            If there is one.
        """
        for phase, metrics_fn in self._metrics_fns.items():
            where = f"with scheme '{self.scheme}'"
            if phase in self.metrics_phases:
                where = "" if self.secure_sum is None else "under a secure sum"
            if metrics_fn is not None and where:
                raise InvalidParameterError(
                    f"{phase}_metrics_aggr_fn",
                    metrics_fn,
                    f"None: {where} no metrics of your app leave a client's node. To measure the "
                    "model on the server, give start() an evaluate_fn",
                )

    def _check_own_methods(self) -> None:
        """Refuse a subclass that overrides a method which the scheme's rounds do not call.

        Raises
        ------
        InvalidParameterError
            If it does: what it says would be passed over in silence.
        """
        for cls in type(self).__mro__:
            if "not_called" in vars(cls):
                return
            for name in sorted(self.not_called.intersection(vars(cls))):
                raise InvalidParameterError(
                    name,
                    f"{cls.__name__}.{name}",
                    f"no method of your own: with scheme '{self.scheme}' a round is another "
                    "exchange than Flower's and does not call it. Override train_round: it gets "
                    "the round's arrays and configuration, and super().train_round(...) returns "
                    "the new arrays. What only looks at a round goes into evaluate_fn or "
                    "LoopOptions(on_round=...)",
                )

    def _check_own_start(self) -> None:
        """Refuse options that need this class's `start` if a user's own start runs the rounds."""
        if given := [name for name, value in self._only_with_start.items() if value is not None]:
            raise ProtocolError(
                f"{', '.join(given)}: works only where this strategy's own start runs the rounds; "
                "what your start does can go into configure_train, aggregate_train, stop and "
                "evaluate_fn (docs/drop-in.md)"
            )

    def _extended_guarantee(self) -> Guarantee:
        guarantee = self.transport.extend_guarantee(self.guarantee()).assuming_apps()
        if self.frozen is None:
            return guarantee
        not_protected = (*guarantee.not_protected, self.frozen.text())
        return replace(guarantee, not_protected=not_protected)

    def _is_last(self, server_round: int) -> bool:
        return self.planned_rounds is not None and server_round >= self.planned_rounds


def _app_of(grid: Grid) -> str:
    """Return the name of the Flower app of a run; empty where it has none."""
    return str(getattr(grid.run, "fab_id", "") or "")
