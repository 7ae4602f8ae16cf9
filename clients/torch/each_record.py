"""Computes something for each of some records; a record for which that raises costs no other one.

Nothing that a record does may show in the results of the others, in no bit: whoever chooses the
weights can make much of a rounding. So where a batch raises, the records for which it raises are
found, and it is computed anew with others in their places, in the same shape and with the same
random numbers.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap

from flwr_privacy.errors import InvalidParameterError

from .computing import Loss, raise_resource_error

__all__ = [
    "CHUNK_BYTES",
    "LARGEST_CHUNK",
    "check_loss",
    "for_each",
    "record_losses",
    "rehearsed_count",
]

LARGEST_CHUNK = 1024
"""Most records at a time."""

CHUNK_BYTES = 256 * 2**20
"""Memory that the records of a chunk take, about."""

Rows = TypeVar("Rows")


def for_each(
    compute: Callable[[Tensor, Tensor], Rows], take: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Rows | None, Tensor]:
    """Compute something for each of some records, and find those for which that raises.

    Parameters
    ----------
    compute : callable
        From features and labels, (B, ...), to something of which a record has a row of its own.
    take : callable
        Returns new copies of the records.

    Returns
    -------
    found : object or None
        The rows of those that raise are another record's; None if there is none for all together.
    raised : (B,) bool Tensor
        Whether it raises for a record. The others have the rows, to the bit, that they would have
        if it did for none.

    Raises
    ------
    Exception
        If memory or a device is lacking.
    """
    features, labels = take()
    again = _generators(features.device)
    raised = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    try:
        return compute(features, labels), raised
    # The model and the loss are the user's, and any error may be that of a single record.
    except Exception as error:  # noqa: BLE001
        raise_resource_error(error)
    features, labels = take()  # the model may have changed what it got

    def find(places: Tensor) -> None:
        again()
        try:
            compute(features[places], labels[places])
        except Exception as error:  # noqa: BLE001
            raise_resource_error(error)
            if len(places) == 1:
                raised[places] = True
                return
            for half in places.tensor_split(2):
                find(half)

    places = torch.arange(len(labels), device=labels.device)
    find(places)
    if bool(raised.all()):
        # For the numbers alone that the others of its kind would draw.
        features, labels = torch.zeros_like(features), torch.zeros_like(labels)
    else:
        places[raised] = places[~raised][0]
    again()
    try:
        return compute(features[places], labels[places]), raised
    except Exception as error:  # noqa: BLE001
        raise_resource_error(error)
    return None, torch.ones_like(raised)


def record_losses(
    model: nn.Module,
    loss: Loss,
    take: Callable[[], tuple[Tensor, Tensor]],
    *,
    forgiving: bool = True,
) -> Tensor:
    """Return the losses of B records, of shape (B,); each goes through the model on its own.

    They are NaN for records for which the model or the loss raises, unless it is not `forgiving`.

    Raises
    ------
    InvalidParameterError
        If the loss is not one number for one record.
    """

    def of_one(feature: Tensor, label: Tensor) -> Tensor:
        return loss(model(feature[None]), label[None]).squeeze()

    each = vmap(of_one, randomness="different")
    if forgiving:
        losses, raised = for_each(each, take)
    else:
        losses, raised = each(*take()), torch.zeros((), dtype=torch.bool)
    if losses is None:
        return torch.full(raised.shape, math.nan)
    check_loss(losses[0])
    return losses.masked_fill(raised.to(losses.device), math.nan)


def check_loss(loss: Tensor) -> None:
    """Check that the loss of a record is one number.

    Raises
    ------
    InvalidParameterError
        If it is not.
    """
    if loss.ndim != 0:
        raise InvalidParameterError(
            "loss", f"a function to shape {tuple(loss.shape)}", "one number for one record"
        )


def rehearsed_count(records: int, features: NDArray[Any]) -> int:
    """Return how many records a rehearsal generates, where training would take `records`."""
    size = math.prod(features.shape[1:]) * features.dtype.itemsize
    return max(1, min(records, CHUNK_BYTES // max(1, size)))


def _generators(device: torch.device) -> Callable[[], None]:
    """Note the states of torch's generators; return what puts them back."""
    state = torch.get_rng_state()
    devices = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        torch.set_rng_state(state)
        if devices is not None:
            torch.cuda.set_rng_state(devices, device)

    return put_back
