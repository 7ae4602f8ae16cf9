"""A linear support vector machine: its model, its loss, and ordinary training by that loss.

It is so small that it stays on the CPU.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["LinearSVM", "evaluate_by", "hinge", "train_by"]

Loss = Callable[[Any, Tensor], Tensor]


class LinearSVM(nn.Module):
    """Scores ``w x + b``, and the penalty ``kappa / 2 ||w||^2`` that is part of each record's loss.

    Parameters
    ----------
    features : int
        Length of x.
    kappa : float, default 0.01
        Weight of the penalty.

    Examples
    --------
    >>> svm = LinearSVM(2)
    >>> _ = nn.init.constant_(svm.layer.weight, 3.0), nn.init.zeros_(svm.layer.bias)
    >>> [[round(x, 2) for x in row] for row in svm(torch.tensor([[1.0, 0.0]])).tolist()]
    [[-2.91, 3.09]]
    """

    def __init__(self, features: int, kappa: float = 0.01) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 1)
        self.kappa = kappa

    def forward(self, features: Tensor) -> Tensor:
        """Return penalty - score and penalty + score, (batch, 2): the larger one is the class."""
        penalty = self.kappa / 2 * self.layer.weight.square().sum()
        score = self.layer(features)
        return torch.cat([penalty - score, penalty + score], dim=1)


def hinge(output: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of ``kappa / 2 ||w||^2 + max(1 - y score, 0)`` with y = 2 label - 1.

    Examples
    --------
    >>> output = torch.tensor([[-2.91, 3.09]])  # score 3, penalty 0.09
    >>> [round(float(hinge(output, torch.tensor([label]))), 2) for label in (0, 1)]
    [4.09, 0.09]
    """
    penalty, score = output.mean(dim=1), (output[:, 1] - output[:, 0]) / 2
    return (penalty + (1 - (2 * labels - 1) * score).clamp(min=0)).mean()


def train_by(
    loss: Loss,
    model: nn.Module,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> float:
    """Train in place by stochastic gradient descent on a loss; return its mean before the steps.

    Parameters
    ----------
    loss : callable
        From the model's output for a batch and the labels to their mean loss.
    model, features, labels, epochs, batch_size, learning_rate, seed
        As for `flwr_privacy.clients.torch.train`, which is for the cross entropy.
    """
    inputs, targets = torch.tensor(features), torch.tensor(labels)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    model.cpu().train()
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator)
        for batch in torch.split(order, batch_size):
            value = loss(model(inputs[batch]), targets[batch])
            slopes = torch.autograd.grad(value, parameters)
            with torch.no_grad():
                for parameter, slope in zip(parameters, slopes, strict=True):
                    parameter.sub_(slope, alpha=learning_rate)
            total += float(value.detach()) * len(batch)
    return total / (epochs * len(labels))


def evaluate_by(
    loss: Loss, model: nn.Module, features: NDArray[np.float32], labels: NDArray[np.int64]
) -> dict[str, float]:
    """Return the mean ``loss`` and the share of hits (``accuracy``), the largest output winning."""
    with torch.no_grad():
        output = model.cpu().eval()(torch.tensor(features))
        targets = torch.tensor(labels)
        hits = (output.argmax(dim=1) == targets).sum()
        return {"loss": float(loss(output, targets)), "accuracy": int(hits) / len(labels)}
