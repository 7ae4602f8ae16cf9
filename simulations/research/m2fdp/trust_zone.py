"""What the members of a trusted zone of M2FDP learn of each other.

In a zone the averages are not noised, and every member is sent them at every clean event. So the
members are trusted with each other's averages, and this is what these say (`sibling_view`):

- With two members, each has the other's model, but for the rounding of the average.
- With s members of equal weight, each has the average of the other s - 1; k of them that put
  together what they have, that of the other s - k.
- Events at which some members are missing tell the others apart (`separate_members`), as far as the
  updates do not change from event to event.

Without clean events nothing but noised models comes back to a device, whatever the zone; what is
said here then goes for the zone's nodes alone. What the parent outside learns is the matter of
`flwr_privacy.simulations.research.m2fdp.trusted_path`.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
whose adversary is anybody on a link; the members of a zone are left out there.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.wire.arrays import is_finite

__all__ = ["SiblingView", "separate_members", "sibling_view"]

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SiblingView:
    """What members of a zone compute about the other members.

    Parameters
    ----------
    models : ndarray of float64, shape (events, d)
        Average of the models that the others uploaded, at each event.
    updates : ndarray of float64, shape (events, d)
        How far these are from where all of the zone started.
    rounding : ndarray of float64, shape (events,)
        By how much an entry may be wrong because the averages were rounded.
    """

    models: Vector
    updates: Vector
    rounding: Vector

    def errors(self, updates: ArrayLike) -> Vector:
        """Return how wrong it is to take the average update of the others for that of one of them.

        Parameters
        ----------
        updates : array_like, shape (others, events, d)
            Their true updates.

        Returns
        -------
        ndarray of float64, shape (others, events)
            Relative L2 errors. For n others with updates of one length at right angles to each
            other they are ``sqrt(1 - 1 / n)``; 0 where there is only one.

        Raises
        ------
        InvalidParameterError
            If the shape does not fit or an update is zero.
        """
        true = _array("updates", updates, 3)
        if true.shape[1:] != self.updates.shape:
            raise InvalidParameterError(
                "updates", true.shape, f"shape (others, *{self.updates.shape})"
            )
        lengths: Vector = np.linalg.norm(true, axis=2)
        if not lengths.all():
            raise InvalidParameterError("updates", 0.0, "updates that are not zero")
        distances: Vector = np.linalg.norm(true - self.updates, axis=2)
        return distances / lengths


def sibling_view(
    averages: ArrayLike,
    own: ArrayLike,
    *,
    weight: ArrayLike,
    start: ArrayLike = 0.0,
    step: float = 0.0,
) -> SiblingView:
    """Return what a member of a zone, or several of them together, learn of the others.

    Parameters
    ----------
    averages : array_like, shape (events, d)
        The noise-free averages that the zone is sent at its clean events, in order: models, or
        codes of models.
    own : array_like, shape (events, d)
        What the member itself uploaded for each; of several the average by their weights.
    weight : array_like, shape () or (events,)
        Weight of the member in the averages, ``1 / s`` of s equal ones; of several the sum.
        Strictly between 0 and 1.
    start : array_like, shape () or (d,), default 0
        The model that all trained from before the first event; afterwards they train from the
        averages.
    step : float, default 0
        What the averages are rounded to the nearest multiple of; 0 where they are not.

    Raises
    ------
    InvalidParameterError
        If a value is out of range or the shapes do not fit.

    Examples
    --------
    >>> sibling_view([[2.0, 1.0]], [[3.0, 3.0]], weight=0.5).models
    array([[ 1., -1.]])
    """
    seen, mine = _array("averages", averages, 2), _array("own", own, 2)
    if mine.shape != seen.shape:
        raise InvalidParameterError("own", mine.shape, f"shape {seen.shape}, as of averages")
    shares = np.broadcast_to(np.asarray(weight, np.float64), len(seen))
    if not ((shares > 0) & (shares < 1)).all():
        raise InvalidParameterError("weight", weight, "numbers strictly between 0 and 1")
    check_number("step", step, minimum=0)
    before = np.vstack([np.broadcast_to(np.asarray(start, np.float64), seen.shape[1:]), seen[:-1]])
    column = shares[:, None]
    models = (seen - column * mine) / (1 - column)
    return SiblingView(models=models, updates=models - before, rounding=step / 2 / (1 - shares))


def separate_members(updates: ArrayLike, present: ArrayLike) -> tuple[Vector, int]:
    """Return what averages over different members say of each.

    Parameters
    ----------
    updates : array_like, shape (events, d)
        Average update of the others that were there (`SiblingView.updates`).
    present : array_like of bool, shape (events, others)
        Who was there, at each event at least one.

    Returns
    -------
    updates : ndarray of float64, shape (others, d)
        The shortest updates that fit best, taken for equal at all events.
    rank : int
        Rank of the equations. With as many as there are others each is told apart, exactly where
        its updates are equal; if all were always there it is 1 and each gets the average.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or nobody was there.

    Examples
    --------
    >>> found, rank = separate_members([[2.0], [1.0]], [[True, True], [True, False]])
    >>> found.round(9).tolist(), rank
    ([[1.0], [3.0]], 2)
    """
    means, there = _array("updates", updates, 2), np.asarray(present)
    if there.dtype != np.bool_ or there.ndim != 2 or len(there) != len(means):
        raise InvalidParameterError(
            "present", f"{there.dtype} {there.shape}", f"truth values, {len(means)} rows"
        )
    counts = there.sum(axis=1, keepdims=True)
    if not counts.all():
        raise InvalidParameterError("present", 0, "somebody at each event")
    solution, _, rank, _ = np.linalg.lstsq(there / counts, means, rcond=None)
    return solution, int(rank)


def _array(name: str, values: ArrayLike, dimensions: int) -> Vector:
    array = np.asarray(values, np.float64)
    if array.ndim != dimensions or array.size == 0 or not is_finite(array):
        raise InvalidParameterError(
            name, array.shape, f"an array of finite numbers with {dimensions} dimensions"
        )
    return array
