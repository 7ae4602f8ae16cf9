"""Tracks the connected nodes and their clients.

Every node says once who it is (the hello exchange). From then on clients are known by their own
identity; Flower's node ids only serve as addresses. A node whose hello is not signed with the key
that its client's name belongs to is kept out and named, and the run goes on without it.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.wire.hello import NONCE, NONCE_BYTES
from flwr_privacy.wire.message import RECORD, Fields, Header
from flwr_privacy.wire.payload import payload_bytes

from .client_keys import ClientKeys
from .exchange import persistent_exchange
from .ledger_heads import LedgerHeads
from .request_log import ClientReply, RequestLog

if TYPE_CHECKING:  # it loads cryptography
    from flwr_privacy.wire.pins import Pins

__all__ = ["Federation"]

logger = logging.getLogger("flwr.privacy")

_SETTLE = 0.1  # seconds between two looks at the nodes before they are counted
_SILENCE = 60.0  # seconds without a further hello after which the silent nodes are left out
_PATIENCE = 3  # replies that no app of ours sends, after which a node is left out of the run
_LARGEST = 2**20  # bytes of a hello
_MOST_CONFLICTS = 3  # that an error names
_JOINING = 60.0  # seconds for the hello of nodes that come later: each starts a process for it


class Federation:
    """The clients of a federation and the nodes that run them.

    Parameters
    ----------
    virtual_clients : int, optional
        Number of simulated clients, named "0", "1", ... By default every node is one client.
    min_available_nodes : int, default 2
        Number of nodes to wait for.
    pins : Pins, optional
        The clients' long-term keys; see `ClientKeys`.
    heads : LedgerHeads, optional
        Compares the ledger that a hello shows with what was seen before.

    Attributes
    ----------
    keys : ClientKeys
        Which key belongs to which client.
    heads : LedgerHeads, optional
        What the clients' ledgers showed before.
    nodes : dict
        The node of each client that is there.
    simulated : list of str
        Names of the simulated clients.
    connected : list of int
        All nodes, where they have not said who they are.
    introductions : dict
        What each node said of itself in its hello beyond its identity, by its client.
    kept_out : dict
        The name that a node said and why it is not its own, by node.
    """

    def __init__(
        self,
        *,
        virtual_clients: int | None = None,
        min_available_nodes: int = 2,
        pins: "Pins | None" = None,
        heads: LedgerHeads | None = None,
    ) -> None:
        self.virtual_clients = virtual_clients
        self.met = False
        self.cohorts = False
        self.keys = ClientKeys(pins)
        self.heads = heads
        self.nodes: dict[str, int] = {}
        self.connected: list[int] = []
        self.introductions: dict[str, Fields] = {}
        self.kept_out: dict[int, tuple[str, str]] = {}
        self._minimum = min_available_nodes
        self.simulated = [str(index) for index in range(virtual_clients or 0)]
        self._meetings = 0
        self._failures: Counter[int] = Counter()  # hellos that failed, by node
        self._next_try: dict[int, int] = {}
        self._garbage: Counter[int] = Counter()  # replies by node that no app of ours sends
        self._left_out: set[int] = set()

    def wait(self, grid: Grid, timeout: float) -> None:
        """Wait until enough nodes are connected and their number no longer grows.

        Flower's FedAvg counts before it waits, and so trains its first round on two of a thousand.

        Raises
        ------
        ProtocolError
            If too few nodes connect within `timeout` seconds.
        """
        end = time.monotonic() + timeout
        nodes = list(grid.get_node_ids())
        while True:
            time.sleep(_SETTLE)
            before, nodes = nodes, list(grid.get_node_ids())
            if len(nodes) >= self._minimum and len(nodes) == len(before):
                self.connected = sorted(nodes)
                return
            if time.monotonic() > end:
                raise ProtocolError(
                    f"{len(nodes)} of min_available_nodes = {self._minimum} nodes connected within "
                    f"{timeout:g} s"
                )

    def meet(
        self, grid: Grid, header: Header, timeout: float
    ) -> tuple[list[RequestLog], list[str]]:
        """Ask new nodes for their clients' identities; forget nodes that left.

        Returns
        -------
        logs : list of RequestLog
            The logs of the requests.
        joined : list of str
            The clients of the new nodes; nobody where nodes run simulated clients.

        Raises
        ------
        ProtocolError
            At the first meeting: if no node answers, or fewer than `min_available_nodes` remain.
        """
        alive = set(grid.get_node_ids()) - self._left_out
        self.nodes = {client: node for client, node in self.nodes.items() if node in alive}
        strangers = sorted(
            node
            for node in alive.difference(self.nodes.values())
            if self._next_try.get(node, 0) <= self._meetings
        )
        self._meetings += 1
        if not strangers:
            return [], []
        nonce = secrets.token_bytes(NONCE_BYTES)
        question = RecordDict({RECORD: ConfigRecord(header.write({NONCE: nonce}))})
        size = payload_bytes(question)
        # One log for each node: one identity from two nodes is a conflict, not a repeated reply.
        logs = {
            node: RequestLog(
                header, {node: [""]}, bytes_down=size, wire_bytes_down=size, largest=_LARGEST
            )
            for node in strangers
        }
        deadline = min(timeout, _JOINING) if self.met else timeout
        messages = [
            Message(question, node, MessageType.TRAIN, ttl=deadline, group_id=secrets.token_hex(16))
            for node in strangers  # a group of its own: nobody may guess another's message id
        ]
        joined: list[str] = []
        conflicts: list[str] = []
        for message in persistent_exchange(
            grid,
            messages,
            again=not self.met,
            logs=logs.__getitem__,
            largest=_LARGEST,
            deadline=deadline,
            idle=_SILENCE,
        ):
            node = message.metadata.src_node_id
            request_log = logs.get(node, RequestLog(header, {}))
            for reply in request_log.replies([message]):
                if not isinstance(reply, ClientReply):
                    continue
                client, fields = reply.client_id, reply.fields
                own, holder = replace(header, client_id=client), self.nodes.get(client)
                try:
                    self.keys.admit(own, fields, nonce=nonce, node=node, holder=holder)
                    # A node that runs whom a server names shows those ledgers with its answers.
                    if self.heads is not None and self.virtual_clients is None:
                        self.heads.greet(client, fields)
                except ReplyRefusedError as error:
                    request_log.withdraw(reply, error)
                    conflicts.append(str(error).removeprefix(f"{error.reason}: "))
                    self.kept_out[node] = client, conflicts[-1]
                    continue
                self.kept_out.pop(node, None)
                self.nodes[client], self.introductions[client] = node, fields
                joined.append(client)
        for node in strangers:
            if node not in self.nodes.values():
                self._failures[node] += 1
                self._next_try[node] = self._meetings + 2 ** self._failures[node]
        if not self.met and not self.nodes and not conflicts:
            raise ProtocolError(
                f"hello: none of {len(strangers)} nodes said who it is "
                f"({_refusals(logs.values())}): wrap their app in the client half of "
                f"'{header.scheme}', before all mods of its own{_first_detail(logs.values())}"
            )
        if not self.met and len(self.nodes) < max(1, self._minimum):
            raise ProtocolError(
                f"hello: {len(self.nodes)} of min_available_nodes = {self._minimum} nodes said "
                f"who they are ({_refusals(logs.values())}): "
                + (_few(conflicts) or "start again when the others answer")
            )
        if conflicts:
            logger.error("hello: %d refused, the run goes on: %s", len(conflicts), _few(conflicts))
        if missing := len(strangers) - len(joined) - len(conflicts):
            logger.warning("%d of %d nodes were kept out", missing, len(logs))
        if not self.met:
            self.met = True
            self.cohorts = not set(self.simulated) <= set(self.nodes)
        return list(logs.values()), [] if self.cohorts else joined

    def count_garbage(self, garbage: Mapping[int, int]) -> None:
        """Count replies that no app of ours sends; a node with three is left out of the run.

        Parameters
        ----------
        garbage : mapping
            The number of such replies by node.
        """
        for node, count in garbage.items():
            self._garbage[node] += count
            if self._garbage[node] >= _PATIENCE:
                form = "replies were not in the form of this scheme"
                self._leave_out(node, f"{self._garbage[node]} {form}")

    def leave_out(self, client: str, why: str) -> None:
        """Leave a client's node out of the run, unless it runs simulated clients."""
        if client in self.nodes:
            self._leave_out(self.nodes[client], why)

    def _leave_out(self, node: int, why: str) -> None:
        # Nodes with simulated clients are one operator's own.
        if self.cohorts or node in self._left_out:
            return
        self._left_out.add(node)
        names = [client for client, own in self.nodes.items() if own == node]
        name = names[0] if names else "without a name"
        logger.error("client %s (node %d) is left out of this run: %s", name, node, why)
        self.nodes.pop(name, None)
        self.connected = [each for each in self.connected if each != node]

    def clients(self) -> list[str]:
        """Return the identities of all available clients, in a fixed order.

        Raises
        ------
        ProtocolError
            If there are simulated clients and no node that may run them.
        """
        if self.virtual_clients is None:
            return sorted(self.nodes)
        if not self.cohorts:
            return [client for client in self.simulated if client in self.nodes]
        if not any(said.get("plays") == "any" for said in self.introductions.values()):
            raise ProtocolError(
                f"clients = {self.virtual_clients} for {len(self.nodes)} nodes, and none lets a "
                "server choose whom it runs: set FLWR_PRIVACY_COHORTS=1 in the environment of the "
                "nodes, or cohorts=true in their configuration (never with a client-id)"
            )
        return self.simulated if self.workers() else []

    def workers(self) -> list[str]:
        """Return the nodes that run the clients that a server names."""
        return sorted(c for c in self.nodes if self.introductions[c].get("plays") == "any")


def _few(conflicts: Sequence[str]) -> str:
    more = len(conflicts) - _MOST_CONFLICTS
    return "; ".join([*conflicts[:_MOST_CONFLICTS], *([f"{more} more"] if more > 0 else [])])


def _refusals(logs: Iterable[RequestLog]) -> str:
    counts: Counter[str] = sum((request_log.refused for request_log in logs), Counter())
    return ", ".join(f"{count} x {reason}" for reason, count in counts.items()) or "no reply"


def _first_detail(logs: Iterable[RequestLog]) -> str:
    details = (detail for request_log in logs for detail in request_log.details)
    detail = next(details, "")
    return detail and f" ({detail})"
