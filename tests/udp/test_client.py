"""The client half of UDP, asked directly: its noise, its charges, and what it refuses."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import MODEL, StepClient, make, message_app, record, run_strategy
from asked_terms import udp_terms
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.clients import UDPClient, as_mod, numpy_client_app
from flwr_privacy.errors import (
    ChargedFailureError,
    DeclinedError,
    InvalidParameterError,
    LedgerError,
    ProtocolError,
)
from flwr_privacy.pipeline import update_log
from flwr_privacy.pipeline.mechanism import NoFactsError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import UDP, LoopOptions, UserLevel
from flwr_privacy.udp import UDPNoisePlan, UDPTerms
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import Header

TERMS = udp_terms(noise_multiplier=2.0, epsilon=10.0, grid=-20)
QUESTION = {"experiment-id": "e", "round": 1, "request": 0}


class Node:
    """One deployed client, asked directly."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.config = {"client-id": "ward-7", "privacy-state": str(folder), **config}
        self.folder = folder
        self.run_config: dict[str, Any] = {}
        self.trained = 0

    def ask(
        self,
        terms: UDPTerms = TERMS,
        train: Callable[[Any], Any] | None = None,
        arrays: Any = MODEL,
        **changes: Any,
    ) -> tuple[Any, Any]:
        from flwr_privacy.clients import Trained

        def moved(start: Any) -> Trained:
            self.trained += 1
            return Trained({n: a + np.asarray(1, a.dtype) for n, a in start.items()}, {})

        context = Context(
            run_id=1,
            node_id=1,
            node_config=self.config,
            state=RecordDict(),
            run_config=self.run_config,
        )
        fields = {**write(terms), **QUESTION, **changes}
        return UDPClient(None, context).handle("train", arrays, fields, train or moved)

    def charges(self) -> list[Charge]:
        ledger = Ledger(self.folder / "ward-7.ledger", data_set="ward-7")
        return [entry.charge for entry in ledger.entries()]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


BIG = {"w": np.zeros((300, 100), np.float32), "b": np.zeros(300, np.float32)}


def codes_of(arrays: Any) -> np.ndarray:
    return np.concatenate([np.asarray(a).reshape(-1) for a in arrays.values()]).astype(float)


def test_F21_the_noise_has_the_variance_that_is_charged(node: Node) -> None:
    def still(start: Any) -> Any:
        from flwr_privacy.clients import Trained

        return Trained(start, {})

    sigma = TERMS.noise_multiplier * 2 * TERMS.clipping_norm
    terms = UDPTerms(**{**TERMS.__dict__, "epsilon": 100.0})
    draws = []
    for server_round in range(1, 6):
        arrays, fields = node.ask(terms, still, BIG, round=server_round)
        assert fields["metrics"] == {"num-examples": 1, "sigma": sigma}
        draws.append(codes_of(arrays) * 2.0**TERMS.grid)
    size = draws[0].size
    error = math.sqrt(2 / size)  # of a variance, in units of it
    for draw in draws:
        assert abs(draw.mean()) < 5 * sigma / math.sqrt(size)
        assert abs((draw**2).mean() / sigma**2 - 1) < 5 * error
    for one, other in pairwise(draws):  # independent from round to round
        assert abs((one * other).mean()) / sigma**2 < 5 / math.sqrt(size)
    assert abs((draws[0][1:] * draws[0][:-1]).mean()) / sigma**2 < 5 / math.sqrt(size)


def test_F23_the_cap_holds_however_often_the_server_asks(node: Node) -> None:
    schedule = UDPNoisePlan(noise="gdp_fixed", epsilon=4.0, delta=1e-5, rounds=5, q=1.0)
    terms = UDPTerms(
        unit="user",
        noise_multiplier=schedule.noise_multiplier,
        epsilon=schedule.cap,
        delta=schedule.delta,
        gap=schedule.gap,
        clipping_norm=1.0,
        grid=-20,
    )
    for server_round in range(1, 6):
        node.ask(terms, round=server_round)
    spent_now = spent(node.charges(), delta=1e-5)
    assert 4.0 * 0.9989 < spent_now <= 4.0 * (1 + 1e-9)
    with pytest.raises(DeclinedError, match="the budget is spent: epsilon 4 of 4 after 5 releases"):
        node.ask(terms, round=6)
    assert len(node.charges()) == 5
    assert node.trained == 5


def test_the_budget_is_of_the_experiment_and_the_policy_of_the_node(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    policy = node.folder / "policy.toml"
    policy.write_text("max_epsilon = 6.0\n")
    node.config["privacy-policy"] = str(policy)
    node.ask()
    while spent([*node.charges(), node.charges()[0]], delta=1e-5) <= 6.0:
        node.ask(**{"experiment-id": str(len(node.charges()))})
    with pytest.raises(DeclinedError, match="max_epsilon = 6 for all that it ever") as error:
        node.ask(**{"experiment-id": "the last straw"})
    assert "would be" not in str(error.value)  # the ledger's total is not the server's business
    assert "with this release epsilon would be" in caplog.text
    charges = node.charges()
    assert len(charges) > 2
    assert spent(charges, delta=1e-5) <= 6.0
    assert spent([*charges, charges[0]], delta=1e-5) > 6.0


def test_the_same_question_gets_the_same_bytes_and_costs_nothing(node: Node) -> None:
    first = node.ask()
    again = node.ask()
    assert node.trained == 1
    assert len(node.charges()) == 1
    assert first[1] == again[1]
    for name, array in first[0].items():
        np.testing.assert_array_equal(array, again[0][name])
        assert array.dtype == again[0][name].dtype == np.int32
    other = node.ask(request=1)
    assert len(node.charges()) == 2
    assert any((array != other[0][name]).any() for name, array in first[0].items())


def test_a_kept_reply_leaves_only_with_a_charge(node: Node) -> None:
    first = node.ask()
    (node.folder / "ward-7.ledger").unlink()
    again = node.ask()
    assert len(node.charges()) == 1
    assert all((array == again[0][name]).all() for name, array in first[0].items())


def broken(value: float) -> Callable[[Any], Any]:
    def train(start: Any) -> Any:
        from flwr_privacy.clients import Trained

        trained = {name: np.array(array) for name, array in start.items()}
        trained["0"][2] = value
        return Trained(trained, {})

    return train


def moves_by(distance: float) -> Callable[[Any], Any]:
    from flwr_privacy.clients import Trained

    return lambda start: Trained({n: a + np.asarray(distance) for n, a in start.items()}, {})


@pytest.mark.parametrize(("distance", "level"), [(1e-9, ""), (0.5, "INFO"), (50.0, "WARNING")])
def test_the_node_says_once_by_how_much_it_clips(
    node: Node, distance: float, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where each message is handled by a new process."""
    caplog.set_level("INFO", "flwr.privacy")
    for server_round in (1, 2):
        node.ask(train=moves_by(distance), round=server_round)
        update_log._TOLD.clear()
    size = sum(array.size for array in MODEL.values() if array.dtype == np.float32)
    said = [(r.levelname, r.getMessage()) for r in caplog.records if "clipped" in r.getMessage()]
    part = TERMS.clipping_norm / (distance * math.sqrt(size))
    expected = f"client ward-7: its update was clipped to {part:.2g} of its length. Fewer"
    assert [found for found, _ in said] == [level] * bool(level)
    assert all(text.startswith(expected) for _, text in said)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_cannot_be_told_from_none(
    tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    from flwr_privacy.clients import Trained

    answers = []
    for name, train in (("one", broken(value)), ("other", lambda start: Trained(start, {}))):
        (tmp_path / name).mkdir()
        node = Node(tmp_path / name, **{"insecure-seed": 3})
        answers.append(node.ask(train=train))
        assert len(node.charges()) == 1
    (codes, own), (expected, told) = answers
    assert own == told
    assert all((codes[n] == expected[n]).all() for n in expected)
    assert "the update of '0' has NaN or infinity" in caplog.text  # in the log of the node


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_no_update_can_start_from_is_refused_before_training(
    node: Node, value: float
) -> None:
    arrays = {**MODEL, "0": np.full_like(MODEL["0"], value)}
    with pytest.raises(ProtocolError, match="the model that was sent has NaN or infinity in '0'"):
        node.ask(arrays=arrays)
    assert (node.trained, node.charges()) == (0, [])


def test_a_model_without_weights_is_refused(node: Node) -> None:
    with pytest.raises(InvalidParameterError, match="a model with floating-point weights"):
        node.ask(arrays={"n": np.arange(3)})


def test_record_level_ends_around_a_plain_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a training reaches its trainer may depend on its data: that is charged."""
    terms = UDPTerms(**{**TERMS.__dict__, "unit": "record"})
    node = Node(tmp_path)
    with pytest.raises(ChargedFailureError, match="until its operator acts"):
        node.ask(terms)
    assert "did no per-record step" in caplog.text  # in the log of the node
    assert len(node.charges()) == 1
    (tmp_path / "simulated").mkdir()
    loud = Node(tmp_path / "simulated", **{"privacy-simulated": True})
    with pytest.raises(NoFactsError, match="did no per-record step"):
        loud.ask(terms)
    assert loud.charges() == []


@pytest.mark.parametrize("key", ["insecure-seed", "insecure_seed", "privacy-policy"])
def test_what_is_the_nodes_is_not_taken_from_a_server(node: Node, key: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"message = .'{key}'.*node's own"):
        node.ask(**{key: 3})
    node.run_config = {key: 3}
    with pytest.raises(InvalidParameterError, match=f"run-config = .'{key}'.*node's own"):
        node.ask()
    assert node.charges() == []


def test_no_ledger_no_answer(tmp_path: Path) -> None:
    node = Node(tmp_path)
    del node.config["privacy-state"]
    with pytest.raises(LedgerError, match=r"no folder: name .*privacy-state.*FLWR_PRIVACY_"):
        node.ask()
    node.config["privacy-state"] = str(tmp_path / "typo")
    with pytest.raises(LedgerError, match="there is no folder"):
        node.ask()
    assert node.trained == 0


def test_a_ledger_of_another_data_set_or_a_damaged_one_is_refused(node: Node) -> None:
    node.ask()
    path = node.folder / "ward-7.ledger"
    node.config["privacy-data-set"] = "icu"
    path.rename(node.folder / "icu.ledger")
    with pytest.raises(LedgerError, match="is about the data set 'ward-7', not 'icu'"):
        node.ask(round=2)
    (node.folder / "icu.ledger").write_bytes(b"flwr-privacy ledger 3\nnothing\n")
    with pytest.raises(LedgerError, match="is damaged"):
        node.ask(round=2)
    assert node.trained == 1


def test_a_locked_ledger_is_refused_and_nothing_is_sent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(node.folder / "ward-7.ledger", data_set="ward-7")
    locked = Ledger.locked
    monkeypatch.setattr(Ledger, "locked", lambda self, timeout=0.05: locked(self, timeout=timeout))
    with ledger.locked(), pytest.raises(LedgerError, match="is locked by another process"):
        node.ask()
    assert node.charges() == []


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("min_noise_multiplier = 3.0", "asks for noise multiplier 2: the node's policy has"),
        ("min_sigma = 5.0", "asks for sigma 4: the node's policy has min_sigma = 5"),
        ('schemes = ["fedavg"]', "scheme 'udp' asks for a release: the node's policy has schemes"),
        ('units = ["record"]', "protects the unit 'user': the node's policy has units"),
        ("max_epsilon = 0.5", "the node's policy has max_epsilon = 0.5"),
        ("max_epsilon = 0", "the node's policy has max_epsilon = 0"),
    ],
)
def test_a_server_cannot_weaken_the_nodes_policy(
    node: Node, caplog: pytest.LogCaptureFixture, policy: str, text: str
) -> None:
    path = node.folder / "policy.toml"
    path.write_text(policy)
    node.config["privacy-policy"] = str(path)
    with pytest.raises(DeclinedError, match=text):
        node.ask()
    assert "client ward-7 declines" in caplog.text  # the operator sees why
    assert node.charges() == []


def test_a_policy_that_is_looser_than_the_message_changes_nothing(node: Node) -> None:
    path = node.folder / "policy.toml"
    path.write_text("max_epsilon = 1000.0\nmin_noise_multiplier = 0.1\n")
    node.config["privacy-policy"] = str(path)
    terms = UDPTerms(**{**TERMS.__dict__, "epsilon": 3.0})
    node.ask(terms)
    while spent([*node.charges(), node.charges()[0]], delta=1e-5) <= 3.0:
        node.ask(terms, round=len(node.charges()) + 1)
    with pytest.raises(DeclinedError, match="the budget is spent: epsilon 2"):
        node.ask(terms, round=99)
    assert spent(node.charges(), delta=1e-5) <= 3.0


def test_a_policy_that_cannot_be_read_stops_the_node(node: Node) -> None:
    node.config["privacy-policy"] = str(node.folder / "none.toml")
    with pytest.raises(LedgerError, match=r"policy = .*none.toml.*No such file"):
        node.ask()
    assert node.trained == 0


@pytest.mark.parametrize(
    ("grid", "text"), [(1, "sigma"), (-2, "finer grid"), (-35, "coarser grid")]
)
def test_a_grid_that_does_not_fit_the_noise_is_refused(node: Node, grid: int, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        node.ask(UDPTerms(**{**TERMS.__dict__, "grid": grid}))
    assert node.charges() == []


def test_a_bare_message_gets_nothing() -> None:
    from flwr_privacy.strategies import FedAvg

    app = numpy_client_app(lambda context: UDPClient(StepClient(1), context))
    with pytest.raises(ProtocolError, match="none of 4 nodes said who it is"):
        run_strategy(FedAvg(), app, num_rounds=1)
    grid = InlineGrid(app, 1)
    with acting_as_server(grid.run_id):
        (node,) = grid.get_node_ids()
        message = Message(RecordDict({"arrays": record()}), node, "train")
        (reply,) = grid.send_and_receive([message], timeout=5)
    assert "works under the scheme 'udp' only" in reply.error.reason


def test_the_users_own_error_says_nothing_of_the_data(caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp(mods=[as_mod(UDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise ValueError("patient 17 has a negative age")

    for cohort in ({}, {"nodes": 2, "clients": 4}):
        options = {"clients": 4, "min_available_nodes": 2} if cohort else {}
        strategy = make(UDP, seed=1, **options)
        nodes = cohort.get("nodes", 4)
        caplog.clear()
        result = run_strategy(strategy, app, nodes=nodes, num_rounds=1)
        assert result.history[1]["refused"] == {"failed": 4}
        refusals = [r.getMessage() for r in caplog.records if ": refused" in r.getMessage()]
        assert len(refusals) == 4
        assert not any("patient" in text for text in refusals)
        assert "patient 17" in caplog.text  # in the log of the node
        (release,) = strategy.releases  # they were charged all the same
        assert len(release.clients) == 4


def test_nothing_of_the_users_evaluation_runs_for_a_server() -> None:
    app = message_app([as_mod(UDPClient)])
    grid = InlineGrid(app, 1)
    header = Header(scheme="udp", experiment_id="e", phase="evaluate", server_round=1)
    with acting_as_server(grid.run_id):
        (node,) = grid.get_node_ids()
        content = RecordDict({"arrays": record(), "flwr-privacy": ConfigRecord(header.write())})
        (reply,) = grid.send_and_receive([Message(content, node, "evaluate")], timeout=5)
    assert "the entry 'unit' of LossTerms" in reply.error.reason


def test_an_experiment_has_one_unit(node: Node) -> None:
    node.ask()
    terms = UDPTerms(**{**TERMS.__dict__, "unit": "record"})
    with pytest.raises(ProtocolError, match="this experiment had another one before"):
        node.ask(terms, round=2)


def test_a_question_that_is_answered_meanwhile_is_not_charged_again(node: Node) -> None:
    """Two deliveries of one question: the second comes while the first one trains."""
    answers: list[Any] = []

    def slow(start: Any) -> Any:
        from flwr_privacy.clients import Trained

        answers.append(node.ask())
        return Trained(start, {})

    answers.append(node.ask(train=slow))
    assert len(node.charges()) == 1
    for name, array in answers[0][0].items():
        np.testing.assert_array_equal(array, answers[1][0][name])


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.2, 1000), (1.0, 60), (8.0, 60), (100.0, 1)])
def test_the_usual_grid_has_room_for_the_noise(node: Node, epsilon: float, rounds: int) -> None:
    strategy = UDP(privacy=UserLevel(epsilon=epsilon), rounds=rounds, loop=LoopOptions(seed=1))
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=1)
    assert result.history[1]["accumulated"] == 4
