"""The one loop that all strategies share.

`SchemeStrategy` takes FedAvg's constructor arguments, keeps the signature of Flower's
``Strategy.start`` and returns its ``Result``, so it replaces FedAvg in place. A scheme overrides
`train_round` if it talks to the nodes several times a round; one that needs a single exchange
overrides `question`, `fold` or `finish` and then also works under a user's own ``start`` that calls
only Flower's abstract methods.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from flwr_privacy.arrays import Arrays, decode_npy
from flwr_privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.errors import (
    CheckpointError,
    InvalidParameterError,
    ProtocolError,
    check_integer,
    check_number,
)
from flwr_privacy.identity import new_experiment_id, stream
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.wire import HELLO, RECORD, Fields, Header, payload_bytes

from . import checkpoint
from .exchange import exchange
from .federation import Federation
from .history import History, plain
from .inner import InnerStrategy
from .round import ClientReply, PartialSum, Round, arrays_of

__all__ = ["SchemeResult", "SchemeStrategy"]

logger = logging.getLogger("flwr.privacy")

TRAIN, EVALUATE = "train", "evaluate"
_FOREVER = 3600.0  # Flower's default timeout, where a user's own start gives none

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class SchemeResult(Result):
    """Flower's result with the history of the rounds (one dict per round, as in the JSON lines)."""

    history: list[dict[str, Any]] = field(default_factory=list)


class SchemeStrategy(FlowerFedAvg):
    """Base of the strategies: FedAvg's parameters and, by keyword, those of the shared loop.

    Parameters
    ----------
    fraction_train, fraction_evaluate, min_train_nodes, min_evaluate_nodes, \
min_available_nodes, weighted_by_key, arrayrecord_key, configrecord_key, \
train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        As in `flwr.serverapp.strategy.FedAvg`; "nodes" are clients here. The functions see records
        without their arrays, which are gone once they are summed up.
    seed : int, optional
        Root of the seeds of sampling and of simulated stragglers; by default the experiment's
        identity.
    experiment_id : str, optional
        Identity of the experiment; by default a new one, or the checkpoint's on a resume.
    clients : int, optional
        Number of simulated clients, which the nodes play between them. By default every node is
        one client.
    quorum : int, optional
        Number of averaged replies after which a round goes on. With simulated stragglers the
        `quorum` fastest clients count, and a refused reply among them is not replaced.
    deadline : float, optional
        Seconds after which an exchange goes on without the missing replies: real ones, or virtual
        ones where stragglers are simulated. By default the timeout given to `start`.
    stragglers : StragglerModel, optional
        Simulated answer times on a virtual clock.
    inner : flwr.serverapp.strategy.FedAvg, optional
        A Flower strategy (FedAdam, FedProx, ...) that takes the scheme's aggregate as one reply.
    run_dir : path, optional
        Existing folder for ``metrics.jsonl`` and ``checkpoint.bin``.
    resume : bool, default False
        Whether to go on from the checkpoint in `run_dir`.
    on_round : callable, optional
        Called with the history line of every round.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.
    """

    scheme: ClassVar[str]

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None = None,
        evaluate_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None = None,
        *,
        seed: int | None = None,
        experiment_id: str | None = None,
        clients: int | None = None,
        quorum: int | None = None,
        deadline: float | None = None,
        stragglers: StragglerModel | None = None,
        inner: FlowerFedAvg | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        check_number("fraction_train", fraction_train, minimum=0, maximum=1)
        check_number("fraction_evaluate", fraction_evaluate, minimum=0, maximum=1)
        super().__init__(
            fraction_train,
            fraction_evaluate,
            min_train_nodes,
            min_evaluate_nodes,
            min_available_nodes,
            weighted_by_key,
            arrayrecord_key,
            configrecord_key,
            train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn,
        )
        if clients is not None:
            check_integer("clients", clients, minimum=1)
        if quorum is not None:
            check_integer("quorum", quorum, minimum=1)
        if deadline is not None:
            check_number("deadline", deadline, minimum=1e-9)
        if resume and run_dir is None:
            raise InvalidParameterError("run_dir", run_dir, "the folder to resume from")
        self._metrics_fns = {TRAIN: train_metrics_aggr_fn, EVALUATE: evaluate_metrics_aggr_fn}
        self._seed = seed
        self._experiment_id = experiment_id
        self.quorum = quorum
        self.deadline = deadline
        self.stragglers = stragglers
        self.inner = InnerStrategy(inner) if inner is not None else None
        self.federation = Federation(
            virtual_clients=clients, min_available_nodes=min_available_nodes
        )
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._resume = resume
        self._history = History(self._run_dir and self._run_dir / "metrics.jsonl", on_round)
        self._rounds: dict[str, Round] = {}
        self._template: Arrays = {}
        self._timeout = _FOREVER
        self._virtual_seconds = 0.0

    # -- What a scheme overrides -------------------------------------------------------------

    def setup(self, grid: Grid) -> None:
        """Do what the scheme needs once, before the first round; by default nothing."""

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
        messages = self.configure_train(server_round, arrays, config, grid)
        return self.aggregate_train(server_round, self.exchange(grid, messages, phase=TRAIN))

    def question(self, server_round: int) -> Fields:
        """Return the scheme's own fields of the question to all clients; by default none."""
        return {}

    def accumulator(self, template: Arrays) -> WeightedMean:
        """Return an empty accumulator over the arrays of the global model."""
        return WeightedMean(template)

    def fold(self, mean: WeightedMean, reply: ClientReply, template: Arrays) -> None:
        """Add one client's reply to the accumulator.

        Raises
        ------
        ReplyRefusedError
            If the reply cannot be used; the accumulator is unchanged then.
        """
        metrics = reply.metrics()
        if self.weighted_by_key not in metrics:
            raise ReplyRefusedError("weight", f"no metric '{self.weighted_by_key}'")
        weight = metrics.pop(self.weighted_by_key)
        if isinstance(weight, list):
            raise ReplyRefusedError("weight", f"the metric '{self.weighted_by_key}' is a list")
        arrays = reply.arrays() if template else {}
        mean.fold(reply.client_id, arrays, weight=float(weight), metrics=metrics)

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
        evaluate_fn: EvaluateFn | None = None,
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
        """
        check_integer("num_rounds", num_rounds, minimum=1)
        self._timeout = check_number("timeout", timeout, minimum=1e-9)
        arrays, done = self._begin(initial_arrays)
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        began = time.monotonic()
        earlier = self._history.lines[-1]["seconds"] if self._history.lines else 0.0
        logger.info("%s: %d rounds, experiment %s", self.scheme, num_rounds, self.experiment_id)
        self.federation.wait(grid, self._timeout)
        self.federation.meet(grid, self._header(HELLO, 0), self._timeout)
        self.setup(grid)
        for server_round in range(done, num_rounds + 1):
            line: dict[str, Any] = {"round": server_round, "rounds": num_rounds}
            if server_round > 0:
                trained, metrics = self.train_round(grid, server_round, arrays, train_config)
                arrays = arrays if trained is None else trained
                line |= {"skipped": trained is None, **self._close(TRAIN)}
                line["train"] = plain(dict(metrics or {}))
                line["evaluate"] = self._evaluate(grid, server_round, arrays, evaluate_config)
            server = evaluate_fn(server_round, arrays) if evaluate_fn else None
            line["server"] = plain(dict(server or {}))
            line["virtual_seconds"] = self._virtual_seconds
            line["seconds"] = earlier + time.monotonic() - began
            self._save(server_round, arrays, line)
            self._history.add(line)
            self._log(line)
        return self._result(arrays)

    def exchange(self, grid: Grid, messages: Iterable[Message], *, phase: str) -> Iterator[Message]:
        """Send the messages of a phase; yield replies until quorum or deadline."""
        book = self._rounds[phase]

        def enough() -> bool:
            return (
                self.quorum is not None and self.stragglers is None and book.folded >= self.quorum
            )

        yield from exchange(grid, messages, deadline=self._deadline(), enough=enough)

    # -- Flower's abstract methods -----------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample clients and return the messages to the nodes that play them."""
        self._template = {name: decode_npy(array.data) for name, array in arrays.items()}
        config = ConfigRecord({**config, "server-round": server_round})
        if self.inner is not None:
            arrays, config = self.inner.configure(server_round, arrays, config)
        return self._ask(
            grid,
            server_round,
            TRAIN,
            RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config}),
            fraction=self.fraction_train,
            minimum=self.min_train_nodes,
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the replies as they come; return the new global arrays and the mean metrics."""
        mean, metrics = self._aggregate(TRAIN, replies, self._template)
        if mean is None or metrics is None:
            return None, None
        arrays = _record(mean.finish())
        if self.inner is not None:
            arrays = self.inner.aggregate(server_round, arrays, metrics, mean.weight)
            arrays = self._as_template(arrays)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample clients for the evaluation on their own data."""
        config = ConfigRecord({**config, "server-round": server_round})
        return self._ask(
            grid,
            server_round,
            EVALUATE,
            RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config}),
            fraction=self.fraction_evaluate,
            minimum=self.min_evaluate_nodes,
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean metrics of the clients' evaluations."""
        return self._aggregate(EVALUATE, replies, {})[1]

    # -- Identities --------------------------------------------------------------------------

    @property
    def experiment_id(self) -> str:
        """Identity of the experiment, made when it is first needed."""
        if self._experiment_id is None:
            self._experiment_id = new_experiment_id()
        return self._experiment_id

    @property
    def seed(self) -> int | str:
        """Root of all seeds."""
        return self.experiment_id if self._seed is None else self._seed

    # -- Questions ---------------------------------------------------------------------------

    def _ask(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        content: RecordDict,
        *,
        fraction: float,
        minimum: int,
    ) -> list[Message]:
        header = self._header(phase, server_round)
        if fraction == 0:
            self._rounds[phase] = Round(header, {})
            return []
        if not self.federation.met:  # a user's own start: the first replies will be the hello
            self.federation.wait(grid, self._timeout)
        else:
            self.federation.meet(grid, self._header(HELLO, 0), self._timeout)
        draws = stream(self.seed, "sample", phase, server_round)
        assigned = self.federation.sample(draws, fraction=fraction, minimum=minimum)
        late, virtual_seconds = self._late(server_round, phase, assigned)
        book = self._rounds[phase] = Round(header, assigned, late, virtual_seconds)
        record = {**header.write(), **(self.question(server_round) if phase == TRAIN else {})}
        single = RecordDict({**content, RECORD: ConfigRecord(record)})
        size = payload_bytes(single)
        messages = []
        for node, clients in assigned.items():
            question = single
            if self.federation.cohorts:
                own = self._cohort_fields(phase, clients, late)
                question = RecordDict({**content, RECORD: ConfigRecord({**record, **own})})
            book.bytes_down += size * len(clients)
            book.wire_bytes_down += payload_bytes(question)
            message_type = MessageType.TRAIN if phase == TRAIN else MessageType.EVALUATE
            # The ttl is the deadline, so that no two messages are outstanding for one client.
            messages.append(Message(question, node, message_type, ttl=self._deadline()))
        return messages

    def _late(
        self, server_round: int, phase: str, assigned: Mapping[int, list[str]]
    ) -> tuple[set[str], float]:
        """Return who is late and how long the exchange takes on the virtual clock."""
        clients = [client for clients in assigned.values() for client in clients]
        if self.stragglers is None or not clients:
            return set(), 0.0
        if "" in clients:
            raise ProtocolError(
                "simulated stragglers need to know who sits where: let this strategy's own start "
                "run the rounds"
            )
        return self.stragglers.race(
            clients,
            seed=self.seed,
            server_round=server_round,
            phase=phase,
            quorum=self.quorum if phase == TRAIN else None,
            deadline=self.deadline,
        )

    def _cohort_fields(self, phase: str, clients: list[str], late: set[str]) -> Fields:
        return {
            "clients": clients,
            "late": [client for client in clients if client in late],
            "num-clients": self.federation.virtual_clients or 0,
            "reply": "sum" if self._metrics_fns[phase] is None else "each",
            "weighted-by": self.weighted_by_key,
        }

    def _header(self, phase: str, server_round: int) -> Header:
        return Header(
            scheme=self.scheme,
            experiment_id=self.experiment_id,
            phase=phase,
            server_round=server_round,
        )

    def _deadline(self) -> float:
        if self.deadline is None or self.stragglers is not None:
            return self._timeout
        return self.deadline

    # -- Answers -----------------------------------------------------------------------------

    def _aggregate(
        self, phase: str, replies: Iterable[Message], template: Arrays
    ) -> tuple[WeightedMean | None, MetricRecord | None]:
        book = self._rounds[phase]
        mean = self.accumulator(template)
        contents: list[RecordDict] = []
        metrics_fn = self._metrics_fns[phase]
        for reply in book.replies(replies):
            try:
                if isinstance(reply, PartialSum):
                    arrays = arrays_of(reply.record)
                    mean.merge(type(mean).from_state(template, arrays, reply.fields))
                    book.folded += len(reply.clients)
                else:
                    self.fold(mean, reply, template)
                    book.folded += 1
                    if metrics_fn is not None:
                        contents.append(_without_arrays(reply.content))
            except ReplyRefusedError as error:
                book.refuse(error.reason, str(error))
        if mean.weight == 0:
            return None, None
        if metrics_fn is not None:
            return mean, metrics_fn(contents, self.weighted_by_key)
        return mean, MetricRecord(mean.metrics())

    def _as_template(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return arrays with the names, shapes and dtypes that the model came with."""
        return ArrayRecord(
            {
                name: Array(decode_npy(arrays[name].data).astype(like.dtype).reshape(like.shape))
                for name, like in self._template.items()
            }
        )

    def _evaluate(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> dict[str, Any]:
        if self.fraction_evaluate == 0:
            return {}
        messages = self.configure_evaluate(server_round, arrays, config, grid)
        replies = self.exchange(grid, messages, phase=EVALUATE)
        metrics = self.aggregate_evaluate(server_round, replies)
        self._close(EVALUATE)
        return plain(dict(metrics or {}))

    def _close(self, phase: str) -> dict[str, Any]:
        book = self._rounds[phase]
        self._virtual_seconds += book.virtual_seconds
        return book.line()

    # -- Checkpoint and result ---------------------------------------------------------------

    def _begin(self, initial_arrays: ArrayRecord) -> tuple[ArrayRecord, int]:
        """Return the arrays to start from and the first round (0: evaluate before training)."""
        if not self._resume or self._run_dir is None:
            self._history.restart([])
            return initial_arrays, 0
        path = self._run_dir / "checkpoint.bin"
        state = checkpoint.load(path)
        self._check_same_experiment(path, state, initial_arrays)
        self._experiment_id = state["experiment_id"]
        self._virtual_seconds = state["virtual_seconds"]
        self._history.restart(state["history"])
        self.load_state_dict(state["scheme_state"])
        if self.inner is not None:
            self.inner.load_state_dict(state["inner"])
        return _record(state["arrays"]), int(state["round"]) + 1

    def _check_same_experiment(
        self, path: Path, state: dict[str, Any], initial_arrays: ArrayRecord
    ) -> None:
        shapes = {name: tuple(array.shape) for name, array in initial_arrays.items()}
        mine = {
            "experiment_id": self._experiment_id or state["experiment_id"],
            "scheme": self.scheme,
            "seed": self._seed,
            "shapes": shapes,
        }
        theirs = {key: state.get(key) for key in mine}
        theirs["shapes"] = {name: array.shape for name, array in state["arrays"].items()}
        for key, value in mine.items():
            if theirs[key] != value:
                raise CheckpointError(
                    f"the checkpoint {path} is of another experiment: its {key} is "
                    f"{theirs[key]!r}, not {value!r}"
                )

    def _save(self, server_round: int, arrays: ArrayRecord, line: dict[str, Any]) -> None:
        if self._run_dir is None:
            return
        state = {
            "experiment_id": self.experiment_id,
            "scheme": self.scheme,
            "seed": self._seed,
            "round": server_round,
            "arrays": {name: array.numpy() for name, array in arrays.items()},
            "virtual_seconds": self._virtual_seconds,
            "history": [*self._history.lines, line],
            "scheme_state": self.state_dict(),
            "inner": self.inner.state_dict() if self.inner is not None else {},
        }
        checkpoint.save(self._run_dir / "checkpoint.bin", state)

    def _log(self, line: dict[str, Any]) -> None:
        if line.get("skipped"):
            logger.warning(
                "round %d skipped: no reply that could be used before the deadline (%d asked)",
                line["round"],
                line["asked"],
            )
        logger.info("round %d/%d: %s", line["round"], line["rounds"], line["server"])

    def _result(self, arrays: ArrayRecord) -> SchemeResult:
        result = SchemeResult(arrays=arrays, history=list(self._history.lines))
        for line in result.history:
            for key, metrics in (
                ("train", result.train_metrics_clientapp),
                ("evaluate", result.evaluate_metrics_clientapp),
                ("server", result.evaluate_metrics_serverapp),
            ):
                if line.get(key):
                    numbers = {k: v for k, v in line[key].items() if v is not None}
                    metrics[line["round"]] = MetricRecord(numbers)
        return result


def _record(arrays: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def _without_arrays(content: RecordDict) -> RecordDict:
    return RecordDict(
        {name: value for name, value in content.items() if not isinstance(value, ArrayRecord)}
    )
