"""Every scheme under kills, and in several processes: no answer without its charge."""

import sys
from pathlib import Path

import pytest
from every_scheme import CASES, CHARGED
from racing_nodes import killed_when, name_of, race, settled, watch
from scheme_node import Case, Node
from users_code import tables

from flwr_privacy.wire.message import DECLINED_CODE

# -- Kills -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_is_there(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Train once: what torch loads for it takes each process seconds."""
    node = Node(tmp_path_factory.mktemp("warm") / "node", CASES["udp, records"])
    assert node.ask()[0] == "answer"


def steps_of(case: Case, folder: Path) -> list[str]:
    """Return through which steps an answer comes, in their order."""
    node, seen = Node(folder, case), list[str]()
    watch(seen.append)
    try:
        assert node.ask()[0] == "answer"
    finally:
        sys.setprofile(None)
    return list(dict.fromkeys(seen))


def killed(folder: Path, case: Case, step: str) -> list[bytes]:
    """Kill a node as it enters a step; return what it said by then: that it ran, its answer."""
    return killed_when(folder, case, lambda name: name == step)


@pytest.mark.usefixtures("torch_is_there")
@pytest.mark.parametrize("name", CHARGED)
def test_a_kill_at_any_step_leaves_no_answer_without_its_charge(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    stages = [*steps_of(settled(tmp_path / "zone", case), tmp_path / "zone"), "the sending"]
    assert len(stages) > 6
    for place, step in enumerate(stages):
        folder = tmp_path / str(place)
        asked = settled(folder, case)
        told_of = killed(folder, asked, step)
        sent = [line for line in told_of if line != b"ran"]
        ran = b"ran" in told_of and case.user is not tables
        node = Node(folder, asked)
        charges = node.charges()
        assert charges >= max(len(node.kept()), ran, len(sent)), step
        # Whether it was sent nobody knows who was killed before; what was kept may still be sent.
        assert node.unanswered() == (0 if sent else charges), step
        answers = set(sent)
        for _ in range(2):
            said = Node(folder, asked).ask()
            if said[0] == "answer":
                answers.add(name_of(said))
            else:  # it may have been opened in a sum, or is given once
                assert Node(folder, asked).charges(), step
                assert case.once or case.single, step
                assert said[1] == DECLINED_CODE, step
            assert node.unanswered() == (0 if answers else node.charges()), step
        if case.kept:
            assert len(answers) <= node.charges() <= charges + 1, step
        assert node.charges() >= 1, step


# -- Several processes -----------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_is_there")
@pytest.mark.parametrize("name", CHARGED)
def test_processes_with_the_same_question_are_charged_once(name: str, tmp_path: Path) -> None:
    case = settled(tmp_path / "node", CASES[name])
    one, other = race(tmp_path / "node", case, [{}, {}])
    assert Node(tmp_path / "node", case).charges() == 1
    if case.once:
        assert {one[0], other[0]} == {"answer", "refused"}
    elif case.kept:
        assert one == other
    assert "answer" in (one[0], other[0])


@pytest.mark.usefixtures("torch_is_there")
@pytest.mark.parametrize("name", CHARGED)
def test_processes_with_different_questions_are_charged_for_each(name: str, tmp_path: Path) -> None:
    case = settled(tmp_path / "node", CASES[name])
    one, other = race(tmp_path / "node", case, [{}, dict(case.other)])
    answers = [one[0], other[0]].count("answer")
    assert answers == Node(tmp_path / "node", case).charges() == (1 if case.single else 2)
    assert one != other or not case.kept
