"""Which training records each simulated client holds.

Most splits are flwr-datasets' work. The partitioners see the labels alone, in an order that
the seed has shuffled: a class is stored by writer or by date in some data sets, and where records
are left out they must not all be of the last class.
"""

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError, InvalidParameterError, check_integer
from flwr_privacy.simulations.settings.run_settings import PartitionSettings
from flwr_privacy.wire.identity import derive_seed

__all__ = ["Description", "describe", "partition"]

Indices = NDArray[np.int64]


def partition(
    labels: NDArray[np.int64], *, clients: int, settings: PartitionSettings, seed: int
) -> list[Indices]:
    """Split the records over the clients.

    Parameters
    ----------
    labels : (n,) int64
        Class of each record.
    clients : int
        Number of clients, >= 1.
    settings : PartitionSettings
        ``iid`` and ``dirichlet`` give every record to a client. ``shards`` leaves out the at most
        ``clients * shards - 1`` records, drawn at random, that are over when all shards are equally
        large. ``labels`` gives client `i` class ``i % classes`` and draws its other classes; a
        class that no client has is left out (never with as many clients as classes). Under
        ``label-sets`` the numbers of clients with each class differ by at most one, and a client
        has equally many records of each of its classes. Sizes leave out what is over.
    seed : int
        Root of the experiment; the split depends on nothing else of it.

    Returns
    -------
    list of (m_i,) int64
        For each client, the sorted indices of its records: disjoint, never empty, read-only.
        Within a process the same question is answered from memory.

    Raises
    ------
    DataError
        If a client would have no data.
    InvalidParameterError
        If the clients, the shards or the labels per client do not fit the data.

    Examples
    --------
    >>> labels = np.arange(12) % 3
    >>> parts = partition(labels, clients=4, settings=PartitionSettings(), seed=0)
    >>> sorted(int(i) for part in parts for i in part) == list(range(12))
    True
    """
    check_integer("clients", clients, minimum=1)
    packed = np.ascontiguousarray(labels, dtype=np.int64).tobytes()
    return list(_partition(packed, clients, settings, seed))


@dataclass(frozen=True, kw_only=True, eq=False)
class Description:
    """Sizes and classes of the clients; as text, one line for a log.

    Parameters
    ----------
    counts : (clients, classes) int64
        Records of each class that each client holds.
    left_out : int
        Records that no client holds.
    """

    counts: NDArray[np.int64]
    left_out: int

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Records per client, (clients,)."""
        sizes: NDArray[np.int64] = self.counts.sum(axis=1)
        return sizes

    @property
    def classes(self) -> NDArray[np.int64]:
        """Number of classes per client, (clients,)."""
        classes: NDArray[np.int64] = np.count_nonzero(self.counts, axis=1)
        return classes

    @property
    def one_class(self) -> list[int]:
        """Clients all of whose records are of one class."""
        return np.flatnonzero(self.classes == 1).tolist()

    def __str__(self) -> str:
        sizes, classes = _span(self.sizes), _span(self.classes)
        text = f"{len(self.sizes)} clients, {sizes} records of {classes} classes each"
        if self.one_class:
            text += f"; only one class: {_some_clients(self.one_class)}"
        if self.left_out:
            text += f"; records left out: {self.left_out}"
        return text


def describe(labels: NDArray[np.int64], parts: Sequence[Indices]) -> Description:
    """Count what each client holds.

    Parameters
    ----------
    labels : (n,) int64
        Class of each record.
    parts : sequence of (m_i,) int64
        Indices of each client's records, from `partition`.

    Examples
    --------
    >>> parts = [np.array([0, 1]), np.array([2, 3, 4])]
    >>> print(describe(np.array([0, 1, 1, 1, 1, 0]), parts))
    2 clients, 2 to 3 records of 1 to 2 classes each; only one class: client 1; records left \
out: 1
    """
    classes = int(labels.max()) + 1
    counts = np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
    return Description(counts=counts, left_out=len(labels) - int(counts.sum()))


def _span(counts: NDArray[np.int64]) -> str:
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low} to {high}"


@lru_cache(maxsize=8)
def _partition(
    packed: bytes, clients: int, settings: PartitionSettings, seed: int
) -> tuple[Indices, ...]:
    labels = np.frombuffer(packed, dtype=np.int64)
    if clients > len(labels):
        raise DataError(
            f"{len(labels)} records are too few for {clients} clients: client {len(labels)} would "
            f"have no data; ask for fewer clients"
        )
    split_seed = derive_seed(seed, "partition")
    order = np.random.default_rng(split_seed).permutation(len(labels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say, the errors and `describe` say better
        parts = _SPLITS[settings.kind](labels, order, clients, settings, split_seed)
    for part in parts:
        part.flags.writeable = False
    return tuple(parts)


def _iid(
    labels: Indices, order: Indices, clients: int, settings: PartitionSettings, seed: int
) -> list[Indices]:
    from flwr_datasets.partitioner import IidPartitioner

    if settings.sizes:
        ends = np.cumsum(_sizes(settings, clients))
        if ends[-1] > len(labels):
            raise _too_large(settings, f"{ends[-1]} of {len(labels)} records")
        return [np.sort(part) for part in np.split(order[: ends[-1]], ends[:-1])]
    return _split(IidPartitioner(clients), labels, order, clients)


def _dirichlet(
    labels: Indices, order: Indices, clients: int, settings: PartitionSettings, seed: int
) -> list[Indices]:
    from flwr_datasets.partitioner import DirichletPartitioner

    def split(minimum: int) -> list[Indices]:
        # Not self-balancing: that would make the shares sparser than alpha says.
        partitioner = DirichletPartitioner(
            num_partitions=clients,
            partition_by="label",
            alpha=float(settings.alpha),
            min_partition_size=minimum,
            self_balancing=False,
            shuffle=False,
            seed=seed,
        )
        return _split(partitioner, labels, order, clients)

    try:
        return split(1)
    except ValueError as error:  # none of its 11 draws gave every client a record
        empty = [client for client, part in enumerate(split(0)) if len(part) == 0]
        raise DataError(
            f"no data for {_some_clients(empty)} of {clients} with partition.alpha = "
            f"{settings.alpha}: raise partition.alpha, ask for fewer clients or take another seed"
        ) from error


def _shards(
    labels: Indices, order: Indices, clients: int, settings: PartitionSettings, seed: int
) -> list[Indices]:
    from flwr_datasets.partitioner import ShardPartitioner

    shards = clients * settings.shards
    if shards > len(labels):
        raise InvalidParameterError(
            "partition.shards",
            settings.shards,
            f"at most {len(labels) // clients} ({len(labels)} records for {clients} clients)",
        )
    partitioner = ShardPartitioner(
        num_partitions=clients,
        partition_by="label",
        num_shards_per_partition=settings.shards,
        shuffle=False,
        seed=seed,
    )
    return _split(partitioner, labels, order[: len(order) // shards * shards], clients)


def _labels(
    labels: Indices, order: Indices, clients: int, settings: PartitionSettings, seed: int
) -> list[Indices]:
    from flwr_datasets.partitioner import PathologicalPartitioner

    classes, sizes = np.unique(labels, return_counts=True)
    if settings.labels > len(classes):
        raise InvalidParameterError(
            "partition.labels", settings.labels, f"at most {len(classes)}, the number of classes"
        )
    partitioner = PathologicalPartitioner(
        num_partitions=clients,
        partition_by="label",
        num_classes_per_partition=settings.labels,
        class_assignment_mode="first-deterministic",
        shuffle=False,
        seed=seed,
    )
    try:
        return _split(partitioner, labels, order, clients)
    except ValueError as error:
        raise DataError(
            f"a class has too few records (the smallest has {sizes.min()}) for {clients} clients "
            f"with partition.labels = {settings.labels}, so some client would miss a class: ask "
            f"for fewer clients or fewer labels"
        ) from error


def _label_sets(
    labels: Indices, order: Indices, clients: int, settings: PartitionSettings, seed: int
) -> list[Indices]:
    classes, available = np.unique(labels, return_counts=True)
    rng = np.random.default_rng(seed)
    sets = balanced_sets(clients, len(classes), settings.labels, rng)
    holders = np.bincount(sets.ravel(), minlength=len(classes))
    if settings.sizes:
        sizes = _sizes(settings, clients)
    else:
        share = int((available // np.maximum(holders, 1))[holders > 0].min())
        if share == 0:
            raise DataError(
                f"a class has fewer records ({available.min()}) than clients that are to have it "
                f"({holders.max()}) with partition.labels = {settings.labels}: ask for fewer "
                f"clients or fewer labels"
            )
        sizes = np.full(clients, share * settings.labels)
    if (sizes % settings.labels).any():
        allowed = f"multiples of partition.labels = {settings.labels}"
        raise InvalidParameterError("partition.sizes", list(settings.sizes), allowed)
    shares = sizes // settings.labels
    missing = max(
        int(shares[(sets == one).any(axis=1)].sum()) - count for one, count in enumerate(available)
    )
    if missing > 0:
        raise _too_large(settings, f"{missing} records more of a class")
    left = [order[labels[order] == name] for name in classes]
    parts = []
    for own, share in zip(sets, shares, strict=True):
        parts.append(np.sort(np.concatenate([left[one][:share] for one in own])))
        for one in own:
            left[one] = left[one][share:]
    return parts


def balanced_sets(count: int, labels: int, size: int, rng: np.random.Generator) -> Indices:
    """Draw sets of labels that differ, in which all labels are equally often, or once more.

    Parameters
    ----------
    count : int
        Number of sets.
    labels, size : int
        Number of labels, and how many are in a set.
    rng : Generator
        Draws them.

    Returns
    -------
    (count, size) int64
        Sorted labels of each set, 0 to ``labels - 1``.

    Raises
    ------
    InvalidParameterError
        If there are not so many labels, or not so many sets.

    Examples
    --------
    >>> sets = balanced_sets(5, 10, 4, np.random.default_rng(0))
    >>> np.bincount(sets.ravel()).tolist()
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """
    if size > labels:
        raise InvalidParameterError("partition.labels", size, f"at most {labels}, the classes")
    possible = math.comb(labels, size)
    if count > possible:
        allowed = f"at most {possible} with partition.labels = {size} of {labels} classes"
        raise InvalidParameterError("clients", count, allowed)
    if 2 * count > possible:  # all sets but some that are balanced: fewer draws that clash
        without = {tuple(own) for own in balanced_sets(possible - count, labels, size, rng)}
        every = itertools.combinations(range(labels), size)
        return np.array([own for own in every if own not in without], dtype=np.int64)
    used = np.zeros(labels, dtype=np.int64)
    sets: list[frozenset[int]] = []
    for _ in range(count):
        least = np.lexsort((rng.random(labels), used))[:size]
        used[least] += 1
        sets.append(frozenset(least.tolist()))
    # The counts are right. Two sets that swap a label keep them; so until all sets differ.
    while len(set(sets)) < count:
        one = next(i for i, own in enumerate(sets) if own in sets[:i])
        other = int(rng.integers(count))
        give, take = sorted(sets[one] - sets[other]), sorted(sets[other] - sets[one])
        if give:
            given, taken = give[rng.integers(len(give))], take[rng.integers(len(take))]
            sets[one] = sets[one] - {given} | {taken}
            sets[other] = sets[other] - {taken} | {given}
    return np.array([sorted(own) for own in sets], dtype=np.int64).reshape(count, size)


def _sizes(settings: PartitionSettings, clients: int) -> Indices:
    return np.resize(np.array(settings.sizes, dtype=np.int64), clients)


def _too_large(settings: PartitionSettings, need: str) -> InvalidParameterError:
    return InvalidParameterError(
        "partition.sizes", list(settings.sizes), f"smaller sizes (the clients would need {need})"
    )


_SPLITS = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "shards": _shards,
    "labels": _labels,
    "label-sets": _label_sets,
}


def _split(partitioner: Any, labels: Indices, order: Indices, clients: int) -> list[Indices]:
    import datasets

    # As pandas: the partitioners read the column whole instead of row by row.
    partitioner.dataset = datasets.Dataset.from_dict(
        {"label": labels[order], "index": order}
    ).with_format("pandas")
    return [
        np.sort(partitioner.load_partition(client)["index"].to_numpy()) for client in range(clients)
    ]


def _some_clients(clients: Sequence[int]) -> str:
    if len(clients) == 1:
        return f"client {clients[0]}"
    shown = ", ".join(map(str, clients[:5]))
    more = f" and {len(clients) - 5} more" if len(clients) > 5 else ""
    return f"clients {shown}{more}"
