"""The gradients of single records against those of Opacus.

Both compute in float32 and in another order of operations, so norms and sums agree to a few units
in the last place of the largest terms: a relative difference of 1e-5 in norm is allowed.
"""

import copy
import warnings

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.torch import cnn, initialise, mlp
from flwr_privacy.clients.torch.record_gradients import RecordGradients

TOLERANCE = 1e-5


class Text(nn.Module):
    """An embedding, layer and group normalisation, and a linear layer on a sequence."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.layer = nn.LayerNorm(8)
        self.group = nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.layer(self.mix(self.embedding(tokens)))
        return self.out(self.group(x.transpose(1, 2)).tanh().mean(dim=2))


def images(n):
    rng = np.random.default_rng(0)
    return torch.tensor(rng.normal(size=(n, 1, 28, 28)).astype(np.float32))


def tokens(n):
    return torch.tensor(np.random.default_rng(0).integers(0, 20, (n, 5)))


CASES = {
    "mlp": (lambda: mlp([784, 32, 3]), images),
    "cnn": (lambda: cnn(3), images),
    "text": (Text, tokens),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_norms_and_clipped_sums_are_those_of_opacus(case, share):
    factory, features_of = CASES[case]
    features = features_of(24)
    labels = torch.tensor(np.random.default_rng(1).integers(0, 3, 24))
    model = initialise(factory, 0)
    found = RecordGradients(model, functional.cross_entropy, features[0], labels[0])
    chunk = found({}, features, labels)
    norms = chunk.norms(dict.fromkeys(dict(model.named_parameters()), 1))

    rival = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about hooks on inputs that need no gradient
        functional.cross_entropy(rival(features), labels, reduction="sum").backward()
    samples = {
        name.removeprefix("_module."): p.grad_sample.double()
        for name, p in rival.named_parameters()
    }
    theirs = torch.stack([g.flatten(1).norm(dim=1) for g in samples.values()]).norm(dim=0)
    torch.testing.assert_close(norms, theirs, rtol=TOLERANCE, atol=0)

    clipping_norm = float(theirs.quantile(share))
    weights = (clipping_norm / norms).clamp(max=1)
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.named_parameters()}
    chunk.add_to({n: t.detach() for n, t in total.items()}, weights.detach())
    factors = (clipping_norm / theirs).clamp(max=1)
    length = float(torch.stack([t.norm() for t in total.values()]).norm())
    for name, gradients in samples.items():
        expected = torch.tensordot(factors, gradients, dims=1)
        assert float((total[name] - expected).norm()) <= TOLERANCE * length
    assert length > 0
