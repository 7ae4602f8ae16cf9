"""Training and test records with their labels, and the drawing of some of them."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import check_integer
from flwr_privacy.wire.identity import derive_seed

__all__ = ["Dataset", "drawn", "order_of", "places"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Training and test records with their labels.

    Parameters
    ----------
    features : (n, ...) float32
        Training records. All arrays are made read-only: they are shared within the process.
    labels : (n,) int64
        Their classes, 0 to ``classes - 1``.
    test_features : (m, ...) float32
        Test records.
    test_labels : (m,) int64
        Their classes.
    classes : int
        Number of classes.
    """

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_features: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    classes: int

    def __post_init__(self) -> None:
        for array in (self.features, self.labels, self.test_features, self.test_labels):
            array.flags.writeable = False


def order_of(name: str, records: int, seed: int) -> NDArray[np.int64]:
    """Return the order in which records are drawn: a permutation of their places."""
    return np.random.default_rng(derive_seed(seed, name)).permutation(records)


@lru_cache(maxsize=4)
def drawn(
    data: Dataset, train: int | None, test: int | None, validation: int | None, seed: int
) -> Dataset:
    """Return some of the records, drawn at random; the last ones drawn are for the validation.

    Parameters and errors are those of `places`.
    """
    if train is None and test is None and validation is None:
        return data
    train_kept, test_kept = places(data, train, test, validation, seed)
    return Dataset(
        features=data.features[train_kept],
        labels=data.labels[train_kept],
        test_features=data.test_features[test_kept],
        test_labels=data.test_labels[test_kept],
        classes=data.classes,
    )


def places(
    data: Dataset, train: int | None, test: int | None, validation: int | None, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which training and which test records are drawn, in their order.

    Parameters
    ----------
    data : Dataset
        All records.
    train, test : int or None
        Training and test records to draw; None for all.
    validation : int or None
        Training records to leave for the validation. Where all three are None nothing is drawn, and
        the records keep their order.
    seed : int
        Root of the experiment.

    Raises
    ------
    InvalidParameterError
        If there are not so many.
    """
    records, tests = len(data.labels), len(data.test_labels)
    if train is None and test is None and validation is None:
        return np.arange(records), np.arange(tests)
    held = 0
    if validation is not None:
        held = check_integer("validation_records", validation, maximum=records - 1)
    for name, count, most in (
        ("train_records", train, records - held),
        ("test_records", test, tests),
    ):
        if count is not None:
            check_integer(name, count, maximum=most)
    return (
        order_of("train_records", records, seed)[: records - held if train is None else train],
        order_of("test_records", tests, seed)[:test],
    )
