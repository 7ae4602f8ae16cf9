"""Trains with gradients clipped per record, on which record-level privacy rests.

A scheme with ``unit="record"`` needs a bound on what one record can do to the trained arrays. A
clip of the update gives none; here it follows from the steps themselves, and `PerRecordStep` is the
proof that the scheme gets. It holds for every record: whatever one does to its gradient or its
loss, it counts as a number within the bound, and is nothing to the others.
"""

import copy
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.clients.certificates.frozen_weights import current_frozen
from flwr_privacy.clients.certificates.per_record_steps import (
    PerRecordPlan,
    PerRecordStep,
    certify,
    current_plan,
    in_step,
)
from flwr_privacy.clients.certificates.request import agreed as agreed_plan
from flwr_privacy.clients.certificates.request import digests
from flwr_privacy.clients.node.rehearsal import Generated, rehearse
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.wire.message import TRAIN

from .computing import Loss, allotted_device, one_thread
from .each_record import CHUNK_BYTES, LARGEST_CHUNK, rehearsed_count
from .given_records import Labels, Records, given_records
from .record_gradients import RecordGradients
from .released import as_array, check_model, released_tensors
from .trainable import note_step
from .training import check_records

__all__ = ["train_per_record"]

logger = logging.getLogger("flwr.privacy")


def train_per_record(
    model: nn.Module,
    features: Records,
    labels: Labels = None,
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

    A record whose gradient is not finite, or for which the model or the loss raises, counts as zero
    in that step; the node's log says how many did. Where the scheme's plan declares the number of
    records, those beyond it are left out and missing ones count as zero.

    Parameters
    ----------
    model : nn.Module
        Takes a batch of features; it is moved to `device`. It sees each record as a batch of one.
    features : (n, ...) ndarray or Tensor, Dataset, or DataLoader
        Records. Each record of the data set may be there once.
    labels : (n, ...) ndarray or Tensor, optional
        Their labels; integers of shape (n,) for the default loss. Not beside a Dataset or a
        DataLoader, whose records are pairs. The batch size and order of a DataLoader have no
        effect, which the log says once; one that leaves out or repeats records is refused.
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
        record is convex and L-smooth in the weights, and its gradient is a number at all weights as
        it is computed: ``softplus(z)``, not ``log(1 + exp(z))``. Whoever calls this vouches for it,
        not the server; for logistic regression L is a quarter of the largest squared norm of the
        features and 1.
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
        If there is not one label per record, or there are no records and none are declared. The
        parameters are then as they were.
    InvalidParameterError
        If a setting is missing, out of range or not what the scheme asks, or the model is not fit:
        it has batch normalisation, no parameters to train, weights that are not finite, types that
        NumPy lacks, it changes its buffers, or the bound is ``"convex"`` and it trains more than
        one linear layer of one output.
    ProtocolError
        If this is the second call in a scheme's round.

    Guarantee
    ---------
    ``PerRecordStep.sensitivity`` has the bound and what it covers. It holds for every model and
    loss that keep nothing from one record for another in Python attributes. Layers that draw
    numbers (dropout) draw them from torch's generator for each record.
    What raises because memory or a GPU is lacking is no record's fault and goes on to the caller.
    On a GPU a label out of range is of that kind, because the kernel's assertion ends the use of
    the device for this process; on the CPU it is that record's.

    Notes
    -----
    Models with data-dependent control flow do not run under `torch.func.vmap`: all their records
    count as zero. `flwr_privacy.clients.node.rehearsal.counted` shows the error.

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
    x, y = given_records(features, labels, TRAIN)

    def agreed() -> tuple[PerRecordPlan, float]:
        """Return the plan and the rounding. Nothing in here depends on a record's values."""
        plan = agreed_plan(
            current_plan(),
            PerRecordPlan,
            clipping_norm=clipping_norm,
            learning_rate=learning_rate,
            sampling_rate=sampling_rate,
            epochs=epochs,
            batch_size=batch_size,
            bound=bound,
        )
        if chunk_size is not None:
            check_integer("chunk_size", chunk_size, minimum=1)
        check_records(x, y, may_be_none=plan.records is not None)
        plan.sensitivity(len(y))  # raises if there are fewer records than a batch has
        check_model(model)
        _check_convex(model, plan, smoothness)
        model.to(device or allotted_device()).train()
        trainable = [t for t in released_tensors(model) if t.requires_grad]
        rounding = _rounding(trainable, plan, plan.steps(len(y)))
        if not math.isfinite(rounding):
            raise InvalidParameterError(
                "model",
                "a model whose weights are not finite, or too large",
                "one whose weights and steps have a length in float64",
            )
        return plan, rounding

    def rehearsal(generated: Generated) -> None:
        plan, _ = agreed()
        count = min(plan.count(len(y)), plan.batch_size or LARGEST_CHUNK)
        made = generated(rehearsed_count(min(count, chunk_size or LARGEST_CHUNK), x))
        one = replace(plan, sampling_rate=1.0, epochs=1, batch_size=None, records=None)
        with torch.random.fork_rng(devices=[]):
            _descend(model, *made, one, loss, chunk_size, rehearsed=True)

    rehearse(TRAIN, x, y, rehearsal)
    plan, rounding = agreed()
    tensors = released_tensors(model)
    before = digests(map(as_array, tensors))
    trained = _descend(model, x, y, plan, loss, chunk_size)
    note_step(p for p in model.parameters() if p.requires_grad)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stepped = {id(p): _typed(trained[name], p.dtype) for name, p in trainable.items()}
    after = digests(as_array(stepped.get(id(tensor), tensor)) for tensor in tensors)
    count = plan.count(len(y))
    step = PerRecordStep(plan=plan, records=count, before=before, after=after, rounding=rounding)
    certify(step)
    with torch.no_grad():
        for parameter in trainable.values():
            parameter.copy_(stepped[id(parameter)])
    return step


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
    *,
    rehearsed: bool = False,
) -> dict[str, Tensor]:
    """Return the trainable parameters after the steps, in float64, by name.

    Rehearsed, what the model or the loss raises is raised.
    """
    # The convex bound is one of exact gradients: rounded ones could drive the weights apart.
    exact = plan.bound == "convex"
    if exact:
        model = copy.deepcopy(model).double()
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    device = next(iter(trainable.values())).device

    def tensors(records: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        x, y = (_taken(part, records).to(device) for part in (features, labels))
        if exact:
            x, y = (t.double() if t.is_floating_point() else t for t in (x, y))
        return x, y

    feature, label = (tensor[0] for tensor in tensors(np.zeros(1, np.intp)))
    with one_thread():
        gradients = RecordGradients(model, loss, feature, label)
    # Tied weights are one parameter but several arrays, and what is released is the arrays.
    held = [id(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    copies = {n: held.count(id(p)) for n, p in model.named_parameters() if p.requires_grad}
    fitting = max(1, CHUNK_BYTES // max(1, gradients.bytes_per_record))
    size = chunk_size or min(LARGEST_CHUNK, fitting)
    rate = plan.learning_rate / plan.batch(len(labels))
    without = np.zeros(len(labels), np.bool_)  # which records were without a gradient in a step
    weights = {name: p.to(torch.float64, copy=True) for name, p in trainable.items()}
    # In a sample, one record more or less moves the places of others: see `add_to`.
    short = plan.sampling_rate == 1 and 1e-9 <= plan.clipping_norm <= 1e9
    for batch in _batches(plan, len(labels)):
        current = {name: _typed(weights[name], p.dtype) for name, p in trainable.items()}
        total = {name: torch.zeros_like(w) for name, w in weights.items()}
        for records in np.array_split(batch, -(-len(batch) // size)) if len(batch) else []:
            take = partial(tensors, records)
            with one_thread():
                if rehearsed:
                    chunk = gradients(current, *take())
                else:
                    chunk = gradients.of_all(current, take)
                scales = chunk.scales(copies, plan.clipping_norm)
                missing = records >= len(labels)
                # A missing record is in the batch as zeros, so that the others' rounding does not
                # tell of it, and its gradient is left out.
                if missing.any():
                    scales[torch.from_numpy(missing).to(device)] = 0
                without[records[~missing]] |= (scales == 0).cpu().numpy()[~missing]
                chunk.add_to(total, scales, short=short)
        if rehearsed and current_frozen() is not None:
            _check_reached(total)
        weights = {name: w - rate * total[name] for name, w in weights.items()}
    if count := int(without.sum()):
        logger.warning(
            "train_per_record: %d of %d records counted as zero in a step: their gradient is not "
            "finite, or the model or the loss raises for them",
            count,
            len(without),
        )
    return weights


def _check_reached(total: dict[str, Tensor]) -> None:
    """Refuse a model in which no record has a gradient by some parameters.

    An adapter that is not active, or that a layer was merged with, is trained by nothing. The
    values of a rehearsal are made up, so that no factor of an adapter is zero.
    """
    if idle := sorted(name for name, gradient in total.items() if not bool(gradient.any())):
        raise InvalidParameterError(
            "model",
            f"a model whose output does not depend on {idle}",
            "one in which everything whose requires_grad is on has a gradient: activate the "
            "adapters, or freeze them",
        )


def _typed(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights in another type, the nearest it has: never an infinity."""
    info = torch.finfo(dtype)
    return weights.clamp(info.min, info.max).to(dtype)


def _taken(array: NDArray[Any], places: NDArray[np.intp]) -> Tensor:
    """Return a copy of some records, which the model may change; zeros for those that are missing.

    It is in memory of torch's, which is aligned: a product of matrices may depend on that.
    """
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    taken = torch.zeros((len(places), *array.shape[1:]), dtype=dtype)
    there = places < len(array)
    if there.all():
        np.take(array, places, axis=0, out=taken.numpy(), mode="clip")
    else:
        taken.numpy()[there] = array[places[there]]
    return taken


def _batches(plan: PerRecordPlan, records: int) -> Iterator[NDArray[np.intp]]:
    """Yield the places of the records of each step; some may be beyond what there is."""
    records = plan.count(records)
    for _ in range(plan.epochs):
        if plan.batch_size is None:
            yield np.flatnonzero(in_step(plan, records))
            continue
        for start in range(0, records, plan.batch_size):
            yield np.arange(start, min(start + plan.batch_size, records))
