"""The records of a task that brings its own data: arrays of the user, checked once."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError

from .records import Dataset

if TYPE_CHECKING:
    from .task_list import Task

__all__ = ["own_records"]


@lru_cache(maxsize=4)
def own_records(task: "Task") -> Dataset:
    """Return the records that a task brings; the user's arrays stay as they are.

    Without test records those of the data set are empty, and nothing is evaluated on the server.

    Parameters
    ----------
    task : Task
        One with ``data``. Features that are floats become float32, integers int64; labels int64.

    Raises
    ------
    InvalidParameterError
        If ``data`` or ``test`` is not a pair of features and labels, the two have not equally many
        records, a feature is no finite number, or a label is no integer of at least 0.
    """
    features, labels = _checked("data", task.data)
    if task.test is None:
        test_features, test_labels = features[:0], labels[:0]
    else:
        test_features, test_labels = _checked("test", task.test)
    if features.shape[1:] != test_features.shape[1:]:
        allowed = f"records of the shape {features.shape[1:]} of those in data"
        raise InvalidParameterError("test", f"records of shape {test_features.shape[1:]}", allowed)
    return Dataset(
        features=features,
        labels=labels,
        test_features=test_features,
        test_labels=test_labels,
        classes=int(max(labels.max(), test_labels.max(initial=0))) + 1,
    )


def _checked(name: str, pair: Any) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features and labels as views or copies, which may be made read-only."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        value = f"{type(pair).__name__}" + (f" of {len(pair)}" if hasattr(pair, "__len__") else "")
        raise InvalidParameterError(name, value, "a pair of arrays: (features, labels)")
    features, labels = (
        _array(f"{name}: {part}", array)
        for part, array in zip(("features", "labels"), pair, strict=True)
    )
    if features.ndim < 2:
        allowed = "a row of numbers for each record, (n, ...)"
        raise InvalidParameterError(f"{name}: features", f"shape {features.shape}", allowed)
    if labels.ndim != 1:
        allowed = "one integer for each record, (n,)"
        raise InvalidParameterError(f"{name}: labels", f"shape {labels.shape}", allowed)
    if len(labels) != len(features) or len(labels) == 0:
        allowed = "one label for each record, and a record at least"
        found = f"{len(labels)} labels for {len(features)} records"
        raise InvalidParameterError(name, found, allowed)
    kind = np.int64 if features.dtype.kind in "biu" else np.float32
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
        converted: NDArray[Any] = features.astype(kind, copy=False).view()
    if bad := np.argwhere(~np.isfinite(converted)).tolist():
        place = tuple(bad[0])
        raise InvalidParameterError(
            f"{name}: features", f"{features[place]} in record {place[0]}", "finite float32 numbers"
        )
    whole = labels.dtype.kind in "biu" or (np.isfinite(labels).all() and (labels % 1 == 0).all())
    if not whole or labels.min() < 0:
        wrong = labels[(labels < 0) | (labels % 1 != 0)][0]
        allowed = "the number of a class for each record: 0, 1, 2, ..."
        raise InvalidParameterError(f"{name}: labels", wrong.item(), allowed)
    return converted, labels.astype(np.int64, copy=False).view()


def _array(name: str, value: Any) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # rows of several lengths; on a GPU
        raise InvalidParameterError(name, type(value).__name__, f"an array ({error})") from error
    if array.dtype.kind not in "biuf":
        raise InvalidParameterError(name, f"array of {array.dtype}", "an array of numbers")
    return array
