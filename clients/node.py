"""How a node answers the messages of this library, whichever kind of app it runs.

A question reaches one client, or names several that the node is to play (a cohort). Each of them
runs through the same client class with an identity, a partition and a state of its own; the node
answers with their replies or with one accumulator.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from flwr_privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.errors import FlwrPrivacyError, ProtocolError
from flwr_privacy.identity import CLIENT_ID_KEY, PARTITION_ID_KEY, client_id_from
from flwr_privacy.wire import HELLO, METRICS, RECORD, Fields, Header, payload_bytes

from .base import SchemeClient, Train
from .records import RecordArrays, to_record

__all__ = ["ERROR_CODE", "App", "answer"]

ERROR_CODE = 1000
"""Code of the error replies of this library; the reason says what is wrong."""

EVALUATE = "evaluate"

_ARRAYS = "arrays"
_COHORT_KEYS = ("clients", "late", "num-clients", "reply", "weighted-by")


@dataclass(frozen=True)
class App:
    """What a kind of app gives: its client halves, the user's training, everything else.

    Parameters
    ----------
    client : callable
        Builds the client half for a context.
    train : callable
        Returns the user's training for a client half, a message and its context.
    pass_on : callable
        Lets the user's app answer a message by itself (evaluation).
    """

    client: Callable[[Context], SchemeClient]
    train: Callable[[SchemeClient, Message, Context], Train]
    pass_on: Callable[[SchemeClient, Message, Context], Message]


def answer(app: App, message: Message, context: Context) -> Message:
    """Answer a message that carries the record ``flwr-privacy``.

    What a server or a configuration did wrong becomes an error reply with its reason; what the
    user's own code raises goes through to Flower, which makes an error reply of it.
    """
    try:
        header, fields = Header.read(message.content[RECORD])
        cohort = {key: fields.pop(key) for key in _COHORT_KEYS if key in fields}
        if cohort:
            return Message(_play_cohort(app, header, cohort, message, context), reply_to=message)
        client = app.client(context)
        client_id = client_id_from(context.node_config)
        header.check(scheme=client.scheme, phases={*client.phases, EVALUATE})
        if header.phase == HELLO:
            return Message(_hello(header, context), reply_to=message)
        _check_round(header, context)
        return Message(_play(app, client, header, client_id, message, context), reply_to=message)
    except FlwrPrivacyError as error:
        return Message(Error(ERROR_CODE, str(error)), reply_to=message)


def _hello(header: Header, context: Context) -> RecordDict:
    # A node with an explicit identity plays that client alone; one that only knows a partition is
    # a worker of a simulation and may be given any.
    plays = "one" if CLIENT_ID_KEY in context.node_config else "any"
    return RecordDict(
        {RECORD: _reply_record(header, client_id_from(context.node_config), {"plays": plays})}
    )


def _play(
    app: App,
    client: SchemeClient,
    header: Header,
    client_id: str,
    message: Message,
    context: Context,
) -> RecordDict:
    if message.metadata.message_type == MessageType.EVALUATE:
        content = RecordDict(dict(app.pass_on(client, message, context).content))
        content[RECORD] = _reply_record(header, client_id, {})
        return content
    _, fields = Header.read(message.content[RECORD])
    fields.update(phase=header.phase, round=header.server_round)
    arrays = RecordArrays(first_array_record(message.content))
    out, own = client.handle(header.phase, arrays, fields, app.train(client, message, context))
    metrics = own.pop(METRICS, {})
    return RecordDict(
        {
            _ARRAYS: to_record(out),
            METRICS: MetricRecord(dict(metrics)),
            RECORD: _reply_record(header, client_id, own),
        }
    )


def _play_cohort(
    app: App, header: Header, cohort: Fields, message: Message, context: Context
) -> RecordDict:
    if CLIENT_ID_KEY in context.node_config:
        raise ProtocolError(
            f"this node is client '{context.node_config[CLIENT_ID_KEY]}' and plays no other: it "
            f"was asked to play {cohort['clients'][:3]}..."
        )
    _check_round(header, context)
    late = set(cohort["late"])
    replies: Iterator[tuple[str, RecordDict | str]] = (
        (client_id, _play_one_of(app, header, cohort, client_id, message, context))
        for client_id in cohort["clients"]
    )
    if cohort["reply"] == "sum":
        client_class = type(app.client(_context_of(cohort, cohort["clients"][0], context)))
        template = (
            RecordArrays(first_array_record(message.content))
            if message.metadata.message_type == MessageType.TRAIN
            else {}
        )
        mean = client_class.accumulator(template)
        return _sum(header, cohort, mean, replies, late)
    return _gather(header, replies, late)


def _play_one_of(
    app: App,
    header: Header,
    cohort: Fields,
    client_id: str,
    message: Message,
    context: Context,
) -> RecordDict | str:
    """Return the reply of one client of a cohort, or why it failed."""
    own_context = _context_of(cohort, client_id, context)
    own_message = copy.copy(message)
    own_message.content = _content_of(client_id, message.content)
    try:
        client = app.client(own_context)
        header.check(scheme=client.scheme, phases={*client.phases, EVALUATE})
        reply = _play(app, client, header, client_id, own_message, own_context)
    # Flower turns whatever a client's code raises into an error reply of that client alone; a
    # client of a cohort must fare the same, or one of them could take the others down.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    _keep_state(client_id, own_context.state, context.state)
    return reply


def _sum(
    header: Header,
    cohort: Fields,
    mean: WeightedMean,
    replies: Iterator[tuple[str, RecordDict | str]],
    late: set[str],
) -> RecordDict:
    outcome = _Outcome()
    for client_id, reply in replies:
        if isinstance(reply, str):
            outcome.refuse(client_id, "error", reply)
            continue
        outcome.bytes_up += payload_bytes(reply)
        if client_id in late:
            outcome.late.append(client_id)
            continue
        metrics = _metrics(reply)
        try:
            if cohort["weighted-by"] not in metrics:
                raise ReplyRefusedError("weight", f"no metric '{cohort['weighted-by']}'")
            weight = float(metrics.pop(cohort["weighted-by"]))
            arrays = dict(RecordArrays(first_array_record(reply)))
            mean.fold(client_id, arrays, weight=weight, metrics=metrics)
        except ReplyRefusedError as error:
            outcome.refuse(client_id, error.reason, str(error))
        except ValueError as error:
            outcome.refuse(client_id, "malformed", str(error))
    sums, fields = mean.state()
    fields.update(outcome.fields())
    return RecordDict({_ARRAYS: to_record(sums), RECORD: _reply_record(header, "", fields)})


def _gather(
    header: Header, replies: Iterator[tuple[str, RecordDict | str]], late: set[str]
) -> RecordDict:
    outcome = _Outcome()
    content = RecordDict()
    for client_id, reply in replies:
        if isinstance(reply, str):
            outcome.refuse(client_id, "error", reply)
            continue
        outcome.bytes_up += payload_bytes(reply)
        if client_id in late:
            outcome.late.append(client_id)
            continue
        outcome.answered.append(client_id)
        for name, record in reply.items():
            content[f"{name}@{client_id}"] = record
    fields = {"clients": outcome.answered, **outcome.fields()}
    content[RECORD] = _reply_record(header, "", fields)
    return content


class _Outcome:
    """What became of the clients of a cohort."""

    def __init__(self) -> None:
        self.answered: list[str] = []
        self.late: list[str] = []
        self.refused: list[tuple[str, str, str]] = []
        self.bytes_up = 0

    def refuse(self, client_id: str, reason: str, detail: str) -> None:
        self.refused.append((client_id, reason, detail))

    def fields(self) -> Fields:
        return {
            "late": self.late,
            "refused-clients": [client for client, _, _ in self.refused],
            "refused-reasons": [reason for _, reason, _ in self.refused],
            "refused-details": [detail for _, _, detail in self.refused],
            "bytes-up": self.bytes_up,
        }


def first_array_record(content: RecordDict) -> ArrayRecord:
    """Return the arrays of a message, whatever their record is called; none is an empty record."""
    # Not through `content.array_records`, whose cyclic garbage would keep the arrays alive.
    records = (record for record in content.values() if isinstance(record, ArrayRecord))
    return next(records, ArrayRecord())


def _metrics(reply: RecordDict) -> dict[str, Any]:
    records = (record for record in reply.values() if isinstance(record, MetricRecord))
    return dict(next(records, MetricRecord()))


def _reply_record(header: Header, client_id: str, fields: Fields) -> ConfigRecord:
    own = Header(
        scheme=header.scheme,
        experiment_id=header.experiment_id,
        phase=header.phase,
        server_round=header.server_round,
        client_id=client_id,
    )
    return ConfigRecord({**own.write(), **fields})


def _check_round(header: Header, context: Context) -> None:
    key = f"{RECORD}.round"
    last = context.state.get(key)
    if isinstance(last, ConfigRecord) and last["experiment-id"] == header.experiment_id:
        last_round = int(str(last["round"]))
        if header.server_round < last_round:
            raise ProtocolError(
                f"round {header.server_round} does not follow round {last_round} of this experiment"
            )
    context.state[key] = ConfigRecord(
        {"experiment-id": header.experiment_id, "round": header.server_round}
    )


def _context_of(cohort: Fields, client_id: str, context: Context) -> Context:
    prefix = f"{client_id}/"
    state = RecordDict(
        {
            key[len(prefix) :]: value
            for key, value in context.state.items()
            if key.startswith(prefix)
        }
    )
    node_config = {
        **context.node_config,
        CLIENT_ID_KEY: client_id,
        PARTITION_ID_KEY: int(client_id),
        "num-partitions": int(cohort["num-clients"]),
    }
    return Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config=node_config,
        state=state,
        run_config=context.run_config,
        series_id=context.series_id,
    )


def _keep_state(client_id: str, own: RecordDict, state: RecordDict) -> None:
    prefix = f"{client_id}/"
    for key in [key for key in state if key.startswith(prefix)]:
        del state[key]
    for key, record in own.items():
        state[prefix + key] = record


def _content_of(client_id: str, content: RecordDict) -> RecordDict:
    """Return the question to one client: what is addressed to it goes before what all share."""
    own: dict[str, Any] = {}
    for name, record in content.items():
        base, at, addressee = name.partition("@")
        if not at:
            own.setdefault(base, record)
        elif addressee == client_id:
            own[base] = record
    record = ConfigRecord(dict(own[RECORD]))
    for key in _COHORT_KEYS:
        record.pop(key, None)
    own[RECORD] = record
    return RecordDict(own)
