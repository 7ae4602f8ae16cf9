"""The weighted mean as an accumulator: fold replies in as they come, merge, finish.

An accumulator holds one sum however many replies went into it, so the memory of a server does not
grow with the number of clients, and a node that plays many clients can answer with one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import Arrays, is_finite
from .errors import FlwrPrivacyError

__all__ = ["Metrics", "ReplyRefusedError", "WeightedMean"]

Metrics = Mapping[str, Any]
"""Numbers, or lists of numbers, by name."""

_BLOCK = 1 << 14  # elements: the scratch block stays in the fastest cache


class ReplyRefusedError(FlwrPrivacyError):
    """A reply is not averaged; `reason` is the short name under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}")


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
    >>> mean.fold("a", {"w": np.array([1, 2], np.float32)}, weight=1, metrics={"loss": 4.0})
    >>> mean.fold("b", {"w": np.array([3, 6], np.float32)}, weight=3, metrics={"loss": 8.0})
    >>> mean.finish()["w"], mean.metrics(), sorted(mean.clients)
    (array([2.5, 5. ], dtype=float32), {'loss': 7.0}, ['a', 'b'])
    """

    def __init__(self, template: Arrays) -> None:
        self._template = {
            name: (np.shape(array), np.asarray(array).dtype) for name, array in template.items()
        }
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._metric_sums: dict[str, NDArray[np.float64]] = {}
        self._metric_weights: dict[str, float] = {}
        self.weight = 0.0
        self.clients: set[str] = set()

    def fold(
        self, client_id: str, arrays: Arrays, *, weight: float, metrics: Metrics | None = None
    ) -> None:
        """Add one reply.

        Parameters
        ----------
        client_id : str
            Whose reply it is.
        arrays : Mapping of str to ndarray
            As the template.
        weight : float
            Its weight, finite and not negative.
        metrics : Mapping, optional
            Numbers or lists of numbers; values that are not finite are left out of their mean.

        Raises
        ------
        ReplyRefusedError
            If the reply is a duplicate, has other arrays than the template, values that are not
            finite, or an invalid weight. The accumulator is then unchanged.
        """
        if client_id in self.clients:
            raise ReplyRefusedError("duplicate", f"client {client_id} is already in the mean")
        self._check(arrays, weight)
        for name, array in arrays.items():
            self._add(name, array, weight)
        self.weight += weight
        self.clients.add(client_id)
        for key, value in (metrics or {}).items():
            numbers = np.asarray(value, dtype=np.float64)
            if np.isfinite(numbers).all():
                self._add_metric(key, numbers * weight, weight)

    def merge(self, other: "WeightedMean") -> None:
        """Add everything that another accumulator holds.

        Raises
        ------
        ReplyRefusedError
            If a client is in both, or the templates differ.
        """
        if self._template != other._template:
            raise ReplyRefusedError("shape", "the two means have different templates")
        if common := self.clients & other.clients:
            raise ReplyRefusedError("duplicate", f"clients {sorted(common)} are in both means")
        for name, array in other._sums.items():
            self._add(name, array, 1.0)
        self.weight += other.weight
        self.clients |= other.clients
        for key, numbers in other._metric_sums.items():
            self._add_metric(key, numbers, other._metric_weights[key])

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
        for name, (shape, dtype) in self._template.items():
            exact = self._sums[name] / self.weight
            if not np.issubdtype(dtype, np.inexact):
                exact = np.rint(exact)
            mean[name] = exact.astype(dtype).reshape(shape)
        return mean

    def metrics(self) -> dict[str, Any]:
        """Return the weighted mean of each metric over the replies that had it."""
        return {
            key: (numbers / self._metric_weights[key]).tolist()
            for key, numbers in self._metric_sums.items()
            if self._metric_weights[key] > 0
        }

    def state(self) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
        """Return the sums as arrays and the rest as plain values, for a message or a file."""
        fields: dict[str, Any] = {
            "weight": self.weight,
            "clients": sorted(self.clients),
            "metric-keys": list(self._metric_sums),
            "metric-weights": [self._metric_weights[key] for key in self._metric_sums],
        }
        arrays = dict(self._sums)
        arrays.update({f"metric/{key}": value for key, value in self._metric_sums.items()})
        return arrays, fields

    @classmethod
    def from_state(
        cls, template: Arrays, arrays: Arrays, fields: Mapping[str, Any]
    ) -> "WeightedMean":
        """Build an accumulator from what `state` returned.

        Raises
        ------
        ReplyRefusedError
            If names, shapes or values are not those of a mean over this template.
        """
        mean = cls(template)
        clients: Iterable[str] = fields["clients"]
        mean.clients = set(clients)
        sums = {name: array for name, array in arrays.items() if name in mean._template}
        if mean.clients:
            mean._check(sums, float(fields["weight"]), dtype=np.dtype(np.float64))
        for name, array in sums.items():
            mean._add(name, array, 1.0)
        mean.weight = float(fields["weight"])
        for key, weight in zip(fields["metric-keys"], fields["metric-weights"], strict=True):
            mean._add_metric(key, np.asarray(arrays[f"metric/{key}"], np.float64), float(weight))
        return mean

    def _check(
        self, arrays: Arrays, weight: float, dtype: np.dtype[np.generic] | None = None
    ) -> None:
        if not np.isfinite(weight) or weight < 0:
            raise ReplyRefusedError("weight", f"{weight} is not a finite number of at least 0")
        if set(arrays) != set(self._template):
            unexpected = sorted(set(arrays) ^ set(self._template))
            raise ReplyRefusedError("names", f"arrays {unexpected} are missing or not known")
        for name, array in arrays.items():
            shape, template_dtype = self._template[name]
            if array.shape != shape:
                raise ReplyRefusedError(
                    "shape", f"array '{name}' has shape {array.shape}, not {shape}"
                )
            if not np.can_cast(array.dtype, dtype or template_dtype, "same_kind"):
                raise ReplyRefusedError(
                    "dtype", f"array '{name}' is {array.dtype}, not {dtype or template_dtype}"
                )
            if not is_finite(array):
                raise ReplyRefusedError("not finite", f"array '{name}' has NaN or infinity")

    def _add(self, name: str, array: NDArray[np.generic], weight: float) -> None:
        if name not in self._sums:
            # Zeros, then add: the first reply may be a view into a message.
            self._sums[name] = np.zeros(np.shape(array), np.float64)
        total, values = self._sums[name].reshape(-1), array.reshape(-1)
        scratch = np.empty(min(_BLOCK, values.size), np.float64)
        for start in range(0, values.size, _BLOCK):
            block = values[start : start + _BLOCK]
            product = scratch[: block.size]
            np.multiply(block, weight, out=product, dtype=np.float64, casting="unsafe")
            total[start : start + _BLOCK] += product

    def _add_metric(self, key: str, numbers: NDArray[np.float64], weight: float) -> None:
        if key not in self._metric_sums:
            self._metric_sums[key] = np.zeros_like(numbers)
            self._metric_weights[key] = 0.0
        elif self._metric_sums[key].shape != numbers.shape:
            raise ReplyRefusedError("metrics", f"'{key}' has another length than before")
        self._metric_sums[key] = self._metric_sums[key] + numbers
        self._metric_weights[key] += weight
