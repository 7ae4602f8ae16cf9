"""Rehearsals at user level: on generated records, before the first charge, without any data."""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_scheme import CASES
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from racing_nodes import settled
from scheme_node import MODEL, Case, Node, join_any_sum, plain
from users_code import fit

from flwr_privacy.clients import RecordLayout, UDPClient, as_mod, own_data
from flwr_privacy.clients.node.generated import trial
from flwr_privacy.clients.node.rehearsal import rehearsing, trying
from flwr_privacy.clients.torch import train, train_poisson
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.wire.message import DECLINED_CODE, ERROR_CODE

LAYOUT = RecordLayout(features=(4,), label_type="float32", count=5)
SECRET = "J. Smith, 4711"
NAMES = ["udp", "udp, shares", "central-dp", "m2fdp"]


@pytest.fixture(autouse=True)
def any_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    join_any_sum(monkeypatch)


def declared(name: str) -> Case:
    half = CASES[name].half
    return replace(CASES[name], half=type(half.__name__, (half,), {"records": LAYOUT}))


def but_the_count(said: Any) -> Any:
    """Return what left a node without the noised coordinate that counts failed trainings."""
    kind, arrays, *rest = said
    counted = {name for name in arrays if name == FAILED_NAME}
    assert counted
    return plain((kind, {n: a for n, a in arrays.items() if n not in counted}, *rest))


class User:
    """A training that reads its data through `own_data`, and what it has seen of them."""

    def __init__(self, work: Callable[[Any, Any], Any] = lambda w, features: w) -> None:
        self.work, self.loaded, self.seen = work, 0, list[str]()

    def load(self) -> Any:
        assert not rehearsing()
        self.loaded += 1
        return np.full((3, 4), 4711, np.float32), np.zeros(3, np.float32)

    def __call__(self, parameters: list[Any]) -> Any:
        features, labels = own_data(self.load)
        self.seen.append("generated" if trying() else "own")
        if trying():
            assert (features.shape, labels.dtype.name) == ((5, 4), "float32")
            assert not any(array.any() for array in parameters)
        return [self.work(parameters[0], features)], len(labels), {}


@pytest.mark.parametrize("name", NAMES)
def test_before_the_first_charge_a_training_is_tried_on_generated_records(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr.privacy")
    user = User()
    node = Node(tmp_path / "node", declared(name), user)
    ones = {key: np.ones_like(array) for key, array in MODEL.items()}
    for number in range(3):
        assert node.ask(model=ones, header={"server_round": number + 1})[0] == "answer"
    assert user.seen == ["generated", "own", "own", "own"]
    assert caplog.text.count("rehearsed on 5 generated records in ") == 1
    assert node.ask(model=ones, header={"experiment_id": "other"})[0] == "answer"
    assert user.seen[4:] == ["generated", "own"]


def test_a_device_that_seals_its_answer_rehearses_too(tmp_path: Path) -> None:
    case = settled(tmp_path / "node", CASES["m2fdp, sealed"])
    user, half = User(), type("Sealing", (case.half,), {"records": LAYOUT})
    node = Node(tmp_path / "node", replace(case, half=half), user)
    assert node.ask()[0] == "answer"
    assert user.seen == ["generated", "own"]


def bad_shape(w: Any, features: Any) -> Any:
    return w @ features[:, :3].T


def reads_a_label(w: Any, features: Any) -> Any:
    raise KeyError(SECRET)


@pytest.mark.parametrize("name", NAMES)
def test_one_that_fails_is_refused_for_nothing_and_its_node_says_why(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for place, work in enumerate((bad_shape, reads_a_label)):
        user = User(work)
        node = Node(tmp_path / str(place), declared(name), user)
        for attempt in range(2):
            said.append(node.ask(header={"request": attempt}))
        assert (node.charges(), node.kept(), user.loaded) == (0, [], 0)
    text = "the training fails on generated records; nothing was charged; the log of the node says"
    assert {(kind, code) for kind, code, _ in said} == {("refused", ERROR_CODE)}
    assert len(set(said)) == 1
    assert text in said[0][2]
    assert "Traceback" in caplog.text
    assert "in bad_shape" in caplog.text


def test_a_simulated_client_says_it_too(tmp_path: Path) -> None:
    node = Node(tmp_path / "node", declared("udp"), User(bad_shape))
    node.config["privacy-simulated"] = True
    assert "nothing was charged: the client's own training failed" in node.ask()[2]
    assert node.charges() == 0


def test_what_fails_on_data_alone_is_charged_and_says_nothing(tmp_path: Path) -> None:
    """A server that chooses models gets the refusals of generated records, whatever the data."""

    def on_data(w: Any, features: Any) -> Any:
        if (features == 4711).any():
            raise ValueError(SECRET)
        return w

    failing = Node(tmp_path / "failing", declared("udp"), User(on_data), seed=7)
    idle = Node(tmp_path / "idle", declared("udp"), User(), seed=7)
    said = failing.ask()
    assert but_the_count(said) == but_the_count(idle.ask())
    assert (failing.charges(), failing.unanswered()) == (1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_an_app_that_declares_nothing_is_not_called_and_its_node_says_so_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def user(parameters: list[Any]) -> Any:
        assert not rehearsing()
        assert node.charges() > 0
        return fit(parameters)

    node = Node(tmp_path / "node", CASES[name], user)
    for number in range(2):
        assert node.ask(header={"server_round": number + 1})[0] == "answer"
    assert node.ran == 2
    told = [text for text in caplog.messages if "is not rehearsed: the app declares no" in text]
    assert len(told) == 1
    assert "charged and counts as a training that changed nothing" in told[0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_training_with_data_of_its_own_in_reach_gets_no_refusal_for_nothing(
    fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says that it asks for its data and does not: what it fails on may be those it keeps."""

    def user(parameters: list[Any]) -> Any:
        if fails:
            raise ValueError(SECRET)
        return [*parameters], 3, {}

    node = Node(tmp_path / "node", declared("udp"), user, seed=7)
    idle = Node(tmp_path / "idle", declared("udp"), User(), seed=7)
    assert but_the_count(node.ask()) == but_the_count(idle.ask())
    assert (node.ran, node.charges()) == (2, 1)
    assert "is not rehearsed: it did not call own_data" in caplog.text


def test_what_is_declined_is_not_rehearsed(tmp_path: Path) -> None:
    user = User()
    node = Node(tmp_path / "node", declared("udp"), user, policy={"max_epsilon": 0.0})
    assert node.ask()[:2] == ("refused", DECLINED_CODE)
    assert user.seen == []


class Declared(UDPClient):
    records = LAYOUT


def test_the_apps_state_has_nothing_of_a_rehearsal_and_a_rehearsal_nothing_of_it(
    tmp_path: Path,
) -> None:
    """State of earlier experiments is made of data, and a rehearsal costs nothing."""
    node = Node(tmp_path / "node", declared("udp"), by_message=True)
    node.app = ClientApp(mods=[as_mod(Declared)])
    seen: list[tuple[bool, int]] = []

    @node.app.train()
    def work(message: Message, context: Context) -> Message:
        own_data(User().load)
        seen.append((trying(), len([key for key in context.state if key == "mine"])))
        context.state["mine"] = ConfigRecord({"secret": 4711})
        assert context.node_config == node.config
        metrics = MetricRecord({"num-examples": 1})
        arrays: ArrayRecord = message.content["arrays"]  # type: ignore[assignment]
        return Message(RecordDict({"a": arrays, "m": metrics}), reply_to=message)

    for experiment in "ab":
        assert node.ask(header={"experiment_id": experiment})[0] == "answer"
    assert seen == [(True, 0), (False, 0), (True, 0), (False, 1)]


def test_what_it_draws_is_put_back() -> None:
    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]  # noqa: NPY002

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    seed()
    expected = draws()
    seed()
    with trial(LAYOUT):
        assert draws() == expected
    assert draws() == expected


@pytest.mark.parametrize("trainer", [train, train_poisson])
def test_our_trainers_run_in_it(trainer: Callable[..., Any], tmp_path: Path) -> None:
    def work(w: Any, features: Any) -> Any:
        net = torch.nn.Linear(4, 3, bias=False)
        more = {"seed": 0} if trainer is train else {"sampling_rate": 0.5, "steps": 2}
        labels = np.zeros(len(features), np.int64)
        trainer(net, features, labels, learning_rate=0.1, device="cpu", **more)
        return net.weight.detach().numpy()[:1]

    user = User(work)
    assert Node(tmp_path / "node", declared("udp"), user).ask()[0] == "answer"
    assert user.seen == ["generated", "own"]


@pytest.mark.parametrize(
    "values",
    [
        {"features": (0,)},
        {"features": ("4",)},
        {"features": 28},
        {"labels": None},
        {"count": 0},
        {"label_type": "number"},
        {"feature_type": None},
    ],
)
def test_a_layout_that_is_none_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=next(iter(values))):
        RecordLayout(**{"features": (4,), **values})
