"""Logs one request: the clients asked, and the outcome of every reply.

A reply may come from an adversary, and it cannot be taken out of a sum again, so it is checked
before anything of it is used. What is refused is counted by reason and logged.

Records are found by their type, not through ``RecordDict.array_records`` and its like: those build
cyclic garbage that keeps a reply's arrays in memory until the collector comes by.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_privacy.errors import FlwrPrivacyError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.ledger.shown import COUNT, VALUE
from flwr_privacy.wire.cohort import ROWS, CohortAnswer
from flwr_privacy.wire.identity import check_client_id
from flwr_privacy.wire.message import (
    COHORT,
    DECLINED_CODE,
    FAILED_CODE,
    RECORD,
    REFUSED_PEERS_CODE,
    VERSION,
    Fields,
    Header,
)
from flwr_privacy.wire.payload import payload_bytes

from .ledger_heads import ChargeName, LedgerHeads
from .pulling import IMPOSTOR_CODE, MALFORMED_CODE
from .reply_arrays import arrays_of, replies_of_rows

__all__ = ["ClientReply", "PartialSum", "RequestLog", "arrays_of"]

logger = logging.getLogger("flwr.privacy")

REASONS = {
    "another round",
    "declined",
    "dtype",
    "duplicate",
    "error",
    "failed",
    "identity",
    "ledger",
    "malformed",
    "names",
    "not finite",
    "range",
    "shape",
    "unknown client",
    "unknown node",
    "weight",
}
"""Under what a reply that is not used is counted; docs/wire.md explains them."""

_NOT_THERE = {3, 4, 5}
"""Flower's codes for a message, reply or node that is not available (any more): no answer."""

_REASON_OF_CODE = {
    DECLINED_CODE: "declined",
    FAILED_CODE: "failed",
    MALFORMED_CODE: "malformed",
    IMPOSTOR_CODE: "unknown node",
}

_GARBAGE = {
    "another round",
    "dtype",
    "ledger",
    "malformed",
    "names",
    "shape",
    "unknown client",
    "unknown node",
}
"""Reasons that no node has that runs the client half and the model of this experiment."""

_NOTHING_RELEASED = {"declined", "error"}
"""Reasons with which a client says that it has sent nothing of its data."""

_MOST_DETAILS = 3
_LONGEST_DETAIL = 300  # characters of a log line that an adversary may fill
_MOST_NAMED = 2**16  # characters of the names of clients that one refuses


@dataclass(frozen=True)
class ClientReply:
    """The reply of one client: its records and the scheme's own fields."""

    client_id: str
    content: RecordDict
    fields: Fields

    @property
    def clients(self) -> list[str]:
        """The one client."""
        return [self.client_id]

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of the reply.

        Raises
        ------
        ReplyRefusedError
            If there is not exactly one record of arrays, or one cannot be decoded.
        """
        return arrays_of(self._only(ArrayRecord))

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the reply.

        Raises
        ------
        ReplyRefusedError
            If there is not exactly one record of metrics.
        """
        return dict(self._only(MetricRecord))

    def _only(self, kind: type) -> Any:
        records = [record for record in self.content.values() if isinstance(record, kind)]
        if len(records) != 1:
            raise ReplyRefusedError("malformed", f"{len(records)} {kind.__name__}s and not one")
        return records[0]


@dataclass(frozen=True)
class PartialSum:
    """A node's answer for several clients: the state of an accumulator."""

    clients: list[str]
    arrays: dict[str, Any]
    fields: Fields


@dataclass
class RequestLog:
    """The log of one request.

    Parameters
    ----------
    header : Header
        Header of the question.
    asked : dict
        Clients asked, by node. A node whose identity is not known yet has the client "".
    cohorts : bool
        Whether the nodes were asked to run several clients each.
    summed : bool
        Whether such nodes answer with one accumulator.
    quorum : int, optional
        Number of used replies after which the rest is not needed.
    late : set of str
        Clients whose simulated answer comes too late: counted, not used.
    virtual_seconds : float
        How long the exchange takes on the virtual clock.
    seconds : float
        Real seconds after which the missing replies are given up.
    largest : int
        Bytes that a node's reply may have.
    """

    header: Header
    asked: Mapping[int, list[str]]
    cohorts: bool = False
    summed: bool = False
    quorum: int | None = None
    late: set[str] = field(default_factory=set)
    virtual_seconds: float = 0.0
    seconds: float = 3600.0
    largest: int = 2**26
    answered: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)  # whose answers were handed on and not withdrawn
    late_count: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    bytes_down: int = 0
    bytes_up: int = 0
    wire_bytes_down: int = 0
    wire_bytes_up: int = 0
    question: RecordDict = field(default_factory=RecordDict)  # as the first who was asked has it
    details: list[str] = field(default_factory=list)  # of the first that were refused
    named: dict[int, str] = field(default_factory=dict)  # who answered for a node without a name
    garbage: Counter[int] = field(
        default_factory=Counter
    )  # replies by node that no app of ours sends
    refused_peers: dict[str, list[str]] = field(
        default_factory=dict
    )  # of a secure sum: whose keys or shares a client refuses, by that client
    free: set[str] = field(default_factory=set)  # of a cohort: who left nothing on its node
    heads: LedgerHeads | None = None  # what the clients' ledgers showed before
    names: Callable[[str], ChargeName] | None = None  # of the charges, if not the question's own
    spoke: set[int] = field(default_factory=set)  # nodes that were there, whatever they said
    asked_again: set[int] = field(default_factory=set)  # nodes that said nothing the first time
    _heard: set[int] = field(default_factory=set)
    _silent: set[str] = field(default_factory=set)  # those who say that they released nothing

    def replies(self, messages: Iterable[Message]) -> Iterator[ClientReply | PartialSum]:
        """Yield the usable replies of the messages, one by one as they arrive.

        What is yielded counts as accumulated; `withdraw` takes that back.
        """
        for message in messages:
            try:
                yield from self._counted(message)
            except (ReplyRefusedError, ProtocolError, InvalidParameterError) as error:
                self._refuse_message(message, error)
            del message  # or its arrays would live while the next one is made

    def read_late(self, message: Message) -> int | None:
        """Return the bytes of an answer that came after the exchange; None if it is no answer.

        Nothing of it is used, so that what it costs and whether it is garbage is all that counts.
        """
        node = message.metadata.src_node_id
        try:
            if message.has_error():
                reason = _REASON_OF_CODE.get(message.error.code, "error")
                if reason in _GARBAGE:
                    raise ReplyRefusedError(reason, message.error.reason or "")
                return None
            size = self._size(message.content)
            client_id, fields = self._header(message.content)
            if not self.cohorts and self.asked.get(node) not in ([""], [client_id]):
                raise ReplyRefusedError("unknown client", f"{client_id[:64]!r} does not sit there")
            if node in self._heard:  # it was asked twice, and has answered in time
                raise ReplyRefusedError("duplicate", "it has answered already")
            if not self.cohorts:
                self._look_at_ledger(client_id, fields, node=node, late=True)
        except (ReplyRefusedError, ProtocolError) as error:
            self._refuse_message(message, error)
            return None
        return size

    def newest_garbage(self) -> Counter[int]:
        """Return the replies by node that no app of ours sends, since the last call."""
        garbage, self.garbage = self.garbage, Counter()
        return garbage

    def _refuse_message(self, message: Message, error: FlwrPrivacyError) -> None:
        reason = error.reason if isinstance(error, ReplyRefusedError) else "malformed"
        node = message.metadata.src_node_id
        lost = self.asked.get(node, []) if self.cohorts and node not in self._heard else []
        self.refuse(reason, f"node {node}: {error}", clients=max(1, len(lost)))
        self.garbage[node] += reason in _GARBAGE

    def _counted(self, message: Message) -> Iterator[ClientReply | PartialSum]:
        for reply in self._read(message):
            self.used.update(reply.clients)
            yield reply

    def withdraw(self, reply: "ClientReply | PartialSum", error: ReplyRefusedError) -> None:
        """Count a reply that was already yielded as refused."""
        self.used.difference_update(reply.clients)
        self.refuse(error.reason, str(error), clients=len(reply.clients))
        if error.reason in _GARBAGE and not error.by_others:
            self.garbage.update(
                node for node, asked in self.asked.items() if set(asked) & set(reply.clients)
            )

    @property
    def accumulated(self) -> int:
        """Number of answers that are used."""
        return len(self.used)

    def released(self) -> tuple[str, ...]:
        """Return the clients that must be charged because they may have released something.

        That is everybody who was asked and did not say otherwise: the reply of the others may be
        late or lost, and has left its node all the same. A node that has not said who it is counts
        under its address until it answers.
        """
        asked = {client for node in self.asked for client in self.addressed(node)}
        named = {f"node-{node}" for node in self.named}
        return tuple(sorted((asked - named - self._silent) | self.answered))

    @property
    def own_name(self) -> ChargeName:
        """The name of the question within its experiment."""
        return ChargeName(self.header.phase, self.header.server_round, self.header.request)

    def charged_as(self, client: str) -> ChargeName:
        """Return the name under which a client's ledger has the charge, if there is one."""
        return self.own_name if self.names is None else self.names(client)

    @property
    def silent(self) -> frozenset[str]:
        """The clients that say that they released nothing."""
        return frozenset(self._silent - self.answered)

    def addressed(self, node: int) -> list[str]:
        """Return the clients at a node, or its address for one that has not said who it is."""
        return [client or f"node-{node}" for client in self.asked.get(node, [])]

    def refuse(self, reason: str, detail: str, *, clients: int = 1) -> None:
        """Count and log a reply that is not used."""
        self.refused[reason if reason in REASONS else "error"] += clients
        text = "".join(c if c.isprintable() else "?" for c in detail[:_LONGEST_DETAIL])
        if len(self.details) < _MOST_DETAILS:
            self.details.append(text)
        logger.warning("round %d: refused (%s)", self.header.server_round, text)

    def counts(self) -> dict[str, Any]:
        """Return the counts of the request's outcomes, for the history."""
        return {
            "asked": sum(map(len, self.asked.values())),
            "answered": len(self.answered),
            "accumulated": self.accumulated,
            "late": self.late_count,
            "refused": dict(self.refused),
        }

    def _read(self, message: Message) -> Iterator[ClientReply | PartialSum]:
        node = message.metadata.src_node_id
        if message.has_error() and message.error.code in _NOT_THERE:
            return
        self.spoke.add(node)
        if message.has_error():
            text = message.error.reason or f"code {message.error.code}"
            reason = _REASON_OF_CODE.get(message.error.code, "error")
            if message.error.code == REFUSED_PEERS_CODE and not self.cohorts:
                named = (message.error.reason or "")[:_MOST_NAMED].split()
                self.refused_peers |= dict.fromkeys(self.asked.get(node, []), named)
                text = f"it refuses keys or shares of clients {text}"
            # Who is asked again may have answered before, and refuses to do so twice.
            if reason in _NOTHING_RELEASED and node not in self.asked_again:
                self._silent.update(self.addressed(node))
            raise ReplyRefusedError(reason, text.strip().partition("\n")[0])
        content = message.content
        size = self._size(content)
        self.wire_bytes_up += size
        if node not in self.asked:
            raise ReplyRefusedError("unknown node", "it was not asked")
        client_id, fields = self._header(content)
        if node in self._heard:
            raise ReplyRefusedError("duplicate", "it has answered already")
        if self.cohorts:
            answer = CohortAnswer.read(_config(content, COHORT), asked=self.asked[node])
            if not self.late.issuperset(answer.late) or self.late & set(answer.answered):
                raise ReplyRefusedError("malformed", "others are late than were told to be")
            self._heard.add(node)
            self.free.update(set(self.asked[node]).difference(answer.keepers))
            yield from self._read_cohort(answer, node, content, fields)
            return
        expected = self.asked[node]
        if expected == [""]:
            check_client_id(client_id)
        elif [client_id] != expected:
            raise ReplyRefusedError("unknown client", f"{client_id[:64]!r} does not sit there")
        if client_id in self.answered:
            raise ReplyRefusedError("duplicate", f"client {client_id} has answered already")
        self._heard.add(node)
        if expected == [""]:
            self.named[node] = client_id
        self.bytes_up += size
        self.answered.add(client_id)
        self._look_at_ledger(client_id, fields, node=node)
        if client_id in self.late:
            self.late_count += 1
            return
        yield ClientReply(client_id, content, fields)

    def _read_cohort(
        self, answer: CohortAnswer, node: int, content: RecordDict, fields: Fields
    ) -> Iterator[ClientReply | PartialSum]:
        self.bytes_up += answer.bytes_up
        self.late_count += len(answer.late)
        self.answered.update(answer.late, answer.answered)
        for client, reason, detail in answer.refused:
            if reason in _NOTHING_RELEASED:
                if node not in self.asked_again:
                    self._silent.add(client)
            elif reason != "failed":  # that one was charged, and has no answer
                self.answered.add(client)
            self.refuse(reason, f"client {client}: {detail}")
        for client, count, value in answer.heads:
            if self.heads is not None:  # unsigned: whoever runs simulated clients has all keys
                shown = {COUNT: count, VALUE: value}
                self.heads.take(client, shown, asked=self.charged_as(client), simulated=True)
        if self.summed:
            records = (r for r in content.values() if isinstance(r, ArrayRecord))
            arrays = arrays_of(next(records, ArrayRecord()))
            yield PartialSum(answer.answered, arrays, fields)
            return
        if f"{RECORD}{ROWS}" in content:
            yield from self._read_rows(answer.answered, content)
            return
        records_of: dict[str, dict[str, Any]] = {client: {} for client in answer.answered}
        for name, record in content.items():
            base, _, client = name.rpartition("@")
            records_of.get(client, {})[base] = record
        for client in answer.answered:
            own = RecordDict(records_of[client])
            try:
                own_id, own_fields = self._header(own)
                if own_id != client:
                    raise ReplyRefusedError("unknown client", f"{own_id[:64]!r} is another")
                yield ClientReply(client, own, own_fields)
            except (ReplyRefusedError, ProtocolError) as error:
                reason = error.reason if isinstance(error, ReplyRefusedError) else "malformed"
                self.refuse(reason, f"client {client}: {error}")

    def _read_rows(self, clients: list[str], content: RecordDict) -> Iterator[ClientReply]:
        """Yield the replies of clients that a node sends as rows of the same records."""
        try:
            replies = replies_of_rows(clients, content, replace(self.header, version=VERSION))
        except ReplyRefusedError as error:
            for client in clients:
                self.refuse(error.reason, f"client {client}: {error}")
            return
        for client, own, fields in replies:
            yield ClientReply(client, own, fields)

    def _look_at_ledger(
        self, client_id: str, fields: Fields, *, node: int, late: bool = False
    ) -> None:
        """Compare what a reply shows of its client's ledger with what was asked."""
        if self.heads is not None:
            named = self.named.get(node) == client_id or self.asked.get(node) == [""]
            address = f"node-{node}" if named else ""
            asked = self.charged_as(address or client_id)
            self.heads.take(client_id, fields, asked=asked, address=address, late=late)

    def _size(self, content: RecordDict) -> int:
        try:
            size = payload_bytes(content)
        except (ValueError, TypeError, OverflowError, MemoryError) as error:
            raise ReplyRefusedError("malformed", f"it cannot be serialised ({error})") from error
        if size > self.largest:
            raise ReplyRefusedError("malformed", f"{size} bytes; {self.largest} is the most")
        return size

    def _header(self, content: RecordDict) -> tuple[str, Fields]:
        """Return the client and the scheme's fields of a reply, if it answers this request."""
        header, fields = Header.read(_config(content, RECORD))
        header.check(scheme=self.header.scheme, phases={header.phase})
        mine, theirs = (
            (h.experiment_id, h.phase, h.server_round, h.request) for h in (self.header, header)
        )
        if mine != theirs:
            raise ReplyRefusedError(
                "another round",
                f"it answers phase {header.phase[:64]!r} of round {header.server_round}",
            )
        return header.client_id, fields


def _config(content: RecordDict, name: str) -> ConfigRecord:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise ReplyRefusedError(
            "malformed", f"no record '{name}': the app is not wrapped in the scheme's client half"
        )
    return record
