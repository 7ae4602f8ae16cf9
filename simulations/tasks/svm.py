"""Linear support vector machines: models and losses, for two classes and for more."""

import torch
from torch import Tensor, nn

__all__ = ["LinearSVM", "hinge", "one_vs_rest", "squared_hinge"]


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


def one_vs_rest(features: int, classes: int) -> nn.Sequential:
    """Return one linear score ``w x`` per class, without bias: each class against all others.

    Parameters
    ----------
    features, classes : int
        Size of the flattened input, number of classes.

    Examples
    --------
    >>> sum(p.numel() for p in one_vs_rest(784, 10).parameters())
    7840
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes, bias=False))


def squared_hinge(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of ``max(1 - y score, 0)^2`` summed over classes; y = 1 for the label's, -1.

    For every record it is convex in the weights of `one_vs_rest`, and ``2 |x|^2``-smooth.

    Examples
    --------
    >>> scores = torch.tensor([[2.0, -0.5, 0.0]])  # the last two lie 0.5 and 1 within the margin
    >>> [round(float(squared_hinge(scores, torch.tensor([label]))), 2) for label in (0, 1)]
    [1.25, 12.25]
    """
    own = labels[:, None] == torch.arange(scores.shape[1], device=labels.device)
    signs = 2 * own.to(scores.dtype) - 1
    return (1 - signs * scores).clamp(min=0).square().sum(dim=1).mean()
