"""What passes between a strategy and its clients, shown to functions that may change it."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message

__all__ = ["See", "tapped"]

See = Callable[[Message], None]


def _nothing(message: Message) -> None:
    """Leave a message as it is."""


def tapped(asked: See = _nothing, said: See = _nothing) -> Callable[[Any], None]:
    """Return a change of a grid that shows each question before it goes, and each reply."""

    def tap(grid: Any) -> None:
        push, pull = grid.push_messages, grid.pull_messages

        def push_messages(messages: Iterable[Message]) -> Any:
            messages = list(messages)
            for message in messages:
                asked(message)
            return push(messages)

        def pull_messages(ids: Iterable[str]) -> Any:
            replies = list(pull(ids))
            for reply in replies:
                said(reply)
            return replies

        grid.push_messages, grid.pull_messages = push_messages, pull_messages

    return tap
