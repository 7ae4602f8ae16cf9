"""Experiments are trained: once for each curve, and what a run that diverges comes to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiment_files import INLINE

from flwr_privacy.errors import DataError, EngineError, InvalidParameterError
from flwr_privacy.simulations.research.experiments import files
from flwr_privacy.simulations.research.experiments import runs as experiment_runs
from flwr_privacy.simulations.research.experiments.claims import Target
from flwr_privacy.simulations.research.experiments.curves import TrainedRun, diverged
from flwr_privacy.simulations.research.experiments.description import ExperimentDescription
from flwr_privacy.simulations.research.experiments.functions import FUNCTIONS
from flwr_privacy.simulations.research.experiments.picture import draw
from flwr_privacy.simulations.research.experiments.results import ExperimentResults
from flwr_privacy.simulations.research.experiments.runs import train
from flwr_privacy.simulations.research.experiments.significance import paired_p_values
from flwr_privacy.simulations.research.experiments.summary import PAIRED, SUMMARY, save, summary
from flwr_privacy.simulations.research.points import Point
from flwr_privacy.simulations.runner.jobs import Engine
from flwr_privacy.simulations.settings.run_folder import RunFolder

FUNCTION = """
title = "A simulation"
paper = "A Paper"
figure = "Figure 1"
metrics = ["loss"]
function = "acfl-excess"

[base]
step = 0.5

[sweep]
key = "round"
label = "round"
values = [1, 2]

[[curve]]
label = "One"

[[curve]]
label = "Other"
step = 0.75

[[claim]]
id = "F1"
text = "the smaller step is better"
better = ["One", "Other"]
metric = "loss"
"""


def test_what_a_function_comes_to_is_kept_for_each_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []

    def simulated(points: Sequence[Point], seed: int, _: Path | None) -> list[dict[str, float]]:
        computed.append(seed)
        return [
            {"loss": float(np.float64(point["round"] + point["step"] + seed))} for point in points
        ]

    known = FUNCTIONS["acfl-excess"]
    monkeypatch.setitem(FUNCTIONS, "acfl-excess", replace(known, of=simulated, check=None))
    path = tmp_path / "function.toml"

    def values(seeds: Sequence[int], *, step: float = 0.5) -> list[tuple[int, float]]:
        path.write_text(FUNCTION.replace("0.5", str(step)))
        chosen = files.read(path, "papers/function")
        runs = train(chosen, tmp_path / "out", seeds=seeds, engine=INLINE)
        return [(run.seed, run.values["loss"][0]) for run in runs if run.curve == "One"]

    first = values([0, 1])
    assert first == [(0, 1.5), (0, 2.5), (1, 2.5), (1, 3.5)]
    assert values([1, 2, 0]) == [*first[2:], (2, 3.5), (2, 4.5), *first[:2]]
    assert computed == [0, 1, 2]
    with pytest.raises(InvalidParameterError, match=r"seed-0\.json has other settings"):
        values([0], step=0.25)
    (tmp_path / "out" / "seed-0.json").write_text('{"points": []}')
    with pytest.raises(DataError, match=r"seed-0\.json: no values of a seed"):
        values([0])


def test_curves_are_trained_once_and_drawn(steps: ExperimentDescription, tmp_path: Path) -> None:
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
    runs = train(steps, out, seeds=range(5), engine=INLINE)
    again = {path for path in kept if path.stat().st_mtime_ns != kept[path]}
    assert again == {broken.metrics_path}
    assert broken.summary["status"] == "completed"
    results = ExperimentResults(experiment=steps, full=False, runs=runs)
    (finding,) = results.findings()
    assert finding.verdict == "reproduced"
    picture, numbers = save(results, out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = json.loads(numbers.read_text())
    accuracies = [run.values["accuracy"][-1] for run in runs if run.curve == "Large step"]
    assert table["curves"][0]["last"]["accuracy"][0] == pytest.approx(np.mean(accuracies))
    small = json.loads((out / SUMMARY).read_text())
    assert small == summary(results)
    assert (small["size"], small["paper_size"], small["rule"]) == (*["scaled down", False], PAIRED)
    assert small["differences"] == [
        "rounds: 3, paper 5",
        "training.epochs: default, paper 2",
        "Small step, training.epochs: default, paper 4",
    ]
    assert small["command"] == "flwr-privacy experiment papers/steps --seeds 0,1,2,3,4"
    assert small["seconds"] > 0
    (claim,) = small["claims"]
    assert (claim["verdict"], claim["better"], claim["number"]) == ("reproduced", True, 1)
    (pair,) = claim["comparisons"]
    assert pair["pair"] == "Large step over Small step"
    assert np.mean(pair["differences"]) == pytest.approx(pair["mean"], rel=1e-4)
    p_values = paired_p_values(np.array(pair["differences"]))
    assert p_values.two_sided == pytest.approx(claim["p"], rel=1e-3)
    assert any("not reached" in row for row in small["tables"][1]["rows"])
    with pytest.raises(
        InvalidParameterError, match=r"--out = .*large-step-seed-0 has other settings"
    ):
        train(steps, out, seeds=[0], engine=INLINE, full=True)


@pytest.mark.filterwarnings("error")  # of matplotlib, where a curve has no point
def test_a_run_that_diverges_is_a_result(steps: ExperimentDescription, tmp_path: Path) -> None:
    explodes = replace(steps.curves[1], settings={"training.learning_rate": 1e30})
    chosen = replace(steps, curves=[steps.curves[0], explodes])
    runs = train(chosen, tmp_path / "out", seeds=range(10), engine=INLINE)
    assert [run.diverged for run in runs] == [False, True] * 10
    assert all(len(run.values["loss"]) == 1 for run in runs if run.diverged)
    results = ExperimentResults(experiment=chosen, full=False, runs=runs)
    assert results.findings()[0].verdict == "reproduced"
    _, numbers = save(results, tmp_path / "out")
    assert json.loads(numbers.read_text())["claims"][0]["comparisons"][0]["mean"] == "inf"
    kept = json.loads((tmp_path / "out" / SUMMARY).read_text())
    assert kept["claims"][0]["comparisons"][0]["mean"] == "inf"
    assert kept["tables"][0]["rows"][1][:2] == ["Small step (diverged: 10 of 10)", "diverged"]
    before = [path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/metrics.jsonl")]
    train(chosen, tmp_path / "out", seeds=range(10), engine=INLINE)
    assert before == [p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*/metrics.jsonl")]


def test_a_run_that_fails_otherwise_is_an_error(
    steps: ExperimentDescription, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runs: list[RunFolder], engine: Engine) -> None:
        runs[0].append({"round": 0, "server": {"loss": 2.3, "accuracy": 0.1}})
        runs[0].finish("failed", "out of memory")
        raise EngineError("out of memory")

    monkeypatch.setattr(experiment_runs, "carry_out", fail)
    with pytest.raises(EngineError, match="out of memory"):
        train(steps, tmp_path / "out", seeds=[0], engine=INLINE)


@pytest.mark.long
def test_several_runs_at_a_time_give_the_same(steps: ExperimentDescription, tmp_path: Path) -> None:
    alone = train(steps, tmp_path / "alone", seeds=[0], engine=INLINE)
    together = train(steps, tmp_path / "together", seeds=[0], engine=INLINE, jobs=2)
    assert [run.values for run in together] == [run.values for run in alone]
    with pytest.raises(InvalidParameterError, match="--jobs = 2: expected an integer from 1 to 1"):
        train(steps, tmp_path / "ray", seeds=[0], engine=Engine(name="ray"), jobs=2)


def test_a_run_that_plans_fewer_rounds_keeps_its_last_model_in_the_picture(
    steps: ExperimentDescription, tmp_path: Path
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


@pytest.mark.parametrize(("scheme", "known"), [("m2fdp", True), ("fedavg", False)])
def test_energy_and_delay_are_those_of_all_rounds_of_a_tree(
    steps: ExperimentDescription, tmp_path: Path, scheme: str, known: bool
) -> None:
    settings = steps.settings(steps.curves[0], seed=0).with_values({"scheme": scheme})
    folder = RunFolder.create(tmp_path / "run", settings, engine="inline", nodes=3)
    folder.append({"round": 0, "server": {"loss": 2.0, "accuracy": 0.1}})
    for number, accuracy in enumerate((0.3, 0.5), start=1):
        scores = {"loss": 1.0, "accuracy": accuracy}
        own = {"energy_j": 1.5 * number, "delay_s": 4.0} if known else {}
        folder.append({"round": number, "server": scores, "scheme": own, "bytes_up": 8})
    run = TrainedRun.of(folder, curve="Large step", seed=0)
    assert {"energy", "delay"} <= set(run.values) if known else "energy" not in run.values
    if known:
        assert (run.values["energy"], run.values["delay"]) == ([0, 1.5, 4.5], [0, 4, 8])
        assert Target(metric="accuracy", value=0.4).cost(run, "energy") == 4.5
        assert Target(metric="accuracy", value=0.2).cost(run, "delay") == 4


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
