"""The experiments of M2FDP's paper: which there are, and their functions."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from experiment_files import INLINE, NO, OPEN, YES
from scipy.optimize import brentq
from scipy.stats import norm

from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.m2fdp.control.controller import AdaptiveController
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.tree.tree import TierTree
from flwr_privacy.simulations.research.experiments import files
from flwr_privacy.simulations.research.experiments.description import ExperimentDescription
from flwr_privacy.simulations.research.experiments.picture import draw
from flwr_privacy.simulations.research.experiments.results import ExperimentResults
from flwr_privacy.simulations.research.experiments.runs import train
from flwr_privacy.simulations.research.experiments.summary import summary
from flwr_privacy.simulations.research.m2fdp import experiment as tiers_of
from flwr_privacy.simulations.research.m2fdp.numpy_simulation import (
    LocalSteps,
    SimulatedM2FDP,
    of_seed,
)
from flwr_privacy.simulations.research.m2fdp.paper_epsilons import paper_epsilons
from flwr_privacy.simulations.research.m2fdp.synthetic_data import generated_data
from flwr_privacy.simulations.settings.flat_options import strategy_of


def test_the_figures_of_the_m2fdp_paper_are_there() -> None:
    found = {name.removeprefix("m2fdp/") for name in files.names()}
    numbers = ("5", "5-equal", "6", "7", "7-equal", "8", "9a", "9b", "9c", "10", "11", "12")
    assert found >= {f"figure{number}" for number in numbers}
    fitted = files.experiment("m2fdp/figure5")
    equal = files.experiment("m2fdp/figure5-equal")
    claims = [
        next(claim for claim in chosen_figure.claims if claim.id.endswith("-order"))
        for chosen_figure in (fitted, equal)
    ]
    assert claims[0].sides == claims[1].sides
    assert "-equal" in fitted.about  # where what its noise is worth is made good


@pytest.mark.parametrize(
    ("p", "variance"),
    [
        # One release a round of an edge's mean, K = 20 steps of 0.2 by 5 devices, 10 edges.
        (1, lambda z: (z * 2 * 20 * 0.2 / 5) ** 2 / 10),
        # Four releases of each of 50 devices, 5 steps: a quarter of the budget, twice the noise.
        (0, lambda z: 4 * (2 * z * 2 * 5 * 0.2) ** 2 / 50),
    ],
)
def test_the_noise_at_equal_privacy_is_that_of_gaussian_dp(
    p: int, variance: Callable[[float], float]
) -> None:
    chosen_figure = files.experiment("m2fdp/figure5-digits-equal")
    point = {**chosen_figure.base, "data": "synthetic", "p": p}
    epsilon, rounds = point["epsilon"], point["rounds"]

    def spent(mu: float) -> float:
        ends = norm.logcdf([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
        return float(np.exp(ends[0]) - np.exp(epsilon + ends[1])) - point["delta"]

    z = math.sqrt(rounds) / brentq(spent, 1.0, 50.0)
    training = tiers_of._training(point, 0)
    data = generated_data(0, m=4, d=5)
    local = LocalSteps(data=data, seed=0, learning_rate=10.0, clip=0.02, rate=0.05)
    curve = training.simulate(local, rounds=rounds)
    assert curve.noise_var == pytest.approx(np.full(rounds, variance(z)), rel=1e-3)


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
events = 2
rounds = 6
unit = "paper"
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
unit = "none"

[[claim]]
id = "T1"
text = "trust is better"
better = ["Trusted @ end", "Half @ end"]
"""


def tiers(tmp_path: Path, old: str = "", new: str = "") -> ExperimentDescription:
    assert old in TIERS
    path = tmp_path / "tiers.toml"
    path.write_text(TIERS.replace(old, new) if old else TIERS)
    return files.read(path, "papers/tiers")


def test_a_rehearsal_of_tiers_is_read_off_by_round(tmp_path: Path) -> None:
    chosen_figure = tiers(tmp_path)
    runs = train(chosen_figure, tmp_path, seeds=[0, 1, 2], engine=INLINE)
    trusted = strategy_of(
        SimulatedM2FDP,
        {
            "fanouts": "4,3",
            "p": 1,
            "steps": 4,
            "events": 2,
            "unit": "paper",
            "alpha": 0.3,
            "epsilon": 1.0,
            "sampling_rate": 0.05,
            "min_children": 1,
            **of_seed(1),
        },
    )
    curve = trusted.simulate(LocalSteps(data=generated_data(1, N=12), seed=1), rounds=6)
    own = [run.values["accuracy"][0] for run in runs if (run.curve, run.seed) == ("Trusted", 1)]
    assert own == pytest.approx(curve.accuracy[[0, 3, 6]].tolist(), abs=2e-3)
    jumps = np.abs(np.diff(curve.accuracy)).mean()
    (last,) = [run for run in runs if (run.curve, run.seed, run.x) == ("Trusted", 1, 6)]
    assert last.values["jitter"][0] == pytest.approx(jumps, abs=1e-3)
    results = ExperimentResults(experiment=chosen_figure, full=False, runs=runs)
    (comparison,) = results.findings()[0].comparisons
    assert (comparison.first, comparison.values[0][1]) == ("Trusted @ end", own[-1])
    assert results.size == "NumPy simulation, scaled down"
    small = summary(results)
    assert (small["full"], small["paper_size"]) == (False, False)
    assert small["command"] == "flwr-privacy experiment papers/tiers --seeds 0,1,2"
    assert small["differences"] == ["rounds: 6, paper 8", "round: 0 3 6, paper 0 8"]
    beside = train(chosen_figure, tmp_path, seeds=[0, 1, 2], engine=INLINE, jobs=2)
    assert [run.point for run in beside] == [run.point for run in runs]
    values = np.array([[run.values["accuracy"][0] for run in own] for own in (beside, runs)])
    assert np.abs(values[0] - values[1]).max() < 2e-3  # threads may sum in another order


def test_the_papers_size_of_a_rehearsal_is_called_by_its_flag(tmp_path: Path) -> None:
    chosen_figure = tiers(tmp_path)
    runs = train(chosen_figure, tmp_path, seeds=[0], engine=INLINE, full=True)
    assert [run.x for run in runs] == [0, 8] * 3
    small = summary(ExperimentResults(experiment=chosen_figure, full=True, runs=runs))
    assert small["command"] == "flwr-privacy experiment papers/tiers --full --seeds 0"
    assert (small["size"], small["paper_size"]) == ("NumPy simulation", True)
    assert small["differences"] == []


def test_beside_a_rehearsal_of_tiers_stands_what_it_costs(tmp_path: Path) -> None:
    chosen_figure = tiers(tmp_path)
    runs = train(chosen_figure, tmp_path, seeds=[0], engine=INLINE)
    notes = {run.curve: run.note for run in runs}
    tree, schedule = TierTree.of_fanouts("4,3", p=0.5), EventSchedule(steps=4, events={1: 2})
    costs = paper_epsilons(
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
    results = ExperimentResults(experiment=chosen_figure, full=False, runs=runs)
    assert notes["Half"] in [row[-1] for row in summary(results)["tables"][0]["rows"]]
    legend = draw(chosen_figure, runs, size="small").legends[0]
    assert [text.get_text() for text in legend.get_texts()][1] == f"Half: {notes['Half']}"
    at_an_epsilon = tiers(tmp_path, 'unit = "paper"', 'unit = "device"')
    runs = train(at_an_epsilon, tmp_path / "other", seeds=[0], engine=INLINE)
    assert runs[0].note == "epsilon 1 of a device"


def test_an_accuracy_that_is_not_reached_costs_infinitely_much(tmp_path: Path) -> None:
    text = TIERS.replace('function = "m2fdp"', 'function = "m2fdp-cost"')
    text = text.replace('"accuracy", "jitter"', '"energy", "delay"')
    text = text.replace('key = "round"', 'key = "target"').replace("[0, 3, 6]", "[0.05, 0.999]")
    text = text.replace("better =", 'metric = "energy"\nbetter =').replace("full = [0, 8]", "")
    path = tmp_path / "cost.toml"
    path.write_text(text)
    chosen_figure = files.read(path, "papers/cost")
    runs = train(chosen_figure, tmp_path, seeds=[0, 1, 2], engine=INLINE)
    assert {run.values["energy"][0] for run in runs if run.x == 0.05} == {0.0}
    far = [run for run in runs if run.x == 0.999]
    assert all(run.diverged and run.values["delay"][0] == math.inf for run in far)
    results = ExperimentResults(experiment=chosen_figure, full=False, runs=runs)
    assert results.findings()[0].verdict == OPEN
    rows = summary(results)["tables"][0]["rows"]
    far = [row[:4] for row in rows if row[0].startswith("Half")][-1]
    assert far == ["Half (not reached: 3)", "0.999", "not reached", "not reached"]


def test_a_controller_of_tiers_is_a_function_without_seeds(tmp_path: Path) -> None:
    chosen_figure = files.experiment("m2fdp/figure9a")
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
    findings = ExperimentResults(experiment=chosen_figure, full=False, runs=runs).findings()
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
        ("events = 2", "events = 2\ndepth = 3", "depth = 3"),
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
