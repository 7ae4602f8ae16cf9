"""Pulls one reply from a SuperLink and checks it before Flower builds it.

A SuperLink keeps a reply as objects that name each other by their hash: a message, its records,
their arrays, the chunks of these. A node writes them all. Flower's own `pull_messages` downloads
and builds everything at once: an object of a wrong form ends the run, and 100 KB that name one
chunk ten thousand times become an array of a gigabyte.

All uses of Flower's private functions by a server are in this module.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import httpx
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

__all__ = [
    "Download",
    "HttpGrid",
    "LostReplyError",
    "MalformedReplyError",
    "announced",
    "let_go",
    "pull",
]

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

_IN_MEMORY = {"Message": 64, "ConfigRecord": 64, "MetricRecord": 64}
"""What a byte counts as in objects of which Python makes small ones: it takes up to 109 bytes."""

_ID = 64  # characters of an object's id
_OBJECT = 4096  # bytes that an object has at least on average; each costs a call of the SuperLink
_DESCRIBED = 4096  # bytes of JSON that may describe an object, and again for each that it names
_JSON = {"RecordDict", "ArrayRecord", "Array"}
_ENVELOPE = 2**16  # bytes of an answer of the SuperLink beside the object
_TURN = 1.0  # seconds after which the replies of others are looked at


class MalformedReplyError(Exception):
    """A reply has another form than Flower gives it, or is larger than it may be."""


class LostReplyError(Exception):
    """A reply was announced, and its objects are gone: its node was restarted, say."""


class _NotThereYetError(Exception):
    """An object has not been uploaded yet."""


@dataclass(frozen=True)
class _Seen:
    """What is known of an object that was looked at."""

    kind: str
    bytes: int
    named: Counter[str]


@dataclass(eq=False)
class Download:
    """A reply on its way from the SuperLink, which is checked while it comes.

    Where an object has not been uploaded yet, its id is remembered, and what was downloaded is
    dropped: only what the objects name stays. So a reply that never becomes complete costs one call
    whenever it is looked at, and however slowly a node uploads, no object is downloaded more than
    twice.

    Parameters
    ----------
    root : str
        Id of the message.
    largest : int
        Bytes that the reply may have, downloaded or built.
    """

    root: str
    largest: int
    contents: dict[str, bytes] = field(default_factory=dict)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _bytes: int = 0
    _names: int = 0
    _next: list[tuple[str, set[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next.append((self.root, {"Message"}))

    def go_on(self, read: Callable[[str], bytes], *, seconds: float = math.inf) -> bool:
        """Download objects until all are there, one is missing, or the time is over.

        Parameters
        ----------
        read : callable
            Returns an object of the SuperLink by its id.
        seconds : float, optional
            Time after which no further object is begun.

        Returns
        -------
        bool
            Whether `contents` has all objects by their id. If not, `contents` has what is worth
            keeping for the next time.

        Raises
        ------
        MalformedReplyError
            If an object has another form or names one of another kind, or there are more bytes.
        """
        end = time.monotonic() + seconds
        try:
            while self._next:
                object_id, allowed = self._next[-1]
                content = None
                if object_id not in self._seen:
                    if time.monotonic() > end:
                        return False
                    content = read(object_id)
                self._next.pop()
                kind = self._seen[object_id].kind if content is None else _head(content)[0]
                if kind not in allowed:
                    raise MalformedReplyError(f"a {kind[:64]!r} stands for {sorted(allowed)}")
                if content is not None:
                    self._look_at(object_id, content)
            for object_id in self._seen:
                if object_id not in self.contents:
                    if time.monotonic() > end:
                        return False
                    self.contents[object_id] = read(object_id)
        except _NotThereYetError:
            self.contents.clear()
            return False
        built = self._built(self.root, {})
        if built > self.largest:
            raise MalformedReplyError(
                f"it is {built} bytes when it is built; {self.largest} is the most"
            )
        return True

    def _look_at(self, object_id: str, content: bytes) -> None:
        """Note what an object is, and which ones are to be looked at because it names them."""
        kind, parts = _head(content)
        self._bytes += len(content) * _IN_MEMORY.get(kind, 1)
        self._names += len(parts)
        if self._bytes > self.largest or self._names > max(_OBJECT, self.largest // _OBJECT):
            raise MalformedReplyError(
                f"it has more than the {self.largest} bytes that it may have; one of metrics or "
                "settings counts as 64"
            )
        named = parts if kind not in _JSON else _names(_described(content, kind), kind, parts)
        self.contents[object_id] = content
        self._seen[object_id] = _Seen(kind, len(content), Counter(named))
        self._next += [(part, _PARTS.get(kind, set())) for part in parts]

    def _built(self, object_id: str, known: dict[str, int]) -> int:
        """Return the bytes of an object with all its parts, each as often as it has a name."""
        if object_id not in known:
            seen = self._seen[object_id]
            known[object_id] = seen.bytes * _IN_MEMORY.get(seen.kind, 1) + sum(
                often * self._built(part, known) for part, often in seen.named.items()
            )
        return known[object_id]


@dataclass(eq=False)
class _Pulls:
    """The replies that a SuperLink has announced, which it does once, and that were not pulled."""

    waiting: dict[str, Download] = field(default_factory=dict)
    kept: str | None = None  # the message whose reply keeps its contents between two looks


_pulls: WeakKeyDictionary[HttpGrid, _Pulls] = WeakKeyDictionary()


def pull(grid: HttpGrid, message_id: str, largest: int) -> list[Message]:
    """Return the reply to a message if all of it has arrived, in a list.

    After a second of downloading the caller is given the chance to look at other replies. One reply
    at a time keeps what it has until the next call, so that memory stays that of one reply; another
    one that takes longer than a second begins anew until it is its turn.

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
        with _at_most(grid, largest + _ENVELOPE):
            return _pull(grid, message_id, largest)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
            raise  # the run was stopped, or this server may not ask
        # Its own hiccup, or a node's doing: nobody is blamed, and it is looked at again.
        logger.info("the SuperLink failed at a reply: %s", error)
        return []


def announced(grid: HttpGrid, message_id: str) -> bool:
    """Tell whether a reply to a message is on its way."""
    return message_id in _of(grid).waiting


def let_go(grid: HttpGrid, message_ids: Iterable[str], *, for_good: bool) -> None:
    """Free what was downloaded of replies that nobody waits for now.

    Parameters
    ----------
    grid : HttpGrid
        The grid of a SuperLink.
    message_ids : iterable of str
        The messages that they reply to.
    for_good : bool
        Whether nobody will look at them again.
    """
    pulls = _of(grid)
    for message_id in message_ids:
        download = pulls.waiting.pop(message_id, None)
        if download is not None and not for_good:
            pulls.waiting[message_id] = Download(download.root, download.largest)
        if pulls.kept == message_id:
            pulls.kept = None


def _of(grid: HttpGrid) -> _Pulls:
    return _pulls.setdefault(grid, _Pulls())


def _pull(grid: HttpGrid, message_id: str, largest: int) -> list[Message]:
    """Do the work of `pull`; a failure of the SuperLink is raised as it is."""
    client, run_id, pulls = grid._runtime_client, grid.run.run_id, _of(grid)
    if message_id not in pulls.waiting:
        answer = client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
        for reply in answer.messages_list:
            if reply.metadata.reply_to_message_id == message_id:
                pulls.waiting[message_id] = Download(reply.metadata.message_id, largest)
    if message_id not in pulls.waiting:
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

    download = pulls.waiting[message_id]
    try:
        complete = download.go_on(read, seconds=_TURN)
    except (MalformedReplyError, LostReplyError):
        _confirm(grid, download.root)
        let_go(grid, [message_id], for_good=True)
        raise
    if not complete:  # Flower would block here, for hours if the node likes
        if download.contents and pulls.kept in (None, message_id):
            pulls.kept = message_id
        else:
            download.contents.clear()
            pulls.kept = None if pulls.kept == message_id else pulls.kept
        return []
    _confirm(grid, download.root)
    let_go(grid, [message_id], for_good=True)
    try:
        message = inflate_object_from_contents(download.root, download.contents)
    # Flower's parsers raise what they like on what a node wrote.
    except Exception as error:
        raise MalformedReplyError(f"Flower cannot build it ({type(error).__name__})") from error
    assert isinstance(message, Message)  # `go_on` has seen to it
    message.metadata.__dict__["_message_id"] = download.root
    return [message]


@contextmanager
def _at_most(grid: HttpGrid, size: int) -> Iterator[None]:
    """Refuse answers of the SuperLink that say they are larger, before they are downloaded."""

    def check(response: httpx.Response) -> None:
        length = int(response.headers.get("content-length", 0))
        if response.is_success and length > size:
            raise MalformedReplyError(f"an object of {length} bytes; {size} is the most")

    http = grid._runtime_client._client
    before = http.event_hooks
    http.event_hooks = {**before, "response": [*before["response"], check]}
    try:
        yield
    finally:
        http.event_hooks = before


def _confirm(grid: HttpGrid, object_id: str) -> None:
    """Let the SuperLink delete a reply."""
    grid._runtime_client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(
            node=grid.node, run_id=grid.run.run_id, message_object_id=object_id
        )
    )


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
