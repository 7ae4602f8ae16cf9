"""Models and records whose gradients are clipped one by one."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.per_record_steps import PerRecordPlan
from flwr_privacy.clients.torch import cnn, get_arrays, initialise, mlp, train_per_record

PLAN = PerRecordPlan(clipping_norm=1.0, learning_rate=0.5)


def records(n=20, shape=(6,), classes=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, classes, n)


class Branches(nn.Module):
    """Linear layers in every role: ordinary, shared, used twice, in a sequence, in a penalty."""

    def __init__(self, in_place=False):
        super().__init__()
        self.in_place = in_place
        self.first = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.free = nn.Linear(6, 6, bias=False)
        self.free.register_forward_hook(lambda layer, inputs, output: output.tanh())
        self.sequence = nn.Linear(3, 3)
        self.penalised = nn.Linear(6, 3)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.twice(torch.tanh(self.twice(self.first(x))))
        y = self.free(input=x)
        x = x.add_(y) if self.in_place else x + y
        x = self.norm(self.frozen(self.tied(x)))
        x = self.sequence(x.reshape(-1, 2, 3)).reshape(-1, 6)
        return self.penalised(x), self.penalised.weight.square().sum()


def penalised_loss(outputs, labels):
    logits, penalty = outputs
    return functional.cross_entropy(logits, labels) + 0.1 * penalty


def squared_error(outputs, labels):
    return (outputs - (labels[:, None] == torch.arange(3)).float()).square().sum(dim=1)


def logistic(outputs, labels):
    """Loss of one output; the labels are 0 and 1, of floating point."""
    return functional.softplus((1 - 2 * labels) * outputs[:, 0])


class Biases(nn.Sequential):
    """Biases in other roles: one in a penalty, one frozen."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Linear(6, 3))
        self[1].bias.requires_grad_(False)

    def forward(self, x):
        return super().forward(x), self[0].bias.square().sum()


CASES = {
    "mlp": (lambda: mlp([6, 8, 3]), (6,), functional.cross_entropy),
    "cnn": (lambda: cnn(3), (1, 28, 28), functional.cross_entropy),
    "single layer": (lambda: nn.Linear(6, 3), (6,), functional.cross_entropy),
    "custom loss": (lambda: mlp([6, 8, 3]), (6,), squared_error),
    "branches": (Branches, (6,), penalised_loss),
    "biases": (Biases, (6,), penalised_loss),
}


def norm_of(arrays):
    return math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in arrays.values()))


def difference(first, second):
    return norm_of({name: first[name].astype(np.float64) - second[name] for name in first})


def trained(factory, features, labels, seed=0, **settings):
    model = initialise(factory, seed)
    step = train_per_record(model, features, labels, **settings)
    return get_arrays(model), step
