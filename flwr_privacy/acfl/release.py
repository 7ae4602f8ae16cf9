"""The releases of an ACFL client: its coded data set, and gradients of a squared loss."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError
from flwr_privacy.pipeline.mechanism import Answer, Facts, Mechanism, ReleasePlan
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid, saturated
from flwr_privacy.privacy.noise import discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS, Fields

from .encoding import Moments, clipped_gradient, upper
from .sums import FEATURES, GRADIENT, LABELS, SIZE, coded_sum, gradient_sum, size_of
from .terms import NO_NOISE, RECORD, SCFL, DataTerms, GradientTerms, SetupTerms

__all__ = ["CodedGradient", "Data", "LocalCodedData"]

_PROJECTION_STEPS = 2**16  # of the grid in a standard normal deviate of a projection


class Data(Protocol):
    """Features X (m, d) and labels Y (m, o) of a client, float64, within their bounds."""

    @property
    def features(self) -> NDArray[np.float64]:
        """X."""
        ...

    @property
    def labels(self) -> NDArray[np.float64]:
        """Y."""
        ...

    def take_moments(self) -> Moments:
        """Return X^T X and X^T Y."""
        ...

    def gradient(self, model: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``X^T (X W - Y)``."""
        ...


class _Gradient(NamedTuple):
    gradient: NDArray[np.float64]
    size: NDArray[np.float64]


@dataclass(frozen=True)
class LocalCodedData(Mechanism):
    """The local coded data set of a client (ACFL, (2) and (3)), given once for an experiment.

    Parameters
    ----------
    terms : SetupTerms
        What was asked.
    """

    terms: SetupTerms

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        terms, charge = self.terms, self.terms.charge()
        terms.check_grid()
        _check_facts(terms, facts)
        sigma = min(terms.sigma_features, terms.sigma_labels)
        return _plan(terms, charge, 0.0 if charge is None else charge.noise_multiplier, sigma)

    def measure(self, start: Arrays, outcome: Data) -> Moments | Data:
        """Return the moments of the data, or the data themselves for a random projection."""
        if self.terms.encoding == SCFL:
            return outcome
        features, labels = outcome.take_moments()
        return Moments(upper(features) if self.terms.symmetric else features, labels)

    def noise(self, measured: Any, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the coded data set with its noise, a share of it, or none."""
        terms = self.terms
        coded = _projected(terms, measured, random) if terms.encoding == SCFL else measured
        own: Fields = {METRICS: {"num-examples": 1}}
        if not terms.coded:
            return {FEATURES: coded.features, LABELS: coded.labels}, own
        sigmas = (terms.sigma_features, terms.sigma_labels)
        out = {
            name: _noised(terms, values, sigma, random)
            for name, values, sigma in zip((FEATURES, LABELS), coded, sigmas, strict=True)
        }
        return out, own

    def accumulator(self, start: Arrays) -> WeightedMean:
        """Return an empty sum of coded data sets."""
        return coded_sum(self.terms)


@dataclass(frozen=True)
class CodedGradient(Mechanism):
    """The gradient of a client's squared loss at a model, and values that give its size.

    Parameters
    ----------
    terms : GradientTerms
        What was asked.
    """

    terms: GradientTerms

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        terms = self.terms
        terms.check_grid()
        _check_facts(terms, facts)
        terms.check_model(float(np.linalg.norm(_model(terms, start))))
        return _plan(terms, terms.charge(), terms.noise_multiplier, terms.sigma)

    def measure(self, start: Arrays, outcome: Data) -> _Gradient:
        """Return the gradient, of each record clipped where records are protected.

        Raises
        ------
        DataError
            If an exact gradient is beyond what the secure sum takes.
        """
        terms, model = self.terms, _model(self.terms, start)
        if terms.noise == RECORD:
            norm = terms.clipping_norm
            gradient, _ = clipped_gradient(outcome.features, outcome.labels, model, norm)
            return _Gradient(gradient, size_of(gradient, terms))
        gradient = outcome.gradient(model)
        size = size_of(gradient, terms)
        if terms.coded:
            values = np.append(gradient.reshape(-1), size)
            if not np.isfinite(values).all() or np.abs(values).max() > terms.gradient_bound:
                raise DataError("a gradient has a value beyond the range of the secure sum")
        return _Gradient(gradient, size)

    def noise(self, measured: _Gradient, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the gradient with its noise, a share of it, or none."""
        terms = self.terms
        own: Fields = {METRICS: {"num-examples": 1}}
        gradient, size = measured
        if not terms.coded:
            return {GRADIENT: gradient, SIZE: size}, own
        return {
            GRADIENT: _noised(terms, gradient, terms.sigma, random),
            SIZE: _noised(terms, size, terms.sigma, random),
        }, own

    def accumulator(self, start: Arrays) -> WeightedMean:
        """Return an empty sum of gradients and their sizes."""
        return gradient_sum(self.terms)


def _plan(terms: DataTerms, charge: Any, noise_multiplier: float, sigma: float) -> ReleasePlan:
    return ReleasePlan(
        unit="record",
        charge=charge,
        epsilon=terms.epsilon,
        delta=terms.delta,
        noise_multiplier=noise_multiplier,
        sigma=sigma,
        proven=terms.noise == RECORD,
        parties=terms.parties,
        needs_pins=terms.noise != NO_NOISE,
        largest_code=CODE_LIMIT if terms.parties else 0,
    )


def _check_facts(terms: DataTerms, facts: Facts) -> None:
    """Refuse terms that are about other data than the node has."""
    if facts.records is not None and facts.columns:
        terms.check_sizes(facts.records, *facts.columns)


def _model(terms: GradientTerms, arrays: Arrays) -> NDArray[np.float64]:
    if len(arrays) != 1:
        raise ProtocolError(f"{len(arrays)} arrays were sent: expected one, the model")
    (array,) = arrays.values()
    shape = (terms.features, terms.labels)
    if np.shape(array) != shape:
        raise InvalidParameterError("model", np.shape(array), f"shape {shape}")
    model = np.asarray(array, dtype=np.float64)
    if not np.isfinite(model).all():
        raise ProtocolError("the model that was sent has NaN or infinity")
    return model


def _projected(terms: SetupTerms, data: Data, random: SecureRandom) -> Moments:
    """Return random combinations of the records, as many as there are features (SCFL)."""
    rows, count = terms.features, len(data.features)
    steps = discrete_gaussian(rows * count, _PROJECTION_STEPS, random)
    mixing = steps.reshape(rows, count) / _PROJECTION_STEPS
    return Moments(mixing @ data.features, mixing @ data.labels)


def _noised(
    terms: SetupTerms | GradientTerms,
    values: NDArray[np.float64],
    sigma: float,
    random: SecureRandom,
) -> NDArray[Any]:
    """Return the codes of some values with the client's part of the noise."""
    grid = CodeGrid(terms.grid)
    codes = grid.encode(values.reshape(-1))
    if sigma > 0:
        codes += discrete_gaussian(codes.size, terms.share_of(sigma) / grid.step, random)
    # A share may not saturate, which its sum would show: the secure sum refuses it instead.
    whole: NDArray[Any] = codes if terms.parties else saturated(codes)
    return whole.reshape(values.shape)
