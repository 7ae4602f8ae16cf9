"""What can go wrong between the nodes and the server, and with the server, as the plan has it."""

import os
import signal
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from plan import PlannedFaults, digest_of

KILLS = {
    "killed before": "move",
    "crash": "move",
    "restarted": "restart",
    "moved": "move",
    "node lost": "lose",
}
SILENT = {"late", "drop", "lost request", "stale", "stranger", "clock ahead"}


class Unreliable:
    """Comes between a strategy and its grid.

    Parameters
    ----------
    grid : Grid
        The grid; its methods are replaced.
    plan : PlannedFaults
        What shall go wrong.
    nodes : int
        Number of nodes.
    run : int
        Which run of the experiment it is.
    """

    def __init__(self, grid: Any, plan: PlannedFaults, *, nodes: int, run: int) -> None:
        self._grid: Grid = grid
        self._plan, self._nodes, self._run = plan, nodes, run
        self._push, self._pull = grid.push_messages, grid.pull_messages
        grid.push_messages, grid.pull_messages = self.push_messages, self.pull_messages
        self._clients: dict[int, str] = {}  # by node
        self._lost: set[str] = set()  # questions whose replies never come
        self._held: dict[str, Message] = {}  # replies that come last, by question
        self._previous: dict[str, Message] = {}  # replies by client
        self._open: set[str] = set()  # questions of a training whose replies nobody has seen

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send questions; one that is lost seems to be sent."""
        sent, lost = [], []
        self._open.clear()
        for message in messages:
            entry: Any = message.content["flwr-privacy"]
            client = self._clients.get(message.metadata.dst_node_id, "")
            is_lost = entry["phase"] == "train" and (
                self._plan.strikes.get((int(entry["round"]), client)) == "lost request"
            )
            (lost if is_lost else sent).append(message)
        for message in lost:
            message.metadata.__dict__["_message_id"] = message.object_id
            self._lost.add(message.metadata.message_id)
        pushed = list(self._push(sent))
        self._open.update(pushed)
        return [*pushed, *(message.metadata.message_id for message in lost)]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return replies that are there, and what became of them."""
        asked = list(message_ids)
        waiting = [i for i in asked if i not in self._lost and i not in self._held]
        replies = [
            fated
            for reply in (self._pull(waiting) if waiting else [])
            for fated in self._fate(reply)
        ]
        if not self._open:  # all the others have come
            replies += [self._held.pop(i) for i in asked if i in self._held]
        return replies

    def end_round(self, line: dict[str, Any]) -> None:
        """Have nodes restarted between two rounds, and wait until all nodes are there again."""
        server_round = line["round"]
        self._plan.mark(f"over.{server_round}")
        for (when, client), fault in self._plan.strikes.items():
            if when == server_round and fault in KILLS:
                self._plan.wait(self._plan.request(KILLS[fault], client, server_round))
        while len(list(self._grid.get_node_ids())) < self._nodes:
            time.sleep(0.1)

    def is_silent(self, server_round: int) -> bool:
        """Tell whether answers of a round never come, so that it takes until the deadline."""
        return any(r == server_round and f in SILENT for (r, _), f in self._plan.strikes.items())

    def keep(self, server_round: int, arrays: ArrayRecord) -> None:
        """Keep the model of a round, for the test."""
        (self._plan.folder / f"model.{server_round}").write_bytes(
            b"".join(array.numpy().tobytes() for array in arrays.values())
        )

    def _fate(self, reply: Message) -> list[Message]:
        if reply.has_error():
            return [reply]
        entry: Any = reply.content["flwr-privacy"]
        client = str(entry["client-id"])
        self._clients[reply.metadata.src_node_id] = client
        if entry["phase"] != "train":
            return [reply]
        server_round, question = int(entry["round"]), reply.metadata.reply_to_message_id
        fault = self._plan.strikes.get((server_round, client), "")
        self._plan.note("received", self._run, client, server_round, digest_of(reply.content))
        self._plan.mark(f"heard.{server_round}")
        self._open.discard(question)
        self._die(server_round)
        previous, self._previous[client] = self._previous.get(client, reply), reply
        if fault in ("drop", "stale"):
            self._lost.add(question)
            return [previous] if fault == "stale" else []
        if fault == "reorder":
            self._held[question] = reply
            return []
        if fault == "stranger":
            self._lost.add(question)
            reply.metadata.__dict__["_src_node_id"] ^= 1
        return [reply, reply] if fault == "duplicate" else [reply]

    def _die(self, server_round: int) -> None:
        planned = self._plan.strikes.get((server_round, "server")) == "server killed"
        if planned and not self._open and not self._plan.marked("server killed"):
            self._plan.mark("server killed")
            os.kill(os.getpid(), signal.SIGKILL)
