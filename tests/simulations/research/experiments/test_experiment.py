"""Experiments: what their files say, what is trained once, and what the verdicts are."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.acfl.privacy import record_epsilon, sigma2_for_eps
from flwr_privacy.acfl.scfl import sigma2_for_eps_projected
from flwr_privacy.acfl.steps import StepSize
from flwr_privacy.errors import DataError, EngineError, InvalidParameterError
from flwr_privacy.m2fdp.control.controller import AdaptiveController
from flwr_privacy.m2fdp.privacy import paper_figures
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.tree.tree import TierTree
from flwr_privacy.simulations.app.server_app import build_strategy
from flwr_privacy.simulations.cli import main
from flwr_privacy.simulations.research.acfl.numpy_simulation import ACFLSettings, simulate
from flwr_privacy.simulations.research.acfl.synthetic_data import paper_scene
from flwr_privacy.simulations.research.experiments import description as experiments
from flwr_privacy.simulations.research.experiments import runs as experiment_runs
from flwr_privacy.simulations.research.experiments.claims import Claim, Target, judge
from flwr_privacy.simulations.research.experiments.curves import Searched, TrainedRun, diverged
from flwr_privacy.simulations.research.experiments.functions import FUNCTIONS
from flwr_privacy.simulations.research.experiments.picture import draw
from flwr_privacy.simulations.research.experiments.report import Results, replication, save
from flwr_privacy.simulations.research.experiments.runs import train
from flwr_privacy.simulations.research.experiments.search import chosen
from flwr_privacy.simulations.research.m2fdp.numpy_simulation import M2FDPSettings as MultiTier
from flwr_privacy.simulations.research.m2fdp.numpy_simulation import simulate as rehearse_tiers
from flwr_privacy.simulations.research.m2fdp.synthetic_data import synthetic_scene
from flwr_privacy.simulations.runner.jobs import Engine
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.tasks.tasks import check_data

INLINE = Engine(name="inline")

STEPS = """
title = "Two step sizes"
paper = "A Paper"
figure = "Figure 1"
metrics = ["loss", "accuracy"]

[base]
task = "digits-mlp"
clients = 3
rounds = 3
train_records = 300
test_records = 100

[full]
rounds = 5
training.epochs = 2

[[target]]
accuracy = 0.6

[[curve]]
label = "Large step"
training.learning_rate = 0.3

[[curve]]
label = "Small step"
training.learning_rate = 1e-3
full.training.epochs = 4

[[claim]]
id = "S1"
text = "the larger step is better"
better = ["Large step", "Small step"]
"""


@pytest.fixture
def steps(tmp_path: Path) -> experiments.Experiment:
    path = tmp_path / "steps.toml"
    path.write_text(STEPS)
    return experiments.read(path, "papers/steps")


# -- The files in papers/ -----------------------------------------------------------------------


@pytest.mark.parametrize("name", experiments.names())
@pytest.mark.parametrize("full", [False, True])
def test_a_file_has_settings_that_can_be_trained(name: str, full: bool) -> None:
    chosen = experiments.experiment(name)
    assert chosen.claims
    if chosen.function and full and not chosen.smaller:
        return  # what is at the usual size
    if chosen.function:
        check = FUNCTIONS[chosen.function].check
        if check is None:
            assert train(chosen, Path(), seeds=[0], engine=INLINE, full=full)
            return
        for _, _, point in experiment_runs.function_points(chosen, full=full):
            check(point)  # the rehearsals themselves take minutes, and most take data
        return
    for plan in chosen.planned(full=full):
        settings = chosen.settings(
            plan.curve, seed=0, full=full, x=plan.x, candidate=plan.candidate
        )
        build_strategy(settings, None)
    if chosen.settings(chosen.curves[0], seed=0).task.startswith("cifar10"):
        assert "CIFAR-10 (JPEG)" in chosen.title


def test_the_figures_of_the_mspdq_paper_are_there() -> None:
    figures = {name.removeprefix("mspdq/") for name in experiments.names()}
    assert figures >= {
        f"figure{n}" for n in ("2", "3ab", "3cd", "4", "5", "6cd", "7ab", "7cd", "7ef")
    }
    claimed = {
        claim.id for name in experiments.names() for claim in experiments.experiment(name).claims
    }
    assert claimed >= {"F23-a", "F23-b", "F23-c", "F23-d", "F24-a", "F24-b", "F24-c"}


def test_the_figures_of_the_udp_paper_are_there() -> None:
    figures = {name.removeprefix("udp/") for name in experiments.names()}
    numbers = ("2", "4", "5", "6", "7", "8", "8b", "10", "11", "12", "13", "14")
    assert figures >= {f"figure{number}" for number in numbers}
    claimed = [
        claim.id.split()[0]
        for name in experiments.names()
        for claim in experiments.experiment(name).claims
    ]
    assert {*claimed} >= {"F25-a", "F25-b", "F25-c", "F25-d", "F25-e", "Fig8-d", "Fig15"}


@pytest.mark.parametrize(("name", "sizes"), [("figure12", {800}), ("figure13", {400, 1200})])
def test_F27_the_papers_size_of_unlike_clients(name: str, sizes: set[int]) -> None:
    chosen = experiments.experiment(f"udp/{name}")
    settings = chosen.settings(chosen.curves[0], seed=0, full=True)
    assert (settings.clients, settings.per_round) == (50, None)
    assert {*settings.partition.sizes} >= sizes
    total = sum(settings.partition.sizes) * 50 // len(settings.partition.sizes)
    assert total == 40_000
    assert check_data(chosen.settings(chosen.curves[0], seed=0)) is not None


def test_the_papers_size_goes_over_what_the_curves_share(steps: experiments.Experiment) -> None:
    large, small = steps.curves
    scaled = steps.settings(small, seed=4, data_root=Path("/data"))
    assert (scaled.rounds, scaled.training.epochs, scaled.training.learning_rate) == (3, 1, 1e-3)
    assert (scaled.seed, scaled.data_root) == (4, "/data")
    full = [steps.settings(curve, seed=0, full=True) for curve in (large, small)]
    assert [settings.rounds for settings in full] == [5, 5]
    assert [settings.training.epochs for settings in full] == [2, 4]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("rounds = 3", "rounds = ", "TOML"),
        ("title", "name_of_it", "known keys"),
        ("metrics", "metriks", "known keys"),
        ('"loss"', '"los"', r"metrics = 'los'.*nearest: 'loss'"),
        ('"Small step"\ntraining', '"large STEP"\ntraining', "curve.label = .*that differ"),
        ('"Large step", "Small', '"Large step", "Smal', r"claim S1 = 'Smal step'.*'Small step'"),
        ("better =", "bettter =", r"claim S1 = \[\]: expected one of better, worse"),
        ('better = ["Large step", "Small step"]', 'better = ["Large step"]', "expected 2 curves"),
        ("better =", "within = 0.1\nbetter =", "claim S1: within = 0.1"),
        ("better =", "close =", "claim S1: within = 0.0: expected a number above 0"),
        (
            "better =",
            "target = { loss = 1 }\nbetter =",
            "claim S1: target = .* a target for rounds",
        ),
        ("better =", "at_x = [1]\nbetter =", "claim S1: at_x = "),
        ("better =", 'metric = "value"\nbetter =', "claim S1: metric = 'value'"),
        ("better =", 'metric = "best_x"\nbetter =', "claim S1: metric = 'best_x'"),
        ('better = ["Large step", "Small step"]', 'dips = ["Large step"]', "claim S1: dips = "),
        ("better =", 'metric = "distance"\nbetter =', "claim S1: reference = ''"),
        ("better =", 'at = "end"\nbetter =', "claim S1: at = 'end'"),
        ("better =", 'hat = "end"\nbetter =', "claim S1 = 'hat'.*nearest: 'at'"),
        ('text = "the larger step is better"', "", r"claim S1 = \['text'\]"),
        ("accuracy = 0.6", "accuracies = 0.6", "target = 'accuracies'"),
        ("accuracy = 0.6", "accuracy = 0.6\nloss = 1", "expected one of accuracy = , loss = "),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert STEPS.count(old) >= 1
    path = tmp_path / "bad.toml"
    path.write_text(STEPS.replace(old, new))
    with pytest.raises(InvalidParameterError, match=text):
        experiments.read(path, "papers/bad")


@pytest.mark.parametrize("seeds", ["", "0,,1", "0,0", "-1", "one"])
def test_bad_seeds_are_refused(seeds: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"--seeds = .*whole numbers that differ"):
        experiments.read_seeds(seeds)


# -- Training -----------------------------------------------------------------------------------


def test_curves_are_trained_once_and_drawn(steps: experiments.Experiment, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = train(steps, out, seeds=[0, 1], engine=INLINE)
    assert [(run.curve, run.seed) for run in runs] == [
        (label, seed) for seed in (0, 1) for label in ("Large step", "Small step")
    ]
    first = runs[0].values
    assert first["rounds"] == [0, 1, 2, 3]
    assert first["uploads"] == [0, 3, 6, 9]
    assert first["bits"][0] == 0
    # 32 bits for each of 4810 values, and little for the message around them.
    assert all(32 < bits / r < 34 for r, bits in zip((1, 2, 3), first["bits"][1:], strict=True))
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    broken = RunFolder.open(out / "large-step-seed-1")
    broken.finish("interrupted")
    runs = train(steps, out, seeds=[0, 1, 2], engine=INLINE)
    again = {path for path in kept if path.stat().st_mtime_ns != kept[path]}
    assert again == {broken.metrics_path}
    assert broken.summary["status"] == "completed"
    results = Results(experiment=steps, full=False, runs=runs)
    (finding,) = results.findings()
    assert finding.verdict == "reproduced"
    picture, numbers = save(results, out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = json.loads(numbers.read_text())
    accuracies = [run.values["accuracy"][-1] for run in runs if run.curve == "Large step"]
    assert table["curves"][0]["last"]["accuracy"][0] == pytest.approx(np.mean(accuracies))
    page = replication(tmp_path)
    assert "| `papers/steps` | scaled down | 1 | 0 | 0 |" in page
    assert (
        "| S1 | the larger step is better | accuracy, last | Large step over Small step: +" in page
    )
    assert "not reached" in page
    with pytest.raises(
        InvalidParameterError, match=r"--out = .*large-step-seed-0 has other settings"
    ):
        train(steps, out, seeds=[0], engine=INLINE, full=True)


@pytest.mark.filterwarnings("error")  # of matplotlib, where a curve has no point
def test_a_run_that_diverges_is_a_result(steps: experiments.Experiment, tmp_path: Path) -> None:
    explodes = replace(steps.curves[1], settings={"training.learning_rate": 1e30})
    chosen = replace(steps, curves=[steps.curves[0], explodes])
    runs = train(chosen, tmp_path / "out", seeds=[0, 1, 2], engine=INLINE)
    assert [run.diverged for run in runs] == [False, True] * 3
    assert all(len(run.values["loss"]) == 1 for run in runs if run.diverged)
    results = Results(experiment=chosen, full=False, runs=runs)
    assert results.findings()[0].verdict == "reproduced"
    _, numbers = save(results, tmp_path / "out")
    assert json.loads(numbers.read_text())["claims"][0]["comparisons"][0]["mean"] == "inf"
    assert "| Small step (diverged: 3 of 3) | diverged |" in replication(tmp_path)
    before = [path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/metrics.jsonl")]
    train(chosen, tmp_path / "out", seeds=[0, 1, 2], engine=INLINE)
    assert before == [p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*/metrics.jsonl")]


def test_a_run_that_fails_otherwise_is_an_error(
    steps: experiments.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runs: list[RunFolder], engine: Engine) -> None:
        runs[0].append({"round": 0, "server": {"loss": 2.3, "accuracy": 0.1}})
        runs[0].finish("failed", "out of memory")
        raise EngineError("out of memory")

    monkeypatch.setattr(experiment_runs, "carry_out", fail)
    with pytest.raises(EngineError, match="out of memory"):
        train(steps, tmp_path / "out", seeds=[0], engine=INLINE)


def test_several_runs_at_a_time_give_the_same(
    steps: experiments.Experiment, tmp_path: Path
) -> None:
    alone = train(steps, tmp_path / "alone", seeds=[0], engine=INLINE)
    together = train(steps, tmp_path / "together", seeds=[0], engine=INLINE, jobs=2)
    assert [run.values for run in together] == [run.values for run in alone]
    with pytest.raises(InvalidParameterError, match="--jobs = 2: expected an integer from 1 to 1"):
        train(steps, tmp_path / "ray", seeds=[0], engine=Engine(name="ray"), jobs=2)


def test_a_run_that_plans_fewer_rounds_keeps_its_last_model_in_the_picture(
    steps: experiments.Experiment, tmp_path: Path
) -> None:
    runs = []
    for seed, planned in enumerate(([4, 3], [4, 4, 4])):
        settings = steps.settings(steps.curves[0], seed=seed).with_values({"rounds": 4})
        folder = RunFolder.create(tmp_path / str(seed), settings, engine="inline", nodes=3)
        folder.append({"round": 0, "server": {"loss": 2.0, "accuracy": 0.1}})
        for number, rounds in enumerate(planned, start=1):
            scores = {"loss": 1.0 / number, "accuracy": 0.5}
            own = {"T": rounds, "epsilon": 0.5 * number}
            folder.append({"round": number, "server": scores, "scheme": own, "bytes_up": 8})
        runs.append(TrainedRun.of(folder, curve="Large step", seed=seed))
    assert runs[0].values["planned"] == [4, 4, 3]
    assert runs[1].values["epsilon"] == [0.0, 0.5, 1.0, 1.5]
    chosen = replace(steps, curves=steps.curves[:1], claims=[], metrics=["planned", "loss"])
    planned, loss = draw(chosen, runs, size="small").axes[::2]
    assert planned.get_ylabel() == "rounds planned"
    xs, ys = planned.lines[0].get_data()
    assert (list(xs), list(ys)) == ([0, 1, 2, 3], [4, 4, 3.5, 3.5])
    assert list(loss.lines[0].get_ydata()) == pytest.approx([2, 1, 0.5, (1 / 2 + 1 / 3) / 2])
    # One that diverged ends the line where it ends.
    broken = [replace(runs[0], diverged=True), runs[1]]
    assert len(draw(chosen, broken, size="small").axes[0].lines[0].get_xdata()) == 3


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"server": {"loss": 2.0}}, False),
        ({"server": {"loss": None}}, True),
        ({"server": {}, "skipped": True, "refused": {"not finite": 3}}, True),
        ({"server": {}, "skipped": False, "refused": {"not finite": 3}}, False),
        ({"server": {}, "skipped": True, "refused": {"error": 3}}, False),
    ],
)
def test_what_counts_as_diverged(line: Mapping[str, Any], expected: bool) -> None:
    assert diverged([{"round": 0, "server": {"loss": 2.3}}, {"round": 1, **line}]) is expected


# -- Verdicts -----------------------------------------------------------------------------------


def trained(label: str, accuracies: Sequence[float], **more: Any) -> list[TrainedRun]:
    """Return runs of two rounds with these last accuracies; NaN for one that diverged."""
    runs = []
    for seed, last in enumerate(accuracies):
        broken = math.isnan(last)
        values = {
            "accuracy": [0.1, 0.5, last],
            "loss": [2.3, 1.0, 1.0 - last],
            "rounds": [0.0, 1.0, 2.0],
            "bits": [0.0, 8.0, 16.0],
            "uploads": [0.0, 10.0, 20.0],
        }
        values = {name: row[: 2 if broken else 3] for name, row in values.items()}
        model = more.get("models", {}).get(seed, Path())
        runs.append(TrainedRun(curve=label, seed=seed, values=values, diverged=broken, model=model))
    return runs


def verdict(runs: Sequence[TrainedRun], **table: Any) -> str:
    return judge(Claim.of({"id": "X", "text": "x", **table}), runs).verdict


NAN = math.nan
A, B = [0.80, 0.81, 0.79], [0.70, 0.72, 0.70]
YES, NO, OPEN = "reproduced", "not reproduced", "undecided"


@pytest.mark.parametrize(
    ("first", "second", "table", "expected"),
    [
        # Differences 0.10, 0.09, 0.09: mean 0.0933, standard error 0.0033.
        (A, B, {"better": ["a", "b"]}, YES),
        (A, B, {"better": ["b", "a"]}, NO),
        (A, B, {"worse": ["b", "a"]}, YES),
        (A, B, {"worse": ["a", "b"]}, NO),
        (A, B, {"better": ["a", "b"], "margin": 0.08}, YES),
        (A, B, {"better": ["a", "b"], "margin": 0.09}, OPEN),
        (A, B, {"better": ["a", "b"], "margin": 0.11}, NO),
        (A, B, {"better": ["a", "b"], "metric": "loss"}, YES),
        (A, B, {"better": ["a", "b"], "at": 1}, OPEN),
        (A, B, {"better": ["a", "b"], "at": "mean_last_5"}, YES),
        (A[:2], B[:2], {"better": ["a", "b"]}, OPEN),
        # Differences 0.1, -0.02, 0.1: mean 0.06, standard error 0.04.
        (A, [0.70, 0.83, 0.69], {"better": ["a", "b"]}, OPEN),
        (A, B, {"close": ["a", "b"], "within": 0.101}, YES),
        (A, B, {"close": ["a", "b"], "within": 0.095}, OPEN),
        (A, B, {"close": ["a", "b"], "within": 0.08}, NO),
        # Shares of 0.7, 0.72, 0.7: mean 0.1321, standard error 0.0056.
        (A, B, {"close": ["a", "b"], "within": 0.15, "relative": True}, YES),
        (A, B, {"close": ["a", "b"], "within": 0.11, "relative": True}, NO),
        (A, A, {"better": ["a", "b"]}, OPEN),
        (A, [NAN] * 3, {"better": ["a", "b"]}, YES),
        ([NAN] * 3, B, {"better": ["a", "b"]}, NO),
        (A, [0.7, NAN, 0.7], {"better": ["a", "b"]}, YES),
        (A, [0.9, NAN, 0.7], {"better": ["a", "b"]}, OPEN),
        ([NAN] * 3, [NAN] * 3, {"better": ["a", "b"]}, OPEN),
        (A, [NAN] * 3, {"close": ["a", "b"], "within": 0.5}, NO),
        (A, [0.8, NAN, 0.8], {"close": ["a", "b"], "within": 0.5}, OPEN),
        (A, B, {"trains": ["b"], "reference": "a"}, YES),
        (A, [0.2, 0.2, 0.21], {"trains": ["b"], "reference": "a"}, NO),
        (A, [0.2, 0.2, 0.21], {"collapses": ["b"], "reference": "a"}, YES),
        (A, [NAN] * 3, {"collapses": ["b"], "reference": "a"}, YES),
        (A, B, {"collapses": ["b"], "reference": "a"}, NO),
        (A, B, {"trains": ["b"], "reference": "a", "share": 0.9}, NO),
        (A, B, {"better": ["a", "b"], "metric": "bits", "target": {"accuracy": 0.75}}, YES),
        (A, B, {"better": ["a", "b"], "metric": "bits", "target": {"accuracy": 0.5}}, OPEN),
        (A, B, {"better": ["b", "a"], "metric": "uploads", "target": {"loss": 0.25}}, NO),
        (
            A,
            B,
            {
                "better": ["a", "b"],
                "metric": "bits",
                "target": {"accuracy": 0.75},
                "relative": True,
                "margin": 0.5,
            },
            YES,
        ),
    ],
)
def test_a_verdict_needs_two_standard_errors(
    first: list[float], second: list[float], table: dict[str, Any], expected: str
) -> None:
    assert verdict([*trained("a", first), *trained("b", second)], **table) == expected


def test_a_claim_on_several_curves_takes_all_of_them() -> None:
    runs = [
        *trained("a", A),
        *trained("b", B),
        *trained("b2", [0.70, 0.72, 0.70]),
        *trained("c", [0.5, 0.5, 0.51]),
    ]
    assert verdict(runs, ordered=["a", "b", "c"]) == YES
    assert verdict(runs, ordered=["a", "c", "b"]) == NO
    assert verdict(runs, ordered=["a", "b", "b2", "c"]) == OPEN
    assert verdict(runs, better=[["a", "b"], "c"]) == YES
    assert verdict(runs, better=[["b", "c"], ["a"]]) == NO
    finding = judge(Claim.of({"id": "X", "text": "x", "better": [["a", "b"], ["b2", "c"]]}), runs)
    pairs = [(comparison.first, comparison.second) for comparison in finding.comparisons]
    assert pairs == [("a", "b2"), ("a", "c"), ("b", "b2"), ("b", "c")]
    assert finding.comparisons[0].mean == pytest.approx(0.28 / 3)
    assert finding.comparisons[0].error == pytest.approx(0.01 / 3)


def test_the_best_value_and_that_of_a_round() -> None:
    (run,) = trained("a", [0.3])
    value = {
        at: judge(Claim.of({"id": "X", "text": "x", "better": ["a", "a"], "at": at}), [run])
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
        for run in trained(label, A, models=dict.fromkeys(range(3), tmp_path / f"{label}.npz"))
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
    (comparison,) = judge(claim, runs).comparisons
    assert comparison.values == ([0.0] * 3, [pytest.approx(0.1)] * 3)
    assert comparison.mean == pytest.approx(0.1)


# -- Sweeps and searches ------------------------------------------------------------------------

SWEEP = """
title = "Step sizes"
paper = "A Paper"
figure = "Figure 2"
metrics = ["loss", "rounds"]

[base]
task = "digits-linear"
clients = 3
train_records = 90
test_records = 60
training.batch_size = 16

[sweep]
key = "training.learning_rate"
label = "step"
scale = "log"
values = [0.001, 0.1, 1]
full = [0.001, 0.1]

[[curve]]
label = "Two rounds"
rounds = 2

[[curve]]
label = "Best"
search = { key = "rounds", values = [1, 2], full = [1, 2, 4] }

[[claim]]
id = "S1"
text = "a larger step is better"
ordered = ["Two rounds @ 0.1", "Two rounds @ 0.001"]
metric = "loss"
"""


@pytest.fixture
def sweep(tmp_path: Path) -> experiments.Experiment:
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    return experiments.read(path, "papers/sweep")


def test_a_sweep_trains_each_setting_once(sweep: experiments.Experiment, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = train(sweep, out, seeds=[0, 1, 2], engine=INLINE)
    assert [(run.curve, run.x) for run in runs if run.seed == 1] == [
        (label, x) for label in ("Two rounds", "Best") for x in (0.001, 0.1, 1)
    ]
    # Three steps with one round and two rounds; the curve of two rounds shares the latter.
    assert len(list(out.glob("*/metrics.jsonl"))) == 3 * 6
    by_place = {(run.curve, run.x, run.seed): run for run in runs}
    for x in (0.1, 1):  # both are better with two rounds
        for seed in range(3):
            best, two = by_place["Best", x, seed], by_place["Two rounds", x, seed]
            assert best.values == two.values
            assert best.searched is not None
            assert (best.searched.value, best.searched.rounds) == (2, [1, 2])
    results = Results(experiment=sweep, full=False, runs=runs)
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
        np.mean([by_place["Two rounds", 0.1, seed].values["loss"][-1] for seed in range(3)])
    )
    picture, numbers = save(results, out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    (two, best) = json.loads(numbers.read_text())["curves"]
    losses = [by_place["Two rounds", 0.1, seed].values["loss"][-1] for seed in range(3)]
    assert two["points"][1]["last"]["loss"][0] == pytest.approx(np.mean(losses))
    assert two["points"][1]["search"] is None
    assert best["points"][1]["search"] == {"values": [2] * 3, "runs": 2, "rounds": 3, "epsilon": 0}
    page = replication(tmp_path)
    assert "| curve | step | last loss | last rounds | chosen by seed; cost of a search |" in page
    assert "2, 2, 2; 3 rounds in 2 runs |" in page
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
        experiments.read(path, "papers/bad")


def swept(label: str, rows: Mapping[float, Sequence[float]], **more: Any) -> list[TrainedRun]:
    """Return runs of a curve whose last losses are those, by x and seed."""
    return [
        replace(run, x=x, **more)
        for x, losses in rows.items()
        for run in trained(label, [1 - loss for loss in losses])
    ]


VALLEY = {1.0: [0.5, 0.52, 0.5], 2.0: [0.4, 0.3, 0.3], 3.0: [0.3, 0.31, 0.29], 4.0: [0.6] * 3}
SLOPE = {1.0: [0.5, 0.52, 0.5], 2.0: [0.45] * 3, 3.0: [0.3, 0.31, 0.29], 4.0: [0.2] * 3}
FLAT = {x: [0.3, 0.5, 0.4] for x in (1.0, 2.0, 3.0, 4.0)}


@pytest.mark.parametrize(
    ("curves", "table", "expected"),
    [
        ([VALLEY], {"dips": ["a"], "metric": "loss"}, YES),
        ([SLOPE], {"dips": ["a"], "metric": "loss"}, NO),
        ([FLAT], {"dips": ["a"], "metric": "loss"}, OPEN),
        ([VALLEY, SLOPE], {"dips": ["a", "b"], "metric": "loss"}, NO),
        ([VALLEY], {"dips": ["a"], "metric": "accuracy"}, YES),
        # Least for seeds 0 to 2 at 3, 2, 3; of the slope always at 4.
        ([VALLEY, SLOPE], {"ordered": ["a", "b"], "metric": "best_x"}, YES),
        ([VALLEY, SLOPE], {"better": ["b", "a"], "metric": "best_x"}, NO),
        ([VALLEY, VALLEY], {"better": ["a", "b"], "metric": "best_x"}, OPEN),
        # A curve's name stands for all of its points.
        ([VALLEY, SLOPE], {"better": ["b", "a"], "metric": "loss"}, NO),
        ([VALLEY, SLOPE], {"better": ["b", "a"], "metric": "loss", "at_x": [4]}, YES),
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
    found = judge(claim, swept("a", VALLEY)).comparisons
    assert [(one.first, one.second) for one in found] == [("a @ 3", "a @ 1"), ("a @ 3", "a @ 4")]
    assert found[0].mean == pytest.approx(0.62 / 3)
    with pytest.raises(InvalidParameterError, match="claim X: dips = 'a': expected 3 points"):
        judge(claim, swept("a", {1.0: A, 2.0: A}))


def test_a_cost_without_a_target_is_that_of_the_whole_run() -> None:
    long = trained("long", A)
    short = [
        replace(run, values={name: row[:2] for name, row in run.values.items()})
        for run in trained("short", A)
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
    sweep: experiments.Experiment, worst: float, scale: str
) -> None:
    rows = {0.001: [worst] * 3, 0.1: [0.1] * 3, 1.0: [0.2] * 3}
    runs = [*swept("Two rounds", rows), *swept("Best", rows)]
    assert draw(sweep, runs, size="small").axes[0].get_yscale() == scale


def test_the_cost_of_a_search_is_that_of_all_of_its_runs(
    sweep: experiments.Experiment, tmp_path: Path
) -> None:
    def found(label: str) -> list[TrainedRun]:
        search = Searched(value=1, rounds=(10, 25, 50, 75), epsilon=4.0, delta=1e-3)
        return swept(label, {0.001: A, 0.1: A, 1.0: A}, searched=search)

    runs = [*swept("Two rounds", {0.001: A, 0.1: A, 1.0: A}), *found("Best")]
    point = Results(experiment=sweep, full=False, runs=runs).to_dict()["curves"][1]["points"][0]
    # Four times the mu of one, 1.2150, composes to twice that.
    assert (point["search"]["runs"], point["search"]["rounds"]) == (4, 160)
    assert point["search"]["epsilon"] == pytest.approx(epsilon_of(2 * 1.2150, 1e-3), rel=1e-3)


# -- Functions ----------------------------------------------------------------------------------


def test_the_bound_of_udp_is_none_for_every_order(tmp_path: Path) -> None:
    chosen_figure = experiments.experiment("udp/figure2")
    runs = train(chosen_figure, tmp_path, seeds=[0, 1], engine=INLINE)
    assert len(runs) == 600
    values = {(run.curve, run.x): run.values["value"][0] for run in runs}
    # F15: at r = 0.25, q = 0.9 and lambda = 100 the moment is 305.005, above 284.0625.
    assert values["(c) exact", 100] == pytest.approx(305.005, abs=1e-3)
    assert values["(c) bound, q = 0.9, 400 records", 100] == pytest.approx(284.0625)
    results = Results(experiment=chosen_figure, full=False, runs=runs)
    findings = results.findings()
    assert [finding.verdict for finding in findings] == [YES, YES, NO]
    fails = [c.second for c in findings[2].comparisons if c.verdict == NO]
    assert fails[0] == "(c) exact @ 28"
    save(results, tmp_path)
    page = replication(tmp_path)
    assert "100 comparisons: 27 reproduced, 73 not reproduced, 0 undecided; " in page
    assert "`flwr-privacy experiment udp/figure2`. " in page
    assert "Figure 2, computed." in page
    assert "(c) exact @ 100: -20.94 ± 0 |" in page


def test_the_figures_of_the_acfl_paper_are_there() -> None:
    figures = {name.removeprefix("acfl/") for name in experiments.names()}
    assert figures >= {"figure1", "figure3a", "figure3b", "figure4", "heterogeneous", "persistent"}
    claimed = {
        claim.id
        for name in experiments.names()
        if name.startswith("acfl/")
        for claim in experiments.experiment(name).claims
    }
    assert claimed >= {"F14-a", "F14-b", "F15", "F18-floor", "F18-on"}
    for name in ("figure4", "figure4-levels"):  # beside epsilon, what it is in the usual currency
        norms = {"feature_norm": math.sqrt(10), "label_norm": math.sqrt(10)}
        about = " ".join(experiments.experiment(f"acfl/{name}").about.split())
        for nats in (1, 10):
            s = sigma2_for_eps(nats, 10, 10)
            assert f"({record_epsilon(s, s, delta=1e-5, **norms):.3g}, 1e-5)-DP" in about


# F6: epsilon, and the bound with the adaptive weight and with 0, 0.1, 0.5, 0.9 and 1.
BOUNDS = [
    (1, 10.222201, 10.222222, 33.060175, 582.059942, 1863.296433, 2298.017544),
    (10, 10.221997, 10.222222, 12.370754, 64.824409, 187.453306, 229.075412),
    (50, 10.220853, 10.222222, 10.538539, 19.019022, 39.043852, 45.853864),
    (100, 10.218680, 10.222222, 10.317182, 13.485101, 21.113949, 23.718181),
    (200, 10.209965, 10.222222, 10.218067, 11.007226, 13.085634, 13.806682),
    (500, 10.101073, 10.222222, 10.181854, 10.101905, 10.152394, 10.185397),
    (1000, 10.001526, 10.222222, 10.180015, 10.055940, 10.003467, 10.001536),
]


def test_F6_the_bound_of_acfl_is_least_for_the_adaptive_weight(tmp_path: Path) -> None:
    chosen_figure = experiments.experiment("acfl/figure1")
    runs = train(chosen_figure, tmp_path, seeds=[0, 1], engine=INLINE)
    values = {(run.curve, run.x): run.values["value"][0] for run in runs}
    curves = [curve.label for curve in chosen_figure.curves]
    for x, *row in BOUNDS:
        assert [values[label, x] for label in curves] == pytest.approx(row, abs=1e-6)
    findings = Results(experiment=chosen_figure, full=False, runs=runs).findings()
    assert [finding.verdict for finding in findings] == [YES, YES, YES]


REHEARSED = """
title = "Two weights"
paper = "A Paper"
figure = "Figure 1"
metrics = ["loss"]
function = "acfl-loss"

[base]
scene = "paper"

[sweep]
key = "round"
label = "round"
values = [0, 20]

[[curve]]
label = "ACFL"
noise = 10

[[curve]]
label = "NA"
alpha = 0.5
noise = 10

[[claim]]
id = "R1"
text = "the adaptive weight is better"
better = ["ACFL @ 20", "NA @ 20"]
metric = "loss"
"""


@pytest.fixture
def rehearsed(tmp_path: Path) -> experiments.Experiment:
    path = tmp_path / "rehearsed.toml"
    path.write_text(REHEARSED)
    return experiments.read(path, "papers/rehearsed")


def test_a_function_of_a_seed_is_judged_over_seeds(
    rehearsed: experiments.Experiment, tmp_path: Path
) -> None:
    runs = train(rehearsed, tmp_path, seeds=[3, 4, 5], engine=INLINE)
    assert [(run.seed, run.curve, run.x) for run in runs[:5]] == [
        *((3, label, x) for label in ("ACFL", "NA") for x in (0, 20)),
        (4, "ACFL", 0),
    ]
    for seed in (3, 4):
        course = simulate(
            paper_scene(seed),
            [
                ACFLSettings(sigma1_sq=10, sigma2_sq=10),
                ACFLSettings(alpha=0.5, sigma1_sq=10, sigma2_sq=10),
            ],
            rounds=20,
            steps=StepSize(1e-4, "inverse"),
            seed=seed,
        )
        own = [run.values["loss"][0] for run in runs if run.seed == seed]
        assert own == pytest.approx(course.losses[:, [0, 20]].ravel().tolist(), rel=1e-12)
    results = Results(experiment=rehearsed, full=False, runs=runs)
    assert results.seeds == [3, 4, 5]
    (finding,) = results.findings()
    assert finding.verdict == YES
    assert finding.comparisons[0].error > 0
    save(results, tmp_path)
    assert "| ACFL | 20 | " in replication(tmp_path)
    two = train(rehearsed, tmp_path, seeds=[3, 4], engine=INLINE)
    (finding,) = Results(experiment=rehearsed, full=False, runs=two).findings()
    assert finding.verdict == OPEN


def test_a_rehearsal_at_an_epsilon_has_the_noise_of_its_encoding(
    rehearsed: experiments.Experiment, tmp_path: Path
) -> None:
    def loss(**settings: Any) -> float:
        curve = replace(rehearsed.curves[0], settings={"alpha": 0.5, **settings})
        chosen_figure = replace(rehearsed, curves=[curve], claims=[])
        return train(chosen_figure, tmp_path, seeds=[0], engine=INLINE)[1].values["loss"][0]

    own, projected = {"alpha": 0.5}, {"alpha": 0.5, "encoding": "scfl"}
    assert loss(epsilon=5, **own) == loss(noise=sigma2_for_eps(5, 10, 10), **own)
    assert loss(epsilon=5, **projected) == loss(noise=sigma2_for_eps_projected(5, 10), **projected)
    assert loss(epsilon=0.1, **own) > loss(epsilon=5, **own) > loss(**own)


def test_a_rehearsal_that_diverged_is_a_result(
    rehearsed: experiments.Experiment, tmp_path: Path
) -> None:
    wild = replace(rehearsed.curves[1], settings={"alpha": 1.0, "noise": 1e60})
    chosen_figure = replace(rehearsed, curves=[rehearsed.curves[0], wild])
    runs = train(chosen_figure, tmp_path, seeds=[0, 1, 2], engine=INLINE)
    assert [run.diverged for run in runs[:4]] == [False, False, False, True]
    results = Results(experiment=chosen_figure, full=False, runs=runs)
    assert results.findings()[0].verdict == YES
    save(results, tmp_path)
    assert "| NA (diverged: 3) | 20 | diverged |" in replication(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('metrics = ["loss"]', 'metrics = ["value"]', "metrics = 'value'"),
        ('metric = "loss"', 'metric = "value"', "claim R1: metric = 'value': expected loss"),
        ('metric = "loss"', "", "claim R1: metric = 'accuracy': expected loss"),
        ('scene = "paper"', 'scene = "papre"', "scene = 'papre'.*nearest: 'paper'"),
        ("alpha = 0.5", "alhpa = 0.5", "setting = 'alhpa'.*nearest: 'alpha'"),
        ("alpha = 0.5", "epsilon = 1", "noise = 10: expected no noise beside epsilon"),
        ("alpha = 0.5", 'encoding = "scfl"', "alpha = 'estimated': expected a number"),
    ],
)
def test_a_bad_rehearsal_is_refused_by_name(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert REHEARSED.count(old) >= 1
    path = tmp_path / "bad.toml"
    path.write_text(REHEARSED.replace(old, new))
    with pytest.raises(InvalidParameterError, match=text):
        train(experiments.read(path, "papers/bad"), tmp_path, seeds=[0], engine=INLINE)


def test_the_figures_of_the_m2fdp_paper_are_there() -> None:
    found = {name.removeprefix("m2fdp/") for name in experiments.names()}
    numbers = ("5", "5-equal", "6", "7", "7-equal", "8", "9a", "9b", "9c", "10", "11", "12")
    assert found >= {f"figure{number}" for number in numbers}
    fitted = experiments.experiment("m2fdp/figure5")
    equal = experiments.experiment("m2fdp/figure5-equal")
    claims = [
        next(claim for claim in chosen_figure.claims if claim.id.endswith("-order"))
        for chosen_figure in (fitted, equal)
    ]
    assert claims[0].sides == claims[1].sides
    assert "-equal" in fitted.about  # where what its noise is worth is made good


TIERS = """
title = "Trust"
paper = "A Paper"
figure = "Figure 1"
metrics = ["accuracy", "jitter"]
function = "m2fdp"

[base]
data = "synthetic"
fanouts = "4,3"
steps = 4
period = 2
rounds = 6
calibration = "paper"
alpha = 0.3

[full]
rounds = 8

[sweep]
key = "round"
label = "round"
values = [0, 3, 6]
full = [0, 8]

[[curve]]
label = "Trusted"
p = 1

[[curve]]
label = "Half"
p = 0.5

[[curve]]
label = "Plain"
calibration = "none"

[[claim]]
id = "T1"
text = "trust is better"
better = ["Trusted @ end", "Half @ end"]
"""


def tiers(tmp_path: Path, old: str = "", new: str = "") -> experiments.Experiment:
    assert old in TIERS
    path = tmp_path / "tiers.toml"
    path.write_text(TIERS.replace(old, new) if old else TIERS)
    return experiments.read(path, "papers/tiers")


def test_a_rehearsal_of_tiers_is_read_off_by_round(tmp_path: Path) -> None:
    chosen_figure = tiers(tmp_path)
    runs = train(chosen_figure, tmp_path, seeds=[0, 1, 2], engine=INLINE)
    schedule = EventSchedule(steps=4, events={1: 2})
    trusted = MultiTier(
        tree=TierTree.of_fanouts("4,3", p=1), schedule=schedule, calibration="paper", alpha=0.3
    )
    scene = synthetic_scene(1, N=12)
    course = rehearse_tiers(scene, [trusted], rounds=6, seed=1)
    own = [run.values["accuracy"][0] for run in runs if (run.curve, run.seed) == ("Trusted", 1)]
    assert own == pytest.approx(course.accuracy[0, [0, 3, 6]].tolist(), abs=2e-3)
    jumps = np.abs(np.diff(course.accuracy[0])).mean()
    (last,) = [run for run in runs if (run.curve, run.seed, run.x) == ("Trusted", 1, 6)]
    assert last.values["jitter"][0] == pytest.approx(jumps, abs=1e-3)
    results = Results(experiment=chosen_figure, full=False, runs=runs)
    (comparison,) = results.findings()[0].comparisons
    assert (comparison.first, comparison.values[0][1]) == ("Trusted @ end", own[-1])
    assert results.size == "rehearsed, scaled down"
    save(results, tmp_path)
    page = replication(tmp_path)
    assert "| `papers/tiers` | rehearsed, scaled down |" in page
    assert "papers/tiers --full" not in page
    assert replication(tmp_path, page) == page
    beside = train(chosen_figure, tmp_path, seeds=[0, 1, 2], engine=INLINE, jobs=2)
    assert [run.point for run in beside] == [run.point for run in runs]
    values = np.array([[run.values["accuracy"][0] for run in own] for own in (beside, runs)])
    assert np.abs(values[0] - values[1]).max() < 2e-3  # threads may sum in another order


def test_the_papers_size_of_a_rehearsal_is_called_by_its_flag(tmp_path: Path) -> None:
    chosen_figure = tiers(tmp_path)
    runs = train(chosen_figure, tmp_path, seeds=[0], engine=INLINE, full=True)
    assert [run.x for run in runs] == [0, 8] * 3
    save(Results(experiment=chosen_figure, full=True, runs=runs), tmp_path)
    page = replication(tmp_path)
    assert "`flwr-privacy experiment papers/tiers --full`" in page
    assert "| `papers/tiers` | rehearsed |" in page


def test_beside_a_rehearsal_of_tiers_stands_what_it_costs(tmp_path: Path) -> None:
    chosen_figure = tiers(tmp_path)
    runs = train(chosen_figure, tmp_path, seeds=[0], engine=INLINE)
    notes = {run.curve: run.note for run in runs}
    tree, schedule = TierTree.of_fanouts("4,3", p=0.5), EventSchedule(steps=4, events={1: 2})
    costs = paper_figures(
        tree=tree,
        schedule=schedule,
        q=0.05,
        rounds=6,
        epsilon=1.0,
        delta=1e-5,
        alpha=0.3,
        accountant="rdp",
    )
    device = [f"{float(f'{costs.device[tier]:.3g}'):,.10g}" for tier in (1, 2)]
    assert notes["Half"].startswith(f"epsilon of a device {device[0]} / {device[1]}, of a record ")
    assert notes["Plain"] == "no privacy"
    save(Results(experiment=chosen_figure, full=False, runs=runs), tmp_path)
    assert f"| {notes['Half']} |" in replication(tmp_path)
    legend = draw(chosen_figure, runs, size="small").legends[0]
    assert [text.get_text() for text in legend.get_texts()][1] == f"Half: {notes['Half']}"
    at_an_epsilon = tiers(tmp_path, 'calibration = "paper"', 'calibration = "device"')
    runs = train(at_an_epsilon, tmp_path, seeds=[0], engine=INLINE)
    assert runs[0].note == "epsilon 1 of a device"


def test_an_accuracy_that_is_not_reached_costs_infinitely_much(tmp_path: Path) -> None:
    text = TIERS.replace('function = "m2fdp"', 'function = "m2fdp-cost"')
    text = text.replace('"accuracy", "jitter"', '"energy", "delay"')
    text = text.replace('key = "round"', 'key = "target"').replace("[0, 3, 6]", "[0.05, 0.999]")
    text = text.replace("better =", 'metric = "energy"\nbetter =').replace("full = [0, 8]", "")
    path = tmp_path / "cost.toml"
    path.write_text(text)
    chosen_figure = experiments.read(path, "papers/cost")
    runs = train(chosen_figure, tmp_path, seeds=[0, 1, 2], engine=INLINE)
    assert {run.values["energy"][0] for run in runs if run.x == 0.05} == {0.0}
    far = [run for run in runs if run.x == 0.999]
    assert all(run.diverged and run.values["delay"][0] == math.inf for run in far)
    results = Results(experiment=chosen_figure, full=False, runs=runs)
    assert results.findings()[0].verdict == OPEN
    save(results, tmp_path)
    assert "| Half (not reached: 3) | 0.999 | not reached | not reached |" in replication(tmp_path)


def test_a_controller_of_tiers_is_a_function_without_seeds(tmp_path: Path) -> None:
    chosen_figure = experiments.experiment("m2fdp/figure9a")
    runs = train(chosen_figure, tmp_path, seeds=[0, 1], engine=INLINE)
    assert {run.seed for run in runs} == {0}
    values = {(run.curve, run.x): run.values for run in runs}
    # A19: with energy and delay at 1 and noise at 1e-4 as printed, the first choices are these.
    first = AdaptiveController.of(
        TierTree.of_fanouts("2,4,4,8", p=[0.5, 0, 0]),
        parameters=7840,
        total_steps=4000,
        max_steps=40,
        events={1: 3},
        weights=(1.0, 1.0, 1e-4),
        normalise=False,
        sampling_rate=0.05,
        nu="printed",
        active_tiers="all",
    ).decide(4000)
    assert (first.steps, first.secure, first.insecure) == (4, 1, 1)
    assert values["D.5, as printed", 1.0]["steps"][0] <= 4
    findings = Results(experiment=chosen_figure, full=False, runs=runs).findings()
    assert {finding.verdict for finding in findings} == {YES, NO}


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('metrics = ["accuracy", "jitter"]', 'metrics = ["energy"]', "metrics = 'energy'"),
        ("better =", 'metric = "energy"\nbetter =', "'energy': expected accuracy or jitter"),
        ("Trusted @ end", "Trusted @ 7", "claim T1 = 'Trusted @ 7'"),
        ("alpha = 0.3", "alhpa = 0.3", "setting = 'alhpa'.*nearest: 'alpha'"),
        ("rounds = 6", "rounds = 5", "round = 6"),
        ('fanouts = "4,3"', "devices = 12", "devices = 12: expected it with one of"),
        ('fanouts = "4,3"', "devices = 12\nsubnet = 5", "devices = 12: expected a multiple of"),
        ('"synthetic"', '"sythetic"', "data = 'sythetic'.*nearest: 'synthetic'"),
        ("period = 2", "period = 2\ndepth = 3", "depth = 3"),
    ],
)
def test_a_bad_rehearsal_of_tiers_is_refused_by_name(
    tmp_path: Path, old: str, new: str, text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        train(tiers(tmp_path, old, new), tmp_path, seeds=[0], engine=INLINE)


def test_a_rehearsal_without_its_data_says_where_they_go(tmp_path: Path) -> None:
    chosen_figure = tiers(tmp_path, '"synthetic"', '"fashion-mnist"')
    with pytest.raises(DataError, match="--data-root DIR"):
        train(chosen_figure, tmp_path, seeds=[0, 1], engine=INLINE, jobs=2)


# -- The commands -------------------------------------------------------------------------------


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flwr-privacy", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_the_commands(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = command("experiment", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == experiments.names()
    code, _, err = command("experiment", "mspdq/figure22")
    assert code == 2
    assert "experiment = 'mspdq/figure22'" in err
    assert "nearest: 'mspdq/figure2'" in err
    code, _, err = command("experiment", "mspdq/figure2")
    assert code == 3
    assert "--data-root DIR" in err
    assert not (tmp_path / "runs").exists()
    code, _, err = command("replication")
    assert code == 3
    assert "no results below runs/experiments" in err
    (tmp_path / "a" / "figures").mkdir(parents=True)
    (tmp_path / "a" / "figures" / "steps.toml").write_text(STEPS)
    monkeypatch.setattr(experiments, "RESEARCH", tmp_path)
    code, out, err = command("experiment", "a/steps", "--jobs", "1", "--seeds", "0,1,2")
    assert code == 0, err
    assert "Two step sizes (scaled down, 3 seeds)" in out
    assert "reproduced" in out
    assert "numbers: runs/experiments/a/steps/experiment.json" in out
    code, out, _ = command("replication")
    assert (code, out) == (0, "page: docs/replication.md\n")
    assert "## Two step sizes" in (tmp_path / "docs" / "replication.md").read_text()


def test_damaged_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text("{}")
    with pytest.raises(DataError, match=r"experiment\.json: no results of an experiment"):
        replication(tmp_path)


def test_a_page_keeps_what_has_no_new_results(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    table = {
        "experiment": "mspdq/one",
        "title": "One",
        "source": "A paper, no figure",
        "size": "scaled down",
        "seeds": [0, 1, 2],
        "about": "",
        "metrics": ["loss"],
        "sweep": None,
        "targets": [],
        "claims": [],
        "curves": [
            {
                "label": "FedAvg",
                "diverged": 0,
                "runs": [0, 1, 2],
                "last": {"loss": [0.5, 0.1], "bits": [32, 0], "uploads": [4, 0]},
            }
        ],
    }
    other = {**table, "experiment": "udp/other", "title": "Other"}
    (tmp_path / "one" / "experiment.json").write_text(json.dumps(table))
    (tmp_path / "other" / "experiment.json").write_text(json.dumps(other))
    both = replication(tmp_path)
    alone = replication(tmp_path / "one")
    assert "## Other" not in alone
    assert replication(tmp_path / "other", alone) == both
    assert replication(tmp_path / "one", both) == both
    with pytest.raises(DataError, match="2 experiments in its table and 1 sections"):
        replication(tmp_path, both.replace("\n## Other", "\nOther"))
