"""Sends messages to nodes and pulls replies as they arrive, until told to stop."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from .pulling import announced, is_local, let_go, pull
from .request_log import RequestLog

__all__ = ["exchange", "persistent_exchange"]

logger = logging.getLogger("flwr.privacy")

_AGAIN = 60.0  # seconds that a silent node has for the second time
_BEFORE_AGAIN = 1.0  # seconds before a silent node is asked again
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25  # seconds
_LATENESS = 0.03  # of the time that a reply took, by which it may be seen later
_LOOKING = 0.1  # of the time, at most, goes into looking: it takes CPU from Ray


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    *,
    largest: int,
    deadline: float,
    idle: float = math.inf,
    enough: Callable[[], bool] = lambda: False,
    left_open: dict[str, int] | None = None,
    earlier: Mapping[str, int] | None = None,
) -> Iterator[Message]:
    """Send messages and yield each reply as soon as it arrives.

    When the deadline is over, every message is looked at once more, so that what one of the replies
    takes is not at the others' expense.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    messages : sequence of Message
        The requests.
    largest : int
        Bytes that a reply may have.
    deadline : float
        Seconds after which the missing replies are given up.
    idle : float, optional
        Seconds without a further reply, once there was one, after which they are given up.
    enough : callable, optional
        Asked after every reply: whether the rest is not needed any more.
    left_open : dict, optional
        Takes the ids of the requests without a reply, with their nodes.
    earlier : mapping, optional
        Ids of earlier requests without a reply, with their nodes, which are asked again now. Their
        replies are taken as well, and waited for if they are on their way.

    Yields
    ------
    Message
        Replies in order of arrival, errors included. One that cannot be read is an error, too.
    """
    began = last = time.monotonic()
    messages = list(messages)  # the deployed grid's push_messages fails on a generator
    pushed = {message_id for message_id in grid.push_messages(messages) if message_id}
    # Grids leave out what they could not push, but name every message that they did.
    pending = {
        message.metadata.message_id: message.metadata.dst_node_id
        for message in messages
        if message.metadata.message_id in pushed
    }
    if len(pending) < len(messages):
        logger.warning("%d of %d messages not sent", len(messages) - len(pending), len(messages))
    asked = len(pending)
    earlier = dict(earlier or {})
    pending |= earlier
    twice, answered = set(earlier.values()), set[int]()  # nodes with two requests

    def awaited() -> bool:
        return any(
            node not in answered and (message_id not in earlier or announced(grid, message_id))
            for message_id, node in pending.items()
        )

    def over() -> bool:
        return time.monotonic() - began > deadline

    local = is_local(grid)  # its clients work while it is looked at
    last_look = False
    try:
        while awaited() and not enough() and not (last_look or (local and over())):
            last_look = over()
            before, looked = len(pending), time.monotonic()
            for message_id, node in list(pending.items()):
                for reply in [] if node in answered else pull(grid, message_id, node, largest):
                    pending.pop(message_id, None)
                    if node in twice and reply.has_content():
                        answered.add(node)
                    yield reply
                    if enough() or (local and over()):
                        return
            now = time.monotonic()
            if len(pending) < before:
                last = now
                continue
            if len(pending) < asked + len(earlier) and now - last > idle:
                return
            pause = max(_SHORTEST_PAUSE, _LATENESS * (now - last), (now - looked) / _LOOKING)
            time.sleep(min(pause, _LONGEST_PAUSE, max(0.0, began + deadline - now)))
    finally:
        let_go(grid, pending, for_good=left_open is None)
        if left_open is not None:
            left_open.update(pending)


def persistent_exchange(
    grid: Grid,
    messages: Sequence[Message],
    *,
    deadline: float,
    again: bool,
    logs: Callable[[int], RequestLog],
    left_open: dict[str, int] | None = None,
    **options: Any,
) -> Iterator[Message]:
    """Carry out an exchange; send the same messages once more to nodes that say nothing.

    Parameters
    ----------
    grid, messages, deadline, left_open
        As for `exchange`.
    again : bool
        Whether silent nodes are asked a second time, for at most a minute.
    logs : callable
        Returns the log of the request to a node, which says whether it has said anything.
    options
        The other parameters of `exchange`.
    """
    messages = list(messages)
    first: dict[str, int] = {}
    try:
        yield from exchange(grid, messages, deadline=deadline, left_open=first, **options)
        silent = [
            m for m in messages if m.metadata.dst_node_id not in logs(m.metadata.dst_node_id).spoke
        ]
        if not again or not silent or options.get("enough", lambda: False)():
            return
        logger.warning("%d nodes are silent: they are asked again", len(silent))
        time.sleep(_BEFORE_AGAIN)
        copies = []
        for message in silent:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            logs(node).asked_again.add(node)
            group, ttl = message.metadata.group_id, min(deadline, _AGAIN)
            copies.append(Message(message.content, node, kind, ttl=ttl, group_id=group))
        earlier, first = first, {}
        yield from exchange(
            grid,
            copies,
            deadline=min(deadline, _AGAIN),
            earlier=earlier,
            left_open=first,
            **options,
        )
    finally:
        if left_open is None:
            let_go(grid, first, for_good=True)
        else:
            left_open.update(first)
