"""Private evaluation under ACFL: each record by itself, the budget, secure sums, refusals."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acfl_app import kill_after, run
from apps import make
from conformance import Killed
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from flwr_privacy.accounting import ADD_REMOVE, Charge, spent
from flwr_privacy.acfl.evaluation import LinearEvaluation, exact_scores
from flwr_privacy.acfl.plan import ACFLPlan
from flwr_privacy.clients import acfl_client_app
from flwr_privacy.clients.acfl import ACFLClient
from flwr_privacy.errors import CheckpointError, DeclinedError, InvalidParameterError, ProtocolError
from flwr_privacy.evaluation.sums import STATISTICS_NAME
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import ACFL
from flwr_privacy.wire.fields import write

Array = NDArray[np.float64]
FEATURES, LABELS, RECORDS = 3, 2, 12


def data_of(client: str) -> tuple[Array, Array]:
    draws = np.random.default_rng(int(client) + 10)
    return draws.uniform(-1, 1, (RECORDS, FEATURES)), np.eye(LABELS)[draws.integers(0, 2, RECORDS)]


APP = acfl_client_app(lambda context: data_of(str(context.node_config["partition-id"])))


def strategy(**values: Any) -> ACFL:
    usual = {"one_hot": True, "max_records": 20, "evaluation": "private", "epsilon": 20.0}
    return make(ACFL, **{**usual, **values})


def train(chosen: ACFL, **options: Any) -> Any:
    return run(chosen, APP, **options)


def entries_of(folder: Path, client: int) -> list[Any]:
    return list(Ledger(folder / f"{client}.ledger", data_set=str(client)).entries())


def terms(z: float = 2.0, **values: Any) -> LinearEvaluation:
    usual: dict[str, Any] = {"accuracy": "accuracy", "epsilon": 8.0, "delta": 1e-5, "gap": 1e-4}
    usual |= {"unit": "record", "grid": -10, "neighbours": ADD_REMOVE, "feature_map": "raw"}
    return LinearEvaluation(**{**usual, "noise_multiplier": z, **values})


def vector(asked: LinearEvaluation, model: Array, features: Array, labels: Array) -> Array:
    """Return the codes of an answer without its noise, in their units."""
    silent = LinearEvaluation(**{**vars(asked), "by_server": True})
    start = {"W": model}
    measured = silent.measure(start, (features, labels))
    plan = silent.plan(start, Facts(columns=model.shape))
    arrays, _ = silent.noise(measured, plan, SecureRandom())
    return np.asarray(arrays[STATISTICS_NAME] * CodeGrid(asked.grid).step)


# -- One record ------------------------------------------------------------------------------------

ODD = [0.0, 1.0, -3.0, 1e300, -1e300, math.inf, math.nan, 5e-324]


@pytest.mark.parametrize(("cap", "labels"), [(0.0, 0), (0.5, 0), (0.0, 2), (0.5, 2)])
@pytest.mark.parametrize("grid", [-1, -10])
def test_one_record_more_moves_an_answer_by_no_more_than_is_charged(
    cap: float, labels: int, grid: int
) -> None:
    """Whatever its values are, and whatever the model is."""
    asked = terms(2000.0, loss_cap=cap, labels=labels, grid=grid)
    draws, largest = np.random.default_rng(0), 0.0
    features, own = draws.normal(size=(30, 2)), np.eye(2)[draws.integers(0, 2, 30)]
    for model in (np.zeros((2, 2)), 1e308 * np.ones((2, 2)), draws.normal(size=(2, 2))):
        before = vector(asked, model, features, own)
        for record, label in itertools.product(itertools.product(ODD, ODD), [*np.eye(2), ODD[4:6]]):
            more = np.vstack([[record], features]), np.vstack([[label], own])
            moved = vector(asked, model, *more) - before
            largest = max(largest, float(np.linalg.norm(moved)))
    assert largest <= asked.sensitivity()
    assert largest >= asked.sensitivity() * (1 - 1e-9)  # and it is not wasted
    released = 2 if cap else 1
    assert asked.sensitivity() == pytest.approx(math.sqrt((1 + released + bool(labels)) / 4))


def test_the_score_of_a_record_does_not_depend_on_others() -> None:
    """Else one record more could change what is said of all others, by rounding."""
    draws = np.random.default_rng(1)
    features, model = draws.normal(size=(64, 300)), draws.normal(size=(300, 10))
    whole = exact_scores(features, model)
    for count in (1, 2, 3, 7, 33):
        np.testing.assert_array_equal(whole[:count], exact_scores(features[:count], model))
    plain = features @ model
    np.testing.assert_allclose(whole, plain, rtol=0, atol=300 * 2**-20)
    # A model whose columns tie for every record but for the rounding of sums.
    tied = np.repeat(model[:, :1], 2, axis=1)
    assert len(set(np.argmax(exact_scores(features, tied), axis=1))) == 1
    rows = [exact_scores(row[None], tied)[0] for row in features]
    np.testing.assert_array_equal(np.array(rows), exact_scores(features, tied))


def test_the_counts_and_the_loss_are_those_of_the_records() -> None:
    draws = np.random.default_rng(2)
    features, model = draws.normal(size=(500, 4)), draws.normal(size=(4, 3))
    labels = np.eye(3)[draws.integers(0, 3, 500)]
    asked = terms(loss_cap=2.0, labels=3)
    found = vector(asked, model, features, labels)
    scores, own = features @ model, np.argmax(labels, axis=1)
    losses = np.clip(((scores - labels) ** 2).sum(axis=1) / 2, 0, 2.0)
    right = int((np.argmax(scores, axis=1) == own).sum())
    assert found[0] == 250
    assert found[1] == right - 250
    assert found[2] == pytest.approx((losses / 2 - 0.5).sum(), abs=500 * 2**-11)
    assert found[3:] == pytest.approx(np.bincount(own) / 2)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (np.zeros((3, 2)), "model = "),
        (np.array([[math.nan] * 2] * 2), "NaN or infinity"),
        (np.zeros((2, 2), np.int64), "no matrix of floats"),
        (np.zeros(2), "no matrix of floats"),
        (np.zeros((2, 3)), "model = "),
    ],
)
def test_a_model_that_is_none_is_refused_before_data_are_read(model: Any, text: str) -> None:
    with pytest.raises((ProtocolError, InvalidParameterError), match=text):
        terms().plan({"W": model}, Facts(records=4, columns=(2, 2)))
    with pytest.raises(InvalidParameterError, match="labels = 3: expected 2"):
        terms(labels=3).plan({"W": np.zeros((2, 2))}, Facts(records=4, columns=(2, 2)))


# -- The budget ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0])
@pytest.mark.parametrize("share", [0.05, 0.6])
@pytest.mark.parametrize("every", [1, 4, 10])
def test_setup_gradients_and_evaluations_fit_the_budget_together(
    share: float, every: int, alpha: float
) -> None:
    asked = strategy(epsilon=3.0, share=share, every=every, alpha=alpha, learning_rate=0.02)
    plan = ACFLPlan(options=asked.options, features=FEATURES, labels=LABELS, rounds=10)
    model, charges = np.zeros((FEATURES, LABELS)), []
    if alpha:
        charges.append(plan.setup_terms(parties=0).charge())
    if alpha < 1:
        charges += 10 * [plan.gradient_terms(model, parties=0).charge()]
    evaluation = plan.evaluation_terms(parties=0).charge()
    charges += plan.evaluations * [evaluation]
    known = [charge for charge in charges if charge is not None]
    assert len(known) == len(charges)
    assert spent(known, delta=1e-5) <= 3.0
    assert spent(known, delta=1e-5) == pytest.approx(3.0, rel=1e-6)
    of_evaluations = plan.evaluations * evaluation.noise_multiplier**-2
    everything = sum(charge.noise_multiplier**-2 for charge in known)
    assert of_evaluations / everything == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("summed", [False, True])
def test_every_release_is_on_the_ledgers_and_on_the_card(summed: bool, tmp_path: Path) -> None:
    options = {"secure_sum": SecureSum()} if summed else {}
    chosen = strategy(every=2, **options)
    result = train(chosen, nodes=5, num_rounds=5, state=tmp_path)
    card = chosen.card(final=True)
    assert card.verify()
    assert 19.99 < card.guarantee.spent <= 20.0
    expected = [("setup", 0), *(("train", r) for r in range(1, 6))]
    expected += [("evaluate", r) for r in (2, 4, 5)]
    assert sorted((r.phase, r.server_round) for r in chosen.releases) == sorted(expected)
    for i in range(5):
        entries = entries_of(tmp_path, i)
        assert sorted((e.question.phase, e.question.server_round) for e in entries) == sorted(
            expected
        )
        assert [e.charge for e in entries] == card.charges()[str(i)]
        assert {e.unit for e in entries} == {"record"}
        assert spent([e.charge for e in entries], delta=1e-5) == pytest.approx(20.0, rel=1e-6)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 5]
    names = {"accuracy", "accuracy_low", "accuracy_high", "evaluated"}
    assert [set(line["evaluate"]) for line in result.history[1:]] == [
        names if r in (2, 4, 5) else set() for r in range(1, 6)
    ]


@pytest.mark.parametrize("summed", [False, True])
def test_the_metrics_are_those_of_all_records_where_the_budget_is_large(summed: bool) -> None:
    options = {"secure_sum": SecureSum()} if summed else {}
    chosen = strategy(epsilon=1e7, loss_cap=2.0, label_histogram=LABELS, every=3, **options)
    result = train(chosen, nodes=5, num_rounds=3)
    model = result.arrays["W"].numpy()
    features, labels = (np.vstack(rows) for rows in zip(*map(data_of, "01234"), strict=True))
    scores, own = features @ model, np.argmax(labels, axis=1)
    found = result.evaluate_metrics_clientapp[3]
    assert found["accuracy"] == pytest.approx(np.mean(np.argmax(scores, axis=1) == own), abs=0.02)
    losses = ((scores - labels) ** 2).sum(axis=1) / 2
    assert found["loss"] == pytest.approx(np.clip(losses, 0, 2.0).mean(), abs=0.02)
    assert found["label_histogram"] == pytest.approx(np.bincount(own), abs=0.5)
    assert found["evaluated"] == pytest.approx(60, abs=0.5)


def test_shares_of_noise_add_up_to_what_is_charged() -> None:
    """Of 12 evaluations of 5 clients; without the division into shares it would be twice that."""
    sums: list[Array] = []

    class Noted(ACFL):
        def collect(self, phase: str, messages: Any) -> Any:
            mean, metrics = super().collect(phase, messages)
            if phase == "evaluate":
                sums.append(mean.statistics())
            return mean, metrics

    values = {"one_hot": True, "max_records": 20, "evaluation": "private", "epsilon": 1.0}
    chosen = make(Noted, **values, share=0.5, label_histogram=LABELS, secure_sum=SecureSum())
    train(chosen, nodes=5, num_rounds=12)
    (sigma,) = {
        r.charge.noise_multiplier * math.sqrt(0.75)
        for r in chosen.releases
        if r.phase == "evaluate"
    }
    # All but the second entry, which follows from the model: 36 draws of noise.
    own = np.bincount(np.argmax(np.vstack([data_of(c)[1] for c in "01234"]), axis=1)) / 2
    noise = np.array(sums)[:, [0, 2, 3]] - np.array([30.0, *own])
    # Five honest shares, where the sum opens with fewer too: a little more noise.
    expected = sigma * math.sqrt(5 / chosen._asked_terms().parties)
    assert np.sqrt((noise**2).mean()) == pytest.approx(expected, rel=0.36)  # 3 / sqrt(2 * 36)


def test_those_evaluate_whose_gradients_are_in_the_sum(tmp_path: Path) -> None:
    chosen = strategy(secure_sum=SecureSum(), straggler_rate=0.1)
    faults = [Fault(kind="drop", client="4", server_round=2, phase="train")]
    train(chosen, nodes=5, num_rounds=3, state=tmp_path, faults=faults, timeout=2)
    asked = {r.server_round: set(r.clients) for r in chosen.releases if r.phase == "evaluate"}
    assert asked[1] == asked[3] == set("01234")
    assert asked[2] == set("0123")


def test_where_only_coded_data_are_used_clients_evaluate_all_the_same() -> None:
    result = train(strategy(alpha=1.0, every=2), num_rounds=4)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4]


def test_a_resumed_training_has_the_evaluations_that_are_left(tmp_path: Path) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    kept: dict[str, Any] = {"experiment_id": "e", "run_dir": tmp_path / "run"}
    options: dict[str, Any] = {"state": tmp_path / "state", "num_rounds": 4}
    with pytest.raises(Killed):
        train(strategy(**kept, on_round=kill_after(2)), **options)
    with pytest.raises(CheckpointError, match="evaluation"):
        train(strategy(**kept, every=2, resume=True), **options)
    chosen = strategy(**kept, resume=True)
    result = train(chosen, **options)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3, 4]
    assert len(entries_of(tmp_path / "state", 0)) == 9
    assert chosen.card().guarantee.spent <= 20.0


# -- Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"noise": "none", "epsilon": None}, "evaluation = 'PrivateEvaluation': expected None"),
        ({"noise": "paper", "epsilon": None}, "None with NoisedSetup: only NoisedRecords"),
        ({"one_hot": False}, "one_hot = False: expected true with a private evaluation"),
        ({"accuracy": "f1"}, "accuracy = 'f1'"),
        ({"alpha": 1.0, "secure_sum": SecureSum()}, r"alpha = 1\.0: expected below 1"),
        ({"fraction_evaluate": 0.0}, "fraction_evaluate = 0"),
        ({"evaluation": 3}, "evaluation = 3: expected PrivateEvaluation"),
        ({"share": 0.0}, "share = 0"),
    ],
)
def test_what_does_not_go_with_an_evaluation_is_refused(changes: Any, text: str) -> None:
    usual = {"one_hot": True, "evaluation": "private", "epsilon": 20.0}
    values = {k: v for k, v in {**usual, **changes}.items() if v is not None}
    with pytest.raises(InvalidParameterError, match=text):
        make(ACFL, **values)


def test_a_histogram_is_of_the_models_labels() -> None:
    with pytest.raises(InvalidParameterError, match="label_histogram = 5: expected 2, the labels"):
        train(strategy(label_histogram=5))


class Node:
    """One deployed client that is asked to evaluate a model."""

    def __init__(self, folder: Path, policy: str = "") -> None:
        self.folder, self.loaded = folder, 0
        (folder / "policy.toml").write_text(policy)
        self.config: dict[str, Any] = {"client-id": "a", "privacy-state": str(folder)}
        self.config["privacy-policy"] = str(folder / "policy.toml")

    def load(self) -> Any:
        self.loaded += 1
        return data_of("0")

    def ask(self, asked: LinearEvaluation, model: Any = None, **changes: Any) -> Any:
        place = {"experiment-id": "e", "round": 1, "request": 0, "summed": 0, "code-limit": 0}
        fields = {**place, "honest": 0, "certain": 0, "told": b"", **write(asked), **changes}
        client = ACFLClient(self.load, Context(1, 1, self.config, RecordDict(), {}))
        start = {"W": np.zeros((FEATURES, LABELS)) if model is None else model}
        return client.answer_evaluation(start, fields, dict)

    def charges(self) -> list[Charge]:
        return [e.charge for e in Ledger(self.folder / "a.ledger", data_set="a").entries()]


def test_a_server_that_asks_too_often_meets_the_budget(tmp_path: Path) -> None:
    node, planned = Node(tmp_path), 0
    one = Charge(noise_multiplier=2.0, neighbours=ADD_REMOVE, gap=1e-4)
    while spent([replace(one, count=planned + 1)], delta=1e-5) <= 3.0:
        planned += 1
    for server_round in range(1, planned + 1):
        (arrays, _) = node.ask(terms(epsilon=3.0), round=server_round)
        assert set(arrays) == {STATISTICS_NAME}
    with pytest.raises(DeclinedError, match="the budget is spent"):
        node.ask(terms(epsilon=3.0), round=planned + 1)
    assert len(node.charges()) == planned > 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"neighbours": "replace_one"}, "neighbours = 'replace_one': expected one of 'add_remove'"),
        ({"feature_map": "rff"}, "features = 'rff'"),
        ({"parties": 4, "grid": -10}, "outside of a secure sum"),
        ({"by_server": True}, "without noise|no noise|allow_unprotected"),
    ],
)
def test_a_server_that_asks_for_something_else_is_refused(
    change: Any, text: str, tmp_path: Path
) -> None:
    node = Node(tmp_path)
    with pytest.raises((InvalidParameterError, DeclinedError), match=text):
        node.ask(terms(**change))
    assert node.charges() == []


def test_a_policy_binds_an_evaluation(tmp_path: Path) -> None:
    node = Node(tmp_path, "min_noise_multiplier = 4.0\n")
    with pytest.raises(DeclinedError):
        node.ask(terms())
    assert node.charges() == []
    node.ask(terms(4.0))
    assert len(node.charges()) == 1
