"""Adds up the replies to a request as they arrive; each is freed before the next."""

import logging
import math
from collections import Counter
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.wire.message import INSECURE, RECORD

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
        Whether a function of the user's wants to see what is no array and none of our records.

    Returns
    -------
    list of RecordDict
        The app's own records of each reply, without its arrays, if they are kept. The metrics of
        all have one form, because a user's function cannot mix them: that which most replies have.
        Arrays count whatever the metrics are.
    """
    contents: list[RecordDict] = []
    for reply in request_log.replies(messages):
        try:
            if isinstance(reply, PartialSum):
                _merge(mean, reply)
            elif keep:
                reply.metrics()  # it has one record of them
                take(mean, reply)
                contents.append(_of_the_app(reply.content))
            else:
                take(mean, reply)
                _warn_of_metrics(reply)
        except ReplyRefusedError as error:
            request_log.withdraw(reply, error)
        del reply  # or its arrays would live while the next reply is made
    return _alike(contents)


def _of_the_app(content: RecordDict) -> RecordDict:
    """Return the records and metrics of a reply that are the app's own, without its arrays."""
    own: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        name: _own_metrics(value) if isinstance(value, MetricRecord) else value
        for name, value in content.items()
        if name != RECORD and not isinstance(value, ArrayRecord)
    }
    return RecordDict(own)


def _own_metrics(metrics: MetricRecord) -> MetricRecord:
    return MetricRecord({key: value for key, value in metrics.items() if key != INSECURE})


def _alike(contents: list[RecordDict]) -> list[RecordDict]:
    """Return those whose metrics have the form that most have, whoever came first."""
    forms = [_form(content) for content in contents]
    counts = Counter(forms)
    most = min(counts, key=lambda form: (-counts[form], form), default=())
    if counts[most] < len(contents):
        logger.warning(
            "the metrics of %d of %d replies have another form than most have: they are left out "
            "of train_metrics_aggr_fn or evaluate_metrics_aggr_fn",
            *(len(contents) - counts[most], len(contents)),
        )
    return [content for content, form in zip(contents, forms, strict=True) if form == most]


def _form(content: RecordDict) -> tuple[tuple[str, int], ...]:
    """Return the names and lengths of metrics, sorted; a number has the length -1."""
    (metrics,) = (record for record in content.values() if isinstance(record, MetricRecord))
    lengths = {key: len(v) if isinstance(v, list) else -1 for key, v in metrics.items()}
    return tuple(sorted(lengths.items()))


def _warn_of_metrics(reply: ClientReply) -> None:
    """Warn that metrics that are not finite are left out of the means."""
    values = {name: value for name, value in reply.metrics().items() if isinstance(value, float)}
    if strange := sorted(name for name, value in values.items() if not math.isfinite(value)):
        logger.warning("client %s: metrics %s are not finite: left out", reply.client_id, strange)


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
