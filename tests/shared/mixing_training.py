"""Trainings under MSP and MSPDQ, and what their messages weigh."""

from typing import Any

import numpy as np
from apps import message_app, model_of, record, run_strategy, step
from flwr.app import Message

from flwr_privacy.clients import FedAvgClient, MSPClient, MSPDQClient, as_mod
from flwr_privacy.strategies import MSP, MSPDQ, FedAvg
from flwr_privacy.wire.identity import derive_seed
from flwr_privacy.wire.message import RECORD

MODEL = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3) / 7 + 0.1,
    "b": np.linspace(-1, 1, 4, dtype=np.float64),
    "scale": np.array(0.5),
}
SIZE = 11
EXACT = {name: array.astype(np.float64) for name, array in MODEL.items()}
CLIENTS = {MSP: MSPClient, MSPDQ: MSPDQClient, FedAvg: FedAvgClient}


class Wire:
    """Sees all messages; swallows what clients say after some mixing steps of round 1."""

    def __init__(self, lost: Any = ()) -> None:
        self.lost = set(lost)  # (client, step)
        self.asked: list[tuple[dict[str, Any], Message]] = []
        self.said: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __call__(self, grid: Any) -> None:
        push, pull = grid.push_messages, grid.pull_messages

        def push_messages(messages: list[Message]) -> Any:
            self.asked += [(dict(message.content[RECORD]), message) for message in messages]
            return push(messages)

        def pull_messages(ids: list[str]) -> Any:
            return [reply for reply in pull(ids) if not self._takes(reply)]

        grid.push_messages, grid.pull_messages = push_messages, pull_messages

    def _takes(self, reply: Message) -> bool:
        if reply.has_error():
            return False
        head = dict(reply.content[RECORD])
        if head["phase"] not in ("train", "sync", "mix"):
            return False
        self.said.append((head, model_of(reply.content["arrays"])))
        place = (head["client-id"], head["request"])
        return head["phase"] == "mix" and head["round"] == 1 and place in self.lost

    def first(self) -> dict[str, np.ndarray]:
        """Return the first visible sub-states."""
        trained = [entry for entry in self.said if entry[0]["phase"] == "train"]
        return {head["client-id"]: vector(arrays) for head, arrays in trained}

    def exchanges(self, server_round: int) -> list[tuple[str, frozenset[int]]]:
        """Return the exchanges of a round in their order, with the nodes that were asked."""
        nodes: dict[tuple[str, int], set[int]] = {}
        for head, message in self.asked:
            if head["round"] == server_round and head["phase"] in ("train", "sync", "mix"):
                place = nodes.setdefault((head["phase"], head["request"]), set())
                assert message.metadata.dst_node_id not in place  # asked once
                place.add(message.metadata.dst_node_id)
        return [(phase, frozenset(asked)) for (phase, _), asked in nodes.items()]


def vector(arrays: Any) -> np.ndarray:
    values = [np.asarray(getattr(a, "numpy", lambda a=a: a)()) for a in arrays.values()]
    return np.concatenate([value.astype(np.float64).reshape(-1) for value in values])


def trained(client: int | str, model: Any = EXACT) -> np.ndarray:
    return vector({name: step(array, int(client)) for name, array in model.items()})


def run(strategy: Any, *, arrays: Any = EXACT, client: Any = None, **options: Any) -> Any:
    client = client or next(c for s, c in CLIENTS.items() if type(strategy) is s)
    options = {"num_rounds": 1, "insecure_seed": 7, **options}
    return run_strategy(strategy, message_app([as_mod(client)]), arrays=record(arrays), **options)


def reference(seed: int, clients: int = 4) -> str:
    names = map(str, range(clients))
    return min(names, key=lambda client: derive_seed(seed, "reference", 1, client))
