"""Small models for simulations; each returns one logit per class."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from flwr_privacy.errors import InvalidParameterError

__all__ = ["cnn", "linear", "mlp"]


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Return a perceptron with ReLU between its layers.

    Parameters
    ----------
    sizes : sequence of int
        Features, hidden layers, classes. An input of shape (batch, ...) is flattened first.

    Raises
    ------
    InvalidParameterError
        If there are fewer than two sizes.

    Examples
    --------
    >>> sum(p.numel() for p in mlp([64, 32, 10]).parameters())
    2410
    """
    if len(sizes) < 2:
        raise InvalidParameterError("sizes", list(sizes), "at least the features and the classes")
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(classes: int, *, channels: int = 1, size: int = 28) -> nn.Sequential:
    """Return LeNet-5 with ReLU and max pooling, for images of shape (batch, channels, size, size).

    It has no statistics (BatchNorm), which would have to be kept out of private uploads.

    Parameters
    ----------
    classes : int
        Number of classes.
    channels : int, default 1
        Colours of an image.
    size : int, default 28
        Its height and width: 16, 20, 24, ...

    Raises
    ------
    InvalidParameterError
        If two convolutions and two poolings do not come out even for this size.

    Examples
    --------
    >>> sum(p.numel() for p in cnn(10).parameters())
    44426
    """
    left, odd = divmod(size - 12, 4)  # each convolution takes 4 off, each pooling halves
    if odd or left < 1:
        raise InvalidParameterError("size", size, "a multiple of 4, at least 16")
    return nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *mlp([16 * left**2, 120, 84, classes]),
    )


def linear(features: int, classes: int) -> nn.Sequential:
    """Return multinomial logistic regression.

    Parameters
    ----------
    features, classes : int
        Size of the flattened input, number of classes.

    Examples
    --------
    >>> sum(p.numel() for p in linear(108, 2).parameters())
    218
    """
    return mlp([features, classes])
