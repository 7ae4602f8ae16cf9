"""Recovers records from an update: divides the first layer's rows by their biases.

If a network begins with a linear layer, ``z = W x + b``, the gradients of one record at this layer
are ``db``, that of its outputs, and ``dW[i] = db[i] x``. So ``x = dW[i] / db[i]`` for every unit i
with a signal, whatever comes after the layer: an upload gives its record away, to rounding. Step
size, weight and number of plain gradient steps fall out of the quotient. Of several records, of one
client or of a sum over clients, it is a mixture, ``sum_k db_k[i] x_k / sum_k db_k[i]``: near to a
record that dominates a unit, and equal to it where the unit is active for no other one, as behind a
ReLU.

This is the simplest attack of its kind. That it finds a record proves a leak; that it finds none
proves nothing: the mixtures can be separated further, and the rows of ``dW`` span a space in which
all records lie as long as there are fewer of them than units.

Sources: Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption",
IEEE TIFS 2018, section III; Geiping et al., "Inverting Gradients", NeurIPS 2020, proposition 3.1.
For the separation of mixtures: Kariyappa et al., "Cocktail Party Attack", ICML 2023.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.wire.arrays import is_finite

__all__ = ["Matches", "Recovery", "best_matches", "invert_linear"]

Vectors = NDArray[np.float64]


def invert_linear(
    weight_update: ArrayLike, bias_update: ArrayLike, *, signal: float = 1e-3
) -> Vectors:
    """Return what each unit of a network's first layer says of the records behind an update.

    Parameters
    ----------
    weight_update : array_like, shape (units, features)
        Update of the layer's weight, in any unit: a gradient, trained minus start, codes on a grid.
    bias_update : array_like, shape (units,)
        Update of its bias, in the same unit.
    signal : float, default 1e-3
        A unit is left out if its bias moved less than this share of the largest: rounding would
        speak there and not the records.

    Returns
    -------
    ndarray of float64, shape (candidates, features)
        A candidate for each unit with a signal; none where no bias moved.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, a value is not finite, or `signal` is not from 0 to 1.

    Examples
    --------
    >>> record, gradient_of_outputs = np.array([0.5, 2.0]), np.array([0.1, -0.3, 0.0])
    >>> invert_linear(np.outer(gradient_of_outputs, record), gradient_of_outputs)
    array([[0.5, 2. ],
           [0.5, 2. ]])
    """
    check_number("signal", signal, minimum=0, maximum=1)
    bias = _finite("bias_update", bias_update, axes=1)
    weight = _finite("weight_update", weight_update, axes=2)
    if len(weight) != len(bias):
        raise InvalidParameterError(
            "weight_update", weight.shape, f"one row for each of {len(bias)} units"
        )
    moved = np.abs(bias)
    heard = (moved > 0) & (moved >= signal * moved.max(initial=0.0))
    candidates: Vectors = weight[heard] / bias[heard, None]
    return candidates


@dataclass(frozen=True, kw_only=True, eq=False)
class Matches:
    """The candidate nearest to each record, chosen by somebody who knows the records.

    Parameters
    ----------
    similarities : ndarray, shape (records,)
        Absolute cosine similarity, from 0 to 1; 0 where there are no candidates.
    found : ndarray, shape (records, features)
        The candidate as the attack returned it; what was known where there are none.
    """

    similarities: Vectors
    found: Vectors


def best_matches(candidates: ArrayLike, records: ArrayLike, *, known: ArrayLike = 0.0) -> Matches:
    """Compare an attack's candidates with the truth.

    Parameters
    ----------
    candidates : array_like, shape (candidates, features)
        What the attack returned, in the scale of the records; there may be none.
    records : array_like, shape (records, features)
        The truth.
    known : array_like, shape (features,), default 0.0
        What is known of every record beforehand, e.g. the mean of public ones. It is taken off
        both sides: to look like any record is no similarity.

    Returns
    -------
    Matches
        For each record the candidate with the largest absolute cosine similarity: a record is as
        readable with its sign changed.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.

    Examples
    --------
    >>> records = [[1.0, 1.0], [3.0, 0.0]]
    >>> best_matches([[0.0, 2.0], [-1.0, -1.0]], records).similarities.round(3)
    array([1.   , 0.707])
    """
    truth = _finite("records", records, axes=2)
    offered = _finite("candidates", candidates, axes=2)
    if offered.shape[1] != truth.shape[1]:
        raise InvalidParameterError(
            "candidates", offered.shape, f"{truth.shape[1]} features, as the records have"
        )
    origin = np.broadcast_to(np.asarray(known, np.float64), truth.shape[1:])
    if len(offered) == 0:
        return Matches(
            similarities=np.zeros(len(truth)), found=np.broadcast_to(origin, truth.shape)
        )
    similarities = np.abs(_unit(truth - origin) @ _unit(offered - origin).T)
    return Matches(
        similarities=np.minimum(similarities.max(axis=1), 1.0),
        found=offered[similarities.argmax(axis=1)],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Recovery:
    """How near an attack came to each record, and how near a guess comes.

    Parameters
    ----------
    similarities : ndarray, shape (records,)
        Similarity of each record to the attack's best candidate, see `best_matches`.
    guessed : ndarray, shape (records,)
        The same for guesses of somebody who saw no update, at least as many as candidates: the
        best of many is near to anything.
    level : float, default 0.95
        Similarity from which on a record is recovered.

    Raises
    ------
    InvalidParameterError
        If the two do not fit each other, there are no records, or `level` is not from 0 to 1.

    Examples
    --------
    >>> attack, guess = np.array([0.99, 0.97, 0.5]), np.array([0.6, 0.98, 0.7])
    >>> Recovery(similarities=attack, guessed=guess).recovered
    array([ True, False, False])
    """

    similarities: Vectors
    guessed: Vectors
    level: float = 0.95
    meaning: ClassVar[str] = f"a similarity of {level} or more, and more than by guessing"

    def __post_init__(self) -> None:
        check_number("level", self.level, minimum=0, maximum=1)
        if self.similarities.ndim != 1 or self.similarities.size == 0:
            raise InvalidParameterError(
                "similarities", self.similarities.shape, "one axis, for one record or more"
            )
        if self.guessed.shape != self.similarities.shape:
            raise InvalidParameterError(
                "guessed", self.guessed.shape, f"the shape {self.similarities.shape}"
            )

    @property
    def recovered(self) -> NDArray[np.bool_]:
        """Which records are recovered: up to the level, and better than by guessing."""
        return (self.similarities >= self.level) & (self.similarities > self.guessed)


def _finite(name: str, values: ArrayLike, *, axes: int) -> Vectors:
    array = np.asarray(values, np.float64)
    if array.ndim != axes:
        raise InvalidParameterError(name, array.shape, f"an array with {axes} axes")
    if not is_finite(array):
        raise InvalidParameterError(name, "an array with NaN or infinity", "finite values")
    return array


def _unit(vectors: Vectors) -> Vectors:
    """Return vectors scaled to length 1; those of length 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: Vectors = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return units
