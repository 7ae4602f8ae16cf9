"""Puts a model back to what it was before a training that does not count."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["unchanged"]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Open a scope at whose end a model is what it was before.

    Its parameters and buffers have their values again, its parameters their ``requires_grad``, and
    its modules the attributes that they had.

    Parameters
    ----------
    model : nn.Module
        The model.
    """
    attributes = [
        # The tables of parameters, buffers and modules change in place.
        (module, {key: _copied(value) for key, value in vars(module).items()})
        for module in model.modules()
    ]
    tensors = [
        (tensor, tensor.detach().clone(), tensor.requires_grad)
        for tensor in (*model.parameters(), *model.buffers())
    ]
    try:
        yield
    finally:
        for module, values in attributes:
            vars(module).update(values)
        with torch.no_grad():
            for tensor, value, _ in tensors:
                tensor.copy_(value)
        for tensor, _, trained in tensors:
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value
