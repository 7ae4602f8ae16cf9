"""The server's model of split learning, which maps the clients' embeddings to predictions."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["ServerModel"]

Arrays = Mapping[str, NDArray[Any]]


@runtime_checkable
class ServerModel(Protocol):
    """The server's model W_0; its methods take and return weights, the object stores none.

    `flwr_privacy.clients.torch.TorchServerModel` makes one of a torch module.
    """

    def initial(self) -> dict[str, NDArray[Any]]:
        """Return the weights to start from, by name."""
        ...

    def step(
        self,
        arrays: Arrays,
        embedding: NDArray[np.float32],
        labels: NDArray[Any],
        learning_rate: float,
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32], float]:
        """Make one step of gradient descent on the mean loss of some rows.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            The weights.
        embedding : (m, h) float32
            The embeddings of m rows.
        labels : (m,) ndarray
            Their labels.
        learning_rate : float
            Step size.

        Returns
        -------
        arrays : dict of str to ndarray
            The new weights.
        gradient : (m, h) float32
            Gradient of the mean loss with respect to the embeddings, before the step.
        loss : float
            The mean loss before the step.
        """
        ...

    def scores(self, arrays: Arrays, embedding: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scores of the classes, (m, classes); one column where there are two."""
        ...

    def metrics(
        self, arrays: Arrays, embedding: NDArray[np.float32], labels: NDArray[Any]
    ) -> dict[str, float]:
        """Return ``loss`` and ``accuracy``; of two classes also ``auc`` and ``f1``."""
        ...
