"""The work of all sides: the clients' images, the models, and what a side reports.

Nothing here needs Flower or this library: pfl-research imports it in an environment of its own.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

__all__ = [
    "BUDGETED_ROUNDS",
    "CLIPPING_NORM",
    "COMPARES",
    "DELTA",
    "EPSILON",
    "TASKS",
    "Clock",
    "Data",
    "Task",
    "model_of",
    "parser",
    "write_images",
]

CLASSES = 10
CLIPPING_NORM = 1.0
EPSILON, DELTA, BUDGETED_ROUNDS = 50.0, 1e-5, 30  # the models are to survive the noise
COMPARES = "FLWR_PRIVACY_BENCHMARK"
"""Environment variable with the process that starts the sides."""

COMPARED_ROUND = 2  # the model after it is evaluated: have all sides learnt alike?
EVALUATED = 20  # clients whose images it is evaluated on

State = Mapping[str, "torch.Tensor | NDArray[np.float32]"]
"""The weights of a model by name."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained.

    Parameters
    ----------
    layers : tuple of int
        Widths of a perceptron; empty for ResNet-18 with group normalisation.
    clients, cohort : int
        How many there are, and how many train in a round.
    images : int
        Images of a client.
    batch : int, default 10
        Images of a step.
    learning_rate : float, default 0.05
        Of plain gradient descent.
    shape : tuple of int, default (28, 28)
        Shape of an image.
    sets : int, default 1000
        Different sets of images at most; more clients share them.
    """

    layers: tuple[int, ...]
    clients: int
    cohort: int
    images: int
    batch: int = 10
    learning_rate: float = 0.05
    shape: tuple[int, ...] = (28, 28)
    sets: int = 1000


TASKS = {
    "S": Task(layers=(784, 64, 10), clients=1000, cohort=50, images=60),
    "L": Task(layers=(784, 1024, 1024, 10), clients=1000, cohort=50, images=60),
    "tiny": Task(layers=(784, 64, 10), clients=10_000, cohort=1000, images=10),
    "ResNet": Task(
        layers=(),
        clients=20,
        cohort=4,
        images=20,
        batch=20,
        learning_rate=0.005,
        shape=(3, 32, 32),
    ),
}


def parser() -> argparse.ArgumentParser:
    """Return a parser of what every side with processes of its own is told."""
    made = argparse.ArgumentParser()
    made.add_argument("--started", type=float, required=True)
    made.add_argument("--data", required=True)
    made.add_argument("--out", required=True)
    made.add_argument("--size", required=True)
    made.add_argument("--rounds", type=int, required=True)
    return made


def write_images(path: Path, size: str) -> None:
    """Draw the images of all clients (noisy pictures of all classes) and write them down."""
    task = TASKS[size]
    draws = np.random.default_rng(0)
    height, width = task.shape[-2:]
    row, column = np.mgrid[:height, :width]
    pictures = np.zeros((CLASSES, *task.shape))
    for picture in pictures.reshape(-1, height, width):
        for y, x, reach in draws.uniform((6, 6, 2), (22, 22, 5), size=(4, 3)):
            picture += np.exp(-((row - y) ** 2 + (column - x) ** 2) / (2 * reach**2))
        picture /= picture.max()
    sets = min(task.clients, task.sets)
    labels = draws.integers(CLASSES, size=(sets, task.images))
    images = np.empty((sets, task.images, *task.shape), np.float32)
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

    def of(self, client: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return a client's images and labels."""
        own = client % len(self.images)
        return self.images[own], self.labels[own]

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss of a model on the images of some clients."""
        images = torch.from_numpy(self.images[:EVALUATED]).flatten(0, 1)
        labels = torch.from_numpy(self.labels[:EVALUATED]).flatten()
        with torch.no_grad():
            return float(functional.cross_entropy(model(images), labels))


def model_of(size: str) -> nn.Sequential:
    """Return a task's model with the weights that all sides start from."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return _perceptron(TASKS[size].layers) if TASKS[size].layers else _resnet()


def _perceptron(sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _resnet() -> nn.Sequential:
    """Return ResNet-18 for images of 32 x 32, with groups of 16 channels normalised together."""
    layers: list[nn.Module] = [*_convolution(3, 64, 1), nn.ReLU()]
    channels = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_Block(channels, width, stride), _Block(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class _Block(nn.Module):
    """Two convolutions, with what goes in added to what comes out."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        first, second = _convolution(channels, width, stride), _convolution(width, width, 1)
        self.inner = nn.Sequential(*first, nn.ReLU(), *second)
        self.past: nn.Module = nn.Identity()
        if stride != 1:
            self.past = nn.Sequential(*_convolution(channels, width, stride, kernel=1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.inner(images) + self.past(images))


def _convolution(channels: int, width: int, stride: int, kernel: int = 3) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [convolution, nn.GroupNorm(width // 16, width)]


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
        self._cpu: list[float] = []
        self._models: list[nn.Module] = []

    def round_ends(self, model: Callable[[], State]) -> None:
        """Note the end of a round; `model` returns the weights that it led to."""
        self._ends.append(time.time())
        self._cpu.append(_cpu_seconds())
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
            "cpu": (self._cpu[-1] - self._cpu[1]) / (len(self._cpu) - 2),
            "losses": [data.loss(model) for model in (start, *self._models)],
            "moved": float((_flat(self._models[0]) - _flat(start)).std()),
        }
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")


def _cpu_seconds() -> float:
    """Return the CPU seconds of the side's processes so far (Linux); 0 if nobody compares them."""
    compares = int(os.environ.get(COMPARES, -1))
    parents, ticks = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            values = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid] = int(values[1])
        ticks[pid] = int(values[11]) + int(values[12])  # in user mode and in the kernel

    def is_ours(pid: int) -> bool:
        while pid and parents.get(pid) != compares:
            pid = parents.get(pid, 0)
        return pid != 0

    return sum(filter(None, map(ticks.get, filter(is_ours, ticks)))) / os.sysconf("SC_CLK_TCK")


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
