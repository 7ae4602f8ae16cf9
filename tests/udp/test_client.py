"""UDP's two halves: conformance, noise, budget, and what is refused."""

import json
import logging
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import MODEL, StepClient, make, message_app, record, run_strategy
from conformance import WrapsConformance
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.clients import UDPClient, as_mod, numpy_client_app
from flwr_privacy.errors import (
    ChargedFailureError,
    CheckpointError,
    DeclinedError,
    InvalidParameterError,
    LedgerError,
    ProtocolError,
)
from flwr_privacy.pipeline.mechanism import NoFactsError
from flwr_privacy.privacy.card import Answers, PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.simulations.engines.inline import Fault, InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import UDP, LoopOptions, UserLevel
from flwr_privacy.udp import NoisePlan, UDPTerms
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import Header


class TestUDP(WrapsConformance):
    strategy = UDP
    client = UDPClient
    options: ClassVar[dict[str, Any]] = {"rounds": 3, "experiment_id": "e"}
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": 7}
    exact_cohorts = True
    codes = True
    # Three rounds with three of four clients at an epsilon without meaning: little noise is left.
    app_options: ClassVar[dict[str, Any]] = {"unit": "user", "epsilon": 1e6}
    noise = 0.05
    no_noise: ClassVar[dict[str, Any]] = {"noise": "none"}


TERMS = UDPTerms(
    unit="user",
    noise_multiplier=2.0,
    epsilon=10.0,
    delta=1e-5,
    gap=1e-3,
    clipping_norm=1.0,
    grid=-20,
)
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


@pytest.mark.usefixtures("no_pld")
def test_F22_equal_weights_at_user_level_and_a_mean_of_all(tmp_path: Path) -> None:
    """With an epsilon without meaning the result is the mean of the clipped updates (F14)."""
    strategy = UDP(
        privacy=UserLevel(epsilon=1e6, clipping_norm=0.5), rounds=1, loop=LoopOptions(seed=1)
    )
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=1)
    expected = {name: np.array(array, float) for name, array in MODEL.items()}
    names = released_names(MODEL)
    for client in range(4):
        moved = {n: (MODEL[n] * (1 + client / 10) + client / 3).astype(np.float32) for n in names}
        update = {n: moved[n].astype(float) - MODEL[n] for n in names}
        norm = math.sqrt(sum((u**2).sum() for u in update.values()))
        for name in names:
            expected[name] += update[name] * min(1, 0.5 / max(norm, 1e-9)) / 4
    sigma = result.history[1]["train"]["sigma"]
    for name in names:
        np.testing.assert_allclose(
            result.arrays[name].numpy(), expected[name], atol=6 * sigma / 2 + 1e-5
        )
    assert result.arrays["batches"].numpy() == MODEL["batches"]


def test_F23_the_cap_holds_however_often_the_server_asks(node: Node) -> None:
    schedule = NoisePlan(noise="gdp_fixed", epsilon=4.0, delta=1e-5, rounds=5, q=1.0)
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


def test_integers_and_statistics_are_kept_back_and_named(tmp_path: Path) -> None:
    model = {
        "w": np.zeros(4, np.float32),
        "bn.running_mean": np.ones(4, np.float32),
        "bn.num_batches_tracked": np.array(3),
        "0": np.ones(2),
    }
    strategy = UDP(
        rounds=1, keep_back=["0"], privacy=UserLevel(epsilon=100.0), loop=LoopOptions(seed=1)
    )
    app = message_app([as_mod(UDPClient)])
    result = run_strategy(strategy, app, num_rounds=1, arrays=record(model))
    assert result.history[1]["accumulated"] == 4
    for name in ("bn.running_mean", "bn.num_batches_tracked", "0"):
        np.testing.assert_array_equal(result.arrays[name].numpy(), model[name])
    assert (result.arrays["w"].numpy() != 0).all()
    text = result.guarantee.text()
    assert "0, bn.num_batches_tracked, bn.running_mean" in text


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


def test_a_seed_of_the_node_voids_the_guarantee(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        strategy = UDP(privacy=UserLevel(), rounds=1, loop=LoopOptions(seed=1))
        app = message_app([as_mod(UDPClient)])
        result = run_strategy(strategy, app, num_rounds=1, insecure_seed=5)
    assert "draws its noise from a seed" in caplog.text
    assert result.guarantee.void
    assert result.guarantee.text().startswith("VOID: clients drew their noise from an insecure")


def test_no_ledger_no_answer(tmp_path: Path) -> None:
    node = Node(tmp_path)
    del node.config["privacy-state"]
    with pytest.raises(LedgerError, match=r"no place to lie: name .*privacy-state.*FLWR_PRIVACY_"):
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
    (node.folder / "icu.ledger").write_bytes(b"flwr-privacy ledger\nnothing")
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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"epsilon": -1}, "epsilon = -1"),
        ({"epsilon": math.nan}, "epsilon = nan"),
        ({"delta": 0.0}, "delta = 0.0"),
        ({"delta": 1.0}, "delta = 1.0"),
        ({"clipping_norm": 0.0}, "clipping_norm = 0.0"),
        ({"clipping_norm": -1.0}, "clipping_norm = -1.0"),
        ({"unit": "client"}, "unit = 'client'"),
        ({"unit": "record"}, "RecordLevel needs 'learning_rate'"),
        ({"learning_rate": 0.1}, "learning_rate': only with unit=record"),
        ({"unit": "record", "learning_rate": 0.0}, "learning_rate = 0.0"),
        ({"noise": "no"}, "noise = 'no'"),
        ({"rounds": 0}, "rounds = 0"),
        ({"grid_bits": 31}, "grid_bits = 31"),
        ({"sampling_rate": 0.5}, "sampling_rate': only with unit=record"),
    ],
)
def test_parameters_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(UDP, **options)


def test_names_to_keep_back_are_the_models(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"keep_back = \['nonesuch'\]"):
        run_strategy(
            UDP(privacy=UserLevel(), keep_back=["nonesuch"]), message_app([as_mod(UDPClient)])
        )


def test_a_start_of_ones_own_has_to_say_how_many_rounds_there_are() -> None:
    from flwr.serverapp.strategy import Strategy

    class Own(UDP):
        start = Strategy.start

    with pytest.raises(InvalidParameterError, match="rounds = None"):
        run_strategy(Own(privacy=UserLevel()), message_app([as_mod(UDPClient)]))


def test_the_card_has_every_charge_also_of_replies_that_were_lost_or_late(tmp_path: Path) -> None:
    faults = [
        Fault(kind="drop", client="1", server_round=1),
        Fault(kind="corrupt", client="2", server_round=2),
    ]
    strategy = UDP(privacy=UserLevel(), loop=LoopOptions(seed=1, run_dir=tmp_path, deadline=0.5))
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), faults=faults)
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3, 4]
    card = PrivacyCard.from_json((tmp_path / "privacy-card.json").read_text())
    assert [release.clients for release in card.releases] == [("0", "1", "2", "3")] * 3
    # A corrupt reply is one; only nothing of it is used.
    assert [release.unanswered for release in card.releases] == [("1",), (), ()]
    numbers = card.verify()
    assert set(numbers) == {"gdp", "rdp", "pld"}
    assert card.guarantee.spent == numbers["gdp"][1] == pytest.approx(8.0, rel=1e-6)
    assert numbers["gdp"][1] == pytest.approx(numbers["pld"][1], rel=1e-3)
    assert "differential privacy" in (tmp_path / "privacy-card.html").read_text()
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["scheme"]["epsilon"] == pytest.approx(8.0, rel=1e-6)
    assert line["scheme"]["epsilon_left"] == pytest.approx(0.0, abs=1e-5)


def test_a_client_that_fails_before_it_releases_is_not_charged(tmp_path: Path) -> None:
    app = message_app([as_mod(UDPClient)])
    policy = tmp_path / "policy.toml"
    policy.write_text('schemes = ["fedavg"]')
    nodes = [{"client-id": name, "partition-id": i} for i, name in enumerate("abcd")]
    nodes[1]["privacy-policy"] = str(policy)
    strategy = UDP(privacy=UserLevel(), loop=LoopOptions(seed=1))
    result = run_strategy(strategy, app, nodes=nodes)
    assert result.history[1]["refused"] == {"declined": 1}
    assert all(release.clients == ("a", "c", "d") for release in strategy.releases)
    assert strategy.card().answers() == Answers(charged=9, unanswered=0, untold=0)


@pytest.mark.parametrize("cohorts", [False, True])
def test_what_fails_after_its_charge_counts_alike_on_the_card_and_in_the_ledger(
    tmp_path: Path, cohorts: bool
) -> None:
    """The training of client 1 raises in round 2: a simulated client says so, and is charged."""

    def failing(message: Message, context: Context, call_next: Any) -> Message:
        asked = message.content["config"]["server-round"], context.node_config["partition-id"]
        if message.metadata.message_type == "train" and asked == (2, 1):
            raise RuntimeError
        return call_next(message, context)

    loop = LoopOptions(seed=1, clients=4 if cohorts else None)
    strategy = UDP(privacy=UserLevel(), loop=loop, min_available_nodes=2)
    app = message_app([as_mod(UDPClient), failing])
    run_strategy(strategy, app, nodes=2 if cohorts else 4, state=tmp_path)
    assert [release.unanswered for release in strategy.releases] == [(), ("1",), ()]
    assert str(strategy.card().answers()) == "12 charged, 11 answered, 1 never answered"
    for client in "0123":
        missing = Ledger(tmp_path / f"{client}.ledger", data_set=client).unanswered()
        expected = [2] if client == "1" else []
        assert [entry.question.server_round for entry in missing] == expected


@pytest.mark.usefixtures("real_time")
def test_an_answer_that_comes_too_late_to_be_used_is_one(tmp_path: Path) -> None:
    late = Fault(kind="delay", client="1", server_round=1, seconds=0.8)
    strategy = UDP(
        privacy=UserLevel(),
        loop=LoopOptions(seed=1, quorum=3, run_dir=tmp_path),
        min_available_nodes=2,
        fraction_train=1.0,
    )
    shown: list[Any] = []

    def wait(server_round: int, arrays: Any) -> None:
        shown.append(list(strategy.releases))
        if server_round == 1:
            time.sleep(1.2)

    run_strategy(strategy, message_app([as_mod(UDPClient)]), faults=[late], evaluate_fn=wait)
    assert shown[1][0].clients == ("0", "1", "2", "3")
    assert shown[1][0].unanswered == ("1",)
    assert strategy.releases[0].clients == ("0", "1", "2", "3")
    assert strategy.releases[0].unanswered == ()
    assert PrivacyCard.from_json((tmp_path / "privacy-card.json").read_text()).verify()


def test_a_resume_with_other_terms_is_refused(tmp_path: Path) -> None:
    app = message_app([as_mod(UDPClient)])

    def interrupted(line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_strategy(
            UDP(
                privacy=UserLevel(),
                loop=LoopOptions(seed=1, run_dir=tmp_path, on_round=interrupted),
            ),
            app,
        )
    for options, rounds, text in (
        ({"epsilon": 9.0}, 3, "calibrated for epsilon = 8.0, not 9.0"),
        ({"clipping_norm": 2.0}, 3, "calibrated for clipping_norm = 1.0, not 2.0"),
        ({"unit": "record", "learning_rate": 1.0}, 3, "calibrated for unit = 'user'"),
        ({}, 30, "calibrated for rounds = 3, not 30"),
    ):
        strategy = make(UDP, seed=1, run_dir=tmp_path, resume=True, **options)
        with pytest.raises(CheckpointError, match=text):
            run_strategy(strategy, app, num_rounds=rounds)


def test_a_round_that_is_resumed_half_way_costs_its_clients_nothing_more(tmp_path: Path) -> None:
    """The server dies after two of four answers; the resumed round gets those bytes again."""
    state, run_dir = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    run_dir.mkdir()
    options: dict[str, Any] = {"seed": 1, "run_dir": run_dir, "rounds": 3, "experiment_id": "e"}

    class Dying(UDP):
        dies = True

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            def some() -> Any:
                for count, reply in enumerate(replies):
                    if count == 2 and server_round == 2 and self.dies:
                        raise KeyboardInterrupt
                    yield reply

            return super().aggregate_train(server_round, some())

    app = message_app([as_mod(UDPClient)])
    with pytest.raises(KeyboardInterrupt):
        run_strategy(make(Dying, **options), app, state=state)
    counts = [len(Ledger(state / f"{i}.ledger", data_set=str(i)).entries()) for i in range(4)]
    assert sorted(counts) == [1, 2, 2, 2] or sorted(counts) == [1, 1, 2, 2]
    result = run_strategy(make(UDP, **options, resume=True), app, state=state)
    for i in range(4):
        entries = Ledger(state / f"{i}.ledger", data_set=str(i)).entries()
        assert [entry.question.server_round for entry in entries] == [1, 2, 3]
    assert result.guarantee.spent == pytest.approx(8.0, rel=1e-6)


@pytest.mark.usefixtures("no_pld")
def test_server_optimisers_and_many_rounds(tmp_path: Path) -> None:
    strategy = UDP(loop=LoopOptions(seed=1), inner=FedAdam(), privacy=UserLevel(epsilon=1e3))
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=2)
    assert not same_models(result.arrays, record())
    assert all(np.isfinite(a.numpy()).all() for a in result.arrays.values())


def same_models(one: ArrayRecord, other: ArrayRecord) -> bool:
    return all((one[name].numpy() == other[name].numpy()).all() for name in one)


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


def test_a_second_start_is_another_training_with_a_schedule_of_its_own() -> None:
    strategy = UDP(privacy=UserLevel(), loop=LoopOptions(seed=1))
    app = message_app([as_mod(UDPClient)])
    run_strategy(strategy, app, num_rounds=2)
    assert strategy.terms is not None
    first = strategy.terms.noise_multiplier
    result = run_strategy(strategy, app, num_rounds=8)
    assert strategy.terms.noise_multiplier == pytest.approx(2 * first, rel=1e-6)
    assert len(strategy.releases) == 8
    assert result.guarantee.spent == pytest.approx(8.0, rel=1e-6)


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
        refusals = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
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


def test_a_seed_voids_the_guarantee_whatever_becomes_of_the_metrics() -> None:
    strategy = UDP(
        privacy=UserLevel(),
        loop=LoopOptions(seed=1),
        rounds=1,
        train_metrics_aggr_fn=lambda contents, key: MetricRecord(),
    )
    app = message_app([as_mod(UDPClient)])
    assert run_strategy(strategy, app, num_rounds=1, insecure_seed=5).guarantee.void


def test_the_weight_is_the_clients_own_whatever_key_the_server_names() -> None:
    strategy = UDP(privacy=UserLevel(), weighted_by_key="samples", loop=LoopOptions(seed=1))
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=1)
    assert result.history[1]["accumulated"] == 4


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.2, 1000), (1.0, 60), (8.0, 60), (100.0, 1)])
def test_the_usual_grid_has_room_for_the_noise(node: Node, epsilon: float, rounds: int) -> None:
    strategy = UDP(privacy=UserLevel(epsilon=epsilon), rounds=rounds, loop=LoopOptions(seed=1))
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=1)
    assert result.history[1]["accumulated"] == 4


def test_a_round_that_broke_off_is_on_the_card_whoever_is_asked_again(tmp_path: Path) -> None:
    """The server dies in round 2; client d has left when it resumes, and was charged as well."""
    state = tmp_path / "state"
    run_dir = tmp_path / "run"
    state.mkdir()
    run_dir.mkdir()
    options: dict[str, Any] = {"seed": 1, "run_dir": run_dir, "experiment_id": "e"}

    class Dying(UDP):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            if server_round == 2:
                list(replies)
                raise KeyboardInterrupt
            return super().aggregate_train(server_round, replies)

    app = message_app([as_mod(UDPClient)])
    nodes = [{"client-id": name, "partition-id": i} for i, name in enumerate("abcd")]
    with pytest.raises(KeyboardInterrupt):
        run_strategy(make(Dying, **options), app, nodes=nodes, state=state)
    strategy = make(UDP, **options, resume=True)
    run_strategy(strategy, app, nodes=nodes[:3], state=state)
    booked = dict.fromkeys("abcd", 0)
    for release in strategy.releases:
        for client in release.clients:
            booked[client] += 1
    for name, count in booked.items():
        entries = Ledger(state / f"{name}.ledger", data_set=name).entries()
        assert len(entries) == count == (2 if name == "d" else 3)
    # The books of the run that died are lost: d has answered it, and nobody knows.
    assert [release.unanswered for release in strategy.releases] == [(), ("d",), ()]
    assert strategy.card(final=True).verify()
    assert str(strategy.card().answers()) == "11 charged, 10 answered, 1 never answered"


def test_under_ones_own_start_a_lost_reply_is_its_clients_once_that_is_known() -> None:
    from flwr.serverapp.strategy import Strategy

    class Own(UDP):
        start = Strategy.start

    strategy = Own(privacy=UserLevel(), rounds=3, loop=LoopOptions(seed=1))
    fault = Fault(kind="drop", client="1", server_round=1)
    run_strategy(strategy, message_app([as_mod(UDPClient)]), faults=[fault], timeout=0.5)
    assert [release.clients for release in strategy.releases] == [("0", "1", "2", "3")] * 3
    assert [release.unanswered for release in strategy.releases] == [("1",), (), ()]
    assert strategy.card().guarantee.spent == pytest.approx(8.0, rel=1e-6)
