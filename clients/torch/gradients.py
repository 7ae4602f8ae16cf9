"""The gradients of single records, as little of them in memory as their norms and sums need.

Each record goes through the model as a batch of its own (`torch.func.vmap`), so no record can have
a part in the gradient of another, whatever the model does with its batch.

The gradient of the weight of a linear layer is the outer product of two vectors: the gradient of
the loss by the layer's output, and the layer's input. Its norm is the product of theirs, and a
weighted sum of such gradients is one product of matrices (Goodfellow, "Efficient Per-Example
Gradient Computations", arXiv:1510.01799). So a weight that allows it is kept in this form; of every
other parameter the gradients are formed one by one.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from flwr_privacy.errors import InvalidParameterError

__all__ = ["Gradients", "Loss", "RecordGradients"]

Loss = Callable[[Any, Tensor], Tensor]
"""From the model's output for a batch of one record, and the batch of its label, to the loss."""

_Tap = Callable[[str, nn.Linear, Tensor, Tensor], Tensor]
"""From the name of a layer, the layer, its input and output to what goes on as its output."""


@dataclass(frozen=True)
class Gradients:
    """Gradients of B records in float64.

    Parameters
    ----------
    whole : dict of str to (B, *shape) Tensor
        By name of the parameter.
    outer : dict of str to pair of (B, outputs) and (B, inputs) Tensor
        For other parameters, the vectors whose outer products are the gradients.
    """

    whole: dict[str, Tensor]
    outer: dict[str, tuple[Tensor, Tensor]]

    def norms(self, copies: Mapping[str, int]) -> Tensor:
        """Return the L2 norm of each record's gradient over all parameters, of shape (B,).

        Parameters
        ----------
        copies : Mapping of str to int
            How often each parameter counts.
        """
        squares = [copies[name] * _squares(g) for name, g in self.whole.items()]
        squares += [copies[n] * _squares(d) * _squares(x) for n, (d, x) in self.outer.items()]
        return torch.stack(squares).sum(dim=0).sqrt()

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the sum of the gradients with weights of shape (B,), by name."""
        total = {n: torch.tensordot(weights, g, dims=1) for n, g in self.whole.items()}
        for name, (deltas, inputs) in self.outer.items():
            total[name] = (weights[:, None] * deltas).T @ inputs
        return total


class RecordGradients:
    """Computes the gradients of single records of a model by its trainable parameters.

    Parameters
    ----------
    model : nn.Module
        The model.
    loss : callable
        Loss of a batch of one record; a scalar or of shape (1,).
    feature, label : Tensor
        What one record looks like; the values do not matter. The model runs once on zeros of this
        kind to see how it uses its weights.

    Raises
    ------
    InvalidParameterError
        If the model changes its buffers as it runs, or the loss is not one number.

    Attributes
    ----------
    whole, outer : list of str
        Names of the parameters whose gradients are formed, and of those that are outer products.
    """

    def __init__(self, model: nn.Module, loss: Loss, feature: Tensor, label: Tensor) -> None:
        self._model = model
        self._loss = loss
        self._parameters = {name: p.detach() for name, p in model.named_parameters()}
        self._buffers = dict(model.named_buffers())
        self._layers = self._outer_layers(torch.zeros_like(feature), torch.zeros_like(label))
        self.outer = [f"{name}.weight".removeprefix(".") for name in self._layers]
        self.whole = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in self.outer
        ]

    @property
    def bytes_per_record(self) -> int:
        """Memory of the gradients of one record that are formed, in their type and in float64."""
        parameters = [self._parameters[name] for name in self.whole]
        return sum(p.numel() * (p.element_size() + 8) for p in parameters)

    def __call__(self, features: Tensor, labels: Tensor) -> Gradients:
        """Return the gradients of B records, with features (B, ...) and labels (B, ...)."""
        whole = {name: self._parameters[name] for name in self.whole}
        zeros = {
            name: layer.weight.new_zeros(1, layer.out_features)
            for name, layer in self._layers.items()
        }
        function = vmap(
            grad(self._record_loss, argnums=(0, 1), has_aux=True),
            in_dims=(None, None, 0, 0),
            randomness="different",
        )
        (gradients, deltas), inputs = function(whole, zeros, features, labels)
        return Gradients(
            whole={name: gradient.double() for name, gradient in gradients.items()},
            outer={
                parameter: (deltas[name][:, 0].double(), inputs[name][:, 0].double())
                for parameter, name in zip(self.outer, self._layers, strict=True)
            },
        )

    def _record_loss(
        self, whole: dict[str, Tensor], zeros: dict[str, Tensor], feature: Tensor, label: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a record, and the inputs of the layers.

        Zeros are added to the outputs of the layers: the gradient by them is the one by the output.
        """
        inputs: dict[str, Tensor] = {}

        def tap(name: str, layer: nn.Linear, input_: Tensor, output: Tensor) -> Tensor:
            inputs[name] = input_.clone()  # the model may go on to change it in place
            return output + zeros[name]

        state = {**self._parameters, **self._buffers, **whole}
        with _tapped(self._layers, tap):
            return self._loss_of(state, feature, label), inputs

    def _loss_of(self, state: dict[str, Tensor], feature: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(self._model, state, (feature[None],))
        return self._loss(outputs, label[None]).squeeze()

    def _outer_layers(self, feature: Tensor, label: Tensor) -> dict[str, nn.Linear]:
        """Return the linear layers whose weight only takes part in one product with one vector."""
        uses = Counter(id(p) for _, p in self._model.named_parameters(remove_duplicate=False))
        layers = {
            name: layer
            for name, layer in self._model.named_modules()
            # Not a subclass: it may do something else with its weight.
            if type(layer) is nn.Linear
            and layer.weight.requires_grad
            and uses[id(layer.weight)] == 1
        }
        shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}

        def tap(name: str, layer: nn.Linear, input_: Tensor, output: Tensor) -> Tensor:
            shapes[name].append(input_.shape)
            return functional.linear(input_, layer.weight.detach(), layer.bias)

        # With its part in the layer's own product hidden, a weight on which the loss still depends
        # is used elsewhere too.
        state = {
            name: p.clone().requires_grad_(p.is_floating_point())
            for name, p in self._parameters.items()
        }
        state |= {name: buffer.clone() for name, buffer in self._buffers.items()}
        weights = [state[f"{name}.weight".removeprefix(".")] for name in layers]
        with _tapped(layers, tap):
            loss = self._loss_of(state, feature, label)
        changed = [name for name, b in self._buffers.items() if not torch.equal(state[name], b)]
        if changed:
            raise InvalidParameterError(
                "model", f"a model that changes {changed} as it runs", "one that changes nothing"
            )
        if loss.ndim != 0:
            raise InvalidParameterError(
                "loss", f"a function to shape {tuple(loss.shape)}", "one number for one record"
            )
        elsewhere = (
            torch.autograd.grad(loss, weights, allow_unused=True)
            if weights and loss.requires_grad
            else [None] * len(weights)
        )
        return {
            name: layer
            for (name, layer), other in zip(layers.items(), elsewhere, strict=True)
            if other is None and shapes[name] == [(1, layer.in_features)]
        }


@contextmanager
def _tapped(layers: Mapping[str, nn.Linear], tap: _Tap) -> Iterator[None]:
    def hook_of(name: str) -> Callable[..., Tensor]:
        def hook(
            layer: nn.Linear,
            arguments: tuple[Tensor, ...],
            named: dict[str, Tensor],
            output: Tensor,
        ) -> Tensor:
            return tap(name, layer, arguments[0] if arguments else named["input"], output)

        return hook

    # First in line: a hook of the model's own may change the output.
    handles = [
        layer.register_forward_hook(hook_of(name), prepend=True, with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _squares(gradients: Tensor) -> Tensor:
    """Return the squared L2 norms of B tensors."""
    return gradients.flatten(start_dim=1).square().sum(dim=1)
