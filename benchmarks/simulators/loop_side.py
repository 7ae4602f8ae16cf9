"""A loop in plain PyTorch: two processes, which share the model, train the clients between them.

No framework can be much faster with the same training.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing, nn
from torch.nn import functional

from .app.simulated import work

__all__ = ["main"]

WORKERS = 2


def main() -> None:
    """Train, and write down the seconds."""
    parser = work.parser()
    parser.add_argument("--sigma", type=float, required=True)
    asked = parser.parse_args()

    shared = work.model_of(asked.size).share_memory()
    sums = [work.model_of(asked.size).share_memory() for _ in range(WORKERS)]
    barrier = multiprocessing.get_context("spawn").Barrier(WORKERS)
    multiprocessing.spawn(_work, (vars(asked), shared, sums, barrier), nprocs=WORKERS)


def _work(
    rank: int, asked: dict[str, Any], shared: nn.Module, sums: list[nn.Module], barrier: Any
) -> None:
    torch.set_num_threads(1)
    task, data = work.TASKS[asked["size"]], work.Data(asked["data"])
    model = work.model_of(asked["size"])
    clock = work.Clock(asked["size"], started=asked["started"])
    noise = torch.Generator().manual_seed(0)
    draws = np.random.default_rng(0)  # the same clients are drawn by both
    own = sums[rank]
    for _ in range(asked["rounds"]):
        cohort = draws.choice(task.clients, task.cohort, replace=False)
        with torch.no_grad():
            for total in own.parameters():
                total.zero_()
        for client in cohort[rank::WORKERS]:
            with torch.no_grad():
                for parameter, start in zip(model.parameters(), shared.parameters(), strict=True):
                    parameter.copy_(start)
            _train(model, *map(torch.from_numpy, data.of(client)), task)
            _add(own, model, shared, clip=asked["sigma"] > 0)
        barrier.wait()
        if rank == 0:
            _step(shared, sums, asked["sigma"], noise, cohort=task.cohort)
            clock.round_ends(shared.state_dict)
        barrier.wait()
    if rank == 0:
        clock.write(Path(asked["out"]), "loop", data)


@torch.no_grad()
def _add(own: nn.Module, model: nn.Module, shared: nn.Module, *, clip: bool) -> None:
    """Add what a client has learnt, clipped or not, to the sum."""
    updates = [
        parameter.detach().sub_(start)
        for parameter, start in zip(model.parameters(), shared.parameters(), strict=True)
    ]
    scale = 1.0
    if clip:
        norm = float(torch.stack([update.norm() for update in updates]).norm())
        scale = min(1.0, work.CLIPPING_NORM / norm)
    for total, update in zip(own.parameters(), updates, strict=True):
        total.add_(update, alpha=scale)


@torch.no_grad()
def _step(
    shared: nn.Module,
    sums: list[nn.Module],
    sigma: float,
    noise: torch.Generator,
    *,
    cohort: int,
) -> None:
    """Move the shared model by the mean of all clients, with noise on their sum."""
    for start, *totals in zip(
        shared.parameters(), *(own.parameters() for own in sums), strict=True
    ):
        for total in totals:
            start.add_(total, alpha=1 / cohort)
        if sigma:
            drawn = torch.randn(start.shape, generator=noise)
            start.add_(drawn, alpha=sigma / cohort)


def _train(model: nn.Module, images: Tensor, labels: Tensor, task: work.Task) -> None:
    """Train for one epoch; by hand, which is faster than an optimizer."""
    parameters = list(model.parameters())
    batches = zip(images.split(task.batch), labels.split(task.batch), strict=True)
    for part, classes in batches:
        functional.cross_entropy(model(part), classes).backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=-task.learning_rate)
                parameter.grad = None


if __name__ == "__main__":
    main()
