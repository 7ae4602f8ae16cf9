"""Trains split models whose clients have other networks than FedVS's: the paper's Table 1.

A client maps its rows of an image to an embedding, and the server model takes the mean of all
embeddings. All of them are trained together by gradient descent, which is what split learning does
where nobody is late and nothing is hidden. FedVS itself has polynomial networks only.

The keys of a point: ``data``, ``clients``, ``records`` and ``test_records`` as in
`flwr_privacy.simulations.research.fedvs.experiment`; ``network``, one of `NETWORKS`, and its
``layers``; ``server``, one of `SERVERS`; ``embedding``, ``rounds``, ``batch_size`` and
``learning_rate``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.clients.torch import mlp
from flwr_privacy.clients.torch.computing import one_thread
from flwr_privacy.clients.torch.training import initialise
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.simulations.research.points import Point, Values
from flwr_privacy.simulations.tasks.vertical_tasks import vertical_task
from flwr_privacy.wire.identity import derive_seed, stream

from .experiment import columns_of

__all__ = ["NETWORKS", "SERVERS", "accuracies", "check"]

WIDTH = 28  # of an image
HIDDEN = 64
CHANNELS = (8, 16, 32)
VGG13 = ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512))
"""Channels of the convolutions of VGG13, by block."""

_KEYS = {
    *("data", "clients", "records", "test_records", "network", "layers", "server", "embedding"),
    *("rounds", "batch_size", "learning_rate"),
}
_INTEGERS = ("layers", "embedding", "rounds", "batch_size")


class _Powers(nn.Module):
    """Returns the powers of the features, up to an order."""

    def __init__(self, order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([rows**power for power in range(1, self.order + 1)], dim=1)


def _perceptron(pixels: int, layers: int, embedding: int) -> nn.Module:
    return nn.Sequential(mlp((pixels, *[HIDDEN] * (layers - 1), embedding)), nn.ReLU())


def _convolutions(pixels: int, layers: int, embedding: int) -> nn.Module:
    height, width = pixels // WIDTH, WIDTH
    modules: list[nn.Module] = [nn.Unflatten(1, (1, height, width))]
    for inputs, outputs in pairwise((1, *CHANNELS[:layers])):
        modules += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU()]
        if height > 1:
            modules.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    features = CHANNELS[layers - 1] * height * width
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(features, embedding))


def _polynomial(pixels: int, layers: int, embedding: int) -> nn.Module:
    return nn.Sequential(_Powers(layers), nn.Linear(layers * pixels, embedding))


NETWORKS: Mapping[str, Callable[[int, int, int], nn.Module]] = {
    "MLP": _perceptron,
    "CNN": _convolutions,
    "PN": _polynomial,
}
"""The clients' networks, from pixels, layers and the width of the embedding."""


def _vgg13(embedding: int, classes: int) -> nn.Module:
    """Return VGG13 on the embedding as a square picture, halved five times as far as it goes."""
    side = math.isqrt(embedding)
    modules: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    inputs = 1
    for block in VGG13:
        for outputs in block:
            modules += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU()]
            inputs = outputs
        if side > 1:
            modules.append(nn.MaxPool2d(2))
            side //= 2
    return nn.Sequential(*modules, *mlp((inputs * side**2, 4096, 4096, classes)))


SERVERS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "perceptron": lambda embedding, classes: mlp((embedding, 64, 32, classes)),
    "vgg13": _vgg13,
}
"""The server model, from the width of the embedding and the number of classes."""


class _Split(nn.Module):
    """Clients' networks, of which a server model takes the mean."""

    def __init__(self, clients: Sequence[nn.Module], server: nn.Module) -> None:
        super().__init__()
        self.clients, self.server = nn.ModuleList(clients), server

    def forward(self, blocks: Sequence[Tensor]) -> Tensor:
        embeddings = [client(rows) for client, rows in zip(self.clients, blocks, strict=True)]
        logits: Tensor = self.server(torch.stack(embeddings).mean(dim=0))
        return logits


def check(point: Point) -> None:
    """Refuse a point that cannot be trained.

    Raises
    ------
    InvalidParameterError
        If a key is unknown or a value is not allowed.
    """
    for key in point:
        check_choice("setting", key, _KEYS)
    for key in _INTEGERS:
        check_integer(key, int(point[key]), minimum=1)
    check_number("learning_rate", point["learning_rate"], minimum=0)
    check_choice("server", point["server"], SERVERS)
    if check_choice("network", point["network"], NETWORKS) == "CNN":
        check_integer("layers", int(point["layers"]), minimum=1, maximum=len(CHANNELS))
    task = vertical_task(point["data"])
    if task.units != (WIDTH,) * WIDTH or WIDTH % point["clients"]:
        allowed = f"images of {WIDTH} x {WIDTH} pixels, and clients with equally many rows"
        raise InvalidParameterError("data", f"{task.name}, {point['clients']} clients", allowed)


def accuracies(points: Sequence[Point], seed: int, data_root: Path | None) -> list[Values]:
    """Return accuracies on test records after the last round.

    Parameters
    ----------
    points : Sequence of Mapping
        See the top of this module.
    seed : int
        Root of rows, weights and batches.
    data_root : Path, optional
        Folder with data sets that no library brings.

    Raises
    ------
    InvalidParameterError
        If a key is unknown or a value is not allowed.
    DataError
        If data is missing.
    """
    return [{"accuracy": _trained(point, seed, data_root)} for point in points]


def _trained(point: Point, seed: int, data_root: Path | None) -> float:
    check(point)
    data = columns_of(
        point["data"],
        point["clients"],
        point.get("records"),
        point.get("test_records"),
        seed,
        data_root,
    )
    classes = int(max(data.labels.max(), data.test_labels.max())) + 1
    sizes = int(point["layers"]), int(point["embedding"])

    def module() -> nn.Module:
        own = partial(NETWORKS[point["network"]], data.columns[0], *sizes)
        return _Split([own() for _ in data.blocks], SERVERS[point["server"]](sizes[1], classes))

    model = initialise(module, derive_seed(seed, "initialise"))
    blocks = [torch.from_numpy(np.ascontiguousarray(block)) for block in data.blocks]
    tests = [torch.from_numpy(np.ascontiguousarray(block)) for block in data.test_blocks]
    labels = torch.from_numpy(data.labels.astype(np.int64))
    draws = stream(seed, "client networks", "batches")
    optimiser = torch.optim.SGD(model.parameters(), lr=point["learning_rate"])
    with one_thread():
        for _ in range(int(point["rounds"])):
            taken = torch.from_numpy(draws.choice(len(labels), int(point["batch_size"]), False))
            optimiser.zero_grad()
            loss = functional.cross_entropy(
                model([block[taken] for block in blocks]), labels[taken]
            )
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            found = model(tests).argmax(dim=1).numpy()
    return float(np.mean(found == data.test_labels))
