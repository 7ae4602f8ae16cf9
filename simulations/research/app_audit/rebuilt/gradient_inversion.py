"""Gradient inversion: searches for inputs whose gradient points where an update points.

The label comes from the last layer's update. Two losses are tried. The *squared* one is the
distance of the gradient from the update over the learning rate, which must be known; of a single
record it is, since update and model together give the inputs of the last layer, with them the
model's answer, and with it the gradient that the update is a multiple of (`learning_rate_of`). The
*cosine* one asks for the direction alone, and stands several local steps, momentum and clipping
better. Neither has a prior: they know nothing of what records look like.

Sources: Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020; Geiping et al.,
"Inverting Gradients", NeurIPS 2020, section 3 (the cosine).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from flwr_privacy.clients.torch.computing import one_thread
from flwr_privacy.errors import check_integer
from flwr_privacy.simulations.research.attacks.gradient_matching import (
    MatchingLoss,
    match_gradient,
)

from .networks import record_losses

__all__ = ["Found", "cosine_loss", "descend", "learning_rate_of", "search"]

Vectors = NDArray[np.float64]

ITERATIONS = 300
"""Steps of a search from one start, by L-BFGS."""

STEPS = 1024
"""Steps by signs."""

_STEP = 0.1
_DECAYS = 3 / 8, 5 / 8, 7 / 8  # shares of the way after which steps are a tenth
_MOMENTS = 0.9, 0.999
_PATIENCE = 1.2  # times the planned time, after which the search is broken off
_TRIALS = 4  # evaluations by which the time of one is measured


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What a search found.

    Parameters
    ----------
    records : ndarray of float64
        The inputs of least loss.
    loss : float
        Their loss.
    starts : int
        How many searches were begun.
    whole : bool
        Whether all of them ended by themselves; otherwise time ended the last one.
    """

    records: Vectors
    loss: float
    starts: int
    whole: bool


def learning_rate_of(
    weight: ArrayLike, bias: ArrayLike, weight_change: ArrayLike, bias_change: ArrayLike, label: int
) -> float | None:
    """Return the learning rate of one step of plain gradient descent on one record.

    With ``dW = e h`` and ``db = e`` of the last layer, e being the error of its outputs times the
    learning rate, ``h = dW[i] / db[i]`` is known, therefore the outputs ``W h + b``, and the error
    itself: softmax minus the label's unit vector.

    Parameters
    ----------
    weight : array_like, shape (classes, inputs)
        The last layer's weight before the step.
    bias : array_like, shape (classes,)
        Its bias.
    weight_change, bias_change : array_like
        What the step added to them.
    label : int
        The record's class.

    Returns
    -------
    float or None
        None where no positive one fits: it was not such a step.

    Examples
    --------
    >>> error = np.array([0.5, -0.5])  # of a model of zeros
    >>> change = -0.1 * np.outer(error, [1.0, 2.0])
    >>> learning_rate_of(np.zeros((2, 2)), np.zeros(2), change, -0.1 * error, 1)
    0.1
    """
    moved = np.asarray(bias_change, np.float64)
    if not moved[label] > 0:
        return None
    inputs = np.asarray(weight_change, np.float64)[label] / moved[label]
    outputs = np.asarray(weight, np.float64) @ inputs + np.asarray(bias, np.float64)
    chances = np.exp(outputs - outputs.max())
    error = chances / chances.sum() - (np.arange(len(outputs)) == label)
    rate = -float(moved @ error) / float(error @ error) if np.any(error) else 0.0
    return rate if rate > 0 else None


def cosine_loss(
    model: nn.Module, change: Mapping[str, Vectors], labels: NDArray[np.int64]
) -> MatchingLoss:
    """Return ``1 - cos`` of the angle between a change and the one that candidates would cause.

    Parameters
    ----------
    model : nn.Module
        The model that was sent, in float64.
    change : mapping of str to ndarray
        What was seen, by parameter.
    labels : ndarray of int64, shape (n,)
        The candidates' labels.
    """
    parameters = {n: p for n, p in model.named_parameters() if n in change and p.requires_grad}
    seen = [torch.tensor(-np.asarray(change[name], np.float64)) for name in parameters]
    length = torch.stack([s.square().sum() for s in seen]).sum().sqrt()

    def loss(candidates: Vectors) -> tuple[float, Vectors]:
        with one_thread():
            inputs = torch.tensor(candidates, requires_grad=True)
            error = record_losses(model, inputs, labels).mean()
            slopes = torch.autograd.grad(error, list(parameters.values()), create_graph=True)
            product = torch.stack([(g * s).sum() for g, s in zip(slopes, seen, strict=True)]).sum()
            own = torch.stack([g.square().sum() for g in slopes]).sum().sqrt()
            distance = 1 - product / (own * length + 1e-30)
            (slope,) = torch.autograd.grad(distance, inputs)
        result: NDArray[Any] = slope.numpy()
        return float(distance.detach()), result

    return loss


def descend(
    loss: MatchingLoss,
    shape: Sequence[int],
    draws: np.random.Generator,
    *,
    seconds: float,
    steps: int = STEPS,
) -> Found:
    """Go down a loss by the signs of its derivative, with Adam, and return the best inputs.

    Of a ReLU network the derivative is rough: the signs get through where line searches stop.

    Parameters
    ----------
    loss : callable
        What is made small.
    shape : sequence of int
        Shape of the inputs, with an axis for the records.
    draws : numpy.random.Generator
        The start, standard normal.
    seconds : float
        Time: the number of steps is halved until they fit in.
    steps : int, default 1024
        Most steps. The step size is a tenth after 3/8, 5/8 and 7/8 of them.
    """
    check_integer("steps", steps, minimum=_TRIALS)
    begin = time.monotonic()
    at = draws.normal(size=shape)
    best_records, best = at, np.inf
    mean, square = np.zeros(shape), np.zeros(shape)
    planned, done = steps, 0
    while done < planned:
        value, slope = loss(at)
        if value < best:
            best_records, best = at, value
        done += 1
        if done == _TRIALS:
            each = (time.monotonic() - begin) / done
            while planned > _TRIALS and planned * each > seconds:
                planned //= 2
        if time.monotonic() - begin > _PATIENCE * seconds:
            break
        signs = np.sign(slope)
        mean = _MOMENTS[0] * mean + (1 - _MOMENTS[0]) * signs
        square = _MOMENTS[1] * square + (1 - _MOMENTS[1]) * signs**2
        size = _STEP * 0.1 ** sum(done > share * planned for share in _DECAYS)
        corrected = mean / (1 - _MOMENTS[0] ** done)
        at = at - size * corrected / (np.sqrt(square / (1 - _MOMENTS[1] ** done)) + 1e-8)
    return Found(records=best_records, loss=float(best), starts=1, whole=done == steps)


class _TimeUpError(Exception):
    pass


def search(
    loss: MatchingLoss,
    shape: Sequence[int],
    draws: np.random.Generator,
    *,
    seconds: float,
    enough: float,
    starts: int = 4,
    iterations: int = ITERATIONS,
) -> Found:
    """Search from several starts, and return the inputs of least loss.

    Parameters
    ----------
    loss : callable
        What is made small.
    shape : sequence of int
        Shape of the inputs, with an axis for the records.
    draws : numpy.random.Generator
        The starts, standard normal.
    seconds : float
        Time after which the best so far is returned.
    enough : float
        Loss at which no further start is tried.
    starts : int, default 4
        Most starts.
    iterations : int, default 300
        Most steps from each.
    """
    check_integer("starts", starts, minimum=1)
    end = time.monotonic() + seconds
    best_records, best, begun, whole = np.zeros(shape), np.inf, 0, True

    def timed(records: Vectors) -> tuple[float, Vectors]:
        nonlocal best_records, best
        value, slope = loss(records)
        if value < best:
            best_records, best = records.copy(), value
        if time.monotonic() > end:
            raise _TimeUpError
        return value, slope

    for _ in range(starts):
        begun += 1
        try:
            match_gradient(timed, draws.normal(size=shape), iterations=iterations, tolerance=enough)
        except _TimeUpError:
            whole = False
            break
        if best < enough:
            break
    return Found(records=best_records, loss=float(best), starts=begun, whole=whole)
