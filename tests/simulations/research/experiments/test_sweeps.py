"""Experiments over the values of a setting, and searches for the best value."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiment_files import INLINE, NO, OPEN, SWEEP, YES, A, trained, verdict

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.experiments import files
from flwr_privacy.simulations.research.experiments.claims import Claim
from flwr_privacy.simulations.research.experiments.curves import Searched, TrainedRun
from flwr_privacy.simulations.research.experiments.description import ExperimentDescription
from flwr_privacy.simulations.research.experiments.picture import draw
from flwr_privacy.simulations.research.experiments.results import ExperimentResults
from flwr_privacy.simulations.research.experiments.runs import train
from flwr_privacy.simulations.research.experiments.search import chosen
from flwr_privacy.simulations.research.experiments.summary import save, summary
from flwr_privacy.simulations.research.experiments.verdicts import check_claim


def test_a_sweep_trains_each_setting_once(sweep: ExperimentDescription, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = train(sweep, out, seeds=range(5), engine=INLINE)
    assert [(run.curve, run.x) for run in runs if run.seed == 1] == [
        (label, x) for label in ("Two rounds", "Best") for x in (0.001, 0.1, 1)
    ]
    # Three steps with one round and two rounds; the curve of two rounds shares the latter.
    assert len(list(out.glob("*/metrics.jsonl"))) == 5 * 6
    by_place = {(run.curve, run.x, run.seed): run for run in runs}
    for x in (0.1, 1):  # both are better with two rounds
        for seed in range(5):
            best, two = by_place["Best", x, seed], by_place["Two rounds", x, seed]
            assert best.values == two.values
            assert best.searched is not None
            assert (best.searched.value, best.searched.rounds) == (2, [1, 2])
    results = ExperimentResults(experiment=sweep, full=False, runs=runs)
    (finding,) = results.findings()
    assert finding.verdict == "reproduced"
    assert (finding.comparisons[0].first, finding.comparisons[0].second) == (
        "Two rounds @ 0.1",
        "Two rounds @ 0.001",
    )
    axes = draw(sweep, runs, size="small").axes[0]
    assert (axes.get_xlabel(), axes.get_xscale()) == ("step", "log")
    xs, ys = axes.lines[0].get_data()
    assert list(xs) == [0.001, 0.1, 1]
    assert ys[1] == pytest.approx(
        np.mean([by_place["Two rounds", 0.1, seed].values["loss"][-1] for seed in range(5)])
    )
    picture, numbers = save(results, out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    (two, best) = json.loads(numbers.read_text())["curves"]
    losses = [by_place["Two rounds", 0.1, seed].values["loss"][-1] for seed in range(5)]
    assert two["points"][1]["last"]["loss"][0] == pytest.approx(np.mean(losses))
    assert two["points"][1]["search"] is None
    assert best["points"][1]["search"] == {"values": [2] * 5, "runs": 2, "rounds": 3, "epsilon": 0}
    (points,) = summary(results)["tables"]
    head = ["curve", "step", "last loss", "last rounds", "chosen by seed; cost of a search"]
    assert points["head"] == head
    assert points["rows"][4][-1] == "2, 2, 2, 2, 2; 3 rounds in 2 runs"
    assert [plan.slug for plan in sweep.planned(full=True)] == [
        *("two-rounds-0.001", "two-rounds-0.1"),
        *(f"best-{x}-{rounds}" for x in ("0.001", "0.1") for rounds in (1, 2, 4)),
    ]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("values = [0.001, 0.1, 1]", "values = []", "training.learning_rate: values = .*at least"),
        ("values = [0.001, 0.1, 1]", "values = [1, 1]", "learning_rate: values = .*that differ"),
        ("full = [0.001, 0.1]", 'full = ["a"]', "training.learning_rate: full = 'a'"),
        ('scale = "log"', 'scale = "lgo"', "sweep.scale = 'lgo'.*nearest: 'log'"),
        ('scale = "log"', 'skale = "log"', "known keys"),
        ("values = [1, 2],", "value = [1, 2],", "known keys"),
        ("rounds @ 0.1", "rounds @ 0.2", "claim S1 = 'Two rounds @ 0.2'"),
        ("rounds @ 0.1", "rounds @ 1", "claim S1 = 'Two rounds @ 1'"),  # not at the paper's size
        ("ordered", "at_x = [3]\nordered", "claim S1: at_x = .3"),
        ("ordered", "at_x = [0.1, 3]\nordered", "claim S1: at_x = .0.1, 3"),
        ("ordered", "at_x = [1]\nordered", r"at the paper's size some of \(0.001, 0.1\)"),
        ('metric = "loss"', 'metric = "distance"\nreference = "Best"', "no one model"),
        ("[[claim]]", "[[target]]\nloss = 1.0\n\n[[claim]]", "target = .*none over a sweep"),
        ('"rounds"]', '"value"]', "metrics = 'value'"),
        ("[base]", 'function = "sine"\n[base]', "function = 'sine'"),
    ],
)
def test_a_bad_sweep_is_refused_by_name(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert SWEEP.count(old) >= 1
    path = tmp_path / "bad.toml"
    path.write_text(SWEEP.replace(old, new, 1))
    with pytest.raises(InvalidParameterError, match=text):
        files.read(path, "papers/bad")


def test_a_claim_may_be_about_places_of_one_size_beside_those_of_both(tmp_path: Path) -> None:
    path = tmp_path / "both.toml"
    path.write_text(SWEEP.replace("ordered", "at_x = [0.1, 1]\nordered", 1))
    assert files.read(path, "papers/both").claims[0].at_x == (0.1, 1)


def swept(label: str, rows: Mapping[float, Sequence[float]], **more: Any) -> list[TrainedRun]:
    """Return runs of a curve whose last losses are those, by x and seed."""
    return [
        replace(run, x=x, **more)
        for x, losses in rows.items()
        for run in trained(label, [1 - loss for loss in losses])
    ]


HIGH = [0.5, 0.52, 0.5, 0.51, 0.5, 0.5, 0.52, 0.5, 0.51, 0.5]
LOW = [0.3, 0.31, 0.29, 0.3, 0.3, 0.3, 0.31, 0.29, 0.3, 0.3]
VALLEY = {1.0: HIGH, 2.0: [0.4, *[0.29] * 9], 3.0: LOW, 4.0: [0.6] * 10}
SLOPE = {1.0: HIGH, 2.0: [0.45] * 10, 3.0: LOW, 4.0: [0.2] * 10}
FLAT = {x: [0.3, 0.5, 0.4, 0.5, 0.3] for x in (1.0, 2.0, 3.0, 4.0)}


@pytest.mark.parametrize(
    ("curves", "table", "expected"),
    [
        ([VALLEY], {"dips": ["a"], "metric": "loss"}, YES),
        ([SLOPE], {"dips": ["a"], "metric": "loss"}, NO),
        ([FLAT], {"dips": ["a"], "metric": "loss"}, OPEN),
        ([VALLEY, SLOPE], {"dips": ["a", "b"], "metric": "loss"}, NO),
        ([VALLEY], {"dips": ["a"], "metric": "accuracy"}, YES),
        # Least at 3 for seed 0 and at 2 for others; of the slope always at 4.
        ([VALLEY, SLOPE], {"ordered": ["a", "b"], "metric": "best_x"}, YES),
        ([VALLEY, SLOPE], {"better": ["b", "a"], "metric": "best_x"}, NO),
        ([VALLEY, VALLEY], {"better": ["a", "b"], "metric": "best_x"}, OPEN),
        # A curve's name stands for all of its points.
        ([VALLEY, SLOPE], {"better": ["b", "a"], "metric": "loss"}, NO),
        ([VALLEY, SLOPE], {"better": ["b", "a"], "metric": "loss", "at_x": [4]}, YES),
        ([VALLEY, SLOPE], {"better": ["b", "a"], "metric": "loss", "at_x": [4, 9]}, YES),
        ([VALLEY, SLOPE], {"better": ["b @ 4", "a"], "metric": "loss"}, YES),
        ([VALLEY, SLOPE], {"better": ["b", "a @ 4"], "metric": "loss"}, YES),
        ([VALLEY], {"better": ["a @ 3", "a @ 4"], "metric": "loss"}, YES),
        ([VALLEY], {"ordered": ["a @ 4", "a @ 3"], "metric": "loss"}, NO),
    ],
)
def test_claims_over_a_sweep(
    curves: Sequence[Mapping[float, Sequence[float]]], table: dict[str, Any], expected: str
) -> None:
    runs = [run for label, rows in zip("ab", curves, strict=False) for run in swept(label, rows)]
    assert verdict(runs, **table) == expected


def test_a_dip_names_the_points_that_it_compares() -> None:
    claim = Claim.of({"id": "X", "text": "x", "dips": ["a"], "metric": "loss"})
    found = check_claim(claim, swept("a", VALLEY)).comparisons
    assert [(one.first, one.second) for one in found] == [("a @ 3", "a @ 1"), ("a @ 3", "a @ 4")]
    assert found[0].mean == pytest.approx(0.206)
    with pytest.raises(InvalidParameterError, match="claim X: dips = 'a': expected 3 points"):
        check_claim(claim, swept("a", {1.0: A, 2.0: A}))


def test_a_cost_without_a_target_is_that_of_the_whole_run() -> None:
    long = trained("long", A * 2)
    short = [
        replace(run, values={name: row[:2] for name, row in run.values.items()})
        for run in trained("short", A * 2)
    ]
    assert verdict([*long, *short], better=["short", "long"], metric="rounds") == YES
    assert verdict([*long, *short], better=["long", "short"], metric="uploads") == NO


def test_a_search_is_judged_by_the_other_seeds() -> None:
    # By all seeds together 2 is best; for each seed alone another one is.
    losses = {1: [0.1, 0.6, 0.6], 2: [0.4, 0.4, 0.4], 3: [0.5, 0.1, 0.1]}
    runs = [
        replace(run, candidate=value, values={**run.values, "epsilon": [0.0, 2.0, 4.0]})
        for value, row in losses.items()
        for run in trained("best", [1 - loss for loss in row])
    ]
    found = chosen(runs, delta=1e-3)
    # Others' sums for seed 0: 1.2, 0.8, 0.2; for seeds 1 and 2: 0.7, 0.8, 0.6.
    assert [run.searched.value for run in found if run.searched] == [3, 3, 3]
    assert [round(run.values["loss"][-1], 9) for run in found] == [0.5, 0.1, 0.1]
    assert found[0].searched == Searched(value=3, rounds=[2, 2, 2], epsilon=4.0, delta=1e-3)
    (alone,) = chosen([run for run in runs if run.seed == 0], delta=1e-3)
    assert alone.searched is not None
    assert alone.searched.value == 1
    broken = [replace(run, diverged=run.candidate == 3) for run in runs]
    assert {run.searched.value for run in chosen(broken, delta=1e-3) if run.searched} == {1, 2}


@pytest.mark.parametrize(("worst", "scale"), [(0.9, "linear"), (1.1, "log")])
def test_losses_over_a_setting_that_lie_far_apart_are_on_a_log_axis(
    sweep: ExperimentDescription, worst: float, scale: str
) -> None:
    rows = {0.001: [worst] * 3, 0.1: [0.1] * 3, 1.0: [0.2] * 3}
    runs = [*swept("Two rounds", rows), *swept("Best", rows)]
    assert draw(sweep, runs, size="small").axes[0].get_yscale() == scale


def test_the_cost_of_a_search_is_that_of_all_of_its_runs(
    sweep: ExperimentDescription, tmp_path: Path
) -> None:
    def found(label: str) -> list[TrainedRun]:
        search = Searched(value=1, rounds=(10, 25, 50, 75), epsilon=4.0, delta=1e-3)
        return swept(label, {0.001: A, 0.1: A, 1.0: A}, searched=search)

    runs = [*swept("Two rounds", {0.001: A, 0.1: A, 1.0: A}), *found("Best")]
    point = ExperimentResults(experiment=sweep, full=False, runs=runs).to_dict()["curves"][1][
        "points"
    ][0]
    # Four times the mu of one, 1.2150, composes to twice that.
    assert (point["search"]["runs"], point["search"]["rounds"]) == (4, 160)
    assert point["search"]["epsilon"] == pytest.approx(epsilon_of(2 * 1.2150, 1e-3), rel=1e-3)
