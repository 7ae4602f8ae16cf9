"""Computes gradients of single records, with only the memory that norms and sums need.

Each record goes through the model as a batch of its own (`torch.func.vmap`), so no record can have
a part in the gradient of another, whatever the model does with its batch.

The gradient of the weight of a linear layer is the outer product of two vectors: the gradient of
the loss by the layer's output, which is the gradient of the bias too, and the layer's input. Its
norm is the product of theirs, and a weighted sum of such gradients is one product of matrices
(Goodfellow, "Efficient Per-Example Gradient Computations", arXiv:1510.01799). So a weight that
allows it is kept in this form; of every other parameter the gradients are formed one by one.

Norms and sums are computed in float64: a sum of n vectors in float32 could be off by
``n**2 * 2**-24`` of one of them, which for a thousand records is more than a sensitivity can bear.
Within a block of 64 records it is 2.5e-4, and a record that is replaced by another in the same
place leaves every other block as it was, bit for bit. So where that is all that is asked, products
of matrices may be in float32 within a block; it is twice as fast.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from flwr_privacy.errors import InvalidParameterError

from .computing import Loss
from .each_record import check_loss, for_each

__all__ = ["Gradients", "RecordGradients"]

_BLOCK = 64  # records
_LARGEST_INPUT = 2.0**20  # in a product in float32
_LARGEST_NORM = 1e50
"""Of a gradient, or of a factor of one: the rest of what float64 can hold is for its products.

So a norm is never too small where squares vanish: they do below 1e-162, and the product with 1e50
is less than any norm that is clipped to. Nothing in float32 is as large.
"""
_FAST_MATH = ("DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE")  # of oneDNN, on ARM

_Tap = Callable[[str, nn.Linear, Tensor, Tensor], Tensor]
"""From the name of a layer, the layer, its input and output to what goes on as its output."""


@dataclass(frozen=True)
class Gradients:
    """Gradients of B records.

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
        """Return the L2 norm of each record's gradient over all parameters, (B,) float64.

        It is NaN where the gradient is not finite, or too large to be clipped (`_LARGEST_NORM`).

        Parameters
        ----------
        copies : Mapping of str to int
            How often each parameter counts.
        """
        norms = [copies[name] ** 0.5 * _norms(g) for name, g in self.whole.items()]
        norms += [copies[n] ** 0.5 * _norms(d) * _norms(x) for n, (d, x) in self.outer.items()]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms, dim=1), dim=1)
        return total

    def scales(self, copies: Mapping[str, int], clipping_norm: float) -> Tensor:
        """Return the factor that clips each record's gradient to a norm, (B,) float64, from 0 to 1.

        It is 0 where there is no finite gradient.
        """
        scales = (clipping_norm / self.norms(copies)).clamp(max=1)
        return scales.nan_to_num(nan=0.0)

    def without(self, records: Tensor) -> "Gradients":
        """Return the same with NaN in place of some records' gradients: a (B,) bool Tensor."""
        return Gradients(
            whole={name: _filled(g, records, math.nan) for name, g in self.whole.items()},
            outer={
                name: (_filled(d, records, math.nan), _filled(x, records, math.nan))
                for name, (d, x) in self.outer.items()
            },
        )

    def add_to(self, total: Mapping[str, Tensor], weights: Tensor, *, short: bool = False) -> None:
        """Add the sum of the gradients with weights to float64 tensors.

        Parameters
        ----------
        total : Mapping of str to Tensor
            By name.
        weights : (B,) float64 Tensor
            At most 1 each. Where it is 0, the gradient need not be finite.
        short : bool, default False
            Whether blocks of 64 records may be summed in float32. It is for weights that clip to
            a norm from 1e-9 to 1e9: far beyond, the products leave the range of float32.
        """
        short = short and _full_float32()
        left_out = weights == 0
        some = bool(left_out.any())

        def taken(tensor: Tensor, rows: slice) -> Tensor:
            # What is left out may be NaN, which is NaN even 0 times.
            return _filled(tensor[rows], left_out[rows], 0) if some else tensor[rows]

        for start in range(0, len(weights), _BLOCK):
            rows = slice(start, start + _BLOCK)
            part = weights[rows]
            for name, gradients in self.whole.items():
                block = taken(gradients, rows).double().flatten(start_dim=1)
                total[name].view(-1).addmv_(block.T, part)
            for name, (deltas, inputs) in self.outer.items():
                weighted = part[:, None] * taken(deltas, rows).double()
                vectors = taken(inputs, rows)
                # With large inputs the weighted deltas may be too small for float32.
                if short and _fits(vectors):
                    total[name].add_(weighted.float().T @ vectors)
                else:
                    total[name].addmm_(weighted.T, vectors.double())


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
        Biases whose gradients come with those are in neither.
    bytes_per_record : int
        Memory that a record takes, about: its gradients that are formed, and what the model keeps
        to compute them.
    """

    def __init__(self, model: nn.Module, loss: Loss, feature: Tensor, label: Tensor) -> None:
        self._model = model
        self._loss = loss
        self._parameters = {name: p.detach() for name, p in model.named_parameters()}
        self._buffers = dict(model.named_buffers())
        self._layers: dict[str, nn.Linear] = {}
        self._biases: dict[str, str] = {}  # to the name of the layer
        kept = self._probe(torch.zeros_like(feature), torch.zeros_like(label))
        self.outer = [_name(name, "weight") for name in self._layers]
        self.whole = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in self.outer and name not in self._biases
        ]
        formed = [self._parameters[name] for name in self.whole]
        self.bytes_per_record = kept + sum(p.nbytes for p in formed)

    def __call__(
        self, parameters: Mapping[str, Tensor], features: Tensor, labels: Tensor
    ) -> Gradients:
        """Return the gradients of B records at these values of the trainable parameters.

        Features and labels are of shape (B, ...).
        """
        state = {**self._parameters, **self._buffers, **parameters}
        whole = {name: state[name] for name in self.whole}
        zeros = {
            name: state[weight].new_zeros(1, self._layers[name].out_features)
            for name, weight in zip(self._layers, self.outer, strict=True)
        }
        function = vmap(
            grad(self._record_loss, argnums=(0, 1), has_aux=True),
            in_dims=(None, None, None, 0, 0),
            randomness="different",
        )
        (gradients, found), inputs = function(whole, zeros, state, features, labels)
        deltas = {name: delta[:, 0] for name, delta in found.items()}
        return Gradients(
            whole=gradients | {bias: deltas[name] for bias, name in self._biases.items()},
            outer={
                weight: (deltas[name], inputs[name][:, 0])
                for name, weight in zip(self._layers, self.outer, strict=True)
            },
        )

    def of_all(
        self, parameters: Mapping[str, Tensor], take: Callable[[], tuple[Tensor, Tensor]]
    ) -> Gradients:
        """Return the gradients of all records that `take` returns, whatever they are.

        They are NaN for records for which the model or the loss raises.

        Raises
        ------
        Exception
            What is no record's fault: see `for_each`.
        """
        found, raised = for_each(lambda x, y: self(parameters, x, y), take)
        if found is None:
            layers = self._layers.values()
            shapes = {name: self._parameters[name].shape for name in (*self.whole, *self._biases)}
            nowhere = torch.full((), math.nan, device=raised.device)
            return Gradients(
                whole={n: nowhere.expand(len(raised), *shape) for n, shape in shapes.items()},
                outer={
                    name: (
                        nowhere.expand(len(raised), layer.out_features),
                        nowhere.expand(len(raised), layer.in_features),
                    )
                    for name, layer in zip(self.outer, layers, strict=True)
                },
            )
        return found.without(raised) if bool(raised.any()) else found

    def _record_loss(
        self,
        whole: dict[str, Tensor],
        zeros: dict[str, Tensor],
        state: dict[str, Tensor],
        feature: Tensor,
        label: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a record, and the inputs of the layers.

        Zeros are added to the outputs of the layers: the gradient by them is the one by the output.
        """
        inputs: dict[str, Tensor] = {}

        def tap(name: str, layer: nn.Linear, input_: Tensor, output: Tensor) -> Tensor:
            inputs[name] = input_.detach().clone()  # the model may go on to change it in place
            return output + zeros[name]

        with _tapped(self._layers, tap):
            return self._loss_of({**state, **whole}, feature, label), inputs

    def _loss_of(self, state: dict[str, Tensor], feature: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(self._model, state, (feature[None],))
        return self._loss(outputs, label[None]).squeeze()

    def _probe(self, feature: Tensor, label: Tensor) -> int:
        """Find the linear layers whose weight only takes part in one product with one vector.

        Returns
        -------
        int
            Bytes that are kept for the gradients of one record.
        """
        uses = Counter(id(p) for _, p in self._model.named_parameters(remove_duplicate=False))
        layers = {
            name: layer
            for name, layer in self._model.named_modules()
            # Not a subclass: it may do something else with its weight.
            if type(layer) is nn.Linear
            and layer.weight.requires_grad
            and uses[id(layer.weight)] == 1
        }
        biases = {
            _name(name, "bias"): name
            for name, layer in layers.items()
            if layer.bias is not None and layer.bias.requires_grad and uses[id(layer.bias)] == 1
        }
        shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}

        def tap(name: str, layer: nn.Linear, input_: Tensor, output: Tensor) -> Tensor:
            shapes[name].append(input_.shape)
            bias = None if layer.bias is None else layer.bias.detach()
            return functional.linear(input_, layer.weight.detach(), bias)

        # With its part in the layer's own output hidden, a parameter on which the loss still
        # depends is used elsewhere too.
        state = {
            name: p.clone().requires_grad_(p.is_floating_point())
            for name, p in self._parameters.items()
        }
        state |= {name: buffer.clone() for name, buffer in self._buffers.items()}
        known = {tensor.data_ptr() for tensor in state.values()}
        kept: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(0 if tensor.data_ptr() in known else tensor.nbytes)
            return tensor

        with _tapped(layers, tap), saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self._loss_of(state, feature, label)
        changed = [name for name, b in self._buffers.items() if not torch.equal(state[name], b)]
        if changed:
            raise InvalidParameterError(
                "model", f"a model that changes {changed} as it runs", "one that changes nothing"
            )
        check_loss(loss)
        hidden = [_name(name, "weight") for name in layers] + list(biases)
        elsewhere = (
            torch.autograd.grad(loss, [state[name] for name in hidden], allow_unused=True)
            if hidden and loss.requires_grad
            else [None] * len(hidden)
        )
        plain = {name for name, other in zip(hidden, elsewhere, strict=True) if other is None}
        self._layers = {
            name: layer
            for name, layer in layers.items()
            if _name(name, "weight") in plain and shapes[name] == [(1, layer.in_features)]
        }
        self._biases = {b: n for b, n in biases.items() if b in plain and n in self._layers}
        inputs = sum(layer.in_features * layer.weight.itemsize for layer in self._layers.values())
        return sum(kept) + inputs


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


def _full_float32() -> bool:
    """Whether nothing shorter than float32 may take its place in products of matrices."""
    if torch.is_autocast_enabled("cpu"):
        return False
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set for single backends
        return False
    return precision == "highest" and not any(name in os.environ for name in _FAST_MATH)


def _fits(inputs: Tensor) -> bool:
    """Whether a block of inputs may be in a product in float32."""
    if inputs.dtype != torch.float32 or inputs.device.type != "cpu":
        return False
    return bool(inputs.abs().max() <= _LARGEST_INPUT)


def _filled(rows: Tensor, where: Tensor, value: float) -> Tensor:
    """Return B tensors with one value in place of some of them: a (B,) bool Tensor says which."""
    return rows.masked_fill(where.view(-1, *[1] * (rows.ndim - 1)), value)


def _norms(gradients: Tensor) -> Tensor:
    """Return the L2 norms of B tensors, in float64; NaN where they are beyond `_LARGEST_NORM`."""
    norms: Tensor = torch.linalg.vector_norm(
        gradients.flatten(start_dim=1), dim=1, dtype=torch.float64
    )
    return norms.masked_fill(~(norms <= _LARGEST_NORM), math.nan)


def _name(module: str, parameter: str) -> str:
    return f"{module}.{parameter}".removeprefix(".")
