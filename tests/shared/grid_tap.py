"""A question that a client is not asked, and what else changes messages on their way."""

from collections.abc import Callable
from typing import Any

from flwr.app import Message

from flwr_privacy.secure_sum.messages import DEAL
from flwr_privacy.simulations.testing.grid_tap import tapped

__all__ = ["tapped", "without_a_deal"]


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
