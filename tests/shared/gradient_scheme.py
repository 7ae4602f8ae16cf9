"""A scheme that brings its own client, small enough for a test: linear regression by gradients.

It has what the larger ones have: a setup exchange before the first round, gradients instead of
models on the wire, and data instead of an app on the client.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.clients import SchemeClient, Train, own_client_app
from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.strategies import SchemeStrategy
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS, Fields

FEATURES = 3
TRUTH = np.array([1.0, -2.0, 0.5], np.float32)


def data_fn(context: Context) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(int(context.node_config["partition-id"]))
    features = draws.normal(size=(20, FEATURES)).astype(np.float32)
    return features, features @ TRUTH


class GradientClient(SchemeClient):
    scheme: ClassVar[str] = "gradients"
    phases: ClassVar[frozenset[str]] = frozenset({"setup", "train"})

    def __init__(self, data: tuple[np.ndarray, np.ndarray], context: Context) -> None:
        super().__init__(None, context)
        self.features, self.labels = data

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        size = {"num-examples": len(self.labels)}
        if phase == "setup":
            return {}, {METRICS: {**size, "largest": float(np.abs(self.labels).max())}}
        error = self.features @ arrays["w"] - self.labels
        gradient = self.features.T @ error / len(self.labels)
        return {"w": gradient.astype(np.float32)}, {METRICS: {**size, "loss": float(error @ error)}}


class GradientStrategy(SchemeStrategy):
    scheme: ClassVar[str] = "gradients"

    def __init__(self, *args: Any, step: float = 0.3, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fraction_evaluate = 0.0
        self.step = step
        self.largest = 0.0

    def guarantee(self) -> Guarantee:
        return Guarantee(scheme=self.scheme, protects="nothing", adversary="nobody")

    def setup(self, grid: Any) -> None:
        if self.largest:  # resumed
            return
        talk = self.messenger
        assigned = talk.sample(grid, 0, "setup", fraction=1.0, minimum=1)
        content = RecordDict({"config": ConfigRecord()})
        told = Instruction(accumulator=lambda: WeightedMean({}))
        _, metrics = self.ask(grid, 0, "setup", content, assigned, told)
        if metrics is None:
            raise ProtocolError("nobody answered the setup")
        self.largest = float(metrics["largest"])

    def instruct(self, server_round: int) -> Instruction:
        return replace(super().instruct(server_round), finish=self._stepped)

    def _stepped(self, mean: WeightedMean) -> Arrays:
        return {"w": self._template["w"] - np.float32(self.step) * mean.finish()["w"]}

    def state_dict(self) -> dict[str, Any]:
        return {"largest": self.largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.largest = state["largest"]


def gradient_app() -> ClientApp:
    return own_client_app(GradientClient, data_fn)
