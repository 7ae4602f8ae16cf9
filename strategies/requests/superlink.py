"""Pulls one reply from a SuperLink and checks it before Flower builds it.

A SuperLink keeps a reply as objects that name each other by their hash: a message, its records,
their arrays, the chunks of these. A node writes them all. Flower's own `pull_messages` downloads
and builds everything at once: an object of a wrong form ends the run, and 100 KB that name one
chunk ten thousand times become an array of a gigabyte.

All uses of Flower's private functions by a server are in this module.
"""

import json
import logging
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
from httpx import HTTPStatusError, codes

__all__ = ["HttpGrid", "LostReplyError", "MalformedReplyError", "checked", "pull"]

logger = logging.getLogger("flwr.privacy")

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

_ID = 64  # characters of an object's id
_OBJECT = 4096  # bytes that an object has at least on average; each costs a call of the SuperLink
_DESCRIBED = 4096  # bytes of JSON that may describe an object, and again for each that it names
_JSON = {"RecordDict", "ArrayRecord", "Array"}

_announced: WeakKeyDictionary[HttpGrid, dict[str, str]] = WeakKeyDictionary()
"""Replies that a SuperLink has announced, which it does once, and that are not all there yet."""


class MalformedReplyError(Exception):
    """A reply has another form than Flower gives it, or is larger than it may be."""


class LostReplyError(Exception):
    """A reply was announced, and its objects are gone: its node was restarted, say."""


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
    LostReplyError
        If it is not there any more.
    httpx.HTTPError
        If the SuperLink fails, or refuses this server.
    """
    try:
        return _pull(grid, message_id, largest)
    except HTTPStatusError as error:
        if error.response.status_code != codes.INTERNAL_SERVER_ERROR:
            raise  # the run was stopped, or this server may not ask
        # Its own hiccup, or a node's doing: nobody is blamed, and it is looked at again.
        logger.info("the SuperLink failed at a reply: %s", error)
        return []


def _pull(grid: HttpGrid, message_id: str, largest: int) -> list[Message]:
    """Do the work of `pull`; a failure of the SuperLink is raised as it is."""
    client, run_id = grid._runtime_client, grid.run.run_id
    waiting = _announced.setdefault(grid, {})
    if message_id not in waiting:
        answer = client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
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
            raise LostReplyError("its objects are gone: it was never uploaded as a whole")
        if not found.object_available:
            raise _NotThereYetError
        content: bytes = found.object_content
        return content

    root = waiting[message_id]
    try:
        contents = checked(read, root, largest)
    except _NotThereYetError:  # Flower would block here, for hours if the node likes
        return []
    except (MalformedReplyError, LostReplyError):
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
    downloaded = 0
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
    built = _built(root, contents, kinds, {})
    if built > largest:
        raise MalformedReplyError(f"it is {built} bytes when it is built; {largest} is the most")
    return contents


def _built(
    object_id: str, contents: dict[str, bytes], kinds: dict[str, str], known: dict[str, int]
) -> int:
    """Return the bytes of an object with all its parts, each as often as it has a name."""
    if object_id not in known:
        content, kind = contents[object_id], kinds[object_id]
        _, parts = _head(content)
        named = parts if kind not in _JSON else _names(_described(content, kind), kind, parts)
        known[object_id] = len(content) + sum(
            _built(part, contents, kinds, known) for part in named
        )
    return known[object_id]


def _names(body: Any, kind: str, parts: list[str]) -> list[str]:
    """Return the parts that Flower would put in, in their order and as often as they are named."""
    order = body.get("arraychunk_ids") if kind == "Array" and isinstance(body, dict) else body
    if kind == "Array":
        if not isinstance(order, list) or not all(
            type(place) is int and 0 <= place < len(parts) for place in order
        ):
            raise MalformedReplyError("an array names chunks that it does not have")
        return [parts[place] for place in order]
    there = set(parts)
    if not isinstance(order, dict) or not all(
        isinstance(part, str) and part in there for part in order.values()
    ):
        raise MalformedReplyError(f"a {kind} names what it does not have")
    return list(order.values())


def _head(content: bytes) -> tuple[str, list[str]]:
    """Return the kind of an object, and the ids of those that it names."""
    end = content.find(b"\x00")
    # Before it is split: a comma costs a node one byte, and here a string of its own.
    if end < 0 or content.count(b",", 0, end) > end // _ID:
        raise MalformedReplyError("an object has no head that can be read")
    try:
        kind, parts, _ = get_object_head_values_from_object_content(content)
    except ValueError as error:
        raise MalformedReplyError("an object has no head that can be read") from error
    if len(set(parts)) != len(parts):
        raise MalformedReplyError(f"a {kind[:64]!r} has a part twice")
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
