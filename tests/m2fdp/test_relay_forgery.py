"""A server between M2FDP's nodes that forges, replays and swaps answers."""

from pathlib import Path

import numpy as np
import pytest
from hostile_relay import (
    CLEAN,
    DAMAGED,
    DEEP,
    DEEP_CLEAN,
    PLAIN,
    ZONE,
    ZONES,
    Server,
    after_a_clean_event,
    attack,
    refuses,
)

from flwr_privacy.wire.channel import Channel
from flwr_privacy.wire.documents import dumps

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


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
    attack(DEEP, tmp_path, lambda server: after_a_clean_event(server) and None, **DEEP_CLEAN)


# -- Forged, replayed and swapped answers ---------------------------------------------------------


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


def test_garbage_of_a_pinned_child_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(server: Server) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("flwr_privacy.m2fdp.release.packed", lambda *_: b"garbage")
            sealed = server.sealed("0")
        sealed += server.sealed("12")
        text = "'0' sealed something else than an upload"
        refuses(text, lambda: server.average("t1-0", sealed))
        assert server.entries("t1-0") == []

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
            "senders = .*: expected a different name for each answer",
            lambda: server.average("t1-0", [first, second, first], **twice),
        )
        refuses(
            "senders = .*: expected a different name for each answer",
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
