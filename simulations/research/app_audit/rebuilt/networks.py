"""The app's torch module, as the server has it: loaded, filled with a model, looked into."""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.torch.computing import one_thread
from flwr_privacy.errors import InvalidParameterError

__all__ = [
    "Shapes",
    "filled",
    "linear_inputs",
    "load_model",
    "record_gradients",
    "record_losses",
    "shapes_of",
    "trained_names",
]

Vectors = NDArray[np.float64]
Shapes = dict[str, tuple[int, ...]]


def load_model(pickled: Path | None, reference: str | None) -> nn.Module:
    """Return the module that the app trains.

    Parameters
    ----------
    pickled : Path or None
        A file of cloudpickle's with the module, as the probe saw it.
    reference : str or None
        "module:function" of a function that returns it, which goes first.

    Raises
    ------
    InvalidParameterError
        If there is none, it cannot be loaded, or it is no torch module.
    """
    if reference is None and pickled is None:
        raise InvalidParameterError("model", None, "a torch module that a client trains: --model")
    try:
        if reference is not None:
            name, _, function = reference.partition(":")
            found = getattr(importlib.import_module(name), function)()
        elif pickled is not None:
            found = cloudpickle.loads(pickled.read_bytes())
    # The app's own code runs here and may raise anything; it is said what it was.
    except Exception as error:
        allowed = f"a module that can be loaded ({type(error).__name__}: {error})"
        raise InvalidParameterError("model", reference or "the app's", allowed) from error
    if not isinstance(found, nn.Module):
        raise InvalidParameterError("model", type(found).__name__, "a torch module")
    return _unwrapped(found)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module within Opacus' wrapper, without the hooks that note its gradients."""
    inner = getattr(model, "_module", None)
    if not isinstance(inner, nn.Module):
        return model
    remove: Callable[[], None] | None = getattr(model, "remove_hooks", None)
    if remove is not None:
        remove()
    return inner


def shapes_of(model: nn.Module) -> Shapes:
    """Return the shapes of a module's parameters and buffers, by name, as torch orders them."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def filled(model: nn.Module, arrays: Mapping[str, ArrayLike]) -> nn.Module:
    """Return a copy of a module with these values, in float64, as it is while it trains.

    Dropout is off: its draws are the client's own.
    """
    own = copy.deepcopy(model).cpu().double()
    state = own.state_dict()
    for name, array in arrays.items():
        state[name] = torch.tensor(np.asarray(array)).to(state[name].dtype)
    own.load_state_dict(state)
    own.train()
    for part in own.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
    return own


def linear_inputs(model: nn.Module, inputs: NDArray[Any]) -> dict[str, Vectors]:
    """Return what each linear layer is given for some inputs, by its name, in the order of use.

    Layers that see anything but a row for each input are left out, and so are layers that are used
    more than once.
    """
    seen: dict[str, list[Any]] = {}
    hooks = []
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):

            def note(_: Any, given: Any, name: str = name) -> None:
                seen.setdefault(name, []).append(given[0].detach().numpy())

            hooks.append(part.register_forward_pre_hook(note))
    try:
        with one_thread(), _statistics_kept(model):
            model(_tensor(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    rows = {name: calls[0] for name, calls in seen.items() if len(calls) == 1}
    return {n: r.astype(np.float64) for n, r in rows.items() if r.shape[:-1] == inputs.shape[:1]}


def record_losses(model: nn.Module, inputs: Any, labels: NDArray[Any]) -> Any:
    """Return the loss of each record, a tensor that can be differentiated.

    It is the cross entropy where labels are classes and the model has an output for each; with one
    output and labels of 0 and 1 that of the logistic model; else the squared error.

    Raises
    ------
    InvalidParameterError
        If outputs and labels fit none of these.
    """
    outputs = model(_tensor(inputs))
    if not isinstance(outputs, torch.Tensor) or len(outputs) != len(labels):
        raise InvalidParameterError("model", type(outputs).__name__, "one tensor of outputs")
    whole = np.issubdtype(labels.dtype, np.integer)
    classes = outputs.shape[1] if outputs.ndim == 2 else 0
    if whole and labels.ndim == 1 and classes > 1 and labels.max() < classes:
        return functional.cross_entropy(outputs, torch.tensor(labels).long(), reduction="none")
    truth = torch.tensor(labels).double()
    if truth.numel() != outputs.numel():
        raise InvalidParameterError("labels", labels.shape, f"the shape {tuple(outputs.shape)}")
    loss: Callable[..., Any] = functional.mse_loss
    if np.isin(labels, (0, 1)).all():
        loss = functional.binary_cross_entropy_with_logits
    each = loss(outputs.reshape(len(labels), -1), truth.reshape(len(labels), -1), reduction="none")
    return each.mean(dim=1)


def record_gradients(
    model: nn.Module, names: Sequence[str], inputs: NDArray[Any], labels: NDArray[Any]
) -> Iterator[torch.Tensor]:
    """Return the gradient of the loss of each record by some parameters, one vector each.

    Parameters
    ----------
    model : nn.Module
        The model.
    names : sequence of str
        The parameters, in the order of the vector.
    inputs, labels : ndarray, shape (n, ...)
        The records.
    """
    parameters = dict(model.named_parameters())
    chosen = [parameters[name] for name in names]
    for row, label in zip(inputs, labels, strict=True):
        with one_thread():
            loss = record_losses(model, row[None], np.asarray(label)[None]).sum()
            slopes = torch.autograd.grad(loss, chosen)
            whole = torch.cat([slope.reshape(-1) for slope in slopes])
        yield whole


def trained_names(model: nn.Module, change: Mapping[str, Vectors]) -> list[str]:
    """Return the names of the parameters that are trained and of which a change is known."""
    return [n for n, p in model.named_parameters() if n in change and p.requires_grad]


def _tensor(inputs: Any) -> torch.Tensor:
    tensor = inputs if isinstance(inputs, torch.Tensor) else torch.tensor(inputs)
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Have buffers, such as BatchNorm's statistics, afterwards as they were."""
    before = {name: value.clone() for name, value in model.named_buffers()}
    try:
        with torch.no_grad():
            yield
            for name, value in model.named_buffers():
                value.copy_(before[name])
    finally:
        pass
