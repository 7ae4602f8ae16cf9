"""Trainings of UDP at record level for the attacks: real ones inline, and simulated ones."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.clients.torch import get_arrays, set_arrays, train_per_record
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.engines.quiet import quiet
from flwr_privacy.strategies import UDP, RecordLevel
from flwr_privacy.udp import NONE
from flwr_privacy.wire.arrays import Arrays

__all__ = [
    "DELTA",
    "Records",
    "budget",
    "epsilon_spent",
    "everybody",
    "imitate",
    "level",
    "train_inline",
]

DELTA = 1e-5

Loss = Callable[[Tensor, Tensor], Tensor]
Records = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Features and labels of a client."""


def budget(epsilon: float) -> dict[str, Any]:
    """Return what a strategy is told of its budget."""
    return {"noise": "gdp_fixed", "epsilon": epsilon, "delta": DELTA}


def level(epsilon: float | None, step: float = 1.0) -> RecordLevel:
    """Return what a strategy protects, with the same budget; without epsilon there is no noise."""
    spent = {"noise": NONE} if epsilon is None else budget(epsilon)
    return RecordLevel(**spent, learning_rate=step, clipping_norm=1.0)


def everybody(clients: int) -> dict[str, Any]:
    """Return what a strategy is told of who takes part."""
    return {"min_train_nodes": clients, "min_available_nodes": clients}


def epsilon_spent(strategy: UDP) -> float:
    """Return the epsilon of the client that spent most; infinity where there is no noise."""
    spent = strategy.card(final=True).guarantee.spent
    return spent or math.inf


def train_inline(
    strategy: UDP,
    client: type[UDPClient],
    network: Callable[[], nn.Module],
    data: Sequence[Records],
    loss: Loss,
    rounds: int,
) -> dict[str, NDArray[Any]]:
    """Train inline, one client for each part of the data; return the model."""
    app = ClientApp(mods=[as_mod(client)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        features, labels = data[int(context.node_config["partition-id"])]
        model = network()
        arrays = message.content.array_records["arrays"]
        set_arrays(model, {name: array.numpy() for name, array in arrays.items()})
        train_per_record(model, features, labels, loss=loss)
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(
            RecordDict({"arrays": _record(get_arrays(model)), "metrics": metrics}),
            reply_to=message,
        )

    strategy.experiment.leave_no_card()
    with closing(InlineGrid(app, len(data))) as grid, quiet(), acting_as_server(grid.run_id):
        result = strategy.start(grid, _record(get_arrays(network())), num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


def imitate(
    start: Callable[[], nn.Module],
    data: Sequence[Records],
    rounds: int,
    *,
    learning_rate: float,
    sigma: float,
    draws: np.random.Generator,
) -> dict[str, NDArray[Any]]:
    """Train as the clients do, without an engine, with noise of a standard deviation."""
    model = start()
    arrays = get_arrays(model)
    for _ in range(rounds):
        uploads = []
        for features, labels in data:
            set_arrays(model, arrays)
            train_per_record(
                model, features, labels, clipping_norm=1.0, learning_rate=learning_rate
            )
            uploads.append(get_arrays(model))
        arrays = {
            name: np.mean(
                [one[name] + sigma * draws.normal(size=array.shape) for one in uploads], axis=0
            ).astype(array.dtype)
            for name, array in arrays.items()
        }
    return arrays


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
