"""A Grid in one process: it runs the client app when the strategy pulls a reply.

A reply exists only from the pull that asks for it on, one at a time, so memory and order are those
of a stream. Apps that fail become error replies, as with Flower's own engines.
"""

import copy
import secrets
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_privacy.clients.node.context_store import SIMULATED

from .faults import Fault, fault_of
from .flower_internals import assign_message_id, empty_run, over_the_wire
from .workers import WorkerPool

__all__ = ["InlineGrid"]

_APP_FAILED = 2  # Flower's code for an exception in a ClientApp


class InlineGrid(Grid):
    """Flower's Grid over client apps in this process, or in worker processes.

    Parameters
    ----------
    client_app : ClientApp or str
        The app; with workers a reference "module:attribute", because an app cannot be sent.
    nodes : int or sequence of mappings
        Number of simulated nodes with partitions 0, 1, ..., which may run any client; or the
        configuration of each, which is a deployed node unless it says otherwise.
    run_config : mapping, optional
        The run's configuration, as `flwr run --run-config` gives it.
    faults : sequence of Fault
        Faults to inject.
    workers : int, default 0
        Number of worker processes; 0 runs everything in this one.
    serialise : bool, default False
        Whether messages go through Flower's serialisation both ways, as in a deployment.
    state : path, optional
        Folder for what clients keep (ledgers, replies) where their configuration names none; by
        default one that is removed when the grid is closed.
    insecure_seed : int, optional
        Seed of the clients' noise, for tests: nothing is protected then.
    pool : WorkerPool, optional
        Runs `client_app`, in place of a pool of its own with `workers` processes; it stays open.
    """

    local = True
    """Replies are objects of this process: no bytes of a node are read to get them."""

    def __init__(
        self,
        client_app: ClientApp | str,
        nodes: int | Sequence[Mapping[str, Any]],
        *,
        run_config: Mapping[str, Any] | None = None,
        faults: Sequence[Fault] = (),
        workers: int = 0,
        serialise: bool = False,
        state: str | Path | None = None,
        insecure_seed: int | None = None,
        pool: WorkerPool | None = None,
    ) -> None:
        if isinstance(nodes, int):
            nodes = [
                {"partition-id": i, "num-partitions": nodes, "cohorts": True, SIMULATED: True}
                for i in range(nodes)
            ]
        self.run_id = secrets.randbits(62)
        self._run = empty_run(self.run_id)
        self._faults = tuple(faults)
        self._serialise = serialise
        self._pool = WorkerPool(client_app, workers) if pool is None else pool
        self._shares_pool = pool is not None
        self._requests: dict[str, Message] = {}
        self._ready_at: dict[str, float] = {}
        self._last: set[str] = set()
        self._previous: dict[int, Message] = {}
        self._contexts: dict[int, Context] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if state is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="flwr-privacy-")
            state = self._temporary.name
        own: dict[str, Any] = {"privacy-state": str(state), SIMULATED: True}
        if insecure_seed is not None:
            own["insecure-seed"] = insecure_seed
        for node_config in nodes:
            node_id = secrets.randbits(62)  # as random as Flower's: nothing may hang on them
            self._contexts[node_id] = Context(
                run_id=self.run_id,
                node_id=node_id,
                node_config={**own, **node_config},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )

    def close(self) -> None:
        """Stop the worker processes, if they are its own, and remove its temporary state folder."""
        if self._shares_pool:
            self._pool.clear()
        else:
            self._pool.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def run(self) -> Any:
        """Description of the run."""
        return self._run

    def set_run(self, run: Any) -> None:
        """Replace the description of the run."""
        self._run = run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Build a message (deprecated in Flower: use the constructor)."""
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages; each is answered when its reply is pulled."""
        ids = []
        for message in messages:
            message_id = uuid.uuid4().hex
            assign_message_id(message, message_id)
            fault = self._fault(message)
            if fault is not None and fault.kind == "delay":
                self._ready_at[message_id] = time.monotonic() + fault.seconds
            if fault is not None and fault.kind == "reorder":
                self._last.add(message_id)
            own = over_the_wire(message) if self._serialise else copy.copy(message)
            own.content = _own_records(own.content)
            context = self._contexts[message.metadata.dst_node_id]
            self._pool.submit(message_id, own, context)
            self._requests[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the first message that is ready; return its reply, if there is one."""
        now = time.monotonic()
        waiting = [i for i in message_ids if i in self._requests]
        ready = [i for i in waiting if self._ready_at.get(i, 0.0) <= now]
        if not ready:
            return []
        others_first = [i for i in ready if i not in self._last]
        if not others_first and any(i not in self._last for i in self._requests):
            return []
        return self._answer((others_first or ready)[0])

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push requests and pull replies until all are there or the time is over."""
        pending = list(self.push_messages(messages))
        end = time.monotonic() + (timeout if timeout is not None else float("inf"))
        replies: list[Message] = []
        while pending and time.monotonic() < end:
            missing = []
            for message_id in pending:  # one by one: looking for what is ready takes all of them
                arrived = list(self.pull_messages([message_id]))
                replies += arrived
                if not arrived:
                    missing.append(message_id)
            if len(missing) == len(pending):
                time.sleep(0.001)
            pending = missing
        return replies

    def _answer(self, message_id: str) -> list[Message]:
        request = self._requests.pop(message_id)
        node_id = request.metadata.dst_node_id
        context = self._contexts[node_id]
        outcome = self._pool.result(message_id)
        if isinstance(outcome, str):
            return [Message(Error(_APP_FAILED, outcome), reply_to=request)]
        reply, state = outcome
        fault = self._fault(request)
        kind = fault.kind if fault is not None else ""
        if kind == "crash":
            return []
        self._pool.accept(context, state)
        if self._serialise:
            reply = over_the_wire(reply)
        if fault is not None:
            fault.damage(reply)
        previous = self._previous.get(node_id, reply)
        if any(fault.kind == "stale" for fault in self._faults):
            self._previous[node_id] = reply
        if kind == "drop":
            return []
        if kind == "stale":
            return [previous]
        if kind == "stranger":
            reply.metadata.__dict__["_src_node_id"] = secrets.randbits(62)
        return [reply, reply] if kind == "duplicate" else [reply]

    def _fault(self, request: Message) -> Fault | None:
        context = self._contexts[request.metadata.dst_node_id]
        return fault_of(self._faults, request, context.node_config)


def _own_records(content: RecordDict) -> RecordDict:
    # A strategy may send one content to all; a client may write into what it received.
    return RecordDict({name: record.copy() for name, record in content.items()})
