"""Records as apps have them, nested tuples and dicts: their parts, new ones, and more of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset

__all__ = [
    "Arrays",
    "Longer",
    "first_group",
    "has_more",
    "has_places",
    "made_of",
    "parts_of",
    "replaced",
]

Row = NDArray[Any]


def parts_of(record: Any) -> list[Row]:
    """Return the numbers of a record: its arrays, in order.

    Examples
    --------
    >>> parts_of((np.zeros(2), {"label": 3, "name": "x"}))
    [array([0., 0.]), array(3)]
    """
    if isinstance(record, Mapping):
        return [part for value in record.values() for part in parts_of(value)]
    if isinstance(record, tuple | list):
        return [part for value in record for part in parts_of(value)]
    found = _numbers(record)
    return [] if found is None else [found]


def made_of(records: Sequence[Any], draws: np.random.Generator) -> Any:
    """Return a record that is like none of some: each of its entries is that of one of them.

    What is no number, or has several shapes, is that of one record.

    Parameters
    ----------
    records : sequence
        Records of one structure, at least one.
    draws : Generator
        Chooses whose entries it gets.
    """
    first = records[0]
    if isinstance(first, Mapping):
        return {name: made_of([one[name] for one in records], draws) for name in first}
    if isinstance(first, tuple | list) and len({len(one) for one in records}) == 1:
        return _like_it(
            first, [made_of([one[n] for one in records], draws) for n in range(len(first))]
        )
    rows = [row for one in records if (row := _numbers(one)) is not None]
    if len(rows) < len(records) or len({row.shape for row in rows}) > 1:
        return records[int(draws.integers(len(records)))]
    table = np.array(rows)
    chosen = draws.integers(len(table), size=(1, *table.shape[1:]))
    return _like(first, np.take_along_axis(table, chosen, axis=0)[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrays:
    """Arrays of one length in a tuple, a list or a dict; or one array.

    Parameters
    ----------
    within : object
        What they are in, or the array itself.
    names : list
        Their places in it, or keys; empty of an array itself.
    """

    within: Any
    names: list[Any]

    def __len__(self) -> int:
        return len(self._all[0])

    def __getitem__(self, place: int) -> tuple[Any, ...]:
        return tuple(array[place] for array in self._all)

    @property
    def _all(self) -> list[Any]:
        return [self.within[name] for name in self.names] if self.names else [self.within]

    def longer(self, more: Sequence[tuple[Any, ...]]) -> Any:
        """Return what they are in, with records at their ends."""
        new = [_longer(a, [one[n] for one in more]) for n, a in enumerate(self._all)]
        if not self.names:
            return new[0]
        by_name = dict(zip(self.names, new, strict=True))
        if isinstance(self.within, Mapping):
            return {**self.within, **by_name}
        return _like_it(self.within, [by_name.get(n, v) for n, v in enumerate(self.within)])


def first_group(found: Any) -> Any:
    """Return the first records in what a function returned: `Arrays`, a Dataset; None for none.

    Examples
    --------
    >>> x, y, test = np.zeros((4, 2)), np.zeros(4), np.zeros((3, 2))
    >>> len(first_group((x, y, test))), len(first_group(((x, y), test)).names)
    (4, 2)
    >>> first_group("x") is None
    True
    """
    if _is_array(found):
        return Arrays(within=found, names=[])
    if isinstance(found, Mapping | tuple | list):
        names = list(found) if isinstance(found, Mapping) else list(range(len(found)))
        if not names:
            return None
        if not _is_array(found[names[0]]):
            return first_group(found[names[0]])
        length = len(found[names[0]])
        same = [n for n in names if _is_array(found[n]) and len(found[n]) == length]
        return Arrays(within=found, names=same)
    # Torch's, or one with columns as `datasets` has; a table is none.
    known = isinstance(found, Dataset) or hasattr(found, "column_names")
    return found if known and has_places(found) else None


def replaced(found: Any, old: Any, new: Any) -> Any:
    """Return what a function returned with one thing in it replaced, by its identity."""
    if found is old:
        return new
    if isinstance(found, Mapping):
        return {name: replaced(value, old, new) for name, value in found.items()}
    if isinstance(found, tuple | list):
        return _like_it(found, [replaced(value, old, new) for value in found])
    return found


class Longer(Dataset[Any]):
    """A Dataset with records at its end; what else it has is there, too.

    Parameters
    ----------
    dataset : Dataset
        The records before.
    more : sequence
        The others.
    """

    def __init__(self, dataset: Any, more: Sequence[Any]) -> None:
        self.dataset, self.more = dataset, more

    def __len__(self) -> int:
        return len(self.dataset) + len(self.more)

    def __getitem__(self, place: Any) -> Any:
        if not hasattr(place, "__index__"):  # such as the name of a column
            return self.dataset[place]
        place = range(len(self))[place]
        known = len(self.dataset)
        return self.dataset[place] if place < known else self.more[place - known]

    def __getattr__(self, name: str) -> Any:
        # Such as __getitems__, which would pass the new ones by; and what pickle asks for.
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def has_more(dataset: Any) -> bool:
    """Tell whether a Dataset is one with more records, or is made of one."""
    if isinstance(dataset, ConcatDataset):
        return any(map(has_more, dataset.datasets))
    within = getattr(dataset, "__dict__", {}).get("dataset")
    return isinstance(dataset, Longer) or (within is not None and has_more(within))


def has_places(dataset: Any) -> bool:
    """Tell whether a data set has its records at places, from 0 on."""
    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _like_it(first: Any, values: Sequence[Any]) -> Any:
    """Return values as the tuple or list that it is; a namedtuple takes them one by one."""
    return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | Tensor) and value.ndim > 0


def _numbers(value: Any) -> Row | None:
    """Return a tensor, an array or a number as an array; None for anything else."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray | np.generic | int | float):
        return None
    found = np.asarray(value)
    return found if found.dtype.kind in "biuf" else None


def _like(first: Any, row: Row) -> Any:
    """Return numbers as the type that they were."""
    if isinstance(first, Tensor):
        return torch.tensor(row, dtype=first.dtype)
    if isinstance(first, np.ndarray):
        return row.astype(first.dtype)
    return type(first)(row)


def _longer(array: Any, more: Sequence[Any]) -> Any:
    if not more:
        return array
    if isinstance(array, Tensor):
        return torch.cat([array, torch.stack([torch.as_tensor(one) for one in more]).to(array)])
    return np.concatenate([array, np.array(more, dtype=array.dtype)])
