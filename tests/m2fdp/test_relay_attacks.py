"""A server that does not follow the protocol, between nodes that do.

It has every question and answer of a round of an honest training. Then it asks the same nodes in a
round of its own, with fields of its own, or changes what it passes on. It names budgets, so that
nothing here is refused for lack of one. What counts: nothing leaves a trusted zone without noise,
and every noised release of a device's data is one that the device has paid for.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, model_of, run_strategy
from flwr.app import ConfigRecord, Message, RecordDict
from zones import zone_nodes

from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.strategies import M2FDP
from flwr_privacy.wire.channel import Channel, KeyPair
from flwr_privacy.wire.documents import dumps
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

_NEW = 2  # the round that the server makes up
_RICH = 1e6


@pytest.fixture(autouse=True)
def _no_pause_before_nodes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_privacy.strategies.requests.federation._SETTLE", 0.0)


@pytest.fixture(autouse=True)
def _one_accountant_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last card of a run states epsilon by every accountant, which takes seconds."""
    card = M2FDP.card
    monkeypatch.setattr(M2FDP, "card", lambda self, *, final=False: card(self))


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
        push = grid.push_messages

        def push_messages(messages: Iterable[Message]) -> Any:
            messages = list(messages)
            if not self.alone:
                self.questions += [(self.name(message), message) for message in messages]
            return push(messages)

        grid.push_messages = push_messages

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
        fields = {**asked.content[RECORD], "round": _NEW, "epsilon": _RICH}
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
        return [entry for entry in ledger.entries() if entry.question.server_round == _NEW]

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


# -- What a server may do ------------------------------------------------------------------------


def test_what_is_asked_as_it_should_be_is_answered(tmp_path: Path) -> None:
    """Or the refusals below would say nothing."""

    def work(server: Server) -> None:
        said = server.average("t1-0", server.sealed("012"))
        assert said["arrays"]["codes"].dtype == np.int32
        assert said["sigma"] > 0
        for name in ("0", "1", "2", "t1-0"):
            assert len(server.entries(name)) == 1

    attack(ZONE, tmp_path, work, **PLAIN)


def test_a_deep_zone_is_answered_after_a_clean_event(tmp_path: Path) -> None:
    attack(DEEP, tmp_path, lambda server: _after_a_clean_event(server) and None, **DEEP_CLEAN)


def _after_a_clean_event(server: Server, **changes: Any) -> float:
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


# -- Forged, replayed and swapped answers ---------------------------------------------------------

DAMAGED = "damaged, or sealed for another purpose: a message from '{}' to '{}'"


@pytest.mark.parametrize("place", [0, 20, -40, -1])
def test_an_answer_with_a_bit_turned_is_refused(place: int, tmp_path: Path) -> None:
    def work(server: Server) -> None:
        first, *others = server.sealed("012")
        bent = bytearray(first)
        bent[place] ^= 1
        refuses(DAMAGED.format("0", "t1-0"), lambda: server.average("t1-0", [bytes(bent), *others]))
        assert server.entries("t1-0") == []

    attack(ZONE, tmp_path, work, **PLAIN)


@pytest.mark.parametrize("forged", [b"", b"short", bytes(200)])
def test_bytes_that_nobody_sealed_are_refused(forged: bytes, tmp_path: Path) -> None:
    def work(server: Server) -> None:
        sealed = [forged, *server.sealed("12")]
        refuses(DAMAGED.format("0", "t1-0"), lambda: server.average("t1-0", sealed))

    attack(ZONE, tmp_path, work, **PLAIN)


def test_an_answer_that_the_server_sealed_itself_is_refused(tmp_path: Path) -> None:
    """With its own key under a child's name: believed is the key that the child has signed."""

    def work(server: Server) -> None:
        mine = server.fields("0", "train")
        channel = Channel(
            server.pair, mine["parent-key"], me="0", peer="t1-0", context=("m2fdp", 1, "e")
        )
        sealed = [channel.seal(dumps({"codes": np.zeros(11, np.int64)})), *server.sealed("12")]
        refuses(DAMAGED.format("0", "t1-0"), lambda: server.average("t1-0", sealed))
        duty = server.fields("t1-0", "aggregate")
        keys = [server.pair.public, *duty["keys"][1:]]
        text = "the signature of client '0' does not fit its pinned key"
        refuses(text, lambda: server.average("t1-0", sealed, keys=keys))
        signatures = [server.signed("0"), *duty["signatures"][1:]]
        refuses(text, lambda: server.average("t1-0", sealed, keys=keys, signatures=signatures))
        assert server.entries("t1-0") == []

    attack(ZONE, tmp_path, work, **PLAIN)


def test_a_child_that_the_server_invented_is_refused(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        duty = server.fields("t1-0", "aggregate")
        sealed = server.sealed("012")
        names = {k: [*duty[k], "9"] for k in ("children", "senders", "members")}
        keys = [*duty["keys"], server.pair.public]
        signatures = [*duty["signatures"], server.signed("9")]
        more = {**names, "keys": keys, "signatures": signatures}
        text = "client '9' is not pinned"
        refuses(text, lambda: server.average("t1-0", [*sealed, sealed[0]], **more))
        # One that is real, but not this node's child.
        names = {k: [*duty[k], "3"] for k in ("children", "senders", "members")}
        other = server.fields("3", "train")
        assert "parent-key" not in other  # its parent is not trusted
        text = "client '3' is not pinned"
        refuses(text, lambda: server.average("t1-0", [*sealed, sealed[0]], **{**more, **names}))

    attack(ZONE, tmp_path, work, **PLAIN)


def test_an_answer_for_another_subtree_is_refused(tmp_path: Path) -> None:
    """A trusted node gets the answers of another one's children, as theirs or as its own's."""

    def work(server: Server) -> None:
        others = server.sealed("23")
        refuses(DAMAGED.format("0", "t1-0"), lambda: server.average("t1-0", others))
        duty = server.fields("t1-1", "aggregate")
        names = ("children", "senders", "members", "keys", "signatures")
        theirs = {name: duty[name] for name in names}
        text = "client '2' is not pinned"
        refuses(text, lambda: server.average("t1-0", others, **theirs))

    attack(ZONES, tmp_path, work, **PLAIN)


def test_an_answer_of_another_round_is_refused(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        old = list(server.fields("t1-0", "aggregate")["sealed"])
        new = server.sealed("012")
        text = DAMAGED.format("0", "t1-0")
        refuses(text, lambda: server.average("t1-0", old))
        refuses(text, lambda: server.average("t1-0", [old[0], *new[1:]]))
        server.average("t1-0", new)

    attack(ZONE, tmp_path, work, **PLAIN)


@pytest.mark.parametrize(("sealed_for", "used_for"), [(0, 1), (1, 0)])
def test_an_answer_of_another_event_is_refused(
    sealed_for: int, used_for: int, tmp_path: Path
) -> None:
    def work(server: Server) -> None:
        sealed = server.sealed("012", event=sealed_for)
        text = DAMAGED.format("0", "t1-0")
        refuses(text, lambda: server.average("t1-0", sealed, event=used_for))

    attack(ZONE, tmp_path, work, **CLEAN)


def test_answers_of_two_children_in_each_others_place_are_refused(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        first, second, third = server.sealed("012")
        text = DAMAGED.format("0", "t1-0")
        refuses(text, lambda: server.average("t1-0", [second, first, third]))
        swapped = server.fewer(server.fields("t1-0", "aggregate"), 3)
        swapped["senders"] = ["1", "0", "2"]
        del swapped["sealed"]
        refuses(
            "message from '1'|key of '1'|client '1'",
            lambda: server.average("t1-0", [first, second, third], **swapped),
        )

    attack(ZONE, tmp_path, work, **PLAIN)


def test_an_answer_counts_once(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        first, second, _ = server.sealed("012")
        duty = server.fields("t1-0", "aggregate")
        twice = {
            "senders": ["0", "1", "0"],
            "members": ["0", "1", "0"],
            "keys": [*duty["keys"][:2], duty["keys"][0]],
            "signatures": [*duty["signatures"][:2], duty["signatures"][0]],
        }
        refuses(
            "senders = .*: expected one name for each answer",
            lambda: server.average("t1-0", [first, second, first], **twice),
        )
        refuses(
            "senders = .*: expected one name for each answer",
            lambda: server.average("t1-0", [first, second]),
        )

    attack(ZONE, tmp_path, work, **PLAIN)


@pytest.mark.parametrize("told", ["device", "aggregator"])
def test_all_of_a_zone_know_who_was_asked(told: str, tmp_path: Path) -> None:
    """Or some could be left out of the set of children without the others' knowing."""

    def work(server: Server) -> None:
        text = DAMAGED.format("0", "t1-0")
        if told == "device":
            sealed = server.sealed("01", siblings=["0", "1"])
            fields = server.fewer(server.fields("t1-0", "aggregate"), 2)
            del fields["sealed"]
            refuses(text, lambda: server.average("t1-0", sealed, **fields))
            return
        sealed = server.sealed("01")
        fields = server.fewer(server.fields("t1-0", "aggregate"), 2)
        del fields["sealed"]
        refuses(text, lambda: server.average("t1-0", sealed, children=["0", "1"], **fields))

    attack(ZONE, tmp_path, work, **PLAIN)


def test_a_device_that_is_not_among_those_asked_seals_nothing(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        text = "does not name this device among the children asked"
        refuses(text, lambda: server.sealed("0", siblings=["1", "2"]))
        assert server.entries("0") == []

    attack(ZONE, tmp_path, work, **PLAIN)


# -- What device and aggregator must have been told alike -----------------------------------------

TOLD: dict[str, Any] = {
    "noise_multiplier": 0.25,
    "grid": -20,
    "law": "lemma",
    "growth": 1.5,
    "keep_back": ["0"],
    "unit": "record",
}


@pytest.mark.parametrize("name", TOLD)
def test_an_aggregator_that_was_told_otherwise_than_its_devices_refuses(
    name: str, tmp_path: Path
) -> None:
    def work(server: Server) -> None:
        sealed = server.sealed("012")
        refuses(
            "a member of the zone was asked for another noise, grid or unit",
            lambda: server.average("t1-0", sealed, **{name: TOLD[name]}),
        )
        assert server.entries("t1-0") == []

    attack(ZONE, tmp_path, work, **PLAIN)


@pytest.mark.parametrize("name", ["noise_multiplier", "grid"])
def test_so_does_a_device_that_was_told_otherwise_than_its_zone_before(
    name: str, tmp_path: Path
) -> None:
    def work(server: Server) -> None:
        down = server.average("t1-0", server.sealed("012", event=0), event=0)["sealed"]
        start = {"start_sealed": down[0], "start_event": 0}
        server.ask("0", "train", 1, **start)
        refuses(
            "a member of the zone was asked for another noise, grid or unit|other noise",
            lambda: server.ask("0", "train", 1, **start, **{name: TOLD[name]}),
        )

    attack(ZONE, tmp_path, work, **CLEAN)


def test_an_aggregator_without_noise_has_nothing_to_do(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        sealed = server.sealed("012")
        with pytest.raises(Refused):
            server.average("t1-0", sealed, noise_multiplier=0.0)
        assert server.entries("t1-0") == []

    attack(ZONE, tmp_path, work, **PLAIN)


def test_less_noise_than_the_operator_allows_is_declined_by_both(tmp_path: Path) -> None:
    floor = {"min_noise_multiplier": 0.5}

    def work(server: Server) -> None:
        text = "asks for noise multiplier 0.25: the node's policy has min_noise_multiplier = 0.5"
        refuses(text, lambda: server.sealed("0", noise_multiplier=0.25))
        sealed = server.sealed("12", noise_multiplier=0.25)
        fields = server.fewer(server.fields("t1-0", "aggregate"), 3)
        two = {key: value[1:] for key, value in fields.items() if key != "sealed"}
        refuses(text, lambda: server.average("t1-0", sealed, noise_multiplier=0.25, **two))
        assert server.entries("0") == server.entries("t1-0") == []

    attack(ZONE, tmp_path, work, policies={"0": floor, "t1-0": floor}, epsilon=2.0, **PLAIN)


def test_a_smaller_sigma_than_the_aggregators_operator_allows_is_declined(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        server.average("t1-0", server.sealed("012"))
        sigma = server.entries("t1-0")[0].charge.noise_multiplier * 2 * 1.0 / 3
        policy = server._config(server.question("t1-0", "aggregate").metadata.dst_node_id)
        Path(policy["privacy-policy"]).write_text(f"min_sigma = {sigma * 1.01}\n")
        sealed = server.sealed("012", round=_NEW + 1)
        with pytest.raises(Refused, match=r"asks for sigma .* the node's policy has min_sigma"):
            server.average("t1-0", sealed, round=_NEW + 1)

    attack(ZONE, tmp_path, work, **PLAIN)


def test_the_floor_of_an_inner_aggregator_binds_the_noise_above_it(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        policy = server._config(server.question("t2-0", "aggregate").metadata.dst_node_id)
        with Path(policy["privacy-policy"]).open("a") as file:
            file.write("\nmin_sigma = 1e6\n")
        lower = [
            server.average(node, server.sealed(devices))["sealed"]
            for node, devices in (("t2-0", "01"), ("t2-1", "23"))
        ]
        text = r"a member of the zone has min_sigma = 1e\+06"
        refuses(text, lambda: server.average("t1-0", lower))
        assert server.entries("t1-0") == []

    attack(DEEP, tmp_path, work, **PLAIN)


def test_a_model_is_passed_on_only_for_the_noise_that_the_parent_was_told(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        lower = [
            server.average(node, server.sealed(devices, event=0), event=0)["sealed"]
            for node, devices in (("t2-0", "01"), ("t2-1", "23"))
        ]
        start = server.average("t1-0", lower, event=0)["sealed"][0]
        server.ask("t2-0", "deliver", start_sealed=start)
        text = "a member of the zone was asked for another noise, grid or unit"
        for change in ({"noise_multiplier": 0.25}, {"grid": -20}, {"unit": "record"}):
            other = {"start_sealed": start, **change}
            refuses(text, lambda other=other: server.ask("t2-0", "deliver", **other))

    clean = {"steps": 4, "events": {1: [2]}, "clean_events": "worst"}
    attack(DEEP, tmp_path, work, **clean)


# -- The same data released twice -----------------------------------------------------------------


def test_the_same_question_has_the_same_answer_and_is_charged_once(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        sealed = server.sealed("012")
        one, other = (server.average("t1-0", sealed) for _ in range(2))
        np.testing.assert_array_equal(one["arrays"]["codes"], other["arrays"]["codes"])
        assert one["sigma"] == other["sigma"]
        assert len(server.entries("t1-0")) == 1

    attack(ZONE, tmp_path, work, **PLAIN)


@pytest.mark.parametrize("lost", ["nothing", "memory", "kept replies"])
@pytest.mark.parametrize("change", ["fewer", "anew"])
def test_a_zone_hands_out_one_average_per_period(change: str, lost: str, tmp_path: Path) -> None:
    """Two averages would give away the answer that only one of them has; it was paid for once."""

    def work(server: Server) -> None:
        sealed = server.sealed("012")
        first = server.average("t1-0", sealed)["arrays"]["codes"]
        if lost == "memory":
            server.restart("t1-0")
        if lost == "kept replies":
            shutil.rmtree(server.folder / "t1-0.replies", ignore_errors=True)
            shutil.rmtree(server.folder / "t1-0.setups", ignore_errors=True)
        changes: Fields = {}
        if change == "fewer":
            changes = server.fewer(server.fields("t1-0", "aggregate"), 2)
            del changes["sealed"]
            sealed = sealed[:2]
        else:
            sealed = server.sealed("012")
        if lost == "kept replies":
            refuses("the answer is lost", lambda: server.average("t1-0", sealed, **changes))
        else:
            again = server.average("t1-0", sealed, **changes)["arrays"]["codes"]
            np.testing.assert_array_equal(again, first)
        assert len(server.entries("t1-0")) == 1

    attack(ZONE, tmp_path, work, **PLAIN)


def test_an_earlier_round_is_not_averaged_again_after_a_restart(tmp_path: Path) -> None:
    """The kept replies of a round go when the next one is answered."""

    def work(server: Server) -> None:
        sealed = server.sealed("012")
        server.average("t1-0", sealed)
        later = server.sealed("012", round=_NEW + 1)
        server.average("t1-0", later, round=_NEW + 1)
        server.restart("t1-0")
        fewer = server.fewer(server.fields("t1-0", "aggregate"), 2)
        del fewer["sealed"]
        refuses("the answer is lost", lambda: server.average("t1-0", sealed[:2], **fewer))
        assert len(server.entries("t1-0")) == 1

    attack(ZONE, tmp_path, work, **PLAIN)


def _paid(server: Server, device: str, releases: int) -> None:
    assert len(server.entries(device)) >= releases


@pytest.mark.parametrize("order", ["noised first", "sealed first"])
def test_a_device_pays_for_an_answer_noised_and_for_one_sealed(order: str, tmp_path: Path) -> None:
    """Both are released: the one by itself, the other in its zone's average."""

    def work(server: Server) -> None:
        releases = 0

        def noised() -> None:
            server.ask("0", "train", noised=True, sealed=False)

        def zone() -> None:
            server.average("t1-0", server.sealed("012"))

        for release in (noised, zone) if order == "noised first" else (zone, noised):
            try:
                release()
            except Refused:
                continue
            releases += 1
        _paid(server, "0", releases)

    attack(ZONE, tmp_path, work, **PLAIN)


def test_a_device_pays_for_each_of_two_parents_that_it_trusts(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        releases = 0
        for parent in ("t1-0", "t1-1"):
            told = server.fields("0" if parent == "t1-0" else "2", "train")
            own = {
                "parent": parent,
                "siblings": ["0", *("1" if parent == "t1-0" else "23")],
                "parent_key": told["parent-key"],
                "parent_signature": told["parent-signature"],
            }
            try:
                server.sealed("0", **own)
            except Refused:
                continue
            releases += 1
        assert releases >= 1
        _paid(server, "0", releases)

    policies = {"0": {"trusted_parents": ["t1-0", "t1-1"]}}
    folder = tmp_path / "nodes"
    folder.mkdir()

    def pinned(server: Server) -> None:
        """Have device 0 pin both parents before it is asked."""
        pins = folder / "0.pins"
        own, other = pins.read_text(), (folder / "2.pins").read_text()
        pins.write_text(own + other.replace("[clients]", ""))
        work(server)

    attack(ZONES, folder, pinned, policies=policies, **PLAIN)


@pytest.mark.parametrize("order", ["up first", "noised first"])
def test_a_node_on_the_way_up_hands_out_nothing_that_goes_into_the_average_above(
    order: str, tmp_path: Path
) -> None:
    """Two noised averages with the same device in them, of which it has paid one."""

    def work(server: Server) -> None:
        left, right = server.sealed("01"), server.sealed("23")
        releases = 0

        def below() -> None:
            server.average("t2-0", left, way="noised")

        def top() -> None:
            both = [server.average("t2-0", left)["sealed"], server.average("t2-1", right)["sealed"]]
            server.average("t1-0", both)

        for release in (top, below) if order == "up first" else (below, top):
            try:
                release()
            except Refused:
                continue
            releases += 1
        assert releases >= 1
        _paid(server, "0", releases)

    attack(DEEP, tmp_path, work, **PLAIN)


def test_an_aggregator_at_another_tier_adds_no_less_noise(tmp_path: Path) -> None:
    """After a clean event all its devices have moved, which a lower tier would not count."""

    def work(server: Server) -> None:
        honest = _after_a_clean_event(server)
        for tier in (1, 3):
            try:
                assert _lied(server, tier) >= honest * (1 - 1e-9)
            except Refused:
                continue

    def _lied(server: Server, tier: int) -> float:
        lower = []
        for node, devices in (("t2-0", "01"), ("t2-1", "23")):
            new = {"round": _NEW + tier}
            first = server.sealed(devices, event=0, **new)
            down = server.average(node, first, event=0, **new)["sealed"]
            sealed = [
                server.ask(device, "train", 1, start_sealed=start, start_event=0, **new)["sealed"]
                for device, start in zip(devices, down, strict=True)
            ]
            said = server.average(node, sealed, event=1, own_tier=tier, **new)
            lower.append(said["sealed"])
        return float(server.average("t1-0", lower, event=1, round=_NEW + tier)["sigma"])

    attack(DEEP, tmp_path, work, **DEEP_CLEAN)


def test_a_device_at_another_tier_gets_no_less_noise(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        honest = float(server.average("t1-0", server.sealed("012"))["sigma"])
        for depth in (1, 3, 9):
            new = {"round": _NEW + depth}
            try:
                sealed = server.sealed("012", depth=depth, **new)
                said = server.average("t1-0", sealed, **new)
            except Refused:
                continue
            assert said["sigma"] >= honest * (1 - 1e-9)

    attack(ZONE, tmp_path, work, **PLAIN)


# -- Models that go down --------------------------------------------------------------------------


def test_a_start_that_is_not_a_devices_own_is_refused(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        down = server.average("t1-0", server.sealed("012", event=0), event=0)["sealed"]
        old = server.fields("0", "train", 1)["start-sealed"]
        text = DAMAGED.format("t1-0", "0")
        for start, event in ((down[1], 0), (old, 0), (down[0], 1), (b"", 0)):
            own = {"start_sealed": start, "start_event": event}
            refuses(text, lambda own=own: server.ask("0", "train", 1, **own))
        own = {"start_sealed": down[0], "without": "start-event"}
        refuses("does not say which event", lambda: server.ask("0", "train", 1, **own))
        server.ask("0", "train", 1, start_sealed=down[0], start_event=0)

    attack(ZONE, tmp_path, work, **CLEAN)


def test_a_start_of_another_period_is_refused(tmp_path: Path) -> None:
    """What the zone has come to since its last release is part of one release alone."""

    def work(server: Server) -> None:
        down = server.average("t1-0", server.sealed("012", event=0), event=0)["sealed"]
        own = {"start_sealed": down[0], "start_event": 0, "period": 1}
        refuses(
            "another noise, grid or unit|another purpose",
            lambda: server.ask("0", "train", 1, **own),
        )

    attack(ZONE, tmp_path, work, **CLEAN)


# -- Roles, trust and the open --------------------------------------------------------------------


def test_nobody_takes_anothers_role(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        duty = server.fields("t1-0", "aggregate")
        role = "phase 'aggregate' is not for this node: its configuration has m2fdp-role = 'device'"
        refuses(role, lambda: server.ask("0", "train", **{**_dashless(duty), "phase": "aggregate"}))
        terms = server.fields("0", "train")
        role = "phase 'train' is not for this node: its configuration has m2fdp-role = 'aggregator'"
        refuses(
            role, lambda: server.ask("t1-0", "aggregate", **{**_dashless(terms), "phase": "train"})
        )

    attack(ZONE, tmp_path, work, **PLAIN)


def _dashless(fields: Fields) -> Fields:
    return {
        key.replace("-", "_"): value
        for key, value in fields.items()
        if key not in ("client-id", "round", "epsilon")
    }


@pytest.mark.parametrize(
    "key", ["trusted_parents", "privacy-policy", "m2fdp-role", "privacy-simulated", "privacy-pins"]
)
def test_a_question_cannot_set_what_is_the_nodes(key: str, tmp_path: Path) -> None:
    def work(server: Server) -> None:
        if key == "trusted_parents":  # a field like any other, which nobody reads
            refuses(
                "the parent 't1-1' is not trusted",
                lambda: server.sealed("0", parent="t1-1", **{key: ["t1-1"]}),
            )
            return
        refuses("^message = ", lambda: server.sealed("0", **{key: "device"}))

    attack(ZONE, tmp_path, work, **PLAIN)


LIES: dict[str, Fields] = {
    "another trusted parent": {"parent": "t1-1"},
    "the cloud": {"parent": "cloud"},
    "itself": {"parent": "0"},
    "in the open": {"sealed": False},
    "in the open for another": {"sealed": False, "parent": "t1-1"},
    "without noise": {"noise_multiplier": 0.0},
    "without noise in the open": {"noise_multiplier": 0.0, "sealed": False},
    "without noise or clipping": {"noise_multiplier": 0.0, "clipping_norm": 0.0, "sealed": False},
}


@pytest.mark.parametrize("what", LIES)
def test_A24_a_device_never_sends_codes_without_noise_in_the_open(
    what: str, tmp_path: Path
) -> None:
    """Its operator has a list of trusted parents, whatever the server says."""

    def work(server: Server) -> None:
        try:
            said = server.ask("0", "train", **LIES[what])
        except Refused:
            return
        assert not said["arrays"]

    attack(ZONE, tmp_path, work, **PLAIN)


def test_A24_a_device_of_an_insecure_parent_seals_for_nobody(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        told = server.fields("0", "train")
        own = {
            "noised": False,
            "sealed": True,
            "siblings": ["3", "4", "5"],
            "parent_key": told["parent-key"],
            "parent_signature": told["parent-signature"],
        }
        for parent in ("t1-0", "t1-1"):
            text = rf"the parent '{parent}' is not trusted: .* trusted_parents = \[\]"
            refuses(text, lambda parent=parent: server.ask("3", "train", parent=parent, **own))
        text = "an answer without noise was asked for, and the scheme 'm2fdp' promises"
        refuses(text, lambda: server.ask("3", "train", noised=False))
        assert server.entries("3") == []

    attack(ZONE, tmp_path, work, **PLAIN)


def test_a_parent_whose_key_is_another_is_not_believed(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        text = "the signature of client 't1-0' does not fit its pinned key"
        own = {"parent_key": server.pair.public, "parent_signature": server.signed("t1-0")}
        refuses(text, lambda: server.sealed("0", **own))
        refuses("no public key of 't1-0'", lambda: server.sealed("0", parent_key="abc"))
        assert server.entries("0") == []

    attack(ZONE, tmp_path, work, **PLAIN)


@pytest.mark.parametrize("name", ["0", "t1-0"])
@pytest.mark.parametrize("law", ["lemma", "smooth"])
def test_a_node_with_a_largest_epsilon_takes_no_declared_drift(
    law: str, name: str, tmp_path: Path
) -> None:
    """What such a release costs is the server's word."""

    def work(server: Server) -> None:
        lie = {"law": law, "growth": 1.01}
        if name == "0":
            with pytest.raises(Refused):
                server.sealed("0", **lie)
        else:
            sealed = server.sealed("012", **lie)
            with pytest.raises(Refused):
                server.average("t1-0", sealed, **lie)
        assert server.entries(name) == []

    attack(ZONE, tmp_path, work, policies={name: {"max_epsilon": 1e9}}, **PLAIN)


# -- Few children ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "answers"), [(2, 1), (3, 2), (3, 1)])
def test_an_aggregator_averages_no_fewer_than_its_operator_allows(
    own: int, answers: int, tmp_path: Path
) -> None:
    def work(server: Server) -> None:
        fields = server.fewer(server.fields("t1-0", "aggregate"), answers)
        del fields["sealed"]
        sealed = server.sealed("012"[:answers])
        text = f"{answers} of 3 children answered: this node averages at least {own}"
        refuses(text, lambda: server.average("t1-0", sealed, min_children=1, **fields))
        assert server.entries("t1-0") == []

    attack(ZONE, tmp_path, work, policies={"t1-0": {"min_children": own}}, **PLAIN)


# -- What it may change on the way ----------------------------------------------------------------


def _meddle(change: Callable[[Message, str], Message | None]) -> Callable[[Any], None]:
    """Return a hook that changes every reply that a grid carries; None loses it."""

    def before(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(ids: Any) -> Any:
            for reply in pull(ids):
                fields = reply.content.get(RECORD, {}) if reply.has_content() else {}
                changed = change(reply, str(fields.get("phase", "")))
                if changed is not None:
                    yield changed

        grid.pull_messages = pull_messages

    return before


def _changed(reply: Message, **fields: Any) -> Message:
    record = ConfigRecord({**reply.content[RECORD], **fields})
    reply.content = RecordDict({**reply.content, RECORD: record})
    return reply


def meddled(tree: TierTree, folder: Path, change: Any, **options: Any) -> tuple[Any, M2FDP]:
    strategy = make(
        M2FDP,
        **{"tree": tree, "experiment_id": "e", "relay": True, "clipping_norm": 0.5, **options},
    )
    result = run_strategy(
        strategy,
        message_app([as_mod(M2FDPClient)]),
        nodes=zone_nodes(tree, folder),
        before=_meddle(change),
        num_rounds=1,
    )
    return result, strategy


def test_an_aggregator_does_not_answer_for_another_subtree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(reply: Message, phase: str) -> Message:
        return _changed(reply, **{"client-id": "t1-1"}) if phase == "aggregate" else reply

    result, _ = meddled(ZONES, tmp_path, change, **PLAIN)
    assert "unknown client" in caplog.text
    assert "'t1-1' does not sit there" in caplog.text
    assert result.history[1]["scheme"]["noise_sigma_t1"] > 0
    # Only the answer of t1-1 itself is used: one noise instead of the mean of two.
    scheme = result.history[1]["scheme"]
    assert scheme["noise_var"] == pytest.approx(scheme["noise_sigma_t1"] ** 2)


BENT: dict[str, Callable[[Message], Message]] = {
    "no sigma": lambda reply: _changed(reply, sigma="much"),
    "a negative sigma": lambda reply: _changed(reply, sigma=-1.0),
    "nan": lambda reply: _changed(reply, sigma=float("nan")),
}


@pytest.mark.parametrize("what", BENT)
def test_a_malformed_answer_of_an_aggregator_is_refused(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(reply: Message, phase: str) -> Message:
        return BENT[what](reply) if phase == "aggregate" else reply

    result, _ = meddled(ZONE, tmp_path, change, **PLAIN)
    assert "no standard deviation of the noise" in caplog.text
    assert "noise_sigma_t1" not in result.history[1]["scheme"]
    assert result.history[1]["scheme"]["noise_sigma_t2"] > 0
    assert not result.history[1]["skipped"]


def test_a_device_that_seals_nothing_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(reply: Message, phase: str) -> Message:
        mine = phase == "train" and "sealed" in reply.content[RECORD]
        return _changed(reply, sealed="open") if mine else reply

    result, _ = meddled(ZONE, tmp_path, change, **PLAIN)
    assert "nothing sealed for its parent" in caplog.text
    assert result.history[1]["refused"] == {"malformed": 3}


def test_one_message_per_child_comes_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(reply: Message, phase: str) -> Message:
        sealed = reply.content[RECORD].get("sealed") if phase == "aggregate" else None
        return _changed(reply, sealed=sealed[:-1]) if isinstance(sealed, list) else reply

    result, _ = meddled(ZONE, tmp_path, change, **CLEAN)
    assert "not one sealed message for each child" in caplog.text
    assert not result.history[1]["skipped"]
