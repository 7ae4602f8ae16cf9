"""Gets the gradients of single records from Opacus, in a model that stays the user's own.

Opacus forms the gradient of each record in every layer. Where a linear layer has one vector of a
record as its input, that gradient is an outer product, and is kept as its two factors, which is
what ghost clipping does without: its norm is the product of theirs, and a weighted sum of such
gradients is one product of matrices. Elsewhere ghost clipping has no bound that holds: it sums over
the positions of a record too, in float32, where large terms may cancel. So there the gradients are
formed, and count as the numbers that they are.

Opacus watches the backward pass with hooks on the layers. Under those torch refuses each change of
a layer's output in place: ``ReLU(inplace=True)`` behind a normalisation, or the ``out += identity``
of a residual network. So here the hooks are on the outputs. Such a hook gets the gradient by what
the layer has returned, also where that was changed afterwards.
"""

from collections import Counter
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import prepare_layer
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn

from flwr_privacy.clients.torch.record_gradients import Gradients
from flwr_privacy.errors import InvalidParameterError, ProtocolError

from .attention import attention_gradients, attention_inputs, check_attention

__all__ = ["RecordHooks"]

_AGREE = 1e-3  # relative; how far sums of float32 gradients may be apart

_Kept = Tensor | tuple[Tensor, Tensor]


class RecordHooks(GradSampleHooks):  # type: ignore[misc]
    """Hooks that keep the gradient of each record of a batch, as `Gradients`.

    Parameters
    ----------
    model : Module
        The model; it is not wrapped.
    loss_reduction : {"mean", "sum"}
        How the loss of a batch comes from those of its records.

    Raises
    ------
    InvalidParameterError
        If Opacus cannot have hooks in the model, or not take its attention.
    """

    hooks_enabled: bool

    def __init__(self, model: nn.Module, *, loss_reduction: str) -> None:
        check_attention(model)
        self.GRAD_SAMPLERS = {
            **GradSampleHooks.GRAD_SAMPLERS,
            nn.MultiheadAttention: self._attention_gradients,
        }
        try:
            super().__init__(model, loss_reduction=loss_reduction, strict=True)
        # Opacus has these for layers that it does not know, and models that have its hooks.
        except (NotImplementedError, ValueError) as error:
            raise InvalidParameterError("model", str(error), "one that Opacus takes") from error
        self._trainable: dict[str, Any] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        self._padding = _padding_of(model)

    def add_hooks(
        self, *, loss_reduction: str, batch_first: bool, force_functorch: bool = False
    ) -> None:
        """Have each layer keep its inputs, and the gradients of its records when those come.

        Raises
        ------
        ValueError
            If the model has hooks of Opacus.
        NotImplementedError
            If Opacus does not take a layer.
        """
        model: Any = self._module
        if hasattr(model, "autograd_grad_sample_hooks"):
            raise ValueError("the model has hooks of Opacus, which form the gradients of records")
        # Opacus takes away what is in this list.
        model.autograd_grad_sample_hooks = self.autograd_grad_sample_hooks = []

        def after_forward(layer: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            if type(layer) is nn.MultiheadAttention:
                inputs = attention_inputs(*inputs, **named)
            self.capture_activations_hook(layer, inputs, output)
            first: Any = output[0] if isinstance(output, tuple) and output else output

            def with_gradient(gradient: Tensor) -> None:
                self.capture_backprops_hook(layer, None, (gradient,), loss_reduction, batch_first)

            if self.hooks_enabled and getattr(first, "requires_grad", False):
                first.register_hook(with_gradient)

        for layer in self.iterate_submodules(model):
            if type(layer) in (DPGRU, DPLSTM, DPRNN):  # what is in it has hooks
                continue
            if force_functorch or type(layer) not in self.GRAD_SAMPLERS:
                prepare_layer(layer, batch_first=batch_first)
            self.autograd_grad_sample_hooks.append(
                layer.register_forward_hook(after_forward, with_kwargs=True)
            )
        self.enable_hooks()

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: Any,
        forward_output: Any,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Keep the gradients of one layer: as factors if it is a linear one on plain vectors."""
        if not getattr(module, "activations", None):  # in eval mode there are none: see `gradients`
            return
        if not (self.hooks_enabled and _is_plain(module)):
            super().capture_backprops_hook(
                module, _forward_input, forward_output, loss_reduction, batch_first
            )
            return
        (inputs,), deltas = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        del module.max_batch_len
        # Opacus keeps its counters and gradients as attributes of the parameters.
        layer: Any = module
        for parameter, gradient in ((layer.weight, (deltas, inputs)), (layer.bias, deltas)):
            if parameter is not None and parameter.requires_grad:
                parameter._forward_counter -= 1
                parameter.grad_sample = (
                    gradient if parameter.grad_sample is None else [parameter.grad_sample, gradient]
                )

    def _attention_gradients(
        self, layer: nn.Module, inputs: list[Tensor], deltas: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        enabled = self.hooks_enabled
        self.hooks_enabled = False  # the layer is called again
        try:
            return attention_gradients(layer, inputs, deltas)
        finally:
            self.hooks_enabled = enabled

    def clear(self) -> None:
        """Forget what forward and backward passes have left."""
        for module in self._module.modules():
            for name in ("activations", "max_batch_len"):
                module.__dict__.pop(name, None)
        for parameter in self._trainable.values():
            parameter.grad_sample = None
            parameter._forward_counter = 0
            parameter.__dict__.pop("_current_grad_sample", None)

    def gradients(self, records: int, *, missing: bool = False) -> Gradients:
        """Return the gradients of the records of a batch.

        Parameters
        ----------
        records : int
            Number of records in it.
        missing : bool, default False
            Whether a parameter may have none, which count as zeros then: `check_complete` tells it.

        Raises
        ------
        ProtocolError
            If they are not those of so many records, or of several backward passes, or there are
            none. A loop without a backward pass for some of its batches, such as those with a loss
            that is not finite, would let one record take away the gradients of all.
        """
        whole, outer = dict[str, Tensor](), dict[str, tuple[Tensor, Tensor]]()
        for name, parameter in self._trainable.items():
            kept: _Kept | list[_Kept] | None = parameter.grad_sample
            if isinstance(kept, list):
                raise ProtocolError(
                    f"the gradients of '{name}' are of {len(kept)} backward passes: a batch is one "
                    "forward pass, one loss.backward() and one optimizer.step()"
                )
            if kept is None and not missing:
                raise ProtocolError(
                    f"'{name}' has no gradients of the records in a step: every batch needs a "
                    "forward pass with model.train(), a loss.backward(), and no zero_grad() "
                    "between that and optimizer.step()"
                )
            if kept is None:
                whole[name] = parameter.new_zeros(()).expand(records, *parameter.shape)
                continue
            rows = len(kept[0] if isinstance(kept, tuple) else kept)
            if rows != records:
                raise ProtocolError(
                    f"'{name}' has gradients of {rows} records, and the batch has {records}: each "
                    "layer must take the batch as it comes from the loader, records first"
                )
            if name in self._padding and isinstance(kept, Tensor):
                kept[:, self._padding[name]] = 0  # as torch has it, and Opacus does not
            if isinstance(kept, tuple):
                outer[name] = kept
            else:
                whole[name] = kept
        return Gradients(whole, outer)

    def check_complete(self, gradients: Gradients, records: int) -> None:
        """Check that the gradients of the records add up to that of the batch.

        Raises
        ------
        InvalidParameterError
            If they do not, or a parameter has none.
        """
        factor = 1 / records if self.loss_reduction == "mean" else 1.0
        sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in self._trainable.items()}
        one = torch.full((records,), factor, dtype=torch.float64)
        gradients.add_to(sums, one.to(next(iter(sums.values())).device))
        for name, parameter in self._trainable.items():
            batch = torch.zeros_like(sums[name]) if parameter.grad is None else parameter.grad
            if parameter.grad is None and parameter.grad_sample is None:
                allowed = "a parameter that takes part in the loss, or requires_grad_(False) for it"
                raise InvalidParameterError("model", f"'{name}' without a gradient", allowed)
            if not bool(batch.isfinite().all()):
                allowed = "records on which the loss has a finite gradient"
                raise InvalidParameterError(
                    "rehearsal_records", f"records whose gradients by '{name}' are not", allowed
                )
            apart = float((sums[name] - batch.double()).norm())
            if not apart <= _AGREE * (float(batch.double().norm()) + 1e-6):
                allowed = (
                    "parameters that are used by calling their layer: Opacus does not see another "
                    "use of a weight, nor a parameter of a module that has layers in it; and no "
                    "change of gradients before optimizer.step(), such as clip_grad_norm_: every "
                    "record is clipped in the step"
                )
                raise InvalidParameterError(
                    "model", f"'{name}' without the gradients of its records", allowed
                )


def _padding_of(model: nn.Module) -> dict[str, int]:
    """Return the row without a gradient of each embedding whose weight no other layer has."""
    found, uses = dict[str, int](), Counter[int]()
    for prefix, module in model.named_modules():
        uses.update(map(id, module.parameters(recurse=False)))
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            found[f"{prefix}.weight".lstrip(".")] = module.padding_idx
    return {name: row for name, row in found.items() if uses[id(model.get_parameter(name))] == 1}


def _is_plain(module: Any) -> bool:
    """Tell whether a layer is linear, and used once in the batch with one vector for a record."""
    if type(module) is not nn.Linear:
        return False
    layer: Any = module
    (inputs,) = layer.activations[-1]
    own = [p for p in (layer.weight, layer.bias) if p is not None and p.requires_grad]
    used_once = all(p._forward_counter == 1 and not hasattr(p, "_current_grad_sample") for p in own)
    return bool(inputs.dim() == 2 and used_once and layer.weight.requires_grad)
