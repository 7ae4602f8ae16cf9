"""What of a torch model a scheme releases, and whether records can be protected in it."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_privacy.clients.certificates.request import digests
from flwr_privacy.errors import InvalidParameterError

__all__ = ["as_array", "check_model", "model_digests", "released_tensors"]

_TYPES = (torch.float16, torch.float32, torch.float64)  # of floats in torch and NumPy


def check_model(model: nn.Module) -> None:
    """Check that a model can be trained where single records are protected.

    Raises
    ------
    InvalidParameterError
        If it has batch normalisation or running statistics, no parameters to train, or types that
        NumPy lacks.
    """
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


def released_tensors(model: nn.Module) -> list[Tensor]:
    """Return what of the model a scheme could release, in the order of ``state_dict``."""
    return [t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()]


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the values of a tensor."""
    return tensor.detach().cpu().numpy()


def model_digests(model: nn.Module) -> tuple[bytes, ...]:
    """Return the `digests` of what a scheme could release."""
    return digests(map(as_array, released_tensors(model)))
