"""A client's columns of the data, as vertical schemes compute with them and tell of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients.node.data_cache import DataCache
from flwr_privacy.clients.node.dispatch import discreet
from flwr_privacy.errors import DataError, ProtocolError
from flwr_privacy.fedvs.data import VerticalData, ids_digest
from flwr_privacy.fedvs.network import expand
from flwr_privacy.fedvs.quantisation import round_half_up
from flwr_privacy.fedvs.rows import order
from flwr_privacy.wire.identity import derive_seed
from flwr_privacy.wire.message import METRICS, Fields

__all__ = ["Expanded", "GivenData", "Owned", "common_order", "told_of"]

GivenData = VerticalData | Callable[[], VerticalData]
"""A client's data, or a function without arguments that returns them."""

Array = NDArray[np.float64]

_prepared: "DataCache[Expanded]" = DataCache()


def common_order(rows: int, experiment_id: str, part: str) -> NDArray[np.int64]:
    """Return the order of a part's rows that all parties of an experiment use."""
    return order(rows, derive_seed(experiment_id, "vertical rows", part))


@dataclass(frozen=True, eq=False, repr=False)
class Expanded:
    """The powers of a client's columns, in the common order.

    Parameters
    ----------
    parts : mapping of str to (rows, e) float64
        The rows of each part.
    """

    parts: Mapping[str, Array]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def rows(self, part: str, places: NDArray[np.int64]) -> Array:
        """Return the rows at some places.

        Raises
        ------
        ProtocolError
            If the client has no such part.
        DataError
            If it has not so many rows.
        """
        if part not in self.parts:
            raise ProtocolError(f"the client has no part '{part[:64]}'")
        rows = self.parts[part]
        if places.size and not 0 <= places.min() <= places.max() < len(rows):
            raise DataError(f"the client's part '{part}' has {len(rows)} rows: there are others")
        return rows[places]


@dataclass(frozen=True, eq=False, repr=False)
class Owned:
    """A client's own data.

    Parameters
    ----------
    given : VerticalData or callable
        The data.
    place : str
        A name that no other client or experiment has: where the node keeps what is of it.
    experiment_id : str
        For which experiment; the order of the rows follows from it.
    """

    given: GivenData
    place: str
    experiment_id: str

    def raw(self) -> VerticalData:
        """Return the data as the user gave them.

        Raises
        ------
        DataError
            If they are none.
        ProtocolError
            If the user's function fails; the log of the node says how.
        """
        made = discreet(self.given, "data function")() if callable(self.given) else self.given
        if not isinstance(made, VerticalData):
            raise DataError(f"the client's data are of type {type(made).__name__}: VerticalData")
        return made

    def expanded(
        self,
        *,
        order: int,
        bias: bool,
        x_max: float,
        data_bits: int | None = None,
        generation: str = "",
    ) -> Expanded:
        """Return the powers of the columns, rounded to a grid where one is given.

        They are remembered for a generation: the data may be others in the next one.

        Raises
        ------
        DataError
            If a value lies beyond `x_max`; no value is told.
        """
        settings = (order, bias, x_max, data_bits)
        key = (self.place, generation, *settings)
        return _prepared.get(key, partial(self._expand, *settings))

    def _expand(self, degree: int, bias: bool, x_max: float, data_bits: int | None) -> Expanded:
        parts = {}
        for name, raw in self.raw().parts.items():
            powers: Array = expand(raw, degree, bias=bias)
            if np.abs(powers).max() > x_max:
                raise DataError(
                    f"the part '{name}' has values beyond x_max = {x_max:g}, or powers of them: "
                    "scale the features before they are given to the client"
                )
            if data_bits is not None:
                powers = np.ldexp(round_half_up(np.ldexp(powers, data_bits)), -data_bits)
            parts[name] = powers[common_order(len(powers), self.experiment_id, name)]
        return Expanded(parts)


def told_of(owned: Owned) -> Fields:
    """Return a client's description of its data: sizes, and a hash of the order."""
    data = owned.raw()
    return {
        METRICS: {"num-examples": 1},
        "columns": data.columns,
        "parts": list(data.parts),
        "rows": [len(rows) for rows in data.parts.values()],
        "ids": [ids_digest(data.ids.get(name)) for name in data.parts],
    }
