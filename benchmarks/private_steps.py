"""A step of DP-SGD: a CNN with GroupNorm on records of CIFAR-10's shape, against Opacus' engine.

Both take whole steps of a training loop: a Poisson batch of 64 records of 1,280 on average, forward
and backward pass, clipping, noise and SGD, on one thread. Opacus draws float noise from torch's
generator, ours exact noise on a grid from a cryptographic one. Random records.
"""

import copy
import logging
import time
import warnings
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from flwr.app import Context, RecordDict
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from flwr_privacy.clients.certificates.private_steps import PrivateStepsPlan, asked_private_steps
from flwr_privacy.clients.torch import initialise, private_training
from flwr_privacy.udp import PrivateStepsTerms

from .report import Comparison

__all__ = ["private_steps"]

RECORDS, BATCH, STEPS = 1280, 64, 16
_NORM, _RATE = 1.0, 0.1


def private_steps() -> Iterator[Comparison]:
    """Compare steps of one loop with both."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    draws = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(RECORDS, 3, 32, 32, generator=draws),
        torch.randint(10, (RECORDS,), generator=draws),
    )
    model = initialise(_cnn, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, theirs = _ours(copy.deepcopy(model), data), _opacus(copy.deepcopy(model), data)
            mine, rivals = list[float](), list[float]()
            # A private loop watches its thread until it takes the next batch.
            with (
                ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as our,
                ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as their,
            ):
                turns = [(mine, our, ours), (rivals, their, theirs)]
                for taken, thread, step in turns * (STEPS - 1):
                    began = time.perf_counter()
                    thread.submit(next, step).result()
                    taken.append(time.perf_counter() - began)
                our.submit(ours.close).result()
    finally:
        torch.set_num_threads(threads)
    yield Comparison(
        what=f"DP-SGD step, CNN with GroupNorm, batch {BATCH}",
        rival="Opacus' PrivacyEngine, hooks, one thread each",
        ours=mine[1:],
        theirs=rivals[1:],
        at_most=1.2,
    )


def _cnn() -> nn.Module:
    """Three convolutions with GroupNorm, and two linear layers: 0.4 million weights."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(64 * 16, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def _loop(model: nn.Module, optimizer: Any, loader: Any) -> Generator[None, None, None]:
    """The loop of a user, with a stop after each step."""
    while True:
        for features, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            yield


def _ours(model: nn.Module, data: TensorDataset) -> Generator[None, None, None]:
    terms = PrivateStepsTerms(
        steps=STEPS,
        sampling_rate=BATCH / RECORDS,
        clipping_norm=_NORM,
        noise_multiplier=0.5,
        epsilon=8.0,
        delta=1e-5,
        gap=1e-3,
        grid=-27,
    )
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})
    loader: Any = DataLoader(data, batch_size=BATCH)
    with asked_private_steps(PrivateStepsPlan(terms=terms, client="0")):
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=_RATE)
        model, optimizer, loader = private_training(model, optimizer, loader, context)
    return _loop(model, optimizer, loader)


def _opacus(model: nn.Module, data: TensorDataset) -> Iterator[None]:
    module, optimizer, loader = PrivacyEngine().make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=_RATE),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=_NORM,
    )
    return _loop(module, optimizer, loader)
