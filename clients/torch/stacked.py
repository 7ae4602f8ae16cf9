"""What stacking the models of several clients takes: copies of weights, and a comparison."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ModelState", "compute_alike", "stack_of"]


class ModelState:
    """The parameters and buffers of a model as they are now, by name.

    Parameters
    ----------
    model : nn.Module
        The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self.trainable: dict[str, Tensor] = {}
        self.fixed: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            to = self.trainable if tensor.requires_grad else self.fixed
            to[name] = tensor.detach().clone()

    def put_back(self, changed: Mapping[str, Tensor] | None = None) -> None:
        """Let the model be in training and as it was, but for what has changed by name."""
        with torch.no_grad():
            for name, tensor in {**self.trainable, **self.fixed, **(changed or {})}.items():
                self._tensors[name].copy_(tensor)
        if not self._model.training:
            self._model.train()


def stack_of(tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of n clients as tensors of shape (n, ...), by name."""
    return {name: torch.stack([own[name] for own in tensors]) for name in tensors[0]}


def compute_alike(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two models are the same function of their weights, buffers and input.

    They are if they are made of the same modules with equal attributes. Attributes that cannot be
    compared, such as tensors that are no buffers, count as different.
    """
    if one is other:
        return True
    ours, others = dict(one.named_modules()), dict(other.named_modules())
    return ours.keys() == others.keys() and all(_alike(m, others[name]) for name, m in ours.items())


def _alike(one: nn.Module, other: nn.Module) -> bool:
    ours, others = dict(vars(one)), dict(vars(other))
    if type(one) is not type(other) or ours.keys() != others.keys():
        return False
    for tensors in ("_parameters", "_buffers"):
        if _looks(ours.pop(tensors)) != _looks(others.pop(tensors)):
            return False
    del ours["_modules"]
    return all(_equal(value, others[name]) for name, value in ours.items())


def _looks(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {
        name: None if t is None else (t.shape, t.dtype, t.device, t.requires_grad)
        for name, t in tensors.items()
    }


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return isinstance(one, bool | int | float | str | bytes | set | frozenset) and one == other
