"""Relays sealed messages between devices and aggregators that are nodes of their own.

What crosses here is sealed between neighbours in the tree, or noised. What a server that does not
follow the protocol can do all the same, `flwr_privacy.clients.M2FDPClient` says.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.errors import ProtocolError
from flwr_privacy.m2fdp import (
    AGGREGATE,
    CODES,
    DELIVER,
    DOWN,
    NOISED,
    UP,
    Delivery,
    Duty,
    Exchange,
    M2FDPRoundPlan,
    TierTree,
)
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.strategies.requests.messenger import Messenger, only
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.wire.arrays import Arrays, digest_of
from flwr_privacy.wire.digests import values_digest
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import RECORD, Fields

from .tiers import TierLog

__all__ = ["AGGREGATOR", "Relay", "tell_zone_epsilon"]

logger = logging.getLogger("flwr.privacy")

AGGREGATOR = "aggregator"

Sealed = dict[str, bytes]
"""Sealed messages by who sent them, or who is to get them."""


class Relay:
    """The server's part in the zones of a tree.

    Parameters
    ----------
    messenger : Messenger
        How to ask.
    tree : TierTree
        Who hands what to whom.
    introductions : Mapping
        What the nodes said of themselves: role, public key, signature.
    log : TierLog
        Where noise is noted.
    least : int
        Fewest children of an average.

    Raises
    ------
    ProtocolError
        If a secure aggregator is not there, or somebody below it has no key.
    """

    def __init__(
        self,
        messenger: Messenger,
        tree: TierTree,
        introductions: Mapping[str, Fields],
        log: TierLog,
        *,
        least: int,
    ) -> None:
        self._messenger = messenger
        self._tree = tree
        self._told = introductions
        self._keys: dict[str, tuple[bytes, bytes]] = {}
        self._log = log
        self._least = least
        self._model = b""
        self._answers: Sealed = {}
        self._starts: dict[str, Fields] = {}
        for tier in tree.tiers[1:-1]:
            for node in filter(tree.secure, tier):
                self._check_node(node)

    def _check_node(self, node: str) -> None:
        if self._told.get(node, {}).get("role") != AGGREGATOR:
            raise ProtocolError(
                f"the secure aggregator '{node}' is no node that is there: start one with "
                f"client-id='{node}' and m2fdp-role='{AGGREGATOR}' in its configuration, or leave "
                "`relay` out"
            )
        for member in (node, *self._tree.children(node)):
            if member in self._told and not all(self._key_of(member)):
                raise ProtocolError(
                    f"'{member}' has sent no key and signature: it has no privacy-identity"
                )

    def _key_of(self, member: str) -> tuple[bytes, bytes]:
        """Return the key and the signature of a member, as it last said them; empty if never.

        A later hello may say anything: what has another type does not replace them.
        """
        told = self._told.get(member, {})
        key, signature = told.get("key"), told.get("signature")
        if isinstance(key, bytes) and isinstance(signature, bytes):
            self._keys[member] = key, signature
        return self._keys.get(member, (b"", b""))

    def begin(self, model: Arrays) -> None:
        """Begin a round, in which every device starts from the global model."""
        self._model = values_digest(*([name, digest_of(model, name)] for name in model))
        self._answers, self._starts = {}, {}

    def take(self, device: str, sealed: Any) -> None:
        """Keep the message that a device sealed for its parent.

        Raises
        ------
        ReplyRefusedError
            If it is no sealed message.
        """
        if not isinstance(sealed, bytes):
            raise ReplyRefusedError("malformed", f"client {device}: nothing sealed for its parent")
        self._answers[device] = sealed

    def keys_for(self, node: str) -> Fields:
        """Return the key of an aggregator, and its signature, for its children."""
        key, signature = self._key_of(node)
        return {"parent-key": key, "parent-signature": signature}

    def starts(self, devices: Collection[str]) -> dict[str, Fields]:
        """Return the fields that devices need about the previous clean event, if there was one."""
        return {device: self._starts[device] for device in devices if device in self._starts}

    def event(
        self,
        grid: Grid,
        server_round: int,
        exchange: Exchange,
        plan: M2FDPRoundPlan,
        drawn: Mapping[str, list[str]],
    ) -> dict[str, NDArray[np.int32]]:
        """Run an event on the aggregators; return the noised codes of boundary nodes.

        Parameters
        ----------
        grid : Grid
            Flower's grid.
        server_round : int
            The round.
        exchange : Exchange
            The exchange with the devices that the event follows.
        plan : M2FDPRoundPlan
            The round's noise.
        drawn : Mapping
            The devices that were asked, by their parent.
        """
        released: dict[str, NDArray[np.int32]] = {}
        asked = dict(drawn)  # children of each node that were asked, tier by tier
        for tier in range(self._tree.depth - 1, max(exchange.tier, 1) - 1, -1):
            nodes = [n for n in self._tree.tiers[tier] if self._tree.secure(n) and asked.get(n)]
            for node in nodes:
                asked.setdefault(self._tree.parent(node), []).append(node)
            duties = {
                node: self._duty(node, exchange, plan, asked)
                for node in nodes
                if any(child in self._answers for child in asked[node])
            }
            self._aggregate(grid, server_round, duties, released)
        if exchange.tier > 0:
            self._deliver(grid, server_round, exchange, plan, asked)
        self._answers = {}
        # A zone that handed something out goes on from there, and from no sealed start.
        self._starts = {
            member: start
            for member, start in self._starts.items()
            if not exchange.ends(self._leaf(member))
        }
        return released

    def _duty(
        self,
        node: str,
        exchange: Exchange,
        plan: M2FDPRoundPlan,
        asked: Mapping[str, list[str]],
    ) -> tuple[Duty, Fields]:
        tree = self._tree
        parent, children = tree.parent(node), sorted(asked[node])
        senders = [child for child in children if child in self._answers]
        way = UP if tree.secure(parent) else NOISED
        if tree.tier(node) == exchange.tier:
            way = DOWN
        duty = Duty(
            **plan.of_zone(self._leaf(node), exchange),
            event=exchange.index,
            tier=exchange.tier,
            own_tier=tree.tier(node),
            way=way,
            parent=parent,
            children=children,
            senders=senders,
            sealed=[self._answers[sender] for sender in senders],
            round_model=self._model,
            siblings=sorted(asked[parent]) if way == UP else [],
            min_children=self._least,
        )
        members = children if way == DOWN else senders
        keys = {"members": members, **self._keys_of(members)}
        return duty, {**keys, **(self.keys_for(parent) if way == UP else {})}

    def _keys_of(self, members: list[str]) -> Fields:
        keys = [self._key_of(member) for member in members]
        return {"keys": [key for key, _ in keys], "signatures": [s for _, s in keys]}

    def _leaf(self, member: str) -> str:
        """Return a lowest aggregator of a member's zone; all of them get the same request."""
        return self._tree.parent(self._tree.leaves(member)[0])

    def _aggregate(
        self,
        grid: Grid,
        server_round: int,
        duties: Mapping[str, tuple[Duty, Fields]],
        released: dict[str, NDArray[np.int32]],
    ) -> None:
        def use(reply: ClientReply) -> None:
            duty, node = duties[reply.client_id][0], reply.client_id
            if duty.way == UP:
                self.take(node, reply.fields.get("sealed"))
            elif duty.way == NOISED:
                codes, sigma = _codes(reply, self._log.parameters), reply.fields.get("sigma")
                self._log.noised(node, _number(sigma))
                released[node] = codes
            else:
                self._keep_starts(reply, duty.event, duty.children)

        own = {node: {**write(duty), **keys} for node, (duty, keys) in duties.items()}
        self._put(grid, server_round, AGGREGATE, own, use)

    def _deliver(
        self,
        grid: Grid,
        server_round: int,
        exchange: Exchange,
        plan: M2FDPRoundPlan,
        asked: Mapping[str, list[str]],
    ) -> None:
        """Pass the models of a clean event down, tier by tier, until the devices have them."""
        for tier in range(exchange.tier + 1, self._tree.depth):
            nodes = [
                node
                for node in self._tree.tiers[tier]
                if self._starts.get(node, {}).get("start-event") == exchange.index
                and self._tree.secure(node)
            ]
            own = {}
            for node in nodes:
                children = sorted(asked[node])
                delivery = Delivery(
                    **plan.of_zone(self._leaf(node), exchange),
                    event=exchange.index,
                    own_tier=tier,
                    parent=self._tree.parent(node),
                    siblings=sorted(asked[self._tree.parent(node)]),
                    children=children,
                )
                own[node] = {
                    **write(delivery),
                    **self._starts[node],
                    **self.keys_for(self._tree.parent(node)),
                    **self._keys_of(children),
                }

            def use(reply: ClientReply) -> None:
                self._keep_starts(reply, exchange.index, sorted(asked[reply.client_id]))

            self._put(grid, server_round, DELIVER, own, use)

    def _keep_starts(self, reply: ClientReply, event: int, children: list[str]) -> None:
        sealed = reply.fields.get("sealed")
        if not isinstance(sealed, list) or len(sealed) != len(children):
            raise ReplyRefusedError("malformed", "not one sealed message for each child")
        for child, message in zip(children, sealed, strict=True):
            self._starts[child] = {"start-sealed": message, "start-event": event}

    def _put(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        own: Mapping[str, Fields],
        use: Callable[[ClientReply], None],
    ) -> None:
        """Send each of some aggregators its own request, and use the replies."""
        if not own:
            return
        everybody = self._messenger.sample(grid, server_round, phase, fraction=1.0, minimum=0)
        messages = self._messenger.ask(
            server_round,
            phase,
            RecordDict(),
            only(everybody, own),
            own={node: RecordDict({RECORD: ConfigRecord(f)}) for node, f in own.items()},
        )
        request_log = self._messenger.request_log(phase)
        for reply in request_log.replies(self._messenger.exchange(grid, messages, phase=phase)):
            try:
                if isinstance(reply, ClientReply):
                    use(reply)
            except ReplyRefusedError as error:
                request_log.withdraw(reply, error)


def tell_zone_epsilon(plan: M2FDPRoundPlan) -> None:
    """Log what an aggregator's own ledger comes to, where that is more than a device pays."""
    zones = [tier for tier in plan.boundaries if tier < plan.tree.depth]
    counted = [plan.zone_epsilon(tier) for tier in zones]
    if counted != [plan.epsilon(tier) for tier in zones]:
        logger.info(
            "the ledgers of the trusted aggregators count all rounds: they come to epsilon %.4g, "
            "and a max_epsilon in the policy of an aggregator must be as large",
            max(counted),
        )


def _codes(reply: ClientReply, size: int) -> NDArray[np.int32]:
    codes = reply.arrays().get(CODES)
    if codes is None or codes.dtype != np.int32 or codes.shape != (size,):
        raise ReplyRefusedError("shape", f"no vector of {size} codes as '{CODES}'")
    return np.asarray(codes)


def _number(value: Any) -> float:
    if not isinstance(value, float) or not value >= 0:
        raise ReplyRefusedError("malformed", "no standard deviation of the noise")
    return value
