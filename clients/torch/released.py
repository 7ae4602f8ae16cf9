"""What of a torch model a scheme releases, and whether records can be protected in it."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_privacy.clients.certificates.frozen_weights import current_frozen
from flwr_privacy.clients.certificates.request import digests
from flwr_privacy.errors import InvalidParameterError

__all__ = ["as_array", "check_model", "model_digests", "released_tensors", "statistics_of"]

_SHOWN = 3  # names of layers: the log of a round cuts longer texts off, and the advice with them
_TYPES = (torch.float16, torch.float32, torch.float64)  # of floats in torch and NumPy


def check_model(model: nn.Module) -> None:
    """Check that a model can be trained where single records are protected.

    Raises
    ------
    InvalidParameterError
        If it has batch normalisation or running statistics, no parameters to train, or types that
        NumPy lacks.
    ProtocolError
        If the question has frozen weights and nothing was loaded with `load_trainable`.
    """
    if (request := current_frozen()) is not None:
        request.check_loaded()
    mixing = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) or getattr(module, "running_mean", None) is not None
    ]
    if mixing:
        more = len(mixing) - _SHOWN
        raise InvalidParameterError(
            "model",
            f"a model with the layers {mixing[:_SHOWN]}"
            + (f" and {more} more" if more > 0 else ""),
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
    """Return what of the model a scheme could release, in the order of ``state_dict``.

    Where the question has frozen weights, that is what came with it.
    """
    request = current_frozen()
    return [
        tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.is_floating_point() and (request is None or name in request.names)
    ]


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the values of a tensor."""
    return tensor.detach().cpu().numpy()


def model_digests(model: nn.Module) -> tuple[bytes, ...]:
    """Return the `digests` of what a scheme could release."""
    return digests(map(as_array, released_tensors(model)))


def statistics_of(model: nn.Module, *, positions: bool = False) -> list[str]:
    """Return the arrays of a model that no gradient trains, for ``keep_back`` of a strategy.

    They are the buffers in its ``state_dict``: the running means and variances of normalisation
    layers with their counters of batches, and whatever else a module registers as a buffer.

    Parameters
    ----------
    model : Module
        The model.
    positions : bool, default False
        Whether they are called by their place in ``state_dict`` ("0", "1", ...), as arrays are that
        came as a list: those of a NumPyClient app, which sends
        ``[tensor.numpy() for tensor in model.state_dict().values()]``. By default they have the
        names of ``state_dict``.

    Returns
    -------
    list of str
        Names in the order of ``state_dict``; empty if the model has no buffers.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> statistics_of(model)
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    >>> statistics_of(model, positions=True)
    ['4', '5', '6']
    """
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [
        str(place) if positions else name
        for place, name in enumerate(model.state_dict())
        if name not in weights
    ]
