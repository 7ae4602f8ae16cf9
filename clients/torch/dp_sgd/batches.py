"""Poisson batches of the user's own data set, in the form that its DataLoader gives them.

A batch without records cannot go through a model and a loss. So it has one record that counts for
nothing: its gradient is left out. A place beyond the data set, where more records are declared than
there are, is filled in the same way.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flwr_privacy.errors import InvalidParameterError

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
            if not places.size:
                places = np.array([self._size])
            there = places < self._size
            self.counted.append(there)
            yield np.where(there, places, 0).tolist()


def poisson_loader(loader: DataLoader[Any], sampler: PoissonSampler) -> DataLoader[Any]:
    """Return a loader of the same data set with the batches of a sampler."""
    dataset: Dataset[Any] = loader.dataset
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
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
    if records is not None:
        return loader.collate_fn([records[row] for row in rows])
    record = loader.dataset[0]
    return _alike(loader.collate_fn([record] * len(rows)), rows)


def _alike(part: Any, rows: list[int]) -> Any:
    if isinstance(part, Tensor):
        return _tensor_alike(part, rows)
    if isinstance(part, Mapping):
        made = {key: _alike(value, rows) for key, value in part.items()}
        return made if type(part) is dict else _again(part, made)
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_alike(value, rows) for value in part))
    if isinstance(part, tuple | list):
        return type(part)(_alike(value, rows) for value in part)
    raise InvalidParameterError(
        "loader",
        f"a loader whose batches have a {type(part).__name__}",
        "one whose batches are tensors, in tuples, lists or dictionaries",
    )


def _again(part: Any, made: dict[Any, Any]) -> Any:
    """Return a mapping of the library's own kind, such as a BatchEncoding."""
    try:
        return type(part)(made)
    except TypeError:
        return made


def _tensor_alike(part: Tensor, rows: list[int]) -> Tensor:
    if part.dim() == 0 or len(part) != len(rows):
        # Nothing of its shape: it is that of a record.
        raise InvalidParameterError(
            "loader",
            "a loader whose batches have a tensor without one row for each record",
            "one whose tensors have the records in their first dimension",
        )
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
