"""Tracks the connected nodes and their clients, and samples clients.

Every node says once who it is (the hello exchange). From then on clients are known by their own
identity; Flower's node ids only serve as addresses. A node whose hello is not signed with the key
that its client's name belongs to is kept out and named, and the run goes on without it.
"""

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flwr_privacy.errors import ProtocolError, check_integer
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.wire.hello import NONCE, NONCE_BYTES
from flwr_privacy.wire.identity import derive_seed, fingerprints, places, stream
from flwr_privacy.wire.message import RECORD, Fields, Header, payload_bytes

from .client_keys import REASON, ClientKeys
from .exchange import persistent_exchange
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

    Attributes
    ----------
    keys : ClientKeys
        Which key belongs to which client.
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
    ) -> None:
        self.virtual_clients = virtual_clients
        self.met = False
        self.cohorts = False
        self.keys = ClientKeys(pins)
        self.introductions: dict[str, Fields] = {}
        self.kept_out: dict[int, tuple[str, str]] = {}
        self._minimum = min_available_nodes
        self._connected: list[int] = []
        self._nodes: dict[str, int] = {}
        self._virtual = [str(index) for index in range(virtual_clients or 0)]
        self._fingerprints = fingerprints(self._virtual)
        self._seats: dict[str, str] = {}  # virtual client: the worker that ran it last
        self._free: set[str] = set()  # virtual clients that left nothing there
        self._meetings = 0
        self._failures: Counter[int] = Counter()  # hellos that failed, by node
        self._next_try: dict[int, int] = {}
        self._most = 0
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
                self._connected = sorted(nodes)
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
        self._nodes = {client: node for client, node in self._nodes.items() if node in alive}
        strangers = sorted(
            node
            for node in alive.difference(self._nodes.values())
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
                own, holder = replace(header, client_id=client), self._nodes.get(client)
                try:
                    self.keys.admit(own, fields, nonce=nonce, node=node, holder=holder)
                except ReplyRefusedError as error:
                    request_log.withdraw(reply, error)
                    conflicts.append(str(error).removeprefix(f"{REASON}: "))
                    self.kept_out[node] = client, conflicts[-1]
                    continue
                self.kept_out.pop(node, None)
                self._nodes[client], self.introductions[client] = node, fields
                joined.append(client)
        for node in strangers:
            if node not in self._nodes.values():
                self._failures[node] += 1
                self._next_try[node] = self._meetings + 2 ** self._failures[node]
        if not self.met and not self._nodes and not conflicts:
            raise ProtocolError(
                f"hello: none of {len(strangers)} nodes said who it is "
                f"({_refusals(logs.values())}): wrap their app in the client half of "
                f"'{header.scheme}'"
            )
        if not self.met and len(self._nodes) < max(1, self._minimum):
            raise ProtocolError(
                f"hello: {len(self._nodes)} of min_available_nodes = {self._minimum} nodes said "
                f"who they are ({_refusals(logs.values())}): "
                + (_few(conflicts) or "start again when the others answer")
            )
        if conflicts:
            logger.error("hello: %d refused, the run goes on: %s", len(conflicts), _few(conflicts))
        if missing := len(strangers) - len(joined) - len(conflicts):
            logger.warning("%d of %d nodes were kept out", missing, len(logs))
        if not self.met:
            self.met = True
            self.cohorts = not set(self._virtual) <= set(self._nodes)
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
        if client in self._nodes:
            self._leave_out(self._nodes[client], why)

    def _leave_out(self, node: int, why: str) -> None:
        # Nodes with simulated clients are one operator's own.
        if self.cohorts or node in self._left_out:
            return
        self._left_out.add(node)
        names = [client for client, own in self._nodes.items() if own == node]
        name = names[0] if names else "without a name"
        logger.error("client %s (node %d) is left out of this run: %s", name, node, why)
        self._nodes.pop(name, None)
        self._connected = [each for each in self._connected if each != node]

    def clients(self) -> list[str]:
        """Return the identities of all available clients, in a fixed order.

        Raises
        ------
        ProtocolError
            If there are simulated clients and no node that may run them.
        """
        if self.virtual_clients is None:
            return sorted(self._nodes)
        if not self.cohorts:
            return [client for client in self._virtual if client in self._nodes]
        if not self._workers() and not self._seats:
            raise ProtocolError(
                f"clients = {self.virtual_clients} for {len(self._nodes)} nodes, and none lets a "
                "server choose whom it runs: set FLWR_PRIVACY_COHORTS=1 in the environment of the "
                "nodes, or cohorts=true in their configuration (never with a client-id)"
            )
        return self._virtual if self._workers() else []

    def sample_size(self, *, fraction: float, minimum: int) -> tuple[int, int]:
        """Return the size of a sample, and of the population that it is drawn from."""
        population = len(self.clients() if self.met else self._connected)
        return max(math.floor(population * fraction + 1e-9), minimum), population

    def sample(
        self,
        seed: int | str,
        purpose: tuple[str | int, ...],
        *,
        fraction: float,
        minimum: int,
        busy: Collection[int] = (),
        without: Collection[str] = (),
    ) -> dict[int, list[str]]:
        """Draw clients without replacement.

        Every client has a place in a random order that depends on the seed, the purpose and its
        identity alone; the first ones that are there are taken. So who is absent changes no more
        than that somebody else comes in for it.

        Parameters
        ----------
        seed : int or str
            Root seed of the experiment.
        purpose : tuple
            What is drawn, e.g. ``("train", server_round)``.
        fraction : float
            Fraction of the clients that are connected, rounded down.
        minimum : int
            At least so many. If nodes left and fewer clients remain, all of them are taken.
        busy : collection of int
            Nodes that still owe an answer and are not asked.
        without : collection of str
            Clients that are not asked either; a node without a name goes by ``node-`` and its id.

        Returns
        -------
        dict
            For each node the clients that it runs. Simulated clients are shared out evenly; one
            that left something on its node keeps it while the node is connected. Nodes that have
            not said who they are run the client "".

        Raises
        ------
        InvalidParameterError
            If more are to be drawn than there ever were.
        """
        population: Sequence[str | int] = self.clients() if self.met else self._connected
        size, _ = self.sample_size(fraction=fraction, minimum=minimum)
        self._most = max(self._most, len(population))
        check_integer("clients per round", size, minimum=0, maximum=self._most)
        if size > len(population):
            logger.warning("%d clients to draw, %d are left", size, len(population))
        chosen: list[str | int] = []
        there = self._there(busy)
        for index in self._order(population, derive_seed(seed, "sample", *purpose)):
            if len(chosen) == size:
                break
            who = population[index]
            name = f"node-{who}" if isinstance(who, int) else who
            if name not in without and there(who):
                chosen.append(who)
        return self._assigned(chosen, busy)

    def draw(
        self,
        seed: int | str,
        purpose: tuple[str | int, ...],
        *,
        fraction: float,
        minimum: int,
        shares: Mapping[str, float] | None = None,
        busy: Collection[int] = (),
    ) -> tuple[dict[int, list[str]], dict[str, int]]:
        """Draw clients with replacement.

        In every draw each client has a random time that depends on the seed, the purpose and its
        identity alone, exponential with its share as rate; the first one is drawn. So who is absent
        changes no more than that somebody else comes in for it.

        Parameters
        ----------
        seed, purpose, fraction, minimum, busy
            As in `sample`; the fraction is that of the draws.
        shares : dict, optional
            How often each client is to be drawn, relative to the others; by default all alike.
            Clients without a share are not drawn.

        Returns
        -------
        assigned : dict
            For each node the clients that it runs.
        draws : dict
            How often each of them was drawn.
        """
        size, _ = self.sample_size(fraction=fraction, minimum=minimum)
        is_there = self._there(busy)
        there = [
            client
            for client in self.clients()
            if is_there(client) and (shares is None or client in shares)
        ]
        rates = [1.0 if shares is None else shares[client] for client in there]
        draws: Counter[str] = Counter()
        if there and size:
            times = np.array(
                [
                    stream(seed, "draw", *purpose, client).exponential(size=size) / rate
                    for client, rate in zip(there, rates, strict=True)
                ]
            )
            draws.update(there[first] for first in times.argmin(axis=0))
        return self._assigned(draws, busy), dict(draws)

    def release(self, clients: Iterable[str]) -> None:
        """Let simulated clients run on other nodes, as they have no state on their last one."""
        self._free.update(clients)

    def _order(self, population: Sequence[str | int], seed: int) -> list[int]:
        """Return the indices of a population in a random order."""
        prints = self._fingerprints if population is self._virtual else fingerprints(population)
        order: list[int] = np.argsort(places(seed, prints), kind="stable").tolist()
        return order

    def _there(self, busy: Collection[int]) -> Callable[[str | int], bool]:
        """Return a test whether a client is available: no node has an open request for it."""
        if not self.cohorts:
            return lambda who: (who if isinstance(who, int) else self._nodes[who]) not in busy
        idle = any(self._nodes[worker] not in busy for worker in self._workers())

        def there(who: str | int) -> bool:
            seat = self._seats.get(str(who))
            return idle and (seat not in self._nodes or self._nodes[seat] not in busy)

        return there

    def _assigned(
        self, chosen: Collection[str | int], busy: Collection[int]
    ) -> dict[int, list[str]]:
        """Return the chosen clients by the node that runs them."""
        if not self.cohorts:
            return _by_node(
                (who, "") if isinstance(who, int) else (self._nodes[who], who) for who in chosen
            )
        load = {worker: 0 for worker in self._workers() if self._nodes[worker] not in busy}
        most = math.ceil(len(chosen) / max(1, len(load)))
        clients = sorted(map(str, chosen), key=lambda c: (self._may_move(c), len(c), c))
        for client in clients:  # first those who must stay
            seat = self._seats.get(client)
            if seat not in load:
                seat = min(load, key=lambda worker: (load[worker], worker))
            elif self._may_move(client) and load[seat] >= most:
                # What it keeps in files lies where the nodes that share its folder find it.
                others = [worker for worker in load if self._storage(worker) == self._storage(seat)]
                seat = min(others, key=lambda worker: (load[worker], worker))
            self._seats[client] = seat
            load[seat] += 1
        self._free.difference_update(clients)
        return _by_node((self._nodes[self._seats[client]], client) for client in clients)

    def _may_move(self, client: str) -> bool:
        return client in self._free or client not in self._seats

    def _storage(self, worker: str) -> Any:
        return self.introductions[worker].get("storage")

    def _workers(self) -> list[str]:
        return sorted(c for c in self._nodes if self.introductions[c].get("plays") == "any")


def _few(conflicts: Sequence[str]) -> str:
    more = len(conflicts) - _MOST_CONFLICTS
    return "; ".join([*conflicts[:_MOST_CONFLICTS], *([f"{more} more"] if more > 0 else [])])


def _refusals(logs: Iterable[RequestLog]) -> str:
    counts: Counter[str] = sum((request_log.refused for request_log in logs), Counter())
    return ", ".join(f"{count} x {reason}" for reason, count in counts.items()) or "no reply"


def _by_node(chosen: Iterable[tuple[int, str]]) -> dict[int, list[str]]:
    assigned: dict[int, list[str]] = {}
    for node, client in sorted(chosen, key=lambda entry: (len(entry[1]), entry[1], entry[0])):
        assigned.setdefault(node, []).append(client)
    return assigned
