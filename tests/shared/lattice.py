"""Which of two vectors was noised? Rule out the one whose noise the sampler cannot make.

A float sampler makes few values: a normal sample by Box and Muller's method comes in pairs on
circles of radius sqrt(-2 ln u), and u has only as many bits as the uniform variates of the
generator. Far from zero these circles are far apart. Subtract a vector from what was released: if
the rest is on no circle, that vector was not the one. Rounding the sum to a grid does not help as
long as the grid is finer than the distance of the circles. Where one vector is ruled out and the
other is not, a single release gives the data away, whatever epsilon was computed.

Sources: Mironov, "On Significance of the Least Significant Bits For Differential Privacy", CCS
2012, for Laplace noise; Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

__all__ = ["FIRST", "SECOND", "UNDECIDED", "BoxMuller", "Sampler", "tell_apart"]

UNDECIDED, FIRST, SECOND = 0, 1, 2


class Sampler(Protocol):
    """What is suspected to have made the noise."""

    def can_make(self, noise: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return for each coordinate whether the noise there can be an output.

        Parameters
        ----------
        noise : ndarray of float64, shape (n,)
            The whole vector in the order in which it was drawn, up to the rounding of the release.
        """


def tell_apart(
    released: ArrayLike, first: ArrayLike, second: ArrayLike, sampler: Sampler
) -> NDArray[np.int8]:
    """Say which of two vectors was noised, from the values that the sampler can make.

    Parameters
    ----------
    released : array_like, shape (n,)
        The noised vector, in the order in which the noise was drawn.
    first, second : array_like, shape (n,)
        The two candidates, in the same units; one of them is the vector before the noise.
    sampler : Sampler
        What is suspected to have made the noise.

    Returns
    -------
    ndarray of int8, shape (n,)
        `FIRST` or `SECOND` where the sampler can make only that one's noise; elsewhere, where it
        can make both or neither, `UNDECIDED`.

    Raises
    ------
    InvalidParameterError
        If the three are not vectors of one length.

    Examples
    --------
    >>> class EvenNumbers:
    ...     def can_make(self, noise):
    ...         return noise % 2 == 0
    >>> tell_apart([10, 11, 12], [0, 0, 0], [1, 1, 2], EvenNumbers())
    array([1, 2, 0], dtype=int8)
    """
    values = [np.asarray(array, np.float64) for array in (released, first, second)]
    for name, array in zip(("released", "first", "second"), values, strict=True):
        if array.shape != (values[0].size,):
            raise InvalidParameterError(
                name, array.shape, f"the shape of one vector, ({values[0].size},)"
            )
    one, other = (sampler.can_make(values[0] - candidate) for candidate in values[1:])
    return np.where(one == other, UNDECIDED, np.where(one, FIRST, SECOND)).astype(np.int8)


@dataclass(frozen=True, kw_only=True)
class BoxMuller:
    """Pairs ``scale * sqrt(-2 ln u) * (cos(2 pi w), sin(2 pi w))`` from uniforms of few bits.

    Parameters
    ----------
    scale : float
        Standard deviation of the noise, in the units of the release.
    spacing : float
        Distance of neighbouring released values: the step of the grid, or the distance of the
        floats at the largest released value.
    uniform_bits : int, default 24
        Bits of u and w; 24 is what a float32 generator makes.
    partner : int, default 1
        How far apart the two values of a pair lie: 1 for neighbours, 8 for blocks of sixteen whose
        halves belong together, as PyTorch draws them.
    error : float, default 2^-22
        Relative error of the sampler's own arithmetic; 2^-50 for float64.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Notes
    -----
    With noise (a, b) known up to `spacing`, its radius and angle are known up to an interval each.
    It can be made if an integer lies in the interval of ``2**uniform_bits * exp(-radius**2 / 2)``,
    and one in that of ``2**uniform_bits * angle / (2 pi)``. Which of u, 1 - u, sine and cosine the
    sampler uses does not matter: they permute the same lattice. In float32 only the radius tells
    anything, from about four standard deviations on; in float64 nearly every pair does.

    Examples
    --------
    >>> sampler = BoxMuller(scale=1.0, spacing=2.0**-40, error=2.0**-50)
    >>> radius = math.sqrt(-2 * math.log(3 / 2**24))
    >>> sampler.can_make(np.array([radius, 0.0, radius + 1e-6, 0.0]))
    array([ True,  True, False, False])
    """

    scale: float
    spacing: float
    uniform_bits: int = 24
    partner: int = 1
    error: float = 2.0**-22

    def __post_init__(self) -> None:
        check_number("scale", self.scale, minimum=math.ulp(0.0))
        check_number("spacing", self.spacing, minimum=0)
        check_integer("uniform_bits", self.uniform_bits, minimum=1, maximum=32)
        check_integer("partner", self.partner, minimum=1)
        check_number("error", self.error, minimum=2.0**-50, maximum=1)

    def can_make(self, noise: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return for each coordinate whether its pair can be an output.

        Coordinates at the end without a partner can always be one.
        """
        pairs = noise.size // (2 * self.partner)
        whole = noise[: pairs * 2 * self.partner].reshape(pairs, 2, self.partner) / self.scale
        radius = np.hypot(whole[:, 0], whole[:, 1])
        angle = np.arctan2(whole[:, 1], whole[:, 0])
        blur = self.spacing / self.scale / math.sqrt(2)  # half a step in both coordinates
        possible = self._on_a_circle(radius, blur) & self._at_an_angle(angle, radius, blur)
        result = np.ones(noise.size, np.bool_)
        result[: whole.size] = np.repeat(possible[:, None], 2, axis=1).reshape(-1)
        return result

    def _on_a_circle(self, radius: NDArray[np.float64], blur: float) -> NDArray[np.bool_]:
        reach = blur + self.error * radius
        low, high = (
            2.0**self.uniform_bits * np.exp(-(np.maximum(r, 0.0) ** 2) / 2)
            for r in (radius + reach, radius - reach)
        )
        return np.floor(high) >= np.maximum(np.ceil(low), 1)

    def _at_an_angle(
        self, angle: NDArray[np.float64], radius: NDArray[np.float64], blur: float
    ) -> NDArray[np.bool_]:
        with np.errstate(divide="ignore"):  # at the origin every angle is possible
            reach = blur / radius + 2 * math.pi * self.error
        unit = 2.0**self.uniform_bits / (2 * math.pi)
        return np.floor((angle + reach) * unit) >= np.ceil((angle - reach) * unit)
