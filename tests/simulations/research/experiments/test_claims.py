"""The verdicts on an experiment's claims."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiment_files import NO, OPEN, YES, A, B, trained, verdict

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.experiments.claims import Claim, Target
from flwr_privacy.simulations.research.experiments.verdicts import check_claim

NAN = math.nan
LOW = [0.20, 0.20, 0.21, 0.21, 0.20]
UNREACHED = {"accuracy": 0.75}  # by B


@pytest.mark.parametrize(
    ("first", "second", "table", "expected"),
    [
        # Differences 0.10, 0.09, 0.09, 0.095, 0.10: mean 0.095, standard error 0.0022.
        (A, B, {"better": ["a", "b"]}, YES),
        (A, B, {"better": ["b", "a"]}, NO),
        (A, B, {"worse": ["b", "a"]}, YES),
        (A, B, {"worse": ["a", "b"]}, NO),
        (A, B, {"better": ["a", "b"], "margin": 0.08}, YES),
        (A, B, {"better": ["a", "b"], "margin": 0.09}, OPEN),
        (A, B, {"better": ["a", "b"], "margin": 0.115}, NO),
        (A, B, {"better": ["a", "b"], "metric": "loss"}, YES),
        (A, B, {"better": ["a", "b"], "at": 1}, OPEN),
        (A, B, {"better": ["a", "b"], "at": "mean_last_5"}, YES),
        (A[:4], B[:4], {"better": ["a", "b"]}, OPEN),
        # A difference of -0.02 among them: mean 0.074, standard error 0.024.
        (A, [0.70, 0.83, 0.70, 0.70, 0.70], {"better": ["a", "b"]}, OPEN),
        (A, B, {"close": ["a", "b"], "within": 0.11}, YES),
        (A, B, {"close": ["a", "b"], "within": 0.095}, OPEN),
        (A, B, {"close": ["a", "b"], "within": 0.08}, NO),
        # Shares of the second curve: mean 0.135, standard error 0.0037.
        (A, B, {"close": ["a", "b"], "within": 0.16, "relative": True}, YES),
        (A, B, {"close": ["a", "b"], "within": 0.11, "relative": True}, NO),
        (A, A, {"better": ["a", "b"]}, OPEN),
        # Where a run diverged signs are counted, which takes ten seeds.
        (A, [NAN] * 5, {"better": ["a", "b"]}, OPEN),
        (A * 2, [NAN] * 10, {"better": ["a", "b"]}, YES),
        ([NAN] * 10, B * 2, {"better": ["a", "b"]}, NO),
        (A * 2, [*[0.7] * 9, NAN], {"better": ["a", "b"]}, YES),
        (A * 2, [0.9, NAN, 0.9, *[0.7] * 7], {"better": ["a", "b"]}, OPEN),
        ([NAN] * 10, [NAN] * 10, {"better": ["a", "b"]}, OPEN),
        (A * 2, [NAN] * 10, {"close": ["a", "b"], "within": 0.5}, NO),
        (A * 2, [*[0.8, NAN] * 5], {"close": ["a", "b"], "within": 0.5}, OPEN),
        (A, B, {"trains": ["b"], "reference": "a"}, YES),
        (A, LOW, {"trains": ["b"], "reference": "a"}, NO),
        (A, LOW, {"collapses": ["b"], "reference": "a"}, YES),
        (A * 2, [NAN] * 10, {"collapses": ["b"], "reference": "a"}, YES),
        (A, B, {"collapses": ["b"], "reference": "a"}, NO),
        (A, B, {"trains": ["b"], "reference": "a", "share": 0.92}, NO),
        # Costs that are the same with every seed have no spread: signs again.
        (A * 2, B * 2, {"better": ["a", "b"], "metric": "bits", "target": UNREACHED}, YES),
        (A * 2, B * 2, {"better": ["a", "b"], "metric": "bits", "target": {"accuracy": 0.5}}, OPEN),
        (A * 2, B * 2, {"better": ["b", "a"], "metric": "uploads", "target": {"loss": 0.25}}, NO),
        (
            A * 2,
            B * 2,
            {
                "better": ["a", "b"],
                "metric": "bits",
                "target": UNREACHED,
                "relative": True,
                "margin": 0.5,
            },
            YES,
        ),
    ],
)
def test_a_verdict_is_a_paired_test(
    first: list[float], second: list[float], table: dict[str, Any], expected: str
) -> None:
    assert verdict([*trained("a", first), *trained("b", second)], **table) == expected


def test_a_claim_on_several_curves_takes_all_of_them() -> None:
    runs = [
        *trained("a", A),
        *trained("b", B),
        *trained("b2", [0.71, 0.72, 0.70, 0.70, 0.70]),
        *trained("c", [0.5, 0.5, 0.51, 0.51, 0.5]),
    ]
    assert verdict(runs, ordered=["a", "b", "c"]) == YES
    assert verdict(runs, ordered=["a", "c", "b"]) == NO
    assert verdict(runs, ordered=["a", "b", "b2", "c"]) == OPEN
    assert verdict(runs, better=[["a", "b"], "c"]) == YES
    assert verdict(runs, better=[["b", "c"], ["a"]]) == NO
    finding = check_claim(
        Claim.of({"id": "X", "text": "x", "better": [["a", "b"], ["b2", "c"]]}), runs
    )
    pairs = [(comparison.first, comparison.second) for comparison in finding.comparisons]
    assert pairs == [("a", "b2"), ("a", "c"), ("b", "b2"), ("b", "c")]
    assert finding.comparisons[0].mean == pytest.approx(0.094)
    assert finding.comparisons[0].error == pytest.approx(0.00245, rel=1e-3)


def test_the_best_value_and_that_of_a_round() -> None:
    (run,) = trained("a", [0.3])
    value = {
        at: check_claim(Claim.of({"id": "X", "text": "x", "better": ["a", "a"], "at": at}), [run])
        .comparisons[0]
        .values[0]
        for at in ("last", "best", "mean_last_5", 1)
    }
    assert value == {"last": [0.3], "best": [0.5], "mean_last_5": [pytest.approx(0.3)], 1: [0.5]}
    with pytest.raises(InvalidParameterError, match="claim X: at = 3: expected a round up to 2"):
        verdict([run], better=["a", "a"], at=3)


def test_what_reaching_a_level_cost() -> None:
    (run,) = trained("a", [0.8])
    assert Target(metric="accuracy", value=0.5).cost(run, "bits") == 8
    assert Target(metric="accuracy", value=0.51).cost(run, "uploads") == 20
    assert Target(metric="loss", value=1.0).cost(run, "rounds") == 1
    assert Target(metric="loss", value=0.1).cost(run, "rounds") == math.inf


def test_the_distance_of_models_is_relative(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 1.1)):
        np.savez(tmp_path / f"{name}.npz", w=factor * np.array([3.0, 0.0]), b=factor * 4.0)
    runs = [
        run
        for label in ("a", "b")
        for run in trained(label, A, models=dict.fromkeys(range(5), tmp_path / f"{label}.npz"))
    ]
    claim = Claim.of(
        {
            "id": "X",
            "text": "x",
            "better": ["a", "b"],
            "metric": "distance",
            "reference": "a",
        }
    )
    (comparison,) = check_claim(claim, runs).comparisons
    assert comparison.values == ([0.0] * 5, [pytest.approx(0.1)] * 5)
    assert comparison.mean == pytest.approx(0.1)
