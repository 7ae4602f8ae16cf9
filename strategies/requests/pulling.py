"""Pulls replies one at a time, so that what a node sends cannot end a run.

Whatever goes wrong with a reply becomes an error reply of the node that was asked, which is counted
like any other. The network's failures are not a node's: they are raised.
"""

import logging
from collections.abc import Iterable
from functools import cache
from types import ModuleType

import httpx
from flwr.app import Error, Message, MessageType, Metadata
from flwr.serverapp import Grid

__all__ = ["IMPOSTOR_CODE", "MALFORMED_CODE", "announced", "is_local", "let_go", "pull"]

logger = logging.getLogger("flwr.privacy")

MALFORMED_CODE = 1003
"""Code with which the server stands in for a reply that cannot be read."""

_LOST_CODE = 3
"""Flower's code for a message that is not available: no answer."""

IMPOSTOR_CODE = 1004
"""Code with which it stands in for a reply in another node's name."""


def is_local(grid: Grid) -> bool:
    """Tell whether replies of a grid are made by this process and its workers, as inline."""
    return bool(getattr(grid, "local", False))


def pull(grid: Grid, message_id: str, node: int, largest: int) -> list[Message]:
    """Return the replies to a message that have arrived: none, one, or a repeated one.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    message_id : str
        The message.
    node : int
        The node that it was sent to.
    largest : int
        Bytes that a reply may have; a SuperLink's reply is checked before it is built.

    Raises
    ------
    OSError, httpx.HTTPError
        If the SuperLink cannot be reached. Every other exception is the node's doing.
    """
    if is_local(grid):  # an exception is a defect of that engine, not of a node
        return [_of_node(reply, message_id, node) for reply in grid.pull_messages([message_id])]
    superlink = _superlink_of(grid)
    try:
        if superlink is None:
            replies = list(grid.pull_messages([message_id]))
        else:
            replies = superlink.pull(grid, message_id, largest)
    except (OSError, httpx.HTTPError):  # the network's
        raise
    # Flower's parsers raise what they like on what a node wrote.
    except Exception as error:
        logger.debug("node %d: its reply cannot be read", node, exc_info=error)
        reason = str(error) or type(error).__name__
        lost = superlink is not None and isinstance(error, superlink.LostReplyError)
        code = _LOST_CODE if lost else MALFORMED_CODE
        return [_error_reply(message_id, node, Error(code, reason))]
    return [_of_node(reply, message_id, node) for reply in replies]


def announced(grid: Grid, message_id: str) -> bool:
    """Tell whether a reply to a message is known to be on its way."""
    superlink = _superlink_of(grid)
    return superlink is not None and superlink.announced(grid, message_id)


def let_go(grid: Grid, message_ids: Iterable[str], *, for_good: bool) -> None:
    """Free what was downloaded of replies that nobody waits for now, or ever again."""
    superlink = _superlink_of(grid)
    if superlink is not None:
        superlink.let_go(grid, message_ids, for_good=for_good)


def _of_node(reply: Message, message_id: str, node: int) -> Message:
    """Return a reply, but as an error if a node speaks for another one: it writes the sender."""
    if reply.metadata.src_node_id == node:
        return reply
    error = Error(IMPOSTOR_CODE, "it comes in another node's name")
    return _error_reply(message_id, node, reply.error if reply.has_error() else error)


def _error_reply(message_id: str, node: int, error: Error) -> Message:
    metadata = Metadata(
        run_id=0,
        message_id="",
        src_node_id=node,
        dst_node_id=0,
        reply_to_message_id=message_id,
        group_id="",
        created_at=0.0,
        ttl=0.0,
        message_type=MessageType.TRAIN,
    )
    reply: Message = Message(error=error, metadata=metadata)  # type: ignore[call-overload]
    return reply


def _superlink_of(grid: Grid) -> ModuleType | None:
    """Return the module that pulls from a SuperLink, if that is how this grid's replies come."""
    superlink = _superlink() if hasattr(type(grid), "_runtime_client") else None
    # Who has replaced the grid's method wants it called.
    if superlink is None or (
        "pull_messages" in vars(grid)
        or type(grid).pull_messages is not superlink.HttpGrid.pull_messages
    ):
        return None
    return superlink


@cache
def _superlink() -> ModuleType | None:
    """Return the module that pulls from a SuperLink, unless this Flower works otherwise."""
    try:
        from . import superlink
    except ImportError as error:
        logger.warning(
            "this release of Flower keeps replies otherwise (%s): their sizes are not checked "
            "before they are built",
            error,
        )
        return None
    return superlink
