"""Plain vertical split learning on the client, the baselines of FedVS."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_privacy.clients.node.adapters import own_client_app
from flwr_privacy.clients.node.base import SchemeClient, Train
from flwr_privacy.errors import ProtocolError
from flwr_privacy.fedvs.data import TRAIN_PART, VerticalData
from flwr_privacy.fedvs.network import initial_weights
from flwr_privacy.fedvs.split_vfl import EmbeddingRequest, noisy
from flwr_privacy.pipeline.mechanism import Answer, ProtocolStep
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.grid import GridMean
from flwr_privacy.secure_sum.fedavg_terms import FedAvgSumTerms
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS, TRAIN, Fields

from .columns import GivenData, Owned, told_of
from .weights import WeightUpdate, begin_weights, gradient_in, move_weights

__all__ = ["SplitVFLClient", "split_vfl_client_app"]

ENROL, EMBED, SETTLE = "enrol", "embed", "settle"
EMBEDDING, GRADIENT = "embedding", "gradient"


class SplitVFLClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.SplitVFL`.

    Parameters
    ----------
    data : VerticalData or callable
        The client's columns, or a function without arguments that returns them.
    context : Context
        Flower's context of this client.

    Guarantee
    ---------
    None but, in a training under a secure sum, that of `flwr_privacy.secure_sum.Participant`: the
    server sees the embeddings of each client, noise of the method ``wait-dp`` included. A node
    whose policy has ``max_epsilon`` or ``units`` declines.
    """

    scheme: ClassVar[str] = "split-vfl"
    phases: ClassVar[frozenset[str]] = frozenset({ENROL, TRAIN, EMBED, SETTLE})
    sums: ClassVar[str] = "may"

    def __init__(self, data: GivenData, context: Context | None = None) -> None:
        super().__init__(None, context)
        self._data = data

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> ProtocolStep:
        """Return the step that describes the data, or embeds some rows."""
        if phase == ENROL:
            return ProtocolStep(lambda store: ({}, told_of(self._owned(store))))
        step = records.read(EmbeddingRequest, fields)
        step.check()
        return ProtocolStep(
            lambda store: _embed(phase, store, self._owned(store), step, arrays, fields)
        )

    def _owned(self, store: StepStore) -> Owned:
        return Owned(self._data, str(store.folder), store.experiment_id)

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of embeddings as codes, for a secure sum."""
        if phase != TRAIN or "grid" not in fields:
            return WeightedMean({})
        step = records.read(EmbeddingRequest, fields)
        zeros = np.zeros((len(step.rows), step.embedding))
        return GridMean({EMBEDDING: zeros}, FedAvgSumTerms.read(fields).grid, [EMBEDDING])


def split_vfl_client_app(data_fn: Callable[[Context], VerticalData]) -> ClientApp:
    """Return the ClientApp of a client that has columns of the data, under plain split learning.

    Parameters
    ----------
    data_fn : callable
        Takes the context and returns the client's columns; called only when they are needed.

    Examples
    --------
    >>> app = split_vfl_client_app(lambda context: VerticalData(train=[[0.5, 1.0], [0.0, -1.0]]))
    """
    return own_client_app(SplitVFLClient, lambda context: partial(data_fn, context))


def _embed(
    phase: str,
    store: StepStore,
    owned: Owned,
    step: EmbeddingRequest,
    arrays: Arrays,
    fields: Fields,
) -> Answer:
    """Take the step that the gradient asks for; embed the rows.

    Raises
    ------
    LedgerError
        If the node's files cannot be used.
    DataError, ProtocolError
        If the request is malformed, or the data do not fit it.
    """
    expanded = owned.expanded(order=step.order, bias=step.bias, x_max=step.x_max)
    own: Fields = {METRICS: {"num-examples": 1}}
    state = store.state
    shape = expanded.parts[TRAIN_PART].shape[1], step.embedding
    begin_weights(
        state,
        training=step.training,
        update=max(0, step.update - 1),
        shape=shape,
        draw=lambda: initial_weights(*shape, store.random("initial weights")),
    )

    def moved(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        places = np.array(step.trained_rows, np.int64)
        if not len(places) or store.client_id not in step.trained_clients:
            return weights
        gradient = gradient_in(arrays, len(places), step.embedding, name=GRADIENT)
        return WeightUpdate(
            rows=expanded.rows(TRAIN_PART, places),
            gradient=gradient.astype(np.float64),
            divisor=step.divisor,
            learning_rate=step.learning_rate,
            w_max=None,
        ).of(weights)

    move_weights(state, session=step.session, update=step.update, moved=moved)
    if phase == SETTLE:
        return {}, own
    rows = expanded.parts.get(step.part)
    if rows is None:
        raise ProtocolError(f"the client has no part '{step.part[:64]}'")
    places = np.array(step.rows or range(len(rows)), np.int64)
    embedding = expanded.rows(step.part, places) @ state["weights"]
    if step.epsilon > 0:
        embedding = noisy(
            embedding, epsilon=step.epsilon, clip=step.clip, random=store.random("noise")
        )
    if fields["summed"]:
        return {EMBEDDING: FedAvgSumTerms.read(fields).codes(embedding, "an embedding")}, own
    return {EMBEDDING: embedding.astype(np.float32)}, own
