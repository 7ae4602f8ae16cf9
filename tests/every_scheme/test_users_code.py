"""Whatever the user's code does, a server of any scheme learns no more than is charged."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_scheme import CASES, CHARGED, UNCHARGED
from flwr.app import Error, Message, RecordDict
from scheme_node import Case, Node, Said, plain
from users_code import (
    batches,
    columns,
    evaluation,
    fit,
    losses,
    nothing,
    private_steps,
    squared,
    steps,
    tables,
)

from flwr_privacy.clients import VerticalData
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
    private_steps: {**failing_steps(private_steps), "other arrays": around(private_steps, moved)},
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


def barely(output: Any, labels: Any) -> Any:
    """Return a loss whose gradients are less than a step of any grid, and not zero."""
    return 1e-20 * output.mean()


IDLE: dict[Callable[..., Any], Callable[..., Any]] = {
    fit: lambda parameters: (parameters, 3, {}),
    evaluation: lambda parameters: (4.0, 3, {}),
    steps: partial(steps, loss=still),
    batches: partial(batches, loss=still),
    private_steps: partial(private_steps, loss=barely),
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
    private_steps: {"records of any size": partial(private_steps, features=RECORDS)},
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


def test_a_loss_without_a_number_is_found_before_private_steps_are_charged(tmp_path: Path) -> None:
    user = partial(private_steps, loss=no_number)
    node = Node(tmp_path / "node", CASES["udp, private steps"], user)
    said = node.ask()
    close(node, said)
    assert said[0] == "refused"
    assert (node.charges(), node.kept()) == (0, [])


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
    assert kind == "answer" or node.ran <= (
        case.user in (steps, private_steps) and np.isfinite(value)
    )


class Exiting:
    """Code that ends its process, at once or in the training that a rehearsal is followed by."""

    def __init__(self, work: Callable[..., Any], *, again: bool) -> None:
        self.work, self.first = work, work in (steps, batches, losses, private_steps) and not again

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
