"""A SuperNode that speaks to the SuperLink otherwise than Flower does, from its second reply on.

With its first one, the hello, it is let in.
"""

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
from flwr.supernode import start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient

REPLIES = 10_000
PAUSE = 0.2  # seconds between two objects of a reply


def count(kind: str) -> Callable[[], None]:
    """Return a function that counts in a file what was done."""
    path, numbers = Path(os.environ["HOSTILE_MARKS"]) / kind, itertools.count(1)

    def done() -> None:
        path.write_text(str(next(numbers)))

    return done


def flood() -> None:
    """Announce ten thousand replies to one message, and upload none of them."""
    original, done = FleetHttpClient.PushMessages, count("flood")
    requests = itertools.count()

    def announce(client: FleetHttpClient, request: Any, replies: int) -> None:
        for _ in range(replies):
            copy = type(request)()
            copy.CopyFrom(request)
            tree = copy.message_object_trees[0]
            del tree.children[:]
            tree.object_id = copy.messages_list[0].metadata.message_id = secrets.token_hex(32)
            try:
                original(client, copy)
            except httpx.HTTPError:
                return  # the run is over
            done()

    def push(self: FleetHttpClient, request: Any) -> Any:
        number = next(requests)
        if number:
            announce(self, request, 10)
        if number == 1:
            threading.Thread(target=announce, args=(self, request, REPLIES), daemon=True).start()
        return original(self, request)

    FleetHttpClient.PushMessages = push  # type: ignore[method-assign]


def drip() -> None:
    """Upload the objects of a reply so slowly that it is never there, those first that name it."""
    original, done = start_client_internal.push_object_contents_from_iterable, count("drip")
    replies = itertools.count()

    def push(
        contents: Iterable[tuple[str, bytes]], push_object_fn: Callable[[str, bytes], None]
    ) -> None:
        if not next(replies):
            original(contents, push_object_fn=push_object_fn)
            return
        for object_id, content in reversed(list(contents)):
            push_object_fn(object_id, content)
            done()
            time.sleep(PAUSE)

    vars(start_client_internal)["push_object_contents_from_iterable"] = push


KINDS = {"flood": flood, "drip": drip}
