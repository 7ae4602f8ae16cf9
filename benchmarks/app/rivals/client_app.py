"""The client app of both sides: an echo, and a training that wants no data files."""

from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_privacy.clients import FedAvgClient, as_mod

__all__ = ["IMAGES", "SIZES", "app"]

SIZES = (784, 256, 10)
IMAGES = 60
CLASSES = 10

app = ClientApp(mods=[as_mod(FedAvgClient)])


@app.query("echo")
def echo(message: Message, context: Context) -> Message:
    """Send back what came."""
    return Message(message.content, reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one epoch on this client's images."""
    from flwr_privacy.clients import torch as training  # the echo needs no torch

    client = int(context.node_config["partition-id"])
    arrays = message.content["arrays"]
    model = _model()
    training.set_arrays(model, {name: array.numpy() for name, array in arrays.items()})
    images, labels = _images(client)
    loss = training.train(model, images, labels, seed=client, device="cpu")
    trained = training.get_arrays(model)
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(array) for name, array in trained.items()}),
            "metrics": MetricRecord({"num-examples": len(labels), "loss": loss}),
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
def _images(client: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a client's images (noisy pictures of all classes) and their classes."""
    draws = np.random.default_rng((1, client))
    labels = draws.integers(CLASSES, size=IMAGES)
    noise = draws.normal(scale=0.2, size=(IMAGES, 28, 28))
    images = np.clip(_prototypes()[labels] + noise, 0, 1).astype(np.float32)
    return images.reshape(IMAGES, 1, 28, 28), labels
