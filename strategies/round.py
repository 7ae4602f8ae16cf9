"""One question to the clients: who was asked, and what became of every reply.

A reply is checked before anything of it is used, because it cannot be taken out of a sum again.
What is refused is counted by reason and logged; it never ends a round.

Records are found by their type, not through ``RecordDict.array_records`` and its like: those build
cyclic garbage that keeps a reply's arrays in memory until the collector comes by.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flwr_privacy.arrays import Arrays, decode_npy
from flwr_privacy.averaging import ReplyRefusedError
from flwr_privacy.errors import ProtocolError
from flwr_privacy.wire import RECORD, Fields, Header, payload_bytes

__all__ = ["ClientReply", "PartialSum", "Round", "arrays_of"]

logger = logging.getLogger("flwr.privacy")


@dataclass(frozen=True)
class ClientReply:
    """The reply of one client: its records and the scheme's own fields."""

    client_id: str
    content: RecordDict
    fields: Fields

    def arrays(self) -> Arrays:
        """Return the arrays of the reply.

        Raises
        ------
        ReplyRefusedError
            If there is not exactly one record of arrays, or one cannot be decoded.
        """
        records = [r for r in self.content.values() if isinstance(r, ArrayRecord)]
        if len(records) != 1:
            raise ReplyRefusedError("malformed", f"{len(records)} ArrayRecords instead of one")
        return arrays_of(records[0])

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the reply.

        Raises
        ------
        ReplyRefusedError
            If there is not exactly one record of metrics.
        """
        records = [r for r in self.content.values() if isinstance(r, MetricRecord)]
        if len(records) != 1:
            raise ReplyRefusedError("malformed", f"{len(records)} MetricRecords instead of one")
        return dict(records[0])


@dataclass(frozen=True)
class PartialSum:
    """The answer of a node that played several clients: the state of an accumulator."""

    clients: list[str]
    record: ArrayRecord
    fields: Fields


def arrays_of(record: ArrayRecord) -> dict[str, Any]:
    """Decode a record of arrays, without copies.

    Raises
    ------
    ReplyRefusedError
        If an array cannot be decoded.
    """
    try:
        return {name: decode_npy(array.data) for name, array in record.items()}
    except ValueError as error:
        raise ReplyRefusedError("malformed", f"an array cannot be decoded ({error})") from error


@dataclass
class Round:
    """The book of one exchange.

    Parameters
    ----------
    header : Header
        Header of the question.
    asked : dict
        Clients asked, by node. A node whose identity is not known yet has the client "".
    late : set of str
        Clients whose simulated answer comes too late: counted, not used.
    virtual_seconds : float
        How long the exchange takes on the virtual clock.
    """

    header: Header
    asked: Mapping[int, list[str]]
    late: set[str] = field(default_factory=set)
    virtual_seconds: float = 0.0
    answered: set[str] = field(default_factory=set)
    folded: int = 0
    late_count: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    bytes_down: int = 0
    bytes_up: int = 0
    wire_bytes_down: int = 0
    wire_bytes_up: int = 0

    def replies(self, messages: Iterable[Message]) -> Iterator[ClientReply | PartialSum]:
        """Yield what may be used of the messages, one by one as they come."""
        for message in messages:
            try:
                yield from self._read(message)
            except ReplyRefusedError as error:
                self.refuse(error.reason, f"node {message.metadata.src_node_id}: {error}")

    def refuse(self, reason: str, detail: str) -> None:
        """Count and log a reply that is not used."""
        self.refused[reason] += 1
        logger.warning("round %d: refused (%s)", self.header.server_round, detail)

    def counts(self) -> dict[str, Any]:
        """Return what became of the question, for the history."""
        return {
            "asked": sum(map(len, self.asked.values())),
            "answered": len(self.answered),
            "folded": self.folded,
            "late": self.late_count,
            "refused": dict(self.refused),
        }

    def _read(self, message: Message) -> Iterator[ClientReply | PartialSum]:
        if message.has_error():
            reason = message.error.reason or f"code {message.error.code}"
            raise ReplyRefusedError("error", reason.strip().partition("\n")[0])
        size = payload_bytes(message.content)
        self.wire_bytes_up += size
        node_id = message.metadata.src_node_id
        if node_id not in self.asked:
            raise ReplyRefusedError("unknown node", "it was not asked")
        header, fields = self._header(message.content)
        if "clients" in fields:
            yield from self._read_cohort(node_id, message.content, fields)
            return
        self.bytes_up += size
        reply = ClientReply(header.client_id, message.content, fields)
        yield from self._accept(node_id, [header.client_id], reply)

    def _header(self, content: RecordDict) -> tuple[Header, Fields]:
        if RECORD not in content:
            raise ReplyRefusedError(
                "malformed",
                f"no record '{RECORD}': its app is not wrapped in the client half of "
                f"'{self.header.scheme}'",
            )
        try:
            header, fields = Header.read(content[RECORD])
            header.check(scheme=self.header.scheme, phases={header.phase})
        except ProtocolError as error:
            raise ReplyRefusedError("malformed", str(error)) from error
        mine = (self.header.experiment_id, self.header.phase, self.header.server_round)
        if (header.experiment_id, header.phase, header.server_round) != mine:
            raise ReplyRefusedError(
                "another round",
                f"it answers phase '{header.phase}' of round {header.server_round}",
            )
        return header, fields

    def _read_cohort(
        self, node_id: int, content: RecordDict, fields: Fields
    ) -> Iterator[ClientReply | PartialSum]:
        self.bytes_up += int(fields["bytes-up"])
        clients = list(fields["clients"])
        self._check_asked(node_id, clients)
        self.late_count += len(fields["late"])
        self.answered.update(fields["late"])
        for client, reason, detail in zip(
            fields["refused-clients"],
            fields["refused-reasons"],
            fields["refused-details"],
            strict=True,
        ):
            self.refuse(reason, f"client {client}: {detail}")
        if "weight" in fields:
            records = (r for r in content.values() if isinstance(r, ArrayRecord))
            record = next(records, ArrayRecord())
            yield from self._accept(node_id, clients, PartialSum(clients, record, fields))
            return
        for client in clients:
            own = RecordDict(
                {
                    name.removesuffix(f"@{client}"): record
                    for name, record in content.items()
                    if name.endswith(f"@{client}")
                }
            )
            try:
                _, own_fields = self._header(own)
                yield from self._accept(node_id, [client], ClientReply(client, own, own_fields))
            except ReplyRefusedError as error:
                self.refuse(error.reason, f"client {client}: {error}")

    def _accept(
        self, node_id: int, clients: list[str], reply: ClientReply | PartialSum
    ) -> Iterator[ClientReply | PartialSum]:
        self._check_asked(node_id, clients)
        if repeated := self.answered.intersection(clients):
            raise ReplyRefusedError("duplicate", f"client {min(repeated)} has answered already")
        self.answered.update(clients)
        if self.late.intersection(clients):
            self.late_count += len(clients)
            return
        yield reply

    def _check_asked(self, node_id: int, clients: list[str]) -> None:
        expected = self.asked[node_id]
        if expected != [""] and not set(clients) <= set(expected):
            strangers = sorted(set(clients) - set(expected))
            raise ReplyRefusedError("unknown client", f"{strangers} were not asked there")
