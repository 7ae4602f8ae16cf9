"""The client app of all sides: an echo, and a training that wants no data files."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_privacy.clients import FedAvgClient, M2FDPClient, SecureSumClient, UDPClient, as_mod
from flwr_privacy.clients.certificates.per_record_steps import current_plan
from flwr_privacy.secure_sum.messages import JOIN, KEYS, SHARES
from flwr_privacy.wire.message import RECORD

__all__ = ["SIZES", "app"]

SIZES = (784, 256, 10)
CLASSES = 10

MODS = {client.scheme: as_mod(client) for client in (FedAvgClient, UDPClient, M2FDPClient)}
SUMMED = as_mod(SecureSumClient)


def scheme_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Wrap the app in the scheme that the message names: one app serves the turns of all schemes.

    For benchmarks only: an app with something to protect does not leave that to the server.
    """
    scheme = FedAvgClient.scheme  # its mod lets Flower's own messages through
    if RECORD in message.content:
        record = message.content.config_records[RECORD]
        if JOIN in message.content or record["phase"] in (KEYS, SHARES):
            return SUMMED(message, context, call_next)
        scheme = str(record["scheme"])
    return MODS[scheme](message, context, call_next)


app = ClientApp(mods=[scheme_mod])


@app.query("echo")
def echo(message: Message, context: Context) -> Message:
    """Send back what came."""
    return Message(message.content, reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's images: for one epoch, or one step if a scheme asks for it."""
    from flwr_privacy.clients import torch as training  # the echo needs no torch

    client = int(context.node_config["partition-id"])
    arrays = message.content["arrays"]
    model = _model()
    training.set_arrays(model, {name: array.numpy() for name, array in arrays.items()})
    images, labels = _images(client, int(context.run_config["images"]))
    metrics: dict[str, Any] = {"num-examples": len(labels)}
    if current_plan() is None:
        metrics["loss"] = training.train(model, images, labels, seed=client, device="cpu")
    else:
        training.train_per_record(model, images, labels, device="cpu")
    trained = training.get_arrays(model)
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(array) for name, array in trained.items()}),
            "metrics": MetricRecord(metrics),
        }
    )
    return Message(content, reply_to=message)


@lru_cache(maxsize=1)
def _model() -> Any:
    from flwr_privacy.clients.torch import mlp

    return mlp(SIZES)


@lru_cache(maxsize=1)
def _prototypes() -> NDArray[np.float32]:
    """Return one smooth picture per class, 28x28 with values from 0 to 1."""
    draws = np.random.default_rng(0)
    row, column = np.mgrid[:28, :28]
    pictures = np.zeros((CLASSES, 28, 28))
    for picture in pictures:
        for y, x, width in draws.uniform((6, 6, 2), (22, 22, 5), size=(4, 3)):
            picture += np.exp(-((row - y) ** 2 + (column - x) ** 2) / (2 * width**2))
    return (pictures / pictures.max(axis=(1, 2), keepdims=True)).astype(np.float32)


@lru_cache(maxsize=256)
def _images(client: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a client's images (noisy pictures of all classes) and their classes."""
    draws = np.random.default_rng((1, client))
    labels = draws.integers(CLASSES, size=count)
    noise = draws.normal(scale=0.2, size=(count, 28, 28))
    images = np.clip(_prototypes()[labels] + noise, 0, 1).astype(np.float32)
    return images.reshape(count, 1, 28, 28), labels
