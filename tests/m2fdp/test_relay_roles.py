"""A server that changes the models, roles and trust of M2FDP's nodes."""

from pathlib import Path

import pytest
from hostile_relay import CLEAN, DAMAGED, PLAIN, ZONE, Fields, Refused, Server, attack, refuses

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


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
