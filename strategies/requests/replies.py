"""Adds up the replies to a request as they arrive; each is freed before the next."""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean

from .instruction import Take
from .request_log import ClientReply, PartialSum, RequestLog

__all__ = ["add_up"]

logger = logging.getLogger("flwr.privacy")


def add_up(
    mean: WeightedMean,
    request_log: RequestLog,
    messages: Iterable[Message],
    *,
    take: Take,
    keep: bool,
) -> list[RecordDict]:
    """Add the replies to an accumulator; the request log notes those that cannot be added.

    Parameters
    ----------
    mean : WeightedMean
        The accumulator.
    request_log : RequestLog
        The book of the question.
    messages : iterable of Message
        The replies.
    take : callable
        Adds the reply of one client.
    keep : bool
        Whether a function of the user's wants to see what is no array.

    Returns
    -------
    list of RecordDict
        The records of each reply that are no arrays, if they are kept.
    """
    contents: list[RecordDict] = []
    for reply in request_log.replies(messages):
        try:
            if isinstance(reply, PartialSum):
                _merge(mean, reply)
            elif keep:
                _check_alike(reply, contents)
                take(mean, reply)
                contents.append(_without_arrays(reply.content))
            else:
                take(mean, reply)
                _warn_of_metrics(reply)
        except ReplyRefusedError as error:
            request_log.withdraw(reply, error)
        del reply  # or its arrays would live while the next reply is made
    return contents


def _without_arrays(content: RecordDict) -> RecordDict:
    """Return the records of a reply that are no arrays."""
    return RecordDict(
        {name: value for name, value in content.items() if not isinstance(value, ArrayRecord)}
    )


def _check_alike(reply: ClientReply, earlier: list[RecordDict]) -> None:
    """Refuse metrics in another form than the first reply's: a user's function cannot mix them.

    Raises
    ------
    ReplyRefusedError
        If they have.
    """
    if not earlier:
        return
    (expected,) = (dict(r) for r in earlier[0].values() if isinstance(r, MetricRecord))
    if _form(reply.metrics()) != _form(expected):
        raise ReplyRefusedError(
            "malformed", "its metrics have another form than the first reply's", by_others=True
        )


def _warn_of_metrics(reply: ClientReply) -> None:
    """Warn that metrics that are not finite are left out of the means."""
    values = {name: value for name, value in reply.metrics().items() if isinstance(value, float)}
    if strange := sorted(name for name, value in values.items() if not math.isfinite(value)):
        logger.warning("client %s: metrics %s are not finite: left out", reply.client_id, strange)


def _form(metrics: Mapping[str, Any]) -> dict[str, int | None]:
    return {key: len(v) if isinstance(v, list) else None for key, v in metrics.items()}


def _merge(mean: WeightedMean, reply: PartialSum) -> None:
    """Add a node's sum to a mean.

    Raises
    ------
    ReplyRefusedError
        If it is over other clients than the node says.
    """
    other = mean.from_state(reply.arrays, reply.fields)
    if other.clients != set(reply.clients):
        raise ReplyRefusedError("malformed", "the sum is over other clients than the answer")
    mean.merge(other)
