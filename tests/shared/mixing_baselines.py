"""Trainings under the baselines of MSP and MSPDQ."""

from collections.abc import Callable
from typing import Any

from apps import message_app, run_strategy
from flwr.app import Message
from grid_tap import tapped

from flwr_privacy.clients import (
    DrawnFedAvgClient,
    JoPEQFedAvgClient,
    NbAFLClient,
    QuantizedFedAvgClient,
    SchemeClient,
    as_mod,
)
from flwr_privacy.strategies import DrawnFedAvg, JoPEQFedAvg, NbAFL, QuantizedFedAvg
from flwr_privacy.wire.message import RECORD

SEED = 7
NBAFL: dict[str, Any] = {"clipping_norm": 5.0, "smallest_data": 600}
SCHEMES: dict[str, tuple[type, type[SchemeClient], dict[str, Any]]] = {
    "mspdq-fedavg": (DrawnFedAvg, DrawnFedAvgClient, {}),
    "mspdq-ldp": (NbAFL, NbAFLClient, NBAFL),
    "mspdq-jopeq": (JoPEQFedAvg, JoPEQFedAvgClient, {"epsilon": 4.0}),
    "mspdq-plain": (QuantizedFedAvg, QuantizedFedAvgClient, {}),
}


def run(strategy: Any, client: type[SchemeClient], **options: Any) -> Any:
    app = options.pop("app", None) or message_app([as_mod(client)])
    return run_strategy(strategy, app, **{"insecure_seed": SEED, "num_rounds": 1, **options})


def listening(hear: Callable[[Message], None]) -> Callable[[Any], None]:
    """Return what has a grid show every answer to a training question."""

    def said(reply: Message) -> None:
        if not reply.has_error() and reply.content[RECORD]["phase"] == "train":
            hear(reply)

    return tapped(said=said)
