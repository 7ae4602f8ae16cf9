"""Transcripts of torch trainings, written by a test: no process, no app."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.simulations.engines.inline.flower_internals import records_to_bytes
from flwr_privacy.simulations.research.app_audit.rebuilt.case import Case
from flwr_privacy.simulations.research.app_audit.transcript import (
    Training,
    Transcript,
    TranscriptWriter,
)

Data = tuple[NDArray[Any], NDArray[Any]]
Arrays = list[NDArray[Any]]
plain_sgd = partial(torch.optim.SGD, lr=0.1)


def network(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Linear layers with ReLUs between."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for first, second in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def data(records: int, *shape: int, classes: int = 5, seed: int = 0) -> Data:
    """Records without structure."""
    draws = np.random.default_rng(seed)
    inputs = draws.uniform(0, 1, size=(records, *shape)).astype(np.float32)
    return inputs, draws.integers(0, classes, records)


def seen(part: Data, steps: int = 1) -> Training:
    inputs, labels = part
    classes, counts = np.unique(labels, return_counts=True)
    return Training(
        inputs=inputs[:64],
        labels=labels[:64],
        histogram=dict(zip(classes.tolist(), (steps * counts).tolist(), strict=True)),
        records=len(inputs),
        steps=steps,
    )


def run(
    folder: Path,
    model: nn.Module,
    clients: Sequence[Data],
    *,
    steps: int = 1,
    optimiser: Callable[..., torch.optim.Optimizer] = plain_sgd,
    leave: Callable[[Arrays, Arrays, int], Arrays] = lambda start, end, node: end,
    evaluated: Sequence[Data] = (),
    truths: Sequence[Data] | None = None,
    rounds: int = 1,
) -> Transcript:
    """Train each client on its data and average; `leave` says what leaves of (start, end).

    `truths` are noted as the records in place of those that were trained on.
    """
    writer = TranscriptWriter(folder)
    writer.model.write_bytes(cloudpickle.dumps(model))
    model = copy.deepcopy(model)
    current = _arrays(model)

    def keep(content: dict[str, Any]) -> str:
        return writer.keep(records_to_bytes(RecordDict(content)))[0]

    def write(kind: str, number: int, node: int, files: dict[str, str]) -> None:
        writer.write(
            round=number, kind=kind, node=node, error=None, seconds=0.0, sizes=[1, 1], files=files
        )

    for number in range(1, rounds + 1):
        asked = {"arrays": ArrayRecord(current)}
        ends = []
        for node, part in enumerate(clients):
            end = _trained(model, current, part, steps, optimiser)
            ends.append(end)
            metrics = MetricRecord({"num-examples": len(part[0])})
            left = ArrayRecord(leave(current, end, node))
            truth = (clients if truths is None else truths)[node]
            files = {"request": keep(asked), "inner_request": keep(asked)}
            files["reply"] = keep({"arrays": left, "metrics": metrics})
            files["inner_reply"] = keep({"arrays": ArrayRecord(end), "metrics": metrics})
            files["training"] = writer.keep_training(seen(truth, steps))
            write("train", number, node, files)
        current = [np.mean(parts, axis=0) for parts in zip(*ends, strict=True)]
        for node, part in enumerate(evaluated):
            files = {"request": keep({"arrays": ArrayRecord(current)}), "reply": keep({})}
            files["evaluated"] = writer.keep_training(seen(part), name="evaluated")
            write("evaluate", number, node, files)
    writer.close({"ended": "whole", "error": "", "mods": [], "network": []})
    return Transcript(folder)


def noise(sigma: float, seed: int = 0) -> Callable[[Arrays, Arrays, int], Arrays]:
    """Uploads that say nothing: the model that was sent, and noise."""
    draws = np.random.default_rng(seed)
    return lambda start, end, node: [
        (a + sigma * draws.normal(size=a.shape)).astype(np.float32) for a in start
    ]


def case(as_is: Transcript, few: Transcript | None, model: nn.Module, out: Path) -> Case:
    return Case(as_is=as_is, few=few, model=model, seed=3, out=out)


def _arrays(model: nn.Module) -> Arrays:
    return [value.detach().numpy().copy() for value in model.state_dict().values()]


def _trained(
    model: nn.Module,
    start: Arrays,
    part: Data,
    steps: int,
    optimiser: Callable[..., torch.optim.Optimizer],
) -> Arrays:
    names = list(model.state_dict())
    model.load_state_dict({n: torch.tensor(a) for n, a in zip(names, start, strict=True)})
    model.train()
    inputs, labels = torch.tensor(part[0]), torch.tensor(part[1])
    steps_of = optimiser(model.parameters())
    for _ in range(steps):
        steps_of.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        steps_of.step()
    return _arrays(model)
