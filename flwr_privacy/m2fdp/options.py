"""Constructor options of M2FDP: the unit protected, the noise, and how models drift apart.

What is ours beside the paper is said where it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_number,
)
from flwr_privacy.keywords import check_options, checked_keywords

from .sensitivity import Drift

__all__ = [
    "RELEASE_STEPS",
    "CleanEvents",
    "DeviceNoise",
    "LemmaDrift",
    "NoNoise",
    "PaperNoise",
    "RecordNoise",
    "SmoothDrift",
    "TierNoise",
    "TierPrivacy",
    "WorstDrift",
]


RELEASE_STEPS = ("round", "segment")
"""Local steps that the paper's sensitivity counts: all of the round, or those since a release."""


class CleanEvents(ABC):
    """Base of the assumptions on how models drift apart in a trusted zone after a clean event."""

    @property
    @abstractmethod
    def law(self) -> Drift:
        """The law by which models drift apart."""


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class WorstDrift(CleanEvents):
    """Assumes nothing: models drift apart as far as their steps reach."""

    @property
    def law(self) -> Drift:
        """The law by which models drift apart."""
        return Drift()


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class SmoothDrift(CleanEvents):
    """Declares the losses smooth, which bounds how much a local step stretches a distance.

    Parameters
    ----------
    smoothness : float
        Smoothness of the losses times the step size of the training, at least 0.

    Raises
    ------
    InvalidParameterError
        If the value is not allowed.
    """

    smoothness: float

    def __post_init__(self) -> None:
        check_number("smoothness", self.smoothness, minimum=0)

    @property
    def law(self) -> Drift:
        """The law by which models drift apart."""
        return Drift(law="smooth", growth=1 + self.smoothness)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class LemmaDrift(CleanEvents):
    """Declares the losses convex and smooth, so that models do not drift apart (Lemma 1)."""

    @property
    def law(self) -> Drift:
        """The law by which models drift apart."""
        return Drift(law="lemma")


class TierPrivacy(ABC):
    """Base of the privacy options: `DeviceNoise`, `RecordNoise`, `PaperNoise` and `NoNoise`."""

    unit: ClassVar[str] = "user"
    noised: ClassVar[bool] = True

    epsilon: float
    delta: float
    clipping_norm: float | None
    edge_noise: bool

    @property
    def clean(self) -> bool:
        """Whether trusted subtrees average inside, without noise, at local events."""
        return False

    @property
    def law(self) -> Drift:
        """The law by which models drift apart, for the noise and for the charges."""
        return Drift()

    @property
    def rate(self) -> float:
        """Share of a device's records in a batch, as the noise counts it."""
        return 1.0

    def alpha_of(self, tier: int, depth: int) -> float:
        """Return the constant of a tier's noise, where there is one."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class TierNoise(TierPrivacy):
    """Base of the privacy options with noise.

    Parameters
    ----------
    epsilon, delta : float, defaults 8.0 and 1e-5
        Budget of a device over the whole training. All devices have the same, wherever their noise
        enters.
    clipping_norm : float, default 1.0
        Largest L2 norm of the update of one local step, ``eta G`` in the paper; k steps may have k
        times that.
    edge_noise : bool, default False
        Whether insecure nodes of tier 1 add noise too, as in a baseline of the paper.
    """

    epsilon: float = 8.0
    delta: float = 1e-5
    clipping_norm: float = 1.0
    edge_noise: bool = False

    def __post_init__(self) -> None:
        if check_number("epsilon", self.epsilon) <= 0:
            raise InvalidParameterError("epsilon", self.epsilon, "a number above 0")
        check_delta(self.delta)
        _check_norm(self.clipping_norm)
        check_flag("edge_noise", self.edge_noise)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class DeviceNoise(TierNoise):
    """Protects all data of a device, around any training.

    `flwr_privacy.m2fdp.calibration.multiplier` computes the noise.

    Parameters
    ----------
    epsilon, delta : float, defaults 8.0 and 1e-5
        Budget of a device over the whole training. All devices have the same, wherever their noise
        enters.
    clipping_norm : float, default 1.0
        Largest L2 norm of the update of one local step, ``eta G`` in the paper; k steps may have k
        times that.
    edge_noise : bool, default False
        Whether insecure nodes of tier 1 add noise too, as in a baseline of the paper.
    clean_events : WorstDrift, SmoothDrift or LemmaDrift, optional
        Has secure subtrees average inside, without noise, at local events; says what is assumed of
        models that drift apart then. By default they do not: what a zone hands out depends on a
        device by its own update alone (Lemma 1 holds as printed), and its devices are asked once
        between two noised releases.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> DeviceNoise(epsilon=4.0, clean_events=SmoothDrift(smoothness=0.5)).law
    Drift(law='smooth', growth=1.5)
    """

    clean_events: WorstDrift | SmoothDrift | LemmaDrift | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(DeviceNoise, self, "clean_events")

    @property
    def clean(self) -> bool:
        """Whether trusted subtrees average inside, without noise, at local events."""
        return self.clean_events is not None

    @property
    def law(self) -> Drift:
        """The law by which models drift apart, for the noise and for the charges."""
        return Drift() if self.clean_events is None else self.clean_events.law


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class RecordNoise(TierNoise):
    """Protects one record, where the training takes Poisson batches.

    See `flwr_privacy.clients.torch.train_poisson`. There are no averages without noise inside
    trusted zones: batches are counted.

    Parameters
    ----------
    epsilon, delta, clipping_norm, edge_noise
        As in `DeviceNoise`.
    sampling_rate : float
        Share of a device's records in a batch.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> RecordNoise(sampling_rate=0.05).unit
    'record'
    """

    unit: ClassVar[str] = "record"

    sampling_rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate(self.sampling_rate)

    @property
    def rate(self) -> float:
        """Share of a device's records in a batch, as the noise counts it."""
        return self.sampling_rate


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class PaperNoise(TierNoise):
    """The noise of Proposition 1 and Lemma 1, as printed; the guarantee states its true cost.

    Parameters
    ----------
    epsilon, delta, clipping_norm, edge_noise
        As in `DeviceNoise`, but that the noise does not keep the budget that it is named after.
    sampling_rate : float
        Share of a device's records in a batch.
    alpha : float or sequence of float
        Constant of the noise, for all tiers or for each of tier 1 to L: the paper gives none.
    release_steps : {"round", "segment"}, default "round"
        Whose local steps the sensitivity counts at a release.
    clean_events : bool, default True
        Whether secure subtrees average inside, without noise, at local events.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> PaperNoise(sampling_rate=0.05, alpha=(0.1, 0.2)).alpha_of(2, depth=2)
    0.2
    """

    sampling_rate: float
    alpha: float | Sequence[float]
    release_steps: Literal["round", "segment"] = "round"
    clean_events: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate(self.sampling_rate)
        check_choice("release_steps", self.release_steps, RELEASE_STEPS)
        check_flag("clean_events", self.clean_events)
        if not isinstance(self.alpha, Sequence):
            self.alpha_of(1, 1)

    @property
    def clean(self) -> bool:
        """Whether trusted subtrees average inside, without noise, at local events."""
        return self.clean_events

    @property
    def rate(self) -> float:
        """Share of a device's records in a batch, as the noise counts it."""
        return self.sampling_rate

    def alpha_of(self, tier: int, depth: int) -> float:
        """Return the constant of a tier's noise.

        Raises
        ------
        InvalidParameterError
            If it is missing or not above 0.
        """
        alpha = self.alpha
        if isinstance(alpha, Sequence):
            if len(alpha) != depth:
                raise InvalidParameterError("alpha", alpha, f"a number, or {depth}, one per tier")
            alpha = alpha[tier - 1]
        if check_number("alpha", alpha) <= 0:
            raise InvalidParameterError("alpha", alpha, "above 0")
        return float(alpha)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class NoNoise(TierPrivacy):
    """No noise and no guarantee: for comparisons in simulations.

    Parameters
    ----------
    clipping_norm : float, optional
        Largest L2 norm of the update of one local step; by default nothing is clipped.
    clean_events : bool, default False
        Whether secure subtrees average inside at local events.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    noised: ClassVar[bool] = False
    epsilon = 8.0  # travels, and is charged to nobody
    delta = 1e-5
    edge_noise = False

    clipping_norm: float | None = None
    clean_events: bool = False

    def __post_init__(self) -> None:
        check_flag("clean_events", self.clean_events)
        if self.clipping_norm is not None:
            _check_norm(self.clipping_norm)

    @property
    def clean(self) -> bool:
        """Whether trusted subtrees average inside, without noise, at local events."""
        return self.clean_events


def _check_norm(norm: float) -> None:
    if check_number("clipping_norm", norm) <= 0:
        raise InvalidParameterError("clipping_norm", norm, "a number above 0")


def _check_rate(rate: float) -> None:
    if not 0 < check_number("sampling_rate", rate) <= 1:
        raise InvalidParameterError("sampling_rate", rate, "above 0, at most 1")
