"""The base of vertical client halves, and the client's columns as they compute with them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients.node.data_cache import DataCache
from flwr_privacy.clients.node.dispatch import discreet
from flwr_privacy.errors import DataError, ProtocolError
from flwr_privacy.fedvs.data import VerticalData, ids_digest
from flwr_privacy.fedvs.network import expand, gradient_of, project
from flwr_privacy.fedvs.quantisation import round_half_up
from flwr_privacy.fedvs.rows import order
from flwr_privacy.wire.identity import derive_seed
from flwr_privacy.wire.message import METRICS, Fields

__all__ = [
    "Expanded",
    "GivenData",
    "Owned",
    "WeightUpdate",
    "begin_weights",
    "common_order",
    "gradient_in",
    "move_weights",
    "told_of",
]

logger = logging.getLogger("flwr.privacy")

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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WeightUpdate:
    """A gradient of the loss by which a client moves its weights: FedVS, (8).

    Parameters
    ----------
    rows : (m, e) float64
        The expanded rows of the batch.
    gradient : (m, h) float64
        Gradient with respect to the aggregate of the embeddings.
    divisor : int
        Over how many clients the aggregate is a mean; 1 for a sum.
    learning_rate : float
        Step size.
    w_max : float, optional
        Bound to which the weights are cut.
    """

    rows: Array
    gradient: NDArray[Any]
    divisor: int
    learning_rate: float
    w_max: float | None

    def of(self, weights: Array) -> Array:
        """Return the weights after the step."""
        moved = weights - self.learning_rate * gradient_of(self.rows, self.gradient, self.divisor)
        return moved if self.w_max is None else project(moved, self.w_max)


def begin_weights(
    state: dict[str, Any],
    *,
    training: str,
    update: int,
    shape: tuple[int, int],
    draw: Callable[[], Array],
) -> bool:
    """Draw weights if the state has none of this training; return whether it drew them.

    Parameters
    ----------
    state : dict
        What the client remembers.
    training : str
        Name of the training, which is another one whenever one begins.
    update : int
        Number of gradients of the training up to now.
    shape : tuple of int
        Of the weights.
    draw : callable
        Draws them.
    """
    if state.get("training") == training and np.shape(state["weights"]) == shape:
        return False
    state |= {"training": training, "weights": draw(), "update": update, "before": []}
    return True


def move_weights(
    state: dict[str, Any], *, session: str, update: int, moved: Callable[[Array], Array]
) -> None:
    """Apply a gradient, once.

    A server that was killed may ask again from where its checkpoint is, one gradient back; then the
    weights before the last one are taken up again.

    Parameters
    ----------
    state : dict
        What the client remembers, as `begin_weights` left it.
    session : str
        Name of the server's run: only another one may go back.
    update : int
        Number of gradients, the one to apply included.
    moved : callable
        Returns the weights after the step.

    Raises
    ------
    ProtocolError
        If the server goes back otherwise: an old question that comes late has no effect.
    """
    back = update == state["update"] - 1 and session != state.get("session")
    if back and len(state["before"]):
        state |= {"weights": state["before"], "before": [], "update": update}
    if update < state["update"]:
        raise ProtocolError(
            f"a question of gradient {update}, and the client has {state['update']}: it is an old "
            "one, or a training that begins anew under the same experiment_id"
        )
    state["session"] = session
    if update > state["update"]:
        before = state["weights"]
        state |= {"before": before, "weights": moved(before), "update": update}


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


def gradient_in(
    arrays: Mapping[str, Any], rows: int, embedding: int, *, name: str = "gradient"
) -> NDArray[np.float32]:
    """Return the gradient of a request.

    Raises
    ------
    ProtocolError
        If there is none, or it is no finite float32 of the right shape.
    """
    gradient = np.asarray(arrays[name]) if name in arrays else None
    if (
        gradient is None
        or gradient.shape != (rows, embedding)
        or gradient.dtype != np.float32
        or not np.isfinite(gradient).all()
    ):
        raise ProtocolError(f"the array '{name}' is no finite float32 of {rows} x {embedding}")
    return gradient
