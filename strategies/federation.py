"""Who takes part: the nodes that are connected, the clients they play, and a sample of them.

Every node says once who it is (the hello exchange). From then on clients are known by their own
identity; Flower's node ids only serve as addresses.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_integer
from flwr_privacy.identity import check_client_id
from flwr_privacy.wire import RECORD, Header, payload_bytes

from .exchange import exchange
from .round import ClientReply, Round

__all__ = ["Federation"]

logger = logging.getLogger("flwr.privacy")

_SETTLE = 0.1  # seconds between two looks at the nodes before they are counted


class Federation:
    """The clients of a federation and the nodes that play them.

    Parameters
    ----------
    virtual_clients : int, optional
        Number of simulated clients, named "0", "1", ... By default every node is one client.
    min_available_nodes : int, default 2
        Number of nodes to wait for.
    """

    def __init__(self, *, virtual_clients: int | None = None, min_available_nodes: int = 2) -> None:
        self.virtual_clients = virtual_clients
        self._minimum = min_available_nodes
        self._connected: list[int] = []
        self._nodes: dict[str, int] = {}
        self._workers: set[str] = set()

    @property
    def met(self) -> bool:
        """Whether nodes have said who they are."""
        return bool(self._nodes)

    @property
    def cohorts(self) -> bool:
        """Whether nodes play several clients each."""
        return self.met and (self.virtual_clients or 0) > len(self._nodes)

    def wait(self, grid: Grid, timeout: float) -> None:
        """Wait until enough nodes are connected and no more come.

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
                self._connected = sorted(nodes)
                return
            if time.monotonic() > end:
                raise ProtocolError(
                    f"{len(nodes)} of min_available_nodes = {self._minimum} nodes connected within "
                    f"{timeout:g} s"
                )

    def meet(self, grid: Grid, header: Header, timeout: float) -> list[Round]:
        """Ask the nodes that are new who they are; forget those that left.

        Returns
        -------
        list of Round
            The books of the questions.

        Raises
        ------
        ProtocolError
            If two connected nodes have one identity, or no node answers.
        InvalidParameterError
            If an identity is malformed.
        """
        alive = set(grid.get_node_ids())
        self._nodes = {client: node for client, node in self._nodes.items() if node in alive}
        self._workers &= set(self._nodes)
        strangers = sorted(alive.difference(self._nodes.values()))
        if not strangers:
            return []
        question = RecordDict({RECORD: ConfigRecord(header.write())})
        messages = [Message(question, node, MessageType.TRAIN, ttl=timeout) for node in strangers]
        # A book for each: the same identity from two nodes is no repeated reply but a conflict.
        size = payload_bytes(question)
        books = {
            node: Round(header, {node: [""]}, bytes_down=size, wire_bytes_down=size)
            for node in strangers
        }
        for message in exchange(grid, messages, deadline=timeout):
            node = message.metadata.src_node_id
            for reply in books.get(node, Round(header, {})).replies([message]):
                if isinstance(reply, ClientReply):
                    self._admit(node, reply.client_id, reply.fields.get("plays") == "any")
        if not self._nodes:
            raise ProtocolError(
                f"none of {len(strangers)} nodes said who it is: wrap their app in the client half "
                f"of '{header.scheme}' ({_refusals(books.values())})"
            )
        if silent := [node for node, book in books.items() if not book.answered]:
            logger.warning("%d of %d nodes did not say who they are", len(silent), len(strangers))
        return list(books.values())

    def clients(self) -> list[str]:
        """Return the identities of all clients, in a fixed order.

        Raises
        ------
        InvalidParameterError
            If there are simulated clients and no node that may play them.
        """
        if not self.cohorts:
            return sorted(self._nodes)
        if not self._workers:
            raise InvalidParameterError(
                "clients",
                self.virtual_clients,
                f"at most {len(self._nodes)}, the number of nodes: each has a client-id of its own "
                "and plays no other client",
            )
        return [str(index) for index in range(self.virtual_clients or 0)]

    def sample(
        self, draws: np.random.Generator, *, fraction: float, minimum: int
    ) -> dict[int, list[str]]:
        """Draw clients without replacement.

        Parameters
        ----------
        draws : Generator
            Source of randomness.
        fraction : float
            Fraction of the clients, rounded down.
        minimum : int
            At least so many.

        Returns
        -------
        dict
            For each node the clients that it plays. A client always sits at the same node. Nodes
            that have not said who they are play the client "".

        Raises
        ------
        InvalidParameterError
            If more are to be drawn than there are.
        """
        population: Sequence[str | int] = self.clients() if self.met else self._connected
        size = max(math.floor(len(population) * fraction + 1e-9), minimum)
        check_integer("clients per round", size, minimum=1, maximum=len(population))
        chosen = [population[i] for i in sorted(draws.choice(len(population), size, replace=False))]
        assigned: dict[int, list[str]] = {}
        workers = sorted(self._workers)
        for who in chosen:
            if isinstance(who, int):
                assigned[who] = [""]
            else:
                seat = workers[int(who) % len(workers)] if self.cohorts else who
                assigned.setdefault(self._nodes[seat], []).append(who)
        return assigned

    def _admit(self, node_id: int, client_id: str, plays_any: bool) -> None:
        check_client_id(client_id)
        holder = self._nodes.setdefault(client_id, node_id)
        if holder != node_id:
            raise ProtocolError(
                f"two nodes say that they are client '{client_id}' (nodes {holder} and {node_id}): "
                "give each its own client-id in its node configuration"
            )
        if plays_any:
            self._workers.add(client_id)


def _refusals(books: Iterable[Round]) -> str:
    counts: Counter[str] = sum((book.refused for book in books), Counter())
    return ", ".join(f"{count} x {reason}" for reason, count in counts.items()) or "no reply"
