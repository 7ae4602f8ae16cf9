"""Synthetic data for simulations of ACFL: the paper's, and one whose devices differ.

The paper is "Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation"
(arXiv, 2024). Its own data are realisable: one model fits all devices exactly, so at the optimum
every device's gradient is zero, and a device that does not answer costs nothing but a shorter
step. On devices that differ (ours, not in the paper) the gradients only cancel in the sum.

Everything here comes from ordinary seeded generators: it is data, and protects nobody.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.wire.identity import stream

__all__ = ["ACFLSyntheticData", "heterogeneous_data", "paper_data"]

Array = NDArray[np.float64]

_SPREAD = 1 / 30  # of the entries of models, in the paper's simulations
_DIFFERENCE = 5.0  # of the devices' models, in the same unit
_SCALES = (0.1, 1.0)  # of a device's features


@dataclass(frozen=True, kw_only=True, eq=False)
class ACFLSyntheticData:
    """The data of all devices, and the model that a training starts from.

    Parameters
    ----------
    features : ndarray of float64, shape (N, m, d)
        Features of N devices with m records each.
    labels : ndarray of float64, shape (N, m, o)
        Their labels.
    start : ndarray of float64, shape (d, o)
        The first model.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit.
    """

    features: Array
    labels: Array
    start: Array

    def __post_init__(self) -> None:
        if self.features.ndim != 3 or 0 in self.features.shape:
            raise InvalidParameterError("features", self.features.shape, "a shape (N, m, d)")
        devices, records, d = self.features.shape
        if self.labels.ndim != 3 or self.labels.shape[:2] != (devices, records):
            allowed = f"a shape ({devices}, {records}, o)"
            raise InvalidParameterError("labels", self.labels.shape, allowed)
        if self.start.shape != (d, self.labels.shape[2]):
            allowed = f"the shape {(d, self.labels.shape[2])}"
            raise InvalidParameterError("start", self.start.shape, allowed)

    @property
    def devices(self) -> int:
        """Number of devices, N."""
        return int(self.features.shape[0])

    @cached_property
    def gram(self) -> Array:
        """The devices' ``A_i = X_i^T X_i``, shape (N, d, d)."""
        gram: Array = self.features.transpose(0, 2, 1) @ self.features
        return gram

    @cached_property
    def cross(self) -> Array:
        """The devices' ``B_i = X_i^T Y_i``, shape (N, d, o)."""
        cross: Array = self.features.transpose(0, 2, 1) @ self.labels
        return cross

    @cached_property
    def curvature(self) -> Array:
        """The Hessian of the problem for one column of the model, A = sum A_i, shape (d, d)."""
        return np.asarray(self.gram.sum(axis=0))

    @cached_property
    def best(self) -> Array:
        """The model W* with the least loss, shape (d, o)."""
        best: Array = np.linalg.lstsq(self.curvature, self.cross.sum(axis=0), rcond=None)[0]
        return best

    @cached_property
    def least_loss(self) -> float:
        """The least loss, f(W*)."""
        residuals = self.features @ self.best - self.labels
        return float(np.sum(residuals**2)) / 2

    @cached_property
    def convexity(self) -> float:
        """The strong convexity of f: the least eigenvalue of A."""
        return float(np.linalg.eigvalsh(self.curvature)[0])

    def excess(self, model: Array) -> float:
        """Return ``f(W) - f(W*)`` of a model."""
        apart = model - self.best
        return float(np.sum(apart * (self.curvature @ apart))) / 2


def paper_data(
    seed: int, *, N: int = 100, m: int = 100, d: int = 10, o: int = 10
) -> ACFLSyntheticData:
    """Return the paper's data (Fig. 3 and 4): one model fits all devices exactly.

    Features are uniform on [-1, 1]; the true model and the first one have independent entries that
    are uniform on [0, 1/30]; labels have no noise.

    Parameters
    ----------
    seed : int
        Root of the draws.
    N, m : int, default 100
        Devices, and records of each.
    d, o : int, default 10
        Features and labels of a record.

    Examples
    --------
    >>> data = paper_data(0)
    >>> data.features.shape, round(data.least_loss, 12)
    ((100, 100, 10), 0.0)
    """
    _check(N, m, d, o)
    features = stream(seed, "acfl scene", "features").uniform(-1, 1, (N, m, d))
    truth = stream(seed, "acfl scene", "truth").uniform(0, _SPREAD, (d, o))
    return ACFLSyntheticData(features=features, labels=features @ truth, start=_start(seed, d, o))


def heterogeneous_data(
    seed: int, *, N: int = 20, m: int = 100, d: int = 10, o: int = 10
) -> ACFLSyntheticData:
    """Return data of devices that differ, in their features and in what fits them (ours).

    Features of a device are uniform on [-s, s] with an s for each device and feature, uniform on
    [0.1, 1]. To the entries of a true model (uniform on [0, 1/30]) each device adds its own,
    uniform on [-1/6, 1/6]. So no model fits all, while each device's labels have no noise.

    Parameters
    ----------
    seed : int
        Root of the draws.
    N : int, default 20
        Devices.
    m : int, default 100
        Records of each.
    d, o : int, default 10
        Features and labels of a record.

    Examples
    --------
    >>> data = heterogeneous_data(0)
    >>> data.least_loss > 10
    True
    """
    _check(N, m, d, o)
    scales = stream(seed, "acfl scene", "scales").uniform(*_SCALES, (N, 1, d))
    features = stream(seed, "acfl scene", "features").uniform(-1, 1, (N, m, d)) * scales
    truth = stream(seed, "acfl scene", "truth").uniform(0, _SPREAD, (d, o))
    own = stream(seed, "acfl scene", "own truths").uniform(-_SPREAD, _SPREAD, (N, d, o))
    labels = features @ (truth + _DIFFERENCE * own)
    return ACFLSyntheticData(features=features, labels=labels, start=_start(seed, d, o))


def _check(N: int, m: int, d: int, o: int) -> None:
    for name, value in (("N", N), ("m", m), ("d", d), ("o", o)):
        check_integer(name, value, minimum=1)


def _start(seed: int, d: int, o: int) -> Array:
    return stream(seed, "acfl scene", "start").uniform(0, _SPREAD, (d, o))
