"""The tasks by name: a model, and the data set that it is trained on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from numpy.typing import ArrayLike
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.torch import Loss, cnn, linear, mlp
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.settings.run_settings import TrainingSettings

from .linear_tasks import (
    BoundedMap,
    LinearModel,
    digits_convolution,
    digits_fourier,
    half_squared_error,
    images_fourier,
)
from .svm import LinearSVM, hinge, one_vs_rest, squared_hinge

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A model and the data that it is trained on: a data set by name, or arrays.

    Parameters
    ----------
    model : callable
        Makes the model, such as a class of `torch.nn.Module`. Its layers draw no random numbers in
        training.
    data : pair of arrays, optional
        Training records, (n, ...) numbers, and their classes, (n,) integers from 0; checked when
        they are used, see `flwr_privacy.simulations.tasks.own_data.own_records`.
    test : pair of arrays, optional
        Test records and their classes, on which the server evaluates the model. Without them it
        evaluates nothing.
    sizes : tuple of int, optional
        Records of each client, where `data` has them one client after the other; the partition of
        the settings is then "given". By default the settings say how the records are split.
    dataset : str, optional
        In place of `data`, a name of `flwr_privacy.simulations.tasks.data.load`.
    name : str, default "own task"
        Name in `TASKS`, or the one under which the task was found.
    description : str, default ""
        One line for the user.
    training : TrainingSettings
        Settings that suit the task with about ten clients, all of them asked in each round.
    loss : callable, default cross entropy
        From the model's output for a batch and its labels to their mean loss.
    features : callable, optional
        Makes the map from raw records to what the model takes, which is then a linear regression;
        by default the model takes raw records.

    Raises
    ------
    InvalidParameterError
        If there is neither a data set nor data, or both, or test records without data.

    Examples
    --------
    >>> rows, classes = [[0.0, 1.0], [1.0, 0.0]], [0, 1]
    >>> Task(model=partial(linear, 2, 2), data=(rows, classes)).name
    'own task'
    """

    model: Callable[[], nn.Module]
    data: tuple[ArrayLike, ArrayLike] | None = None
    test: tuple[ArrayLike, ArrayLike] | None = None
    sizes: tuple[int, ...] | None = None
    dataset: str | None = None
    name: str = "own task"
    description: str = ""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    loss: Loss = functional.cross_entropy
    features: Callable[[], BoundedMap] | None = None

    def __post_init__(self) -> None:
        if (self.data is None) == (self.dataset is None):
            given = "neither" if self.data is None else "both"
            raise InvalidParameterError("data", given, "data or the name of a dataset, one of them")
        if self.test is not None and self.data is None:
            allowed = f"nothing with the data set '{self.dataset}', which has its own"
            raise InvalidParameterError("test", "test records", allowed)


def _wide_cnn() -> nn.Sequential:
    """Return the network of the UDP paper for CIFAR-10; its channels and pooling are our choice."""
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=5, padding=4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(10_368, 10),
    )


TASKS: dict[str, Task] = {
    entry.name: entry
    for entry in (
        Task(
            name="digits-mlp",
            dataset="digits",
            model=partial(mlp, (64, 64, 10)),
            description="8x8 handwritten digits, perceptron with 4,810 weights; needs no files",
            training=TrainingSettings(batch_size=16, learning_rate=0.3),
        ),
        Task(
            name="digits-linear",
            dataset="digits",
            model=partial(linear, 64, 10),
            description="8x8 handwritten digits, logistic regression with 650 weights; no files",
            training=TrainingSettings(batch_size=16, learning_rate=0.3),
        ),
        Task(
            name="mnist-mlp",
            dataset="mnist",
            model=partial(mlp, (784, 256, 10)),
            description="28x28 handwritten digits, perceptron with 203,530 weights",
        ),
        Task(
            name="mnist-cnn",
            dataset="mnist",
            model=partial(cnn, 10),
            description="28x28 handwritten digits, LeNet-5 with 44,426 weights",
        ),
        Task(
            name="fashion-cnn",
            dataset="fashion-mnist",
            model=partial(cnn, 10),
            description="28x28 pieces of clothing, LeNet-5 with 44,426 weights",
        ),
        Task(
            name="cifar10-cnn",
            dataset="cifar10-jpeg",
            model=partial(cnn, 10, channels=3, size=32),
            description="CIFAR-10 (JPEG), 32x32 colour images, LeNet-5 with 62,006 weights",
            training=TrainingSettings(learning_rate=0.05),
        ),
        Task(
            name="cifar10-udp-cnn",
            dataset="cifar10-jpeg",
            model=_wide_cnn,
            description="CIFAR-10 (JPEG), one convolution of 32 channels with 106,122 weights",
        ),
        Task(
            name="adult-linear",
            dataset="adult",
            model=partial(linear, 108, 2),
            description="income over 50,000 from a census, logistic regression with 218 weights",
            training=TrainingSettings(learning_rate=0.5),
        ),
        Task(
            name="adult-svm",
            dataset="adult-integers",
            model=partial(LinearSVM, 14),
            description="the same with categories as integers, support vectors with 15 weights",
            loss=hinge,
        ),
        Task(
            name="digits-svm",
            dataset="digits",
            model=partial(one_vs_rest, 64, 10),
            description="8x8 handwritten digits, support vectors of ten classes with 640 weights; "
            "no files",
            training=TrainingSettings(batch_size=16, learning_rate=0.05),
            loss=squared_hinge,
        ),
        Task(
            name="fashion-svm",
            dataset="fashion-mnist",
            model=partial(one_vs_rest, 784, 10),
            description="28x28 pieces of clothing, support vectors of ten classes with 7,840 "
            "weights",
            training=TrainingSettings(learning_rate=0.002),
            loss=squared_hinge,
        ),
        Task(
            name="digits-rff",
            dataset="digits",
            model=partial(LinearModel, 200, 10),
            description="8x8 handwritten digits, linear regression of 200 random Fourier features "
            "with 2,000 weights; no files",
            training=TrainingSettings(batch_size=16, learning_rate=2.0),
            loss=half_squared_error,
            features=digits_fourier,
        ),
        Task(
            name="digits-frozen",
            dataset="digits",
            model=partial(LinearModel, 200, 10),
            description="the same on 200 features of a random convolution, with 2,000 weights",
            training=TrainingSettings(batch_size=16, learning_rate=2.0),
            loss=half_squared_error,
            features=digits_convolution,
        ),
        Task(
            name="mnist-rff",
            dataset="mnist",
            model=partial(LinearModel, 2000, 10),
            description="28x28 handwritten digits, linear regression of 2000 random Fourier "
            "features with 20,000 weights",
            training=TrainingSettings(learning_rate=4.0),
            loss=half_squared_error,
            features=images_fourier,
        ),
        Task(
            name="fashion-rff",
            dataset="fashion-mnist",
            model=partial(LinearModel, 2000, 10),
            description="28x28 pieces of clothing, linear regression of 2000 random Fourier "
            "features with 20,000 weights",
            training=TrainingSettings(learning_rate=3.0),
            loss=half_squared_error,
            features=images_fourier,
        ),
    )
}
