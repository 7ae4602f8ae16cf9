"""Gradients of single records in layers that Opacus alone does not take, against autograd's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from private_loops import Watched, loop, terms
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.clients.torch import initialise
from flwr_privacy.errors import InvalidParameterError

RECORDS, POSITIONS, WIDTH, CLASSES = 8, 8, 4, 3
"""As many records as positions: nothing may take one for the other."""


class Residual(nn.Module):
    """A block of a residual network, as torchvision has it: it changes what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(POSITIONS, 6, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 6) for _ in range(2))
        self.second = nn.Conv1d(6, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(x))
        y += x
        y = self.relu(y)
        return self.out(y.mean(dim=2))


class Attentive(nn.Module):
    """Attention with a mask for all records and one that follows each, and to another sequence."""

    def __init__(self, layer: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        usual = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
        self.layer = layer() if layer else nn.TransformerEncoderLayer(WIDTH, 2, **usual)
        self.other = nn.Linear(WIDTH, 6)
        sizes = {"kdim": 6, "vdim": 6, "batch_first": True}
        self.across = nn.MultiheadAttention(WIDTH, 2, bias=False, **sizes)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        masks = {
            "src_mask": nn.Transformer.generate_square_subsequent_mask(POSITIONS),
            "src_key_padding_mask": torch.where(x[:, :, 0] > 1, -2.0, 0.0),
        }
        x = self.layer(x, **masks)
        y = self.other(x[:, :3])
        x = self.across(key=y, query=x, value=y)[0]
        return self.out(x.mean(dim=1))


def data(records: int = RECORDS) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    features = torch.randn(records, POSITIONS, WIDTH, generator=draws)
    return features, torch.randint(CLASSES, (records,), generator=draws)


def clipped_sum(model: nn.Module, norm: float, features: Tensor, labels: Tensor) -> Tensor:
    trained = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained))
    for x, y in zip(features, labels, strict=True):
        loss = functional.cross_entropy(model(x[None]), y[None])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        total += gradient * min(1.0, norm / float(gradient.norm()))
    return total


@pytest.mark.parametrize("records", [1, 4, RECORDS])
@pytest.mark.parametrize("kind", [Residual, Attentive])
@pytest.mark.parametrize("frozen", [(), ("layer.self_attn", "first", "across.k_proj")])
def test_a_step_has_the_clipped_gradient_of_each_record(
    kind: Callable[[], nn.Module], records: int, frozen: tuple[str, ...]
) -> None:
    model = initialise(kind, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    given = data(records)
    expected = clipped_sum(model, 0.7, *given)
    watched = loop(Watched(terms(clipping_norm=0.7)), model, *given)
    np.testing.assert_allclose(watched.totals[0], expected, atol=2e-6)


def attention(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(WIDTH, 2, **{"batch_first": True, **settings})


class Alone(nn.Module):
    def __init__(self, layer: nn.Module, mask: Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.out, self.mask = layer, nn.Linear(WIDTH, CLASSES), mask

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x, x, x, attn_mask=self.mask)[0].mean(dim=1))


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, {"batch_first": False}])
def test_attention_whose_gradients_cannot_be_had_is_refused(settings: dict[str, Any]) -> None:
    model = Alone(attention(**settings)())
    with pytest.raises(InvalidParameterError, match=r"attention 'layer' has batch_first=.*DPMulti"):
        loop(Watched(terms()), model, *data())
    model.layer.requires_grad_(False)
    assert loop(Watched(terms()), model, *data()).totals[0].any()


def test_a_mask_for_each_record_and_head_is_refused() -> None:
    mask = torch.zeros(2 * RECORDS, POSITIONS, POSITIONS)
    model = Alone(attention()(), mask)
    with pytest.raises(InvalidParameterError, match="attn_mask = 'one of shape"):
        loop(Watched(terms()), model, *data())
