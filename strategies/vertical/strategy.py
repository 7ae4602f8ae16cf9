"""The shared strategy of vertical split learning, in which clients own columns.

The clients turn their columns of a batch into embeddings, the server aggregates them, goes on with
a server model and its labels, and returns the gradient with respect to the aggregate. A round is
one step on one mini-batch. The strategy's arrays are the server model; the clients' weights stay
with them.
"""

import logging
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import (
    InvalidParameterError,
    ProtocolError,
    check_choice,
    check_integer,
    check_number,
)
from flwr_privacy.fedvs.data import TEST_PART, TRAIN_PART
from flwr_privacy.fedvs.delays import HalfSlow
from flwr_privacy.fedvs.options import ColumnFeatures
from flwr_privacy.fedvs.rows import Segments, batch_of
from flwr_privacy.fedvs.server_model import ServerModel
from flwr_privacy.keywords import check_options, check_usual, checked_keywords
from flwr_privacy.strategies.requests.request_log import arrays_of
from flwr_privacy.strategies.state.experiment import SchemeResult
from flwr_privacy.wire.identity import derive_seed
from flwr_privacy.wire.message import EVALUATE

from .column_owners import ColumnOwners
from .columns import Aggregate, Enrolled, Pending, label_vector, natural

__all__ = ["VerticalStrategy"]

logger = logging.getLogger("flwr.privacy")

AGGREGATIONS = ("mean", "sum")


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class VerticalStrategy(ColumnOwners):
    """Base of the strategies in which clients own columns.

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `SchemeStrategy`. All clients take part in every round.
    labels : (M,) array
        Labels of the training rows, in the order of the clients' rows.
    server_model : ServerModel
        The server model, e.g. `flwr_privacy.clients.torch.TorchServerModel`.
    test_labels : (m,) array, optional
        Labels of the clients' part ``test``; without them nothing is evaluated.
    embedding : int, default 64
        h, the width of the embeddings.
    data : ColumnFeatures
        The features that clients make of their columns, and their bound.
    batch_size : int, default 32
        Rows of a mini-batch.
    learning_rate : float, default 0.05
        Step size of the server model.
    client_learning_rate : float, optional
        Step size of the clients' weights; by default `learning_rate`.
    aggregation : {"mean", "sum"}, default "mean"
        How embeddings are aggregated. With the mean the clients' gradients are divided by their
        number too.
    evaluate_every : int, optional
        Rounds from one evaluation to the next; by default those of an epoch. The last round is
        always evaluated.
    patience : int, default 10
        Rounds in a row that may be skipped before the training ends.
    parties : int, optional
        How many clients there must be; by default as many as there are.
    delays : bool or dict, default False
        Whether the clients' delays are simulated as in the paper: parameters of
        `flwr_privacy.fedvs.delays.HalfSlow`. What clients compute and send takes them time, too.
        Other laws are `stragglers`.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.
    """

    labels: ArrayLike
    server_model: ServerModel
    test_labels: ArrayLike | None = None
    embedding: int = 64
    data: ColumnFeatures = field(default_factory=ColumnFeatures)
    batch_size: int = 32
    learning_rate: float = 0.05
    client_learning_rate: float | None = None
    aggregation: Literal["mean", "sum"] = "mean"
    evaluate_every: int | None = None
    patience: int = 10
    parties: int | None = None
    delays: bool | Mapping[str, Any] = False

    weight_key = "num-examples"  # the clients' own: 1
    untimed: ClassVar[frozenset[str]] = frozenset({EVALUATE})
    metrics_phases: ClassVar[frozenset[str]] = frozenset()
    not_called: ClassVar[frozenset[str]] = frozenset({"configure_train", "aggregate_train"})

    def __post_init__(self) -> None:
        if self.loop.quorum is not None:
            allowed = "nothing: the scheme itself says for how many answers a round waits"
            raise InvalidParameterError("quorum", self.loop.quorum, allowed)
        if self.inner is not None:
            allowed = "None: the server model makes the steps"
            raise InvalidParameterError("inner", self.inner, allowed)
        if not isinstance(self.server_model, ServerModel):
            raise InvalidParameterError(
                "server_model",
                type(self.server_model).__name__,
                "a ServerModel: initial, step, scores and metrics",
            )
        self._labels = {TRAIN_PART: label_vector("labels", self.labels)}
        if self.test_labels is not None:
            self._labels[TEST_PART] = label_vector("test_labels", self.test_labels)
        check_integer("embedding", self.embedding, minimum=1)
        check_options(VerticalStrategy, self, "data")
        check_integer("batch_size", self.batch_size, minimum=1)
        check_number("learning_rate", self.learning_rate, minimum=0)
        own = self.learning_rate if self.client_learning_rate is None else self.client_learning_rate
        self._client_rate = check_number("client_learning_rate", own, minimum=0)
        self._mean = check_choice("aggregation", self.aggregation, AGGREGATIONS) == "mean"
        if self.evaluate_every is not None:
            check_integer("evaluate_every", self.evaluate_every, minimum=1)
        check_integer("patience", self.patience, minimum=1)
        if self.parties is not None:
            check_integer("parties", self.parties, minimum=1)
        if not isinstance(self.delays, bool | Mapping):
            raise InvalidParameterError("delays", self.delays, "true, false or a table")
        table = {} if isinstance(self.delays, bool) else dict(self.delays)
        if self.delays is not False:
            if self.loop.stragglers is not None:
                raise InvalidParameterError("delays", self.delays, "false with other stragglers")
            # It checks the table, but for what depends on the clients: they are not known yet.
            later = [key for key, own in table.items() if isinstance(own, Mapping)]
            later = [] if "clients" in table else [*later, "stragglers"]
            HalfSlow(**{"clients": ("0", "1"), **table, **dict.fromkeys(later)})
        self._delays = None if self.delays is False else table
        super().__post_init__()
        self.fraction_evaluate = 0.0  # the strategy evaluates by itself
        check_usual(self, {"fraction_train": 1.0}, "here: all clients take part in every round")

    def _build(self) -> None:
        super()._build()
        self.members: list[str] = []
        self._enrolled: dict[str, Enrolled] = {}
        self._pending: Pending | None = None
        self._updates = 0  # gradients so far
        self.counted = None  # the seconds of computing and messages, where they take time
        self._numbers: dict[str, float] = {}
        self._training = secrets.token_hex(16)  # two trainings of one name have other weights
        self._session = secrets.token_hex(16)  # and only another run may go a gradient back
        self._skipped = 0  # rounds in a row

    # -- What a scheme fills in --------------------------------------------------------------

    def aggregated(
        self, grid: Grid, server_round: int, part: str, coded: NDArray[np.int64]
    ) -> Aggregate:
        """Return the aggregate of the clients' embeddings of some coded rows of a part.

        Raises
        ------
        ProtocolError
            If it cannot be had in this round.
        """
        raise NotImplementedError

    def deliver(self, grid: Grid, server_round: int) -> None:
        """Send the clients the pending gradient, if there is one, and ask nothing else."""
        raise NotImplementedError

    def _told(self, server_round: int, clients: Collection[str]) -> None:
        """Forget the pending gradient, and warn of clients that did not get it."""
        missing = natural(set(self.members).difference(clients))
        if self._pending is not None and missing:
            logger.warning(
                "round %d: %s have not got the gradient",
                server_round,
                ", ".join(f"client {client}" for client in missing),
            )
        self._pending = None

    def segments(self, part: str) -> Segments:
        """Return the segments of a part's rows in its coded rows; by default one row each."""
        return Segments(rows=self._rows(part), K=1)

    def batch(self, server_round: int) -> NDArray[np.int64]:
        """Return the coded rows of a round's mini-batch; every epoch has each row once."""
        seed = derive_seed(self.experiment.seed, "vertical batches")
        length = self.segments(TRAIN_PART).length
        return batch_of(length, self.batch_rows(), seed, server_round)

    def batch_rows(self) -> int:
        """Return the coded rows of a mini-batch."""
        return math.ceil(self.batch_size / self.segments(TRAIN_PART).K)

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
        """Train; see `SchemeStrategy.start`.

        What the strategy finds on the part ``test`` stands beside what `evaluate_fn` returns, which
        sees the server model.
        """

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            found = dict(evaluate_fn(server_round, arrays) or {}) if evaluate_fn else {}
            last = server_round == self.planned_rounds
            return MetricRecord({**self._judged(grid, server_round, arrays, last=last), **found})

        return super().start(
            grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate
        )

    def train_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make one step on one mini-batch; skip the round if embeddings are missing."""
        if late := sorted(set(self.newcomers).difference(self.members)):
            logger.warning("clients %s came after the setup and take no part", late)
        self._template = arrays_of(arrays)
        self._numbers = {}
        segments = self.segments(TRAIN_PART)
        coded = self.batch(server_round)
        try:
            aggregate = self.aggregated(grid, server_round, TRAIN_PART, coded)
        except ProtocolError as error:
            logger.warning("round %d: %s", server_round, error)
            self._skipped += 1
            return None, None
        self._skipped = 0
        places, counted = segments.real_rows(coded), segments.counted(coded)
        labels = self._ordered_labels(TRAIN_PART)[places[counted]]
        embedding = aggregate.values[counted]
        renewed, gradient, loss = self.server_model.step(
            self._template, embedding, labels, self.learning_rate
        )
        results: list[Any] = [*renewed.values(), gradient, loss]
        if not all(np.isfinite(result).all() for result in results):
            logger.warning("round %d: the step is not finite, it is too large", server_round)
            return None, None
        whole = np.zeros(aggregate.values.shape, np.float32)
        whole[counted] = gradient
        self._updates += 1
        self._pending = Pending(rows=coded.tolist(), clients=aggregate.clients, gradient=whole)
        self._numbers["epoch"] = server_round / math.ceil(segments.length / self.batch_rows())
        metrics = MetricRecord({"loss": float(loss)})
        weight = float(len(aggregate.clients))
        like = {name: np.asarray(renewed[name]) for name in self._template}
        return self.renewed(server_round, like, metrics, weight), metrics

    def stop(self) -> str:
        """Return why the training ends: too many rounds in a row were skipped."""
        if self._skipped < self.patience:
            return ""
        return f"{self._skipped} rounds in a row were skipped (the log says why); resume it later"

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Raise an error under a user's own `start`: a round takes more than one exchange.

        Raises
        ------
        ProtocolError
            Always.
        """
        raise ProtocolError(
            f"'{self.scheme}' works only where this strategy's own start runs the rounds: it has a "
            "setup, and its clients wait for gradients"
        )

    def predict(
        self, grid: Grid, arrays: ArrayRecord, part: str = TEST_PART
    ) -> NDArray[np.float32]:
        """Return the scores of the rows of a part, after a training.

        Parameters
        ----------
        grid : Grid
            Flower's grid.
        arrays : ArrayRecord
            The server model, e.g. that of the result.
        part : str, default "test"
            Which of the clients' rows.

        Returns
        -------
        (m, classes) float32
            Scores in the order of the clients' rows.

        Raises
        ------
        ProtocolError
            If the clients' embeddings cannot be had.
        """
        server_round = self.planned_rounds or 1
        values = self._all_embeddings(grid, server_round, part)
        scores = self.server_model.scores(arrays_of(arrays), values)
        ordered = np.empty_like(scores)
        ordered[self._common_order(part)] = scores
        return ordered

    # -- The privacy card and the history ----------------------------------------------------

    def round_metrics(self, card: Any) -> dict[str, float]:
        """Return the numbers of the round."""
        return dict(self._numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the members and the pending gradient."""
        pending = self._pending
        return {
            "members": self.members,
            "enrolled": {
                name: {**vars(told), "rows": dict(told.rows), "ids": dict(told.ids)}
                for name, told in self._enrolled.items()
            },
            "updates": self._updates,
            "pending": None if pending is None else dict(vars(pending)),
            "insecure": self._insecure,
            "training": self._training,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.members = list(state["members"])
        self._enrolled = {name: Enrolled(**told) for name, told in state["enrolled"].items()}
        self._updates = state["updates"]
        self._pending = None if state["pending"] is None else Pending(**state["pending"])
        self._insecure = state["insecure"]
        self._training = state["training"]

    # -- Parts -------------------------------------------------------------------------------

    def _judged(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, *, last: bool
    ) -> dict[str, float]:
        """Return the metrics on the test rows, if this round evaluates."""
        found: dict[str, float] = {}
        every = self.evaluate_every or math.ceil(
            self.segments(TRAIN_PART).length / self.batch_rows()
        )
        due = server_round > 0 and (last or server_round % every == 0)
        if due and TEST_PART in self._labels:
            try:
                values = self._all_embeddings(grid, server_round, TEST_PART)
                labels = self._ordered_labels(TEST_PART)
                found = dict(self.server_model.metrics(arrays_of(arrays), values, labels))
            except ProtocolError as error:
                logger.warning("round %d is not evaluated: %s", server_round, error)
        if last:  # the clients' weights are to be those that go with the model
            self.deliver(grid, server_round)
        return found

    def _all_embeddings(self, grid: Grid, server_round: int, part: str) -> NDArray[np.float32]:
        """Return the aggregated embeddings of all rows of a part, in the common order."""
        segments = self.segments(part)
        found = np.empty((segments.rows, self.embedding), np.float32)
        coded = np.arange(segments.length)
        for start in range(0, segments.length, self.rows_at_a_time(part)):
            chunk = coded[start : start + self.rows_at_a_time(part)]
            values = self.aggregated(grid, server_round, part, chunk).values
            counted = segments.counted(chunk)
            found[segments.real_rows(chunk)[counted]] = values[counted]
        return found

    def rows_at_a_time(self, part: str) -> int:
        """Return the number of coded rows to evaluate at a time; by default all."""
        return self.segments(part).length

    def _ordered_labels(self, part: str) -> NDArray[Any]:
        return self._labels[part][self._common_order(part)]
