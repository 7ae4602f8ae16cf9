"""The client half of the app: trains the task, wrapped in the scheme that the settings name.

A scheme that brings its own client has no use for the app's training: it gets the task's data.
"""

import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_privacy.clients import FedVSClient, SchemeClient, as_mod
from flwr_privacy.clients.node.adapters import OwnClient
from flwr_privacy.clients.node.context_store import (
    STATE_VARIABLE,
    is_simulated,
    is_simulated_client,
)
from flwr_privacy.clients.node.node_settings import may_run_any
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.engines.superlink import TEST_SEED_VARIABLE
from flwr_privacy.simulations.settings.own_code import is_reference
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.settings.schemes import client_of, scheme
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.simulations.tasks.lookup import ALLOWED_VARIABLE, check_same_task
from flwr_privacy.simulations.tasks.vertical_tasks import vertical_data, vertical_task
from flwr_privacy.wire.identity import client_id_from, derive_seed

__all__ = ["app"]

ASKED = {
    "local-steps": "steps",
    "learning-rate-scale": "scale",
    "classifier-noise": "perturbation",
}
"""What a scheme's question may ask of the training, with the parameters of `tasks.train_client`."""


def scheme_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Wrap the app in its scheme, which is known only once there is a run configuration."""
    settings = _settings(context)
    check_same_task(settings.task, str(context.run_config.get("task-digest", "")))
    client = client_of(settings)
    run_dir = str(context.run_config["run-dir"])
    if run_dir and not client.bare and is_simulated() and STATE_VARIABLE not in os.environ:
        # Simulated clients keep their state with the run: each run is about people of its own.
        folder = Path(run_dir, "clients")
        folder.mkdir(exist_ok=True)
        context.node_config.setdefault("privacy-state", str(folder))
    if is_simulated() and TEST_SEED_VARIABLE in os.environ:
        context.node_config.setdefault("insecure-seed", int(os.environ[TEST_SEED_VARIABLE]))
    if scheme(settings.scheme).own_client:
        return _own_client(settings, client)(message, context)
    if scheme(settings.scheme).vertical:
        return _column_client(settings, client, context)(message, context)
    return as_mod(client)(message, context, call_next)


def _own_client(settings: Settings, client: Callable[..., SchemeClient]) -> OwnClient:
    """Return what answers with the task's data, which is read when the client asks for it."""
    task = tasks.task(settings.task)

    def data_of(context: Context) -> Callable[[], Any]:
        return partial(tasks.regression_data, task, settings, *_place(context))

    return OwnClient(partial(client, features=tasks.feature_map(task), excess="clip"), data_of)


def _column_client(
    settings: Settings, client: Callable[..., SchemeClient], context: Context
) -> OwnClient:
    """Return what answers with the client's columns of the task's data."""
    task = vertical_task(settings.task)

    def data_of(context: Context) -> Callable[[], Any]:
        return partial(vertical_data, task, settings, *_place(context))

    # In a simulation the clients agree to what the server is told; a deployed one has no say there.
    if client is FedVSClient and (is_simulated() or may_run_any(context.node_config)):
        client = partial(
            client,
            paper=not settings.strategy.get("zero_mask", not settings.strategy.get("paper", False)),
            partial_sums="least_dealers" in settings.strategy,
        )
    return OwnClient(client, data_of)


app = ClientApp(mods=[scheme_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model on this client's part of the data."""
    settings = _settings(context)
    config = message.content.config_records["config"]
    server_round = int(str(config["server-round"]))
    purpose: list[str | int] = ["train", client_id_from(context.node_config), server_round]
    if segment := int(str(config.get("segment", 0))):
        purpose.append(segment)  # the parts of a round have batches of their own
    asked: dict[str, Any] = {name: config[key] for key, name in ASKED.items() if key in config}
    arrays, examples, metrics = tasks.train_client(
        tasks.task(settings.task),
        settings,
        _model(message),
        *_place(context),
        seed=derive_seed(settings.seed, *purpose),
        server_round=server_round,
        context=context,
        **asked,
    )
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(array) for name, array in arrays.items()}),
            "metrics": MetricRecord({**metrics, "num-examples": examples}),
        }
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model on this client's part of the data."""
    settings = _settings(context)
    asked = message.content.config_records["config"].get("label-histogram", 0)
    examples, metrics = tasks.evaluate_client(
        tasks.task(settings.task),
        settings,
        _model(message),
        *_place(context),
        labels=int(str(asked)),
    )
    record = MetricRecord({**metrics, "num-examples": examples})
    return Message(RecordDict({"metrics": record}), reply_to=message)


def _settings(context: Context) -> Settings:
    """Return the run's settings; what a server names is imported only where the node allows it."""
    settings = _parsed(str(context.run_config["settings"]))
    own = is_reference(settings.task) and not is_simulated_client(context)
    if own and os.environ.get(ALLOWED_VARIABLE) != settings.task:
        allowed = f"a task of a package, or the one that the node's {ALLOWED_VARIABLE} names"
        raise InvalidParameterError("task", settings.task, allowed)
    return settings


@lru_cache(maxsize=4)
def _parsed(text: str) -> Settings:
    return Settings.from_toml(text)


def _model(message: Message) -> dict[str, NDArray[Any]]:
    return {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}


def _place(context: Context) -> tuple[int, int]:
    """Return the index of this client's partition and the number of partitions."""
    return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
