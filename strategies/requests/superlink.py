"""Pulls one reply from a SuperLink and checks it before Flower builds it.

A SuperLink keeps a reply as objects that name each other by their hash: a message, its records,
their arrays, the chunks of these. A node writes them all. Flower's own `pull_messages` downloads
and builds everything at once: an object of a wrong form ends the run, and 100 KB that name one
chunk ten thousand times become an array of a gigabyte.

All uses of Flower's private functions by a server are in this module.
"""

import json
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflatable_class_registry,
    inflate_object_from_contents,
)
from flwr.superlink.grid import HttpGrid
from httpx import HTTPError, HTTPStatusError, codes

__all__ = ["HTTPError", "MalformedReplyError", "checked", "pull"]

_PARTS = {
    "Message": {"RecordDict"},
    "RecordDict": {"ArrayRecord", "ConfigRecord", "MetricRecord"},
    "ArrayRecord": {"Array"},
    "Array": {"ArrayChunk"},
    "ArrayChunk": set[str](),
    "ConfigRecord": set[str](),
    "MetricRecord": set[str](),
}
"""Which objects an object may name."""

_OBJECT = 4096  # bytes that an object has at least on average; each costs a call of the SuperLink
_DESCRIBED = 4096  # bytes of JSON that may describe an object, and again for each that it names
_JSON = {"RecordDict", "ArrayRecord", "Array"}

_announced: WeakKeyDictionary[HttpGrid, dict[str, str]] = WeakKeyDictionary()
"""Replies that a SuperLink has announced, which it does once, and that are not all there yet."""


class MalformedReplyError(Exception):
    """A reply has another form than Flower gives it, or is larger than it may be."""


class _NotThereYetError(Exception):
    """An object has not been uploaded yet."""


def pull(grid: HttpGrid, message_id: str, largest: int) -> list[Message]:
    """Return the reply to a message if all of it has arrived, in a list.

    Parameters
    ----------
    grid : HttpGrid
        The grid of a SuperLink.
    message_id : str
        The message that it replies to.
    largest : int
        Bytes that the reply may have, downloaded or built.

    Raises
    ------
    MalformedReplyError
        If it has another form, or is larger. It is removed from the SuperLink all the same.
    """
    client, run_id = grid._runtime_client, grid.run.run_id
    waiting = _announced.setdefault(grid, {})
    if message_id not in waiting:
        try:
            answer = client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
        except HTTPStatusError as error:
            if error.response.status_code != codes.INTERNAL_SERVER_ERROR:
                raise  # the run was stopped, or this server may not ask
            raise MalformedReplyError("the SuperLink cannot read it") from error
        for reply in answer.messages_list:
            if reply.metadata.reply_to_message_id == message_id:
                waiting[message_id] = reply.metadata.message_id
    if message_id not in waiting:
        return []

    def read(object_id: str) -> bytes:
        found = client.PullObject(
            PullObjectRequest(node=grid.node, run_id=run_id, object_id=object_id)
        )
        if not found.object_found:
            raise MalformedReplyError("it names an object that it does not have")
        if not found.object_available:
            raise _NotThereYetError
        content: bytes = found.object_content
        return content

    root = waiting[message_id]
    try:
        contents = checked(read, root, largest)
    except _NotThereYetError:  # Flower would block here, for hours if the node likes
        return []
    except MalformedReplyError:
        _confirm(grid, root)
        del waiting[message_id]
        raise
    _confirm(grid, root)
    del waiting[message_id]
    try:
        message = inflate_object_from_contents(root, contents)
    # Flower's parsers raise what they like on what a node wrote.
    except Exception as error:
        raise MalformedReplyError(f"Flower cannot build it ({type(error).__name__})") from error
    assert isinstance(message, Message)  # `checked` has seen to it
    message.metadata.__dict__["_message_id"] = root
    return [message]


def _confirm(grid: HttpGrid, object_id: str) -> None:
    """Let the SuperLink delete a reply."""
    grid._runtime_client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(
            node=grid.node, run_id=grid.run.run_id, message_object_id=object_id
        )
    )


def checked(read: Callable[[str], bytes], root: str, largest: int) -> dict[str, bytes]:
    """Download the objects of a reply; refuse it before more is downloaded than it may have.

    Parameters
    ----------
    read : callable
        Returns an object of the SuperLink by its id.
    root : str
        Id of the message.
    largest : int
        Bytes that the reply may have, downloaded or built.

    Returns
    -------
    dict
        The objects by their id.

    Raises
    ------
    MalformedReplyError
        If an object has another form or names one of another kind, or there are more bytes.
    """
    contents: dict[str, bytes] = {}
    kinds: dict[str, str] = {}
    downloaded = built = 0
    waiting = [(root, {"Message"})]
    while waiting:
        object_id, allowed = waiting.pop()
        if object_id not in contents:
            content = contents[object_id] = read(object_id)
            downloaded += len(content)
            if downloaded > largest or len(contents) > max(_OBJECT, largest // _OBJECT):
                raise MalformedReplyError(f"it has more than the {largest} bytes that it may have")
            kinds[object_id], parts = _head(content)
            waiting += [(part, _PARTS.get(kinds[object_id], set())) for part in parts]
        if kinds[object_id] not in allowed:
            raise MalformedReplyError(f"a {kinds[object_id][:64]!r} stands for {sorted(allowed)}")
    for object_id, content in contents.items():
        if kinds[object_id] in _JSON:
            body = _described(content, kinds[object_id])
            if kinds[object_id] == "Array":
                built += _array_bytes(body, content, contents)
    if built > largest:
        raise MalformedReplyError(f"its arrays have {built} bytes; {largest} is the most")
    return contents


def _head(content: bytes) -> tuple[str, list[str]]:
    """Return the kind of an object, and the ids of those that it names."""
    try:
        kind, parts, _ = get_object_head_values_from_object_content(content)
    except ValueError as error:
        raise MalformedReplyError("an object has no head that can be read") from error
    return kind, parts


def _described(content: bytes, kind: str) -> Any:
    """Return what an object says of itself in JSON, which must be short: parsed, it is larger."""
    body = get_object_body(content, inflatable_class_registry[kind])
    _, parts = _head(content)
    if len(body) > _DESCRIBED * (1 + len(parts)):
        raise MalformedReplyError(f"a {kind} is described by {len(body)} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedReplyError(f"a {kind} is not described in JSON") from error


def _array_bytes(body: Any, content: bytes, contents: dict[str, bytes]) -> int:
    """Return the bytes of the array that Flower would build: it may name a chunk many times."""
    _, parts = _head(content)
    order = body.get("arraychunk_ids") if isinstance(body, dict) else None
    if not isinstance(order, list) or not all(
        type(place) is int and 0 <= place < len(parts) for place in order
    ):
        raise MalformedReplyError("an array names chunks that it does not have")
    return sum(len(contents[parts[place]]) for place in order)
