"""A server that tells M2FDP's devices and aggregators different things, or asks for less noise."""

from pathlib import Path
from typing import Any

import pytest
from hostile_relay import CLEAN, DEEP, NEW_ROUND, PLAIN, ZONE, Refused, Server, attack, refuses

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


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
            "was asked for another noise, grid or unit",
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
            "was asked for another noise, grid or unit|other noise",
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
        sealed = server.sealed("012", round=NEW_ROUND + 1)
        with pytest.raises(Refused, match=r"asks for sigma .* the node's policy has min_sigma"):
            server.average("t1-0", sealed, round=NEW_ROUND + 1)

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
        text = "was asked for another noise, grid or unit"
        for change in ({"noise_multiplier": 0.25}, {"grid": -20}, {"unit": "record"}):
            other = {"start_sealed": start, **change}
            refuses(text, lambda other=other: server.ask("t2-0", "deliver", **other))

    clean = {"steps": 4, "events": {1: [2]}, "clean_events": "worst"}
    attack(DEEP, tmp_path, work, **clean)


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
