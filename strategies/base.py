"""The one loop that all strategies share.

`SchemeStrategy` takes FedAvg's constructor arguments, keeps the signature of Flower's
``Strategy.start`` and returns its ``Result``, so it replaces FedAvg in place. A scheme overrides
`instruct`, which says as data what clients are told, how their answers add up and what an answer
costs; it then also works under a user's own ``start`` that calls only Flower's abstract methods. A
scheme that talks to the clients several times a round overrides `train_round` with a program that
calls `ask`, and goes on with the sum of the answers.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy.accounting import Charge, fitting
from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.card import PrivacyCard, Release
from flwr_privacy.errors import (
    InvalidParameterError,
    NothingTrainedError,
    ProtocolError,
    check_integer,
    check_number,
)
from flwr_privacy.guarantee import Guarantee
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.running_statistics import SETTLED, not_told, suspected
from flwr_privacy.secure_sum import Bounds, MaskedSum, NotOpenedError, SecureSum
from flwr_privacy.secure_sum.masked import vector_size
from flwr_privacy.wire import (
    EVALUATE,
    TRAIN,
    Fields,
)

from .conversation import Assigned, Conversation
from .experiment import Experiment, SchemeResult, to_record
from .federation import Federation
from .history import log, plain
from .inner import InnerStrategy
from .instruction import Instruction
from .loop_options import LoopOptions
from .replies import check_alike, merge, warn_of_metrics, without_arrays
from .round import ClientReply, PartialSum, Round, arrays_of
from .secure_sum import SecureRounds, opened_mean

__all__ = ["SchemeStrategy"]

logger = logging.getLogger("flwr.privacy")

MetricsFn = Callable[[list[RecordDict], str], MetricRecord]


_FLOWERS_MEAN = FlowerFedAvg().train_metrics_aggr_fn


@checked_keywords
@dataclass(eq=False, repr=False)
class SchemeStrategy(FlowerFedAvg):
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

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    min_available_nodes: int = 2
    weighted_by_key: str = "num-examples"
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    # Flower says None of its parameters, not of its attributes.
    train_metrics_aggr_fn: MetricsFn | None = None  # type: ignore[assignment]
    evaluate_metrics_aggr_fn: MetricsFn | None = None  # type: ignore[assignment]
    _: KW_ONLY
    loop: LoopOptions = LoopOptions()  # noqa: RUF009 - it is frozen
    inner: FlowerFedAvg | None = None
    secure_sum: SecureSum | None = None

    scheme: ClassVar[str]
    summable: ClassVar[bool] = False  # whether answers are codes that a secure sum can take
    sum_phases: ClassVar[frozenset[str]] = frozenset({TRAIN})  # whose answers it takes
    untimed: ClassVar[frozenset[str]] = frozenset({EVALUATE})  # phases without virtual time
    weight_key: ClassVar[str | None] = None  # where replies are not weighted by weighted_by_key
    keeps_statistics: ClassVar[bool] = False  # whether running statistics are never uploaded

    def __post_init__(self) -> None:
        if not isinstance(self.loop, LoopOptions):
            raise InvalidParameterError("loop", self.loop, "LoopOptions(...)")
        check_number("fraction_train", self.fraction_train, minimum=0, maximum=1)
        check_number("fraction_evaluate", self.fraction_evaluate, minimum=0, maximum=1)
        # In a copy (`dataclasses.replace`) there is what Flower has put in the place of None.
        if self.train_metrics_aggr_fn is _FLOWERS_MEAN:
            self.train_metrics_aggr_fn = None
        if self.evaluate_metrics_aggr_fn is _FLOWERS_MEAN:
            self.evaluate_metrics_aggr_fn = None
        fractions = self.fraction_train, self.fraction_evaluate
        fewest = self.min_train_nodes, self.min_evaluate_nodes
        self._metrics_fns = {
            TRAIN: self.train_metrics_aggr_fn,
            EVALUATE: self.evaluate_metrics_aggr_fn,
        }
        super().__init__(
            min_available_nodes=self.min_available_nodes,
            weighted_by_key=self.weighted_by_key,
            arrayrecord_key=self.arrayrecord_key,
            configrecord_key=self.configrecord_key,
            train_metrics_aggr_fn=self.train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn=self.evaluate_metrics_aggr_fn,
        )
        # Set here: FedAvg's constructor warns of a fraction of 0, which is as good as any.
        self.fraction_train, self.fraction_evaluate = fractions
        self.min_train_nodes, self.min_evaluate_nodes = fewest
        check_integer("min_train_nodes", self.min_train_nodes, minimum=0)
        check_integer("min_evaluate_nodes", self.min_evaluate_nodes, minimum=0)
        self.planned_rounds: int | None = None
        self.quorum = self.loop.quorum
        self._virtual_clients = self.loop.clients
        self._keep_back_given: Sequence[str] | None = None  # None: the app has said nothing of it
        self._check_secure_sum()
        if self.secure_sum is not None:
            self.fraction_evaluate = 0.0  # what clients say of their data is not summed
        self._sums: SecureRounds | None = None
        self._promised: Guarantee | None = None  # an earlier run's, until this one asks something
        self._accountant: str | None = None  # None: the tightest that knows the charges
        self._announced = False
        self._build()
        self._only_with_start: dict[str, Any] = {
            "clients": self.loop.clients,
            "quorum": self.loop.quorum,
            "stragglers": self.loop.stragglers,
            "run_dir": self.loop.run_dir,
            "secure_sum": self.secure_sum,
        }
        self._inner = None if self.inner is None else InnerStrategy(self.inner)
        self._template: Arrays = {}

    # -- What a scheme overrides -------------------------------------------------------------

    def setup(self, grid: Grid) -> None:
        """Do what the scheme needs before the first round of a run; by default nothing.

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
        if not self._prepared(grid, server_round):
            return None, None
        messages = self.configure_train(server_round, arrays, config, grid)
        replies = self.conversation.exchange(grid, messages, phase=TRAIN)
        return self.aggregate_train(server_round, replies)

    def instruct(self, server_round: int) -> Instruction:
        """Return what clients are told in a round's training, and what becomes of their answers.

        By default nothing but the model, and the answers are averaged.
        """
        return Instruction(accumulator=partial(WeightedMean, self._template))

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the clients of a round's training.

        Under a secure sum those of the next round are drawn before a round is over.
        """
        return self._participants(
            grid, server_round, TRAIN, self.fraction_train, self.min_train_nodes
        )

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the vectors that a secure sum of a round takes.

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

    def guarantee(self) -> Guarantee:
        """Return what the scheme promises, as far as it is known."""
        raise NotImplementedError

    def stop(self) -> str:
        """Return why the training ends before the next round; by default it does not: "".

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
        """Take up what `state_dict` returned."""

    # -- The loop ----------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> SchemeResult:
        """Train; parameters and result are those of Flower's ``Strategy.start``.

        Raises
        ------
        InvalidParameterError
            If `num_rounds` is less than 1, or more clients are to be sampled than there are.
        ProtocolError
            If two nodes have one identity, or too few nodes connect within `timeout`.
        CheckpointError
            If the checkpoint to resume from is damaged or belongs to another experiment.
        NothingTrainedError
            If no round gave a model; its `result` has the history.
        """
        check_integer("num_rounds", num_rounds, minimum=1)
        if self.conversation.recorded:
            self.loop = replace(self.loop, experiment_id=None, resume=False)
            self._build()
        self.conversation.timeout = check_number("timeout", timeout, minimum=1e-9)
        self.conversation.recorded = True
        self.planned_rounds = num_rounds
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        arrays, first_round, line = self._begin(initial_arrays)
        logger.info("%s: %d rounds, experiment %s", self.scheme, num_rounds, self.experiment.id)
        self.federation.wait(grid, timeout)
        self.conversation.meet(grid)
        if self.secure_sum is not None:
            self._grid = grid
            self._sums = SecureRounds(
                self.secure_sum,
                self.conversation,
                experiment_id=self.experiment.id,
                seed=self.experiment.seed,
                bounds_of=self.bounds_of,
            )
            self._sums.load_state(self._promised_before)
        self._template = arrays_of(arrays)
        self.setup(grid)
        card: PrivacyCard | None = None
        if line:  # of a round that was trained, and not evaluated
            line["rounds"] = num_rounds
            card = self._end_round(grid, line, arrays, evaluate_config, evaluate_fn)
        for server_round in range(first_round, num_rounds + 1):
            line = {"round": server_round, "rounds": num_rounds}
            if server_round > 0 and (reason := self.stop()):
                logger.warning("the training ends before round %d: %s", server_round, reason)
                break
            if server_round > 0:
                self._promised = None
                self._welcome(grid)
                trained, metrics = self.train_round(grid, server_round, arrays, train_config)
                arrays = arrays if trained is None else trained
                line["skipped"] = trained is None
                line["train"] = plain(dict(metrics or {}))
                if self.experiment.run_dir and (evaluate_fn or self.fraction_evaluate):
                    self._end_training(line, arrays)
            card = self._end_round(grid, line, arrays, evaluate_config, evaluate_fn)
        charged = len(self.releases)
        self._charge_broken_off()
        if card is None or len(self.releases) > charged:
            card = self.card(final=True)
            self.experiment.keep_card(card)
        result = self.experiment.result(arrays, card.guarantee)
        rounds = [line for line in result.history if line["round"] > 0]
        if self.fraction_train > 0 and rounds and all(line["skipped"] for line in rounds):
            raise NothingTrainedError(rounds, result)
        return result

    def card(self, *, final: bool = False) -> PrivacyCard:
        """Return the promise, every charge so far, and what they come to.

        Parameters
        ----------
        final : bool, default False
            Whether to state epsilon by every accountant; some take seconds.
        """
        self._note_late()
        card = PrivacyCard(
            experiment_id=self.experiment.id,
            guarantee=self._promised or self._promise(),
            releases=self.releases,
        )
        if card.guarantee.delta is None:
            return card
        accountant = self._accountant or fitting(r.charge for r in self.releases)
        if final:
            card.state()
        else:
            card.state([accountant])
        card.guarantee = replace(
            card.guarantee, spent=card.stated[accountant], accountant=accountant
        )
        return card

    def collect(
        self, phase: str, messages: Iterable[Message]
    ) -> tuple[WeightedMean | None, MetricRecord | None]:
        """Fold the replies of a phase as they come; None if none could be used."""
        book, instruction = self.conversation.book(phase), self._instructions[phase]
        mean, take = instruction.accumulator(), instruction.take or self.take
        sums = self._sums if phase in self.sum_phases else None
        if sums is not None:
            mean = sums.accumulator(vector_size(mean))
        contents: list[RecordDict] = []
        metrics_fn = self._metrics_fns.get(phase)
        for reply in book.replies(messages):
            try:
                if isinstance(reply, PartialSum):
                    merge(mean, reply)
                elif metrics_fn is None:
                    take(mean, reply)
                    warn_of_metrics(reply)
                else:
                    check_alike(reply, contents)
                    take(mean, reply)
                    contents.append(without_arrays(reply.content))
            except ReplyRefusedError as error:
                book.withdraw(reply, error)
            del reply  # or its arrays would live while the next reply is made
        self._charge(phase, book)
        if isinstance(mean, MaskedSum):
            mean = self._opened(mean, phase, book.header.server_round)
        released = instruction.released(mean if mean.weight else None)
        if released is None:
            return None, None
        mean = released
        self._insecure |= "insecure-noise" in mean.metrics()
        if metrics_fn is not None and contents:
            return mean, metrics_fn(contents, self.weighted_by_key)
        return mean, MetricRecord(mean.metrics())

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
        """Ask some clients and add their answers up: one exchange of a scheme's program.

        Parameters
        ----------
        grid, server_round, phase, content, assigned, quorum
            As in `Conversation.ask`.
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
        return self.collect(phase, self.conversation.exchange(grid, messages, phase=phase))

    # -- Flower's abstract methods -----------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample clients and return the messages to the nodes that play them."""
        if not self.conversation.recorded:
            self._check_own_start()
        self._template = arrays_of(arrays)
        settled = self._settled_statistics()
        config = ConfigRecord({**config, "server-round": server_round})
        if self._inner is not None:
            arrays, config = self._inner.configure(server_round, arrays, config)
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        if self._sums is None:
            assigned, quorum = self.drawn(grid, server_round), self.quorum
        else:
            assigned, quorum = self._sums.assigned, self._sums.quorum(self.quorum)
        instruction = self.instruct(server_round)
        instruction = replace(instruction, fields={**instruction.fields, **settled})
        messages = self.put(server_round, TRAIN, content, assigned, instruction, quorum=quorum)
        self.announce()
        return messages

    def _settled_statistics(self) -> Fields:
        """Return what a question says of running statistics, if the scheme keeps them back.

        The server looks once, at the arrays that the training starts from: later values say less.

        Raises
        ------
        InvalidParameterError
            If some arrays look like statistics, and the app has not said what they are.
        """
        if not self.keeps_statistics:
            return {}
        given = self._keep_back_given
        if not self._announced:
            left = [name for name in suspected(self._template) if name not in (given or ())]
            if left and given is None:
                raise not_told(left)
            if left and given:
                logger.warning(
                    "keep_back leaves out %s, which look like running statistics: they are "
                    "treated as weights",
                    left,
                )
        return {SETTLED: True}

    def announce(self) -> None:
        """Log the promise, once; call it when the clients of a secure sum are known."""
        if not self._announced:
            logger.info("%s", self._promise().text())
            self._announced = True

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
        """Return the messages of a request, by a secure sum if there is one; see `ask`.

        What it will cost is noted before it leaves.
        """
        self._instructions[phase] = instruction
        own = instruction.own
        if self._sums is not None and phase in self.sum_phases:
            shared, places = self._sums.question()
            content = RecordDict({**content, **shared})
            own = {
                client: RecordDict({**own.get(client, {}), **place})
                for client, place in places.items()
            }
        adds_up = instruction.adds_up
        if adds_up is None:
            adds_up = instruction.take is None
        messages = self.conversation.ask(
            server_round,
            phase,
            content,
            assigned,
            fields=instruction.fields,
            own=own,
            groups=instruction.groups,
            of_group=instruction.of_group,
            # A metrics function of the user is to see every reply.
            summed=adds_up and not self._metrics_fns.get(phase),
            quorum=quorum,
        )
        book = self.conversation.book(phase)
        if costs := instruction.costs(instruction.charged(book)):
            noted = {client: charge for charge, names in costs.items() for client in names}
            self.experiment.note_asked(_name(book), noted)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the replies as they come; return the new global arrays and the mean metrics."""
        mean, metrics = self.collect(TRAIN, replies)
        if mean is None or metrics is None:
            return None, None
        weight, arrays = mean.weight, self._instructions[TRAIN].finish(mean)
        del mean  # the sums are twice as large as the model
        return self.renewed(server_round, arrays, metrics, weight), metrics

    def renewed(
        self, server_round: int, averaged: Arrays, metrics: MetricRecord, weight: float
    ) -> ArrayRecord:
        """Return the new global arrays: the average, or what the inner strategy makes of it.

        What is not in the average keeps the server's values, and all arrays keep their dtypes.
        """
        new = {name: averaged.get(name, old) for name, old in self._template.items()}
        arrays = to_record(
            {n: new[n].astype(old.dtype, copy=False) for n, old in self._template.items()}
        )
        if self._inner is not None:
            arrays = self._inner.aggregate(server_round, arrays, metrics, weight)
            arrays = to_record(
                {
                    name: arrays[name].numpy().astype(like.dtype).reshape(like.shape)
                    for name, like in self._template.items()
                }
            )
        return arrays

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample clients for the evaluation on their own data."""
        config = ConfigRecord({**config, "server-round": server_round})
        assigned = self._participants(
            grid, server_round, EVALUATE, self.fraction_evaluate, self.min_evaluate_nodes
        )
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        instruction = Instruction(accumulator=partial(WeightedMean, {}))
        return self.put(server_round, EVALUATE, content, assigned, instruction)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean metrics of the clients' evaluations."""
        return self.collect(EVALUATE, replies)[1]

    def _build(self) -> None:
        """Make what belongs to one training; a second `start` is another one."""
        self.experiment = Experiment(self.scheme, self.loop)
        self.federation = Federation(
            virtual_clients=self._virtual_clients, min_available_nodes=self.min_available_nodes
        )
        self.conversation = Conversation(
            scheme=self.scheme,
            experiment=self.experiment,
            federation=self.federation,
            stragglers=self.loop.stragglers,
            deadline=self.loop.deadline,
            weighted_by=self.weight_key or self.weighted_by_key,
            untimed=self.untimed,
        )
        self._sums = None
        self._promised_before: dict[str, int] = {}
        self._promised = None
        self.releases: list[Release] = []
        self._instructions: dict[str, Instruction] = {}  # the last of each phase
        self.newcomers: list[str] = []  # clients that came since the round before
        self._names: dict[str, str] = {}  # of nodes that had not said who they are
        self._insecure = False  # whether a client said that its noise is from a seed
        self._announced = False

    # -- Parts of the loop -------------------------------------------------------------------

    def _prepared(self, grid: Grid, server_round: int) -> bool:
        """Run secret sharing for this round; return whether enough clients took part.

        True without a secure sum.
        """
        if self._sums is None:
            return True
        try:
            self._sums.prepare(grid, server_round, lambda r: self.drawn(grid, r))
        except NotOpenedError as error:
            logger.warning("%s", error)
            return False
        return True

    def take(self, mean: WeightedMean, reply: ClientReply) -> None:
        """Add a client's reply to an accumulator, with the client's weight."""
        arrays = reply.arrays() if mean.template else {}
        weighted_by = self.weight_key or self.weighted_by_key
        mean.take(reply.client_id, arrays, reply.metrics(), weighted_by)

    def _charge(self, phase: str, book: Round) -> None:
        instruction = self._instructions[phase]
        if instruction.cost is None:
            return
        clients = self.experiment.asked_before(_name(book)) | instruction.charged(book)
        # Under a user's own start a client is known once it has answered; what was lost before is
        # its own all the same.
        self._names |= {f"node-{node}": client for node, client in book.named.items()}
        self.releases = [
            replace(
                r,
                clients=tuple(sorted(self._named(r.clients))),
                unanswered=r.unanswered and tuple(sorted(self._named(r.unanswered))),
            )
            if not self._names.keys().isdisjoint(r.clients)
            else r
            for r in self.releases
        ]
        known = self._named(clients)
        silent = None if instruction.hidden else known - book.answered
        self._release(_name(book), instruction.costs(known), silent)

    def _named(self, clients: Iterable[str]) -> set[str]:
        return {self._names.get(client, client) for client in clients}

    def _note_late(self) -> None:
        """Note of charges whose answers came too late to be used that they were answered."""
        late: dict[str, set[str]] = {}
        for book, clients in self.conversation.came_late():
            late.setdefault(_name(book), set()).update(self._named(clients))
        for place, release in enumerate(self.releases):
            name = f"{release.phase} {release.server_round} {release.request}"
            if release.unanswered and name in late:
                left = tuple(c for c in release.unanswered if c not in late[name])
                self.releases[place] = replace(release, unanswered=left)

    def _charge_broken_off(self) -> None:
        """Charge what a run that broke off asked, where this one does not ask it again."""
        for question, noted in self.experiment.broken_off().items():
            costs: dict[Charge, set[str]] = {}
            for client, charge in noted.items():
                costs.setdefault(charge, set()).add(client)
            self._release(question, costs, set(noted))

    def _release(
        self, question: str, costs: Mapping[Charge, set[str]], silent: set[str] | None
    ) -> None:
        """Enter what a question cost; `silent` did not answer it, None if that is a secret."""
        phase, server_round, request = question.rsplit(" ", 2)
        for charge, names in sorted(costs.items(), key=lambda cost: min(cost[1])):
            release = Release(
                phase=phase,
                server_round=int(server_round),
                request=int(request),
                charge=charge,
                clients=tuple(sorted(names)),
                unanswered=None if silent is None else tuple(sorted(names & silent)),
            )
            self.releases.append(release)

    def _check_secure_sum(self) -> None:
        if self.secure_sum is None:
            return
        if not isinstance(self.secure_sum, SecureSum):
            raise InvalidParameterError("secure_sum", self.secure_sum, "a SecureSum, or None")
        if not self.summable:
            allowed = f"None: the answers of '{self.scheme}' are no codes on a grid"
            raise InvalidParameterError("secure_sum", self.secure_sum, allowed)
        if (metrics_fn := self._metrics_fns[TRAIN]) is not None:
            raise InvalidParameterError(
                "train_metrics_aggr_fn", metrics_fn, "None: under a secure sum no metrics are sent"
            )

    def _opened(self, masked: MaskedSum, phase: str, server_round: int) -> WeightedMean:
        """Return the scheme's accumulator with the sum, if it can be opened, else an empty one."""
        instruction = self._instructions[phase]
        empty = instruction.accumulator()
        if self._sums is None or masked.weight == 0:
            return empty
        last = self.planned_rounds is not None and server_round >= self.planned_rounds
        draw = None if last else lambda r: self.drawn(self._grid, r)
        try:
            book = self.conversation.book(phase)
            asked, book.question = book.question, RecordDict()  # it holds a model
            opened = self._sums.open(self._grid, masked, draw, asked=asked, again=instruction.again)
            mean = opened_mean(empty, *opened)
        except NotOpenedError as error:
            logger.warning("%s", error)
            return empty
        mean.merge_metrics(masked)
        return mean

    def _promise(self) -> Guarantee:
        promise = self.guarantee()
        if self.secure_sum is None or self._sums is None:
            return promise
        return replace(promise, secure_sum=self._sums.promise())

    def _begin(self, initial_arrays: ArrayRecord) -> tuple[ArrayRecord, int, dict[str, Any]]:
        """Return the arrays, the first round to train (0: evaluate first) and a line to complete.

        There is a line where the run before trained a round and did not come to its end.
        """
        self._began = time.monotonic()
        state = self.experiment.begin(initial_arrays)
        if state is None:
            return initial_arrays, 0, {}
        self.conversation.load_state(state["conversation"])
        card = PrivacyCard.from_json(state["card"])
        self.releases, self._promised = card.releases, card.guarantee
        self._promised_before = state["secure_sum"]
        self.load_state_dict(state["scheme_state"])
        if self._inner is not None:
            self._inner.load_state_dict(state["inner"])
        line = dict(state["line"])
        self._began -= float((line or self.experiment.history.lines[-1])["seconds"])
        return to_record(state["arrays"]), int(state["round"]) + 1, line

    def _end_training(self, line: dict[str, Any], arrays: ArrayRecord) -> None:
        """Write the checkpoint of a round before anybody sees its model."""
        self._charge_broken_off()
        card = self.card()
        seconds = time.monotonic() - self._began
        known = {**line, "scheme": self._scheme_numbers(line, card), "seconds": seconds}
        self.experiment.end_training(known, arrays, card=card, **self._state())

    def _end_round(
        self,
        grid: Grid,
        line: dict[str, Any],
        arrays: ArrayRecord,
        config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> PrivacyCard:
        """Have a model evaluated and complete its round's line; write checkpoint and card."""
        server_round = line["round"]
        if server_round > 0:
            line["evaluate"] = self._evaluate(grid, server_round, arrays, config)
        server = evaluate_fn(server_round, arrays) if evaluate_fn else None
        line["server"] = plain(dict(server or {}))
        self._charge_broken_off()
        card = self.card(final=server_round >= line["rounds"] or bool(self.stop()))
        line["scheme"] = self._scheme_numbers(line, card)
        line |= self.conversation.counts()
        line["seconds"] = time.monotonic() - self._began
        log(line)
        self.experiment.end_round(line, arrays, card=card, **self._state())
        return card

    def _scheme_numbers(self, line: dict[str, Any], card: PrivacyCard) -> dict[str, Any]:
        """Return the scheme's numbers; a run that only evaluates has no others of the training."""
        sums = self._sums.metrics() if self._sums is not None else {}
        return {**plain(sums), **line.get("scheme", {}), **plain(self.round_metrics(card))}

    def _state(self) -> dict[str, Any]:
        """Return what a resume needs besides the model, the history and the charges."""
        return {
            "conversation": self.conversation.state(),
            "scheme_state": self.state_dict(),
            "inner": self._inner.state_dict() if self._inner else {},
            "secure_sum": self._sums.state() if self._sums else {},
        }

    def _welcome(self, grid: Grid) -> None:
        self.newcomers = self.conversation.meet(grid)
        if self.newcomers:
            logger.info("joined: %s", self.newcomers)

    def _check_own_start(self) -> None:
        """Refuse under a user's own start what only this class's start can do."""
        if given := [name for name, value in self._only_with_start.items() if value is not None]:
            raise ProtocolError(
                f"{', '.join(given)}: works only where this strategy's own start runs the rounds"
            )

    def _participants(
        self, grid: Grid, server_round: int, phase: str, fraction: float, minimum: int
    ) -> Assigned:
        if fraction == 0:
            return {}
        return self.conversation.sample(
            grid, server_round, phase, fraction=fraction, minimum=minimum
        )

    def _evaluate(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> dict[str, Any]:
        if self.fraction_evaluate == 0:
            return {}
        self._promised = None  # who answers may say that its noise is from a seed
        messages = self.configure_evaluate(server_round, arrays, config, grid)
        replies = self.conversation.exchange(grid, messages, phase=EVALUATE)
        return plain(dict(self.aggregate_evaluate(server_round, replies) or {}))


def _name(book: Round) -> str:
    header = book.header
    return f"{header.phase} {header.server_round} {header.request}"
