"""A node whose replies pass a SuperLink and are no replies: it writes their serialised form itself.

Flower starts a process for every message, so nothing of this is undone.
"""

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

CHUNK = 100_000  # bytes
REPEATED = 10_000  # times: a gigabyte
OBJECTS = 1000


def hostile(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Answer a request; forge the answer to a training as the node's configuration has it."""
    reply = call_next(message, context)
    entry: Any = message.content.get("flwr-privacy", {})
    kind = str(context.node_config.get("hostile", ""))
    if entry.get("phase") == "train" and kind:
        FORGERIES[kind](reply)
    if entry.get("round") == 2 and not kind and (marks := os.environ.get("HOSTILE_MARKS")):
        while not all(Path(marks, each).exists() for each in ("drip", "flood")):
            time.sleep(0.05)  # the others have begun
    return reply


def garbage(_: Message) -> None:
    """Send a record whose bytes mean nothing."""

    def deflate(self: ConfigRecord) -> bytes:
        return add_header_to_object_body(b"\xff" * 40, self)

    ConfigRecord.deflate = deflate  # type: ignore[method-assign]


def bomb(reply: Message) -> None:
    """Send an array of 100 KB which says that it has a gigabyte."""
    zeros = Array("uint8", (CHUNK * REPEATED,), "numpy.ndarray", bytes(CHUNK))
    reply.content["arrays"] = ArrayRecord({"0": zeros, "1": zeros})
    original = Array.deflate

    def deflate(self: Array) -> bytes:
        _, _, body = original(self).partition(b"\x00")
        described = {**json.loads(body), "arraychunk_ids": [0] * REPEATED}
        return add_header_to_object_body(json.dumps(described).encode(), self)

    Array.deflate = deflate  # type: ignore[method-assign]


def impostor(_: Message) -> None:
    """Send a reply whose own text says that another node has sent it."""
    original = Message.deflate

    def deflate(self: Message) -> bytes:
        forged = copy.copy(self)
        metadata = copy.copy(self.metadata)
        metadata.__dict__["_src_node_id"] ^= 1
        forged.__dict__["_metadata"] = metadata
        return original(forged)

    Message.deflate = deflate  # type: ignore[method-assign]


def drip(reply: Message) -> None:
    """Send a thousand objects, which the SuperNode uploads one by one."""
    reply.content["arrays"] = ArrayRecord([np.full(1, i, np.float32) for i in range(OBJECTS // 2)])


def flood(_: Message) -> None:
    """Send an honest answer, which the SuperNode makes many of."""


FORGERIES = {each.__name__: each for each in (garbage, bomb, impostor, drip, flood)}
