"""A small app whose clients train without data, and a run of a strategy with it."""

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.errors import NothingTrainedError
from flwr_privacy.simulations.engines.inline import run_inline

__all__ = [
    "MODEL",
    "StepClient",
    "message_app",
    "model_of",
    "record",
    "run_strategy",
    "same",
    "step",
    "turned_step",
    "twins",
]

MODEL = {
    "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "0": np.linspace(-1, 1, 5, dtype=np.float32),
    "batches": np.array(3),
}


def record(arrays: dict[str, Any] = MODEL) -> ArrayRecord:
    """Return arrays as a record of Flower; by default the model that the app trains."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def model_of(arrays: ArrayRecord) -> dict[str, Any]:
    """Return the arrays of a record."""
    return {name: array.numpy() for name, array in arrays.items()}


def step(array: Any, client: int) -> Any:
    """Local training that no two clients share and that depends on where it starts."""
    moved = array * (1 + client / 10) + client / 3
    return np.asarray(moved).astype(array.dtype).reshape(array.shape)


def turned_step(array: Any, client: int) -> Any:
    """Take a step whose direction is the client's own, so that clipping makes no two alike."""
    moved = array * (1 + client / 10 + client % 2 / 7) + client / 3
    return np.asarray(moved).astype(array.dtype).reshape(array.shape)


def message_app(mods: list[Any], take: Callable[[Any, int], Any] = step) -> ClientApp:
    """Return a stock Message-API app: local steps, weight partition + 1."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        arrays = model_of(message.content.array_records["arrays"])
        trained = record({name: take(array, client) for name, array in arrays.items()})
        metrics = MetricRecord({"num-examples": client + 1, "loss": client / 2})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": client + 1, "accuracy": client / 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @app.query("ping")
    def ping(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    return app


class StepClient(NumPyClient):
    """The same client as a NumPyClient."""

    def __init__(self, client: int, take: Callable[[Any, int], Any] = step) -> None:
        self.client, self.take = client, take

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Take the same steps."""
        trained = [self.take(array, self.client) for array in parameters]
        return trained, self.client + 1, {"loss": self.client / 2}

    def evaluate(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Return an accuracy that no two clients share."""
        return 1.0, self.client + 1, {"accuracy": self.client / 10}


def run_strategy(
    strategy: Any,
    app: ClientApp | None = None,
    *,
    nodes: Any = 4,
    arrays: ArrayRecord | None = None,
    before: Callable[[Grid], None] | None = None,
    **options: Any,
) -> Any:
    """Run a strategy's start inline and return its result, also if no round trained."""
    results = []
    faults = options.pop("faults", ())
    engine = {
        key: options.pop(key)
        for key in ("workers", "serialise", "state", "insecure_seed")
        if key in options
    }
    options.setdefault("num_rounds", 3)
    options.setdefault("timeout", 5)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        if before is not None:
            before(grid)
        try:
            results.append(strategy.start(grid, record() if arrays is None else arrays, **options))
        except NothingTrainedError as error:
            results.append(error.result)

    app = message_app([as_mod(FedAvgClient)]) if app is None else app
    run_inline(server_app, app, nodes=nodes, faults=faults, **engine)
    return results[0]


def same(one: ArrayRecord, other: ArrayRecord, *, exact: bool = True) -> bool:
    """Check that two models are the same, or nearly so; always True."""
    one_model, other_model = model_of(one), model_of(other)
    assert list(one_model) == list(other_model)
    for name, array in one_model.items():
        assert array.shape == other_model[name].shape
        assert array.dtype == other_model[name].dtype
        if exact:
            np.testing.assert_array_equal(array, other_model[name])
        else:
            np.testing.assert_allclose(array, other_model[name], rtol=3e-7, atol=1e-7)
    return True


def twins(models: Mapping[str, Mapping[str, NDArray[Any]]]) -> tuple[str, str] | None:
    """Return the names of two models that are the same, if there are any.

    Examples
    --------
    >>> twins({"a": {"w": np.ones(2)}, "b": {"w": np.zeros(2)}, "c": {"w": np.ones(2)}})
    ('a', 'c')
    """
    for one, other in combinations(models, 2):
        first, second = models[one], models[other]
        if first and all(np.array_equal(first[name], second[name]) for name in first):
            return one, other
    return None
