"""Builds the messages of a request: content for all clients, for groups, for single clients."""

import secrets
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from flwr_privacy.wire.cohort import EACH, SUM, Cohort
from flwr_privacy.wire.message import COHORT, EVALUATE
from flwr_privacy.wire.payload import payload_bytes

from .request_log import RequestLog

__all__ = ["messages_of"]

_ALLOWANCE = 2**26  # bytes of a reply that need no reason: metrics, keys, shares
_GROWTH = 4  # times the bytes of its request that each client's reply may have: codes are wider


def messages_of(
    request_log: RequestLog,
    shared: RecordDict,
    *,
    own: Mapping[str, RecordDict],
    groups: Mapping[str, str],
    of_group: Mapping[str, RecordDict],
    clients: int,
    weighted_by: str,
) -> list[Message]:
    """Return the messages to the nodes; their sizes are added to the request log.

    Parameters
    ----------
    request_log : RequestLog
        The book of the question, which says who is asked.
    shared : RecordDict
        What all clients are told.
    own, groups, of_group
        As for `flwr_privacy.strategies.requests.messenger.Messenger.ask`.
    clients : int
        Number of simulated clients, for a node that runs several; 0 if there are none.
    weighted_by : str
        Name of the metric that is a reply's weight.
    """
    size = payload_bytes(shared)
    message_type = (
        MessageType.EVALUATE if request_log.header.phase == EVALUATE else MessageType.TRAIN
    )
    messages = []
    for node, asked in request_log.asked.items():
        mine = {client: own[client] for client in asked if client in own}
        ours = {groups[c]: of_group[groups[c]] for c in asked if groups.get(c) in of_group}
        by_group = {group: _merged(shared, records) for group, records in ours.items()}
        questions = {
            client: _merged(by_group.get(groups.get(client, ""), shared), records)
            for client, records in mine.items()
        }
        if request_log.cohorts:
            cohort = Cohort(
                clients=asked,
                late=[client for client in asked if client in request_log.late],
                size=clients,
                reply=SUM if request_log.summed else EACH,
                weighted_by=weighted_by,
                groups=[groups[client] for client in asked] if groups else [],
            )
            question = RecordDict({**shared, COHORT: ConfigRecord(cohort.write())})
            for mark, records_of in (("@@", ours), ("@", mine)):
                for addressee, records in records_of.items():
                    question.update({f"{n}{mark}{addressee}": r for n, r in records.items()})
        else:
            first = asked[0]
            question = questions.get(first, by_group.get(groups.get(first, ""), shared))
        sizes = {group: payload_bytes(told) for group, told in by_group.items()}
        request_log.bytes_down += sum(
            payload_bytes(questions[client])
            if client in questions
            else sizes.get(groups.get(client, ""), size)
            for client in asked
        )
        told_bytes = payload_bytes(question)
        request_log.wire_bytes_down += told_bytes
        request_log.largest = max(
            request_log.largest, _ALLOWANCE + _GROWTH * told_bytes * len(asked)
        )
        # A message's id is a hash of it: who guesses it could answer for its node, or delete it.
        group = f"{request_log.header.server_round}-{secrets.token_hex(16)}"
        # The ttl is the deadline: an answer that comes later is not waited for by anybody.
        messages.append(
            Message(question, node, message_type, ttl=request_log.seconds, group_id=group)
        )
    return messages


def _merged(shared: RecordDict, own: RecordDict) -> RecordDict:
    merged: dict[str, Any] = dict(shared)
    for name, record in own.items():
        kind: Any = type(record)
        merged[name] = kind({**shared.get(name, {}), **record})
    return RecordDict(merged)
