"""Measures the mean of losses that are clipped one by one, on which the privacy of a loss rests."""

import logging
import math
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.clients.certificates.frozen_weights import current_frozen
from flwr_privacy.clients.certificates.per_record_loss import (
    PerRecordLoss,
    certify_loss,
    check_cap,
    current_cap,
    declared_losses,
)
from flwr_privacy.clients.node.rehearsal import Generated, rehearse
from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.wire.message import EVALUATE

from .computing import Loss, allotted_device, one_thread
from .each_record import LARGEST_CHUNK, record_losses, rehearsed_count
from .given_records import Labels, Records, given_records
from .released import model_digests
from .training import check_records

__all__ = ["evaluate_per_record"]

logger = logging.getLogger("flwr.privacy")


def evaluate_per_record(
    model: nn.Module,
    features: Records,
    labels: Labels = None,
    *,
    loss: Loss = functional.cross_entropy,
    loss_cap: float | None = None,
    chunk_size: int = LARGEST_CHUNK,
    device: str | None = None,
) -> PerRecordLoss:
    """Return the mean of the records' losses, each clipped to ``[0, loss_cap]``.

    A clip of the mean would not do: one record may move that by all of the cap. Inside a scheme's
    round the scheme gives the cap and gets the mean: call this once in ``evaluate``, with the
    arrays that came in loaded into the model. Where the scheme declares the number of records, the
    mean is over that number: records beyond it are left out, and a missing one counts as 0.

    Parameters
    ----------
    model : nn.Module
        Takes a batch of features; it is moved to `device` and set to evaluation. It sees each
        record as a batch of one, so that batch normalisation is fine here: its running statistics
        are part of the model, and no statistics of a batch are taken.
    features : (n, ...) ndarray or Tensor, Dataset, or DataLoader
        Records. Each record of the data set may be there once.
    labels : (n, ...) ndarray or Tensor, optional
        Their labels; integers of shape (n,) for the default loss. Not beside a Dataset or a
        DataLoader, whose records are pairs. The batch size and order of a DataLoader have no
        effect, which the log says once; one that leaves out or repeats records is refused.
    loss : callable, default cross entropy of logits
        Loss of one record, from the model's output for a batch of one and the batch of its label.
        One that is not a number counts as the cap, and so does that of a record for which the model
        or the loss raises; the node's log says how many did.
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
        If there is not one label per record, or there are no records and none are declared.
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
    x, y = given_records(features, labels, EVALUATE)

    def agreed() -> float:
        if (request := current_frozen()) is not None:
            request.check_loaded()
        asked = current_cap()
        cap = loss_cap if asked is None else asked
        if cap is None:
            raise InvalidParameterError(
                "loss_cap",
                None,
                "a number above 0, as there is no scheme around the evaluation to ask",
            )
        if loss_cap not in (None, cap):
            raise InvalidParameterError(
                "loss_cap", loss_cap, f"{cap}, as the scheme asks, or nothing"
            )
        check_cap("loss_cap", cap)
        check_integer("chunk_size", chunk_size, minimum=1)
        check_records(x, y, may_be_none=declared_losses() is not None)
        model.to(device or allotted_device()).eval()
        return cap

    def rehearsal(generated: Generated) -> None:
        agreed()
        made = generated(rehearsed_count(min(len(y) or 1, chunk_size), x))
        with torch.random.fork_rng(devices=[]):
            _losses(model, loss, *made, slice(None), device, rehearsed=True)

    rehearse(EVALUATE, x, y, rehearsal)
    cap = agreed()
    count = declared_losses() or len(y)
    clipped: list[float] = []
    no_number = 0
    for start in range(0, min(count, len(y)), chunk_size):
        chunk = slice(start, min(start + chunk_size, count))
        losses = _losses(model, loss, x, y, chunk, device).double()
        no_number += int(losses.isnan().sum())
        clipped += losses.nan_to_num(nan=cap).clamp(0, cap).tolist()
    if no_number:
        logger.warning(
            "evaluate_per_record: %d of %d records counted as the cap: their loss is no number, or "
            "the model or the loss raises for them",
            no_number,
            len(clipped),
        )
    found = PerRecordLoss(
        cap=cap,
        records=count,
        mean=min(cap, math.fsum(clipped) / count),
        model=model_digests(model),
    )
    certify_loss(found)
    return found


def _losses(
    model: nn.Module,
    loss: Loss,
    features: NDArray[Any],
    labels: NDArray[Any],
    chunk: slice,
    device: str | None,
    *,
    rehearsed: bool = False,
) -> Tensor:
    """Return the losses of some records; rehearsed, what the model or the loss raises is raised."""
    on = device or allotted_device()

    def take() -> tuple[Tensor, Tensor]:
        return torch.tensor(features[chunk], device=on), torch.tensor(labels[chunk], device=on)

    with one_thread(), torch.no_grad():
        return record_losses(model, loss, take, forgiving=not rehearsed)
