"""A server that does not follow the protocol of M2FDP's relay, between nodes that do.

It has every question and answer of a round of an honest training. Then it asks the same nodes in a
round of its own, with fields of its own, or changes what it passes on. It names budgets, so that
nothing is refused for lack of one. What counts: nothing leaves a trusted zone without noise, and
every noised release of a device's data is one that the device has paid for.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apps import make, message_app, model_of, run_strategy
from flwr.app import ConfigRecord, Message, RecordDict
from grid_tap import tapped
from zones import zone_nodes

from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.strategies import M2FDP
from flwr_privacy.wire.channel import KeyPair
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import RECORD
from flwr_privacy.wire.pins import Identity

Fields = dict[str, Any]
ZONE = TierTree.of_fanouts((2, 3), p=0.5)  # t1-0 with 0, 1, 2 is trusted; t1-1 with 3, 4, 5 is not
ZONES = TierTree.of_fanouts((2, 2), p=1.0)  # t1-0 with 0 and 1, t1-1 with 2 and 3
DEEP = TierTree.of_fanouts((2, 2, 2), p=0.5)  # t1-0 over t2-0 (0, 1) and t2-1 (2, 3) is trusted
PLAIN = {"steps": 2}
CLEAN = {"steps": 4, "events": 2, "clean_events": "worst"}
DEEP_CLEAN = {"steps": 4, "events": {2: [2]}, "clean_events": "worst"}
NEW_ROUND = 2  # the round that the server makes up
RICH = 1e6


class Refused(Exception):
    """A node refused; the text says why."""


class Server:
    """All questions and answers of an honest round, and a server that asks on by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.grid: Any = None
        self.questions: list[tuple[str, Message]] = []
        self.alone = False  # whether what is asked is its own
        self.pair, self.identity = KeyPair(), Identity.generate()

    def __call__(self, grid: Any) -> None:
        self.grid = grid
        tapped(self._keep)(grid)

    def _keep(self, message: Message) -> None:
        if not self.alone:
            self.questions.append((self.name(message), message))

    def name(self, message: Message) -> str:
        return client_id_from(self._config(message.metadata.dst_node_id))

    def question(self, name: str, phase: str, event: int | None = None) -> Message:
        """Return the last question of a phase to a node, or that of an event."""
        for asked, message in reversed(self.questions):
            fields = message.content[RECORD]
            if (asked, fields["phase"]) == (name, phase) and event in (None, fields.get("event")):
                return message
        raise KeyError((name, phase, event))

    def fields(self, name: str, phase: str, event: int | None = None) -> Fields:
        return dict(self.question(name, phase, event).content[RECORD])

    def ask(
        self, name: str, phase: str, event: int | None = None, /, without: str = "", **changes: Any
    ) -> Fields:
        """Ask a node as it was asked before, in a new round and with some other fields."""
        asked = self.question(name, phase, event)
        fields = {**asked.content[RECORD], "round": NEW_ROUND, "epsilon": RICH}
        fields |= {key.replace("_", "-"): value for key, value in changes.items()}
        for key in without.split():
            fields.pop(key, None)
        content = RecordDict({**asked.content, RECORD: ConfigRecord(fields)})
        node = asked.metadata.dst_node_id
        message = Message(content, node, asked.metadata.message_type)
        (reply,) = self.grid.send_and_receive([message], timeout=5)
        if reply.has_error():
            raise Refused(str(reply.error.reason).strip().splitlines()[0])
        said = dict(reply.content[RECORD])
        said["arrays"] = model_of(reply.content["arrays"])
        return said

    def sealed(self, devices: str, event: int | None = None, **changes: Any) -> list[bytes]:
        """Ask devices of a zone in a new round; return what they sealed."""
        fresh = {"without": "start-sealed start-event", **changes}
        return [self.ask(device, "train", event, **fresh)["sealed"] for device in devices]

    def average(
        self, node: str, sealed: list[bytes], event: int | None = None, **changes: Any
    ) -> Fields:
        """Ask an aggregator in a new round."""
        return self.ask(node, "aggregate", event, sealed=sealed, **changes)

    def entries(self, name: str) -> list[Any]:
        """Return the ledger of a node in the new round."""
        ledger = Ledger(self.folder / f"{name}.ledger", data_set=name)
        return [entry for entry in ledger.entries() if entry.question.server_round == NEW_ROUND]

    def fewer(self, fields: Fields, kept: int) -> Fields:
        """Return the part of a duty that is about the first answers alone."""
        names = ("senders", "members", "keys", "signatures", "sealed")
        return {name: list(fields[name])[:kept] for name in names}

    def signed(self, name: str) -> bytes:
        """Return the server's own signature of its own key, as a node would sign."""
        experiment = self.fields("0", "train")["experiment-id"]
        return self.identity.sign("m2fdp key", experiment, name, self.pair.public)

    def restart(self, name: str) -> None:
        """Forget what a node keeps in memory, as if its process were a new one."""
        for context in self.grid._contexts.values():
            if client_id_from(context.node_config) == name:
                context.state = RecordDict()

    def _config(self, node: int) -> dict[str, Any]:
        return dict(self.grid._contexts[node].node_config)


def attack(
    tree: TierTree,
    folder: Path,
    work: Callable[[Server], None],
    *,
    policies: Any = None,
    **options: Any,
) -> None:
    """Train one honest round, then let the server do what it likes."""
    state = folder / "state"
    state.mkdir()
    server, done = Server(state), []

    def after(server_round: int, _: Any) -> None:
        if server_round == 1:
            server.alone = True
            work(server)
            done.append(server_round)

    strategy = make(
        M2FDP,
        **{"tree": tree, "experiment_id": "e", "relay": True, "clipping_norm": 0.5, **options},
    )
    run_strategy(
        strategy,
        message_app([as_mod(M2FDPClient)]),
        nodes=zone_nodes(tree, folder, policies=policies),
        before=server,
        evaluate_fn=after,
        num_rounds=1,
        state=state,
    )
    assert done


def refuses(text: str, work: Callable[[], object]) -> None:
    with pytest.raises(Refused, match=text):
        work()


def after_a_clean_event(server: Server, **changes: Any) -> float:
    """Ask a deep zone for a release after a clean event in its lower nodes; return its sigma."""
    lower = []
    for node, devices in (("t2-0", "01"), ("t2-1", "23")):
        down = server.average(node, server.sealed(devices, event=0), event=0)["sealed"]
        sealed = [
            server.ask(device, "train", 1, start_sealed=start, start_event=0)["sealed"]
            for device, start in zip(devices, down, strict=True)
        ]
        lower.append(server.average(node, sealed, event=1, **changes)["sealed"])
    return float(server.average("t1-0", lower, event=1)["sigma"])


DAMAGED = "damaged, or sealed for another purpose: a message from '{}' to '{}'"
