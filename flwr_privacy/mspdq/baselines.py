"""Baselines of MSP and MSPDQ: the noise of NbAFL, the codec of JoPEQ, the sampling.

Their two halves are `flwr_privacy.strategies.mspdq.baselines` and its like among the clients.
FedAvg needs no mathematics of its own. An update that is quantized once and sent once, the honest
rival in bits, is `flwr_privacy.mspdq.codec.encode_start`; MSP with Laplace noise is
`flwr_privacy.mspdq.splitting.NoiseSplit`; FedAvg with the server step that the global start amounts
to has step ``1 - residual``.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.coding.quantize import LARGEST_WIDTH, Codes
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import SMALLEST_NORM
from flwr_privacy.privacy.updates import clip as clip_to_norm
from flwr_privacy.wire.layout import Layout

from .splitting import check_scale, noised, noised_epsilon

__all__ = ["JoPEQ", "Noising", "nbafl_downlink_sigma", "nbafl_uplink_sigma"]

Vectors = NDArray[np.float64]

_SMALLEST = math.ulp(0.0)


def nbafl_uplink_sigma(
    *, clipping_norm: float, epsilon: float, delta: float, exposures: int, smallest_data: int
) -> float:
    """Return the standard deviation of a client's noise in NbAFL ("FedAvg+LDP").

    ``c exposures 2 C / (smallest_data epsilon)`` with ``c = sqrt(2 ln(1.25 / delta))``, for models
    clipped to the L2 norm C.

    Parameters
    ----------
    clipping_norm : float
        C.
    epsilon, delta : float
        What the authors claim for all exposures together.
    exposures : int
        Uploads of a client.
    smallest_data : int
        Number of records of the client with the fewest.

    Notes
    -----
    **Guarantee.** None that is checked here. The formula takes 2 C over the number of records for
    the effect of one record on a trained model, which no clipping of whole models enforces, and its
    c is proven for epsilon below 1 only. Wei et al., "Federated Learning with Differential
    Privacy: Algorithms and Performance Analysis", IEEE TIFS 2020.

    Examples
    --------
    >>> round(nbafl_uplink_sigma(
    ...     clipping_norm=1.0, epsilon=10.0, delta=0.01, exposures=25, smallest_data=600), 6)
    0.025896
    """
    check_number("clipping_norm", clipping_norm, minimum=0)
    check_integer("exposures", exposures, minimum=1)
    check_integer("smallest_data", smallest_data, minimum=1)
    c = _gaussian_constant(epsilon, delta)
    return c * exposures * 2 * clipping_norm / (smallest_data * epsilon)


def nbafl_downlink_sigma(
    *,
    clipping_norm: float,
    epsilon: float,
    delta: float,
    exposures: int,
    smallest_data: int,
    rounds: int,
    clients: int,
) -> float:
    """Return the standard deviation of the server's noise in NbAFL; often 0.

    ``2 c C sqrt(T^2 - exposures^2 N) / (smallest_data N epsilon)`` where T rounds are more than
    ``exposures sqrt(N)`` for N clients.
    """
    check_number("clipping_norm", clipping_norm, minimum=0)
    check_integer("exposures", exposures, minimum=1)
    check_integer("smallest_data", smallest_data, minimum=1)
    check_integer("rounds", rounds, minimum=1)
    check_integer("clients", clients, minimum=1)
    missing = max(0, rounds**2 - exposures**2 * clients)
    c = _gaussian_constant(epsilon, delta)
    return 2 * c * clipping_norm * math.sqrt(missing) / (smallest_data * clients * epsilon)


def _gaussian_constant(epsilon: float, delta: float) -> float:
    check_number("epsilon", epsilon, minimum=_SMALLEST)
    check_delta(delta)
    return math.sqrt(2 * math.log(1.25 / delta))


@dataclass(frozen=True, kw_only=True)
class Noising:
    """Clips a trained model and adds noise, as a client of NbAFL does.

    Parameters
    ----------
    clip : {"model", "update"}
        What is clipped: the model itself, or its distance from the global model.
    clipping_norm : float
        L2 norm C to which it is clipped, in the units of the weights.
    law : {"gaussian", "laplace"}
        The noise.
    scale : float
        Standard deviation of the Gaussian law, or scale of the Laplace one, in the units of the
        weights, from 1e-100 to 1e100.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    **Guarantee.** None that is checked here, see `nbafl_uplink_sigma`. For one upload, that of
    `flwr_privacy.mspdq.splitting.noised` holds with D = 2 C in L2 norm, that is under the Gaussian
    law only; the noise of the formula is small against that.

    Examples
    --------
    >>> noising = Noising(clip="model", clipping_norm=1.0, law="gaussian", scale=1e-9)
    >>> noising.release(np.array([3.0, 4.0]), np.zeros(2), SecureRandom()).round(6)
    array([0.6, 0.8])
    """

    clip: str
    clipping_norm: float
    law: str
    scale: float

    def __post_init__(self) -> None:
        check_choice("clip", self.clip, ("model", "update"))
        check_number("clipping_norm", self.clipping_norm, minimum=SMALLEST_NORM)
        check_choice("law", self.law, ("gaussian", "laplace"))
        check_scale(self.scale)

    def release(self, model: Vectors, start: Vectors, random: SecureRandom) -> Vectors:
        """Return the clipped model with noise.

        Parameters
        ----------
        model, start : ndarray of float64, shape (d,)
            The trained model, and the global one that it started from.
        random : SecureRandom
            For the noise.

        Raises
        ------
        InvalidParameterError
            If the noise is too little for so large weights, see `noised`.
        """
        centre = start if self.clip == "update" else np.zeros_like(model)
        clipped = model - centre
        clip_to_norm(clipped, self.clipping_norm)
        return noised(clipped + centre, self.law, self.scale, random)

    def epsilons(
        self, *, smallest_data: int, uploads: int, size: int, delta: float
    ) -> tuple[float, float]:
        """Return the epsilon of a client's uploads: by the formula, and by what clipping gives.

        The formula takes it that a record moves a trained model by 2 C over the number of records,
        in L2 norm. All that clipping gives is 2 C, for a record and for all data of a client alike.

        Parameters
        ----------
        smallest_data : int
            Number of records of the client with the fewest.
        uploads : int
            Models that a client sends.
        size : int
            Weights of a model.
        delta : float
            Delta of both; Laplace noise needs none.

        Examples
        --------
        >>> noising = Noising(clip="model", clipping_norm=1.0, law="gaussian", scale=0.0010358)
        >>> taken, clipped = noising.epsilons(smallest_data=600, uploads=1, size=650, delta=0.01)
        >>> round(taken, 2), round(clipped)
        (11.92, 1868629)
        """
        taken, clipped = (
            noised_epsilon(self.law, self.scale, distance, size=size, releases=uploads, delta=delta)
            for distance in (2 * self.clipping_norm / smallest_data, 2 * self.clipping_norm)
        )
        return taken, clipped


@dataclass(frozen=True, kw_only=True)
class JoPEQ:
    """Scalar JoPEQ: Laplace noise and subtractive dither, rounded together.

    Parameters
    ----------
    epsilon : float
        Target of the noise, above 0.
    bits : int
        Bits of a code, from 1 to 16.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or there are so few bits for this epsilon that the dither alone
        is more than the noise.

    Notes
    -----
    An update is standardized to ``z = (h - mean) / (3 std)``. With ``b = 2 / epsilon`` the range is
    ``g = 1.5 sqrt(1 + 2 b^2)`` and the step ``2 g / 2^bits``. The noise's variance is
    ``2 b^2 - step^2 / 12``, so that it has, with the error of the dither, that of Laplace noise of
    scale b. Lang, Sofer, Shaked and Shlezinger, "Joint Privacy Enhancement and Quantization in
    Federated Learning", IEEE TSP 2023; the details are those of the authors' experiments.

    **Guarantee.** None that is checked here. Laplace noise plus uniform dither has the variance
    of Laplace noise and not its law, z is not bounded, and mean and standard deviation travel as
    they are.

    Examples
    --------
    >>> codec, update = JoPEQ(epsilon=4.0, bits=8), np.linspace(-1, 1, 5)
    >>> codes, scale = codec.encode(update, SecureRandom(), np.random.default_rng(7))
    >>> codec.decode(codes, scale, np.random.default_rng(7)).shape
    (5,)
    """

    epsilon: float
    bits: int

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, minimum=1e-6, maximum=1e100)
        check_integer("bits", self.bits, minimum=1, maximum=16)
        if self._variance <= 0:
            raise InvalidParameterError(
                "bits", self.bits, f"more for epsilon = {self.epsilon}: the step is too coarse"
            )

    @property
    def step(self) -> float:
        """Distance of two codes' values of z."""
        return 3 * math.sqrt(1 + 8 / self.epsilon**2) / 2.0**self.bits

    @property
    def noise_scale(self) -> float:
        """Scale of the Laplace noise on z."""
        return math.sqrt(self._variance / 2)

    @property
    def _variance(self) -> float:
        return 8 / self.epsilon**2 - self.step**2 / 12

    def encode(
        self, update: Vectors, random: SecureRandom, dither: np.random.Generator
    ) -> tuple[Codes, tuple[float, float]]:
        """Return the codes of an update, and its mean and standard deviation.

        Parameters
        ----------
        update : ndarray of float64, shape (d,)
            One array of the update.
        random : SecureRandom
            For the noise.
        dither : numpy.random.Generator
            For the dither; the server must have one in the same state.
        """
        mean, std = (float(update.mean()), float(update.std())) if update.size else (0.0, 0.0)
        z = (update - mean) / (3 * std) if std > 0 else np.zeros_like(update)
        z = noised(z, "laplace", self.noise_scale, random) + self._dither(update.size, dither)
        half = 2 ** (self.bits - 1)
        codes = np.clip(np.rint(z / self.step), -half, half - 1) + half
        return codes.astype(np.uint8 if self.bits <= 8 else np.uint16), (mean, std)

    def decode(
        self, codes: Codes, scale: tuple[float, float], dither: np.random.Generator
    ) -> Vectors:
        """Return the update of some codes; `dither` is in the state in which the client's was."""
        mean, std = scale
        z = (codes.astype(np.float64) - 2 ** (self.bits - 1)) * self.step
        update: Vectors = mean + 3 * std * (z - self._dither(codes.size, dither))
        return update

    def encode_arrays(
        self, update: Vectors, layout: Layout, random: SecureRandom, dither: np.random.Generator
    ) -> tuple[Codes, list[tuple[float, float]]]:
        """Return the codes of the update of a whole model, and each array's mean and deviation.

        Parameters
        ----------
        update : ndarray of float64, shape (d,)
            The update.
        layout : Layout
            Where its arrays lie.
        random, dither
            As in `encode`.
        """
        encoded = [self.encode(part, random, dither) for part in _parts(update, layout)]
        return np.concatenate([codes for codes, _ in encoded]), [scale for _, scale in encoded]

    def decode_arrays(
        self,
        codes: Codes,
        scales: list[tuple[float, float]],
        layout: Layout,
        dither: np.random.Generator,
    ) -> Vectors:
        """Return the update that `encode_arrays` encoded. What it gets may come from an adversary.

        Raises
        ------
        InvalidParameterError
            If a mean or a deviation is no number up to 2^100, or a deviation is negative.
        """
        for mean, std in scales:
            check_number("mean", mean, minimum=-LARGEST_WIDTH, maximum=LARGEST_WIDTH)
            check_number("std", std, minimum=0, maximum=LARGEST_WIDTH)
        decoded = [
            self.decode(part, scale, dither)
            for part, scale in zip(_parts(codes, layout), scales, strict=True)
        ]
        return np.concatenate(decoded)

    def _dither(self, size: int, generator: np.random.Generator) -> Vectors:
        return generator.uniform(-self.step / 2, self.step / 2, size)


def _parts(vector: NDArray[Any], layout: Layout) -> list[NDArray[Any]]:
    """Return the arrays of a vector, flat (views)."""
    sizes = [math.prod(shape) for shape, _ in layout.parts.values()]
    return np.split(vector, np.cumsum(sizes)[:-1])
