"""Stochastic gradient descent on a client's model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from flwr_privacy.errors import check_number
from flwr_privacy.wire.identity import derive_seed

from ..computing import Loss, allotted_device, one_thread, raise_resource_error
from ..trainable import note_step
from .written_out import WrittenOut

__all__ = ["Descent", "descend"]


@dataclass(frozen=True)
class Descent:
    """The result of some steps.

    Parameters
    ----------
    loss : float
        Mean loss per record, without that of steps left out; 0 if there was no step.
    left_out : int
        How many steps moved nothing because they failed.
    """

    loss: float
    left_out: int


def descend(
    model: nn.Module,
    features: NDArray[Any],
    labels: NDArray[Any],
    batches: Iterable[Tensor],
    *,
    learning_rate: float,
    perturbation: float,
    seed: int,
    loss: Loss,
    device: str | None,
    total: bool = False,
) -> Descent:
    """Do a step on each batch, in place.

    Parameters
    ----------
    model, features, labels, learning_rate, perturbation, seed, loss, device
        As for `flwr_privacy.clients.torch.train`.
    batches : iterable of (b,) int64 Tensor
        Places of records; an empty batch moves nothing.
    total : bool, default False
        Whether a step that raises, or whose loss or weights are not finite, is left out.

    Raises
    ------
    InvalidParameterError
        If the learning rate or the perturbation is below 0.
    Exception
        Unless it is `total`, what the model or the loss raises.
    """
    check_number("learning_rate", learning_rate, minimum=0)
    check_number("perturbation", perturbation, minimum=0)
    device = device or allotted_device()
    model = model.to(device).train()
    # By hand, because the first torch.optim.SGD of a process takes over a second to import.
    parameters = [p for p in model.parameters() if p.requires_grad]
    note_step(parameters)
    for parameter in parameters:
        parameter.grad = None  # of other work on the model
    # Copies, because a model may change what it gets.
    inputs, targets = (torch.tensor(records, device=device) for records in (features, labels))
    last_layer, noise = {}, None
    if perturbation:
        last_layer = _last_layer(model)
        noise = torch.Generator().manual_seed(derive_seed(seed, "perturbation"))
    written = None if perturbation else WrittenOut.of(model, loss, inputs, targets)

    def backward(batch: Tensor) -> Tensor:
        if written is not None:
            return written.backward(inputs[batch], targets[batch])
        value = loss(model(inputs[batch]), targets[batch])
        objective = value
        if perturbation:
            moved = {
                name: p + perturbation * torch.randn(p.shape, generator=noise).to(p)
                for name, p in last_layer.items()
            }
            outputs = functional_call(model, moved, (inputs[batch],))
            objective = value + loss(outputs, targets[batch])
        objective.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def step(batch: Tensor) -> Tensor | None:
        if written is not None and not total:
            return written.step(inputs[batch], targets[batch], learning_rate)
        value = _tried(backward, batch, parameters, learning_rate) if total else backward(batch)
        with torch.no_grad():
            for parameter in parameters:
                if value is not None and parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-learning_rate)
                parameter.grad = None
        return value

    losses, seen, left_out = torch.zeros((), device=device), 0, 0
    with one_thread():
        for places in batches:
            if len(places) == 0:
                continue
            value = step(places.to(device))
            if value is None:
                left_out += 1
                continue
            losses.add_(value, alpha=len(places))
            seen += len(places)
    return Descent(loss=float(losses) / seen if seen else 0.0, left_out=left_out)


def _tried(
    backward: Callable[[Tensor], Tensor],
    batch: Tensor,
    parameters: Sequence[Tensor],
    learning_rate: float,
) -> Tensor | None:
    """Return the loss of a batch; None if it raises or the step is not finite."""
    try:
        value = backward(batch)
    # The model and the loss are the user's, and any error may be that of a record.
    except Exception as error:  # noqa: BLE001
        raise_resource_error(error)
        return None
    with torch.no_grad():
        ends = [
            torch.add(p, p.grad, alpha=-learning_rate) for p in parameters if p.grad is not None
        ]
    return value if all(map(_all_finite, (value, *ends))) else None


def _all_finite(tensor: Tensor) -> bool:
    # Many times faster than `isfinite` of each number; NaN is both the least and the largest.
    return not tensor.numel() or all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def _last_layer(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters to train of the last module that has some of its own."""
    layers = [
        {name: p for name, p in module.named_parameters(prefix, recurse=False) if p.requires_grad}
        for prefix, module in model.named_modules()
    ]
    return next((layer for layer in reversed(layers) if layer), {})
