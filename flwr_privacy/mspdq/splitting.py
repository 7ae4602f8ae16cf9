"""Splits a client's model into a visible sub-state, which is sent, and a hidden rest.

A split is the draw of the visible sub-state (section III of the paper, Proposition 1). The hidden
sub-states follow from the sum rule, `flwr_privacy.mspdq.mixing.SubStates.split`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.privacy.noise import discrete_gaussian, discrete_laplace
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = ["NoiseSplit", "Split", "UniformSplit", "noised", "noised_epsilon"]

Vectors = NDArray[np.float64]

_LAWS: dict[str, Callable[[int, float, SecureRandom], NDArray[np.int64]]] = {
    "laplace": discrete_laplace,
    "gaussian": discrete_gaussian,
}
_GRID_BITS = 30  # the noise's scale is at least 2^30 steps of the grid
_MOST_STEPS = 2.0**61


class Split(Protocol):
    """The law by which the visible sub-state is drawn."""

    def visible(self, model: Vectors, random: SecureRandom) -> Vectors:
        """Return the visible sub-state of a trained model, shape (d,)."""


@dataclass(frozen=True, kw_only=True)
class UniformSplit:
    """Each weight times a factor of its own, uniform on ``[eps_s, 1 + m - eps_s]``.

    Parameters
    ----------
    eps_s : float, default 0.3
        The splitting factor, in [0, 1): the smaller, the wider the split.
    m : int, default 1
        1 has the factors on ``[eps_s, 2 - eps_s]``, with mean 1, whatever the number of hidden
        sub-states is. More is the law that the paper's Algorithm 1 prints for so many hidden
        sub-states; its mean is (1 + m) / 2, so the first average is that much too large.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    **Guarantee.** None. Signs and zeros of the weights are as they were; a weight w lies between
    v / (1 + m - eps_s) and v / eps_s; and from the second message on the server can solve for the
    whole model (`flwr_privacy.simulations.research.mspdq.consensus`), whatever the law.

    Examples
    --------
    >>> model = np.array([1.0, -1.0, 0.0])
    >>> np.sign(UniformSplit(eps_s=0.3).visible(model, SecureRandom()))
    array([ 1., -1.,  0.])
    """

    eps_s: float = 0.3
    m: int = 1

    def __post_init__(self) -> None:
        if not 0 <= check_number("eps_s", self.eps_s) < 1:
            raise InvalidParameterError("eps_s", self.eps_s, "a number from 0 up to but not 1")
        check_integer("m", self.m, minimum=1)

    def visible(self, model: Vectors, random: SecureRandom) -> Vectors:
        """Return the visible sub-state of a trained model, shape (d,)."""
        factors: Vectors = (random.uint64(model.size) >> np.uint64(11)).astype(np.float64)
        factors *= (1 + self.m - 2 * self.eps_s) * 2.0**-53
        factors += self.eps_s
        factors *= model
        return factors


@dataclass(frozen=True, kw_only=True)
class NoiseSplit:
    """Each weight plus noise of its own, Laplace or Gaussian ("MSP+Lap" in the paper).

    Parameters
    ----------
    law : {"laplace", "gaussian"}
        The noise.
    scale : float
        Scale of the Laplace law, or standard deviation; above 0, in the units of the weights. For
        Proposition 1: `flwr_privacy.mspdq.theory.laplace_scale`.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    **Guarantee.** *Covered*: the first message alone, as `noised` says. *Not covered*: all that
    follows. The later messages take the noise away again, by construction, and the server can solve
    for the whole model from the first two (`flwr_privacy.simulations.research.mspdq.consensus`). So
    a training is not differentially private with this split.
    """

    law: str
    scale: float

    def __post_init__(self) -> None:
        check_choice("split", self.law, _LAWS)
        check_scale(self.scale)

    def visible(self, model: Vectors, random: SecureRandom) -> Vectors:
        """Return the visible sub-state of a trained model, shape (d,)."""
        return noised(model, self.law, self.scale, random)


def check_scale(scale: float) -> None:
    """Refuse a scale of noise that the grid cannot hold.

    Raises
    ------
    InvalidParameterError
        If it is no number from 1e-100 to 1e100.
    """
    check_number("scale", scale, minimum=1e-100, maximum=1e100)


def noised(values: Vectors, law: str, scale: float, random: SecureRandom) -> Vectors:
    """Return values plus noise, exactly sampled on a fine grid.

    Parameters
    ----------
    values : ndarray of float64, shape (d,)
        What is noised.
    law : {"laplace", "gaussian"}
        The noise.
    scale : float
        Scale of the Laplace law, or standard deviation, from 1e-100 to 1e100.
    random : SecureRandom
        Where the random bits come from.

    Raises
    ------
    InvalidParameterError
        If a value is more than 2^30 scales from zero, or a parameter is not allowed.

    Notes
    -----
    The values are rounded to a grid with at least 2^30 steps per scale, and discrete noise is added
    to the integers.

    **Guarantee.** *Protected*: vectors that differ by at most D in L1 norm (Laplace) or L2 norm
    (Gaussian). *Against*: whoever sees the sum. *Covered*: (D' / scale)-differential privacy, or
    (D'^2 / 2 scale^2)-concentrated, where D' is D plus ``d`` or ``sqrt(d)`` times 2^-30 scales for
    the rounding. *Not covered*: other releases of the same values, streams that are not `secure`.
    """
    check_choice("law", law, _LAWS)
    check_scale(scale)
    step = 2.0 ** (math.frexp(scale)[1] - 1 - _GRID_BITS)
    steps = np.rint(values / step)
    if not np.abs(steps).max(initial=0.0) <= _MOST_STEPS:
        raise InvalidParameterError(
            "scale", scale, "noise of at least a 2^30th of the largest value, which is finite"
        )
    codes = steps.astype(np.int64)
    codes += _LAWS[law](codes.size, scale / step, random)
    result = codes.astype(np.float64)
    result *= step
    return result


def noised_epsilon(
    law: str, scale: float, distance: float, *, size: int, releases: int, delta: float
) -> float:
    """Return the epsilon at `delta` of noised vectors that differ by some distance in L2 norm.

    Parameters
    ----------
    law, scale
        As in `noised`.
    distance : float
        Bound of their L2 distance, at least 0. In L1 norm it is up to ``sqrt(size)`` times that.
    size : int
        Their entries.
    releases : int
        How many of them there are, each with noise of its own.
    delta : float
        Without effect on Laplace noise, whose epsilons add up.

    Examples
    --------
    >>> round(noised_epsilon("gaussian", 1.0, 1.0, size=1, releases=1, delta=1e-5), 4)
    4.3772
    >>> round(noised_epsilon("laplace", 2.0, 1.0, size=4, releases=3, delta=1e-5), 4)
    3.0
    """
    check_choice("law", law, _LAWS)
    step, root = 2.0**-_GRID_BITS, math.sqrt(size)
    if law == "laplace":
        return releases * root * (distance / scale + root * step)
    return epsilon_of(math.sqrt(releases) * (distance / scale + root * step), delta)
