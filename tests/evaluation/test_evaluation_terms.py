"""The mechanism of a private evaluation: bounds by enumeration, noise, and the intervals."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.evaluation import EvaluationTerms, PrivateEvaluation
from flwr_privacy.evaluation.estimate import estimated, interval
from flwr_privacy.evaluation.plan import planned_terms
from flwr_privacy.evaluation.sums import RECORDS_NAME, STATISTICS_NAME, EvaluationSum
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.distributed_noise import summed_gap
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.noise import discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.fields import read, write

ODD = (math.nan, math.inf, -math.inf, -3.0, 7.0, 1e300)


def terms(unit: str = "user", loss_cap: float | None = None, **values: Any) -> EvaluationTerms:
    usual = {"noise_multiplier": 2.0, "epsilon": 8.0, "delta": 1e-5, "gap": 1e-4}
    usual |= {"neighbours": "replace_one"}
    return planned_terms(PrivateEvaluation(loss_cap=loss_cap), unit=unit, **{**usual, **values})


def code(asked: EvaluationTerms, metrics: dict[str, Any]) -> np.ndarray:
    """Return the answer to an evaluation without its noise, as it would be noised."""
    silent = EvaluationTerms(**{**vars(asked), "parties": 0, "by_server": True})
    arrays, _ = silent.noise(silent.measure({}, metrics), silent.plan({}, Facts()), SecureRandom())
    return np.asarray(arrays[STATISTICS_NAME] * CodeGrid(asked.grid).step)


@pytest.mark.parametrize("cap", [None, 2.5])
def test_no_two_answers_of_a_client_are_further_apart_than_the_sensitivity(
    cap: float | None,
) -> None:
    """Also not from none at all: a client that is not there, or that failed."""
    asked = terms(loss_cap=cap)
    values = [0.0, 1e-9, 0.3, 0.5, 0.7, 1 - 1e-9, 1.0, *ODD]
    answers = [
        code(asked, {"accuracy": a, "loss": b, "num-examples": n})
        for a, b, n in itertools.product(values, [*values, 2.5], [0, 1, 9])
    ]
    answers.append(np.asarray(asked.failed({}).statistics))
    found = np.unique(np.array(answers), axis=0)
    distances = np.linalg.norm(found[:, None] - found[None], axis=2)
    assert distances.max() <= asked.sensitivity()
    assert distances.max() >= asked.sensitivity() * (1 - 1e-3)  # and it is not wasted


def test_one_record_moves_an_answer_by_no_more_than_the_sensitivity() -> None:
    asked = terms("record")
    for records in (1, 2, 3, 7, 1000, 2**20 - 1):
        for right in {0, 1, records // 2, records - 1}:
            both = [
                # As an app computes it, in float64 or in float32.
                code(asked, {"accuracy": kind(k) / kind(records), "num-examples": records})
                for k, kind in itertools.product((right, right + 1), (np.float64, float))
            ]
            moved = max(np.abs(a - b).max() for a, b in itertools.combinations(both, 2))
            assert moved <= asked.sensitivity()
    rough = [float(np.float32(k / 999)) for k in (5, 6)]
    one, other = (code(asked, {"accuracy": a, "num-examples": 999}) for a in rough)
    assert np.abs(one - other).max() == 1


@pytest.mark.parametrize("parties", [0, 9])
@pytest.mark.parametrize("unit", ["user", "record"])
def test_the_noise_is_that_of_the_charge(unit: str, parties: int) -> None:
    """Drawn 4000 times; a share has its part of the variance, and none is missing."""
    asked = terms(unit, parties=parties)
    random, plan = SecureRandom.insecure(3), asked.plan({}, Facts())
    measured = asked.measure({}, {"accuracy": 0.75, "num-examples": 8})
    drawn = (
        np.array([asked.noise(measured, plan, random)[0][STATISTICS_NAME] for _ in range(4000)])
        * CodeGrid(asked.grid).step
    )
    expected = asked.noise_multiplier * asked.sensitivity() / math.sqrt(parties or 1)
    assert drawn.std(axis=0) == pytest.approx(expected, rel=0.05)
    exact = code(asked, {"accuracy": 0.75, "num-examples": 8})
    assert drawn.mean(axis=0) == pytest.approx(exact, abs=5 * expected / math.sqrt(4000))
    assert plan.charge is not None
    assert plan.charge.noise_multiplier == asked.noise_multiplier
    assert plan.sigma == asked.sigma()


@pytest.mark.parametrize("z", [0.01, 1.0, 2000.0, 1e6])
@pytest.mark.parametrize("parties", [0, 40])
@pytest.mark.parametrize("unit", ["user", "record"])
def test_the_planned_grid_costs_no_more_than_is_charged(unit: str, parties: int, z: float) -> None:
    for gap in (1e-7, 1e-4, 1e-2):
        asked = terms(unit, noise_multiplier=z, gap=gap, parties=parties)
        asked.plan({}, Facts())
        steps = asked.own_sigma() / CodeGrid(asked.grid).step
        if parties:
            assert summed_gap(asked.size, steps, parties) <= gap
        else:
            assert discretisation_gap(asked.size, steps) <= gap


def test_a_server_that_names_a_coarse_grid_or_other_nonsense_is_refused() -> None:
    good = vars(terms())
    for change, text in (
        ({"grid": 3}, "sigma = 0.25"),
        ({"grid": -2}, "grid = -2: expected a finer grid"),
        ({"grid": 3, "parties": 4}, "grid = 3"),
        ({"grid": -60}, "sigma = "),
        ({"grid": -28}, "grid = -28: expected a coarser grid"),
    ):
        with pytest.raises(InvalidParameterError, match=text):
            EvaluationTerms(**{**good, **change}).plan({}, Facts())
    for change in (
        {"noise_multiplier": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"unit": "device"},
        {"unit": "record", "loss_cap": 2.0},
        {"unit": "record", "accuracy": "loss"},
        {"unit": "record", "accuracy": "f1"},
        {"unit": "record", "neighbours": "zero_out"},
        {"neighbours": "both"},
        {"loss_cap": -1.0},
        {"epsilon": 0.0},
        {"delta": 1.0},
        {"gap": -1.0},
        {"parties": -1},
        {"parties": 3, "by_server": True},
    ):
        with pytest.raises(InvalidParameterError):
            EvaluationTerms(**{**good, **change})
    assert read(EvaluationTerms, write(EvaluationTerms(**good))) == EvaluationTerms(**good)


@pytest.mark.parametrize(
    ("unit", "metrics"),
    [
        ("user", {"num-examples": 3}),
        ("user", {"accuracy": "0.5"}),
        ("user", {"accuracy": True}),
        ("record", {"accuracy": 0.5}),
        ("record", {"accuracy": 0.5, "num-examples": -1}),
        ("record", {"accuracy": 0.5, "num-examples": 2.5}),
        ("record", {"accuracy": 0.5, "num-examples": math.inf}),
    ],
)
def test_metrics_that_are_missing_or_no_numbers_are_refused(
    unit: str, metrics: dict[str, Any]
) -> None:
    with pytest.raises(ProtocolError):
        terms(unit).measure({}, metrics)


def total_of(asked: EvaluationTerms, metrics: list[dict[str, Any]], random: SecureRandom) -> Any:
    total, plan = asked.accumulator({}), asked.plan({}, Facts())
    for client, own in enumerate(metrics):
        arrays, _ = asked.noise(asked.measure({}, own), plan, random)
        total.accumulate(str(client), arrays, weight=1)
    return total


def test_the_metrics_are_those_of_the_clients_where_noise_is_small() -> None:
    shown = [
        {"accuracy": 0.2, "loss": 3.0, "num-examples": 10},
        {"accuracy": 0.6, "loss": 1.0, "num-examples": 1},
        {"accuracy": 1.0, "loss": 9.0, "num-examples": 0},  # has no data
    ]
    asked = terms(loss_cap=2.0, noise_multiplier=1e-4)
    total = total_of(asked, shown, SecureRandom.insecure(0))
    found = estimated(total, asked, [asked.own_sigma()] * 3, most=3)
    assert found["accuracy"] == pytest.approx(0.4, abs=0.002)  # every client weighs the same
    assert found["loss"] == pytest.approx(1.5, abs=0.004)
    assert found["evaluated"] == pytest.approx(2, abs=0.002)
    asked = terms("record", noise_multiplier=1e-3)
    total = total_of(asked, shown, SecureRandom.insecure(0))
    assert total.records == 11
    found = estimated(total, asked, [asked.own_sigma()] * 3, most=3)
    # Rounded to records: 2 of 10, and 1 of the 1 that is more right than wrong.
    assert found["accuracy"] == pytest.approx(3 / 11, abs=0.001)
    assert set(found) == {"accuracy", "accuracy_low", "accuracy_high", "evaluated"}
    assert found["evaluated"] == 11


@pytest.mark.parametrize("clients", [40, 400, 4000])
def test_intervals_hold_the_value_in_95_of_100_evaluations(clients: int) -> None:
    """The noise hides even how many evaluate: here 3 in 4 do."""
    asked = terms(noise_multiplier=1.0, loss_cap=None)
    evaluated, accuracy, draws = 0.75 * clients, 0.9, 3000
    sums = np.array([asked.presence * evaluated, (accuracy - 0.5) * evaluated])
    noise = np.random.default_rng(1).normal(0, asked.sigma() * math.sqrt(clients), (draws, 2))
    hits = total_width = 0.0
    grid = CodeGrid(asked.grid)
    for vector in sums + noise:
        total = EvaluationSum(2, grid, counts=False)
        codes = (vector / grid.step).astype(np.int64)
        total = total.from_state(
            {STATISTICS_NAME: codes},
            {"weight": float(clients), "clients": [str(i) for i in range(clients)]},
        )
        found = estimated(total, asked, [asked.own_sigma()] * clients, most=clients)
        assert 0 <= found["accuracy_low"] <= found["accuracy"] <= found["accuracy_high"] <= 1
        hits += found["accuracy_low"] <= accuracy <= found["accuracy_high"]
        total_width += found["accuracy_high"] - found["accuracy_low"]
    assert hits / draws == pytest.approx(0.95, abs=0.015) if clients > 40 else hits / draws > 0.93
    assert total_width / draws < (1.01 if clients < 400 else 0.5 if clients < 4000 else 0.15)


def test_where_the_noise_hides_how_many_there_are_the_interval_says_nothing() -> None:
    assert interval(3.0, 1.0, 5.0, 5.0) == (-0.5, 0.5)
    assert interval(3.0, -50.0, 5.0, 5.0) == (-0.5, 0.5)
    asked = terms("record")
    assert estimated(asked.accumulator({}), asked, [], most=0) == {}


def test_records_are_counted_where_they_are_public() -> None:
    asked = terms("record", parties=2, noise_multiplier=3.0)
    arrays, _ = asked.noise(
        asked.measure({}, {"accuracy": 0.25, "num-examples": 8}),
        asked.plan({}, Facts()),
        SecureRandom.insecure(0),
    )
    assert arrays[RECORDS_NAME].tolist() == [8]
    arrays, _ = terms().noise(
        terms().measure({}, {"accuracy": 0.25, "num-examples": 8}),
        terms().plan({}, Facts()),
        SecureRandom.insecure(0),
    )
    assert set(arrays) == {STATISTICS_NAME}  # a secret
