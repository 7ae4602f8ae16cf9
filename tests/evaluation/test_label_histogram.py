"""The histogram of labels in a private evaluation, and counts of a secret number of records."""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from drop_in import PAGE
from numpy.typing import NDArray

from flwr_privacy.accounting import ADD_REMOVE, REPLACE_ONE
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.evaluation import EvaluationTerms, PrivateEvaluation
from flwr_privacy.evaluation.estimate import estimated
from flwr_privacy.evaluation.plan import planned_terms
from flwr_privacy.evaluation.sums import RECORDS_NAME, STATISTICS_NAME
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.distributed_noise import summed_gap
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.noise import discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.fields import read, write

Array = NDArray[np.float64]
KINDS = [(False, 0), (False, 3), (True, 0), (True, 3)]
RELATION = {False: REPLACE_ONE, True: ADD_REMOVE}  # by whether the number of records is a secret


def terms(unit: str = "user", labels: int = 3, **values: Any) -> EvaluationTerms:
    option = PrivateEvaluation(label_histogram=labels or None, loss_cap=values.pop("cap", None))
    usual: dict[str, Any] = {"noise_multiplier": 2.0, "epsilon": 8.0, "delta": 1e-5, "gap": 1e-4}
    usual |= {"neighbours": REPLACE_ONE}
    return planned_terms(option, unit=unit, **{**usual, **values})


def code(asked: EvaluationTerms, metrics: dict[str, Any]) -> Array:
    """Return the answer to an evaluation without its noise, as it would be noised."""
    silent = EvaluationTerms(**{**vars(asked), "parties": 0, "by_server": True})
    arrays, _ = silent.noise(silent.measure({}, metrics), silent.plan({}, Facts()), SecureRandom())
    return np.asarray(arrays[STATISTICS_NAME] * CodeGrid(asked.grid).step)


def metrics_of(records: tuple[tuple[int, bool], ...], labels: int = 3) -> dict[str, Any]:
    """Return what an app says of records, each with a label and whether it is right."""
    right = sum(is_right for _, is_right in records)
    counts = {f"label-{i}": sum(own == i for own, _ in records) for i in range(labels)}
    accuracy = right / len(records) if records else math.nan
    return {"accuracy": accuracy, "num-examples": len(records), **counts}


def distances(answers: list[Array]) -> Array:
    found = np.unique(np.array(answers), axis=0)
    return np.asarray(np.linalg.norm(found[:, None] - found[None], axis=2))


# -- The sensitivity, by enumeration ---------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 2.5])
def test_no_two_answers_of_a_client_are_further_apart_than_is_charged(cap: float | None) -> None:
    """Whatever its app counts, and also from none at all."""
    asked = terms(cap=cap)
    counts = [0, 1, 7, -3, 1e300, math.nan, math.inf]
    answers = [
        code(asked, {"accuracy": a, "loss": b, **{f"label-{i}": c for i, c in enumerate(own)}})
        for a, b in itertools.product([0.0, 0.3, 1.0, math.nan], [0.0, 2.5, math.inf])
        for own in itertools.product(counts, repeat=3)
    ]
    answers.append(np.asarray(asked.failed({}).statistics))  # type: ignore[union-attr]
    found = distances(answers)
    assert found.max() <= asked.sensitivity()
    assert found.max() >= asked.sensitivity() * (1 - 1e-3)  # and it is not wasted
    # The one that is furthest is of another label and of another accuracy, and so is no client.
    absent = max(np.linalg.norm(answer) for answer in answers)
    assert absent == pytest.approx(asked.sensitivity(), rel=1e-3)
    assert asked.sensitivity() == pytest.approx(math.sqrt((1 if cap is None else 2) + 0.5))


RECORDS = [(label, right) for label in range(3) for right in (False, True)]


@pytest.mark.parametrize("labels", [0, 3])
def test_a_replaced_record_moves_an_answer_by_no_more_than_is_charged(labels: int) -> None:
    asked, largest = terms("record", labels), 0.0
    for others in (n * (RECORDS[0],) + m * (RECORDS[3],) for n, m in ((0, 0), (4, 3), (998, 1))):
        answers = [code(asked, metrics_of((*others, one))) for one in RECORDS]
        largest = max(largest, distances(answers).max())
    assert largest <= asked.sensitivity()
    assert largest == pytest.approx(asked.sensitivity(), rel=1e-12)
    assert asked.sensitivity() == pytest.approx(1.0 if not labels else math.sqrt(1.5))


@pytest.mark.parametrize("labels", [0, 3])
def test_one_record_more_moves_an_answer_by_no_more_than_is_charged(labels: int) -> None:
    asked, largest = terms("record", labels, neighbours=ADD_REMOVE), 0.0
    for others in (n * (RECORDS[0],) + m * (RECORDS[3],) for n, m in ((0, 0), (4, 3), (998, 1))):
        before = code(asked, metrics_of(others))
        moved = [np.linalg.norm(code(asked, metrics_of((*others, r))) - before) for r in RECORDS]
        largest = max(largest, *moved)
    assert largest <= asked.sensitivity()
    assert largest == pytest.approx(asked.sensitivity(), rel=1e-12)
    assert asked.sensitivity() == pytest.approx(math.sqrt(0.75 if labels else 0.5))


@pytest.mark.parametrize("secret", [False, True])
def test_what_of_a_record_is_public_is_in_no_answer_where_it_is_a_secret(secret: bool) -> None:
    asked = terms("record", neighbours=RELATION[secret])
    measured = asked.measure({}, metrics_of(tuple(RECORDS)))
    arrays, own = asked.noise(measured, asked.plan({}, Facts()), SecureRandom.insecure(0))
    assert (RECORDS_NAME in arrays) != secret
    assert own == {"metrics": {"num-examples": 1}}
    assert len(arrays[STATISTICS_NAME]) == asked.size == 4 + secret


def test_a_server_that_names_a_grid_on_which_a_record_is_a_whole_step_is_refused() -> None:
    """With much noise a coarse grid is fine for a client's data, and none for counts."""
    for secret, labels in KINDS:
        good = vars(terms("record", labels, neighbours=RELATION[secret], noise_multiplier=4000.0))
        assert good["grid"] == -1
        with pytest.raises(InvalidParameterError, match="grid = 0: expected at most -1"):
            EvaluationTerms(**{**good, "grid": 0})


@pytest.mark.parametrize("parties", [0, 40])
@pytest.mark.parametrize("labels", [2, 10, 1024])
@pytest.mark.parametrize("unit", ["user", "record"])
def test_the_planned_grid_costs_no_more_than_is_charged(
    unit: str, labels: int, parties: int
) -> None:
    for gap, z in itertools.product((1e-9, 1e-4, 1e-2), (0.1, 3.0, 500.0)):
        asked = terms(unit, labels, noise_multiplier=z, gap=gap, parties=parties)
        steps = asked.own_sigma() / CodeGrid(asked.grid).step
        cost = summed_gap(asked.size, steps, parties) if parties else 0.0
        assert (cost or discretisation_gap(asked.size, steps)) <= gap


def test_the_noise_of_every_entry_is_what_is_charged() -> None:
    for unit, secret in (("user", False), ("record", False), ("record", True)):
        asked = terms(unit, neighbours=RELATION[secret])
        plan, random = asked.plan({}, Facts()), SecureRandom.insecure(3)
        measured = asked.measure({}, metrics_of(tuple(RECORDS)))
        drawn = np.array(
            [asked.noise(measured, plan, random)[0][STATISTICS_NAME] for _ in range(3000)]
        )
        expected = asked.noise_multiplier * asked.sensitivity() / CodeGrid(asked.grid).step
        # Four standard errors of a standard deviation of 3000 draws.
        assert drawn.std(axis=0) == pytest.approx(expected, rel=4 / math.sqrt(6000))
        assert plan.sigma == asked.sigma() == 2.0 * asked.sensitivity()


# -- What may be asked, and what is refused -------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"labels": -1}, "labels = -1"),
        ({"labels": 1025}, "labels = 1025"),
        ({"neighbours": "both"}, "neighbours = 'both'"),
        ({"unit": "record", "neighbours": "zero_out"}, "neighbours = 'zero_out'"),
        ({"unit": "record", "grid": -1, "loss_cap": 1.0, "neighbours": ADD_REMOVE}, "loss_cap"),
    ],
)
def test_a_server_that_asks_for_other_things_is_refused(change: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        EvaluationTerms(**{**vars(terms()), **change})
    assert read(EvaluationTerms, write(terms())) == terms()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"label-1": 3}, "do not add up"),
        ({"label-1": 0.5}, r"a count of 0\.5"),
        ({"label-1": -1}, "a count of -1"),
        ({"label-1": math.inf}, "a count of inf"),
        ({"label-1": "2"}, "no number as 'label-1'"),
        ({"num-examples": 7}, "do not add up"),
    ],
)
def test_an_app_that_does_not_count_each_record_once_is_refused(change: Any, text: str) -> None:
    for secret in (False, True):
        asked = terms("record", neighbours=RELATION[secret])
        with pytest.raises(ProtocolError, match=text):
            asked.measure({}, {**metrics_of(tuple(RECORDS)), **change})


def test_an_app_that_counts_no_labels_is_refused() -> None:
    for unit in ("user", "record"):
        with pytest.raises(ProtocolError, match="no number as 'label-0'"):
            terms(unit).measure({}, {"accuracy": 0.5, "num-examples": 4})


@pytest.mark.parametrize("labels", [0, 1, 1025, 2.5, True])
def test_a_histogram_has_two_labels_at_least(labels: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"label_histogram = "):
        PrivateEvaluation(label_histogram=labels)


# -- What becomes of it ----------------------------------------------------------------------------


def total_of(asked: EvaluationTerms, shown: list[dict[str, Any]], seed: int = 0) -> Any:
    total, plan = asked.accumulator({}), asked.plan({}, Facts())
    random = SecureRandom.insecure(seed)
    for client, own in enumerate(shown):
        arrays, _ = asked.noise(asked.measure({}, own), plan, random)
        total.accumulate(str(client), arrays, weight=1)
    return total


SHOWN = [
    {"accuracy": 0.5, "num-examples": 8, "label-0": 6, "label-1": 2, "label-2": 0},
    {"accuracy": 1.0, "num-examples": 2, "label-0": 0, "label-1": 0, "label-2": 2},
]


def test_the_metrics_are_those_of_the_clients_where_noise_is_small() -> None:
    asked = terms(noise_multiplier=1e-4)
    found = estimated(total_of(asked, SHOWN), asked, [asked.own_sigma()] * 2, most=2)
    assert found["label_histogram"] == pytest.approx([0.375, 0.125, 0.5], abs=2e-3)
    for secret in (False, True):
        asked = terms("record", noise_multiplier=1e-3, neighbours=RELATION[secret])
        found = estimated(total_of(asked, SHOWN), asked, [asked.own_sigma()] * 2, most=math.inf)
        assert found["label_histogram"] == pytest.approx([6, 2, 2], abs=0.02)
        assert found["accuracy"] == pytest.approx(0.6, abs=0.002)
        assert found["evaluated"] == pytest.approx(10, abs=0.02)
        lengths = [len(found[f"label_histogram{end}"]) for end in ("", "_low", "_high")]  # type: ignore[arg-type]
        assert lengths == [3, 3, 3]


@pytest.mark.parametrize(("unit", "secret"), [("user", False), ("record", False), ("record", True)])
def test_intervals_hold_the_value_in_95_of_100_evaluations(unit: str, secret: bool) -> None:
    """Of 400 clients, or 4000 records, each with noise of its own."""
    clients, draws = 400, 400
    asked = terms(unit, noise_multiplier=0.5, neighbours=RELATION[secret])
    exact = clients * code(asked, SHOWN[0])
    truth = {"label": 0.75 if unit == "user" else 6.0 * clients, "accuracy": 0.5}
    noise = np.random.default_rng(2).normal(
        0, asked.sigma() * math.sqrt(clients), (draws, asked.size)
    )
    step, hits = CodeGrid(asked.grid).step, {"label": 0, "accuracy": 0}
    records = {} if asked.counted else {RECORDS_NAME: np.array([8 * clients])}
    names = {"weight": float(clients), "clients": [str(i) for i in range(clients)]}
    for vector in exact + noise:
        codes = np.rint(vector / step).astype(np.int64)
        total = asked.accumulator({}).from_state({STATISTICS_NAME: codes, **records}, names)
        found: Any = estimated(total, asked, [asked.own_sigma()] * clients, most=math.inf)
        low, high = (found[f"label_histogram_{end}"][0] for end in ("low", "high"))
        hits["label"] += low <= truth["label"] <= high
        hits["accuracy"] += found["accuracy_low"] <= truth["accuracy"] <= found["accuracy_high"]
    # Three standard errors of 400 draws below 95 %: 0.95 - 3 * 0.011.
    assert min(hits.values()) / draws > 0.917
    assert max(hits.values()) / draws < 0.99


def test_the_example_of_the_page_counts_labels_as_an_evaluation_takes_them() -> None:
    (example,) = re.findall(r"```python histogram\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    places: dict[str, Any] = {"np": np, "accuracy": 0.5, "labels": np.array([3, 9, 3, 0])}
    exec(example, places)
    for unit in ("user", "record"):
        measured = terms(unit, 10).measure({}, places["metrics"])
        weights = {"user": [1, 2, 1], "record": [4, 8, 4]}[unit]
        expected = np.zeros(10)
        expected[[0, 3, 9]] = np.array(weights) / 8
        assert measured.statistics[-10:] == pytest.approx(expected)
