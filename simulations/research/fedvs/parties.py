"""The clients of a simulation: expanded data, weights, and how embeddings are aggregated."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.fedvs.network import expand, gradient_of, initial_weights, project
from flwr_privacy.fedvs.quantisation import round_half_up
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.identity import derive_seed, stream

from .synthetic_data import FedVSSettings, FedVSSyntheticData

__all__ = ["Clients", "aggregate", "gradients"]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]


class Clients:
    """All clients of a setting, in the order of the data.

    Those of a seed start from the same weights, whatever the method. FedVS's data are rounded.

    Parameters
    ----------
    data : FedVSSyntheticData
        The data.
    setting : FedVSSettings
        The system.
    seed : int
        Root of weights and noise.

    Attributes
    ----------
    data, test : list of (rows, e_n) float32
        Expanded data. Rounded ones are multiples of ``2**-data_bits``, which float32 has exactly.
    weights : list of (e_n, h) float64
        The weights.
    """

    def __init__(self, data: FedVSSyntheticData, setting: FedVSSettings, seed: int) -> None:
        self._setting, self._seed = setting, seed
        self.data = [self._expanded(block) for block in data.blocks]
        self.test = [self._expanded(block) for block in data.test_blocks]
        self.weights = [
            initial_weights(e, setting.embedding, SecureRandom.insecure(seed, "weights", n))
            for n, e in enumerate(setting.widths(data))
        ]
        rate = setting.clients_learning_rate
        self._rate = setting.learning_rate if rate is None else rate

    def embed(self, n: int, rows: NDArray[Any]) -> Floats:
        """Return one client's embeddings of training rows."""
        embedding: Floats = self.data[n][rows] @ self.weights[n].astype(np.float32)
        return embedding

    def embed_tests(self, n: int) -> Floats:
        """Return one client's embeddings of all test rows."""
        embedding: Floats = self.test[n] @ self.weights[n].astype(np.float32)
        return embedding

    def noisy(self, n: int, embedding: Floats, *moment: str | int) -> Floats:
        """Return an embedding with wait-dp's noise, which depends on the seed and the moment."""
        setting = self._setting
        if setting.clip is None:
            spread = float(np.ptp(embedding))
        else:
            embedding = np.clip(embedding, -setting.clip, setting.clip)
            spread = 2 * setting.clip
        draws = stream(self._seed, "wait-dp", n, *moment)
        # The difference of two exponential values is a Laplace one.
        noise = draws.standard_exponential(embedding.shape, dtype=np.float32)
        noise -= draws.standard_exponential(embedding.shape, dtype=np.float32)
        return embedding + np.float32(spread / setting.epsilon) * noise

    def learn(self, n: int, rows: NDArray[Any], gradient: Floats, divisor: int = 1) -> None:
        """Let a client make its step.

        Parameters
        ----------
        n : int
            The client.
        rows : ndarray of int
            The batch.
        gradient : (batch, h) float32
            Gradient of the loss with respect to the aggregate, or to its own embedding.
        divisor : int, default 1
            Number of clients of whose embeddings the aggregate is the mean.
        """
        data = self.data[n][rows].astype(np.float64)
        moved = self.weights[n] - self._rate * gradient_of(data, gradient, divisor)
        bounded = self._setting.method == "fedvs" and self._setting.project
        self.weights[n] = project(moved, self._setting.w_max) if bounded else moved

    def rounding(self, n: int, server_round: int) -> SecureRandom:
        """Return what a client's weights are rounded by in a round, whoever straggles."""
        return SecureRandom.insecure(derive_seed(self._seed, "rounding"), n, server_round)

    def _expanded(self, block: NDArray[Any]) -> Floats:
        expanded = expand(block, self._setting.order)
        if self._setting.method == "fedvs":
            bits = self._setting.data_bits
            expanded = np.ldexp(round_half_up(np.ldexp(expanded, bits)).astype(np.float64), -bits)
        return expanded.astype(np.float32)


def aggregate(parts: Mapping[int, Floats], how: str, clients: int) -> Floats:
    """Return what the server model is given.

    Parameters
    ----------
    parts : mapping of int to (m, h) float32
        Embeddings by client; not all need be there.
    how : str
        One of `AGGREGATIONS`. The mean is that of those that are there; of concatenated ones the
        others are zeros.
    clients : int
        Number of all clients.

    Examples
    --------
    >>> parts = {0: np.array([[1.0, 5.0]]), 2: np.array([[3.0, 1.0]])}
    >>> [aggregate(parts, how, 3).tolist() for how in ("mean", "max", "concatenate")]
    [[[2.0, 3.0]], [[3.0, 5.0]], [[1.0, 5.0, 0.0, 0.0, 3.0, 1.0]]]
    """
    blocks = list(parts.values())
    if how == "max":
        largest: Floats = np.max(blocks, axis=0)
        return largest
    if how == "concatenate":
        zeros = np.zeros_like(blocks[0])
        return np.concatenate([parts.get(n, zeros) for n in range(clients)], axis=1)
    total: Floats = np.sum(blocks, axis=0)
    return total / np.float32(len(blocks)) if how == "mean" else total


def gradients(
    parts: Mapping[int, Floats], gradient: Floats, how: str, who: Sequence[int]
) -> dict[int, Floats]:
    """Return the gradients with respect to the embeddings of some clients.

    Parameters
    ----------
    parts : mapping of int to (m, h) float32
        What was aggregated.
    gradient : (m, h) or (m, clients * h) float32
        Gradient with respect to the aggregate.
    how : str
        How it was aggregated.
    who : sequence of int
        Those whose gradients are wanted.

    Examples
    --------
    >>> parts = {0: np.array([[1.0, 5.0]]), 2: np.array([[3.0, 1.0]])}
    >>> gradients(parts, np.array([[0.5, 0.25]]), "max", [2])[2].tolist()
    [[0.5, 0.0]]
    """
    if how == "max":
        names = list(parts)
        largest = np.argmax(list(parts.values()), axis=0)
        return {n: np.where(largest == names.index(n), gradient, 0) for n in who}
    if how == "concatenate":
        h = next(iter(parts.values())).shape[1]
        return {n: gradient[:, n * h : (n + 1) * h] for n in who}
    share = gradient / np.float32(len(parts)) if how == "mean" else gradient
    return dict.fromkeys(who, share)
