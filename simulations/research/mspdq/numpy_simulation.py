"""Simulates all parties of a mixing in NumPy, with the view of the server.

The same sub-states, codecs and widths as in a training, without a network.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq.codec import Codec
from flwr_privacy.mspdq.intervals import Intervals, Widths, own_width
from flwr_privacy.mspdq.mixing import Mixing, SubStates
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = ["Transcript", "simulate_msp", "simulate_mspdq"]

Vectors = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Transcript:
    """The messages of one learning round without a secure sum, and its result.

    Parameters
    ----------
    heard : ndarray of float64, shape (K + 1, M, d)
        Every client's messages as the server has them: visible sub-states, or decoded values.
    averages : ndarray of float64, shape (K + 1, d)
        W[0], ..., W[K]; the last is the new model.
    widths : ndarray of float64, shape (K, M)
        Widths of the intervals of messages 1 to K; zeros where nothing was rounded.
    saturated : int
        Values that lay outside of their interval, over all messages.
    states : SubStates
        The clients' sub-states at the end, shape (M, d).
    """

    heard: Vectors
    averages: Vectors
    widths: Vectors
    saturated: int
    states: SubStates


def simulate_msp(
    models: Vectors, visible: Vectors, mixing: Mixing, random: SecureRandom
) -> Transcript:
    """Mix models by MSP, section 3 of the paper, equations (3) to (6).

    Parameters
    ----------
    models : ndarray of float64, shape (M, d)
        The trained models, one for each draw.
    visible : ndarray of float64, shape (M, d)
        Their first visible sub-states.
    mixing : Mixing
        The mixing.
    random : SecureRandom
        For random couplings.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit.

    Examples
    --------
    >>> models, visible = np.array([[1.0], [3.0]]), np.array([[0.5], [4.0]])
    >>> seen = simulate_msp(models, visible, Mixing(gamma=0.1, rounds=3), SecureRandom())
    >>> seen.averages[:, 0].round(12)
    array([2.25 , 2.2  , 2.16 , 2.128])
    """
    states = _split(models, visible, mixing)
    heard, averages = [states.visible.copy()], [visible.mean(axis=0)]
    for k in range(mixing.rounds):
        _step(states, averages[-1], heard[-1], mixing, k, random)
        heard.append(states.visible.copy())
        averages.append(heard[-1].mean(axis=0))
    return Transcript(
        heard=np.array(heard),
        averages=np.array(averages),
        widths=np.zeros((mixing.rounds, len(models))),
        saturated=0,
        states=states,
    )


def simulate_mspdq(
    models: Vectors,
    start: Vectors,
    mixing: Mixing,
    intervals: Intervals,
    levels: int,
    random: SecureRandom,
) -> Transcript:
    """Mix models by MSPDQ, equations (20) to (22).

    Parameters
    ----------
    models : ndarray of float64, shape (M, d)
        The trained models, one for each draw.
    start : ndarray of float64, shape (M, d)
        The decoded first messages: the previous model for all (``global``), one client's split,
        rounded, for all (``reference``), or each one's own split, rounded (``independent``).
    mixing : Mixing
        The mixing.
    intervals : Intervals
        The rule of the widths.
    levels : int
        Number of knobs.
    random : SecureRandom
        For the rounding, and for random couplings.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, or a value leaves all bounds.
    """
    states = _split(models, start, mixing)
    codecs = [Codec(row, levels) for row in start]
    heard, averages = [np.array(start)], [start.mean(axis=0)]
    apart = float(np.abs(start - averages[0]).max())
    # A server that decides on no widths keeps none.
    schedule = None if intervals.rule == "self" else Widths(intervals, mixing, levels, apart)
    widths, saturated = np.zeros((mixing.rounds, len(models))), 0
    for k in range(mixing.rounds):
        scalars = [intervals.scalar(gap) for gap in states.gap(weight=mixing.weight)]
        if schedule is not None:
            widths[k] = schedule.next(scalars, [1] * len(codecs))
        _step(states, averages[-1], heard[-1], mixing, k, random)
        for i, codec in enumerate(codecs):
            if schedule is None:
                widths[k, i] = own_width(states.visible[i], codec.value)
            saturated += codec.encode(states.visible[i], float(widths[k, i]), random)[1]
        heard.append(np.array([codec.value for codec in codecs]))
        averages.append(heard[-1].mean(axis=0))
    return Transcript(
        heard=np.array(heard),
        averages=np.array(averages),
        widths=widths,
        saturated=saturated,
        states=states,
    )


def _split(models: Vectors, visible: Vectors, mixing: Mixing) -> SubStates:
    if models.ndim != 2 or models.shape != visible.shape or 0 in models.shape:
        raise InvalidParameterError(
            "visible", visible.shape, f"the shape {models.shape} of the models, two axes"
        )
    return SubStates.split(models, visible, weight=mixing.weight)


def _step(
    states: SubStates,
    average: Vectors,
    heard: Vectors,
    mixing: Mixing,
    k: int,
    random: SecureRandom,
) -> None:
    gains = np.array([[mixing.gain(k, random)] for _ in heard])
    states.step(average, heard, kappa=mixing.kappa, gain=gains, weight=mixing.weight)
