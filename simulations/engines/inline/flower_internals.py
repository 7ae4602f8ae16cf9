"""All uses of Flower's private functions, so that a new Flower release breaks one module only."""

from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "SERVER_NODE_ID",
    "acting_as_server",
    "assign_message_id",
    "empty_run",
    "over_the_wire",
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
