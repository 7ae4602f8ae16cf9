"""Losses that clients report after each round: clipped, noised, charged; at both levels."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from apps import MODEL, StepClient, make, message_app, model_of, record, run_strategy, same, step
from asked_terms import loss_terms
from conformance import Killed
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.clients import UDPClient, as_mod, numpy_client_app
from flwr_privacy.clients.torch import (
    evaluate_per_record,
    get_arrays,
    initialise,
    linear,
    set_arrays,
    train_per_record,
)
from flwr_privacy.errors import ChargedFailureError, DeclinedError, InvalidParameterError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import Fault, InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import UDP
from flwr_privacy.strategies.requests.instruction import noting
from flwr_privacy.udp import LossTerms
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import RECORD, Header

TERMS = loss_terms(noise_multiplier=1.5, epsilon=1e4, gap=1e-3)
FEATURES, CLASSES, RECORDS = 5, 3, (20, 30, 40, 50)


class Node:
    """One deployed client that is asked for its loss."""

    def __init__(self, folder: Path, loss: Any = 1.0) -> None:
        self.config: dict[str, Any] = {"client-id": "ward-7", "privacy-state": str(folder)}
        self.folder, self.loss, self.evaluated = folder, loss, 0

    def evaluate(self) -> dict[str, Any]:
        self.evaluated += 1
        return self.loss() if callable(self.loss) else {"loss": self.loss, "num-examples": 77}

    def ask(self, terms: LossTerms = TERMS, arrays: Any = MODEL, **changes: Any) -> dict[str, Any]:
        context = Context(1, 1, self.config, RecordDict(), {})
        question = {"experiment-id": "e", "round": 1, "request": 0, **changes}
        client = UDPClient(None, context)
        return dict(client.handle_evaluation(arrays, {**write(terms), **question}, self.evaluate))

    def policy(self, text: str) -> None:
        path = self.folder / "policy.toml"
        path.write_text(text)
        self.config["privacy-policy"] = str(path)

    def charges(self) -> list[Charge]:
        ledger = Ledger(self.folder / "ward-7.ledger", data_set="ward-7")
        return [entry.charge for entry in ledger.entries()]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def changed(**values: Any) -> LossTerms:
    return LossTerms(**{**TERMS.__dict__, **values})


def check_noise(found: list[float], mean: float, sigma: float) -> None:
    """Mean and variance of normal values, to five standard errors."""
    values = np.array(found) - mean
    assert abs(values.mean()) < 5 * sigma / math.sqrt(values.size)
    assert abs((values**2).mean() / sigma**2 - 1) < 5 * math.sqrt(2 / values.size)
    assert len(set(found)) > 0.9 * len(found)  # new noise in every round, on a fine grid


@pytest.mark.parametrize(("loss", "clipped"), [(1.25, 1.25), (9.0, 4.0), (-3.0, 0.0)])
def test_a_loss_of_a_client_is_clipped_and_has_the_noise_that_is_charged(
    node: Node, loss: float, clipped: float
) -> None:
    node.loss, node.config["insecure-seed"] = loss, 11
    found = []
    for server_round in range(1, 201):
        metrics = node.ask(round=server_round)
        assert set(metrics) == {"num-examples", "loss", "insecure-noise"}
        assert metrics["num-examples"] == 1
        found.append(metrics["loss"])
    check_noise(found, clipped, 1.5 * 4.0)
    charges = node.charges()
    assert len(charges) == 200
    assert set(charges) == {Charge(neighbours="replace_one", noise_multiplier=1.5, gap=1e-3)}


def net() -> torch.nn.Module:
    return initialise(lambda: linear(FEATURES, CLASSES), 0)


def data(client: int) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(client)
    size = RECORDS[client]
    return draws.normal(size=(size, FEATURES)).astype(np.float32), draws.integers(0, CLASSES, size)


def mean_loss(model: torch.nn.Module, client: int, cap: float) -> float:
    features, labels = data(client)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(torch.tensor(features)), torch.tensor(labels), reduction="none"
        )
    return float(losses.clamp(0, cap).mean())


def test_a_loss_at_record_level_has_noise_for_one_record(node: Node) -> None:
    node.config["insecure-seed"] = 3
    cap, model = 1.0, net()
    found: list[float] = []

    def evaluate() -> dict[str, Any]:
        evaluate_per_record(model, *data(0))
        return {"loss": 1e9, "secret": 17.0}  # what the user says of it is not used

    node.loss = evaluate
    terms = changed(unit="record", cap=cap, noise_multiplier=2.0)
    for server_round in range(1, 121):
        metrics = node.ask(terms, get_arrays(model), round=server_round)
        assert metrics.pop("insecure-noise")
        assert set(metrics) == {"num-examples", "loss"}
        assert metrics["num-examples"] == RECORDS[0]
        found.append(metrics["loss"])
    check_noise(found, mean_loss(net(), 0, cap), 2.0 * cap / RECORDS[0])


def test_the_same_question_gets_the_same_loss_and_costs_nothing(node: Node) -> None:
    first = node.ask()
    node.loss = 3.0  # another model, or other data: the answer was given
    assert node.ask() == first
    assert (node.evaluated, len(node.charges())) == (1, 1)
    assert node.ask(request=1) != first
    assert node.ask(round=2) != first
    assert len(node.charges()) == 3


def test_a_kept_loss_leaves_only_with_a_charge(node: Node) -> None:
    first = node.ask()
    (node.folder / "ward-7.ledger").unlink()
    assert node.ask() == first
    assert len(node.charges()) == 1


def test_a_spent_budget_declines_before_anything_is_evaluated(node: Node) -> None:
    terms = changed(epsilon=5.0)
    cost = Charge(neighbours="replace_one", noise_multiplier=1.5, gap=1e-3)
    while spent([*node.charges(), cost], delta=1e-5) <= 5.0:
        node.ask(terms, round=len(node.charges()) + 1)
    answered = len(node.charges())
    with pytest.raises(DeclinedError, match=rf"the budget is spent: .* after {answered} releases"):
        node.ask(terms, round=99)
    assert node.evaluated == len(node.charges()) == answered > 0


@pytest.mark.parametrize(
    ("policy", "terms", "text"),
    [
        ("min_noise_multiplier = 2.0", TERMS, "noise multiplier 1.5: the node's policy has"),
        ("max_epsilon = 0.5", TERMS, "the node's policy has max_epsilon = 0.5"),
        ('units = ["record"]', TERMS, "protects the unit 'user'"),
        ('schemes = ["fedavg"]', TERMS, "the node's policy has schemes"),
        ("max_epsilon = 1e9", changed(noise_multiplier=0.0), "'udp' has no budget"),
        ('units = ["user"]', changed(noise_multiplier=0.0), "'udp' has no budget"),
        ("min_noise_multiplier = 0.1", changed(noise_multiplier=0.0), "noise multiplier 0"),
        ("min_sigma = 1e-6", changed(noise_multiplier=0.0), "sigma 0"),
    ],
)
def test_the_nodes_policy_is_for_losses_as_well(
    node: Node, policy: str, terms: LossTerms, text: str
) -> None:
    node.policy(policy)
    with pytest.raises(DeclinedError, match=text):
        node.ask(terms)
    assert (node.evaluated, node.charges()) == (0, [])


@pytest.mark.parametrize(
    "metrics", [{}, {"accuracy": 0.5, "num-examples": 3}, {"loss": [0.1, 0.2]}, {"loss": "1.0"}]
)
def test_an_evaluation_without_a_loss_cannot_be_told_from_the_cap(
    tmp_path: Path, metrics: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    for name, loss in (("one", metrics), ("other", {"loss": 1e9})):
        (tmp_path / name).mkdir()
        node = Node(tmp_path / name)
        node.loss = lambda loss=loss: loss
        node.config["insecure-seed"] = 3
        answers.append(node.ask())
        assert len(node.charges()) == 1
    assert answers[0] == answers[1]
    assert "returned no loss: a number as one of" in caplog.text  # in the log of the node


def test_the_loss_of_stock_apps_is_known_by_both_names(node: Node) -> None:
    node.config["privacy-allow-unprotected"] = "udp"
    node.loss = lambda: {"eval_loss": 0.75}
    assert node.ask(changed(noise_multiplier=0.0)) == {"num-examples": 1, "loss": 0.75}


def test_at_record_level_the_evaluation_has_to_measure_this_model_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    terms, model = changed(unit="record"), net()
    arrays = get_arrays(model)
    with pytest.raises(ChargedFailureError, match="until its operator acts"):
        node.ask(terms, arrays, **{"experiment-id": "e0"})
    assert "the evaluation measured no per-record loss" in caplog.text  # in the log of the node
    other = initialise(lambda: linear(FEATURES, CLASSES), 1)

    def elsewhere() -> Any:
        evaluate_per_record(other, *data(0))

    def twice() -> Any:
        evaluate_per_record(model, *data(0))
        evaluate_per_record(model, *data(0))

    def another_cap() -> Any:
        evaluate_per_record(model, *data(0), loss_cap=400.0)

    node.loss = another_cap  # a rehearsal shows it
    with pytest.raises(InvalidParameterError, match="loss_cap = 400"):
        node.ask(terms, arrays)
    assert len(node.charges()) == 1
    for count, (evaluation, text) in enumerate(
        ((elsewhere, "given other arrays"), (twice, "2 per-record losses")), start=2
    ):
        node.loss = evaluation
        with pytest.raises(ChargedFailureError, match="until its operator acts"):
            node.ask(terms, arrays, **{"experiment-id": f"e{count}"})
        assert text in caplog.text  # in the log of the node
        assert len(node.charges()) == count


def test_what_is_the_nodes_is_not_taken_from_a_server(node: Node) -> None:
    with pytest.raises(InvalidParameterError, match="insecure-seed"):
        node.ask(**{"insecure-seed": 3})
    assert node.evaluated == 0


# -- With the strategy ---------------------------------------------------------------------------


def loss_app(loss: Callable[[int], float] = lambda client: 0.5 + client / 4) -> ClientApp:
    app = ClientApp(mods=[as_mod(UDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        arrays = model_of(message.content.array_records["arrays"])
        trained = record({name: step(array, client) for name, array in arrays.items()})
        metrics = MetricRecord({"num-examples": client + 1})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        metrics = {"num-examples": client + 1, "loss": loss(client), "accuracy": 0.123}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


class Watching(UDP):
    """Notes what the replies to an evaluation hold."""

    seen: list[dict[str, Any]]

    def put(self, server_round: int, phase: str, *rest: Any, **options: Any) -> Any:
        if phase == "evaluate":
            *first, told = rest
            rest = (*first, noting(told, self.take, self._see))
        return super().put(server_round, phase, *rest, **options)

    def _see(self, reply: Any) -> None:
        self.__dict__.setdefault("seen", []).append({**reply.metrics(), "client": reply.client_id})
        assert not reply.content.array_records or not any(reply.content.array_records.values())


OPTIONS: dict[str, Any] = {
    "schedule": "discounting",
    "validation": "clients",
    "patience": 99,
    "seed": 1,
}


def test_both_phases_are_on_the_ledgers_and_on_the_card(tmp_path: Path) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    strategy = make(Watching, **OPTIONS, run_dir=tmp_path / "run", fraction_evaluate=0.0)
    faults = [Fault(kind="drop", client="2", server_round=2, phase="evaluate")]
    result = run_strategy(
        strategy, loss_app(), state=tmp_path / "state", faults=faults, timeout=1.5
    )
    card = PrivacyCard.from_json((tmp_path / "run" / "privacy-card.json").read_text())
    card.verify()
    assert card.guarantee.spent == pytest.approx(8.0, rel=1e-6)
    assert [(r.phase, r.server_round) for r in card.releases] == [
        (phase, r) for r in (1, 2, 3) for phase in ("train", "evaluate")
    ]
    for i in range(4):
        entries = Ledger(tmp_path / "state" / f"{i}.ledger", data_set=str(i)).entries()
        assert [entry.charge for entry in entries] == card.charges()[str(i)]
        assert [entry.question.phase for entry in entries] == ["train", "evaluate"] * 3
        assert spent([e.charge for e in entries], delta=1e-5) == pytest.approx(8.0, rel=1e-6)
        evaluations = sum(e.charge.noise_multiplier**-2 for e in entries[1::2])
        trainings = sum(e.charge.noise_multiplier**-2 for e in entries[::2])
        assert evaluations / (evaluations + trainings) == pytest.approx(0.1, rel=1e-6)
    assert len(strategy.seen) == 11
    for metrics in strategy.seen:
        assert set(metrics) == {"num-examples", "loss", "client"}
        assert metrics["num-examples"] == 1
    first = [m["loss"] for m in strategy.seen[:4]]
    assert result.history[1]["scheme"]["V"] == pytest.approx(np.mean(first))
    assert result.history[1]["evaluate"] == {"loss": pytest.approx(np.mean(first))}
    assert not any("unprotected" in text for text in result.guarantee.not_protected)


def test_both_kinds_of_app_and_cohorts_say_the_same() -> None:
    results = []
    numpy_app = numpy_client_app(
        lambda context: UDPClient(StepClient(int(context.node_config["partition-id"])), context)
    )
    for app, nodes in ((loss_app(lambda _: 1.0), 4), (numpy_app, 4), (numpy_app, 2)):
        options = {**OPTIONS, "patience": 1, "beta": 0.7, "experiment_id": "e"}
        strategy = make(UDP, **options, **({"clients": 4} if nodes == 2 else {}))
        result = run_strategy(strategy, app, nodes=nodes, insecure_seed=4, num_rounds=6)
        losses = [line["scheme"]["V"] for line in result.history[1:]]
        results.append((result.arrays, losses, strategy.T_history, strategy.releases))
    for other in results[1:]:
        assert same(results[0][0], other[0])
        assert other[1] == pytest.approx(results[0][1], rel=1e-12)
        assert other[2:] == results[0][2:]
    assert results[0][2][:2] == [6, 6]  # the first model's loss is not known


@pytest.mark.parametrize("noise", ["gdp_fixed", "gdp"])
def test_everybody_is_asked_also_who_did_not_train_and_nobody_passes_the_cap(noise: str) -> None:
    strategy = make(UDP, **{**OPTIONS, "fraction_train": 0.5, "noise": noise, "epsilon": 2.0})
    result = run_strategy(strategy, loss_app(), num_rounds=6)
    losses = [release for release in strategy.releases if release.phase == "evaluate"]
    assert [release.clients for release in losses] == [("0", "1", "2", "3")] * 6
    assert result.guarantee.spent <= 2.0 * (1 + 1e-9)
    assert strategy.card(final=True).verify()


def test_who_has_spent_its_trainings_leaves_the_budget_of_the_losses_alone(tmp_path: Path) -> None:
    """Some are drawn more often than expected, and are asked again when nothing is left."""
    options = {**OPTIONS, "seed": 0, "noise": "gdp", "epsilon": 4.0, "share": 0.8}
    strategy = make(UDP, **options, fraction_train=0.5, client_sampling="fixed")
    result = run_strategy(strategy, loss_app(), num_rounds=12, state=tmp_path)
    for i in range(4):
        entries = Ledger(tmp_path / f"{i}.ledger", data_set=str(i)).entries()
        trainings = [e.charge for e in entries if e.question.phase == "train"]
        square = sum(charge.noise_multiplier**-2 for charge in trainings)
        assert square <= 0.2 * mu_of(4.0, 1e-5) ** 2
        assert len(entries) - len(trainings) == 12  # every loss is reported
    assert sum(line["refused"].get("declined", 0) for line in result.history[1:]) > 0
    assert result.guarantee.spent <= 4.0 * (1 + 1e-9)


def test_the_paper_has_no_noise_on_losses_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("max_epsilon = 1000.0\n")
    nodes: list[dict[str, Any]] = [{"client-id": n, "partition-id": i} for i, n in enumerate("abc")]
    nodes[1]["privacy-policy"] = str(tmp_path / "policy.toml")
    strategy = make(UDP, **OPTIONS, noise="paper", loss_cap=0.9)
    result = run_strategy(strategy, loss_app(), nodes=nodes, num_rounds=2)
    assert "unprotected_test_loss" in result.guarantee.text()
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3]
    # b declines to say it without noise; a has 0.5, and c has 1.0, clipped to 0.9.
    assert result.history[1]["scheme"]["V"] == pytest.approx((0.5 + 0.9) / 2)
    assert {release.phase for release in strategy.releases} == {"train"}
    assert strategy.card(final=True).verify()


def test_losses_that_are_lost_discount_nothing_and_are_charged() -> None:
    strategy = make(UDP, **{**OPTIONS, "patience": 1, "zeta": 1e9, "beta": 0.6})
    faults = [Fault(kind="drop", server_round=r, phase="evaluate") for r in (1, 2)]
    result = run_strategy(strategy, loss_app(), num_rounds=5, faults=faults, timeout=1.0)
    assert strategy.T_history[:4] == [5, 5, 5, 5]  # round 3 has the first loss that is known
    assert "V" not in result.history[2]["scheme"]
    phases = [release.phase for release in strategy.releases]
    assert phases[:4] == ["train", "evaluate"] * 2


def test_an_app_without_a_loss_trains_on_without_discounting() -> None:
    strategy = make(UDP, **{**OPTIONS, "patience": 1})
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=2)
    assert strategy.T_history == [2, 2, 2]
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4]
    assert result.history[1]["refused"] == {}
    assert {release.phase for release in strategy.releases} == {"train", "evaluate"}  # charged


class Dying(UDP):
    """Ends when two of the losses of round 2 are there."""

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        if server_round == 2:
            replies = iter(replies)
            next(replies), next(replies)
            raise Killed
        return super().aggregate_evaluate(server_round, replies)


def test_losses_of_clients_that_are_gone_when_the_server_is_back_are_charged(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    options = {**OPTIONS, "patience": 1, "experiment_id": "e", "run_dir": run}
    with pytest.raises(Killed):
        run_strategy(make(Dying, **options), loss_app(), num_rounds=2)
    strategy = make(UDP, **options, resume=True)
    run_strategy(strategy, loss_app(), nodes=3, num_rounds=2)
    (losses,) = [r for r in strategy.releases if (r.phase, r.server_round) == ("evaluate", 2)]
    assert losses.clients == ("0", "1", "2", "3")


def test_a_server_that_dies_among_the_losses_gets_the_same_ones_again(tmp_path: Path) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    kept = {"state": tmp_path / "state", "insecure_seed": 2}
    options = {**OPTIONS, "patience": 1, "beta": 0.7, "experiment_id": "e"}
    unbroken = make(UDP, **options)
    expected = run_strategy(unbroken, loss_app(), num_rounds=6, insecure_seed=2)
    with pytest.raises(Killed):
        run_strategy(
            make(Dying, **options, run_dir=tmp_path / "run"), loss_app(), num_rounds=6, **kept
        )
    strategy = make(UDP, **options, run_dir=tmp_path / "run", resume=True)
    result = run_strategy(strategy, loss_app(), num_rounds=6, **kept)
    assert same(expected.arrays, result.arrays)
    assert strategy.T_history == unbroken.T_history
    assert strategy.releases == unbroken.releases
    for i in range(4):
        entries = Ledger(tmp_path / "state" / f"{i}.ledger", data_set=str(i)).entries()
        questions = [entry.question for entry in entries]
        assert len(set(questions)) == len(questions) == len(strategy.releases)


def record_app() -> ClientApp:
    app = ClientApp(mods=[as_mod(UDPClient)])

    def loaded(message: Message) -> torch.nn.Module:
        model = net()
        arrays = message.content.array_records["arrays"]
        set_arrays(model, {name: array.numpy() for name, array in arrays.items()})
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = loaded(message)
        train_per_record(model, *data(int(context.node_config["partition-id"])))
        trained = ArrayRecord({name: Array(array) for name, array in get_arrays(model).items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        evaluate_per_record(loaded(message), *data(int(context.node_config["partition-id"])))
        return Message(RecordDict({"metrics": MetricRecord({"x": 1.0})}), reply_to=message)

    return app


@pytest.mark.usefixtures("no_pld")
def test_at_record_level_every_record_weighs_the_same() -> None:
    initial = ArrayRecord({name: Array(array) for name, array in get_arrays(net()).items()})
    strategy = make(
        Watching,
        **OPTIONS,
        unit="record",
        learning_rate=0.5,
        epsilon=1000.0,
        loss_cap=1.2,
        keep_back=(),
    )
    result = run_strategy(strategy, record_app(), arrays=initial, num_rounds=2)
    model = net()
    set_arrays(model, {name: array.numpy() for name, array in result.arrays.items()})
    expected = sum(RECORDS[i] * mean_loss(model, i, 1.2) for i in range(4)) / sum(RECORDS)
    noises = [r.charge.noise_multiplier for r in strategy.releases if r.phase == "evaluate"]
    sigma = noises[-1] * 1.2 * math.sqrt(4) / sum(RECORDS)
    assert result.history[2]["scheme"]["V"] == pytest.approx(expected, abs=6 * sigma)
    assert sigma < 0.02
    for metrics in strategy.seen:
        assert set(metrics) == {"num-examples", "loss", "client"}
        assert metrics["num-examples"] == RECORDS[int(metrics["client"])]
    assert strategy.card(final=True).verify()


@pytest.mark.parametrize("value", [1.0, 3e38])
def test_before_its_charge_an_evaluation_never_sees_the_model(tmp_path: Path, value: float) -> None:
    """Else a server could have it fail, uncharged, for the records that it looks for."""
    seen: list[float] = []

    class Careful(StepClient):
        def evaluate(self, parameters: Any, config: Any) -> Any:
            model = net()
            set_arrays(model, dict(zip(model.state_dict(), parameters, strict=True)))
            outputs = model(torch.tensor(data(0)[0]))
            seen.append(len(Ledger(tmp_path / "a.ledger", data_set="a").entries()))
            if not torch.isfinite(outputs).all():
                raise ValueError("a record was met")
            evaluate_per_record(model, *data(0))
            return 0.0, 1, {}

    app = numpy_client_app(lambda context: UDPClient(Careful(0), context))
    arrays = {name: np.full_like(array, value) for name, array in get_arrays(net()).items()}
    header = Header(scheme="udp", experiment_id="e", phase="evaluate", server_round=1)
    content = {
        "arrays": ArrayRecord({name: Array(array) for name, array in arrays.items()}),
        RECORD: ConfigRecord(header.write(write(changed(unit="record")))),
    }
    node = {"client-id": "a", "privacy-state": str(tmp_path), "privacy-simulated": False}
    grid = InlineGrid(app, [node])
    with acting_as_server(grid.run_id):
        (node_id,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(RecordDict(content), node_id, "evaluate")])
    assert reply.has_error() == (value > 1)
    assert "charged" in reply.error.reason if reply.has_error() else True
    assert seen == [0, 1]
