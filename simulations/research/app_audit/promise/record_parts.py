"""Records as apps have them, nested tuples and dicts: their parts, new ones, and more of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrays", "first_group", "made_of", "parts_of", "replaced", "with_more"]

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
    if isinstance(first, tuple | list):
        values = [made_of([one[place] for one in records], draws) for place in range(len(first))]
        named = hasattr(first, "_fields")  # a namedtuple takes them one by one
        return type(first)(*values) if named else type(first)(values)
    rows = [_numbers(one) for one in records]
    if any(row is None or row.shape != rows[0].shape for row in rows if rows[0] is not None):
        rows = [None]
    if rows[0] is None:
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
        return type(self.within)(by_name.get(n, v) for n, v in enumerate(self.within))


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
    has = hasattr(found, "__getitem__") and hasattr(found, "__len__")
    return found if has and not isinstance(found, str | bytes) else None


def replaced(found: Any, old: Any, new: Any) -> Any:
    """Return what a function returned with one thing in it replaced, by its identity."""
    if found is old:
        return new
    if isinstance(found, Mapping):
        return {name: replaced(value, old, new) for name, value in found.items()}
    if isinstance(found, tuple | list):
        return type(found)(replaced(value, old, new) for value in found)
    return found


def with_more(dataset: Any, more: Sequence[Any]) -> Any:
    """Return a Dataset with records at its end; what else it has is there, too."""
    from torch.utils.data import Dataset

    class Longer(Dataset[Any]):
        def __len__(self) -> int:
            return len(dataset) + len(more)

        def __getitem__(self, place: int) -> Any:
            place = range(len(self))[place]
            return dataset[place] if place < len(dataset) else more[place - len(dataset)]

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # such as __getitems__, which would pass the new ones by
                raise AttributeError(name)
            return getattr(dataset, name)

    return Longer()


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and bool(getattr(value, "ndim", 0))


def _numbers(value: Any) -> Row | None:
    """Return a tensor, an array or a number as an array; None for anything else."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, str | bytes) or value is None:
        return None
    found = np.asarray(value) if isinstance(value, np.ndarray | np.generic | int | float) else None
    return found if found is not None and found.dtype.kind in "biuf" else None


def _like(first: Any, row: Row) -> Any:
    """Return numbers as the type that they were."""
    if hasattr(first, "detach"):
        import torch

        return torch.tensor(row, dtype=first.dtype)
    if isinstance(first, np.ndarray):
        return row.astype(first.dtype)
    return type(first)(row)


def _longer(array: Any, more: Sequence[Any]) -> Any:
    if not more:
        return array
    if hasattr(array, "detach"):
        import torch

        return torch.cat([array, torch.stack([torch.as_tensor(one) for one in more]).to(array)])
    return np.concatenate([array, np.array(more, dtype=array.dtype)])
