"""A client's validated data, with the moments that gradients are computed from."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import Moments, moments

__all__ = ["PreparedData"]


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Validated features and labels of a client.

    Parameters
    ----------
    features : (m, d) float64
        X.
    labels : (m, o) float64
        Y.
    """

    features: NDArray[np.float64]
    labels: NDArray[np.float64]

    @cached_property
    def moments(self) -> Moments:
        """X^T X and X^T Y, cached after the first use."""
        return moments(self.features, self.labels)

    @property
    def _is_tall(self) -> bool:
        records, features = self.features.shape
        return bool(features <= records)

    def take_moments(self) -> Moments:
        """Return X^T X and X^T Y; cache them only if they are not larger than the data."""
        return self.moments if self._is_tall else moments(self.features, self.labels)

    def gradient(self, model: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gradient ``X^T (X W - Y)`` (ACFL, (7)), computed in the cheaper way.

        Examples
        --------
        >>> data = PreparedData(np.array([[1.0], [2.0]]), np.array([[1.0], [0.0]]))
        >>> data.gradient(np.array([[1.0]]))
        array([[4.]])
        """
        if self._is_tall:
            own = self.moments
            return own.features @ model - own.labels
        return self.features.T @ (self.features @ model - self.labels)

    @property
    def size(self) -> int:
        """Bytes that the data and their moments take."""
        features, labels = int(self.features.shape[1]), int(self.labels.shape[1])
        own = 8 * features * (features + labels) if self._is_tall else 0
        return self.features.nbytes + self.labels.nbytes + own
