"""Recovers what a client trained: undoes the mixing of MSP and MSPDQ, which is linear.

The server of `flwr_privacy.mspdq` hears every visible sub-state and sends every average, so it
knows all of the equations

    v[k+1] = v[k] + kappa (W[k] - heard[k]) + a[k] (H[k] - m v[k]),   v[0] + H[0] = (1 + m) w

but the model w and, at most, the couplings a and the number m of hidden sub-states. The first step
alone moves the visible sub-state by

    D = v[1] - v[0] - kappa (W[0] - v[0]) = c (w - v[0]),   c = (1 + m) a[0],

and v[0] and D give w away but for one number, c. What each attack needs:

- `recover_w_known_c`: c. It is public where the coupling is: both ends of MSPDQ decode by it.
- `recover_w_split_law`: that the split is the uniform one.
- `recover_w_near_model`: that w is near to some model, such as the one that training began with.
- `recover_w_conserved`: only m, which is a small number; and as many steps as the average needs.
- `recover_w_tracked`: the couplings and m; it takes all messages and bears rounding.

If one finds the model a leak is proven; if none does nothing is.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.wire.arrays import is_finite

__all__ = [
    "recover_w_conserved",
    "recover_w_known_c",
    "recover_w_near_model",
    "recover_w_split_law",
    "recover_w_tracked",
    "relative_error",
]

Vectors = NDArray[np.float64]


def recover_w_known_c(heard: ArrayLike, averages: ArrayLike, *, kappa: float, c: float) -> Vectors:
    """Return a client's model from its first two messages and the first coupling.

    Parameters
    ----------
    heard : array_like, shape (K + 1, d), K >= 1
        The client's messages as the server has them.
    averages : array_like, shape (K + 1, d) or (K, d)
        The server's averages.
    kappa : float
        Consensus gain.
    c : float
        ``(1 + m) a[0]``, not 0.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.

    Examples
    --------
    >>> recover_w_known_c([[0.5], [1.475]], [[2.25]], kappa=0.5, c=0.2).round(9)
    array([1.])
    """
    first, moved = _first_step(heard, averages, kappa)
    if check_number("c", c) == 0:
        raise InvalidParameterError("c", c, "a number other than 0")
    return first + moved / c


def recover_w_split_law(
    heard: ArrayLike, averages: ArrayLike, *, kappa: float, eps_s: float
) -> Vectors:
    """Return a client's model from its first two messages and the law of the uniform split.

    With v[0] = r w the movement is ``c (1 / r - 1) v[0]``. The factors r reach up to 2 - eps_s,
    and the more weights there are the nearer, so the least quotient tells c.

    Parameters
    ----------
    heard, averages, kappa
        As for `recover_w_known_c`; messages without rounding.
    eps_s : float
        Splitting factor, in [0, 1).

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, a value is not finite, or nothing moved against its sign.

    Examples
    --------
    >>> w, r = np.ones(3), np.array([0.3, 1.0, 1.7])
    >>> v = r * w
    >>> recover_w_split_law([v, v + 0.2 * (w - v)], [v], kappa=0.5, eps_s=0.3).round(9)
    array([1., 1., 1.])
    """
    first, moved = _first_step(heard, averages, kappa)
    if not 0 <= check_number("eps_s", eps_s) < 1:
        raise InvalidParameterError("eps_s", eps_s, "a number from 0 up to but not 1")
    nonzero = first != 0
    least = float((moved[nonzero] / first[nonzero]).min(initial=0.0))
    if least == 0:
        raise InvalidParameterError("heard", "no weight that shrank", "messages of a uniform split")
    return first - moved / least * (1 - eps_s) / (2 - eps_s)


def recover_w_near_model(
    heard: ArrayLike, averages: ArrayLike, *, kappa: float, model: ArrayLike
) -> Vectors:
    """Return the point nearest to a model on the line on which the client's model lies.

    The line goes from the first message in the direction of the first movement. Works for any
    split, also one by noise, as far as training moved less than the split.

    Parameters
    ----------
    heard, averages, kappa
        As for `recover_w_known_c`.
    model : array_like, shape (d,)
        A model that the client's is near to, e.g. the one that training began with.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, a value is not finite, or nothing moved.
    """
    first, moved = _first_step(heard, averages, kappa)
    near = _vector("model", model, first.size)
    length = float(moved @ moved)
    if length == 0:
        raise InvalidParameterError("heard", "two equal messages", "messages that moved")
    return first + moved * (float((near - first) @ moved) / length)


def recover_w_conserved(heard: ArrayLike, averages: ArrayLike, *, kappa: float, m: int) -> Vectors:
    """Return a client's model from all of its messages, whatever its couplings were.

    All sub-states of a client together move only by the consensus terms, and end, as all mixing
    ends, at 1 + m times the average. So ``w = W[K] - kappa / (1 + m) sum_k (W[k] - heard[k])``, but
    for what is left to mix.

    Parameters
    ----------
    heard, averages : array_like, shape (K + 1, d)
        The client's messages as the server has them, and the averages.
    kappa : float
        Consensus gain.
    m : int
        Number of hidden sub-states; the hidden ones' weight where masses are normalized, 1.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.
    """
    messages, means = _messages(heard, averages)
    if len(means) != len(messages):
        raise InvalidParameterError("averages", means.shape, f"the shape {messages.shape}")
    check_integer("m", m, minimum=1)
    received = (means[:-1] - messages[:-1]).sum(axis=0)
    model: Vectors = means[-1] - check_number("kappa", kappa) / (1 + m) * received
    return model


def recover_w_tracked(
    heard: ArrayLike,
    averages: ArrayLike,
    *,
    kappa: float,
    gains: Sequence[float],
    m: int,
    steps: Sequence[float],
) -> Vectors:
    """Return the model that fits all messages of a client best.

    Every message is ``alpha[k] + beta[k] w`` plus a rounding error, with alpha and beta that the
    server can compute: it knows the first message, the averages, the decoded values and the
    couplings. Least squares, each message by the inverse square of its knobs' step.

    Parameters
    ----------
    heard, averages : array_like, shape (K + 1, d), K >= 1
        The client's messages as the server has them, and the averages (the last is not used and
        may be left out). Where the server hears no client, under a secure sum, `averages` is all
        it has for both, and the result is an estimate of the mean.
    kappa : float
        Consensus gain.
    gains : sequence of float, length K
        The couplings a[0], ..., a[K - 1].
    m : int
        Number of hidden sub-states (their weight).
    steps : sequence of float, length K
        Distance of the knobs of messages 1 to K; 0 where nothing was rounded. Then only messages
        that were not rounded count.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.

    Examples
    --------
    >>> recover_w_tracked(
    ...     [[0.5], [1.475]], [[2.25]], kappa=0.5, gains=[0.1], m=1, steps=[0.0]).round(9)
    array([1.])
    """
    messages, means = _messages(heard, averages)
    check_integer("m", m, minimum=1)
    for name, values in (("gains", gains), ("steps", steps)):
        if len(values) != len(messages) - 1:
            raise InvalidParameterError(name, len(values), f"{len(messages) - 1} numbers")
        for value in values:
            check_number(name, value, minimum=0)
    weights = _weights(np.asarray(steps, np.float64))
    alpha, beta = messages[0].copy(), 0.0  # of the visible sub-state
    eta, theta = -messages[0], 1.0 + m  # of the hidden ones
    numerator, denominator = np.zeros_like(alpha), 0.0
    for k, a in enumerate(gains):
        flow, share = a * (eta - m * alpha), a * (theta - m * beta)
        alpha = alpha + kappa * (means[k] - messages[k]) + flow
        beta += share
        eta = eta - flow
        theta -= share
        numerator += weights[k] * beta * (messages[k + 1] - alpha)
        denominator += weights[k] * beta**2
    if denominator == 0:
        raise InvalidParameterError("gains", "couplings of 0", "couplings that move something")
    model: Vectors = numerator / denominator
    return model


def relative_error(found: ArrayLike, truth: ArrayLike, known: ArrayLike = 0.0) -> float:
    """Return ``||found - truth|| / ||truth - known||``.

    Parameters
    ----------
    found, truth : array_like, shape (d,)
        What an attack returned, and the client's model.
    known : array_like, shape (d,), default 0.0
        What everybody knows, e.g. the model that training began with: then the error is relative
        to the update, and 1 is what a guess without any attack has.

    Examples
    --------
    >>> relative_error([1.0, 1.0], [1.0, 2.0], known=[1.0, 0.0])
    0.5
    """
    model = np.asarray(truth, np.float64)
    missed = np.linalg.norm(np.asarray(found, np.float64) - model)
    return float(missed / np.linalg.norm(model - np.asarray(known, np.float64)))


def _weights(steps: Vectors) -> Vectors:
    exact = steps == 0
    if exact.any():
        ones: Vectors = exact.astype(np.float64)
        return ones
    weights: Vectors = (steps.min() / steps) ** 2
    return weights


def _first_step(heard: ArrayLike, averages: ArrayLike, kappa: float) -> tuple[Vectors, Vectors]:
    """Return the first message, and how the hidden sub-states moved it."""
    messages, means = _messages(heard, averages)
    check_number("kappa", kappa)
    moved: Vectors = messages[1] - messages[0] - kappa * (means[0] - messages[0])
    return messages[0], moved


def _messages(heard: ArrayLike, averages: ArrayLike) -> tuple[Vectors, Vectors]:
    messages, means = np.asarray(heard, np.float64), np.asarray(averages, np.float64)
    if messages.ndim != 2 or len(messages) < 2:
        raise InvalidParameterError("heard", messages.shape, "two messages or more, two axes")
    if means.ndim != 2 or means.shape[1:] != messages.shape[1:]:
        raise InvalidParameterError(
            "averages", means.shape, f"vectors of length {messages.shape[1]}, two axes"
        )
    if not len(messages) - 1 <= len(means) <= len(messages):
        raise InvalidParameterError(
            "averages", means.shape, f"{len(messages) - 1} or {len(messages)} averages"
        )
    for name, array in (("heard", messages), ("averages", means)):
        if not is_finite(array):
            raise InvalidParameterError(name, "an array with NaN or infinity", "finite values")
    return messages, means


def _vector(name: str, values: ArrayLike, size: int) -> Vectors:
    array = np.asarray(values, np.float64)
    if array.shape != (size,) or not is_finite(array):
        raise InvalidParameterError(name, array.shape, f"a finite vector of length {size}")
    return array
