"""Reads the records that a user's training gives, in whichever form it has them, as arrays.

What a trainer certifies is about one order of the records, in which each is there once. So a
DataLoader serves as a place of records: what would choose among them, or repeat some, is refused.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from flwr_privacy.clients.node.rehearsal import rehearse
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.pipeline.operator_checks import warn_once

__all__ = ["Labels", "Records", "check_given", "check_repeats", "given_records"]

Records: TypeAlias = NDArray[Any] | Tensor | Dataset[Any] | DataLoader[Any]
Labels: TypeAlias = NDArray[Any] | Tensor | None

_NAME = "features"


def given_records(
    features: Records, labels: Labels, kind: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return records and labels as arrays, which the caller must not change.

    Parameters
    ----------
    features : ndarray, Tensor, Dataset or DataLoader
        Records; a Dataset, or that of a DataLoader, has pairs of features and label. They are read
        once, in the order of the Dataset, with the DataLoader's ``collate_fn`` for each alone and
        its ``num_workers``.
    labels : ndarray or Tensor
        Their labels; None beside a Dataset or DataLoader.
    kind : {"train", "evaluate"}
        What the caller does: in a rehearsal of it what is refused is told before a charge.

    Raises
    ------
    InvalidParameterError
        If something is no source of records, or a DataLoader would choose, leave out or repeat
        records. This does not depend on any record.
    DataError
        If the records are no pairs, or do not all have one shape and type.
    """
    try:
        _check(features, labels)
        check_repeats(features.dataset if isinstance(features, DataLoader) else features)
    except InvalidParameterError as error:
        rehearse(kind, np.empty(0), np.empty(0), _raising(error))
        raise
    if isinstance(features, DataLoader):
        return _read(features)
    if isinstance(features, Tensor | np.ndarray):
        return _array(features), _array(labels)
    return _read(DataLoader(features))


def check_given(loader: DataLoader[Any]) -> None:
    """Refuse a DataLoader that would choose, leave out or repeat records of its Dataset.

    Raises
    ------
    InvalidParameterError
        If it is one. This does not depend on any record.
    """
    _check(loader, None)


def check_repeats(dataset: Any) -> None:
    """Refuse what has a record of one of its data sets more than once.

    Raises
    ------
    InvalidParameterError
        If it is a Subset or ConcatDataset with one. Its places may have been chosen by records.
    """
    if not isinstance(dataset, Subset | ConcatDataset):
        return
    places = list(_places(dataset))
    if len(set(places)) < len(places):
        raise InvalidParameterError(
            _NAME, f"a {type(dataset).__name__} that repeats records", "every record once"
        )


def _raising(error: Exception) -> Callable[[Any], None]:
    def work(_: Any) -> None:
        raise error

    return work


def _check(features: Any, labels: Any) -> None:
    arrays = isinstance(features, np.ndarray | Tensor)
    dataset = features.dataset if isinstance(features, DataLoader) else features
    if not arrays and (isinstance(dataset, IterableDataset) or not _is_dataset(dataset)):
        raise InvalidParameterError(
            _NAME,
            type(dataset).__name__,
            "an array, a tensor, a Dataset with a length, or a DataLoader of one",
        )
    if arrays and not isinstance(labels, np.ndarray | Tensor):
        raise InvalidParameterError("labels", type(labels).__name__, "an array or a tensor")
    if not arrays and labels is not None:
        kind = type(features).__name__
        raise InvalidParameterError("labels", type(labels).__name__, f"nothing beside a {kind}")
    if isinstance(features, DataLoader):
        _check_loader(features)
    for name, part in (("features", features), ("labels", labels)):
        if isinstance(part, Tensor) and part.dtype == torch.bfloat16:
            raise InvalidParameterError(name, "bfloat16", "a type that NumPy has: .float()")


def _places(dataset: Any) -> Iterator[tuple[int, int]]:
    """Yield for each record the data set that it is of, and its place there."""
    if isinstance(dataset, Subset):
        inner = list(_places(dataset.dataset))
        yield from (inner[int(index)] for index in dataset.indices)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _places(part)
    else:
        yield from ((id(dataset), place) for place in range(len(dataset)))


def _is_dataset(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _check_loader(loader: DataLoader[Any]) -> None:
    """Refuse what decides which records there are; say once what has no effect."""
    sampler = loader.sampler
    shuffled = type(sampler) is RandomSampler
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        given = "a DataLoader that repeats records"
    elif type(sampler) not in (SequentialSampler, RandomSampler):
        given = f"a DataLoader with a {type(sampler).__name__}"
    elif len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        given = f"a DataLoader whose {type(sampler).__name__} leaves out records"
    elif loader.batch_size is None:  # where a batch_sampler is given, too
        given = "a DataLoader without automatic batches, or with batches of its own"
    elif loader.drop_last:
        given = "a DataLoader with drop_last=True"
    else:
        warn_once(
            f"the DataLoader's batch_size={loader.batch_size}"
            + (", shuffle=True" if shuffled else "")
            + " has no effect: the scheme, or the arguments of the trainer, choose the batches"
        )
        return
    raise InvalidParameterError(
        _NAME,
        given,
        "every record of its Dataset once; for a part of them DataLoader(Subset(dataset, indices))",
    )


def _read(loader: DataLoader[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read each record as a batch of one."""
    alone = DataLoader(
        loader.dataset,
        batch_size=1,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    features, labels = list[NDArray[Any]](), list[NDArray[Any]]()
    for batch in alone:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(
                f"a record is a {type(batch).__name__}: it must be a pair of features and label, "
                "which a collate_fn of the DataLoader can make"
            )
        features.append(_array(batch[0]))
        labels.append(_array(batch[1]))
    if not features:
        raise DataError("a Dataset without records has no shape: give arrays of shape (0, ...)")
    return _stacked("features", features), _stacked("labels", labels)


def _stacked(name: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        raise DataError(f"the {name} of the records do not all have one shape and type")
    return np.concatenate(parts)


def _array(part: Any) -> NDArray[Any]:
    if isinstance(part, Tensor):
        return part.detach().cpu().numpy()
    return np.asarray(part)
