"""Enrols clients that own columns of the same rows, and sends requests to all of them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.fedvs.clock import Seconds
from flwr_privacy.fedvs.data import TRAIN_PART
from flwr_privacy.fedvs.delays import HalfSlow
from flwr_privacy.fedvs.options import ColumnFeatures
from flwr_privacy.fedvs.rows import order
from flwr_privacy.fedvs.terms import ENROL
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.strategies.loop.base import SchemeStrategy
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.wire.identity import derive_seed
from flwr_privacy.wire.message import Fields

from .columns import Enrolled, check_aligned, natural

__all__ = ["ColumnOwners"]


class ColumnOwners(SchemeStrategy):
    """Base of `VerticalStrategy`: enrols the clients, and asks all of them or none of them."""

    members: list[str]

    _enrolled: dict[str, Enrolled]
    _labels: dict[str, NDArray[Any]]
    data: ColumnFeatures
    parties: int | None
    batch_size: int
    _delays: dict[str, Any] | None
    counted: Seconds | None

    def taken(self, phase: str, reply: ClientReply) -> Any:
        """Return the part of a reply that is kept.

        Raises
        ------
        ReplyRefusedError
            If it cannot be used.
        """
        raise NotImplementedError

    def _check_everybody(self, grid: Grid, assigned: Assigned) -> None:
        """Refuse to begin where a node may own columns and is not asked."""
        pinned = self.federation.keys.pinned
        there = {client for clients in assigned.values() for client in clients}
        reasons = []
        for node in sorted(set(grid.get_node_ids()).difference(assigned)):
            client, why = self.federation.kept_out.get(node, ("", f"node {node} did not answer"))
            # The pins say whose a name is; without them, two nodes may both mean to be a client.
            if client == "" or pinned is None or client in pinned - there:
                reasons.append(why)
        if reasons:
            told = "; ".join(reasons)
            raise ProtocolError(f"all columns are needed; not all nodes said who they are: {told}")

    def enrol(self, grid: Grid, server_round: int, **fields: str) -> dict[str, Enrolled]:
        """Ask all clients, or all members of a running experiment, for a description of their data.

        Raises
        ------
        ProtocolError
            If somebody does not answer, or the clients' rows do not belong together.
        InvalidParameterError
            If the labels are not those of the rows.
        """
        if self.members:
            assigned = self._assigned(grid, server_round, ENROL)
        else:
            assigned = self.messenger.sample(grid, server_round, ENROL, fraction=1.0, minimum=1)
        if not self.members and not self.federation.cohorts:
            self._check_everybody(grid, assigned)
        self._check_present(assigned)
        with self.messenger.patiently():
            told: dict[str, Enrolled] = self.ask_all(
                grid, server_round, ENROL, RecordDict(), assigned, fields=fields
            )
        asked = {client for clients in assigned.values() for client in clients}
        if missing := sorted((asked | set(self.members)) - set(told)):
            details = "; ".join(self.messenger.request_log(ENROL).details)
            raise ProtocolError(
                f"the setup failed: clients {missing} did not say what data they have"
                + (f" ({details})" if details else "")
                + "; start again when all of them are there"
            )
        if self.parties is not None and len(told) != self.parties:
            raise ProtocolError(f"{len(told)} clients are there, parties = {self.parties}")
        check_aligned(told)
        (rows, *_) = (entry.rows for entry in told.values())
        for part, labels in self._labels.items():
            name = "labels" if part == TRAIN_PART else f"{part}_labels"
            if part not in rows:
                raise InvalidParameterError(name, len(labels), f"nothing: no rows '{part}'")
            if len(labels) != rows[part]:
                allowed = f"a label for each of the {rows[part]} rows '{part}' of the clients"
                raise InvalidParameterError(name, f"{len(labels)} labels", allowed)
        return told

    def _check_present(self, assigned: Assigned) -> None:
        """Raise an error if a member's node is not connected.

        Raises
        ------
        ProtocolError
            If there is one; it names all.
        """
        there = {client for clients in assigned.values() for client in clients}
        if missing := natural(set(self.members).difference(there)):
            raise ProtocolError(f"clients {missing} are not there, or still owe an answer")

    def delays_of_members(self, partitions: int = 1) -> HalfSlow | None:
        """Return the delays that are simulated; None if that was not asked for.

        Raises
        ------
        InvalidParameterError
            If they do not fit the members.
        """
        if self._delays is None:
            return None
        usual = {
            "clients": tuple(self.members),
            "batch_size": self.batch_size,
            "K": partitions,
        }
        delays = HalfSlow(**{**usual, **self._delays})
        if missing := natural(set(self.members).difference(delays.clients)):
            allowed = f"all clients, {missing} among them"
            raise InvalidParameterError("delays.clients", delays.clients, allowed)
        return delays

    def simulate_delays(self, partitions: int = 1) -> None:
        """Begin to simulate the delays of the members, if that was asked for.

        They take time for computing and messages too, unless the user has said how much.
        """
        delays = self.delays_of_members(partitions)
        if delays is None:
            return
        if delays.counted:
            self.counted = own = self.seconds(delays)
            # Whoever has a delay and is no member takes no time.
            others = dict.fromkeys(delays.clients, 0.0)
            delays = replace(
                delays,
                share_seconds={**others, **own.share},
                upload_seconds={**others, **own.upload},
            )
        self.messenger.stragglers = delays

    def seconds(self, delays: HalfSlow) -> Seconds:
        """Return the seconds that clients take for computing and messages."""
        raise NotImplementedError

    def ask_all(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        content: RecordDict,
        assigned: Assigned,
        *,
        fields: Fields,
        own: Mapping[str, RecordDict] | None = None,
        quorum: int | None = None,
    ) -> dict[str, Any]:
        """Send a request to some clients; return what `taken` keeps of each reply, by client."""
        answers: dict[str, Any] = {}

        def take(mean: WeightedMean, reply: ClientReply) -> None:
            kept = self.taken(phase, reply)
            mean.take(reply.client_id, {}, reply.metrics(), self.weight_key or self.weighted_by_key)
            answers[reply.client_id] = kept

        told = Instruction(
            fields=fields,
            own=own or {},
            accumulator=partial(WeightedMean, {}),
            take=take,
            large=True,
        )
        self.ask(grid, server_round, phase, content, assigned, told, quorum=quorum)
        return answers

    def _assigned(self, grid: Grid, server_round: int, phase: str) -> Assigned:
        """Return the connected members by node, after they have answered earlier requests."""
        self.messenger.settle(grid)
        others = set(self.federation.clients()).difference(self.members)
        return self.messenger.sample(
            grid, server_round, phase, fraction=1.0, minimum=0, without=others
        )

    def _rows(self, part: str) -> int:
        for told in self._enrolled.values():
            if part in told.rows:
                return told.rows[part]
        raise ProtocolError(f"the clients have no rows '{part}'")

    def _common_order(self, part: str) -> NDArray[np.int64]:
        seed = derive_seed(self.experiment.id, "vertical rows", part)
        return order(self._rows(part), seed)

    def _order_of(self, client: str) -> int:
        if not isinstance(self.data.order, Mapping):
            return self.data.order
        if client not in self.data.order:
            allowed = f"an order for every client by its name, the text '{client}' among them"
            raise InvalidParameterError("order", self.data.order, allowed)
        return self.data.order[client]
