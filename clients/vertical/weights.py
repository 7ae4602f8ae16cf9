"""A client's weights of its columns: drawn once for a training, and moved once by each gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import ProtocolError
from flwr_privacy.fedvs.network import gradient_of, project

__all__ = ["WeightUpdate", "begin_weights", "gradient_in", "move_weights"]

Array = NDArray[np.float64]


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
        If the server goes back otherwise: an old request that comes late has no effect.
    """
    back = update == state["update"] - 1 and session != state.get("session")
    if back and len(state["before"]):
        state |= {"weights": state["before"], "before": [], "update": update}
    if update < state["update"]:
        raise ProtocolError(
            f"a request of gradient {update}, and the client has {state['update']}: it is an old "
            "one, or a training that begins anew under the same experiment_id"
        )
    state["session"] = session
    if update > state["update"]:
        before = state["weights"]
        state |= {"before": before, "weights": moved(before), "update": update}


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
