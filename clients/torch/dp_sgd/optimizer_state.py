"""What a private loop compares of the user's optimiser: its moments, and who sets its rates."""

import copy
import gc
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flwr_privacy.errors import InvalidParameterError

__all__ = ["State", "check_schedulers", "same", "same_state", "state_copies"]

State = dict[tuple[Any, ...], Any]
"""Values of an optimiser's state by their places: the parameter's identity first."""


def state_copies(optimizer: Optimizer) -> State:
    """Return copies of all values in the state of an optimiser."""
    return dict(_leaves((), {id(p): own for p, own in optimizer.state.items()}))


def same_state(one: State, other: State) -> bool:
    """Tell whether two states have the same values at the same places."""
    return [*one] == [*other] and all(_same_value(v, other[place]) for place, v in one.items())


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, where NaN equals NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def check_schedulers(optimizer: Optimizer) -> None:
    """Refuse a schedule of learning rates that follows losses of the data.

    Raises
    ------
    InvalidParameterError
        If a ReduceLROnPlateau has the optimiser, or the one that `private_training` made of it.
    """
    # The schedule knows its optimiser, and nothing knows the schedule.
    kinds = {ReduceLROnPlateau, *ReduceLROnPlateau.__subclasses__()}
    for schedule in [one for one in gc.get_objects() if type(one) in kinds]:
        theirs = getattr(schedule, "optimizer", None)
        if optimizer in (theirs, getattr(theirs, "inner", None)):
            raise InvalidParameterError(
                "optimizer",
                "one with a ReduceLROnPlateau",
                "a schedule that follows the steps alone: losses of the data are not private",
            )


def _leaves(place: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield copies of what is in dictionaries and lists, with its place there."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, part in items:
            yield from _leaves((*place, name), part)
    elif isinstance(value, Tensor):
        yield place, value.detach().clone()
    else:
        yield place, copy.deepcopy(value)


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and same(one, other)
    return type(one) is type(other) and bool(one == other)
