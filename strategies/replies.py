"""What is done with a reply beside summing it up: its metrics are checked, its arrays dropped."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from flwr_privacy.averaging import ReplyRefusedError, WeightedMean

from .round import ClientReply, PartialSum

__all__ = ["check_alike", "merge", "warn_of_metrics", "without_arrays"]

logger = logging.getLogger("flwr.privacy")


def without_arrays(content: RecordDict) -> RecordDict:
    """Return the records of a reply that are no arrays."""
    return RecordDict(
        {name: value for name, value in content.items() if not isinstance(value, ArrayRecord)}
    )


def check_alike(reply: ClientReply, earlier: list[RecordDict]) -> None:
    """Refuse metrics of another form than the first reply's: a user's function cannot mix them.

    Raises
    ------
    ReplyRefusedError
        If they have.
    """
    if not earlier:
        return
    (expected,) = (dict(r) for r in earlier[0].values() if isinstance(r, MetricRecord))
    if _form(reply.metrics()) != _form(expected):
        raise ReplyRefusedError("malformed", "its metrics have another form than the first reply's")


def warn_of_metrics(reply: ClientReply) -> None:
    """Say of metrics that are not finite that they are in no mean."""
    values = {name: value for name, value in reply.metrics().items() if isinstance(value, float)}
    if strange := sorted(name for name, value in values.items() if not math.isfinite(value)):
        logger.warning("client %s: metrics %s are not finite: left out", reply.client_id, strange)


def _form(metrics: Mapping[str, Any]) -> dict[str, int | None]:
    return {key: len(v) if isinstance(v, list) else None for key, v in metrics.items()}


def merge(mean: WeightedMean, reply: PartialSum) -> None:
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
