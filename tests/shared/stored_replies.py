"""Replies as a SuperLink keeps them, and the part of a SuperLink that a server's grid talks to."""

from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from apps import record
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

NODE, OTHER = 7, 8
Objects = dict[str, bytes]


def request(node: int = NODE) -> Message:
    message = Message(RecordDict(), node, "train")
    message.metadata.__dict__.update({"_message_id": "asked", "_run_id": 1})
    return message


def content() -> RecordDict:
    arrays = record({"w": np.arange(6, dtype=np.float32), "b": np.zeros(2, np.float32)})
    return RecordDict(
        {"arrays": arrays, "own": ConfigRecord({"round": 1}), "metrics": MetricRecord({"n": 2})}
    )


def stored(message: Message) -> tuple[str, Objects]:
    """Return a message as a SuperLink keeps it."""
    objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
    return message.object_id, objects


def reply() -> tuple[str, Objects]:
    return stored(Message(content(), reply_to=request()))


class SuperLink:
    """The part of a SuperLink that a server's grid talks to."""

    def __init__(self, root: str, objects: Objects, **more: tuple[str, Objects]) -> None:
        self.root, self.objects = root, dict(objects)
        self.roots = {"asked": root}
        for asked, (other, parts) in more.items():
            self.roots[asked] = other
            self.objects |= parts
        self.status: int | None = None
        self.announced: set[str] = set()
        self.read: list[str] = []
        self.missing: set[str] = set()
        self.confirmed: list[str] = []
        self._client = httpx.Client()

    def PullMessages(self, asked: Any) -> Any:
        if self.status is not None:
            response = httpx.Response(self.status, request=httpx.Request("POST", "http://link"))
            response.raise_for_status()
        (message,) = asked.message_ids
        if message in self.announced or message not in self.roots:  # it says so once
            return SimpleNamespace(messages_list=[])
        self.announced.add(message)
        metadata = SimpleNamespace(
            message_id=self.roots[message], reply_to_message_id=asked.message_ids[0]
        )
        return SimpleNamespace(messages_list=[SimpleNamespace(metadata=metadata)])

    def PullObject(self, asked: Any) -> Any:
        self.read.append(asked.object_id)
        found = self.objects.get(asked.object_id)
        there = found is not None and asked.object_id not in self.missing
        return SimpleNamespace(
            object_found=found is not None,
            object_available=there,
            object_content=found if there else b"",
        )

    def ConfirmMessageReceived(self, asked: Any) -> None:
        self.confirmed.append(asked.message_object_id)


def connected(superlink: SuperLink) -> HttpGrid:
    grid = HttpGrid(token="none")
    grid.__dict__["_client"] = superlink
    grid.set_run(Run.create_empty(1))
    return grid


def many(objects: int, value: float = 1.0) -> tuple[str, Objects]:
    """Return a reply of so many arrays."""
    names = {f"a{i}": np.full(1, i + value, np.float32) for i in range(objects)}
    return stored(Message(RecordDict({"arrays": record(names)}), reply_to=request()))
