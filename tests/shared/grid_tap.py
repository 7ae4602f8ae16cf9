"""What passes between a strategy and its clients, shown to functions that may change it."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message

from flwr_privacy.secure_sum.messages import DEAL

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


def without_a_deal(step: int) -> Callable[[Any], None]:
    """Have one client not be asked to deal for a step of the first round."""
    forgotten: list[Any] = []

    def ask(message: Message) -> None:
        deal = message.content.get(DEAL)
        if deal is None or forgotten or (deal["step"], deal["server-round"]) != (step, 1):
            return
        forgotten.append(deal)
        del message.content[DEAL]

    return tapped(ask)
