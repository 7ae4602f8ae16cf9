"""A server that asks M2FDP's nodes to release the same data twice."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hostile_relay import (
    DEEP,
    DEEP_CLEAN,
    NEW_ROUND,
    PLAIN,
    ZONE,
    ZONES,
    Fields,
    Refused,
    Server,
    after_a_clean_event,
    attack,
    refuses,
)

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


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


def test_an_average_of_another_model_is_not_handed_out(tmp_path: Path) -> None:
    """A server that lost its last checkpoint asks the same period about another model."""

    def work(server: Server) -> None:
        server.average("t1-0", server.sealed("012"))
        anew = server.sealed("012")
        again = partial(server.average, "t1-0", anew, round_model=bytes(32))
        refuses("was answered before, with other terms", again)
        assert len(server.entries("t1-0")) == 1

    attack(ZONE, tmp_path, work, **PLAIN)


def test_an_earlier_round_is_not_averaged_again_after_a_restart(tmp_path: Path) -> None:
    """The kept replies of a round go when the next one is answered."""

    def work(server: Server) -> None:
        sealed = server.sealed("012")
        server.average("t1-0", sealed)
        later = server.sealed("012", round=NEW_ROUND + 1)
        server.average("t1-0", later, round=NEW_ROUND + 1)
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


def test_an_aggregator_with_two_trusted_parents_hands_its_average_to_neither(
    tmp_path: Path,
) -> None:
    """Each of them would add noise of its own, and its children pay for one release."""

    def work(server: Server) -> None:
        sealed = server.sealed("01")
        refuses("an aggregator has one at most", lambda: server.average("t2-0", sealed))

    policies = {"t2-0": {"trusted_parents": ["t1-0", "t2-1"]}}
    attack(DEEP, tmp_path, work, policies=policies, **PLAIN)


def test_an_aggregator_at_another_tier_adds_no_less_noise(tmp_path: Path) -> None:
    """After a clean event all its devices have moved, which a lower tier would not count."""

    def work(server: Server) -> None:
        honest = after_a_clean_event(server)
        for tier in (1, 3):
            try:
                assert _lied(server, tier) >= honest * (1 - 1e-9)
            except Refused:
                continue

    def _lied(server: Server, tier: int) -> float:
        lower = []
        for node, devices in (("t2-0", "01"), ("t2-1", "23")):
            new = {"round": NEW_ROUND + tier}
            first = server.sealed(devices, event=0, **new)
            down = server.average(node, first, event=0, **new)["sealed"]
            sealed = [
                server.ask(device, "train", 1, start_sealed=start, start_event=0, **new)["sealed"]
                for device, start in zip(devices, down, strict=True)
            ]
            said = server.average(node, sealed, event=1, own_tier=tier, **new)
            lower.append(said["sealed"])
        return float(server.average("t1-0", lower, event=1, round=NEW_ROUND + tier)["sigma"])

    attack(DEEP, tmp_path, work, **DEEP_CLEAN)


def test_a_device_at_another_tier_gets_no_less_noise(tmp_path: Path) -> None:
    def work(server: Server) -> None:
        honest = float(server.average("t1-0", server.sealed("012"))["sigma"])
        for depth in (1, 3, 9):
            new = {"round": NEW_ROUND + depth}
            try:
                sealed = server.sealed("012", depth=depth, **new)
                said = server.average("t1-0", sealed, **new)
            except Refused:
                continue
            assert said["sigma"] >= honest * (1 - 1e-9)

    attack(ZONE, tmp_path, work, **PLAIN)
