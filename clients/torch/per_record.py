"""One step with gradients clipped per record: the training that record-level privacy rests on.

A scheme with ``unit="record"`` needs a bound on what one record can do to the trained arrays. A
clip of the update gives none; here it follows from the step itself, and `PerRecordStep` is the
proof that the scheme gets.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_privacy.clients.per_record import (
    PerRecordPlan,
    PerRecordStep,
    certify,
    current_plan,
    digests,
    in_step,
)
from flwr_privacy.errors import DataError, InvalidParameterError, check_integer

from .gradients import Loss, RecordGradients
from .training import _check_records, _one_thread, allotted_device

__all__ = ["train_per_record"]

_LARGEST_CHUNK = 256  # records
_CHUNK_BYTES = 256 * 2**20
_TYPES = (torch.float16, torch.float32, torch.float64)  # of floats in torch and NumPy


def train_per_record(
    model: nn.Module,
    features: NDArray[Any],
    labels: NDArray[Any],
    *,
    clipping_norm: float | None = None,
    learning_rate: float | None = None,
    sampling_rate: float | None = None,
    loss: Loss = functional.cross_entropy,
    chunk_size: int | None = None,
    device: str | None = None,
) -> PerRecordStep:
    """Do one step of gradient descent in place, with the gradient of each record clipped.

    Wei et al., "User-Level Privacy-Preserving Federated Learning", algorithm 1, lines 5 to 9:
    ``w - learning_rate / b * sum of g * min(1, clipping_norm / ||g||)`` over the gradients g of
    the single records by all trainable parameters together; b is the number of records or, with
    sampling, its expectation.

    Inside a scheme's round the scheme gives the three settings and gets the step: call this once in
    ``train`` or ``fit``, on the arrays that came in, and return the arrays as they are afterwards.

    Parameters
    ----------
    model : nn.Module
        Takes a batch of features; it is moved to `device`. It sees each record as a batch of one.
    features : (n, ...) ndarray
        Records. Each record of the data set may be there once.
    labels : (n, ...) ndarray
        Their labels; integers of shape (n,) for the default loss.
    clipping_norm, learning_rate : float, optional
        Clipping norm and step size, above 0. Required outside of a scheme's round.
    sampling_rate : float, optional
        Probability with which a record is in the step; outside of a scheme's round 1, all records.
        The choice is secret, and b does not depend on it.
    loss : callable, default cross entropy of logits
        Loss of one record, from the model's output for a batch of one and the batch of its label.
        A regulariser that the model returns beside its output may be part of it.
    chunk_size : int, optional
        Records at a time; it bounds the memory. By default 256, or as many as keep the gradients
        under 256 MB.
    device : str, optional
        By default `allotted_device`.

    Returns
    -------
    PerRecordStep
        What was done. A scheme around the training has got it already.

    Raises
    ------
    DataError
        If there are no records, not one label per record, or a gradient is not finite. The
        parameters are then as they were.
    InvalidParameterError
        If a setting is missing, out of range or not what the scheme asks, or the model is not fit:
        it has batch normalisation, no parameters to train, types that NumPy lacks, or it changes
        its buffers.
    ProtocolError
        If this is the second step in a scheme's round.

    Guarantee
    ---------
    ``PerRecordStep.sensitivity`` has the bound and what it covers. It holds for every model and
    loss that keep nothing from one record for another in Python attributes. Layers that draw
    numbers (dropout) draw them from torch's generator for each record.

    Notes
    -----
    Models with data-dependent control flow do not run under `torch.func.vmap`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_privacy.clients.torch import initialise, mlp
    >>> model = initialise(lambda: mlp([4, 3]), 0)
    >>> features = np.ones((8, 4), np.float32)
    >>> labels = np.zeros(8, np.int64)
    >>> step = train_per_record(model, features, labels, clipping_norm=1.0, learning_rate=0.1)
    >>> round(step.sensitivity(), 4)
    0.025
    """
    plan = _agreed(clipping_norm, learning_rate, sampling_rate)
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, minimum=1)
    _check_records(features, labels)
    _check_model(model)
    model.to(device or allotted_device()).train()
    tensors = _floating(model)
    before = digests(map(_array, tensors))
    rounding = _rounding([tensor for tensor in tensors if tensor.requires_grad], plan)
    with _one_thread():
        total = _clipped_sum(model, features, labels, plan, loss, chunk_size)
    rate = plan.learning_rate / plan.batch(len(labels))
    stepped = {
        id(parameter): (parameter.detach().double() - rate * total[name]).to(parameter.dtype)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    after = digests(_array(stepped.get(id(tensor), tensor)) for tensor in tensors)
    step = PerRecordStep(
        plan=plan, records=len(labels), before=before, after=after, rounding=rounding
    )
    certify(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(stepped[id(parameter)])
    return step


def _agreed(
    clipping_norm: float | None, learning_rate: float | None, sampling_rate: float | None
) -> PerRecordPlan:
    """Return the scheme's plan, or outside of a scheme's round the user's."""
    plan = current_plan()
    if plan is None:
        if clipping_norm is None or learning_rate is None:
            raise InvalidParameterError(
                "learning_rate" if learning_rate is None else "clipping_norm",
                None,
                "a number above 0, as there is no scheme around the training to ask",
            )
        return PerRecordPlan(
            clipping_norm=clipping_norm,
            learning_rate=learning_rate,
            sampling_rate=1.0 if sampling_rate is None else sampling_rate,
        )
    for name, given, asked in (
        ("clipping_norm", clipping_norm, plan.clipping_norm),
        ("learning_rate", learning_rate, plan.learning_rate),
        ("sampling_rate", sampling_rate, plan.sampling_rate),
    ):
        if given is not None and given != asked:
            raise InvalidParameterError(name, given, f"{asked}, as the scheme asks, or nothing")
    return plan


def _check_model(model: nn.Module) -> None:
    mixing = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) or getattr(module, "running_mean", None) is not None
    ]
    if mixing:
        raise InvalidParameterError(
            "model",
            f"a model with the layers {mixing}",
            "one without batch normalisation or running statistics, which mix the records: "
            "GroupNorm may take their place",
        )
    state = model.state_dict(keep_vars=True)
    if not any(tensor.requires_grad for tensor in state.values()):
        raise InvalidParameterError("model", type(model).__name__, "a model to train")
    for name, tensor in state.items():
        if (tensor.is_floating_point() or tensor.requires_grad) and tensor.dtype not in _TYPES:
            raise InvalidParameterError(f"the type of {name}", tensor.dtype, f"one of {_TYPES}")


def _floating(model: nn.Module) -> list[Tensor]:
    """Return what of the model a scheme could release, in the order of ``state_dict``."""
    return [t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()]


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().numpy()


def _rounding(parameters: list[Tensor], plan: PerRecordPlan) -> float:
    """Return the largest L2 distance between the exact step and the one in the parameters' types.

    With unit roundoff u, a rounded entry is off by u times itself, or half the smallest number
    above 0; the step is at most as long as if all records were in it with the clipping norm.
    """
    norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in parameters))
    reach = plan.learning_rate * plan.clipping_norm / plan.sampling_rate
    infos = [torch.finfo(p.dtype) for p in parameters]
    relative = max(info.eps / 2 for info in infos)
    absolute = sum(
        p.numel() * (info.tiny * info.eps / 2) ** 2
        for p, info in zip(parameters, infos, strict=True)
    )
    # Twice the reach, since in float64 the step itself is rounded before it is taken.
    return relative * (norm + 2 * reach) + math.sqrt(absolute)


def _clipped_sum(
    model: nn.Module,
    features: NDArray[Any],
    labels: NDArray[Any],
    plan: PerRecordPlan,
    loss: Loss,
    chunk_size: int | None,
) -> dict[str, Tensor]:
    """Return the sum of the clipped gradients of the records in the step, in float64."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(iter(trainable.values())).device

    def tensors(records: Any) -> tuple[Tensor, Tensor]:
        return (
            torch.tensor(features[records], device=device),
            torch.tensor(labels[records], device=device),
        )

    gradients = RecordGradients(model, loss, *tensors(0))
    # Tied weights are one parameter but several arrays, and what is released is the arrays.
    held = [id(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    copies = {name: held.count(id(parameter)) for name, parameter in trainable.items()}
    total = {
        name: torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
        for name, p in trainable.items()
    }
    fitting = max(1, _CHUNK_BYTES // max(1, gradients.bytes_per_record))
    size = chunk_size or min(_LARGEST_CHUNK, fitting)
    chosen = np.flatnonzero(in_step(plan, len(labels)))
    for start in range(0, len(chosen), size):
        records = chosen[start : start + size]
        chunk = gradients(*tensors(records))
        norms = chunk.norms(copies)
        if not bool(torch.isfinite(norms).all()):
            # Not how many: the text may leave the node.
            raise DataError(
                f"the gradient of a record, of {len(labels)} records, is not finite: look for NaN "
                "in the records and in the model; nothing was trained"
            )
        for name, part in chunk.weighted_sum((plan.clipping_norm / norms).clamp(max=1)).items():
            total[name] += part
    return total
