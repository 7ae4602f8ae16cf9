"""Simulates many ACFL trainings at once in NumPy, to compare policies round by round.

The schemes of "Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation"
(arXiv, 2024), sections 3 and 5, on the data of one `ACFLSyntheticData`: ACFL with each of its
policies, and what it is compared with. All settings of a call meet the same stragglers and the same
noise, up to its scale, so their difference is that of the settings.

The noise is drawn for the sum of the devices only, ``N(0, N s)``, floating point, from a seeded
generator: this rehearses a training and protects nobody.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import Moments
from flwr_privacy.acfl.steps import StepSize
from flwr_privacy.acfl.terms import ENCODINGS
from flwr_privacy.acfl.weights import AlphaPolicy, Weights, coded_energy
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.wire.identity import stream

from .synthetic_data import ACFLSyntheticData

__all__ = ["ACFLSettings", "ACFLTrainingCurve", "coded_set", "simulate", "stragglers"]

Array = NDArray[np.float64]

_BLOCK = 2**22  # values that the sums of a block of rounds take


@dataclass(frozen=True, kw_only=True)
class ACFLSettings:
    """One training: what is encoded, with which noise, who straggles, and how it is weighed.

    The schemes of section 5 are: ACFL as it is by default; NA ``alpha=0.5``; uncoded and rescaled
    ``alpha=0``; coded only ``alpha=1``; stragglers ignored ``alpha=0, assumed_rate=0``; everybody
    answers ``alpha=0, straggler_rate=0``; SCFL ``alpha=0.5, encoding="scfl", sigma2_sq=0``.

    Parameters
    ----------
    alpha : {"estimated", "bounds", "horizon"} or float, default "estimated"
        As of `AlphaPolicy`.
    predictable : bool, default False
        As of `AlphaPolicy`.
    straggler_rate : float, default 0.2
        Probability with which a device misses a round, at least 0 and below 1.
    assumed_rate : float, optional
        What the server takes for it. Default: the rate as it is.
    silent : int, default 0
        Devices that never answer, the first ones (not in the paper); for each round the others are
        drawn with `straggler_rate`.
    sigma1_sq, sigma2_sq : float, default 1.0
        Variances of a device's noise on features' and labels' moments; with ``scfl`` on projected
        features and labels.
    encoding : {"moments", "scfl"}, default "moments"
        ACFL's, (2) and (3), or SCFL's projection onto as many rows as there are features (ours: of
        SCFL the paper says little).
    gradient_bound, model_bound : float, optional
        beta and C, for ``bounds``.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed; if SCFL is to be weighed by a policy, which has no formula for
        its noise.
    """

    alpha: str | float = "estimated"
    predictable: bool = False
    straggler_rate: float = 0.2
    assumed_rate: float | None = None
    silent: int = 0
    sigma1_sq: float = 1.0
    sigma2_sq: float = 1.0
    encoding: str = "moments"
    gradient_bound: float | None = None
    model_bound: float | None = None

    def __post_init__(self) -> None:
        check_choice("encoding", self.encoding, ENCODINGS)
        check_integer("silent", self.silent, minimum=0)
        check_number("sigma1_sq", self.sigma1_sq, minimum=0)
        check_number("sigma2_sq", self.sigma2_sq, minimum=0)
        if self.encoding == "scfl" and isinstance(self.alpha, str):
            raise InvalidParameterError("alpha", self.alpha, "a number for encoding = 'scfl'")
        for name, rate in (("straggler_rate", self.straggler_rate), ("assumed_rate", self.rate)):
            if not 0 <= check_number(name, rate) < 1:
                raise InvalidParameterError(name, rate, "a number of at least 0 and below 1")
        self.policy()

    @property
    def rate(self) -> float:
        """What the server takes for the probability that a device straggles."""
        return self.straggler_rate if self.assumed_rate is None else self.assumed_rate

    def policy(self) -> AlphaPolicy:
        """Return what weighs the rounds of one training."""
        return AlphaPolicy(
            self.alpha,
            straggler_rate=self.rate,
            predictable=self.predictable,
            gradient_bound=self.gradient_bound,
            model_bound=self.model_bound,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ACFLTrainingCurve:
    """Losses and weights of the simulated trainings; S settings, T rounds.

    Parameters
    ----------
    excess : ndarray of float64, shape (S, T + 1)
        ``f(W) - f(W*)`` before the first round and after each; infinite or NaN once the model has
        diverged beyond all floats.
    least_loss : float
        f(W*).
    coded, received : ndarray of float64, shape (S, T)
        The weights of the rounds; NaN where a round was skipped.
    models : ndarray of float64, shape (S, d, o)
        The last models.
    """

    excess: Array
    least_loss: float
    coded: Array
    received: Array
    models: Array

    @property
    def losses(self) -> Array:
        """The loss f(W), ACFL, (1), a sum over all records; shape (S, T + 1)."""
        return self.excess + self.least_loss


def stragglers(
    data: ACFLSyntheticData, setting: ACFLSettings, *, rounds: int, seed: int
) -> NDArray[np.bool_]:
    """Return who answers in which round, shape (rounds, N).

    All settings compare the same uniform numbers with their own rates: who misses a round at one
    rate misses it at every larger one.
    """
    chances = _chances(seed).random((rounds, data.devices))
    return _answered(chances, setting.straggler_rate, setting.silent)


def coded_set(data: ACFLSyntheticData, setting: ACFLSettings, *, seed: int) -> Moments:
    """Return the sum of all coded data sets, so that the coded gradient is ``features W - labels``.

    Of ``moments`` ACFL, (4). The sum ``(Xt, Yt)`` of SCFL's projected data has the gradient
    ``Xt^T (Xt W - Yt) / c - N s W`` with c rows and noise of variance s, which is of that form.

    The noise of two settings differs by its scale only.
    """
    draws = stream(seed, "acfl noise", setting.encoding)
    devices, _, d = data.features.shape
    first, second = draws.normal(size=(d, d)), draws.normal(size=(d, data.labels.shape[2]))
    first *= math.sqrt(devices * setting.sigma1_sq)
    second *= math.sqrt(devices * setting.sigma2_sq)
    if setting.encoding == "moments":
        return Moments(data.curvature + first, data.cross.sum(axis=0) + second)
    projection = draws.normal(size=(devices, d, data.features.shape[1]))
    features = (projection @ data.features).sum(axis=0) + first
    labels = (projection @ data.labels).sum(axis=0) + second
    bias = devices * setting.sigma1_sq * np.eye(d)
    return Moments(features.T @ features / d - bias, features.T @ labels / d)


def simulate(
    data: ACFLSyntheticData,
    settings: Sequence[ACFLSettings],
    *,
    rounds: int,
    steps: StepSize,
    seed: int,
    ridge: float = 0.0,
) -> ACFLTrainingCurve:
    """Train all settings at once, ACFL, (7) to (10), section 3.2.

    Parameters
    ----------
    data : ACFLSyntheticData
        The data, and the first model.
    settings : Sequence of ACFLSettings
        What to train, at least one.
    rounds : int
        T, at least 1.
    steps : StepSize
        Of all settings.
    seed : int
        Root of the stragglers and of the noise.
    ridge : float, default 0.0
        A penalty ``ridge / 2 |W|^2`` whose gradient the server adds (not in the paper); it is no
        part of the losses.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> from flwr_privacy.simulations.research.acfl.synthetic_data import paper_data
    >>> data = paper_data(0, N=20, m=30)
    >>> both = [ACFLSettings(), ACFLSettings(alpha=0.5)]
    >>> curve = simulate(data, both, rounds=100, steps=StepSize(2e-3, "inverse"), seed=0)
    >>> bool(curve.excess[0, -1] < curve.excess[1, -1] < curve.excess[0, 0])
    True
    """
    if not settings:
        raise InvalidParameterError("settings", [], "at least one")
    check_integer("rounds", rounds, minimum=1)
    check_number("ridge", ridge, minimum=0)
    for setting in settings:
        check_integer("silent", setting.silent, minimum=0, maximum=data.devices)
    curve = ACFLTrainingCurve(
        excess=np.empty((len(settings), rounds + 1)),
        least_loss=data.least_loss,
        coded=np.empty((len(settings), rounds)),
        received=np.empty((len(settings), rounds)),
        models=np.repeat(data.start[None], len(settings), axis=0),
    )
    answers = _Answers(settings, data, rounds=rounds, seed=seed)
    weighing = _Weighing(settings, data)
    coded = [coded_set(data, setting, seed=seed) for setting in settings]
    features, labels = (np.array(part) for part in zip(*coded, strict=True))
    models = curve.models
    with np.errstate(over="ignore", invalid="ignore"):  # of a model that diverges
        for t in range(1, rounds + 1):
            apart = models - data.best
            curve.excess[:, t - 1] = _excess(apart, data)
            received, squares, count = answers.of(t, apart)
            a, w = weighing.of(t, count, squares, _dot(models, models))
            curve.coded[:, t - 1], curve.received[:, t - 1] = a, w
            step = a[:, None, None] * (features @ models - labels)
            step += w[:, None, None] * received
            step += ridge * models
            step *= steps.at(t)
            step[np.isnan(a)] = 0.0
            models -= step
        curve.excess[:, rounds] = _excess(models - data.best, data)
    return curve


class _Answers:
    """What came in a round, from sums over the devices that answered.

    A device's gradient is ``A_i E - R_i`` with E = W - W* and R_i = B_i - A_i W*, so its sum and
    the sum of its squares take the sums of A_i, R_i, A_i^2, A_i R_i and |R_i|^2 only: no round has
    to touch the devices. The sums of a block of rounds are one matrix product.
    """

    def __init__(
        self, settings: Sequence[ACFLSettings], data: ACFLSyntheticData, *, rounds: int, seed: int
    ) -> None:
        streams = list(dict.fromkeys((one.straggler_rate, one.silent) for one in settings))
        self._streams = streams
        self._of_setting = [streams.index((one.straggler_rate, one.silent)) for one in settings]
        self._chances = _chances(seed)
        self._rounds = rounds
        gram, rest = data.gram, data.cross - data.gram @ data.best
        number = np.ones(data.devices)
        self._devices = (gram, rest, gram @ gram, gram @ rest, _dot(rest, rest), number)
        values = sum(part[0].size for part in self._devices)
        self._block = max(1, _BLOCK // (values * len(streams)))
        self._sums: list[Array] = []

    def of(self, t: int, apart: Array) -> tuple[Array, Array, Array]:
        """Return the sum of the gradients, the sum of their squares and their number."""
        row = (t - 1) % self._block
        if row == 0:
            self._sums = self._next(min(self._block, self._rounds - (t - 1)))
        own = (part[self._of_setting, row] for part in self._sums)
        gram, rest, squared, mixed, constant, number = own
        squares = _dot(apart, squared @ apart - 2 * mixed) + constant
        return gram @ apart - rest, np.maximum(squares, 0.0), number

    def _next(self, count: int) -> list[Array]:
        """Return the sums of the next rounds, each of shape (streams, count, ...)."""
        chances = self._chances.random((count, len(self._devices[0])))
        answered = np.array([_answered(chances, *one) for one in self._streams], dtype=np.float64)
        return [np.tensordot(answered, part, axes=1) for part in self._devices]


class _Weighing:
    """`AlphaPolicy` for all settings at once; what the rare cases are for is said there."""

    def __init__(self, settings: Sequence[ACFLSettings], data: ACFLSyntheticData) -> None:
        d, o = data.start.shape
        self._rate = np.array([one.rate for one in settings])
        self._noise = np.array([(d * one.sigma1_sq, d * o * one.sigma2_sq) for one in settings])
        self._predictable = np.array([one.predictable for one in settings])
        self._horizon = np.array([one.alpha == "horizon" for one in settings])
        constant = [_constant(one, data) for one in settings]
        self._constant = np.array([weights is not None for weights in constant])
        self._given = np.array([weights or (math.nan, math.nan) for weights in constant])
        self._beta2 = np.zeros(len(settings))
        self._known = np.zeros(len(settings), dtype=np.bool_)

    def of(self, t: int, count: Array, squares: Array, size: Array) -> tuple[Array, Array]:
        """Return the weights of round t; NaN for a round that is skipped."""
        came = count > 0
        before, known = self._beta2, self._known
        self._beta2 = np.where(came, squares / np.maximum(count, 1), before)
        self._known = known | came
        beta2 = np.where(self._predictable & known, before, self._beta2)
        energy = (self._noise[:, 0] * size + self._noise[:, 1]) * np.where(self._horizon, t, 1)
        a, w = _stable_weights(self._rate, beta2, energy)
        a[~self._known] = w[~self._known] = math.nan
        return (
            np.where(self._constant, self._given[:, 0], a),
            np.where(self._constant, self._given[:, 1], w),
        )


def _constant(setting: ACFLSettings, data: ACFLSyntheticData) -> Weights | None:
    """Return the weights of a setting that has the same in all rounds."""
    if setting.alpha in ("estimated", "horizon"):
        return None
    energy = coded_energy(
        (setting.model_bound or 0.0) ** 2, setting.sigma1_sq, setting.sigma2_sq, *data.start.shape
    )
    return setting.policy().weigh(t=1, answered=0, devices=data.devices, squares=0.0, energy=energy)


def _stable_weights(p: Array, beta2: Array, energy: Array) -> tuple[Array, Array]:
    """Return `stable_weights` of each entry."""
    shift = -np.frexp(np.maximum(beta2, energy))[1]
    missing, coded = p * np.ldexp(beta2, shift), np.ldexp(energy, shift)
    den = missing + (1 - p) * coded
    with np.errstate(divide="ignore"):
        a, w = missing / den, coded / den
    uncoded = ~((den > 0) & np.isfinite(beta2) & np.isfinite(energy) & np.isfinite(w))
    a[uncoded], w[uncoded] = 0.0, 1 / (1 - p[uncoded])
    return a, w


def _chances(seed: int) -> np.random.Generator:
    return stream(seed, "acfl stragglers")


def _answered(chances: Array, rate: float, silent: int) -> NDArray[np.bool_]:
    answered: NDArray[np.bool_] = chances >= rate
    answered[:, :silent] = False
    return answered


def _dot(first: Array, second: Array) -> Array:
    """Return the inner products of matrices one by one, shape (S,)."""
    products: Array = np.einsum("sij,sij->s", first, second)
    return products


def _excess(apart: Array, data: ACFLSyntheticData) -> Array:
    return _dot(apart, data.curvature @ apart) / 2
