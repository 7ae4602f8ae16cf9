"""Whatever a server asks, every scheme answers, or refuses with a text of its own."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_scheme import CASES, REMEMBERED, UNCHARGED
from racing_nodes import killed_when, name_of, race, settled, watch
from scheme_node import Case, Node, plain

from flwr_privacy.clients import FedVSClient
from flwr_privacy.wire.message import DECLINED_CODE, ERROR_CODE

# -- Whatever a server says ------------------------------------------------------------------------


HOSTILE: list[Any] = [-1, 0, 2**62, 1e300, float("nan"), "", "x" * 99, b"", [], [-1], ["x"], True]
GARBAGE: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda array: np.full(array.shape, np.nan),
    "empty": lambda array: np.zeros((0, *array.shape[1:]), array.dtype),
    "a number": lambda array: np.zeros((), array.dtype),
    "longer": lambda array: np.concatenate([array, array]),
    "complex": lambda array: array.astype(np.complex128),
    "text": lambda array: np.array(["text"]),
}


def changed_questions(case: Case) -> list[dict[str, Any]]:
    """Return changes of a question, one at a time, none of which is what the client expects."""
    questions: list[dict[str, Any]] = [{key: value} for key in case.fields for value in HOSTILE]
    for name, array in dict(case.model).items():
        garbage = [change(np.asarray(array)) for change in GARBAGE.values()]
        questions += [{"model": {**case.model, name: array}} for array in garbage]
    return [*questions, {"model": {}}, {"model": {**case.model, "more": np.zeros(7)}}]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that overflow
@pytest.mark.parametrize("name", UNCHARGED)
def test_a_question_that_is_none_is_refused_with_a_text_of_ours(name: str, tmp_path: Path) -> None:
    """An error of Python's would carry what it met; the node goes on afterwards."""
    case = settled(tmp_path / "node", CASES[name])
    for changes in changed_questions(case):
        node = Node(tmp_path / "node", case)
        said = node.ask(**changes)
        assert said[0] == "answer" or said[1] in (ERROR_CODE, DECLINED_CODE), (changes, said)


# -- Steps of a protocol ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", REMEMBERED)
def test_a_step_is_taken_once(name: str, tmp_path: Path) -> None:
    case = settled(tmp_path / "node", CASES[name])
    node = Node(tmp_path / "node", case)
    first, again = node.ask(), node.ask()
    assert first[0] == "answer"
    assert again[0] == "refused" or plain(again) == plain(first)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].simulated])
def test_no_deployed_node_answers_what_is_for_simulations(name: str, tmp_path: Path) -> None:
    node = Node(tmp_path / "node", replace(CASES[name], simulated=False))
    assert node.ask()[:2] == ("refused", DECLINED_CODE)
    assert node.ran == 0


IN_FILES = [name for name in REMEMBERED if CASES[name].half is FedVSClient]
"""Cases whose step is remembered in files: the others are remembered by Flower, with the reply."""


@pytest.mark.parametrize("name", IN_FILES)
def test_a_kill_at_any_step_leaves_one_answer_to_a_question(name: str, tmp_path: Path) -> None:
    """A set of shares that was dealt anew under its name would be opened with the old one."""
    case, entered = settled(tmp_path / "zone", CASES[name]), list[str]()
    node = Node(tmp_path / "zone", case)
    watch(entered.append)
    try:
        assert node.ask()[0] == "answer"
    finally:
        sys.setprofile(None)
    assert len(entered) > 3
    for place in range(len(entered) + 1):
        asked = settled(tmp_path / str(place), CASES[name])
        sent = [said for said in killed_at(tmp_path / str(place), asked, place) if said != b"ran"]
        again = Node(tmp_path / str(place), asked).ask()
        assert again[0] == "answer", place
        assert {*sent, name_of(again)} == {name_of(again)}, place


@pytest.mark.parametrize("name", IN_FILES)
def test_processes_that_take_a_step_at_once_give_one_answer(name: str, tmp_path: Path) -> None:
    case = settled(tmp_path / "node", CASES[name])
    one, other = race(tmp_path / "node", case, [{}, {}])
    assert one == other
    assert one[0] == "answer"


@pytest.mark.parametrize("name", [n for n in IN_FILES if not CASES[n].simulated])
def test_processes_that_take_different_steps_at_once(name: str, tmp_path: Path) -> None:
    case = settled(tmp_path / "node", CASES[name])
    one, other = race(tmp_path / "node", case, [{}, dict(case.other)])
    assert one != other
    assert [one[0], other[0]].count("answer") == (1 if case.single else 2)


# -- Kills -----------------------------------------------------------------------------------------


def killed_at(folder: Path, case: Case, place: int) -> list[bytes]:
    """Kill a node as it enters one more step than some; return what it said by then."""
    steps = iter(range(place + 1))
    return killed_when(folder, case, lambda name: next(steps) == place)
