"""Lets a training request its data, so that a rehearsal can pass generated records instead.

At user level everything about a client's data is protected: also how many records there are, and
what a training that has read them runs into. So the app declares what its records look like, and
its training reads them through `own_data` alone.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients.certificates.request import opened
from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.wire.arrays import Arrays

from .rehearsal import generated, trial_scope

__all__ = ["RecordLayout", "Trial", "generated_like", "own_data", "trial", "undrawn"]

_Pair = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """The form of an app's records, the same for all of its clients.

    Parameters
    ----------
    features : tuple of int
        Shape of the features of one record.
    labels : tuple of int, default ()
        Shape of its label.
    feature_type, label_type : str
        NumPy's names of their types.
    count : int, default 32
        How many records are generated, at least 1. It is no client's own number.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> features, labels = RecordLayout(features=(28, 28), count=4).generated()
    >>> features.shape, features.dtype.name, labels.shape, labels.dtype.name
    ((4, 28, 28), 'float32', (4,), 'int64')
    """

    features: tuple[int, ...]
    labels: tuple[int, ...] = ()
    feature_type: str = "float32"
    label_type: str = "int64"
    count: int = 32

    def __post_init__(self) -> None:
        check_integer("count", self.count, minimum=1)
        for name in ("features", "labels"):
            shape: Any = getattr(self, name)
            if not isinstance(shape, tuple | list):
                raise InvalidParameterError(name, shape, "a shape: a tuple of integers")
            for size in shape:
                check_integer(name, size, minimum=1)
        for name in ("feature_type", "label_type"):
            kind: Any = getattr(self, name)
            allowed = "the name of a NumPy type"
            if not isinstance(kind, str):  # NumPy takes None for float64
                raise InvalidParameterError(name, kind, allowed)
            try:
                np.dtype(kind)
            except TypeError:
                raise InvalidParameterError(name, kind, allowed) from None

    def generated(self) -> _Pair:
        """Return features that are standard normal, or zeros if they are no floats; zero labels."""
        return generated(
            np.random.default_rng(0),
            self.count,
            (self.features, np.dtype(self.feature_type)),
            (self.labels, np.dtype(self.label_type)),
        )


@dataclass
class Trial:
    """The result of a rehearsal on generated records.

    Parameters
    ----------
    layout : RecordLayout
        What the records look like.
    asked : bool
        Whether the training has asked for its data.
    seconds : float
        How long it took.
    """

    layout: RecordLayout
    asked: bool = False
    seconds: float = 0.0


def own_data(load: Callable[[], Any]) -> Any:
    """Return a client's own data, or in a rehearsal generated features and labels.

    Call it first of all in a training, and read the data nowhere else. Keep what `load` returns as
    long as you like, within `load`: what this function returns may be generated.

    Parameters
    ----------
    load : callable
        Returns features and labels; it is not called in a rehearsal.

    Examples
    --------
    >>> own_data(lambda: ("features", "labels"))
    ('features', 'labels')
    >>> with trial(RecordLayout(features=(2,), count=3)):
    ...     features, labels = own_data(lambda: ("features", "labels"))
    >>> features.shape
    (3, 2)
    """
    rehearsal = trial_scope.get()
    if rehearsal is None:
        return load()
    rehearsal.asked = True
    return rehearsal.layout.generated()


@contextmanager
def trial(layout: RecordLayout) -> Iterator[Trial]:
    """Open a scope in which `own_data` returns generated records.

    What a training draws in it from the global generators of Python, NumPy and torch is put back,
    so that the training after it draws the same.
    """
    rehearsal = Trial(layout)
    with undrawn(), opened(trial_scope, rehearsal):
        began = time.perf_counter()
        try:
            yield rehearsal
        finally:
            rehearsal.seconds = time.perf_counter() - began


def generated_like(model: Arrays) -> dict[str, NDArray[Any]]:
    """Return arrays of the same shapes and types, so large that each has a part in a loss.

    In a model of zeros most weights have no gradient, so that nothing is found out about them.
    Vectors are uniform in [0.5, 1.5], larger arrays normal with the deviation of one over the root
    of the entries that a row has; integers are zeros. Always the same.
    """
    draws = np.random.default_rng(0)

    def like(array: NDArray[Any]) -> NDArray[Any]:
        if not np.issubdtype(array.dtype, np.floating):
            return np.zeros_like(array)
        if array.ndim < 2:
            return np.asarray(draws.uniform(0.5, 1.5, array.shape)).astype(array.dtype)
        row = max(1, array[0].size) if len(array) else 1
        return np.asarray(draws.standard_normal(array.shape) / np.sqrt(row)).astype(array.dtype)

    return {name: like(np.asarray(array)) for name, array in model.items()}


@contextmanager
def undrawn() -> Iterator[None]:
    """Open a scope that puts back the global generators of Python, NumPy and torch at its end."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - theirs
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        yield
