"""Draws correlated noise exactly, on a grid: round by round, with a state that can be saved.

A release of round t is ``y_t = x_t + w_t`` in steps of a grid, with a sum x_t of integer codes and
``w = C^-1 z``. Real arithmetic would round, and rounded noise may give the sum away. So everything
here is in integers:

- the coefficients of C are multiples of ``2^-F`` with ``c_0 = 1``, F being `FRACTION_BITS`;
- z_t is discrete Gaussian on the lattice of multiples of ``2^-F``, which C x lies on;
- ``w_t = round(z_t - sum_{i >= 1} c_i w_{t-i})``, ``round(r)`` being ``floor(r + 1/2)``, so that
  ``round(x + r) = x + round(r)`` for integers x.

*Theorem.* y is a function of C x + z alone. So it is as private as C x + z, a discrete Gaussian
mechanism: the rounding is post-processing, and costs nothing.

*Proof.* Let ``v = C x + z``. As w = y - x,

    x_t + z_t - sum_{i >= 1} c_i w_{t-i} = v_t - sum_{i >= 1} c_i y_{t-i},

because the sums over x cancel. Rounding both sides, which x_t passes unchanged, gives
``y_t = round(v_t - sum_{i >= 1} c_i y_{t-i})``: by induction y_1, ..., y_t follow from v_1, ...,
v_t. QED.

What x_t depends on may be chosen late, after y_1, ..., y_{t-1} were seen: given them, round t
releases a function of ``(C x)_t + z_t``, and neighbours move (C x)_t by a vector whose squared
norms add up, over all rounds, to at most the square of the joint sensitivity, whatever was chosen.
Bounds of that kind are a filter. For Gaussian noise: Smith & Thakurta, *Fully adaptive composition
for Gaussian differential privacy*, 2022; Denisov et al., *Improved differential privacy for SGD via
optimal private linear operators on adaptive streams*, NeurIPS 2022, theorem 2.1. For discrete noise
by the gap of `flwr_privacy.privacy.noise.discretisation_gap` in every round.

*Truncated states.* A `BufferedToeplitzFactor` has a coefficient for every round, of which
``u_t = sum_{i >= 1} c_i w_{t-i}`` is computed from a few states, truncated to the lattice: a
function L(w_1, ..., w_{t-1}) that is not quite linear. It is as if round t released
``v_t = x_t + z_t + L(y) - L(y - x)``: y_t is ``round(v_t - L(y))``. If truncation moves each
coordinate of L by less than E, neighbours move v_t by what they move (C x)_t by and another
``E sqrt(d)`` at most, in d coordinates. By the triangle inequality this adds ``E sqrt(d T)`` to the
joint sensitivity over T rounds. `margin` charges for it, and `check_size` refuses more coordinates
and rounds than that is for.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.noise import LARGEST_SCALE, discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom

from .factors import FRACTION_BITS, BufferedToeplitzFactor, Factor, ToeplitzFactor, TreeFactor

__all__ = [
    "NoiseStream",
    "ToeplitzStream",
    "check_sigma",
    "check_size",
    "digest_of",
    "largest_sigma",
    "margin",
    "new_stream",
    "vectors_kept",
]

_ONE = 1 << FRACTION_BITS
_SLACK = 1e-3  # of the sensitivity, for truncated states
_BLOCK = 2**14  # values
_LARGEST_STATE = 2**60  # beyond it a state might leave 64 bits


def digest_of(factor: Factor) -> str:
    """Return a short text that is the same for the same factor only."""
    return hashlib.sha256(repr(factor).encode()).hexdigest()[:32]


def margin(factor: Factor) -> float:
    """Return what a joint sensitivity is multiplied by, to cover truncated states."""
    return 1 + _SLACK if isinstance(factor, BufferedToeplitzFactor) else 1.0


def largest_sigma(factor: Factor) -> float:
    """Return the largest standard deviation of z in grid steps for which there is a sampler."""
    return LARGEST_SCALE if isinstance(factor, TreeFactor) else LARGEST_SCALE / _ONE


def vectors_kept(factor: Factor) -> int:
    """Return how many vectors of the model's size are kept from round to round at most.

    Examples
    --------
    >>> vectors_kept(TreeFactor(rounds=100))
    7
    """
    if isinstance(factor, ToeplitzFactor):
        return factor.bands - 1
    if isinstance(factor, BufferedToeplitzFactor):
        return len(factor.decays)
    return factor.rounds.bit_length()


def check_sigma(factor: Factor, sigma: float) -> None:
    """Refuse noise that is too strong for the sampler.

    Parameters
    ----------
    factor : Factor
        The factor.
    sigma : float
        Standard deviation of z in grid steps.

    Raises
    ------
    InvalidParameterError
        If it is: the grid is too fine.
    """
    if sigma > (most := largest_sigma(factor)):
        raise InvalidParameterError(
            "grid_bits",
            math.ceil(math.log2(sigma / most)),
            f"fewer by as many: correlated noise of at most {most:.3g} steps can be drawn",
        )


def check_size(factor: Factor, *, size: int, rounds: int, largest: float) -> None:
    """Refuse a model for which truncated states cost more than `margin` charges.

    Parameters
    ----------
    factor : Factor
        The factor.
    size : int
        Number of coordinates, d.
    rounds : int
        Number of rounds, T.
    largest : float
        L2 norm of the contribution of one client, in grid steps.

    Raises
    ------
    InvalidParameterError
        If it does: the grid is too coarse.
    """
    if not isinstance(factor, BufferedToeplitzFactor):
        return
    lost = _truncated(factor) * math.sqrt(size * rounds)
    if lost > _SLACK * largest:
        raise InvalidParameterError(
            "grid_bits",
            math.floor(math.log2(largest)),
            f"more, or BandedMF: in {rounds} rounds of {size} weights the truncated states of BLT "
            f"move the sum by up to {lost:.3g} steps of the grid",
        )


def _truncated(factor: BufferedToeplitzFactor) -> float:
    """Return E: by how many grid steps truncation may move a coordinate."""
    steps = sum(
        scale / (_ONE - decay) + 1
        for scale, decay in zip(factor.scales, factor.decays, strict=True)
    )
    return steps / _ONE


class NoiseStream(ABC):
    """Correlated noise for vectors of integers, one vector per round.

    Parameters
    ----------
    size : int
        Number of coordinates.

    Attributes
    ----------
    drawn : int
        Rounds for which noise was drawn.

    Notes
    -----
    **Guarantee.** See `flwr_privacy.central_dp.plan.CentralDPNoisePlan`. *Protected*: integer
    vectors that neighbours move as their joint sensitivity allows. *Against*: whoever sees the
    sums and knows everything but the states and the generator. *Covered*: all rounds together.
    *Not covered*: what is known of a state; rounds whose noise was drawn and of whose sums two
    different ones were released.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.drawn = 0

    def draw(self, server_round: int, sigma: float, random: SecureRandom) -> NDArray[np.int64]:
        """Return the noise of a round; that of rounds which were left out is drawn and forgotten.

        Parameters
        ----------
        server_round : int
            The round, counted from 1.
        sigma : float
            Standard deviation of z in grid steps, the same in every round.
        random : SecureRandom
            Where z comes from.

        Returns
        -------
        ndarray of int64, shape (size,)

        Raises
        ------
        ProtocolError
            If the noise of the round was drawn before.
        """
        if server_round <= self.drawn:
            raise ProtocolError(
                f"the correlated noise of round {server_round} was drawn before: another sum of "
                "the same round would show it"
            )
        noise = np.zeros(self.size, np.int64)
        while self.drawn < server_round:
            noise = self._next(sigma, random)
            self.drawn += 1
        return noise

    @abstractmethod
    def _next(self, sigma: float, random: SecureRandom) -> NDArray[np.int64]: ...

    @abstractmethod
    def _vectors(self) -> dict[str, NDArray[np.int64]]: ...

    @abstractmethod
    def _restore(self, vectors: Mapping[str, NDArray[np.int64]]) -> None: ...

    def state(self) -> dict[str, Any]:
        """Return everything that later rounds depend on. It is as secret as the noise."""
        return {"drawn": self.drawn, "vectors": self._vectors()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.drawn = int(state["drawn"])
        self._restore(state["vectors"])


class ToeplitzStream(NoiseStream):
    """Keeps the noise of as many rounds as there are coefficients beside the first."""

    def __init__(self, factor: ToeplitzFactor, size: int) -> None:
        super().__init__(size)
        self._coefficients = factor.coefficients[1:]
        self._last: list[NDArray[np.int64]] = []  # newest first

    def _next(self, sigma: float, random: SecureRandom) -> NDArray[np.int64]:
        noise = _rounded(self._less_past(discrete_gaussian(self.size, sigma * _ONE, random)))
        self._keep(noise)
        return noise

    def _less_past(self, rest: NDArray[np.int64]) -> NDArray[np.int64]:
        """Subtract ``sum_{i >= 1} c_i w_{t-i}`` from lattice steps, in place; return them."""
        product = np.empty(min(_BLOCK, self.size), np.int64)
        for begin in range(0, self.size, _BLOCK):  # what is added up stays in the processor's cache
            part = rest[begin : begin + _BLOCK]
            for coefficient, earlier in zip(self._coefficients, self._last, strict=False):
                there = earlier[begin : begin + _BLOCK]
                part -= np.multiply(there, coefficient, out=product[: part.size])
        return rest

    def _keep(self, noise: NDArray[np.int64]) -> None:
        self._last = [noise, *self._last][: len(self._coefficients)]

    def _vectors(self) -> dict[str, NDArray[np.int64]]:
        return {str(place): noise for place, noise in enumerate(self._last)}

    def _restore(self, vectors: Mapping[str, NDArray[np.int64]]) -> None:
        self._last = [vectors[str(place)] for place in range(len(vectors))]


class _BufferedStream(NoiseStream):
    """Keeps one truncated state per buffer, however many rounds there are.

    State j is ``sum_{i >= 1} decay_j^(i-1) w_{t-i}`` in lattice steps.
    """

    def __init__(self, factor: BufferedToeplitzFactor, size: int) -> None:
        super().__init__(size)
        self._scales, self._decays = factor.scales, factor.decays
        self._states = [np.zeros(size, np.int64) for _ in factor.decays]

    def _next(self, sigma: float, random: SecureRandom) -> NDArray[np.int64]:
        rest = discrete_gaussian(self.size, sigma * _ONE, random)
        for scale, state in zip(self._scales, self._states, strict=True):
            rest -= _times(scale, state)
        noise = _rounded(rest)
        for place, decay in enumerate(self._decays):
            self._states[place] = _times(decay, self._states[place]) + (noise << FRACTION_BITS)
            if np.abs(self._states[place]).max(initial=0) > _LARGEST_STATE:
                raise OverflowError("a state of the correlated noise leaves 60 bits")
        return noise

    def _vectors(self) -> dict[str, NDArray[np.int64]]:
        return {str(place): state for place, state in enumerate(self._states)}

    def _restore(self, vectors: Mapping[str, NDArray[np.int64]]) -> None:
        self._states = [vectors[str(place)] for place in range(len(self._states))]


class _TreeStream(NoiseStream):
    """Keeps the noise of the tree's nodes that make up the present prefix.

    The noise of a prefix is that of the nodes of its binary expansion, added up; a round gets the
    difference of two prefixes. A prefix sum is then the sum of noised nodes, whose values are what
    the tree's matrix makes of x.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._nodes: dict[int, NDArray[np.int64]] = {}  # by level

    def _next(self, sigma: float, random: SecureRandom) -> NDArray[np.int64]:
        prefix = self.drawn + 1
        level = (prefix & -prefix).bit_length() - 1
        noise = discrete_gaussian(self.size, sigma, random)
        node = noise.copy()
        for lower in range(level):  # they are no part of this prefix any more
            noise -= self._nodes.pop(lower)
        self._nodes[level] = node
        return noise

    def _vectors(self) -> dict[str, NDArray[np.int64]]:
        return {str(level): node for level, node in self._nodes.items()}

    def _restore(self, vectors: Mapping[str, NDArray[np.int64]]) -> None:
        self._nodes = {int(level): node for level, node in vectors.items()}


def new_stream(factor: Factor, size: int) -> NoiseStream:
    """Return the noise of a training before its first round.

    Parameters
    ----------
    factor : Factor
        How the noise of rounds goes together.
    size : int
        Number of coordinates.

    Examples
    --------
    >>> factor = ToeplitzFactor(coefficients=(1 << FRACTION_BITS, 1 << (FRACTION_BITS - 1)))
    >>> stream = new_stream(factor, 3)
    >>> noise = [stream.draw(t, 100.0, SecureRandom.insecure(0, t)) for t in (1, 2)]
    >>> z = discrete_gaussian(3, 100.0 * 2**FRACTION_BITS, SecureRandom.insecure(0, 2))
    >>> bool((noise[1] == np.floor(z / 2**FRACTION_BITS - noise[0] / 2 + 0.5)).all())
    True
    """
    if isinstance(factor, ToeplitzFactor):
        return ToeplitzStream(factor, size)
    if isinstance(factor, BufferedToeplitzFactor):
        return _BufferedStream(factor, size)
    return _TreeStream(size)


def _rounded(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return lattice steps as grid steps, rounded such that whole grid steps pass unchanged."""
    rounded: NDArray[np.int64] = (steps + (_ONE >> 1)) >> FRACTION_BITS
    return rounded


def _times(numerator: int, state: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a fraction of a state, rounded down; its two halves are multiplied by themselves."""
    low = state & (_ONE - 1)
    product: NDArray[np.int64] = (state >> FRACTION_BITS) * numerator
    return product + ((low * numerator) >> FRACTION_BITS)
