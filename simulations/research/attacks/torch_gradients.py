"""Gradients in torch for `gradient_matching`, and the model that it attacks."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.torch.computing import one_thread
from flwr_privacy.errors import InvalidParameterError

from .gradient_matching import MatchingLoss

__all__ = ["matching_loss", "sigmoid_lenet"]

_CHANNELS = 12
_BOUND = 0.5  # of the initial weights


def sigmoid_lenet(
    shape: Sequence[int], classes: int, strides: Sequence[int] = (2, 2, 1)
) -> nn.Sequential:
    """Return the LeNet of iDLG: convolutions with sigmoids, and a linear layer.

    Each convolution has 12 channels of 5x5; weights and biases are uniform on [-0.5, 0.5].

    Parameters
    ----------
    shape : sequence of int
        Channels, height and width of an image. A flat one is given this shape first.
    classes : int
        Number of classes.
    strides : sequence of int, default (2, 2, 1)
        Of the convolutions.

    Examples
    --------
    >>> [sum(p.numel() for p in sigmoid_lenet(s, 10)[-1].parameters()) for s in
    ...  [(1, 28, 28), (3, 32, 32)]]
    [5890, 7690]
    """
    channels, *size = shape
    layers: list[nn.Module] = [nn.Flatten(), nn.Unflatten(1, tuple(shape))]
    for stride in strides:
        layers += [nn.Conv2d(channels, _CHANNELS, 5, padding=2, stride=stride), nn.Sigmoid()]
        channels, size = _CHANNELS, [-(-length // stride) for length in size]
    height, width = size
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(_CHANNELS * height * width, classes))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -_BOUND, _BOUND)
    return model


def matching_loss(
    model: nn.Module, gradient: Mapping[str, ArrayLike], labels: NDArray[np.int64]
) -> MatchingLoss:
    """Return the loss of candidate records, for `match_gradient`.

    It is the squared distance of a gradient from the one of the mean cross entropy of candidate
    records, summed over all parameters, in float64 and on one thread.

    Parameters
    ----------
    model : nn.Module
        The model before the step. It is copied. It must be twice differentiable by its inputs.
    gradient : Mapping of str to array_like
        What was seen, by name of the parameter; `observed_gradient`.
    labels : (n,) int64
        Labels of the n candidates.

    Returns
    -------
    callable
        Takes candidates of shape (n, ...).

    Raises
    ------
    InvalidParameterError
        If the gradient has other names or shapes than the model's parameters.
    """
    own = copy.deepcopy(model).cpu().double()
    parameters = dict(own.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    given = {name: np.shape(array) for name, array in gradient.items()}
    if shapes != given:
        raise InvalidParameterError("gradient", given, f"the shapes {shapes}")
    targets = [torch.tensor(np.asarray(gradient[name], np.float64)) for name in parameters]
    classes = torch.tensor(labels)

    def loss(candidates: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        with one_thread():
            inputs = torch.tensor(candidates, requires_grad=True)
            error = functional.cross_entropy(own(inputs), classes)
            slopes = torch.autograd.grad(error, list(parameters.values()), create_graph=True)
            pairs = zip(slopes, targets, strict=True)
            distance = torch.stack([(s - t).square().sum() for s, t in pairs]).sum()
            (slope,) = torch.autograd.grad(distance, inputs)
        result: NDArray[Any] = slope.numpy()
        return float(distance.detach()), result

    return loss
