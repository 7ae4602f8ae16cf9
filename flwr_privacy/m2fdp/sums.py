"""Sums codes per group of clients, one group for each lowest aggregator."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.privacy.averaging import Metrics, ReplyRefusedError, StateFields, WeightedMean
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid, EvenMean
from flwr_privacy.wire.arrays import Arrays

__all__ = ["TierSums"]


class _NarrowMean(EvenMean):
    """An `EvenMean` whose sums stay in 32 bits as long as they must fit.

    They take half the memory, and a fraction of the time: an addition casts nothing.
    """

    def __init__(self, start: Arrays, grid: CodeGrid, names: list[str]) -> None:
        super().__init__(start, grid, names)
        self._reached: dict[str, int] = {}  # by name, no entry of the sum is larger

    def _begin_from(self, entries: StateFields) -> None:
        super()._begin_from(entries)
        self._reached = {}

    def _add(self, name: str, array: NDArray[np.generic], weight: float) -> None:
        codes: NDArray[Any] = array
        total = self._sums.get(name)
        reached = self._reached.get(name, 0)
        reached += max(int(codes.max(initial=0)), -int(codes.min(initial=0)))
        if weight == 1 and reached <= CODE_LIMIT and (total is None or total.dtype == np.int32):
            narrow = codes.astype(np.int32, copy=total is None)  # the first may be a view
            self._sums[name] = narrow if total is None else np.add(total, narrow, out=total)
            self._reached[name] = reached
            return
        if total is not None and total.dtype == np.int32:
            self._sums[name] = total.astype(np.int64)
        super()._add(name, array, weight)


_ANY = CodeGrid(0)  # what a code means, groups may differ in

_SEPARATOR = "/"  # between group and array in a state; no group's name has one


class TierSums(WeightedMean):
    """One sum of updates given as codes for each group, in which every client weighs 1.

    Parameters
    ----------
    start : Mapping of str to ndarray
        A model: names and shapes of the arrays.
    names : list of str
        Which of the arrays the updates are of.
    groups : mapping of str to str
        The group of each client.

    Notes
    -----
    A group has no sum before the first of its clients answers, so memory follows the groups that
    answered, and not the clients. Sums are int64, or int32 where that holds them: exact, and the
    same in any order.

    Examples
    --------
    >>> groups = {"0": "left", "1": "left", "2": "right"}
    >>> sums = TierSums({"w": np.zeros(2)}, ["w"], groups)
    >>> for client, code in (("0", 1), ("1", 2), ("2", 4)):
    ...     sums.accumulate(client, {"w": np.full(2, code, np.int32)}, weight=1)
    >>> sums.of("left")["w"], sums.answered("left")
    (array([3, 3], dtype=int32), ['0', '1'])
    """

    def __init__(self, start: Arrays, names: list[str], groups: Mapping[str, str]) -> None:
        self._empty = _NarrowMean(start, _ANY, names)
        super().__init__({})
        self.template = self._empty.template
        self._groups = dict(groups)
        self._means: dict[str, WeightedMean] = {}

    def of(self, group: str) -> dict[str, NDArray[Any]]:
        """Return the sums of a group's codes, by name; empty if nobody of it answered."""
        return self._means[group].sums if group in self._means else {}

    def taken(self, group: str) -> tuple[NDArray[Any], int] | None:
        """Take the sum of a group out, as one vector, with the number of its clients.

        None if nobody of it answered, or it was taken out before.
        """
        mean = self._means.pop(group, None)
        if mean is None:
            return None
        parts = [mean.sums[name].reshape(-1) for name in self.template]
        return parts[0] if len(parts) == 1 else np.concatenate(parts), len(mean.clients)

    def answered(self, group: str) -> list[str]:
        """Return the clients in the sum of a group."""
        return sorted(self._means[group].clients) if group in self._means else []

    def count(self, client_id: str) -> None:
        """Count a client whose answer is not summed here, because only its group may see it.

        Raises
        ------
        ReplyRefusedError
            If it has answered already.
        """
        if client_id in self.clients:
            raise ReplyRefusedError("duplicate", f"client {client_id} has answered already")
        self.weight += 1
        self.clients.add(client_id)

    def accumulate(
        self, client_id: str, arrays: Arrays, *, weight: float, metrics: Metrics | None = None
    ) -> None:
        """Add one client's codes to the sum of its group.

        Raises
        ------
        ReplyRefusedError
            As `EvenMean.accumulate`, and if the client has no group.
        """
        if client_id in self.clients:
            raise ReplyRefusedError("duplicate", f"client {client_id} is already in a sum")
        group = self._group_of(client_id)
        mean = self._mean_of(group)
        mean.accumulate(client_id, arrays, weight=weight)
        self._means[group] = mean  # only now: an answer that is refused leaves no empty sum behind
        self.weight += weight
        self.clients.add(client_id)
        for key, value in (metrics or {}).items():
            self._add_metric(key, np.asarray(value, dtype=np.float64) * weight, weight)

    def merge(self, other: WeightedMean) -> None:
        """Add everything that another accumulator holds.

        Raises
        ------
        ReplyRefusedError
            If a client is in both, or the other one has other arrays.
        """
        if not isinstance(other, TierSums) or other.template != self.template:
            raise ReplyRefusedError("shape", "the two sums have different templates")
        if common := self.clients & other.clients:
            raise ReplyRefusedError("duplicate", f"clients {sorted(common)} are in both sums")
        for group, mean in other._means.items():
            total = self._mean_of(group)
            total.merge(mean)
            self._means[group] = total
        self.weight += other.weight
        self.clients |= other.clients
        self.merge_metrics(other)

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the sums as arrays ``group/name``, and the rest as plain values."""
        _, fields = super().state()
        arrays = {
            f"{group}{_SEPARATOR}{name}": sums
            for group, mean in self._means.items()
            for name, sums in mean.sums.items()
        }
        return arrays, fields

    def from_state(self, arrays: Arrays, fields: Mapping[str, Any]) -> "TierSums":
        """Return the sums of which `state` made the values; they may come from an adversary.

        Raises
        ------
        ReplyRefusedError
            If they are not the state of such sums over these groups.
        """
        sums = copy.copy(self)
        entries = StateFields.read(fields)
        sums._means = {}
        sums._begin_from(entries)
        parts: dict[str, dict[str, Any]] = {}
        for name, array in arrays.items():
            group, _, own = name.partition(_SEPARATOR)
            parts.setdefault(group, {})[own] = array
        members: dict[str, list[str]] = {group: [] for group in parts}
        for client in sorted(sums.clients):
            group = self._group_of(client)
            if group not in members:
                raise ReplyRefusedError("names", f"client {client} is in no sum")
            members[group].append(client)
        for group, clients in members.items():
            own_fields = {"weight": float(len(clients)), "clients": clients}
            sums._means[group] = self._empty.from_state(parts[group], own_fields)
        if entries.weight != len(sums.clients):
            raise ReplyRefusedError(
                "weight", f"{entries.weight} of {len(sums.clients)} replies that weigh 1"
            )
        sums.weight = entries.weight
        return sums

    def finish(self) -> dict[str, NDArray[np.generic]]:
        """Raise an error: only the tree can average the groups' sums."""
        raise TypeError("sums of several groups have no mean of their own")

    def _group_of(self, client_id: str) -> str:
        if client_id not in self._groups:
            raise ReplyRefusedError("unknown client", f"client {client_id} has no group")
        return self._groups[client_id]

    def _mean_of(self, group: str) -> WeightedMean:
        """Return the sum of a group; one of nobody if it has none."""
        if group in self._means:
            return self._means[group]
        return self._empty.from_state({}, {"weight": 0.0, "clients": []})
