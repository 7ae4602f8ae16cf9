"""Classification by linear regression: model, loss, and feature maps.

The label of a record is a row of zeros with a 1 for its class, the prediction the column of
``phi(x) W`` that is largest. Schemes that train a torch model train W by its gradients, schemes for
linear regression take the same features and labels as they are.
"""

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from flwr_privacy.acfl.features import FeatureMap, FourierFeatures
from flwr_privacy.clients.torch import FrozenExtractor, initialise

__all__ = [
    "FEATURE_NORM",
    "BoundedMap",
    "LinearModel",
    "digits_convolution",
    "digits_fourier",
    "half_squared_error",
    "images_fourier",
]


FEATURE_NORM = 1.1
"""L2 norm to which the features of a record are shortened where they are longer.

Those of random Fourier features may have norm sqrt(2), but their square is one on average with a
standard deviation of ``1 / sqrt(2 D)``: next to none are shortened, and the noise that protects a
record is nearly halved.
"""


class BoundedMap(FeatureMap, Protocol):
    """A feature map that says how large its features can be."""

    @property
    def bound(self) -> float:
        """Bound of the absolute value of a feature."""
        ...

    @property
    def norm(self) -> float | None:
        """Bound of the L2 norm of a record's features; None where only `bound` gives one."""
        ...


class LinearModel(nn.Module):
    """Scores ``phi W``, with one parameter ``weights`` that starts at zero.

    Parameters
    ----------
    features, classes : int
        Its shape.

    Examples
    --------
    >>> LinearModel(200, 10)(torch.ones(3, 200)).shape
    torch.Size([3, 10])
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(features, classes))

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores of a batch, (batch, classes)."""
        scores: Tensor = features @ self.weights
        return scores


def half_squared_error(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of ``|score - one-hot label|^2 / 2``: ACFL's loss, (1), over the records.

    Examples
    --------
    >>> float(half_squared_error(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])))
    0.5
    """
    truth = labels[:, None] == torch.arange(scores.shape[1], device=labels.device)
    return (scores - truth.to(scores.dtype)).square().sum(dim=1).mean() / 2


def digits_fourier() -> BoundedMap:
    """Return 200 random Fourier features of 64 pixels in [0, 1]."""
    return FourierFeatures(raw=64, features=200, width=2.0, seed=0)


def images_fourier() -> BoundedMap:
    """Return 2000 random Fourier features of 784 normalised pixels.

    The unit of the width is the standard deviation by which the pixels are divided, 0.31 of their
    range for MNIST and 0.35 for Fashion-MNIST.
    """
    # Held-out accuracy is within half a percent of what widths of 20 and 26 give, but the largest
    # eigenvalue, which bounds the step, is half of that of 20 and a third of that of 26.
    return FourierFeatures(raw=784, features=2000, width=16.0, seed=0)


@lru_cache(maxsize=1)
def digits_convolution() -> BoundedMap:
    """Return 200 features of 8 x 8 pixels from a network with random weights that stay."""
    network = initialise(_convolution, 0)
    return FrozenExtractor(network, identity="convolution 1-16-200", norm=1.0)


def _convolution() -> nn.Sequential:
    # Normalised records and no biases: features with a part in common have one large eigenvalue,
    # which slows every gradient method down.
    return nn.Sequential(
        nn.LayerNorm(64, elementwise_affine=False),
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 200, bias=False),
    )
