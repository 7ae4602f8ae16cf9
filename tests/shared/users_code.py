"""The user's code of a node as it should be: trainings, evaluations, and what returns data."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from torch.utils.data import DataLoader, TensorDataset

from flwr_privacy.clients import VerticalData
from flwr_privacy.clients.torch import (
    evaluate_per_record,
    private_training,
    train_per_record,
    train_poisson,
)


def fit(parameters: list[Any]) -> Any:
    return [array + np.float32(0.25) for array in parameters], 3, {"loss": 0.5}


def squared(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((output.squeeze(1) - labels) ** 2).mean()


def per_record(trainer: Callable[..., Any], **options: Any) -> Callable[[list[Any]], Any]:
    """Return a function that has one of our trainers (evaluators) go over five records."""

    def work(parameters: list[Any], loss: Any = squared, features: Any = None) -> Any:
        net = torch.nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            net.weight.copy_(torch.tensor(parameters[0]))
        given = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
        given = given if features is None else features
        trainer(net, given, np.eye(5, dtype=np.float32)[2], loss=loss, **options)
        return [net.weight.detach().numpy()], 5, {}

    return work


def looped(net: torch.nn.Module, features: Any, labels: Any, *, loss: Any) -> None:
    """A loop of private steps, as the client "0" has it."""
    context = Context(1, 1, {"client-id": "0"}, RecordDict(), {})
    loader: Any = DataLoader(TensorDataset(torch.from_numpy(features), torch.from_numpy(labels)))
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5)
    net, optimizer, loader = private_training(net, optimizer, loader, context)
    for _ in range(loader.passes):
        for batch, own in loader:
            optimizer.zero_grad()
            torch.autograd.backward(loss(net(batch), own))
            optimizer.step()


steps = per_record(train_per_record)
private_steps = per_record(looped)
batches = per_record(train_poisson, learning_rate=0.1)
_losses = per_record(evaluate_per_record)


def evaluation(parameters: list[Any]) -> Any:
    return 0.5, 3, {"accuracy": 0.25}


def losses(parameters: list[Any], **given: Any) -> Any:
    _losses(parameters, **given)
    return 0.5, 5, {}


def tables() -> Any:
    draws = np.random.default_rng(4)
    return draws.uniform(-0.5, 0.5, (12, 3)), draws.uniform(-0.5, 0.5, (12, 2))


def nothing() -> Any:
    raise AssertionError("an aggregator has no code of a user's")


def columns() -> Any:
    return VerticalData(train=tables()[0])
