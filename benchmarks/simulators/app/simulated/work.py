"""The work of all sides: the clients' images, the models, and what a side reports.

Nothing here needs Flower or this library: pfl-research imports it in an environment of its own.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

__all__ = [
    "BATCH",
    "BUDGETED_ROUNDS",
    "CLIENTS",
    "CLIPPING_NORM",
    "COHORT",
    "DELTA",
    "EPSILON",
    "IMAGES",
    "LEARNING_RATE",
    "Clock",
    "Data",
    "model_of",
    "parser",
    "train",
    "write_images",
]

CLIENTS, COHORT, IMAGES, CLASSES = 1000, 50, 60, 10
BATCH, LEARNING_RATE = 10, 0.05
CLIPPING_NORM = 1.0
EPSILON, DELTA, BUDGETED_ROUNDS = 50.0, 1e-5, 30  # the models are to survive the noise
MODELS = {"S": (784, 64, 10), "L": (784, 1024, 1024, 10)}
COMPARED_ROUND = 2  # the model after it is evaluated: have all sides learnt alike?
EVALUATED = 20  # clients whose images it is evaluated on

State = Mapping[str, "torch.Tensor | NDArray[np.float32]"]
"""The weights of a model by name."""


def parser() -> argparse.ArgumentParser:
    """Return a parser of what every side with processes of its own is told."""
    made = argparse.ArgumentParser()
    made.add_argument("--started", type=float, required=True)
    made.add_argument("--data", required=True)
    made.add_argument("--out", required=True)
    made.add_argument("--size", required=True)
    made.add_argument("--rounds", type=int, required=True)
    return made


def write_images(path: Path) -> None:
    """Draw the images of all clients (noisy pictures of all classes) and write them down."""
    draws = np.random.default_rng(0)
    row, column = np.mgrid[:28, :28]
    pictures = np.zeros((CLASSES, 28, 28))
    for picture in pictures:
        for y, x, width in draws.uniform((6, 6, 2), (22, 22, 5), size=(4, 3)):
            picture += np.exp(-((row - y) ** 2 + (column - x) ** 2) / (2 * width**2))
    pictures /= pictures.max(axis=(1, 2), keepdims=True)
    labels = draws.integers(CLASSES, size=(CLIENTS, IMAGES))
    images = np.empty((CLIENTS, IMAGES, 28, 28), np.float32)
    for own, classes in zip(images, labels, strict=True):
        own[:] = np.clip(pictures[classes] + draws.normal(scale=0.2, size=own.shape), 0, 1)
    np.savez(path, images=images, labels=labels)


class Data:
    """What the clients have.

    Parameters
    ----------
    path : Path
        File that `write_images` wrote.
    """

    def __init__(self, path: str | Path) -> None:
        with np.load(path) as archive:
            self.images: NDArray[np.float32] = archive["images"]
            self.labels: NDArray[np.int64] = archive["labels"]

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss of a model on the images of some clients."""
        images = torch.from_numpy(self.images[:EVALUATED]).flatten(0, 1)
        labels = torch.from_numpy(self.labels[:EVALUATED]).flatten()
        with torch.no_grad():
            return float(functional.cross_entropy(model(images), labels))


def model_of(size: str) -> nn.Sequential:
    """Return a perceptron, ``"S"`` or ``"L"``, with the weights that all sides start from."""
    layers: list[nn.Module] = [nn.Flatten()]
    sizes = MODELS[size]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Train a model on a client's images for one epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for batch, classes in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch), classes).backward()
        optimizer.step()


class Clock:
    """Notes when rounds end, and what the model has learnt after the first ones.

    Parameters
    ----------
    size : str
        The model.
    started : float
        When the side was started, in seconds of `time.time`.
    """

    def __init__(self, size: str, *, started: float) -> None:
        self._size, self._started = size, started
        self._ends: list[float] = []
        self._models: list[nn.Module] = []

    def round_ends(self, model: Callable[[], State]) -> None:
        """Note the end of a round; `model` returns the weights that it led to."""
        self._ends.append(time.time())
        if len(self._ends) <= COMPARED_ROUND:
            copied = model_of(self._size)
            copied.load_state_dict({k: torch.as_tensor(v).clone() for k, v in model().items()})
            self._models.append(copied)

    def write(self, path: str | Path, part: str, data: "Data") -> None:
        """Write down what was noted, when all rounds are over."""
        start = model_of(self._size)
        report = {
            "part": part,
            "first": self._ends[0] - self._started,
            "rounds": [end - begin for begin, end in pairwise(self._ends)],
            "losses": [data.loss(model) for model in (start, *self._models)],
            "moved": float((_flat(self._models[0]) - _flat(start)).std()),
        }
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
