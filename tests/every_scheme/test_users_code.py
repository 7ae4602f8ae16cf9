"""What every scheme must pass on a node, baselines included: `every_scheme.CASES` is the table.

A policy binds it; no code of a user's gets data past the charge, or past a refusal of one text; a
kill leaves no answer without a charge; processes that are asked at once are charged alike.
"""

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_scheme import (
    CASES,
    CHARGED,
    REMEMBERED,
    UNCHARGED,
    Case,
    Node,
    Said,
    batches,
    columns,
    evaluation,
    fit,
    join_any_sum,
    losses,
    nothing,
    plain,
    squared,
    steps,
    tables,
)
from flwr.app import Error, Message, RecordDict

from flwr_privacy.clients import FedVSClient, VerticalData
from flwr_privacy.clients.node.rehearsal import rehearsing
from flwr_privacy.errors import (
    ChargedFailureError,
    DataError,
    DeclinedError,
    InvalidParameterError,
    LedgerError,
    ProtocolError,
)
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.wire.message import DECLINED_CODE, ERROR_CODE, FAILED_CODE

SECRET = "J. Smith, 4711"


@pytest.fixture(autouse=True)
def any_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    join_any_sum(monkeypatch)


# -- A policy binds it -----------------------------------------------------------------------------

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


# -- Whatever the user's code does -----------------------------------------------------------------


def raising(error: BaseException) -> Callable[..., Any]:
    def work(*given: Any) -> Any:
        raise error

    return work


def giving(*arrays: Any) -> Callable[..., Any]:
    return lambda parameters: (list(arrays), 3, {"loss": 0.5})


ERRORS: dict[str, Callable[..., Any]] = {
    kind.__name__: raising(kind(SECRET))
    for kind in (ValueError, MemoryError, DataError, ProtocolError, DeclinedError, LedgerError)
}
ERRORS |= {
    "InvalidParameterError": raising(InvalidParameterError("records", SECRET, SECRET)),
    "ChargedFailureError": raising(ChargedFailureError(SECRET)),
    "KeyError": raising(KeyError(4711)),
    "StopIteration": raising(StopIteration(SECRET)),
    "nothing": lambda *given: None,
    "text": lambda *given: SECRET,
}

NAN, INFINITE = (np.full((1, 4), value, np.float32) for value in (np.nan, np.inf))
UNFIT: dict[str, Callable[..., Any]] = {
    **{f"returns {n}": giving(np.zeros(n, np.float32)) for n in (0, 4, 4711)},
    "a number": giving(np.float32(4711)),
    "integers": giving(np.full((1, 4), 4711)),
    "complex": giving(np.full((1, 4), 4711j)),
    "words": giving(np.array([[SECRET] * 4])),
    "objects": giving(np.array([[None] * 4])),
    "no arrays": giving(),
    "two arrays": giving(NAN, NAN),
    "NaN": giving(NAN),
    "infinite": giving(INFINITE),
}


def around(work: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a training that returns something else than its trainer made."""
    return lambda parameters: change(work(parameters))


def failing_steps(work: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        **ERRORS,
        **({} if work is losses else UNFIT),
        "another model": lambda parameters: work([parameters[0] + 1]),
        "no trainer": fit,
        "twice": lambda parameters: work(parameters) and work(parameters),
        "raises after it": lambda parameters: work(parameters) and raising(ValueError(SECRET))(),
    }


def moved(made: Any) -> Any:
    return [made[0][0] + 1], *made[1:]


def filled(value: float, records: int = 12) -> Callable[[], Any]:
    return lambda: (np.full((records, 3), value), np.full((records, 2), value))


class Broken:
    """Something like an array, which cannot be read."""

    def __array__(self, *given: Any, **named: Any) -> Any:
        raise OSError(SECRET)


FAILING: dict[Callable[..., Any], dict[str, Callable[..., Any]]] = {
    fit: {**ERRORS, **UNFIT},
    evaluation: {
        **ERRORS,
        "not a number": lambda parameters: ("4711 records", 3, {}),
        "a list": lambda parameters: ([4711.0, 1.0], 3, {}),
        "a pair": lambda parameters: (0.5, 3),
    },
    steps: {**failing_steps(steps), "other arrays": around(steps, moved)},
    batches: {**failing_steps(batches), "other arrays": around(batches, moved)},
    losses: failing_steps(losses),
    tables: {
        **ERRORS,
        "NaN": filled(np.nan),
        "beyond its bound": filled(4711.0),
        "three tables": lambda: (*tables(), None),
        "unreadable": lambda: (Broken(), tables()[1]),
    },
    columns: {
        **ERRORS,
        "NaN": lambda: VerticalData(train=filled(np.nan)()[0]),
        "a table": lambda: tables()[0],
        "unreadable": lambda: VerticalData(train=Broken()),  # type: ignore[arg-type]
    },
}
"""Code that fails as the user's, by what it is to be."""


def still(output: Any, labels: Any) -> Any:
    return 0 * output.sum()


IDLE: dict[Callable[..., Any], Callable[..., Any]] = {
    fit: lambda parameters: (parameters, 3, {}),
    evaluation: lambda parameters: (4.0, 3, {}),
    steps: partial(steps, loss=still),
    batches: partial(batches, loss=still),
    tables: filled(0.0),
}
"""Code with which the answer says nothing but its noise."""


def lossy(output: Any, labels: Any) -> Any:
    raise ValueError(SECRET)


def no_number(output: Any, labels: Any) -> Any:
    """Return a loss that is no number for one of the records."""
    return squared(output, labels) * torch.where(labels != 0, torch.nan, 1.0).sum()


def twisted(parameters: list[Any]) -> Any:
    """Train in place, and give back the very arrays that came."""
    for array in parameters:
        array += 4711
    return parameters, 3, {}


RECORDS = np.array([[np.nan] * 4, [3e38] * 4, [np.inf] * 4, [1e-45] * 4, [1.0] * 4], np.float32)
ODD: dict[Callable[..., Any], dict[str, Callable[..., Any]]] = {
    fit: {
        "huge": giving(np.full((1, 4), 3e38, np.float32)),
        "huge doubles": giving(np.full((1, 4), -1e308)),
        "tiny": giving(np.full((1, 4), 1e-45, np.float32)),
        "half precision": giving(np.ones((1, 4), np.float16)),
        "of another order": giving(np.ones((4, 1), np.float32).T),
        "in place": twisted,
        "its metrics are text": lambda parameters: (parameters, SECRET, {"loss": SECRET}),
        "a million records": lambda parameters: (parameters, 10**30, {"loss": [1.0]}),
    },
    evaluation: {
        **{f"loss {x}": (lambda _, x=x: (x, 3, {})) for x in (np.nan, np.inf, -np.inf, 1e300)},
        "its metrics are text": lambda _: (0.5, SECRET, {"accuracy": SECRET}),
    },
    **{
        work: {
            "the loss is no number for a record": partial(work, loss=no_number),
            **({} if work is steps else {"the loss raises": partial(work, loss=lossy)}),
            "records of any size": partial(work, features=RECORDS),
        }
        for work in (steps, batches, losses)
    },
    tables: {"at its bound": filled(1.0), "short": filled(0.5, 1), "tiny": filled(1e-300)},
    columns: {
        "beyond its bound": lambda: VerticalData(train=filled(4711.0)()[0]),
        "fewer rows": lambda: VerticalData(train=filled(0.5, 2)()[0]),
        "fewer columns": lambda: VerticalData(train=filled(0.5)()[0][:, :2]),
        "other parts": lambda: VerticalData(train=tables()[0], more=tables()[0]),
    },
}
"""Code that does what nobody expects, and may be answered."""


def planted(table: Any, names: list[str]) -> list[tuple[str, str]]:
    return [(name, what) for name in names for what in table.get(CASES[name].user, {})]


def user_matters(case: Case) -> bool:
    """Tell whether an answer runs a user's code on data of somebody's."""
    return case.user is not nothing and not case.simulated


def close(node: Node, said: Said) -> None:
    """Check that nothing of a secret is in what left a node."""
    assert "Smith" not in repr(said)
    assert "4711" not in repr(said)
    assert not any(b"Smith" in reply or b"4711" in reply for reply in node.kept())


def assert_counted(said: Said, idle: Said, case: Case) -> None:
    """Check that an answer differs from one that changed nothing in the count alone."""
    counts = [dict(answer[1]).pop(FAILED_NAME, np.zeros(1, int)) for answer in (said, idle)]
    assert int(counts[0][0]) - int(counts[1][0]) == (2**-case.grid if FAILED_NAME in said[1] else 0)
    for answer in (said, idle):
        answer[1].pop(FAILED_NAME, None)
    assert plain(said) == plain(idle)


@pytest.mark.parametrize(("name", "what"), planted(FAILING, CHARGED))
def test_a_failure_is_charged_and_tells_nothing_but_that(
    name: str, what: str, tmp_path: Path
) -> None:
    case = CASES[name]
    node = Node(tmp_path / "node", case, FAILING[case.user][what], seed=7)
    said = node.ask()
    close(node, said)
    assert (node.charges(), node.unanswered()) == (1, case.failing != "zero")
    if case.failing == "zero":
        idle = Node(tmp_path / "idle", case, IDLE[case.user], seed=7)
        if "sealed" in said[2]:  # only the parent can read it
            assert len(said[2]["sealed"]) == len(idle.ask()[2]["sealed"])
        else:
            assert_counted(said, idle.ask(), case)
        return
    assert said == ("refused", FAILED_CODE, said[2])
    assert said[2].startswith("charged, and there is no answer: this node answers nothing more")
    ran = node.ran
    again = node.ask(header={"request": 1})
    assert again[:2] == ("refused", DECLINED_CODE)
    assert (node.charges(), node.ran, node.kept()) == (1, ran, [])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that overflow
@pytest.mark.parametrize("name", [n for n in UNCHARGED if user_matters(CASES[n])])
def test_where_nobody_is_charged_all_failures_are_refused_alike(name: str, tmp_path: Path) -> None:
    """With FedAvg the server gets whatever the training returns, and only then."""
    case, refusals = CASES[name], {}
    for place, (what, user) in enumerate((FAILING[case.user] | ODD[case.user]).items()):
        node = Node(tmp_path / str(place), case, user)
        said = node.ask()
        if said[0] == "refused":
            close(node, said)
            refusals[what] = said
            assert (node.charges(), node.kept()) == (0, [])
        else:
            assert what not in ERRORS
    assert set(ERRORS) <= set(refusals)
    assert len(set(refusals.values())) == 1, refusals


def error_reply(message: Message) -> Message:
    return Message(Error(0, SECRET), reply_to=message)


def without_metrics(message: Message) -> Message:
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.user is fit])
def test_functions_that_answer_by_message_fail_as_a_numpy_client_does(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    failing = Node(tmp_path / "numpy", case, ERRORS["ValueError"], seed=7)
    said = failing.ask()
    for place, user in enumerate((ERRORS["ValueError"], error_reply, without_metrics)):
        node = Node(tmp_path / str(place), case, user, seed=7, by_message=True)
        by_message = node.ask()
        close(node, by_message)
        assert node.charges() == failing.charges() == case.charged
        if "sealed" not in said[2]:
            assert plain(by_message) == plain(said)


@pytest.mark.parametrize(("name", "what"), planted(ODD, CHARGED))
def test_what_nobody_expects_moves_an_answer_no_further_than_is_charged(
    name: str, what: str, tmp_path: Path
) -> None:
    case = CASES[name]
    node = Node(tmp_path / "node", case, ODD[case.user][what], seed=7)
    idle = Node(tmp_path / "idle", case, IDLE.get(case.user), seed=7)
    said, rest = node.ask(), idle.ask()
    assert (said[0], node.charges()) == ("answer", 1)
    close(node, said)
    (_, arrays, fields, metrics), (_, still_arrays, still_fields, still_metrics) = said, rest
    assert (arrays.keys(), fields.keys()) == (still_arrays.keys(), still_fields.keys())
    loss, still_loss = (of.pop("loss", 0.0) for of in (metrics, still_metrics))
    assert abs(loss - still_loss) <= 4.0
    assert metrics == still_metrics
    squares = 0.0
    for key, array in arrays.items():
        assert (array.dtype, array.shape) == (still_arrays[key].dtype, still_arrays[key].shape)
        assert np.issubdtype(array.dtype, np.integer)
        assert np.abs(array).max() <= CODE_LIMIT
        if key not in ("flwr-privacy.count", "flwr-privacy.records"):
            squares += float(((array - still_arrays[key].astype(float)) ** 2).sum())
    assert 2.0**case.grid * squares**0.5 <= case.reach


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 1e19, 1e8])
@pytest.mark.parametrize("name", [name for name in CHARGED if CASES[name].model])
def test_a_model_for_which_there_is_no_answer_is_refused_before_its_charge(
    name: str, value: float, tmp_path: Path
) -> None:
    case = CASES[name]
    model = {key: np.full_like(array, value) for key, array in case.model.items()}
    node = Node(tmp_path / "node", case)
    kind, *said = node.ask(model=model)
    assert node.charges() == (kind == "answer")
    assert kind == "answer" or said[0] == ERROR_CODE
    # A rehearsal tells how many records there are, which a record's noise follows from.
    assert kind == "answer" or node.ran <= (case.user is steps and np.isfinite(value))


class Exiting:
    """Code that ends its process, at once or in the training that a rehearsal is followed by."""

    def __init__(self, work: Callable[..., Any], *, again: bool) -> None:
        self.work, self.first = work, work in (steps, batches, losses) and not again

    def __call__(self, *given: Any) -> Any:
        if self.first:
            self.first = False
            return self.work(*given)
        sys.exit(SECRET)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].user is not nothing])
def test_code_that_ends_its_process_leaves_a_charge_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    charged = case.charged and case.user is not tables  # their number is looked at before
    for attempt in range(3):
        node = Node(tmp_path / "node", case, Exiting(case.user, again=attempt > 0))
        if attempt and charged and case.once:
            assert node.ask()[:2] == ("refused", DECLINED_CODE)
        else:
            with pytest.raises(SystemExit):
                node.ask()
        assert (node.charges(), node.kept()) == (charged, [])
    node = Node(tmp_path / "node", case)
    assert node.ask()[0] == ("refused" if charged and case.once else "answer")
    assert node.charges() == case.charged


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


@pytest.fixture(scope="module")
def torch_is_there(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Train once: what torch loads for it takes each process seconds."""
    node = Node(tmp_path_factory.mktemp("warm") / "node", CASES["udp, records"])
    assert node.ask()[0] == "answer"


FORK = multiprocessing.get_context("fork")
STEPS = (
    *("answer", "plan", "_charged", "write_sealed", "close", "run"),
    *("measure", "noise", "keep", "superseded", "_answered"),
    *("answer_step", "opened", "embed", "deal", "embed_plainly", "seal", "keep_dealt"),
)
"""Functions of ours at whose entry a node is killed, the first time that they are entered."""


def watch(entered: Callable[[str], None]) -> None:
    """Call something with the name of each of `STEPS` that is entered, and of the user's code."""

    def profile(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        ours = frame.f_globals.get("__name__", "").startswith("flwr_privacy")
        if event == "call" and name in STEPS and ours:
            entered(frame.f_code.co_qualname)

    sys.setprofile(profile)


def steps_of(case: Case, folder: Path) -> list[str]:
    """Return through which steps an answer comes, in their order."""
    node, seen = Node(folder, case), list[str]()
    watch(seen.append)
    try:
        assert node.ask()[0] == "answer"
    finally:
        sys.setprofile(None)
    return list(dict.fromkeys(seen))


def settled(folder: Path, case: Case) -> Case:
    """Return a case whose question is a fixed one: what others send for it is no step of it."""
    node = Node(folder, case)
    fields, model = (of(node) if callable(of) else of for of in (case.fields, case.model))
    return replace(case, fields=fields, model=model)


def told(pipe: int, case: Case) -> Callable[..., Any]:
    """Return the user's code, which tells that it runs on data."""

    def user(*given: Any) -> Any:
        if not rehearsing():
            os.write(pipe, b"ran\n")
        return case.user(*given)

    return user


def killed(folder: Path, case: Case, step: str) -> list[bytes]:
    """Kill a node as it enters a step; return what it said by then: that it ran, its answer."""
    return _killed(folder, case, lambda name: name == step)


def killed_at(folder: Path, case: Case, place: int) -> list[bytes]:
    """Kill a node as it enters one more step than some; return what it said by then."""
    steps = iter(range(place + 1))
    return _killed(folder, case, lambda name: next(steps) == place)


def _killed(folder: Path, case: Case, dies: Callable[[str], bool]) -> list[bytes]:
    reader, pipe = os.pipe()
    child = os.fork()
    if not child:
        node = Node(folder, case, told(pipe, case))
        watch(lambda name: os._exit(0) if dies(name) else None)
        os.write(pipe, name_of(node.ask()) + b"\n")
        os._exit(0)
    os.close(pipe)
    with open(reader, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    return said.splitlines()


def name_of(said: Said) -> bytes:
    """Return a short name of what left a node."""
    return hashlib.sha256(repr(plain(said)).encode()).hexdigest().encode()


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


def race(folder: Path, case: Case, changes: list[dict[str, Any]]) -> list[tuple[str, bytes]]:
    """Ask a node in as many processes at once as there are changes of the question."""
    barrier, queue = FORK.Barrier(len(changes)), FORK.SimpleQueue()
    # Else the second comes no further than the charge, or than the lock of what is remembered.
    waits = not (case.once or case.remembers or case.user is nothing)

    def user(*given: Any) -> Any:
        if waits:
            barrier.wait(60)
        return case.user(*given)

    def asked(change: dict[str, Any]) -> None:
        node = Node(folder, case, user)
        if not waits:
            barrier.wait(60)
        said = node.ask(**change)
        queue.put((said[0], name_of(said)))

    processes = [FORK.Process(target=asked, args=(change,)) for change in changes]
    for process in processes:
        process.start()
    said = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return said


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
