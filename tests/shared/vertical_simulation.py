"""Small numpy simulations of FedVS and its rivals."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from flwr_privacy.simulations.research.fedvs.in_process import FedVSTrainingCurve
from flwr_privacy.simulations.research.fedvs.numpy_simulation import simulate
from flwr_privacy.simulations.research.fedvs.synthetic_data import FedVSSettings, FedVSSyntheticData

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]
NO_TIME = {"bandwidth_mbps": 1e15, "speed": 1e18}  # beside the delays


class Perceptron:
    """Layers with ReLU between them and the cross entropy, in NumPy; it keeps what it was given."""

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        self._sizes, self._seed = sizes, seed
        self.embeddings: list[Floats] = []

    def initial(self) -> dict[str, NDArray[Any]]:
        rng = np.random.default_rng(self._seed)
        found: dict[str, NDArray[Any]] = {}
        for i, (inputs, outputs) in enumerate(zip(self._sizes, self._sizes[1:], strict=False)):
            weights = rng.normal(0, math.sqrt(2 / inputs), (inputs, outputs))
            found[f"w{i}"] = weights.astype(np.float32)
            found[f"b{i}"] = np.zeros(outputs, np.float32)
        return found

    def step(
        self, arrays: Arrays, embedding: Floats, labels: NDArray[Any], learning_rate: float
    ) -> tuple[dict[str, NDArray[Any]], Floats, float]:
        self.embeddings.append(embedding)
        layers = self._layers(arrays, embedding)
        chances = np.exp(layers[-1] - layers[-1].max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = float(-np.log(chances[rows, labels]).mean())
        chances[rows, labels] -= 1
        slope = chances / np.float32(len(labels))
        rate = np.float32(learning_rate)
        found: dict[str, NDArray[Any]] = {}
        for i in reversed(range(len(self._sizes) - 1)):
            found[f"w{i}"] = arrays[f"w{i}"] - rate * (layers[i].T @ slope)
            found[f"b{i}"] = arrays[f"b{i}"] - rate * slope.sum(axis=0)
            slope = slope @ arrays[f"w{i}"].T
            if i:
                slope *= layers[i] > 0
        return found, slope, loss

    def scores(self, arrays: Arrays, embedding: Floats) -> Floats:
        return self._layers(arrays, embedding)[-1]

    def metrics(self, arrays: Arrays, embedding: Floats, labels: NDArray[Any]) -> dict[str, float]:
        scores = self.scores(arrays, embedding)
        loss = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels]
        hits = scores.argmax(axis=1) == labels
        return {"loss": float(loss.mean()), "accuracy": float(hits.mean())}

    def _layers(self, arrays: Arrays, embedding: Floats) -> list[Floats]:
        layers = [embedding.astype(np.float32)]
        last = len(self._sizes) - 2
        for i in range(last + 1):
            found = layers[-1] @ arrays[f"w{i}"] + arrays[f"b{i}"]
            layers.append(found if i == last else np.maximum(found, 0))
        return layers


def small(clients: int = 6, rows: int = 41, seed: int = 0) -> FedVSSyntheticData:
    """Return a data whose clients have 1 to 3 columns, and whose rows are no multiple of K."""
    rng = np.random.default_rng(seed)
    columns = [1 + n % 3 for n in range(clients)]
    blocks = [rng.uniform(-1, 1, (rows, d)) for d in columns]
    tests = [rng.uniform(-1, 1, (15, d)) for d in columns]
    return FedVSSyntheticData(
        blocks=blocks,
        labels=(sum(block[:, 0] for block in blocks) > 0).astype(np.int64),
        test_blocks=tests,
        test_labels=(sum(test[:, 0] for test in tests) > 0).astype(np.int64),
    )


def setting(**values: Any) -> FedVSSettings:
    return FedVSSettings(
        **{
            "embedding": 5,
            "order": 2,
            "batch_size": 9,
            "learning_rate": 0.5,
            "data_bits": 8,
            "weight_bits": 8,
            **values,
        }
    )


def curve(
    data: FedVSSyntheticData, own: FedVSSettings, *, rounds: int = 12, seed: int = 1, **values: Any
) -> FedVSTrainingCurve:
    wide = data.clients if own.aggregation == "concatenate" else 1
    server_model = values.pop("server_model", None) or Perceptron((wide * own.embedding, 8, 2))
    watch = values.pop("watch", [rounds])
    return simulate(
        data, own, server_model, watch=watch, by=values.pop("by", "rounds"), rounds=rounds,
        seed=seed, **values,
    )  # fmt: skip


@cache
def digits() -> FedVSSyntheticData:
    features, labels = load_digits(return_X_y=True)
    places = np.random.default_rng(0).permutation(len(labels))
    train, test = places[360:], places[:360]
    blocks = np.array_split(features / 16, 16, axis=1)
    return FedVSSyntheticData(
        blocks=[block[train] for block in blocks],
        labels=labels[train],
        test_blocks=[block[test] for block in blocks],
        test_labels=labels[test],
    )


def accuracy(method: str, **values: Any) -> float:
    own = FedVSSettings(method=method, embedding=32, learning_rate=0.2, slow="last", **values)
    server_model = Perceptron((32, 64, 32, 10))
    found = simulate(
        digits(), own, server_model, watch=range(350, 451, 25), by="rounds", rounds=450, seed=0
    )
    return float(found.accuracy.mean())
