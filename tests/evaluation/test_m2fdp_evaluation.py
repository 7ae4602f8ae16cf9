"""Private evaluation under M2FDP: the budget, the ledgers, zones of real nodes, refusals."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from apps import make, message_app, model_of, record, run_strategy
from conformance import Killed
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from grid_tap import tapped
from zones import zone_nodes

from flwr_privacy.accounting import Charge, new_accountant, spent
from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.clients.torch import get_arrays, set_arrays, train_poisson
from flwr_privacy.errors import CheckpointError, DeclinedError, InvalidParameterError, ProtocolError
from flwr_privacy.evaluation import EvaluationTerms, PrivateEvaluation
from flwr_privacy.evaluation.plan import planned_terms
from flwr_privacy.evaluation.sums import STATISTICS_NAME
from flwr_privacy.m2fdp import DeviceNoise, EventSchedule, RecordNoise, TierTree
from flwr_privacy.m2fdp.plan import M2FDPRoundPlan
from flwr_privacy.m2fdp.zone_average import NEIGHBOURS
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import M2FDP
from flwr_privacy.strategies.requests.instruction import noting
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import RECORD

HALF = TierTree.of_fanouts((2, 2), p=0.5)
APP = message_app([as_mod(M2FDPClient)])
RECORDS = 40
LINEAR = dict(get_arrays(torch.nn.Linear(2, 2)))
BY_RECORD = {"unit": "record", "sampling_rate": 0.2, "steps": 2, "delta": 1e-3}

pytestmark = pytest.mark.usefixtures("no_pld")


def strategy(kind: type[M2FDP] = M2FDP, **values: Any) -> Any:
    usual: dict[str, Any] = {"tree": HALF, "evaluation": "private", "epsilon": 9.0, "seed": 1}
    return make(kind, **{**usual, **values})


def run(chosen: Any, **options: Any) -> Any:
    return run_strategy(chosen, options.pop("app", APP), **options)


def record_app() -> ClientApp:
    """An app that trains on Poisson batches, and evaluates on its 40 records."""
    app = ClientApp(mods=[as_mod(M2FDPClient)])

    def loaded(message: Message, context: Context) -> tuple[Any, Any, Any]:
        net = torch.nn.Linear(2, 2)
        set_arrays(net, model_of(message.content["arrays"]))
        draws = np.random.default_rng(int(context.node_config["partition-id"]))
        features = draws.normal(size=(RECORDS, 2)).astype(np.float32)
        return net, features, (features[:, 0] > 0).astype(np.int64)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net, features, labels = loaded(message, context)
        train_poisson(net, features, labels, learning_rate=0.5)
        content = {"arrays": record(get_arrays(net)), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        net, features, labels = loaded(message, context)
        with torch.no_grad():
            right = net(torch.tensor(features)).argmax(1).numpy() == labels
        metrics = {"accuracy": float(right.mean()), "num-examples": RECORDS}
        counts = np.bincount(labels, minlength=2).tolist()
        metrics |= {f"label-{label}": count for label, count in enumerate(counts)}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def entries_of(folder: Path, client: Any) -> list[Any]:
    return list(Ledger(folder / f"{client}.ledger", data_set=str(client)).entries())


# -- The plan --------------------------------------------------------------------------------------


def plan_of(privacy: Any, schedule: EventSchedule, **option: Any) -> M2FDPRoundPlan:
    return M2FDPRoundPlan(
        tree=HALF,
        schedule=schedule,
        privacy=privacy,
        server_round=1,
        total_steps=6 * schedule.steps,
        rounds=6,
        evaluation=PrivateEvaluation(**option),
    )


PRIVACY = {
    "device": DeviceNoise(epsilon=4.0),
    "record": RecordNoise(epsilon=4.0, sampling_rate=0.05),
    "all records": RecordNoise(epsilon=4.0, sampling_rate=1.0),
}


@pytest.mark.parametrize(
    ("name", "events", "share", "every"),
    [
        ("device", {}, 0.05, 1),
        ("device", {1: 3}, 0.9, 2),
        ("all records", {1: 3}, 0.05, 6),
        ("record", {}, 0.05, 1),
        ("record", {1: 3}, 0.9, 2),
    ],
)
def test_trainings_and_planned_evaluations_fit_the_budget_together(
    name: str, events: Any, share: float, every: int
) -> None:
    """For the devices of every tier, added up by the accountant that their ledgers have."""
    schedule = EventSchedule(steps=6, events=events)
    plan = plan_of(PRIVACY[name], schedule, share=share, every=every)
    evaluation = plan.evaluation_terms().charge()
    assert plan.evaluations == {1: 6, 2: 3, 6: 1}[every]
    for boundary in plan.boundaries:
        ends = [e.index for e in plan.exchanges if (boundary, e.index) in plan._releases]
        trainings = [plan.release(boundary, end).charge() for end in ends]
        accountant = "rdp" if name == "record" else "gdp"
        order = []
        for server_round in range(1, 7):  # as they come: a round, and its evaluation
            order += trainings
            if server_round % every == 0:
                order.append(evaluation)
        done = new_accountant(accountant)
        for charge in order:
            assert charge is not None
            assert not done.would_exceed(charge, epsilon=4.0, delta=1e-5)
            done.compose(charge)
        assert 3.98 < done.epsilon(1e-5) <= 4.0  # all but what the cap by one order loses
        more = [*order, *(2 * [evaluation])]
        assert spent(more, delta=1e-5, accountant=accountant) > 4.0


def test_the_share_of_evaluations_is_that_of_the_option() -> None:
    plan = plan_of(PRIVACY["device"], EventSchedule(steps=6), share=0.3, every=2)
    training = plan.release(plan.boundaries[0], plan.exchanges[-1].index).charge()
    assert training is not None
    parts = 6 * training.noise_multiplier**-2, 3 * plan.evaluation_multiplier**-2
    assert parts[1] / sum(parts) == pytest.approx(0.3, rel=1e-6)
    with pytest.raises(ValueError, match="no evaluation is planned"):
        M2FDPRoundPlan(
            tree=HALF, schedule=EventSchedule(), privacy=DeviceNoise(), server_round=1,
            total_steps=1, rounds=1,
        ).evaluation_terms()  # fmt: skip


# -- Whole trainings -------------------------------------------------------------------------------


class Watching(M2FDP):
    """Notes what the replies to an evaluation hold."""

    def put(self, server_round: int, phase: str, *rest: Any, **options: Any) -> Any:
        if phase == "evaluate":
            *first, told = rest
            rest = (*first, noting(told, self.take, self._see))
        return super().put(server_round, phase, *rest, **options)

    def _see(self, reply: Any) -> None:
        seen = self.__dict__.setdefault("seen", [])
        seen.append((reply.client_id, dict(reply.metrics()), reply.arrays()))


@pytest.mark.parametrize("unit", ["device", "record"])
def test_every_release_is_on_the_ledgers_and_on_the_card(unit: str, tmp_path: Path) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    own: dict[str, Any] = {"run_dir": tmp_path / "run", "every": 2, "steps": 2}
    options: dict[str, Any] = {"state": tmp_path / "state", "num_rounds": 3}
    if unit == "record":
        own |= BY_RECORD
        options |= {"app": record_app(), "arrays": record(LINEAR)}
    chosen = strategy(Watching, **own)
    result = run(chosen, **options)
    card = chosen.card()
    assert card.verify()
    assert 8.9 < card.guarantee.spent <= 9.0
    expected = [("train", 1), ("train", 2), ("evaluate", 2), ("train", 3), ("evaluate", 3)]
    for i in range(4):
        entries = entries_of(tmp_path / "state", i)
        assert [(e.question.phase, e.question.server_round) for e in entries][-1:] == expected[-1:]
        assert Counter(
            e.question.server_round for e in entries if e.question.phase == "evaluate"
        ) == {2: 1, 3: 1}
        assert Counter(e.charge for e in entries) == Counter(card.charges()[str(i)])
        assert {e.unit for e in entries} == {"user" if unit == "device" else "record"}
    # Nothing but the noised statistics has left the devices, those of the trusted zone too.
    assert len(chosen.seen) == 8
    for _, metrics, arrays in chosen.seen:
        assert metrics == {"num-examples": 1}
        assert set(arrays) == {STATISTICS_NAME}
        assert arrays[STATISTICS_NAME].shape == (2,)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 3]
    names = {"accuracy", "accuracy_low", "accuracy_high", "evaluated"}
    assert [set(line["evaluate"]) for line in result.history[1:]] == [set(), names, names]


def test_every_device_adds_the_noise_that_it_is_charged_for() -> None:
    chosen = strategy(Watching, epsilon=1.0, share=0.5)
    run(chosen, num_rounds=40)
    (sigma,) = {r.charge.noise_multiplier for r in chosen.releases if r.phase == "evaluate"}
    step = CodeGrid(chosen.plan.evaluation_terms().grid).step
    for client in "0123":  # 0 and 1 have an aggregator that they trust
        drawn = np.array(
            [a[STATISTICS_NAME] * step for name, _, a in chosen.seen if name == client]
        )
        assert drawn.shape == (40, 2)
        # Three standard errors of 80 draws: 3 / sqrt(160).
        assert drawn.std() == pytest.approx(sigma, rel=0.24)


def test_the_metrics_are_near_the_devices_own_where_the_budget_is_large() -> None:
    result = run(strategy(epsilon=1e7, every=2), num_rounds=2)
    found = result.evaluate_metrics_clientapp[2]
    assert found["accuracy"] == pytest.approx(0.15, abs=0.01)  # the mean of 0, 0.1, 0.2, 0.3
    assert found["evaluated"] == pytest.approx(4, abs=0.1)
    chosen = strategy(**{**BY_RECORD, "epsilon": 500.0}, label_histogram=2, every=2, share=0.5)
    result = run(chosen, app=record_app(), arrays=record(LINEAR), num_rounds=2)
    found = result.evaluate_metrics_clientapp[2]
    labels = np.concatenate(
        [np.random.default_rng(i).normal(size=(RECORDS, 2))[:, 0] > 0 for i in range(4)]
    )
    assert found["evaluated"] == pytest.approx(160, abs=5)
    assert found["label_histogram"] == pytest.approx(np.bincount(labels), abs=5)
    assert found["accuracy_low"] <= found["accuracy"] <= found["accuracy_high"]


def test_only_devices_that_have_trained_are_asked_at_record_level(tmp_path: Path) -> None:
    """The oldest charge of a ledger decides on its accountant: it must be that of a sample."""
    chosen = strategy(**BY_RECORD, fraction_train=0.5)
    options: dict[str, Any] = {"app": record_app(), "arrays": record(LINEAR), "num_rounds": 4}
    run(chosen, **options, state=tmp_path)
    for i in range(4):
        phases = [entry.question.phase for entry in entries_of(tmp_path, i)]
        assert phases[:1] != ["evaluate"]
    trained: set[str] = set()
    for release in chosen.releases:
        if release.phase == "evaluate":
            assert set(release.clients) == trained
        else:
            trained |= set(release.clients)
    assert chosen.card().guarantee.spent <= 9.0


def test_a_device_whose_training_was_lost_is_not_asked_before_it_trains() -> None:
    chosen = strategy(**BY_RECORD)
    faults = [Fault(kind="drop", client="3", server_round=1, phase="train")]
    options: dict[str, Any] = {"app": record_app(), "arrays": record(LINEAR), "num_rounds": 2}
    result = run(chosen, **options, faults=faults, timeout=2)
    asked = {r.server_round: set(r.clients) for r in chosen.releases if r.phase == "evaluate"}
    assert asked[1] == set("012")
    assert asked[2] in (set("012"), set("0123"))
    assert [line["refused"] for line in result.history[1:]] == [{}, {}]


def test_with_nodes_for_aggregators_devices_evaluate_and_aggregators_do_not(
    tmp_path: Path,
) -> None:
    """Their policies stay as they are, and the server gets noised counts and nothing sealed."""
    asked: list[Message] = []
    chosen = strategy(Watching, relay=True, epsilon=1e5, every=2)
    nodes = zone_nodes(HALF, tmp_path, **{"privacy-state": str(tmp_path)})
    result = run(chosen, nodes=nodes, num_rounds=2, before=tapped(asked.append))
    questions = [m for m in asked if m.content[RECORD]["phase"] == "evaluate"]
    assert len(questions) == 4
    assert {r.clients for r in chosen.releases if r.phase == "evaluate"} == {("0", "1", "2", "3")}
    assert {name for name, _, _ in chosen.seen} == set("0123")
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(0.15, abs=0.1)
    (aggregator,) = [n["client-id"] for n in nodes if n["m2fdp-role"] == "aggregator"]
    assert all(e.question.phase != "evaluate" for e in entries_of(tmp_path, aggregator))


def test_a_fraction_is_one_of_the_devices_not_of_their_aggregators(tmp_path: Path) -> None:
    chosen = strategy(relay=True, fraction_evaluate=0.8)  # 4 devices and an aggregator
    nodes = zone_nodes(HALF, tmp_path, **{"privacy-state": str(tmp_path)})
    run(chosen, nodes=nodes, num_rounds=2)
    asked = [len(r.clients) for r in chosen.releases if r.phase == "evaluate"]
    assert asked == [3, 3]


class Dying(M2FDP):
    """Ends when two of the answers to the evaluation of round 2 are there."""

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        if server_round == 2:
            replies = iter(replies)
            next(replies), next(replies)
            raise Killed
        return super().aggregate_evaluate(server_round, replies)


def test_a_server_that_dies_among_the_answers_pays_once(tmp_path: Path) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    own: dict[str, Any] = {"experiment_id": "e", "run_dir": tmp_path / "run"}
    kept: dict[str, Any] = {"state": tmp_path / "state", "num_rounds": 4}
    with pytest.raises(Killed):
        run(strategy(Dying, **own), **kept)
    with pytest.raises(CheckpointError, match="evaluation"):
        run(strategy(**own, every=3, resume=True), **kept)
    chosen = strategy(**own, resume=True)
    result = run(chosen, **kept)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3, 4]
    for i in range(4):
        questions = [entry.question for entry in entries_of(tmp_path / "state", i)]
        assert len(set(questions)) == len(questions) == 8
    assert 8.9 < result.guarantee.spent <= 9.0


def test_controlled_trainings_evaluate_too() -> None:
    chosen = strategy(
        control="adaptive",
        max_steps=5,
        total_steps=20,
        steps=3,
        epsilon=50.0,
        every=2,
        clipping_norm=0.5,
    )
    result = run(chosen, num_rounds=4)
    assert set(result.evaluate_metrics_clientapp) <= {2, 4}
    assert result.evaluate_metrics_clientapp
    assert chosen.card().guarantee.spent <= 50.0


def test_without_an_evaluation_nobody_is_asked() -> None:
    chosen = make(M2FDP, tree=HALF, fraction_evaluate=1.0, epsilon=9.0)
    assert chosen.fraction_evaluate == 0
    assert run(chosen, num_rounds=1).evaluate_metrics_clientapp == {}


# -- Refusals --------------------------------------------------------------------------------------

PAPER = {"unit": "paper", "alpha": 0.1, "sampling_rate": 0.1}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (PAPER, "None with PaperNoise: its noise does not keep a budget"),
        ({"unit": "none", "epsilon": None}, "None with NoNoise: there is no budget"),
        ({**BY_RECORD, "loss_cap": 2.0}, r"loss_cap = 2\.0: expected None at record level"),
        ({**BY_RECORD, "accuracy": "f1"}, "accuracy = 'f1'"),
        ({"fraction_evaluate": 0.0}, "fraction_evaluate = 0"),
        ({"evaluate_metrics_aggr_fn": lambda *_: None}, "evaluate_metrics_aggr_fn"),
        ({"evaluation": 3}, "evaluation = 3: expected PrivateEvaluation"),
    ],
)
def test_what_does_not_go_with_an_evaluation_is_refused(changes: Any, text: str) -> None:
    values = {"tree": HALF, "evaluation": "private", "epsilon": 9.0, **changes}
    with pytest.raises(InvalidParameterError, match=text):
        run(make(M2FDP, **{k: v for k, v in values.items() if v is not None}))


class Node:
    """One deployed device, or an aggregator, that is asked to evaluate a model."""

    def __init__(self, folder: Path, policy: str = "", **config: Any) -> None:
        self.folder, self.evaluated = folder, 0
        (folder / "policy.toml").write_text(policy)
        self.config = {"client-id": "a", "privacy-state": str(folder), **config}
        self.config["privacy-policy"] = str(folder / "policy.toml")

    def ask(self, asked: EvaluationTerms, **changes: Any) -> Any:
        def evaluate() -> Any:
            self.evaluated += 1
            return {"accuracy": 0.5, "num-examples": 8}

        place = {"experiment-id": "e", "round": 1, "request": 0, "told": b""}
        client = M2FDPClient(None, Context(1, 1, self.config, RecordDict(), {}))
        fields = {**write(asked), **place, **changes}
        return client.answer_evaluation({"w": np.zeros(3)}, fields, evaluate)

    def charges(self) -> list[Charge]:
        return [e.charge for e in entries_of(self.folder, "a")]


def terms(unit: str = "user", **values: Any) -> EvaluationTerms:
    usual: dict[str, Any] = {"noise_multiplier": 2.0, "gap": 1e-4, "epsilon": 3.0, "delta": 1e-5}
    usual |= {"neighbours": NEIGHBOURS[unit]}
    return planned_terms(PrivateEvaluation(), unit=unit, **{**usual, **values})


@pytest.mark.parametrize("unit", ["user", "record"])
def test_a_server_that_asks_too_often_meets_the_budget(unit: str, tmp_path: Path) -> None:
    node, planned = Node(tmp_path), 0
    one = Charge(noise_multiplier=2.0, neighbours=NEIGHBOURS[unit], gap=1e-4)
    while spent([replace(one, count=planned + 1)], delta=1e-5) <= 3.0:
        planned += 1
    for server_round in range(1, planned + 1):
        (arrays, _) = node.ask(terms(unit), round=server_round)
        assert set(arrays) == {STATISTICS_NAME}
    with pytest.raises(DeclinedError, match="the budget is spent"):
        node.ask(terms(unit), round=planned + 1)
    assert len(node.charges()) == node.evaluated == planned > 1
    assert math.isclose(terms().sigma(), 2.0)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            terms("record", neighbours="replace_one"),
            "neighbours = 'replace_one': expected one of 'add_remove'",
        ),
        (terms(by_server=True), "without noise|no noise|allow_unprotected"),
        (terms(parties=5), "outside of a secure sum"),
    ],
)
def test_a_server_that_asks_for_something_else_is_refused(
    asked: EvaluationTerms, text: str, tmp_path: Path
) -> None:
    """Also if the parent is trusted: the server is not."""
    node = Node(tmp_path, 'trusted_parents = ["ward"]\n')
    with pytest.raises((InvalidParameterError, DeclinedError), match=text):
        node.ask(asked)
    assert (node.evaluated, node.charges()) == (0, [])


def test_an_aggregator_evaluates_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, **{"m2fdp-role": "aggregator"})
    with pytest.raises(ProtocolError, match="evaluates nothing: it has m2fdp-role = 'aggregator'"):
        node.ask(terms())
    assert (node.evaluated, node.charges()) == (0, [])


@pytest.mark.parametrize("policy", ["min_noise_multiplier = 4.0\n", 'units = ["record"]\n'])
def test_a_policy_binds_an_evaluation(policy: str, tmp_path: Path) -> None:
    node = Node(tmp_path, policy)
    with pytest.raises(DeclinedError):
        node.ask(terms())
    assert (node.evaluated, node.charges()) == (0, [])
