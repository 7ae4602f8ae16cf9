"""A device of M2FDP, asked directly: what its operator allows, and who gets bare answers."""

from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from tier_device import NONE, OPEN, START, Fields, Node, simulated, terms

from flwr_privacy.clients import M2FDPClient
from flwr_privacy.errors import DeclinedError, InvalidParameterError
from flwr_privacy.wire.fields import write

# -- What the operator allows ---------------------------------------------------------------------


POLICIES: dict[str, tuple[Fields, Fields, str]] = {
    "noise": (
        {"min_noise_multiplier": 0.6},
        {},
        "asks for noise multiplier 0.5: the node's policy has min_noise_multiplier = 0.6",
    ),
    "sigma": ({"min_sigma": 0.51}, {}, "asks for sigma 0.5: the node's policy has min_sigma"),
    "scheme": ({"schemes": ["udp"]}, {}, "scheme 'm2fdp' asks for a release: the node's policy"),
    "unit": ({"units": ["record"]}, {}, "protects the unit 'user': the node's policy has units"),
    "epsilon": ({"max_epsilon": 1.0}, {}, "the node's policy has max_epsilon = 1 for all"),
    "sum": ({"min_summed": 3}, {}, "outside of a secure sum was asked for: .* min_summed = 3"),
    "noise in the open": (
        {"min_noise_multiplier": 0.6},
        OPEN,
        "asks for noise multiplier 0.5: the node's policy has min_noise_multiplier = 0.6",
    ),
    "epsilon in the open": ({"max_epsilon": 1.0}, OPEN, "the node's policy has max_epsilon = 1"),
    "no noise, an epsilon": ({"max_epsilon": 1e6}, NONE, "'m2fdp' has no budget"),
    "no noise, units": ({"units": ["user"]}, NONE, "'m2fdp' has no budget"),
    "no noise, a noise": ({"min_noise_multiplier": 0.1}, NONE, "asks for noise multiplier 0"),
    "no noise, a sigma": ({"min_sigma": 0.1}, NONE, "asks for sigma 0"),
    "lemma": (
        {"max_epsilon": 1e6},
        {**OPEN, "law": "lemma"},
        "'m2fdp' has no budget: the node's policy has max_epsilon or units",
    ),
}


@pytest.mark.parametrize("what", POLICIES)
def test_A24_what_the_operator_does_not_allow_is_declined_unseen(what: str, tmp_path: Path) -> None:
    policy, changes, text = POLICIES[what]
    node = simulated(tmp_path, policy)
    with pytest.raises(DeclinedError, match=text):
        node.ask(terms(**changes))
    assert node.entries() == []
    assert node.trainings == 0


def test_what_the_operator_allows_is_answered(tmp_path: Path) -> None:
    policy = {
        "min_noise_multiplier": 0.5,
        "min_sigma": 0.5,
        "schemes": ["m2fdp"],
        "units": ["user"],
        "max_epsilon": 16.0,
    }
    assert Node(tmp_path, policy).ask()[0]


def test_a_device_that_noises_itself_needs_no_law_of_drift(tmp_path: Path) -> None:
    """Nobody else's model is in what it releases, so its cost is proven."""
    node = Node(tmp_path, {"max_epsilon": 1e6})
    node.ask(terms(law="lemma"))
    assert [entry.scheme for entry in node.entries()] == ["m2fdp"]


# -- In the open ----------------------------------------------------------------------------------


BARE = "an answer without noise was asked for, and the scheme 'm2fdp' promises"


@pytest.mark.parametrize(
    "changes", [OPEN, NONE, {**NONE, "noised": True}, {**NONE, "sealed": True}]
)
@pytest.mark.parametrize("policy", [{}, {"trusted_parents": ["ward"]}])
def test_A24_a_node_that_simulates_nobody_sends_nothing_bare(
    changes: Fields, policy: Fields, tmp_path: Path
) -> None:
    node = Node(tmp_path, policy)
    with pytest.raises(DeclinedError, match=BARE):
        node.ask(terms(**{**changes, "siblings": ["a", "b"]}))
    assert (node.entries(), node.trainings) == ([], 0)


@pytest.mark.parametrize("asked", [OPEN, NONE])
@pytest.mark.parametrize(
    "config", [{"privacy-simulated": True}, {"privacy-allow-unprotected": "udp, m2fdp"}]
)
def test_the_node_says_who_gets_answers_without_noise(
    config: Fields, asked: Fields, tmp_path: Path
) -> None:
    assert Node(tmp_path, **config).ask(terms(**asked))[0]


def test_a_node_that_plays_any_client_gives_its_own_no_leave(tmp_path: Path) -> None:
    node = Node(tmp_path, cohorts=True)
    del node.config["client-id"]
    node.config["partition-id"] = 0
    with pytest.raises(DeclinedError, match=BARE):
        node.ask(terms(**OPEN))


@pytest.mark.parametrize(
    "key",
    ["privacy-simulated", "privacy_simulated", "m2fdp-role", "privacy-policy", "insecure-seed"],
)
def test_a_message_cannot_say_what_is_the_nodes(key: str, tmp_path: Path) -> None:
    node = Node(tmp_path)
    context = Context(1, 1, node.config, RecordDict(), {key: "true"})
    place = {"experiment-id": "e", "round": 1, "request": 0}
    fields = {**write(terms(**OPEN)), **place, key: True}
    with pytest.raises(InvalidParameterError, match=r"^message = .*: expected no keys of the node"):
        M2FDPClient(None, Context(1, 1, node.config, RecordDict(), {})).handle(
            "train", START, fields, node.train
        )
    del fields[key]
    with pytest.raises(InvalidParameterError, match=r"^run-config = .*: expected no keys of the"):
        M2FDPClient(None, context).handle("train", START, fields, node.train)
