"""Canaries of an audit at user level: what a training returns, far beyond what may leave the node.

Each kind is a mistake that clipping can make: to clip arrays one by one, to leave out a number or
an array of integers, to let NaN through, to clip at another norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import check_choice
from flwr_privacy.wire.identity import stream

from .observed import Vector, clipped

__all__ = ["COUNTER", "KINDS", "MODEL", "Canary", "canary"]

MODEL: Mapping[str, NDArray[Any]] = {
    "weight": np.zeros((24, 40)),
    "bias": np.zeros(40),
    "scale": np.zeros(()),
    "steps": np.array(3),
}
"""The model of an audit: several arrays, a number (0-d), and a counter of integers."""

COUNTER = "steps"
"""Its array of integers, of which nothing may leave."""

_FAR = 1e6  # lengths of canaries, over the clipping norm
_LENGTHS = {
    "tenfold": 10.0,  # where clipping is missing, what is farther away has no code
    "each array": 3**0.5 * 0.99,
    "within": 0.5,
    "NaN": 50.0,
    "infinite": 50.0,
    "counter": 0.0,
}
_FLOATS = [name for name in MODEL if name != COUNTER]
_SIZES = [int(np.size(MODEL[name])) for name in _FLOATS]
_DIMENSION = sum(_SIZES)

KINDS = (
    "whole",
    "tenfold",
    "opposite",
    "one array",
    "a number",
    "each array",
    "within",
    "NaN",
    "infinite",
    "counter",
    "fails",
)
"""Kinds of canaries."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Canary:
    """What a training returns, and what may be seen of it.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    trained : dict of str to ndarray, optional
        The model that it returns, from zeros; None: it raises an error.
    expected : (d,) float64
        The update, clipped.
    direction : (d,) float64
        Direction of length 1 in which it pulls.
    """

    kind: str
    trained: dict[str, NDArray[Any]] | None
    expected: Vector
    direction: Vector

    @property
    def fails(self) -> bool:
        """Whether nothing of the training may be used."""
        return self.kind in ("NaN", "infinite", "fails")

    @property
    def reach(self) -> float:
        """How far it may move a release along its direction."""
        return float(self.expected @ self.direction)

    def after(self, start: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the model after the training that began with `start`.

        Raises
        ------
        RuntimeError
            If it is one that fails.
        """
        if self.trained is None:
            raise RuntimeError("this training fails on purpose")
        with np.errstate(invalid="ignore"):
            return {name: start[name] + moved for name, moved in self.trained.items()}


def canary(kind: str, norm: float, *place: str | int) -> Canary:
    """Return a canary.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    norm : float
        Clipping norm.
    *place : str or int
        Where its draws come from: the same place is the same canary.

    Raises
    ------
    InvalidParameterError
        If there is no such kind.
    """
    check_choice("kind", kind, KINDS)
    draws = stream(0, "canary", *place)
    direction = draws.normal(size=_DIMENSION)
    ends = np.cumsum(_SIZES)
    if kind == "one array":
        direction[: ends[0]] = direction[ends[1] :] = 0.0
    if kind == "a number":
        direction[: ends[1]] = 0.0
    if kind == "each array":  # of which none is too long by itself
        for part in np.split(direction, ends[:-1]):
            part /= np.linalg.norm(part)
    direction /= np.linalg.norm(direction)
    length = _LENGTHS.get(kind, _FAR) * norm
    update = direction * (-length if kind == "opposite" else length)
    if kind == "NaN":
        update[0] = np.nan
    if kind == "infinite":
        update[-1] = np.inf
    if kind == "opposite":
        direction = -direction
    expected = np.zeros(_DIMENSION) if kind == "fails" else clipped(update, norm)
    trained = {
        name: part.reshape(MODEL[name].shape)
        for name, part in zip(_FLOATS, np.split(update, ends[:-1]), strict=True)
    }
    trained[COUNTER] = np.array(10**6 if kind == "counter" else 0)
    return Canary(
        kind=kind,
        trained=None if kind == "fails" else trained,
        expected=expected,
        direction=direction,
    )
