"""Poisson batches of the user's own data set, each record in the form that its DataLoader gives it.

The ``collate_fn`` gets every record alone, so that what it makes of one has nothing of another: a
MixUp in it, or a standardisation over the batch, has no effect. So all records must have one shape.

A batch is filled up to a power of two with rows that count for nothing: their gradients are left
out. A mean divides the gradient of each record by the size of the batch, and the step multiplies
by it again. For a power of two that is exact. For another size it is not, and depends on it: one
record more would change the gradients of all others, by as much as the clipping norm where the
server chooses weights that amplify it. A batch without records, and a place beyond the data set,
where more records are declared than there are, are filled in the same way.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flwr_privacy.errors import DataError, InvalidParameterError

__all__ = ["POOL", "PoissonSampler", "generated_batch", "poisson_loader"]

POOL = 8
"""Number of generated records."""


class PoissonSampler:
    """Places of the records of each batch of one pass, and which of them count.

    Parameters
    ----------
    draw : callable
        Returns the places of the records of a batch.
    size : int
        Number of records that there are.

    Attributes
    ----------
    batches : int
        Batches of the next pass.
    counted : deque of (b,) bool ndarray
        For each batch that was drawn and not fetched, which of its records count.
    """

    def __init__(self, draw: Callable[[], NDArray[np.intp]], size: int) -> None:
        self._draw, self._size = draw, size
        self.batches = 0
        self.counted = deque[NDArray[np.bool_]]()

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.batches):
            places = self._draw()
            size = 1 << max(0, len(places) - 1).bit_length()
            places = np.pad(places, (0, size - len(places)), constant_values=self._size)
            there = places < self._size
            self.counted.append(there)
            yield np.where(there, places, 0).tolist()


def poisson_loader(loader: DataLoader[Any], sampler: PoissonSampler) -> DataLoader[Any]:
    """Return a loader of the same data set with the batches of a sampler."""
    dataset: Dataset[Any] = loader.dataset
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=EachAlone(loader.collate_fn),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


class EachAlone:
    """Collates records one by one, and puts the batches of one together.

    Parameters
    ----------
    collate_fn : callable
        From a list of records to a batch.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, records: list[Any]) -> Any:
        """Return the batch.

        Raises
        ------
        InvalidParameterError
            If the batch of a record is made of something else than tensors with one row.
        DataError
            If the records do not all have one shape.
        """
        return _joined([self._collate_fn([record]) for record in records])


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        if any(part.dim() == 0 or len(part) != 1 for part in parts):
            raise _no_rows()
        if any(part.shape != first.shape for part in parts):
            raise DataError(
                "the records of a batch do not all have one shape: pad each to the same length, in "
                'the Dataset or with padding="max_length". Padding to the longest of a batch would '
                "tell of it in the gradients of the others"
            )
        return torch.cat(parts)
    if isinstance(first, Mapping):
        made = {key: _joined([part[key] for part in parts]) for key in first}
        return made if type(first) is dict else _again(first, made)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(_joined, map(list, zip(*parts, strict=True))))
    if isinstance(first, tuple | list):
        return type(first)(map(_joined, map(list, zip(*parts, strict=True))))
    raise InvalidParameterError(
        "loader",
        f"a loader whose batches have a {type(first).__name__}",
        "one whose batches are tensors, in tuples, lists or dictionaries",
    )


def _no_rows() -> InvalidParameterError:
    # Nothing of its shape: it is that of a record.
    return InvalidParameterError(
        "loader",
        "a loader whose batches have a tensor without one row for each record",
        "one whose tensors have the records in their first dimension",
    )


def generated_batch(
    loader: DataLoader[Any], rows: list[int], records: Dataset[Any] | None = None
) -> Any:
    """Return a batch that looks like those of a loader and has none of its values.

    Numbers are uniform in [0, 1). Integers and truth values are 0 or 1: single ones, such as
    labels, in turn, others at random, each record with both.

    Parameters
    ----------
    loader : DataLoader
        Says what a batch looks like.
    rows : list of int
        Which of the `POOL` generated records are in it: the same number is the same record.
    records : Dataset, optional
        At least `POOL` records of the app's own making, in place of these.

    Raises
    ------
    InvalidParameterError
        If a batch is made of something else than tensors with the records first.
    """
    collate: Callable[[list[Any]], Any] = EachAlone(loader.collate_fn)
    if records is not None:
        return collate([records[row] for row in rows])
    return _alike(collate([loader.dataset[0]]), rows)


def _alike(part: Any, rows: list[int]) -> Any:
    if isinstance(part, Tensor):
        return _tensor_alike(part, rows)
    if isinstance(part, Mapping):
        made = {key: _alike(value, rows) for key, value in part.items()}
        return made if type(part) is dict else _again(part, made)
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_alike(value, rows) for value in part))
    return type(part)(_alike(value, rows) for value in part)


def _again(part: Any, made: dict[Any, Any]) -> Any:
    """Return a mapping of the library's own kind, such as a BatchEncoding."""
    try:
        return type(part)(made)
    except TypeError:
        return made


def _tensor_alike(part: Tensor, rows: list[int]) -> Tensor:
    shape = (POOL, *part.shape[1:])
    draws = torch.Generator().manual_seed(0)
    if part.is_floating_point() and part.dim() > 1:
        made = torch.rand(shape, generator=draws)
    elif part[0].numel() == 1:
        made = torch.arange(POOL).remainder(2).view(shape)
    else:
        made = torch.randint(2, shape, generator=draws)
        # A mask that leaves out everything, or nothing, says little about a loop.
        made[..., 0], made[..., -1] = 1, 0
    return made.to(part.dtype)[rows]
