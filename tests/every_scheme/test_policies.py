"""A node's policy binds every scheme."""

from pathlib import Path
from typing import Any

import pytest
from every_scheme import CASES
from scheme_node import Node
from users_code import losses, steps

from flwr_privacy.wire.message import DECLINED_CODE

POLICIES: dict[str, dict[str, Any]] = {
    "another scheme": {"schemes": ["nobody"]},
    "no budget": {"max_epsilon": 0.0},
    "a larger sum": {"min_summed": 4},
    "more noise": {"min_noise_multiplier": 1e6},
    "a larger sigma": {"min_sigma": 1e6},
}
STEPS_OF_A_ZONE = ("up", "down", "deliver")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_a_nodes_policy_binds_it_before_data_are_read(
    name: str, policy: str, tmp_path: Path
) -> None:
    if (name, policy) == ("fedvs", "a larger sum"):
        return  # an enrolment is in no sum; the coding is refused
    if (name, policy) in {(f"m2fdp, {way}", "a larger sigma") for way in STEPS_OF_A_ZONE}:
        return  # how much noise there will be is not known yet: the release is refused
    node = Node(tmp_path / "node", CASES[name], policy=POLICIES[policy])
    kind, code, _ = node.ask()
    assert (kind, code) == ("refused", DECLINED_CODE)
    # The noise of a record follows from how many there are, which a rehearsal tells.
    rehearsed = policy == "a larger sigma" and CASES[name].user in (steps, losses)
    assert (node.ran, node.charges(), node.kept()) == (rehearsed, 0, [])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.unprotected])
def test_without_noise_nothing_leaves_unless_the_operator_allows_it(
    name: str, tmp_path: Path
) -> None:
    for policy in ({}, {"allow_unprotected": ["nobody"]}):
        node = Node(tmp_path / str(len(policy)), CASES[name], policy=policy)
        kind, code, reason = node.ask()
        assert (kind, code) == ("refused", DECLINED_CODE)
        assert "lists the scheme in allow_unprotected" in reason
        assert (node.ran, node.charges(), node.kept()) == (0, 0, [])


@pytest.mark.parametrize("name", CASES)
def test_otherwise_it_answers_and_is_charged(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    node = Node(tmp_path / "node", case)
    assert node.ask()[0] == "answer"
    assert (node.charges(), node.unanswered()) == (case.charged, 0)
