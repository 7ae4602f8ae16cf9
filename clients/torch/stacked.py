"""Stacks the models of several clients: copies and compares their states."""

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .computing import Loss

__all__ = ["ModelState", "filled", "name_of", "none_in_force", "same_loss", "stack_of"]


class ModelState:
    """A snapshot of a model: modules, attributes, parameters and buffers.

    Parameters
    ----------
    model : nn.Module
        The model.

    Attributes
    ----------
    trainable, fixed : dict of str to Tensor
        Copies of the parameters to train, and of all other parameters and of the buffers, by name.
    kind : tuple
        What the model is like: the types of its modules and the shapes of what is trained.
    nbytes : int
        Memory of the copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {
            name: (module, {key: _kept(value) for key, value in vars(module).items()})
            for name, module in model.named_modules()
        }
        self._tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self._trained = {name: t.requires_grad for name, t in self._tensors.items()}
        self.trainable: dict[str, Tensor] = {}
        self.fixed: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            to = self.trainable if tensor.requires_grad else self.fixed
            to[name] = tensor.detach().clone()
        types = tuple(type(module) for module, _ in self._modules.values())
        self.kind = (types, tuple(tuple(t.shape) for t in self.trainable.values()))
        copies = (*self.trainable.values(), *self.fixed.values())
        self.nbytes = sum(tensor.nbytes for tensor in copies)

    def put_back(self, changed: Mapping[str, Tensor] | None = None) -> None:
        """Restore the model, except for the given changed tensors, by name."""
        for module, attributes in self._modules.values():
            vars(module).update({key: _kept(value) for key, value in attributes.items()})
        with torch.no_grad():
            for name, tensor in {**self.trainable, **self.fixed, **(changed or {})}.items():
                self._tensors[name].copy_(tensor)
        for name, tensor in self._tensors.items():
            if tensor.requires_grad != self._trained[name]:
                tensor.requires_grad_(self._trained[name])

    def now(self) -> dict[str, Tensor]:
        """Return the current parameters and buffers."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {name: tensor.detach() for name, tensor in named}

    def computes_like(self, other: "ModelState") -> bool:
        """Tell whether both models are the same function of their weights, buffers and input.

        They are if they are made of the same modules with equal attributes. Attributes that cannot
        be compared, such as tensors that are no buffers, count as different.
        """
        return (
            self._modules.keys() == other._modules.keys()
            and _looks(self._tensors, self._trained) == _looks(other._tensors, other._trained)
            and all(
                type(module) is type(other._modules[name][0])
                and _equal(_plain(attributes), _plain(other._modules[name][1]))
                for name, (module, attributes) in self._modules.items()
            )
        )


def stack_of(tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of n clients as tensors of shape (n, ...), by name."""
    return {name: torch.stack([own[name] for own in tensors]) for name in tensors[0]}


def filled(rows: Tensor, where: Tensor, value: float) -> Tensor:
    """Return B tensors with one value in place of some of them: a (B,) bool Tensor says which."""
    return rows.masked_fill(where.view(-1, *[1] * (rows.ndim - 1)), value)


def same_loss(one: Loss, other: Loss) -> bool:
    """Tell whether two losses are the same function, or the same method of the same object."""
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return one is other


def name_of(loss: Loss) -> str:
    """Return the name of a loss, if it has one."""
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}.{named.__qualname__}"


def none_in_force() -> bool:
    """Tell whether no mode of torch is active that would affect other clients too."""
    return torch.is_grad_enabled() and not any(
        torch.is_autocast_enabled(device) for device in ("cpu", "cuda")
    )


def _kept(value: Any) -> Any:
    """Return an attribute as it is to be kept: tables of tensors and modules change in place."""
    return value.copy() if isinstance(value, dict) else value


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    tables = ("_parameters", "_buffers", "_modules")
    return {key: value for key, value in attributes.items() if key not in tables}


def _looks(tensors: Mapping[str, Tensor], trained: Mapping[str, bool]) -> dict[str, Any]:
    return {name: (t.shape, t.dtype, t.device, trained[name]) for name, t in tensors.items()}


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
