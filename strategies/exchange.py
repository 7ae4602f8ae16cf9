"""One exchange with the nodes: push, pull replies as they arrive, stop early if told so."""

import time
from collections.abc import Callable, Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

__all__ = ["exchange"]

_FEW = 16  # a deployed grid downloads every reply that is ready: ask for few at a time
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25  # seconds


def exchange(
    grid: Grid,
    messages: Iterable[Message],
    *,
    deadline: float,
    enough: Callable[[], bool] = lambda: False,
) -> Iterator[Message]:
    """Send messages and hand on each reply as soon as it is there.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    messages : iterable of Message
        The questions.
    deadline : float
        Seconds after which the missing replies are given up.
    enough : callable, optional
        Asked after every reply: whether the rest is not needed any more.

    Yields
    ------
    Message
        Replies in order of arrival, errors included.
    """
    end = time.monotonic() + deadline
    # A list: the deployed grid's push_messages fails on a generator.
    ids = [message_id for message_id in grid.push_messages(list(messages)) if message_id]
    pending = dict.fromkeys(ids)
    pause = _SHORTEST_PAUSE
    while pending and not enough():
        arrived = False
        waiting = list(pending)
        for start in range(0, len(waiting), _FEW):
            some = waiting[start : start + _FEW]
            for reply in grid.pull_messages(some):
                pending.pop(reply.metadata.reply_to_message_id, None)
                arrived = True
                yield reply
                if enough():
                    return
        if time.monotonic() > end:
            return
        if arrived:
            pause = _SHORTEST_PAUSE
        else:
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
