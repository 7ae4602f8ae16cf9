"""Seconds of a client's training, beside the loop that a user would write."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.clients.torch import train
from flwr_privacy.clients.torch.models import mlp

from .report import Comparison

__all__ = ["training"]

_SIZES = {"S": (784, 64, 10), "L": (784, 1024, 1024, 10)}
_TURNS = {"S": 200, "L": 20}
_RECORDS, _BATCH, _RATE = 60, 10, 0.1


def training() -> Iterator[Comparison]:
    """Train perceptrons of `simulators` for one epoch, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, sizes in _SIZES.items():
            yield _compared(name, mlp(sizes), _TURNS[name])
    finally:
        torch.set_num_threads(threads)


def _compared(name: str, model: nn.Module, turns: int) -> Comparison:
    draws = torch.Generator().manual_seed(0)
    images = torch.rand((_RECORDS, 784), generator=draws)
    labels = torch.randint(10, (_RECORDS,), generator=draws)
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    def by_library() -> None:
        train(
            model,
            images.numpy(),
            labels.numpy(),
            batch_size=_BATCH,
            learning_rate=_RATE,
            seed=1,
            device="cpu",
        )

    ours, theirs = [], []
    for _ in range(turns):
        for seconds, work in ((ours, by_library), (theirs, lambda: _loop(model, images, labels))):
            model.load_state_dict(start)
            seconds.append(_seconds(work))
    return Comparison(
        what=f"an epoch of {name}, {_RECORDS} records",
        rival="a loop in PyTorch with its SGD",
        ours=ours,
        theirs=theirs,
        at_most=0.75,
    )


def _loop(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    model.train()
    for batch in torch.randperm(_RECORDS).split(_BATCH):
        optimizer.zero_grad()
        functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
