"""All uses of Flower's private functions, so that a new Flower release breaks one module only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import client_app
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "SERVER_NODE_ID",
    "acting_as_server",
    "assign_message_id",
    "empty_run",
    "inside_of_mods",
    "over_the_wire",
    "records_from_bytes",
    "records_to_bytes",
]

SERVER_NODE_ID = 1


@contextmanager
def acting_as_server(run_id: int) -> Iterator[None]:
    """Let messages be built as a ServerApp of the run builds them."""
    before = dict(vars(TaskIdentity))
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SERVER_NODE_ID, 1
    try:
        yield
    finally:
        for name in ("_run_id", "_node_id", "_task_id"):
            setattr(TaskIdentity, name, before[name])


def assign_message_id(message: Message, message_id: str) -> None:
    """Give a message its identity, as a SuperLink does."""
    message.metadata.__dict__["_message_id"] = message_id


def empty_run(run_id: int) -> Run:
    """Return the description of a run that no SuperLink knows."""
    return Run.create_empty(run_id)


def over_the_wire(message: Message) -> Message:
    """Return a message as it comes out of Flower's serialisation."""
    return message_from_proto(message_to_proto(message))


def records_to_bytes(content: RecordDict) -> bytes:
    """Return records in Flower's serialisation."""
    written: bytes = recorddict_to_proto(content).SerializeToString()
    return written


def records_from_bytes(written: bytes) -> RecordDict:
    """Return the records of `records_to_bytes`."""
    return recorddict_from_proto(RecordDictProto.FromString(written))


ClientFunction = Callable[[Message, Context], Message]


def inside_of_mods(around: Callable[[ClientFunction], ClientFunction]) -> None:
    """Have every ClientApp that is made from now on call its functions through `around`.

    What `around` returns stands inside of all mods: it sees what the app's own code is given and
    what that returns, before a mod clips, noises or masks it.
    """
    module: Any = client_app
    make_ffn = module.make_ffn

    def made(function: ClientFunction, mods: list[Any]) -> ClientFunction:
        chain: ClientFunction = make_ffn(around(function), mods)
        return chain

    module.make_ffn = made
