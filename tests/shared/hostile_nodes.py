"""Nodes that change what they send."""

from collections.abc import Callable
from typing import Any

from apps import message_app
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.wire.message import RECORD

Change = Callable[[RecordDict], None]


def tampered(change: Change, *, partition: int = 0, phase: str = "train") -> ClientApp:
    """The shared app, where one node changes its replies of a phase."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply = as_mod(FedAvgClient)(message, context, call_next)
        asked = message.content.config_records.get(RECORD, {}).get("phase")
        if context.node_config["partition-id"] == partition and asked == phase:
            assert not reply.has_error(), reply.error.reason
            change(reply.content)
        return reply

    return message_app([mod])


def entries(record_name: str, **changes: Any) -> Change:
    def change(content: RecordDict) -> None:
        altered = dict(content[record_name])
        for key, value in changes.items():
            name = key.replace("_", "-")
            altered.pop(name, None)
            if value is not None:
                altered[name] = value
        content[record_name] = ConfigRecord(altered)

    return change
