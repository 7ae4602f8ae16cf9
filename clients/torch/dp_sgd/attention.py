"""Gradients of single records by the weights of ``nn.MultiheadAttention``, which Opacus lacks.

Opacus computes a layer that it does not know anew for each record, from its first input. Attention
has three inputs, and masks. Here it is computed anew from all of them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flwr_privacy.errors import InvalidParameterError

__all__ = ["attention_gradients", "attention_inputs", "check_attention"]


def check_attention(model: nn.Module) -> None:
    """Check that the gradients of single records can be had of a model's attention.

    Raises
    ------
    InvalidParameterError
        If one that is trained has dropout, whose draws cannot be repeated, or takes its records in
        another dimension than the first.
    """
    for name, layer in model.named_modules():
        if type(layer) is not nn.MultiheadAttention or not _weights(layer):
            continue
        if layer.dropout > 0 or not layer.batch_first:
            found = f"batch_first={layer.batch_first}, dropout={layer.dropout}"
            raise InvalidParameterError(
                "model",
                f"a model whose attention '{name}' has {found}",
                "batch_first=True and dropout=0 for attention that is trained; "
                "opacus.layers.DPMultiheadAttention has both settings",
            )


def attention_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    **_: Any,
) -> list[Tensor]:
    """Return what a layer was called with: two masks, empty where there is none, and three inputs.

    Opacus counts the records in the last of them. Whether the layer also returns its attention, and
    whether the mask is known to be causal, has no effect on the output.
    """
    nothing = query.new_empty(0)
    masks = (nothing if mask is None else mask for mask in (key_padding_mask, attn_mask))
    return [*masks, query, key, value]


def attention_gradients(
    layer: nn.Module, inputs: list[Tensor], deltas: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of the records of a batch, by weight.

    Parameters
    ----------
    layer : MultiheadAttention
        The layer.
    inputs : list of Tensor
        Those of `attention_inputs`: of B records, but for the second mask, which is one for all.
    deltas : (B, positions, features) Tensor
        Gradients of the losses by the layer's output.

    Raises
    ------
    InvalidParameterError
        If there is a mask for each record and head: it does not say which belong together.
    """
    padding, mask, *own = inputs
    if mask.dim() > 2:
        allowed = "a key_padding_mask, or an attn_mask of two dimensions for all records"
        raise InvalidParameterError("attn_mask", f"one of shape {tuple(mask.shape)}", allowed)

    def of_one(weights: dict[str, Tensor], *record: Tensor) -> Tensor:
        hidden, *mine, delta = (part[None] for part in record)
        masks = {
            "key_padding_mask": hidden if hidden.numel() else None,
            "attn_mask": mask if mask.numel() else None,
        }
        output, _ = functional_call(layer, weights, tuple(mine), {**masks, "need_weights": False})
        return torch.sum(output * delta)

    if not padding.numel():
        padding = padding.new_empty(len(deltas), 0)
    weights = _weights(layer)
    each = vmap(grad(of_one), in_dims=(None, 0, 0, 0, 0, 0))
    found = each({name: p.detach() for name, p in weights.items()}, padding, *own, deltas)
    return {weights[name]: gradients for name, gradients in found.items()}


def _weights(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if p.requires_grad}
