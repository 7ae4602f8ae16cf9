"""The sum of the clipped gradients of 800 records by the MLP of the paper, against Opacus 1.6.

All three start from the same batch of tensors, end at the sum over the batch, and have one thread,
because a client's training has one (its sums must not depend on the number of threads). Ours adds
up in float64, the rivals in float32. Random records: nobody gains from the zeros in MNIST.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.clients.torch import initialise, mlp
from flwr_privacy.clients.torch.record_gradients import RecordGradients

from .report import Comparison

__all__ = ["per_record"]

RECORDS, CLIPPING_NORM = 800, 1.0
REPEATS, RIVAL_REPEATS = 40, 5
TOLERANCE = 1e-5

_Sums = Callable[[], list[Tensor]]


def per_record() -> Iterator[Comparison]:
    """Compare our clipped gradients with Opacus' ghost clipping, and with its module for all."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(RECORDS, 784, generator=generator)
    labels = torch.randint(10, (RECORDS,), generator=generator)
    model = initialise(lambda: mlp([784, 256, 10]), 0).train()
    ours = _ours(model, features, labels)
    ghost = _ghost(copy.deepcopy(model), features, labels)
    whole = _whole(copy.deepcopy(model), features, labels)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about hooks on inputs that need no gradient
            for name, rival in (("ghost clipping", ghost), ("GradSampleModule", whole)):
                _check_same(name, ours(), rival())
            mine, theirs = _in_turns(ours, ghost, REPEATS)
            yield Comparison(
                what=f"clipped gradients of {RECORDS} records, MLP",
                rival="Opacus' ghost clipping, one thread each",
                ours=mine,
                theirs=theirs,
                at_most=1.0,
            )
            mine, theirs = _in_turns(ours, whole, RIVAL_REPEATS)
            yield Comparison(
                what=f"clipped gradients of {RECORDS} records, MLP",
                rival="Opacus' GradSampleModule, one thread each",
                ours=mine,
                theirs=theirs,
                at_least=2.0,
            )
    finally:
        torch.set_num_threads(threads)


def _ours(model: nn.Module, features: Tensor, labels: Tensor) -> _Sums:
    copies = {name: 1 for name, _ in model.named_parameters()}

    def sums() -> list[Tensor]:
        gradients = RecordGradients(model, functional.cross_entropy, features[0], labels[0])
        chunk = gradients({}, features, labels)
        total = {
            name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()
        }
        chunk.add_to(total, (CLIPPING_NORM / chunk.norms(copies)).clamp(max=1), short=True)
        return list(total.values())

    return sums


def _ghost(model: nn.Module, features: Tensor, labels: Tensor) -> _Sums:
    module = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=CLIPPING_NORM, use_ghost_clipping=True, loss_reduction="sum"
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIPPING_NORM,
        expected_batch_size=RECORDS,
        loss_reduction="sum",
    )
    loss = DPLossFastGradientClipping(
        module, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum"
    )

    def sums() -> list[Tensor]:
        optimizer.zero_grad()
        loss(module(features), labels).backward()
        optimizer.accumulate()
        return [p.summed_grad for p in module.parameters()]

    return sums


def _whole(model: nn.Module, features: Tensor, labels: Tensor) -> _Sums:
    module = GradSampleModule(model, loss_reduction="sum")

    def sums() -> list[Tensor]:
        module.zero_grad(set_to_none=True)
        functional.cross_entropy(module(features), labels, reduction="sum").backward()
        gradients = [p.grad_sample for p in module.parameters()]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        factors = (CLIPPING_NORM / norms).clamp(max=1)
        return [torch.einsum("i,i...", factors, g) for g in gradients]

    return sums


def _in_turns(ours: _Sums, rival: _Sums, repeats: int) -> tuple[list[float], list[float]]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for taken, sums in zip(seconds, (ours, rival), strict=True):
            began = time.perf_counter()
            sums()
            taken.append(time.perf_counter() - began)
    return seconds


def _check_same(name: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Both must have computed the same, up to the rival's float32."""
    apart = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm()
    length = torch.stack([a.norm() for a in ours]).norm()
    if not apart <= TOLERANCE * length:
        raise RuntimeError(f"{name} sums to something else: {float(apart / length):.3g} apart")
