"""The server's steps: compute the new model from coded data and the weights of a round.

Source: "Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv,
2024), algorithm 1.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError, InvalidParameterError, check_number

from .encoding import Moments, moments_gradient, symmetrise
from .options import Weighting
from .scfl import projected_gradient
from .steps import StepSize
from .sums import RoundSums
from .terms import SCFL, GradientTerms, SetupTerms
from .weights import AlphaPolicy, coded_energy

__all__ = ["ACFLDescent", "GlobalCodedData", "effective_rate"]

logger = logging.getLogger("flwr.privacy")

Rates = float | Mapping[str, float] | None
"""Probability that a device misses a round: of all, of each by its name, or unknown."""

_NO_CODED_DATA = "a step size: it can be computed from coded data alone, and there are none"
_LARGEST_VALUE = 1e60  # of a model: beyond, it diverges, and squares will overflow


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalCodedData:
    """The global coded data set (ACFL, (4)).

    Parameters
    ----------
    moments : Moments
        The sum of the local ones; of projected rows with SCFL.
    terms : SetupTerms
        What the devices were asked.
    devices : int
        How many are in it.
    symmetrised : bool, default False
        Whether the server makes the matrix of the features symmetric (not in the paper).
    """

    moments: Moments
    terms: SetupTerms
    devices: int
    symmetrised: bool = False

    def joined(self, moments: Moments, devices: int) -> "GlobalCodedData":
        """Return the set with those of more devices added."""
        both = Moments(
            self.moments.features + moments.features, self.moments.labels + moments.labels
        )
        return replace(self, moments=both, devices=self.devices + devices)

    def gradient(self, model: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the coded gradient of a model (d, o) (ACFL, (8))."""
        features, labels = self.moments
        if self.terms.encoding == SCFL:
            s = self._variances[0]
            return projected_gradient(features, labels, model, devices=self.devices, s=s)
        return moments_gradient(Moments(self._curvature, labels), model)

    def energy(self, norm_square: float) -> float:
        """Return D_t for the squared norm of a model: what the noise of one device is worth."""
        first, second = self._variances
        d, o = self.terms.features, self.terms.labels
        return coded_energy(norm_square, first, second, d, o, symmetrised=self.symmetrised)

    def eigenvalues(self) -> tuple[float, float]:
        """Return the least and the largest one of the symmetric part of the coded features."""
        values = np.linalg.eigvalsh(symmetrise(self._curvature))
        return float(values[0]), float(values[-1])

    @property
    def _curvature(self) -> NDArray[np.float64]:
        features = self.moments.features
        if self.terms.encoding == SCFL:
            gram = features.T @ features / len(features)
            unbiased: NDArray[np.float64] = gram - self.devices * self._variances[0] * np.eye(
                len(gram)
            )
            return unbiased
        return symmetrise(features) if self.symmetrised else features

    @property
    def _variances(self) -> tuple[float, float]:
        """Variances of the noise that one device has added."""
        share = self.terms.share_of
        return share(self.terms.sigma_features) ** 2, share(self.terms.sigma_labels) ** 2


class ACFLDescent:
    """The steps of one training.

    Parameters
    ----------
    weighting : Weighting
        How a round weighs its two gradients.
    noise : str
        What is noised, as the wire says it.
    model_bound : float, optional
        As of `flwr_privacy.acfl.weights.AlphaPolicy`.
    learning_rate : float, optional
        Step size; by default one over the largest eigenvalue of the coded features plus `ridge`.
    schedule, shift
        As of `flwr_privacy.acfl.steps.StepSize`.
    ridge : float
        mu of a term ``mu/2 |W|^2``.
    project : bool
        Whether the model is kept within the norm `model_bound`.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    def __init__(
        self,
        *,
        weighting: Weighting,
        noise: str,
        model_bound: float | None,
        learning_rate: float | None,
        schedule: str,
        shift: float,
        ridge: float,
        project: bool,
    ) -> None:
        self._weighting, self._model_bound = weighting, model_bound
        self._alpha = weighting.alpha_for(noise)
        StepSize(1.0 if learning_rate is None else learning_rate, schedule, shift)
        if project and model_bound is None:
            raise InvalidParameterError("model_bound", None, "a bound, with project = True")
        self._learning_rate = learning_rate
        self._schedule = schedule, shift
        self._ridge = check_number("ridge", ridge, minimum=0)
        self._radius = model_bound if project else None
        self._policy: AlphaPolicy | None = None
        self._seen: dict[str, Any] | None = None  # of a policy for other devices
        self._found_rate: float | None = None
        self.numbers: dict[str, float] = {}

    def renew(self) -> None:
        """Choose the weights anew at the next step, because the set of devices has changed."""
        self._seen, self._policy = self.state(), None
        self._found_rate = None

    def step(
        self,
        model: NDArray[np.float64],
        found: RoundSums | None,
        *,
        t: int,
        devices: int,
        share: float,
        coded: GlobalCodedData | None,
        asked: GradientTerms | None,
    ) -> NDArray[np.float64] | None:
        """Return the model after a round (ACFL, (9) and (10)), or None where it stays.

        Parameters
        ----------
        model : (d, o) float64
            The model before it.
        found : RoundSums, optional
            What came; None if nothing did.
        t : int
            The round, from 1.
        devices : int
            Over how many the objective is a sum.
        share : float
            Share of them that a round asks.
        coded : GlobalCodedData, optional
            The coded data set, if there is one.
        asked : GradientTerms, optional
            What the devices were asked.

        Raises
        ------
        DataError
            If the model diverges.
        InvalidParameterError
            If the coded data tell no step size.
        """
        found = RoundSums(0, np.zeros_like(model), 0.0) if found is None else found
        norm_square = float((model**2).sum())
        bounded = self._alpha == "bounds"
        weighed = self._model_bound**2 if bounded and self._model_bound else norm_square
        energy = 0.0 if coded is None else coded.energy(weighed)
        if self._policy is None:
            self._policy = AlphaPolicy(
                self._alpha,
                straggler_rate=effective_rate(self._weighting.straggler_rate, share),
                predictable=self._weighting.predictable,
                gradient_bound=self._weighting.gradient_bound,
                model_bound=self._model_bound,
            )
            if self._seen is not None:
                self._policy.load(self._seen)
        weights = self._policy.weigh(
            t=t,
            answered=found.answered,
            devices=max(devices, found.answered),
            squares=found.squares,
            energy=energy,
            gradient_noise=_noise_in(asked),
        )
        self.numbers = {"C2": norm_square, "energy": energy}
        if self._policy.beta2 is not None:
            self.numbers["beta2"] = self._policy.beta2
        if self._policy.rate is not None and not self._weighting.coded_only:
            self.numbers["straggler_rate"] = self._policy.rate
        if weights is None or (found.answered == 0 and weights.coded == 0):
            return None
        direction = weights.received * found.gradient + self._ridge * model
        if weights.coded and coded is not None:
            direction += weights.coded * coded.gradient(model)
        size = StepSize(self._rate_of(coded), *self._schedule).at(t)
        self.numbers |= {"alpha": weights.coded, "received_weight": weights.received, "step": size}
        new = self._projected(model - size * direction)
        if not np.abs(new).max() <= _LARGEST_VALUE:
            raise DataError(
                f"the model diverges in round {t}: the step {size:.3g} is too large, or the coded "
                "data have eigenvalues below 0 (more ridge, less noise)"
            )
        return new

    def state(self) -> dict[str, Any] | None:
        """Return what the weights follow from, as plain values."""
        return self._seen if self._policy is None else self._policy.state()

    def load(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned."""
        self._seen, self._policy = state, None

    def _rate_of(self, coded: GlobalCodedData | None) -> float:
        if self._learning_rate is not None:
            return self._learning_rate
        if self._found_rate is None:
            if coded is None:
                raise InvalidParameterError("learning_rate", None, _NO_CODED_DATA)
            least, largest = coded.eigenvalues()
            logger.info(
                "eigenvalues of the coded features: %.4g to %.4g; one below 0 makes a fixed weight "
                "unstable",
                *(least, largest),
            )
            if largest + self._ridge <= 0:
                raise InvalidParameterError(
                    "learning_rate", None, "a step size: the coded data have no eigenvalue above 0"
                )
            self._found_rate = 1 / (largest + self._ridge)
        return self._found_rate

    def _projected(self, model: NDArray[np.float64]) -> NDArray[np.float64]:
        norm = float(np.linalg.norm(model))
        if self._radius is None or norm <= self._radius:
            return model
        return model * (self._radius / norm)


def effective_rate(rate: Rates, q: float) -> Rates:
    """Return the rates at which gradients are missing where only a share q of them is asked for.

    Examples
    --------
    >>> effective_rate(0.2, 0.5)
    0.6
    """
    if rate is None or q >= 1:
        return rate
    if isinstance(rate, Mapping):
        return {name: 1 - q * (1 - own) for name, own in rate.items()}
    return 1 - q * (1 - rate)


def _noise_in(asked: GradientTerms | None) -> float:
    """Return the expected square of the norm of the noise in one gradient."""
    if asked is None:
        return 0.0
    sigma = asked.share_of(asked.sigma) / asked.batch_fraction
    return asked.features * asked.labels * sigma**2
