"""Training with gradients clipped per record: what record-level privacy rests on.

A scheme with ``unit="record"`` needs a bound on what one record can do to the trained arrays. A
clip of the update gives none; here it follows from the steps themselves, and `PerRecordStep` is the
proof that the scheme gets.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_privacy.clients.job import carried_out
from flwr_privacy.clients.per_record import (
    PerRecordLoss,
    PerRecordPlan,
    PerRecordStep,
    certify,
    certify_loss,
    check_cap,
    current_cap,
    current_plan,
    digests,
    in_step,
)
from flwr_privacy.errors import DataError, InvalidParameterError, check_integer, check_number

from .computing import Loss, allotted_device, one_thread
from .gradients import GradientsJob, RecordGradients, record_losses
from .training import check_records

__all__ = ["evaluate_per_record", "train_per_record"]

_LARGEST_CHUNK = 1024  # records
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
    epochs: int | None = None,
    batch_size: int | None = None,
    bound: str | None = None,
    smoothness: float | None = None,
    loss: Loss = functional.cross_entropy,
    chunk_size: int | None = None,
    device: str | None = None,
) -> PerRecordStep:
    """Do gradient descent in place, with the gradient of each record clipped; by default one step.

    Wei et al., "User-Level Privacy-Preserving Federated Learning", algorithm 1, lines 5 to 9:
    ``w - learning_rate / b * sum of g * min(1, clipping_norm / ||g||)`` over the gradients g of
    the single records by all trainable parameters together; b is the number of records or, with
    sampling, its expectation.

    Inside a scheme's round the scheme gives the settings and gets what was done: call this once in
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
    epochs : int, optional
        Passes over the records; outside of a scheme's round 1. Each is one step on all records, or
        as many as there are batches.
    batch_size : int, optional
        Records of a step, at most n; outside of a scheme's round all. They are taken in the order
        given, in every pass, because the sensitivity counts on an order that depends on no record;
        a last batch with fewer is divided by the same b.
    bound : {"general", "convex", "unproven"}, optional
        How the sensitivity of several steps is bounded, `flwr_privacy.udp.sensitivity.BOUNDS`;
        outside of a scheme's round ``"general"``. With ``"convex"`` the gradients are computed in
        float64.
    smoothness : float, optional
        With ``bound="convex"`` only, and needed there: a number L such that the loss of every
        record is convex and L-smooth in the weights. Whoever calls this vouches for it, not the
        server; for logistic regression a quarter of the largest squared norm of the features and 1.
    loss : callable, default cross entropy of logits
        Loss of one record, from the model's output for a batch of one and the batch of its label.
        A regulariser that the model returns beside its output may be part of it.
    chunk_size : int, optional
        Records at a time; it bounds the memory. By default 1024, or as many as keep the gradients
        and what they are computed from at about 256 MB.
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
        it has batch normalisation, no parameters to train, types that NumPy lacks, it changes its
        buffers, or the bound is ``"convex"`` and it trains more than one linear layer of one
        output.
    ProtocolError
        If this is the second call in a scheme's round.

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
    plan = _agreed(
        clipping_norm=clipping_norm,
        learning_rate=learning_rate,
        sampling_rate=sampling_rate,
        epochs=epochs,
        batch_size=batch_size,
        bound=bound,
    )
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, minimum=1)
    check_records(features, labels)
    plan.sensitivity(len(labels))  # raises if there are fewer records than a batch has
    _check_model(model)
    _check_convex(model, plan, smoothness)
    model.to(device or allotted_device()).train()
    tensors = _floating(model)
    before = digests(map(_array, tensors))
    rounding = _rounding([t for t in tensors if t.requires_grad], plan, plan.steps(len(labels)))
    trained = _descend(model, features, labels, plan, loss, chunk_size)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stepped = {id(p): trained[name].to(p.dtype) for name, p in trainable.items()}
    after = digests(_array(stepped.get(id(tensor), tensor)) for tensor in tensors)
    step = PerRecordStep(
        plan=plan, records=len(labels), before=before, after=after, rounding=rounding
    )
    certify(step)
    with torch.no_grad():
        for parameter in trainable.values():
            parameter.copy_(stepped[id(parameter)])
    return step


def evaluate_per_record(
    model: nn.Module,
    features: NDArray[Any],
    labels: NDArray[Any],
    *,
    loss: Loss = functional.cross_entropy,
    loss_cap: float | None = None,
    chunk_size: int = 1024,
    device: str | None = None,
) -> PerRecordLoss:
    """Return the mean of the records' losses, each clipped to ``[0, loss_cap]``.

    A clip of the mean would not do: one record may move that by all of the cap. Inside a scheme's
    round the scheme gives the cap and gets the mean: call this once in ``evaluate``, with the
    arrays that came in loaded into the model.

    Parameters
    ----------
    model : nn.Module
        Takes a batch of features; it is moved to `device` and set to evaluation. It sees each
        record as a batch of one, so that batch normalisation is fine here: its running statistics
        are part of the model, and no statistics of a batch are taken.
    features : (n, ...) ndarray
        Records. Each record of the data set may be there once.
    labels : (n, ...) ndarray
        Their labels; integers of shape (n,) for the default loss.
    loss : callable, default cross entropy of logits
        Loss of one record, from the model's output for a batch of one and the batch of its label.
        One that is not a number counts as the cap.
    loss_cap : float, optional
        Above 0. Required outside of a scheme's round.
    chunk_size : int, default 1024
        Records at a time; it bounds the memory.
    device : str, optional
        By default `allotted_device`.

    Returns
    -------
    PerRecordLoss
        The mean, and what a scheme around the evaluation has got already.

    Raises
    ------
    DataError
        If there are no records, or not one label per record.
    InvalidParameterError
        If a setting is missing, out of range or not what the scheme asks, or the loss is not one
        number for one record.
    ProtocolError
        If this is the second call in a scheme's round.

    Guarantee
    ---------
    ``PerRecordLoss.sensitivity`` has the bound and what it covers. It holds for every model and
    loss that keep nothing from one record for another in Python attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_privacy.clients.torch import initialise, mlp
    >>> model = initialise(lambda: mlp([4, 3]), 0)
    >>> features, labels = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
    >>> found = evaluate_per_record(model, features, labels, loss_cap=0.5)
    >>> found.mean, round(found.sensitivity(), 4)
    (0.5, 0.0626)
    """
    asked = current_cap()
    cap = loss_cap if asked is None else asked
    if cap is None:
        raise InvalidParameterError(
            "loss_cap", None, "a number above 0, as there is no scheme around the evaluation to ask"
        )
    if loss_cap not in (None, cap):
        raise InvalidParameterError("loss_cap", loss_cap, f"{cap}, as the scheme asks, or nothing")
    check_cap("loss_cap", cap)
    check_integer("chunk_size", chunk_size, minimum=1)
    check_records(features, labels)
    device = device or allotted_device()
    model.to(device).eval()
    clipped: list[float] = []
    with one_thread(), torch.no_grad():
        for start in range(0, len(labels), chunk_size):
            chunk = slice(start, start + chunk_size)
            losses = record_losses(
                model,
                loss,
                torch.tensor(features[chunk], device=device),
                torch.tensor(labels[chunk], device=device),
            )
            clipped += losses.double().nan_to_num(nan=cap).clamp(0, cap).tolist()
    found = PerRecordLoss(
        cap=cap,
        records=len(labels),
        mean=min(cap, math.fsum(clipped) / len(clipped)),
        model=digests(map(_array, _floating(model))),
    )
    certify_loss(found)
    return found


def _agreed(**given: Any) -> PerRecordPlan:
    """Return the scheme's plan, or outside of a scheme's round the user's."""
    plan = current_plan()
    settings = {name: value for name, value in given.items() if value is not None}
    if plan is None:
        for name in ("clipping_norm", "learning_rate"):
            if name not in settings:
                raise InvalidParameterError(
                    name,
                    None,
                    "a number above 0, as there is no scheme around the training to ask",
                )
        return PerRecordPlan(**settings)
    for name, value in settings.items():
        if value != (asked := getattr(plan, name)):
            raise InvalidParameterError(name, value, f"{asked}, as the scheme asks, or nothing")
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


def _check_convex(model: nn.Module, plan: PerRecordPlan, smoothness: float | None) -> None:
    """Refuse the convex bound where the user does not vouch for it, or it cannot hold."""
    if plan.bound != "convex":
        return
    layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(False))]
    if [(type(m), getattr(m, "out_features", None)) for m in layers] != [(nn.Linear, 1)]:
        raise InvalidParameterError(
            "bound",
            plan.bound,
            "'general' for this model: the convex bound is for a model that trains one linear "
            "layer of one output",
        )
    if smoothness is None:
        raise InvalidParameterError(
            "smoothness",
            None,
            "a number: who asks for the convex bound does not know the loss, and who trains must "
            "say that it is convex, and how smooth",
        )
    largest = 2 / check_number("smoothness", smoothness, minimum=1e-100)
    if plan.learning_rate > largest:
        raise InvalidParameterError(
            "learning_rate",
            plan.learning_rate,
            f"at most 2 / smoothness = {largest:.6g} for the convex bound",
        )


def _floating(model: nn.Module) -> list[Tensor]:
    """Return what of the model a scheme could release, in the order of ``state_dict``."""
    return [t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()]


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().numpy()


def _rounding(parameters: list[Tensor], plan: PerRecordPlan, steps: int) -> float:
    """Return the largest L2 distance between the exact weights and those in the parameters' types.

    With unit roundoff u, a rounded entry is off by u times itself, or half the smallest number
    above 0. The steps are taken in float64 and rounded each, the type comes last; they are at most
    as long as if all records were in each of them with the clipping norm.
    """
    norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in parameters))
    reach = steps * plan.learning_rate * plan.clipping_norm / plan.sampling_rate
    infos = [torch.finfo(p.dtype) for p in parameters]
    relative = max(info.eps / 2 for info in infos) + steps * torch.finfo(torch.float64).eps / 2
    absolute = sum(
        p.numel() * (info.tiny * info.eps / 2) ** 2
        for p, info in zip(parameters, infos, strict=True)
    )
    # Twice the reach, since the steps themselves are rounded before they are taken.
    return relative * (norm + 2 * reach) + math.sqrt(absolute)


def _descend(
    model: nn.Module,
    features: NDArray[Any],
    labels: NDArray[Any],
    plan: PerRecordPlan,
    loss: Loss,
    chunk_size: int | None,
) -> dict[str, Tensor]:
    """Return the trainable parameters after the steps, in float64, by name."""
    # The convex bound is one of exact gradients: rounded ones could drive the weights apart.
    exact = plan.bound == "convex"
    own = model
    if exact:
        model = copy.deepcopy(model).double()
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    device = next(iter(trainable.values())).device

    def tensors(records: Any) -> tuple[Tensor, Tensor]:
        # Taking records by their places copies them, so that the model may change its input.
        x = torch.from_numpy(features[records]).to(device)
        y = torch.from_numpy(labels[records]).to(device)
        if exact:
            x, y = (t.double() if t.is_floating_point() else t for t in (x, y))
        return x, y

    feature, label = (tensor[0] for tensor in tensors(np.zeros(1, np.intp)))
    with one_thread():
        gradients = RecordGradients(model, loss, feature, label)
    # Tied weights are one parameter but several arrays, and what is released is the arrays.
    held = [id(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    copies = {n: held.count(id(p)) for n, p in model.named_parameters() if p.requires_grad}
    fitting = max(1, _CHUNK_BYTES // max(1, gradients.bytes_per_record))
    size = chunk_size or min(_LARGEST_CHUNK, fitting)
    rate = plan.learning_rate / plan.batch(len(labels))
    weights = {name: p.to(torch.float64, copy=True) for name, p in trainable.items()}
    # In a sample, one record more or less moves the places of others: see `add_to`.
    short = plan.sampling_rate == 1 and 1e-9 <= plan.clipping_norm <= 1e9
    for batch in _batches(plan, len(labels)):
        current = {name: weights[name].to(p.dtype) for name, p in trainable.items()}
        total = {name: torch.zeros_like(w) for name, w in weights.items()}
        for records in np.array_split(batch, -(-len(batch) // size)) if len(batch) else []:
            chunk = carried_out(GradientsJob(own, gradients, current, *tensors(records)))
            with one_thread():
                norms = chunk.norms(copies)
                if not bool(torch.isfinite(norms).all()):
                    # Not how many: the text may leave the node.
                    raise DataError(
                        f"the gradient of a record, of {len(labels)} records, is not finite: look "
                        "for NaN in the records and in the model; nothing was trained"
                    )
                scales = (plan.clipping_norm / norms).clamp(max=1)
                chunk.add_to(total, scales, short=short)
        weights = {name: w - rate * total[name] for name, w in weights.items()}
    return weights


def _batches(plan: PerRecordPlan, records: int) -> Iterator[NDArray[np.intp]]:
    """Yield the places of the records of each step."""
    for _ in range(plan.epochs):
        if plan.batch_size is None:
            yield np.flatnonzero(in_step(plan, records))
            continue
        for start in range(0, records, plan.batch_size):
            yield np.arange(start, min(start + plan.batch_size, records))
