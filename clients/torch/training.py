"""Trains and evaluates a torch model locally, bit for bit the same in every process.

On the CPU everything runs on one thread, because the order of a sum depends on the number of
threads. A GPU makes no such promise.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.errors import DataError, InvalidParameterError, check_integer

from .computing import Loss, allotted_device, one_thread
from .gradient_descent.descent import descend

__all__ = ["check_records", "evaluate", "get_arrays", "initialise", "set_arrays", "train"]

Arrays = dict[str, NDArray[Any]]


def initialise(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a new model with seeded weights; torch's global generator stays as it was.

    Parameters
    ----------
    factory : callable
        Makes the model, on the CPU.
    seed : int
        Seed of its weights, 0 to 2**63 - 1.

    Examples
    --------
    >>> a, b = (initialise(lambda: nn.Linear(2, 2), 7) for _ in range(2))
    >>> torch.equal(a.weight, b.weight)
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return factory()


def get_arrays(model: nn.Module) -> Arrays:
    """Return copies of all parameters and buffers under the names of ``state_dict``."""
    return {
        name: tensor.detach().cpu().numpy().copy() for name, tensor in model.state_dict().items()
    }


def set_arrays(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Copy `arrays` into the parameters and buffers of `model`, cast to their types.

    Raises
    ------
    InvalidParameterError
        If arrays are missing or unknown, or a shape differs; the model is then as it was.
    """
    state = model.state_dict()
    missing = [name for name in state if name not in arrays]
    unknown = [name for name in arrays if name not in state]
    if missing or unknown:
        raise InvalidParameterError(
            "arrays",
            list(arrays),
            f"the names {list(state)} (missing: {missing}, unknown: {unknown})",
        )
    for name, tensor in state.items():
        if np.shape(arrays[name]) != tuple(tensor.shape):
            raise InvalidParameterError(
                f"arrays[{name!r}]",
                f"shape {np.shape(arrays[name])}",
                f"shape {tuple(tensor.shape)}",
            )
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(torch.from_numpy(np.array(arrays[name], order="C")))


def train(
    model: nn.Module,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 32,
    learning_rate: float = 0.1,
    perturbation: float = 0.0,
    seed: int,
    loss: Loss = functional.cross_entropy,
    device: str | None = None,
) -> float:
    """Train `model` in place by stochastic gradient descent.

    Parameters
    ----------
    model : nn.Module
        Maps (batch, ...) features to (batch, classes) logits; it is moved to `device`.
    features : (n, ...) float32
        Records.
    labels : (n,) int64
        Their classes.
    epochs : int, default 1
        Passes over the records, each in a new order. With `steps` it is not used.
    steps : int, optional
        Steps in place of whole passes, at least 1: as many passes as they need, the last of which
        may be left unfinished.
    batch_size : int, default 32
        Records per step; the last step of a pass may have fewer.
    learning_rate : float, default 0.1
        Step size, >= 0.
    perturbation : float, default 0.0
        Standard deviation, >= 0, of the regulariser of PEDPFL: where it is above 0, each step adds
        the gradient of the loss of the same batch at weights whose last layer (in the order in
        which the model names them) is off by normal noise, drawn once per step. The noise makes the
        model bear noise; it protects nobody.
    seed : int
        Seed of the orders and of the perturbation. A model whose layers draw numbers themselves
        (dropout) takes those from torch's global generator.
    loss : callable, default cross entropy of logits
        From the model's output for a batch and its labels to their mean loss.
    device : str, optional
        By default `allotted_device`.

    Returns
    -------
    float
        Mean loss per record over all steps, each measured before the step it leads to and without
        the perturbation.

    Raises
    ------
    DataError
        If there are no records, or not one label per record.
    InvalidParameterError
        If a setting is out of range.
    """
    check_integer("epochs", epochs, minimum=1)
    if steps is not None:
        check_integer("steps", steps, minimum=1)
    check_integer("batch_size", batch_size, minimum=1)
    check_records(features, labels)
    batches = _shuffled(len(labels), batch_size, None if steps else epochs, seed)
    return descend(
        model,
        features,
        labels,
        islice(batches, steps),
        learning_rate=learning_rate,
        perturbation=perturbation,
        seed=seed,
        loss=loss,
        device=device,
    ).loss


def evaluate(
    model: nn.Module,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    batch_size: int = 1024,
    loss: Loss = functional.cross_entropy,
    device: str | None = None,
) -> dict[str, float]:
    """Return the mean ``loss`` and the share of hits (``accuracy``), the largest logit winning.

    Parameters
    ----------
    model : nn.Module
        Maps (batch, ...) features to (batch, classes) logits; it is moved to `device`.
    features : (n, ...) float32
        Records.
    labels : (n,) int64
        Their classes.
    batch_size : int, default 1024
        Records at a time; it bounds the memory.
    loss : callable, default cross entropy of logits
        From the model's output for a batch and its labels to their mean loss.
    device : str, optional
        By default `allotted_device`.

    Raises
    ------
    DataError
        If there are no records, or not one label per record.
    """
    check_integer("batch_size", batch_size, minimum=1)
    check_records(features, labels)
    device = device or allotted_device()
    model.to(device).eval()
    total, hits = 0.0, 0
    with one_thread(), torch.no_grad():
        for start in range(0, len(labels), batch_size):
            batch = slice(start, start + batch_size)
            logits = model(torch.tensor(features[batch], device=device))
            targets = torch.tensor(labels[batch], device=device)
            total += float(loss(logits, targets)) * len(targets)
            hits += int((logits.argmax(dim=1) == targets).sum())
    return {"loss": total / len(labels), "accuracy": hits / len(labels)}


def _shuffled(records: int, batch_size: int, epochs: int | None, seed: int) -> Iterator[Tensor]:
    """Yield the places of the records of each step, for some passes or without end."""
    generator = torch.Generator().manual_seed(seed)
    while epochs is None or epochs > 0:
        yield from torch.split(torch.randperm(records, generator=generator), batch_size)
        epochs = None if epochs is None else epochs - 1


def check_records(
    features: NDArray[np.float32], labels: NDArray[np.int64], *, may_be_none: bool = False
) -> None:
    """Check that there are records, unless there may be none, and a label for each.

    Raises
    ------
    DataError
        If not.
    """
    if len(labels) == 0 and not may_be_none:
        raise DataError("there are no records: training and evaluation need at least one")
    if len(features) != len(labels):
        raise DataError(f"{len(features)} records but {len(labels)} labels")
