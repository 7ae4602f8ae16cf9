"""statistics_of, and real torch layers against what is taken for statistics."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flwr_privacy.clients.torch import get_arrays, statistics_of
from flwr_privacy.privacy.running_statistics import is_statistic, suspected


def listed(model: nn.Module) -> dict[str, Any]:
    """Return the arrays as a NumPyClient app sends them."""
    return {str(i): tensor.numpy() for i, tensor in enumerate(model.state_dict().values())}


class LoRA(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(1, n))
        self.b = nn.Parameter(torch.zeros(n, 1))


class Adapter(nn.Module):
    """A scale of ones and a shift of zeros, as adapters have them."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))
        self.shift = nn.Parameter(torch.zeros(n))


def bias_of_zeros(layer: Any) -> Any:
    nn.init.zeros_(layer.bias)
    return layer


ORDINARY = {
    "linear": lambda n: nn.Linear(n, n),
    "zero bias": lambda n: bias_of_zeros(nn.Conv1d(n, n, 1)),
    "LayerNorm": nn.LayerNorm,
    "GroupNorm": lambda n: nn.GroupNorm(1, n),
    "InstanceNorm": lambda n: nn.InstanceNorm1d(n, affine=True),
    "RMSNorm": nn.RMSNorm,
    "embedding": lambda n: nn.Embedding(n, n),
    "LoRA": LoRA,
    "adapter": Adapter,
    "attention": lambda n: nn.MultiheadAttention(n, 1),
    "decoder": lambda n: nn.TransformerDecoderLayer(n, 1, n),
    "LSTM": lambda n: nn.LSTM(n, n),
    "PReLU": nn.PReLU,
}
WITH_STATISTICS = {
    "BatchNorm1d": nn.BatchNorm1d,
    "BatchNorm2d": nn.BatchNorm2d,
    "plain": lambda n: nn.BatchNorm1d(n, affine=False),
    "InstanceNorm": lambda n: nn.InstanceNorm1d(n, track_running_stats=True),
}


def built(layers: dict[str, Any], names: list[str], length: int) -> list[nn.Module]:
    return [layers[name](length) for name in names]


STACK = st.lists(st.sampled_from(sorted(ORDINARY)), min_size=1, max_size=8)


@settings(deadline=None)
@given(STACK, st.integers(1, 3))
def test_layers_without_statistics_are_not_asked_about(names: list[str], length: int) -> None:
    model = nn.Sequential(*built(ORDINARY, names, length))
    assert statistics_of(model) == statistics_of(model, positions=True) == []
    assert suspected(listed(model)) == []


@settings(deadline=None)
@given(STACK, st.sampled_from(sorted(WITH_STATISTICS)), STACK, st.booleans())
def test_statistics_are_found_in_any_stack(
    before: list[str], norm: str, after: list[str], trained: bool
) -> None:
    layer = WITH_STATISTICS[norm](2)
    if trained:
        layer.running_mean += 0.5
        layer.running_var *= 3
    model = nn.Sequential(*built(ORDINARY, before, 2), layer, *built(ORDINARY, after, 2))
    arrays = listed(model)
    floats = [n for n in statistics_of(model, positions=True) if arrays[n].dtype == np.float32]
    assert suspected(arrays) == floats
    assert len(floats) == 2


def test_statistics_are_named_as_in_the_state_dict() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)
    )
    names = statistics_of(model)
    assert names == [name for name in get_arrays(model) if is_statistic(name)]
    assert statistics_of(model, positions=True) == ["4", "5", "6", "9", "10", "11"]
    assert [list(model.state_dict())[int(p)] for p in ("4", "9")] == [
        "1.running_mean",
        "3.running_mean",
    ]


def test_weights_under_two_names_are_weights_and_buffers_of_ones_own_are_none() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.outer = self.inner
            self.register_buffer("places", torch.arange(2.0))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    assert statistics_of(Tied()) == ["places"]
    assert statistics_of(Tied(), positions=True) == ["0"]


@pytest.mark.parametrize("positions", [False, True])
def test_a_model_without_buffers_has_none(positions: bool) -> None:
    assert statistics_of(nn.Linear(2, 2), positions=positions) == []
