"""Accumulates a weighted mean: adds replies as they arrive, merges partial sums, divides.

An accumulator holds one sum however many replies went into it, so the memory of a server does not
grow with the number of clients, and a node that runs many clients can answer with one. What is
accumulated cannot be taken out again, so everything is checked first.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import FlwrPrivacyError
from flwr_privacy.wire.arrays import Arrays, is_finite

__all__ = ["EvenWeights", "Metrics", "ReplyRefusedError", "WeightedMean", "take_weight"]

Metrics = Mapping[str, Any]
"""Numbers, or lists of numbers, by name."""

LARGEST_WEIGHT = 2.0**53
"""Weights lie between the inverse of this and this, or are 0."""

_LARGEST_VALUE = 2.0**900  # times weights and clients this stays below float64's 2**1024
_BLOCK = 1 << 17  # elements: the scratch block of 1 MB stays in the cache
_SCALAR = -1  # length of a metric that is a number and no list


class ReplyRefusedError(FlwrPrivacyError):
    """A reply cannot be averaged; `reason` is the short name under which it is counted.

    With `by_others` what another client said may have led to it: nobody is left out for it.
    """

    def __init__(self, reason: str, detail: str, *, by_others: bool = False) -> None:
        self.reason = reason
        self.by_others = by_others
        super().__init__(f"{reason}: {detail}")


def take_weight(metrics: dict[str, Any], key: str) -> float:
    """Take the weight of a reply out of its metrics.

    Raises
    ------
    ReplyRefusedError
        If it is missing or no single number.

    Examples
    --------
    >>> metrics = {"num-examples": 3, "loss": 0.5}
    >>> take_weight(metrics, "num-examples"), metrics
    (3.0, {'loss': 0.5})
    """
    weight = metrics.pop(key, None)
    if not isinstance(weight, int | float):
        raise ReplyRefusedError("weight", f"metric '{key}' is {weight!r}")
    return float(weight)


class WeightedMean:
    """Mean of named arrays and of metrics, weighted per reply.

    Sums are float64, so the result is the same in any order of folding and merging once it is cast
    back to float32 (up to the last bit, where a sum falls on the edge between two floats).

    Parameters
    ----------
    template : Mapping of str to ndarray
        Names, shapes and dtypes that every reply must have. The mean has the dtypes of the
        template; integers and booleans are rounded to the nearest.

    Examples
    --------
    >>> mean = WeightedMean({"w": np.zeros(2, np.float32)})
    >>> mean.accumulate("a", {"w": np.array([1, 2], np.float32)}, weight=1, metrics={"loss": 4.0})
    >>> mean.accumulate("b", {"w": np.array([3, 6], np.float32)}, weight=3, metrics={"loss": 8.0})
    >>> mean.finish()["w"], mean.metrics(), sorted(mean.clients)
    (array([2.5, 5. ], dtype=float32), {'loss': 7.0}, ['a', 'b'])
    """

    sum_dtype: np.dtype[Any] = np.dtype(np.float64)

    def __init__(self, template: Arrays) -> None:
        self.template = {
            name: (np.shape(array), np.asarray(array).dtype) for name, array in template.items()
        }
        largest = max((math.prod(shape) for shape, _ in self.template.values()), default=0)
        self._scratch = np.empty(min(_BLOCK, largest), self.sum_dtype)
        self._sums: dict[str, NDArray[Any]] = {}
        # Sum and weight, by name and form: who answers first decides nothing for the others.
        self._metrics: dict[tuple[str, tuple[int, ...]], tuple[NDArray[np.float64], float]] = {}
        self.weight = 0.0
        self.clients: set[str] = set()

    def accumulate(
        self, client_id: str, arrays: Arrays, *, weight: float, metrics: Metrics | None = None
    ) -> None:
        """Add one reply.

        Parameters
        ----------
        client_id : str
            Whose reply it is.
        arrays : Mapping of str to ndarray
            As the template; other dtypes are taken if the template's can hold the values.
        weight : float
            Its weight: 0, or from ``1 / LARGEST_WEIGHT`` to ``LARGEST_WEIGHT``.
        metrics : Mapping, optional
            Numbers or lists of numbers. A value that is not finite is left out of that metric's
            mean, and so is a list of another length than the replies of the most weight have.

        Raises
        ------
        ReplyRefusedError
            If the reply is a duplicate, has other arrays than the template, values that are not
            finite, or an invalid weight. The accumulator is then unchanged.
        """
        if client_id in self.clients:
            raise ReplyRefusedError("duplicate", f"client {client_id} is already in the mean")
        self._check_weight(weight)
        for name, array in self._fitting(arrays).items():
            self._add(name, array, weight)
        self.weight += weight
        self.clients.add(client_id)
        for key, value in (metrics or {}).items():
            self._add_metric(key, np.asarray(value, dtype=np.float64) * weight, weight)

    def take(self, client_id: str, arrays: Arrays, metrics: Metrics, weighted_by: str) -> None:
        """Add one reply whose weight is one of its metrics.

        Raises
        ------
        ReplyRefusedError
            As `accumulate`, and if there is no such metric.
        """
        others = dict(metrics)
        weight = take_weight(others, weighted_by)
        self.accumulate(client_id, arrays, weight=weight, metrics=others)

    def merge(self, other: "WeightedMean") -> None:
        """Add everything that another accumulator holds.

        Raises
        ------
        ReplyRefusedError
            If a client is in both, or the templates differ. The accumulator is then unchanged.
        """
        if self.template != other.template:
            raise ReplyRefusedError("shape", "the two means have different templates")
        if common := self.clients & other.clients:
            raise ReplyRefusedError("duplicate", f"clients {sorted(common)} are in both means")
        self._check_total(other.weight, len(other.clients))
        for name, array in other._sums.items():
            self._add(name, array, 1.0)
        self.weight += other.weight
        self.clients |= other.clients
        self.merge_metrics(other)

    def finish(self) -> dict[str, NDArray[np.generic]]:
        """Return the mean, with the template's dtypes.

        Raises
        ------
        ZeroDivisionError
            If all weights are zero.
        """
        if self.weight == 0:
            raise ZeroDivisionError("the weights of all replies are zero")
        mean: dict[str, NDArray[np.generic]] = {}
        for name, (shape, dtype) in self.template.items():
            exact = self._sums[name] / self.weight
            if not np.issubdtype(dtype, np.inexact):
                exact = np.clip(np.rint(exact), *_integer_bounds(dtype))
            mean[name] = exact.astype(dtype).reshape(shape)
        return mean

    @property
    def sums(self) -> dict[str, NDArray[Any]]:
        """The weighted sums, by name; empty before the first reply."""
        return dict(self._sums)

    def metrics(self) -> dict[str, Any]:
        """Return the weighted mean of each metric over the replies that had it."""
        heaviest: dict[str, tuple[float, tuple[int, ...]]] = {}
        for (key, shape), (_, weight) in self._metrics.items():
            if weight > 0:
                heaviest[key] = max(heaviest.get(key, (0.0, ())), (weight, shape))
        means = {}
        for key, (weight, shape) in heaviest.items():
            means[key] = (self._metrics[key, shape][0] / weight).tolist()
        return means

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the sums as arrays and the rest as plain values, for a message or a file."""
        numbers = [sums for sums, _ in self._metrics.values()]
        fields = {
            "weight": self.weight,
            "clients": sorted(self.clients),
            "metric-keys": [key for key, _ in self._metrics],
            "metric-weights": [weight for _, weight in self._metrics.values()],
            "metric-lengths": [len(sums) if sums.ndim else _SCALAR for sums in numbers],
            "metric-sums": [float(x) for sums in numbers for x in np.atleast_1d(sums)],
        }
        return dict(self._sums), fields

    def from_state(self, arrays: Arrays, fields: Mapping[str, Any]) -> "WeightedMean":
        """Return an accumulator over the same template, from the result of `state`.

        Raises
        ------
        ReplyRefusedError
            If it is not the state of a mean over this template; it may come from an adversary.
        """
        mean = copy.copy(self)  # of the same class, over the same template
        entries = StateFields.read(fields)
        mean._begin_from(entries)
        if not mean.clients and (arrays or entries.weight):
            raise ReplyRefusedError("malformed", "a sum over no clients")
        if mean.clients:
            mean._check_total(entries.weight, len(mean.clients))
            for name, array in mean._fitting(arrays, dtype=self.sum_dtype).items():
                _check_sum(name, array, entries.weight, self.template[name][1])
                mean._add(name, array, 1.0)
        mean.weight = entries.weight
        return mean

    def _begin_from(self, entries: "StateFields") -> None:
        """Reset everything but the template; load clients and metrics from a state."""
        self._sums, self._metrics, self.weight = {}, {}, 0.0
        self.clients = set(entries.clients)
        for key, sums, weight in entries.metrics:
            self._add_metric(key, sums, weight)

    def merge_metrics(self, other: "WeightedMean") -> None:
        """Add the metrics that another accumulator holds, and nothing else."""
        for (key, _), (numbers, weight) in other._metrics.items():
            self._add_metric(key, numbers, weight)

    def _check_weight(self, weight: float) -> None:
        if weight != 0 and not 1 / LARGEST_WEIGHT <= weight <= LARGEST_WEIGHT:
            raise ReplyRefusedError("weight", f"{weight} is neither 0 nor between 2**-53 and 2**53")

    def _check_total(self, weight: float, clients: int) -> None:
        """Refuse an impossible weight of a sum over some clients."""
        self._check_weight(weight / max(1, clients))

    def _fitting(
        self, arrays: Arrays, dtype: np.dtype[np.generic] | None = None
    ) -> dict[str, NDArray[np.generic]]:
        """Return the arrays in the template's dtypes (or `dtype`), or refuse them."""
        if set(arrays) != set(self.template):
            unexpected = sorted(set(arrays) ^ set(self.template))
            raise ReplyRefusedError("names", f"arrays {unexpected} are missing or not known")
        return {
            name: _fitted(name, array, self.template[name][0], dtype or self.template[name][1])
            for name, array in arrays.items()
        }

    def _add(self, name: str, array: NDArray[np.generic], weight: float) -> None:
        if weight == 1 and array.dtype == self.sum_dtype:  # a sum, most of all
            if name in self._sums:
                self._sums[name] += array
            else:
                self._sums[name] = np.array(array, order="C")  # it may be a view into a message
            return
        if name not in self._sums:
            self._sums[name] = np.zeros(np.shape(array), self.sum_dtype)
        total, values = self._sums[name].reshape(-1), array.reshape(-1)
        for start in range(0, values.size, _BLOCK):
            block = values[start : start + _BLOCK]
            product = self._scratch[: block.size]
            # Not multiply(..., dtype=float64): that casts through NumPy's small buffer, slowly.
            np.copyto(product, block, casting="unsafe")
            if weight != 1:
                product *= self.sum_dtype.type(weight)
            total[start : start + _BLOCK] += product

    def _add_metric(self, key: str, numbers: NDArray[np.float64], weight: float) -> None:
        if np.isfinite(numbers).all():
            sums, weights = self._metrics.get((key, numbers.shape), (np.zeros_like(numbers), 0.0))
            self._metrics[key, numbers.shape] = (sums + numbers, weights + weight)


class EvenWeights(WeightedMean):
    """A mean in which every reply weighs 1, so that its weighted sums are plain sums.

    Examples
    --------
    >>> mean = EvenWeights({"w": np.zeros(1)})
    >>> mean.accumulate("a", {"w": np.array([1.0])}, weight=3)
    Traceback (most recent call last):
    ...
    flwr_privacy.privacy.averaging.ReplyRefusedError: weight: 3: every client weighs 1
    """

    def accumulate(
        self, client_id: str, arrays: Arrays, *, weight: float, metrics: Metrics | None = None
    ) -> None:
        """Add one reply.

        Raises
        ------
        ReplyRefusedError
            As `WeightedMean.accumulate`, and if it does not weigh 1.
        """
        if weight != 1:
            raise ReplyRefusedError("weight", f"{weight}: every client weighs 1")
        super().accumulate(client_id, arrays, weight=weight, metrics=metrics)

    def _check_total(self, weight: float, clients: int) -> None:
        if weight != clients:
            raise ReplyRefusedError("weight", f"{weight} of {clients} replies that weigh 1")
        super()._check_total(weight, clients)


class StateFields(NamedTuple):
    """The plain part of a state, with the types it must have."""

    weight: float
    clients: list[str]
    metrics: list[tuple[str, NDArray[np.float64], float]]

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "StateFields":
        weight = fields.get("weight")
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ReplyRefusedError("malformed", "the entry 'weight' is no finite number")
        clients = _list_of(fields, "clients", str)
        keys = _list_of(fields, "metric-keys", str)
        weights = _list_of(fields, "metric-weights", float)
        lengths = _list_of(fields, "metric-lengths", int)
        numbers = _list_of(fields, "metric-sums", float)
        sizes = [1 if length == _SCALAR else length for length in lengths]
        if not (
            len(keys) == len(weights) == len(lengths)
            and min(sizes, default=0) >= 0
            and sum(sizes) == len(numbers)
            and all(0 <= w <= weight for w in weights)
        ):
            raise ReplyRefusedError("malformed", "metric entries that do not fit each other")
        metrics = []
        ends = np.cumsum(sizes, dtype=np.int64)
        for key, metric_weight, length, size, end in zip(
            keys, weights, lengths, sizes, ends, strict=True
        ):
            part = np.array(numbers[end - size : end], np.float64)
            metrics.append((key, part[0] if length == _SCALAR else part, metric_weight))
        return cls(float(weight), clients, metrics)


def _list_of(fields: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = fields.get(key, [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ReplyRefusedError("malformed", f"the entry '{key}' is no list of {kind.__name__}")
    return values


def _check_sum(
    name: str, sums: NDArray[np.generic], weight: float, dtype: np.dtype[np.generic]
) -> None:
    """Refuse a sum that replies with the template's dtype cannot produce."""
    if np.issubdtype(dtype, np.inexact):
        largest = min(float(np.finfo(dtype.name).max), _LARGEST_VALUE)
    else:
        largest = max(map(abs, _integer_bounds(dtype)))
    extreme = max(float(sums.max(initial=0)), -float(sums.min(initial=0)))
    if extreme > weight * largest * (1 + 1e-9):
        raise ReplyRefusedError("range", f"the sum of '{name}' is too large for its weight")


def _integer_bounds(dtype: np.dtype[np.generic]) -> tuple[float, float]:
    """Return the least and the largest float64 that a cast to an integer dtype can hold."""
    if dtype == np.bool_:
        return 0.0, 1.0
    bounds = np.iinfo(np.dtype(dtype).name)
    largest = float(bounds.max)
    return float(bounds.min), largest if int(largest) <= bounds.max else np.nextafter(largest, 0)


def _fitted(
    name: str, array: NDArray[np.generic], shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> NDArray[np.generic]:
    if array.shape != shape:
        raise ReplyRefusedError("shape", f"array '{name}' has shape {array.shape}, not {shape}")
    if array.dtype != dtype:
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ReplyRefusedError("dtype", f"array '{name}' is {array.dtype}, not {dtype}")
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        if not np.issubdtype(dtype, np.inexact) and not np.array_equal(cast, array):
            raise ReplyRefusedError("range", f"array '{name}' has values beyond {dtype}")
        array = cast
    if not is_finite(array):
        raise ReplyRefusedError("not finite", f"array '{name}' has NaN or infinity")
    wide = array.dtype.itemsize > 4 and np.issubdtype(dtype, np.inexact) and array.size > 0
    if wide and np.abs(array).max() > _LARGEST_VALUE:
        raise ReplyRefusedError("range", f"array '{name}' has values beyond 2**900")
    return array
