"""How a node answers the messages of this library, whichever kind of app it runs.

A question reaches one client, or names several that the node is to play (a cohort). Each of them
runs through the same client class with an identity, a partition and a state of its own; the node
answers with their replies or with one accumulator.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

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
from flwr_privacy.errors import DeclinedError, FlwrPrivacyError, LedgerError, ProtocolError
from flwr_privacy.identity import CLIENT_ID_KEY, PARTITION_ID_KEY, client_id_from
from flwr_privacy.secure_sum.messages import JOIN, KEYS, SHARES
from flwr_privacy.wire import (
    COHORT,
    DECLINED_CODE,
    ERROR_CODE,
    EVALUATE,
    HELLO,
    METRICS,
    RECORD,
    SUM,
    Cohort,
    CohortAnswer,
    Fields,
    Header,
    payload_bytes,
)

from . import secure_sum
from .base import SchemeClient, Train
from .custody import SIMULATED, storage
from .records import RecordArrays, copied, decoded, first_array_record, to_record

__all__ = ["COHORTS_VARIABLE", "App", "answer", "discreet", "may_play_any"]

logger = logging.getLogger("flwr.privacy")

COHORTS_VARIABLE = "FLWR_PRIVACY_COHORTS"
"""Environment variable that, set to 1 on a node, lets servers have it play several clients."""

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")

_COHORTS_KEY = "cohorts"  # the same in a node's configuration
_ARRAYS = "arrays"

Outcome = tuple[RecordDict, int] | ReplyRefusedError
"""The reply of one client of a cohort with its size in bytes, or why there is none."""


@dataclass(frozen=True)
class App:
    """What a kind of app gives: its client halves, the user's training, the user's evaluation.

    Parameters
    ----------
    client : callable
        Builds the client half for a context.
    train : callable
        Returns the user's training for a client half, a message and its context.
    evaluate : callable
        Returns the metrics of the user's evaluation.
    """

    client: Callable[[Context], SchemeClient]
    train: Callable[[SchemeClient, Message, Context], Train]
    evaluate: Callable[[SchemeClient, Message, Context], dict[str, Any]]


def answer(app: App, message: Message, context: Context) -> Message:
    """Answer a message that carries the record ``flwr-privacy``.

    What a server or a configuration did wrong becomes an error reply with its reason; what the
    user's own code raises goes through to Flower, which makes an error reply of it.
    """
    try:
        header, _ = Header.read(_record(message.content, RECORD))
        if COHORT in message.content:
            content = _play_cohort(app, header, message, context)
        else:
            client_id = client_id_from(context.node_config)
            content = _play(app, _built(app, context), client_id, message, context)
        return Message(content, reply_to=message)
    except DeclinedError as error:
        return Message(Error(DECLINED_CODE, str(error)), reply_to=message)
    except LedgerError as error:
        return Message(Error(ERROR_CODE, _untold(error)), reply_to=message)
    except FlwrPrivacyError as error:
        return Message(Error(ERROR_CODE, str(error)), reply_to=message)


def discreet(work: Callable[_Given, _Made], what: str) -> Callable[_Given, _Made]:
    """Return a user's training or evaluation whose errors say nothing of the data."""

    def guarded(*given: _Given.args, **named: _Given.kwargs) -> _Made:
        try:
            return work(*given, **named)
        except FlwrPrivacyError:
            raise
        # Whatever a user's code raises has a text of its own, and the text may have data in it.
        except Exception:
            logger.exception("the client's own %s failed", what)
            raise ProtocolError(
                f"the client's own {what} failed; the log of the node says how"
            ) from None

    return guarded


def _built(app: App, context: Context) -> SchemeClient:
    """Build the client half; what the user's code says of its data on the way stays here."""
    try:
        return app.client(context)
    except FlwrPrivacyError:
        raise
    # It may load data, and the text of its errors may have some in it.
    except Exception:
        logger.exception("the client could not be built")
        raise ProtocolError("the client could not be built; the log of the node says how") from None


def _untold(error: LedgerError) -> str:
    """Log what is wrong with the node's own files; return what the server is told."""
    logger.error("%s", error)
    return "LedgerError: the node's own privacy files cannot be used; the node's log says why"


def may_play_any(node_config: Mapping[str, Any]) -> bool:
    """Tell whether the node lets a server choose the clients that it plays.

    Only the node's own configuration or environment can say so, and a node with a ``client-id``
    of its own never does: a server that names a node's identity could give it a second one.
    """
    if CLIENT_ID_KEY in node_config:
        return False
    return bool(node_config.get(_COHORTS_KEY)) or os.environ.get(COHORTS_VARIABLE) == "1"


def _play(
    app: App,
    client: SchemeClient,
    client_id: str,
    message: Message,
    context: Context,
    *,
    cohort: Cohort | None = None,
) -> RecordDict:
    """Return one client's reply to a question, which may have been put to a cohort."""
    header, fields = Header.read(_record(message.content, RECORD))
    evaluation = message.metadata.message_type.partition(".")[0] == MessageType.EVALUATE
    own_phases = {HELLO, *client.phases}
    if client.sums != "never":
        own_phases |= {KEYS, SHARES}
    header.check(scheme=client.scheme, phases={EVALUATE} if evaluation else own_phases)
    if header.phase == HELLO:
        own = {**client.introduce(header.experiment_id), "plays": "one"}
        if may_play_any(context.node_config):
            own |= {"plays": "any", "storage": storage(context)}
        return RecordDict({RECORD: _reply_record(header, client_id, own)})
    if cohort is None:
        _check_round(header, context)
    arrays = RecordArrays(first_array_record(message.content))
    if evaluation:
        fields |= _named(header, None)
        evaluate = partial(app.evaluate, client, message, context)
        metrics = dict(
            client.judge(
                arrays, fields, evaluate if client.bare else discreet(evaluate, "evaluation")
            )
        )
        return RecordDict(
            {METRICS: MetricRecord(metrics), RECORD: _reply_record(header, client_id, {})}
        )
    if header.phase in (KEYS, SHARES):
        records = secure_sum.answer_phase(context, header, message.content)
        return RecordDict({**records, RECORD: _reply_record(header, client_id, {})})
    if JOIN in message.content and message.metadata.message_type != MessageType.TRAIN:
        raise ProtocolError(
            f"a secure sum over answers to '{message.metadata.message_type}': only 'train' has one"
        )
    place = secure_sum.join(client, context, header, message.content)
    fields |= _named(header, place)
    train = app.train(client, message, context)
    out, own = client.handle(
        header.phase, arrays, fields, train if client.bare else discreet(train, "training")
    )
    metrics = dict(own.pop(METRICS, {}))
    if place is not None:
        out, metrics = place.masked(out, metrics)
    return RecordDict(
        {
            # A sum takes them in before anybody trains again.
            _ARRAYS: to_record(out, local=cohort is not None and cohort.reply == SUM),
            METRICS: MetricRecord(metrics),
            RECORD: _reply_record(header, client_id, own),
        }
    )


def _play_cohort(app: App, header: Header, message: Message, context: Context) -> RecordDict:
    if not may_play_any(context.node_config):
        raise ProtocolError(
            "this node plays its own client only; to let it play the clients that a server names, "
            f"set {COHORTS_VARIABLE}=1 in its environment or {_COHORTS_KEY}=true in its node "
            "configuration"
        )
    cohort = Cohort.read(_record(message.content, COHORT))
    if header.phase == HELLO:
        raise ProtocolError("a hello is no question to a cohort")
    _check_round(header, context)  # for all of them: what a client keeps grows with their number
    mean: list[WeightedMean] = []
    content = decoded(message.content)
    states = _states(context)

    def outcomes() -> Iterator[tuple[str, Outcome]]:
        for client_id in cohort.clients:
            own_message = copy.copy(message)
            group = cohort.group_of.get(client_id)
            own_message.content = _content_of(client_id, content, group)
            own_context = _context_of(cohort, client_id, context, states.get(client_id, {}))
            try:
                client = _built(app, own_context)
                if not mean:
                    mean.append(_accumulator(client, content, cohort.group_of))
                reply = _play(app, client, client_id, own_message, own_context, cohort=cohort)
                size = payload_bytes(reply)
            except DeclinedError as error:
                yield client_id, ReplyRefusedError("declined", str(error))
                continue
            except LedgerError as error:
                yield client_id, ReplyRefusedError("error", _untold(error))
                continue
            # Flower turns whatever a client's code raises into an error reply of that client
            # alone, and forgets the state that it leaves. A client of a cohort must fare the same,
            # or one of them could take the others down.
            except Exception as error:  # noqa: BLE001
                text = f"{type(error).__name__}: {error}"
                yield client_id, ReplyRefusedError("error", text)
                continue
            _keep_state(client_id, own_context.state, states.get(client_id, ()), context.state)
            yield client_id, (reply, size)

    tally = _Tally(cohort)
    collect = _sum if cohort.reply == SUM else _gather
    content = collect(header, cohort, mean, tally, outcomes())
    keepers = _states(context)
    content[COHORT] = ConfigRecord(
        tally.answer([c for c in cohort.clients if c in keepers]).write()
    )
    return content


def _accumulator(
    client: SchemeClient, content: RecordDict, groups: Mapping[str, str]
) -> WeightedMean:
    header, fields = Header.read(_record(content, RECORD))
    fields |= {"groups": groups}
    shared = (r for name, r in content.items() if isinstance(r, ArrayRecord) and "@" not in name)
    arrays = RecordArrays(next(shared, ArrayRecord()))
    mean = client.accumulator(header.phase, dict(arrays), fields)
    return secure_sum.summed(mean, content)


def _sum(
    header: Header,
    cohort: Cohort,
    mean: list[WeightedMean],
    tally: "_Tally",
    outcomes: Iterator[tuple[str, Outcome]],
) -> RecordDict:
    for client_id, reply in tally.usable(outcomes):
        metrics = _metrics(reply)
        arrays = RecordArrays(first_array_record(reply)) if mean[0].template else {}
        try:
            mean[0].take(client_id, dict(arrays), metrics, cohort.weighted_by)
        except ReplyRefusedError as error:
            tally.refuse(client_id, error)
        except ValueError as error:
            tally.refuse(client_id, ReplyRefusedError("malformed", str(error)))
    sums, fields = mean[0].state() if mean else ({}, {"weight": 0.0})
    return RecordDict(
        {
            _ARRAYS: to_record(sums, local=True),
            RECORD: _reply_record(header, "", fields),
        }
    )


def _gather(
    header: Header,
    cohort: Cohort,
    mean: list[WeightedMean],
    tally: "_Tally",
    outcomes: Iterator[tuple[str, Outcome]],
) -> RecordDict:
    content = RecordDict()
    for client_id, reply in tally.usable(outcomes):
        for name, record in reply.items():
            content[f"{name}@{client_id}"] = record
    content[RECORD] = _reply_record(header, "", {})
    return content


class _Tally:
    """What became of the clients of a cohort."""

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort
        self._refused: dict[str, ReplyRefusedError] = {}
        self._bytes_up = 0

    def usable(self, outcomes: Iterator[tuple[str, Outcome]]) -> Iterator[tuple[str, RecordDict]]:
        """Yield the replies that are there in time."""
        for client_id, outcome in outcomes:
            if isinstance(outcome, ReplyRefusedError):
                self.refuse(client_id, outcome)
                continue
            reply, size = outcome
            self._bytes_up += size
            if client_id not in self._cohort.late:
                yield client_id, reply

    def refuse(self, client_id: str, error: ReplyRefusedError) -> None:
        self._refused[client_id] = error

    def answer(self, keepers: list[str]) -> CohortAnswer:
        late = [c for c in self._cohort.late if c not in self._refused]
        gone = {*late, *self._refused}
        return CohortAnswer(
            answered=[client for client in self._cohort.clients if client not in gone],
            late=late,
            refused=[(client, e.reason, str(e)) for client, e in self._refused.items()],
            bytes_up=self._bytes_up,
            keepers=keepers,
        )


def _named(header: Header, place: secure_sum.Place | None) -> Fields:
    """Return what a client is told of its question beside the scheme's own fields."""
    return {
        "experiment-id": header.experiment_id,
        "round": header.server_round,
        "request": header.request,
        "summed": 0 if place is None else place.least,
        "code-limit": 0 if place is None else place.bounds.code_limit,
    }


def _record(content: RecordDict, name: str) -> ConfigRecord:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise ProtocolError(f"the message has no ConfigRecord '{name}'")
    return record


def _metrics(reply: RecordDict) -> dict[str, Any]:
    records = (record for record in reply.values() if isinstance(record, MetricRecord))
    return dict(next(records, MetricRecord()))


def _reply_record(header: Header, client_id: str, fields: Fields) -> ConfigRecord:
    own = Header(
        scheme=header.scheme,
        experiment_id=header.experiment_id,
        phase=header.phase,
        server_round=header.server_round,
        request=header.request,
        client_id=client_id,
    )
    return ConfigRecord(own.write(fields))


def _check_round(header: Header, context: Context) -> None:
    key = f"{RECORD}.rounds"
    rounds = context.state.get(key, ConfigRecord())
    if not isinstance(rounds, ConfigRecord):
        raise ProtocolError(f"the app's state has something else under '{key}'")
    last = int(str(rounds.get(header.experiment_id, 0)))
    if header.server_round < last:
        raise ProtocolError(
            f"round {header.server_round} does not follow round {last} of this experiment"
        )
    rounds[header.experiment_id] = header.server_round
    context.state[key] = rounds


def _states(context: Context) -> dict[str, dict[str, Any]]:
    """Return what the clients' own code keeps, of each client that keeps something."""
    states: dict[str, dict[str, Any]] = {}
    for key, record in context.state.items():
        client_id, slash, name = key.partition("/")
        if slash:
            states.setdefault(client_id, {})[name] = record
    return states


def _context_of(cohort: Cohort, client_id: str, context: Context, state: dict[str, Any]) -> Context:
    node_config = {
        **context.node_config,
        CLIENT_ID_KEY: client_id,
        PARTITION_ID_KEY: int(client_id),
        "num-partitions": cohort.size,
        SIMULATED: True,
    }
    return Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config=node_config,
        state=RecordDict(state),
        run_config=context.run_config,
        series_id=context.series_id,
    )


def _keep_state(client_id: str, own: RecordDict, before: Iterable[str], state: RecordDict) -> None:
    for name in before:
        del state[f"{client_id}/{name}"]
    for name, record in own.items():
        state[f"{client_id}/{name}"] = record


def _content_of(client_id: str, content: RecordDict, group: str | None) -> RecordDict:
    """Return the question to one client, in records of its own that it may write into.

    A record ``name@client`` goes to that client alone, and ``name@@group`` to the clients of that
    group: its entries are put over those of the record ``name`` that all share.
    """
    own: dict[str, Any] = {}
    for name, record in content.items():
        base, at, addressee = name.rpartition("@")
        grouped = base.endswith("@")
        mine = addressee == (group if grouped else client_id)
        if name == COHORT or (at and not mine):
            continue
        base = base.removesuffix("@") if at else name
        if base in own:
            own[base].update(record)
        else:
            own[base] = copied(record)
    return RecordDict(own)
