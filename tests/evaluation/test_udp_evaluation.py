"""Private evaluation under UDP: the budget, the ledgers, the card, both kinds of app, refusals."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from apps import MODEL, StepClient, make, message_app, run_strategy, same
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.accounting import Charge, new_accountant, spent
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.clients import UDPClient, as_mod, numpy_client_app
from flwr_privacy.clients.torch import (
    get_arrays,
    initialise,
    linear,
    set_arrays,
    train_per_record,
)
from flwr_privacy.errors import ChargedFailureError, DeclinedError, InvalidParameterError
from flwr_privacy.evaluation import EvaluationTerms
from flwr_privacy.evaluation.plan import planned_terms
from flwr_privacy.evaluation.sums import STATISTICS_NAME
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.app.server_app import build_strategy
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.strategies import UDP, PrivateEvaluation, RecordLevel
from flwr_privacy.strategies.requests.instruction import noting
from flwr_privacy.udp import UDPNoisePlan, UDPPlan
from flwr_privacy.wire.fields import write


def app(client: type[UDPClient] = UDPClient) -> ClientApp:
    return message_app([as_mod(client)])


def numpy_app(evaluate: Any = None) -> ClientApp:
    class Own(StepClient):
        def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            found = super().evaluate(parameters, config) if evaluate is None else evaluate(self)
            return found

    def client_fn(context: Context) -> UDPClient:
        return UDPClient(Own(int(context.node_config["partition-id"])), context)

    return numpy_client_app(client_fn)


def entries_of(folder: Path, client: int) -> list[Any]:
    return list(Ledger(folder / f"{client}.ledger", data_set=str(client)).entries())


# -- The plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["gdp_fixed", "gdp", "gdp_worst", "zcdp"])
@pytest.mark.parametrize("share", [0.05, 0.4])
@pytest.mark.parametrize("evaluations", [1, 7, 40])
def test_trainings_and_planned_evaluations_fit_the_budget_together(
    noise: str, share: float, evaluations: int
) -> None:
    """Added up by the accountant, for a client that takes part in as many as are planned."""
    plan = UDPNoisePlan(
        noise=noise,
        epsilon=2.0,
        delta=1e-5,
        rounds=40,
        q=1.0,
        validation_share=share,
        validations=evaluations,
    )
    trainings, left = [], 0.0
    for t in range(40):
        z = plan.multiplier(40 - t, left) if plan.spends else plan.noise_multiplier
        assert z is not None
        trainings.append(Charge(neighbours="replace_one", noise_multiplier=z, gap=plan.gap))
        left += z**-2
    evaluated = Charge(
        neighbours="replace_one",
        noise_multiplier=plan.validation_multiplier,
        gap=plan.gap,
        count=evaluations,
    )
    total = spent([*trainings, evaluated], delta=1e-5)
    assert total <= 2.0
    # Nothing is wasted either; the paper's moments prove less than a budget has.
    assert total >= (1.9 if noise == "zcdp" else 2.0 * (1 - 1e-6)) or noise == "zcdp"
    more = Charge(
        neighbours="replace_one",
        noise_multiplier=plan.validation_multiplier,
        gap=plan.gap,
        count=evaluations + 1,
    )
    assert noise == "zcdp" or spent([*trainings, more], delta=1e-5) > 2.0


# -- Whole trainings -----------------------------------------------------------------------------


class Watching(UDP):
    """Notes what the replies to an evaluation hold."""

    def put(self, server_round: int, phase: str, *rest: Any, **options: Any) -> Any:
        if phase == "evaluate":
            *first, told = rest
            rest = (*first, noting(told, self.take, self._see))
        return super().put(server_round, phase, *rest, **options)

    def _see(self, reply: Any) -> None:
        seen = self.__dict__.setdefault("seen", [])
        seen.append((reply.client_id, dict(reply.metrics()), reply.arrays()))


def test_every_release_is_on_the_ledgers_and_on_the_card(tmp_path: Path) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    strategy = make(
        Watching, epsilon=8.0, evaluation="private", every=2, run_dir=tmp_path / "run", seed=1
    )
    result = run_strategy(strategy, app(), state=tmp_path / "state", num_rounds=5)
    card = PrivacyCard.from_json((tmp_path / "run" / "privacy-card.json").read_text())
    card.verify()
    assert card.guarantee.spent == pytest.approx(8.0, rel=1e-6)
    assert card.guarantee.spent <= 8.0
    expected = [(p, r) for r in range(1, 6) for p in ("train", "evaluate")]
    expected = [(p, r) for p, r in expected if p == "train" or r in (2, 4, 5)]
    assert [(r.phase, r.server_round) for r in card.releases] == expected
    assert all(release.clients == ("0", "1", "2", "3") for release in card.releases)
    for i in range(4):
        entries = entries_of(tmp_path / "state", i)
        assert [entry.charge for entry in entries] == card.charges()[str(i)]
        assert [(e.question.phase, e.question.server_round) for e in entries] == expected
        assert spent([e.charge for e in entries], delta=1e-5) == pytest.approx(8.0, rel=1e-6)
        both = {
            phase: sum(e.charge.noise_multiplier**-2 for e in entries if e.question.phase == phase)
            for phase in ("train", "evaluate")
        }
        assert both["evaluate"] / sum(both.values()) == pytest.approx(0.05, rel=1e-6)
    # Nothing but the noised statistics has left the nodes.
    assert len(strategy.seen) == 12
    for _, metrics, arrays in strategy.seen:
        assert metrics == {"num-examples": 1}
        assert set(arrays) == {STATISTICS_NAME}
        assert arrays[STATISTICS_NAME].shape == (2,)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 5]
    assert [set(line["evaluate"]) for line in result.history[1:]] == [
        set() if r in (1, 3) else {"accuracy", "accuracy_low", "accuracy_high", "evaluated"}
        for r in range(1, 6)
    ]


def test_the_noise_of_the_answers_is_what_they_are_charged_for() -> None:
    strategy = make(Watching, epsilon=1.0, evaluation="private", share=0.5)
    run_strategy(strategy, app(), nodes=20, num_rounds=40)
    (sigma,) = {r.charge.noise_multiplier for r in strategy.releases if r.phase == "evaluate"}
    step = CodeGrid(strategy._begun().evaluation_terms().grid).step
    drawn = np.array([arrays[STATISTICS_NAME] * step for _, _, arrays in strategy.seen])
    assert len(drawn) == 800
    assert drawn.std() == pytest.approx(sigma, rel=0.08)


def test_both_kinds_of_app_and_cohorts_say_the_same() -> None:
    found = []
    for own, nodes in ((app(), 4), (numpy_app(), 4), (numpy_app(), 2)):
        options: dict[str, Any] = {"experiment_id": "e", "seed": 1, "epsilon": 50.0}
        strategy = make(
            UDP, **options, evaluation="private", **({"clients": 4} if nodes == 2 else {})
        )
        result = run_strategy(strategy, own, nodes=nodes, insecure_seed=4)
        assert "insecure seed" in result.guarantee.void
        found.append((result.arrays, result.evaluate_metrics_clientapp, strategy.releases))
    for other in found[1:]:
        assert same(found[0][0], other[0])
        assert other[1:] == found[0][1:]


def test_the_metrics_are_near_the_clients_own_where_the_budget_is_large() -> None:
    strategy = make(UDP, epsilon=1e7, evaluation="private", loss_cap=4.0)
    result = run_strategy(strategy, numpy_app(), num_rounds=2)
    metrics = result.evaluate_metrics_clientapp[2]
    assert metrics["accuracy"] == pytest.approx(0.15, abs=0.01)  # the mean of 0, 0.1, 0.2, 0.3
    assert metrics["loss"] == pytest.approx(1.0, abs=0.05)
    assert metrics["evaluated"] == pytest.approx(4, abs=0.05)
    assert metrics["accuracy_low"] < metrics["accuracy"] < metrics["accuracy_high"]


def test_a_part_of_the_clients_evaluates_and_nobody_more_often_than_planned(
    tmp_path: Path,
) -> None:
    strategy = make(
        UDP, epsilon=3.0, fraction_evaluate=0.5, fraction_train=0.5, evaluation="private", seed=2
    )
    result = run_strategy(strategy, app(), num_rounds=12, nodes=6, state=tmp_path)
    planned = strategy._begun().evaluations
    asked = [r.clients for r in strategy.releases if r.phase == "evaluate"]
    assert planned is not None
    assert 6 <= planned < 12
    assert {len(clients) for clients in asked} <= {1, 2, 3}
    for i in range(6):
        phases = [entry.question.phase for entry in entries_of(tmp_path, i)]
        assert phases.count("evaluate") <= planned
    assert result.guarantee.spent <= 3.0


def test_who_was_asked_as_often_as_planned_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would pay with what is there for its trainings."""
    monkeypatch.setattr(UDPPlan, "evaluations", property(lambda plan: 2))
    strategy = make(UDP, epsilon=3.0, evaluation="private")
    run_strategy(strategy, app(), num_rounds=5, state=tmp_path)
    for i in range(4):
        phases = [entry.question.phase for entry in entries_of(tmp_path, i)]
        assert (phases.count("evaluate"), phases.count("train")) == (2, 5)


class Noted(UDP):
    """Notes the grids that clients are told."""

    def put(self, server_round: int, phase: str, *rest: Any, **options: Any) -> Any:
        if phase == "evaluate":
            told = [rest[-1].fields, *(record["flwr-privacy"] for record in rest[-1].own.values())]
            self.__dict__.setdefault("grids", set()).update(fields["grid"] for fields in told)
        return super().put(server_round, phase, *rest, **options)


@pytest.mark.parametrize("noise", ["gdp_fixed", "gdp"])
def test_clients_with_budgets_of_their_own_keep_them(noise: str, tmp_path: Path) -> None:
    budgets = {"0": 1.0, "1": 2.0, "2": 4.0, "3": 8.0}
    strategy = make(UDP, epsilon=budgets, noise=noise, evaluation="private", share=0.2)
    result = run_strategy(strategy, app(), state=tmp_path, num_rounds=4)
    for i, epsilon in enumerate(budgets.values()):
        charges = [entry.charge for entry in entries_of(tmp_path, i)]
        assert len(charges) == 8
        assert spent(charges, delta=1e-5) == pytest.approx(epsilon, rel=1e-6)
    assert len(result.evaluate_metrics_clientapp) == 4
    assert strategy.card(final=True).verify()


def test_clients_with_budgets_of_their_own_have_one_grid() -> None:
    """One with little noise needs a fine grid, and codes of two grids cannot be added up."""
    options: dict[str, Any] = {"noise": "gdp_fixed", "evaluation": "private", "share": 0.5}
    alike = make(Noted, epsilon=dict.fromkeys("0123", 1e9), **options)
    metrics = run_strategy(alike, numpy_app()).evaluate_metrics_clientapp[3]
    assert metrics["accuracy"] == pytest.approx(0.15, abs=0.001)
    strategy = make(Noted, epsilon={"0": 1e9, "1": 1e9, "2": 1e9, "3": 1e4}, **options)
    metrics = run_strategy(strategy, numpy_app()).evaluate_metrics_clientapp[3]
    assert metrics["accuracy"] == pytest.approx(0.15, abs=0.2)
    assert len(strategy.__dict__["grids"]) == 1
    assert strategy.__dict__["grids"] == alike.__dict__["grids"]


def test_a_client_whose_evaluation_fails_or_that_has_no_data_is_not_told_apart(
    tmp_path: Path,
) -> None:
    def evaluate(client: StepClient) -> Any:
        if client.client == 1:
            raise FloatingPointError("patient 17 was met")
        return 1.0, 0 if client.client == 2 else 5, {"accuracy": 1.0}

    nodes: list[dict[str, Any]] = [
        {"client-id": str(i), "partition-id": i, "privacy-simulated": False} for i in range(4)
    ]
    for node in nodes:
        node["privacy-state"] = str(tmp_path)
    strategy = make(Watching, epsilon=1e7, evaluation="private")
    result = run_strategy(strategy, numpy_app(evaluate), nodes=nodes, num_rounds=2)
    metrics = result.evaluate_metrics_clientapp[2]
    assert metrics["evaluated"] == pytest.approx(2, abs=0.05)
    assert metrics["accuracy"] == pytest.approx(1.0, abs=0.05)
    assert len(strategy.seen) == 8
    assert {tuple(arrays) for _, _, arrays in strategy.seen} == {(STATISTICS_NAME,)}
    assert all(line["refused"] == {} for line in result.history[1:])
    for i in range(4):
        assert len(entries_of(tmp_path, i)) == 4


FEATURES, CLASSES, RECORDS = 5, 3, (20, 30, 40, 50)


def net() -> Any:
    return initialise(lambda: linear(FEATURES, CLASSES), 0)


def data(client: int) -> tuple[Any, Any]:
    rng, count = np.random.default_rng(client), RECORDS[client]
    features = rng.normal(size=(count, FEATURES)).astype(np.float32)
    return features, rng.integers(0, CLASSES, count)


def right(model: Any, client: int) -> int:
    features, labels = data(client)
    with torch.no_grad():
        return int((model(torch.tensor(features)).argmax(1).numpy() == labels).sum())


def record_app() -> ClientApp:
    own = ClientApp(mods=[as_mod(UDPClient)])

    def loaded(message: Message) -> Any:
        model, arrays = net(), message.content.array_records["arrays"]
        set_arrays(model, {name: array.numpy() for name, array in arrays.items()})
        return model

    @own.train()
    def train(message: Message, context: Context) -> Message:
        model = loaded(message)
        train_per_record(model, *data(int(context.node_config["partition-id"])))
        trained = ArrayRecord({name: Array(array) for name, array in get_arrays(model).items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    @own.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        count = right(loaded(message), client)
        metrics = {"acc": count / RECORDS[client], "num-examples": RECORDS[client]}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return own


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.usefixtures("no_pld")
def test_at_record_level_every_record_weighs_the_same(
    shared: bool, summed: bool, tmp_path: Path
) -> None:
    if shared and not summed:
        return
    strategy = Watching(
        privacy=RecordLevel(epsilon=200.0, learning_rate=0.5, shared_noise=shared),
        secure_sum=SecureSum() if summed else None,
        evaluation=PrivateEvaluation(accuracy="acc", every=2),
        keep_back=(),
    )
    initial = ArrayRecord({name: Array(array) for name, array in get_arrays(net()).items()})
    result = run_strategy(strategy, record_app(), arrays=initial, num_rounds=4, state=tmp_path)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4]
    model = net()
    set_arrays(model, {name: array.numpy() for name, array in result.arrays.items()})
    expected = sum(right(model, i) for i in range(4)) / sum(RECORDS)
    metrics = result.evaluate_metrics_clientapp[4]
    width = metrics["acc_high"] - metrics["acc_low"]
    assert 0 < width < 0.2
    assert metrics["acc"] == pytest.approx(expected, abs=1.5 * width)
    assert metrics["evaluated"] == sum(RECORDS)
    for i in range(4):
        charges = [entry.charge for entry in entries_of(tmp_path, i)]
        assert len(charges) == 6
        assert spent(charges, delta=1e-5) == pytest.approx(200.0, rel=1e-6)
    assert strategy.card(final=True).verify()


@pytest.mark.parametrize("shared", [False, True])
def test_evaluations_go_into_a_secure_sum_of_those_who_trained(
    shared: bool, tmp_path: Path
) -> None:
    strategy = make(
        Watching,
        epsilon=1e5,
        shared_noise=shared,
        secure_sum=SecureSum(),
        evaluation="private",
        every=2,
    )
    faults = [Fault(kind="drop", client="5", server_round=2, phase="train")]
    result = run_strategy(
        strategy, app(), nodes=6, num_rounds=4, state=tmp_path, faults=faults, timeout=2
    )
    assert [line["skipped"] for line in result.history[1:]] == [False] * 4
    # Client 5 did not train in round 2, and is not asked then.
    first, second = (result.evaluate_metrics_clientapp[r] for r in (2, 4))
    assert first["accuracy"] == pytest.approx(0.2, abs=0.1)
    assert first["evaluated"] == pytest.approx(5, abs=0.3)
    assert second["accuracy"] == pytest.approx(0.25, abs=0.1)
    assert second["evaluated"] == pytest.approx(6, abs=0.3)
    # The server saw masked vectors only.
    names = {name for _, _, arrays in strategy.__dict__.get("seen", []) for name in arrays}
    assert STATISTICS_NAME not in names
    phases = [[e.question.phase for e in entries_of(tmp_path, i)].count("evaluate") for i in (0, 5)]
    assert phases == [2, 1]
    card = strategy.card(final=True)
    assert card.verify()
    assert card.guarantee.spent <= 1e5


def test_an_evaluation_whose_sum_fails_leaves_the_training_alone(tmp_path: Path) -> None:
    strategy = make(
        UDP, epsilon=1e5, shared_noise=True, secure_sum=SecureSum(), evaluation="private"
    )
    faults = [Fault(kind="drop", client="5", server_round=2, phase="evaluate")]
    result = run_strategy(
        strategy, app(), nodes=6, num_rounds=3, state=tmp_path, faults=faults, timeout=2
    )
    assert [line["skipped"] for line in result.history[1:]] == [False] * 3
    assert sorted(result.evaluate_metrics_clientapp) == [1, 3]
    # It is charged all the same: the answers have left.
    assert [e.question.phase for e in entries_of(tmp_path, 0)] == ["train", "evaluate"] * 3
    assert [r.phase for r in strategy.releases] == ["train", "evaluate"] * 3


class Killed(Exception):
    pass


class Dying(UDP):
    """Ends when two of the answers of round 2 are there."""

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        if server_round == 2:
            replies = iter(replies)
            next(replies), next(replies)
            raise Killed
        return super().aggregate_evaluate(server_round, replies)


@pytest.mark.parametrize("summed", [False, True])
def test_a_server_that_dies_among_the_answers_pays_once(summed: bool, tmp_path: Path) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {"experiment_id": "e", "evaluation": "private", "epsilon": 8.0}
    options |= {"secure_sum": SecureSum() if summed else None, "run_dir": tmp_path / "run"}
    kept: dict[str, Any] = {"state": tmp_path / "state", "num_rounds": 4, "nodes": 5}
    with pytest.raises(Killed):
        run_strategy(make(Dying, **options), app(), **kept)
    strategy = make(UDP, **options, resume=True)
    result = run_strategy(strategy, app(), **kept)
    assert [line["skipped"] for line in result.history[1:]] == [False] * 4
    # The secrets of a sum are gone with the server that had them.
    assert sorted(result.evaluate_metrics_clientapp) == ([1, 3, 4] if summed else [1, 2, 3, 4])
    for i in range(5):
        questions = [entry.question for entry in entries_of(tmp_path / "state", i)]
        # Under a sum some were never reached by the question that broke off; the card has it.
        assert len(set(questions)) == len(questions)
        assert len(questions) in ((7, 8) if summed else (8,))
        assert len(strategy.card().charges()[str(i)]) == 8
    assert result.guarantee.spent <= 8.0


# -- Beside samples of the records ---------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.4])
@pytest.mark.parametrize("evaluations", [1, 5])
@pytest.mark.usefixtures("no_pld")
def test_sampled_trainings_leave_room_for_the_evaluations(share: float, evaluations: int) -> None:
    """Added up in the order of the rounds, by the filter that a node's ledger goes by."""
    plan = UDPNoisePlan(
        noise="gdp_fixed",
        epsilon=3.0,
        delta=1e-5,
        rounds=10,
        q=1.0,
        sampling_rate=0.1,
        validation_share=share,
        validations=evaluations,
    )
    one = {"neighbours": "replace_one", "gap": plan.gap}
    training = Charge(**one, noise_multiplier=plan.noise_multiplier, sampling=0.1)
    evaluation = Charge(**one, noise_multiplier=plan.validation_multiplier)
    charges = [training]
    rounds = [*[evaluation] * evaluations, *[training] * 9]
    for charge in rounds:
        assert not new_accountant("rdp", charges).would_exceed(charge, epsilon=3.0, delta=1e-5)
        charges.append(charge)
    assert 2.8 < spent(charges, delta=1e-5, accountant="rdp") <= 3.0
    for more in (training, evaluation):
        assert new_accountant("rdp", charges).would_exceed(more, epsilon=3.0, delta=1e-5)
    without = UDPNoisePlan(
        noise="gdp_fixed", epsilon=3.0, delta=1e-5, rounds=10, q=1.0, sampling_rate=0.1
    )
    assert plan.noise_multiplier > without.noise_multiplier


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.usefixtures("no_pld")
def test_clients_with_samples_evaluate_after_their_first_training(
    summed: bool, tmp_path: Path
) -> None:
    strategy = UDP(
        fraction_train=1.0 if summed else 0.5,
        min_available_nodes=4,
        privacy=RecordLevel(epsilon=6.0, delta=1e-3, learning_rate=0.5, sampling_rate=0.3),
        evaluation=PrivateEvaluation(accuracy="acc"),
        secure_sum=SecureSum() if summed else None,
    )
    initial = ArrayRecord({n: Array(a) for n, a in get_arrays(net()).items()})
    result = run_strategy(strategy, record_app(), arrays=initial, num_rounds=4, state=tmp_path)
    assert set(result.evaluate_metrics_clientapp) == {1, 2, 3, 4}
    trained: set[str] = set()
    for release in strategy.releases:
        if release.phase == "train":
            trained |= set(release.clients)
        else:
            assert set(release.clients) == trained
    for i in range(4):
        entries = entries_of(tmp_path, i)
        assert [entry.question.phase for entry in entries][:1] in (["train"], [])
        assert len({entry.charge.sampling for entry in entries}) == (2 if entries else 0)
    assert strategy.card(final=True).verify()
    assert result.guarantee.spent <= 6.0


# -- Options -------------------------------------------------------------------------------------


def test_without_an_evaluation_nobody_is_asked() -> None:
    strategy = make(UDP, fraction_evaluate=1.0)
    result = run_strategy(strategy, app(), num_rounds=2)
    assert strategy.fraction_evaluate == 0
    assert result.evaluate_metrics_clientapp == {}
    assert {release.phase for release in strategy.releases} == {"train"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"noise": "none"}, "noise = 'none'"),
        ({"noise": "paper"}, "noise = 'paper'"),
        (
            {"unit": "record", "learning_rate": 1.0, "loss_cap": 3.0},
            "loss_cap = 3.0: expected None",
        ),
        ({"fraction_evaluate": 0.0}, "fraction_evaluate = 0"),
        ({"schedule": "discounting", "validation": "clients"}, "validation = 'clients'"),
        ({"evaluate_metrics_aggr_fn": lambda *_: MetricRecord({})}, "evaluate_metrics_aggr_fn"),
        ({"evaluation": "publicly"}, "evaluation = 'publicly': expected one of 'private'"),
        ({"evaluation": {"evry": 2}}, "PrivateEvaluation has no 'evry': the nearest is 'every'"),
        ({"evaluation": {"every": 0}}, "every = 0"),
        ({"share": 1.0}, "share = 1.0"),
        ({"loss_cap": 0.0}, "loss_cap = 0.0"),
        ({"accuracy": ""}, "accuracy = ''"),
    ],
)
def test_what_does_not_go_with_an_evaluation_is_refused(changes: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(UDP, **{"evaluation": "private", **changes})


@pytest.mark.parametrize(("given", "asked"), [(0.0, 1.0), (0.25, 0.25)])
def test_in_a_simulation_all_clients_evaluate_unless_a_part_is_chosen(
    given: float, asked: float
) -> None:
    own = {"unit": "user", "evaluation": {"every": 2}}
    settings = Settings(scheme="udp", strategy=own, fraction_evaluate=given)
    strategy = build_strategy(settings, None)
    assert strategy.fraction_evaluate == asked
    assert (
        build_strategy(Settings(scheme="udp", strategy={"unit": "user"}), None).fraction_evaluate
        == 0
    )


def test_a_table_of_parameters_is_an_evaluation() -> None:
    strategy = make(UDP, evaluation={"every": 2, "share": 0.1})
    assert strategy.evaluation == PrivateEvaluation(every=2, share=0.1)


def test_the_log_says_what_little_an_evaluation_can_tell(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run_strategy(make(UDP, epsilon=1.0, evaluation="private"), app())
    assert "by up to 0.5 (95 %) with 4 clients: it will tell next to nothing" in caplog.text


# -- A node --------------------------------------------------------------------------------------


class Node:
    """One deployed client that is asked to evaluate a model."""

    def __init__(self, folder: Path, evaluate: Any) -> None:
        self.config: dict[str, Any] = {"client-id": "ward-7", "privacy-state": str(folder)}
        self.folder, self.evaluate, self.evaluated = folder, evaluate, 0

    def ask(self, terms: EvaluationTerms, **changes: Any) -> Any:
        def evaluate() -> Any:
            self.evaluated += 1
            return self.evaluate()

        context = Context(1, 1, self.config, RecordDict(), {})
        question = {"experiment-id": "e", "round": 1, "request": 0, **changes}
        client = UDPClient(None, context)
        return client.answer_evaluation(MODEL, {**write(terms), **question}, evaluate)

    def charges(self) -> list[Charge]:
        ledger = Ledger(self.folder / "ward-7.ledger", data_set="ward-7")
        return [entry.charge for entry in ledger.entries()]


GOOD = {"accuracy": 0.5, "num-examples": 9}


def terms(**values: Any) -> EvaluationTerms:
    usual: dict[str, Any] = {"unit": "user", "noise_multiplier": 2.0, "gap": 1e-4}
    usual |= {"neighbours": "replace_one"}
    return planned_terms(PrivateEvaluation(), **{**usual, "epsilon": 3.0, "delta": 1e-5, **values})


def test_a_server_that_asks_more_often_than_was_planned_meets_the_budget(tmp_path: Path) -> None:
    node = Node(tmp_path, lambda: GOOD)
    planned = 1
    while (
        spent(
            [Charge(neighbours="replace_one", noise_multiplier=2.0, gap=1e-4, count=planned + 1)],
            delta=1e-5,
        )
        <= 3.0
    ):
        planned += 1
    for server_round in range(1, planned + 1):
        node.ask(terms(), round=server_round)
    for server_round in range(planned + 1, planned + 9):
        with pytest.raises(DeclinedError, match="the budget is spent"):
            node.ask(terms(), round=server_round)
    assert spent(node.charges(), delta=1e-5) <= 3.0
    assert len(node.charges()) == node.evaluated == planned
    assert planned > 1
    # Another budget in the question is another question, not another purse for the same data.
    (tmp_path / "policy.toml").write_text("max_epsilon = 3.0\n")
    node.config["privacy-policy"] = str(tmp_path / "policy.toml")
    with pytest.raises(DeclinedError, match="max_epsilon"):
        node.ask(terms(epsilon=1e9), round=20)
    assert len(node.charges()) == node.evaluated


def test_the_same_question_gets_the_same_answer_and_another_one_another_charge(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, lambda: GOOD)
    (one, _), (again, _) = node.ask(terms()), node.ask(terms())
    assert (one[STATISTICS_NAME] == again[STATISTICS_NAME]).all()
    assert len(node.charges()) == node.evaluated == 1
    (other, _) = node.ask(terms(), told=b"another config of the user")
    assert len(node.charges()) == node.evaluated == 2
    assert (one[STATISTICS_NAME] != other[STATISTICS_NAME]).any()


def test_a_policy_binds_an_evaluation_before_the_users_code_runs(tmp_path: Path) -> None:
    node = Node(tmp_path, lambda: GOOD)
    (tmp_path / "policy.toml").write_text("min_noise_multiplier = 4.0\n")
    node.config["privacy-policy"] = str(tmp_path / "policy.toml")
    for asked in (terms(), terms(by_server=True, noise_multiplier=9.0)):
        with pytest.raises(DeclinedError):
            node.ask(asked)
    assert node.evaluated == 0
    assert node.charges() == []


def test_a_share_of_noise_is_not_given_outside_of_a_secure_sum(tmp_path: Path) -> None:
    node = Node(tmp_path, lambda: GOOD)
    with pytest.raises(DeclinedError, match="outside of a secure sum"):
        node.ask(terms(parties=5))
    assert node.evaluated == 0


def test_at_record_level_a_failure_is_charged_and_ends_the_experiment(tmp_path: Path) -> None:
    def evaluate() -> Any:
        raise ValueError("the record of patient 17")

    node = Node(tmp_path, evaluate)
    for text in ("until its operator acts", "answers nothing more"):
        with pytest.raises((ChargedFailureError, DeclinedError), match=text) as raised:
            node.ask(terms(unit="record"))
        assert "17" not in str(raised.value)
    assert len(node.charges()) == node.evaluated == 1


def test_mu_of_the_charges_is_what_the_noise_says(tmp_path: Path) -> None:
    node = Node(tmp_path, lambda: GOOD)
    node.ask(terms(epsilon=8.0))
    (charge,) = node.charges()
    assert charge.noise_multiplier == 2.0
    assert mu_of(spent([charge], delta=1e-5) - charge.gap, 1e-5) == pytest.approx(0.5, rel=1e-3)
    assert math.isclose(terms().sigma(), 2.0)
