"""Trainings under central DP."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from apps import message_app, run_strategy
from conformance import Killed
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.clients import CentralDPClient, as_mod
from flwr_privacy.strategies import CentralDP

SEED = 7
APP = message_app([as_mod(CentralDPClient)])


def run(strategy: CentralDP, **options: Any) -> Any:
    return run_strategy(strategy, APP, **{"nodes": 5, **options})


BIG = {"w": np.zeros((100, 50), np.float32), "b": np.zeros((), np.float32)}


def replied(message: Message, arrays: ArrayRecord) -> Message:
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


def still() -> ClientApp:
    """A training that changes nothing: the sum is the noise."""
    app = ClientApp(mods=[as_mod(CentralDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return replied(message, message.content["arrays"])

    return app


def check_normal(noise: np.ndarray, sigma: float) -> None:
    """Check mean and variance within five standard errors, and that neighbours are independent."""
    assert abs(noise.mean()) < 5 * sigma / math.sqrt(noise.size)
    assert abs((noise**2).mean() / sigma**2 - 1) < 5 * math.sqrt(2 / noise.size)
    assert abs((noise[1:] * noise[:-1]).mean()) / sigma**2 < 5 / math.sqrt(noise.size)


def kill_after(server_round: int) -> Callable[[dict[str, Any]], None]:
    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == server_round:
            raise Killed

    return on_round
