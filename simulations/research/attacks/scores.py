"""Checks the scores that attacks and audits give, and the labels that they are compared with."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.wire.arrays import is_finite

__all__ = ["labelled", "vector"]


def labelled(
    scores: ArrayLike, name: str, labels: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return scores and their labels as arrays; labels are truth values, `name` is their parameter.

    Raises
    ------
    InvalidParameterError
        If they are something else, or not equally many.
    """
    values, truths = vector("scores", scores), np.asarray(labels)
    if truths.dtype != np.bool_ or truths.shape != values.shape:
        allowed = f"{values.size} truth values, one for each score"
        raise InvalidParameterError(name, f"{truths.dtype} {truths.shape}", allowed)
    return values, truths


def vector(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return a parameter as a vector of finite numbers.

    Raises
    ------
    InvalidParameterError
        If it is none, or empty.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size == 0 or not is_finite(array):
        raise InvalidParameterError(name, array.shape, "a vector of finite numbers")
    return array
