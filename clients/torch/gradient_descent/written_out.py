"""Steps of gradient descent on a sequence of linear layers, with the gradients written out.

For small batches most of a step's time is autograd's own work: its graph, a tensor for each
gradient, a call for each layer. Here a step is a few products of matrices, of which those of the
weights go into the weights at once. The numbers are those of autograd up to rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as modules

from ..computing import Loss

__all__ = ["WrittenOut"]

_aten: Any = torch.ops.aten
_MEAN, _LEFT_OUT = 1, -100  # the reduction, and the class that cross entropy leaves out

_Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""An activation, and the gradient by its input from that by its output and the output."""

_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.ReLU: (torch.relu, lambda gradient, out: _aten.threshold_backward(gradient, out, 0)),
    nn.Tanh: (torch.tanh, _aten.tanh_backward),
    nn.Sigmoid: (torch.sigmoid, _aten.sigmoid_backward),
}
_HOOKS = (*("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),)
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


@dataclass(frozen=True)
class _Layer:
    """A linear layer, with the activations that follow it."""

    weight: Tensor
    bias: Tensor | None
    activations: tuple[_Activation, ...]

    def of(self, given: Tensor) -> list[Tensor]:
        """Return what the layer makes of its input, and each activation of that."""
        outputs = [functional.linear(given, self.weight, self.bias)]
        for apply, _ in self.activations:
            outputs.append(apply(outputs[-1]))
        return outputs

    def before(self, gradient: Tensor, outputs: list[Tensor]) -> Tensor:
        """Return the gradient by the product, from that by the last activation."""
        # Each multiplies it entry by entry, so their order is of no account.
        for (_, backward), output in zip(self.activations, outputs[1:], strict=True):
            gradient = backward(gradient, output)
        return gradient


class WrittenOut:
    """A model whose gradients are written out; `of` says whether it is one.

    Parameters
    ----------
    layers : list
        Its layers, from the input on.
    """

    def __init__(self, layers: list[_Layer]) -> None:
        self._layers = layers

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Self | None:
        """Return the steps of a model on some records; None where autograd has to find them.

        They are written out for linear layers in a sequence, all of them trained, with ReLU, tanh
        or the sigmoid between them, after a `Flatten` or none, and the mean cross entropy of
        classes. Whatever looks on or changes the computation, such as hooks and autocast, is
        autograd's. It does not depend on any value in the records.
        """
        if not (_is_cross_entropy(loss) and _in_no_mode() and _nobody_looks_on(model)):
            return None
        layers = _layers_of(list(_flat(model)))
        parameters = list(model.parameters())  # each once
        own = [p for one in layers or () for p in (one.weight, one.bias) if p is not None]
        if not layers or len(own) != len(parameters) or not all(map(_is_plain, parameters)):
            return None
        kinds = {(p.dtype, p.device) for p in [*parameters, inputs]}
        fits = (
            len(kinds) == 1
            and inputs.ndim > 1
            and inputs.shape[1:].numel() == layers[0].weight.shape[1]
            and (inputs.ndim == 2 or isinstance(next(_flat(model)), nn.Flatten))
            and targets.ndim == 1
            and targets.dtype == torch.int64
        )
        return cls(layers) if fits else None

    def step(self, inputs: Tensor, targets: Tensor, learning_rate: float) -> Tensor:
        """Do a step on a batch, in place; return the loss before it."""
        with torch.no_grad():
            value, factors = self._factors(inputs, targets)
            for layer, (gradient, given) in zip(self._layers, factors, strict=True):
                layer.weight.addmm_(gradient.t(), given, alpha=-learning_rate)
                if layer.bias is not None:
                    layer.bias.add_(gradient.sum(0), alpha=-learning_rate)
        return value

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Leave the gradients in the parameters' ``grad``, as autograd does; return the loss."""
        with torch.no_grad():
            value, factors = self._factors(inputs, targets)
            for layer, (gradient, given) in zip(self._layers, factors, strict=True):
                layer.weight.grad = gradient.t() @ given
                if layer.bias is not None:
                    layer.bias.grad = gradient.sum(0)
        return value

    def _factors(
        self, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the loss, and for each layer the gradient by its output, and its input.

        Their product is the gradient of the weight.
        """
        given, outputs = [inputs.flatten(1)], list[list[Tensor]]()
        for layer in self._layers:
            outputs.append(layer.of(given[-1]))
            given.append(outputs[-1][-1])
        logs = torch.log_softmax(given.pop(), 1)
        value, count = _aten.nll_loss_forward(logs, targets, None, _MEAN, _LEFT_OUT)
        gradient = _aten.nll_loss_backward(
            torch.ones_like(value), logs, targets, None, _MEAN, _LEFT_OUT, count
        )
        gradient = _aten._log_softmax_backward_data(gradient, logs, 1, logs.dtype)
        factors = []
        for number in reversed(range(len(self._layers))):
            layer = self._layers[number]
            gradient = layer.before(gradient, outputs[number])
            factors.append((gradient, given[number]))
            if number:
                gradient = gradient @ layer.weight
        return value, factors[::-1]


def _flat(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules of a sequence, and of the sequences within it, in order."""
    if type(model) is nn.Sequential:
        for part in model:
            yield from _flat(part)
    else:
        yield model


def _layers_of(parts: list[nn.Module]) -> list[_Layer] | None:
    """Return linear layers with their activations; None where there is anything else."""
    if parts and type(parts[0]) is nn.Flatten and (parts[0].start_dim, parts[0].end_dim) == (1, -1):
        parts = parts[1:]
    layers: list[_Layer] = []
    for part in parts:
        if type(part) is nn.Linear:
            layers.append(_Layer(part.weight, part.bias, ()))
        elif type(part) in _ACTIVATIONS and layers:
            last = layers[-1]
            activations = (*last.activations, _ACTIVATIONS[type(part)])
            layers[-1] = _Layer(last.weight, last.bias, activations)
        else:
            return None
    return layers


def _is_cross_entropy(loss: Loss) -> bool:
    """Tell whether a loss is the mean cross entropy of classes, and torch's own."""
    if type(loss) is nn.CrossEntropyLoss:
        plain = loss.weight is None and loss.reduction == "mean" and loss.label_smoothing == 0
        return plain and loss.ignore_index == _LEFT_OUT and _nobody_looks_on(loss)
    # Under its name may stand what somebody wrapped around it.
    name = (getattr(loss, "__module__", None), getattr(loss, "__qualname__", None))
    own = name == ("torch.nn.functional", "cross_entropy")
    return own and not hasattr(loss, "__wrapped__")


def _in_no_mode() -> bool:
    """Tell whether autograd records, and no autocast changes types."""
    return torch.is_grad_enabled() and not any(
        torch.is_autocast_enabled(device) for device in ("cpu", "cuda")
    )


def _nobody_looks_on(model: nn.Module) -> bool:
    """Tell whether no hook is there, and no module has a forward of its own."""
    if any(getattr(modules, name) for name in _GLOBAL_HOOKS):
        return False
    return not any(
        "forward" in vars(part) or any(getattr(part, name) for name in _HOOKS)
        for part in model.modules()
    )


def _is_plain(parameter: nn.Parameter) -> bool:
    """Tell whether it is trained, and a tensor of torch's own without hooks."""
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return (
        parameter.requires_grad
        and type(parameter) is nn.Parameter
        and parameter.is_floating_point()
        and not hooks
    )
