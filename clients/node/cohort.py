"""Runs several clients on one node, each with its own identity, partition and state."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from flwr_privacy.errors import (
    ChargedFailureError,
    DeclinedError,
    LedgerError,
    ProtocolError,
)
from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.privacy.ledger.shown import SHOWN, head_in, is_shown
from flwr_privacy.wire.cohort import SUM, Cohort, CohortAnswer
from flwr_privacy.wire.identity import CLIENT_ID_KEY, PARTITION_ID_KEY
from flwr_privacy.wire.message import COHORT, HELLO, RECORD, Header
from flwr_privacy.wire.payload import payload_bytes

from . import secure_sum
from .base import SchemeClient
from .context_store import SIMULATED, check_same_folder
from .dispatch import (
    ARRAYS,
    App,
    built,
    check_round,
    config_record,
    reply_record,
    run_client,
    untold,
)
from .node_settings import COHORTS_VARIABLE, may_run_any
from .records import RecordArrays, decoded, first_array_record, to_record, with_content
from .steps import Row, Step, collected

__all__ = ["run_cohort"]

Reply = RecordDict | Row
"""The reply of one client of a cohort."""

Outcome = tuple[Reply, int] | ReplyRefusedError
"""Such a reply with its size in bytes, or why there is none."""


def run_cohort(app: App, header: Header, message: Message, context: Context) -> RecordDict:
    """Answer a request to several clients with their replies or with one accumulator.

    Raises
    ------
    ProtocolError
        If the node runs its own client only, the request is a hello, or its round is over.
    """
    if not may_run_any(context.node_config):
        raise ProtocolError(
            "this node runs its own client only; to let it run the clients that a server names, "
            f"set {COHORTS_VARIABLE}=1 in its environment or cohorts=true in its node "
            "configuration"
        )
    cohort = Cohort.read(config_record(message.content, COHORT))
    if header.phase == HELLO:
        raise ProtocolError("a hello is no request to a cohort")
    check_round(header, context)  # for all of them: what a client keeps grows with their number
    mean: list[WeightedMean] = []
    content = decoded(message.content)
    states = _states(context)
    step = Step.of(with_content(message, content), header, cohort)

    def answered(client: SchemeClient, client_id: str, own_context: Context) -> tuple[Reply, int]:
        if step is not None and step.fits(client):
            return step.take(app, client, client_id, own_context)
        group = cohort.group_of.get(client_id)
        own_message = with_content(message, _content_of(client_id, content, group))
        reply = run_client(app, client, client_id, own_message, own_context, cohort=cohort)
        return reply, payload_bytes(reply)

    def outcome(client_id: str) -> tuple[str, Outcome]:
        own_context = _context_of(cohort, client_id, context, states.get(client_id, {}))
        try:
            client = built(app, own_context)
            if not mean:
                if not client.bare:
                    check_same_folder(context)
                mean.append(_accumulator(client, content, cohort.group_of))
            reply = answered(client, client_id, own_context)
        except DeclinedError as error:
            return client_id, ReplyRefusedError("declined", str(error))
        except ChargedFailureError as error:
            return client_id, ReplyRefusedError("failed", str(error))
        except LedgerError as error:
            return client_id, ReplyRefusedError("error", untold(error))
        # Flower turns whatever a client's code raises into an error reply of that client alone,
        # and forgets the state that it leaves. A client of a cohort must fare the same, or one of
        # them could take the others down.
        except Exception as error:  # noqa: BLE001
            return client_id, ReplyRefusedError("error", f"{type(error).__name__}: {error}")
        _keep_state(client_id, own_context.state, states.get(client_id, ()), context.state)
        return client_id, reply

    tally = _Tally(cohort)
    collect = _sum if cohort.reply == SUM else _gather
    # A client runs only when its outcome is asked for: its arrays may be those of a model that the
    # next client fills.
    answer = collect(header, cohort, mean, tally, map(outcome, cohort.clients))
    keepers = _states(context)
    answer[COHORT] = ConfigRecord(tally.answer([c for c in cohort.clients if c in keepers]).write())
    return answer


def _accumulator(
    client: SchemeClient, content: RecordDict, groups: Mapping[str, str]
) -> WeightedMean:
    header, fields = Header.read(config_record(content, RECORD))
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
        records = RecordDict(reply.records(header)) if isinstance(reply, Row) else reply
        metrics = _metrics(records)
        arrays = RecordArrays(first_array_record(records)) if mean[0].template else {}
        try:
            mean[0].take(client_id, dict(arrays), metrics, cohort.weighted_by)
        except ReplyRefusedError as error:
            tally.refuse(client_id, error)
        except ValueError as error:
            tally.refuse(client_id, ReplyRefusedError("malformed", str(error)))
    sums, fields = mean[0].state() if mean else ({}, {"weight": 0.0})
    return RecordDict(
        {
            ARRAYS: to_record(sums, local=True),
            RECORD: reply_record(header, "", fields),
        }
    )


def _gather(
    header: Header,
    cohort: Cohort,
    mean: list[WeightedMean],
    tally: "_Tally",
    outcomes: Iterator[tuple[str, Outcome]],
) -> RecordDict:
    return collected(header, dict(tally.usable(outcomes)))


class _Tally:
    """The outcome of each client of a cohort."""

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort
        self._refused: dict[str, ReplyRefusedError] = {}
        self._bytes_up = 0
        self._shown: dict[str, tuple[int, bytes]] = {}  # the ledgers' heads

    def usable(self, outcomes: Iterator[tuple[str, Outcome]]) -> Iterator[tuple[str, Reply]]:
        """Yield the replies that are on time."""
        for client_id, outcome in outcomes:
            if isinstance(outcome, ReplyRefusedError):
                self.refuse(client_id, outcome)
                continue
            reply, size = outcome
            self._bytes_up += size
            record = ConfigRecord() if isinstance(reply, Row) else config_record(reply, RECORD)
            if is_shown(record):
                # Once for all, also where the replies are added up.
                head = head_in(record)
                self._shown[client_id] = head.count, head.value
                for key in SHOWN:  # simulated: whoever runs them has all keys
                    record.pop(key, None)
            if client_id not in self._cohort.late:
                yield client_id, reply

    def refuse(self, client_id: str, error: ReplyRefusedError) -> None:
        self._refused[client_id] = error

    def answer(self, keepers: list[str]) -> CohortAnswer:
        late = [c for c in self._cohort.late if c not in self._refused]
        gone = {*late, *self._refused}
        answered = [client for client in self._cohort.clients if client not in gone]
        told = (*answered, *late, *self._refused)
        heads = [self._shown.get(client, (0, b"")) for client in told]
        return CohortAnswer(
            answered=answered,
            late=late,
            refused_clients=list(self._refused),
            refused_reasons=[error.reason for error in self._refused.values()],
            refused_details=list(map(str, self._refused.values())),
            bytes_up=self._bytes_up,
            keepers=keepers,
            ledger_counts=[count for count, _ in heads] if self._shown else [],
            ledger_heads=[value for _, value in heads] if self._shown else [],
        )


def _metrics(reply: RecordDict) -> dict[str, Any]:
    records = (record for record in reply.values() if isinstance(record, MetricRecord))
    return dict(next(records, MetricRecord()))


def _states(context: Context) -> dict[str, dict[str, Any]]:
    """Return the Flower state of each client whose code keeps one."""
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
    """Return the request to one client as a copy that its code may change.

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
            own[base] = record.copy()
    return RecordDict(own)
