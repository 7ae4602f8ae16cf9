"""A model is what it was after a scope in which anything was done to it."""

import numpy as np
import pytest
import torch
from torch import nn

from flwr_privacy.clients.torch import get_arrays, initialise, train
from flwr_privacy.clients.torch.model_state import unchanged


class Counting(nn.Module):
    """Replaces a buffer and counts its batches in an attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.batches = 0
        self.scales = {"loss": 1.0}

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(dim=0)
        self.batches += 1
        return self.linear(x)


def records():
    draws = np.random.default_rng(0)
    return draws.normal(size=(8, 6)).astype(np.float32), draws.integers(3, size=8)


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_put_back(fails):
    model = initialise(Counting, 0)
    model.linear.bias.requires_grad_(False)
    model.eval()
    before, bias, mean = get_arrays(model), model.linear.bias, model.mean

    def work():
        with unchanged(model):
            train(model, *records(), learning_rate=0.5, seed=0)
            model.linear.bias = nn.Parameter(torch.ones(3))
            model.linear.weight.requires_grad_(False)
            model.scales["loss"] = 2.0
            if fails:
                raise KeyError("work")

    if fails:
        with pytest.raises(KeyError, match="work"):
            work()
    else:
        work()
    after = get_arrays(model)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert model.linear.bias is bias
    assert model.mean is mean
    assert model.linear.weight.requires_grad
    assert not bias.requires_grad
    assert not model.training
    assert (model.batches, model.scales) == (0, {"loss": 1.0})
