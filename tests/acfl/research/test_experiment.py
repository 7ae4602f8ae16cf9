"""The experiments of ACFL's paper: which there are, and their functions."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiment_files import INLINE, OPEN, YES

from flwr_privacy.acfl.privacy import sigma2_for_eps
from flwr_privacy.acfl.scfl import sigma2_for_eps_projected
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.numpy_simulation import SimulatedACFL, of_seed
from flwr_privacy.simulations.research.acfl.synthetic_data import paper_data
from flwr_privacy.simulations.research.acfl.theory import record_epsilon
from flwr_privacy.simulations.research.experiments import files
from flwr_privacy.simulations.research.experiments.description import ExperimentDescription
from flwr_privacy.simulations.research.experiments.results import ExperimentResults
from flwr_privacy.simulations.research.experiments.runs import train
from flwr_privacy.simulations.research.experiments.summary import summary
from flwr_privacy.strategies import DataBounds, SetupVariances, Weighting


def test_the_figures_of_the_acfl_paper_are_there() -> None:
    figures = {name.removeprefix("acfl/") for name in files.names()}
    assert figures >= {"figure1", "figure3a", "figure3b", "figure4", "heterogeneous", "persistent"}
    claimed = {
        claim.id
        for name in files.names()
        if name.startswith("acfl/")
        for claim in files.experiment(name).claims
    }
    assert claimed >= {"F14-a", "F14-b", "F15", "F18-floor", "F18-on"}
    for name in ("figure4", "figure4-levels"):  # beside epsilon, what it is in the usual currency
        norms = {"feature_norm": math.sqrt(10), "label_norm": math.sqrt(10)}
        about = " ".join(files.experiment(f"acfl/{name}").about.split())
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
    chosen_figure = files.experiment("acfl/figure1")
    runs = train(chosen_figure, tmp_path, seeds=[0, 1], engine=INLINE)
    values = {(run.curve, run.x): run.values["value"][0] for run in runs}
    curves = [curve.label for curve in chosen_figure.curves]
    for x, *row in BOUNDS:
        assert [values[label, x] for label in curves] == pytest.approx(row, abs=1e-6)
    findings = ExperimentResults(experiment=chosen_figure, full=False, runs=runs).findings()
    assert [finding.verdict for finding in findings] == [YES, YES, YES]


SIMULATED = """
title = "Two weights"
paper = "A Paper"
figure = "Figure 1"
metrics = ["loss"]
function = "acfl-loss"

[base]
data = "paper"

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
def simulated(tmp_path: Path) -> ExperimentDescription:
    path = tmp_path / "simulated.toml"
    path.write_text(SIMULATED)
    return files.read(path, "papers/simulated")


def test_a_function_of_a_seed_is_judged_over_seeds(
    simulated: ExperimentDescription, tmp_path: Path
) -> None:
    runs = train(simulated, tmp_path, seeds=range(3, 8), engine=INLINE)
    assert [(run.seed, run.curve, run.x) for run in runs[:5]] == [
        *((3, label, x) for label in ("ACFL", "NA") for x in (0, 20)),
        (4, "ACFL", 0),
    ]
    for seed in (3, 4):
        losses = []
        for alpha in ("estimated", 0.5):
            training = SimulatedACFL(
                privacy=SetupVariances(sigma1_sq=10, sigma2_sq=10),
                weighting=Weighting(alpha=alpha, straggler_rate=0.2),
                data=DataBounds(max_records=100),
                learning_rate=1e-4,
                schedule="inverse",
                **of_seed(seed),
            )
            losses += training.simulate(paper_data(seed), rounds=20).losses[[0, 20]].tolist()
        own = [run.values["loss"][0] for run in runs if run.seed == seed]
        assert own == pytest.approx(losses, rel=1e-12)
    results = ExperimentResults(experiment=simulated, full=False, runs=runs)
    assert results.seeds == [3, 4, 5, 6, 7]
    (finding,) = results.findings()
    assert finding.verdict == YES
    assert finding.comparisons[0].error > 0
    assert ["ACFL", "20"] in [row[:2] for row in summary(results)["tables"][0]["rows"]]
    two = train(simulated, tmp_path, seeds=[3, 4], engine=INLINE)
    (finding,) = ExperimentResults(experiment=simulated, full=False, runs=two).findings()
    assert finding.verdict == OPEN


def test_a_simulation_at_an_epsilon_has_the_noise_of_its_encoding(
    simulated: ExperimentDescription, tmp_path: Path
) -> None:
    def loss(**settings: Any) -> float:
        curve = replace(simulated.curves[0], settings={"alpha": 0.5, **settings})
        chosen_figure = replace(simulated, curves=[curve], claims=[])
        out = tmp_path / str(sorted(settings.items()))
        return train(chosen_figure, out, seeds=[0], engine=INLINE)[1].values["loss"][0]

    own, projected = {"alpha": 0.5}, {"alpha": 0.5, "encoding": "scfl"}
    assert loss(epsilon=5, **own) == loss(noise=sigma2_for_eps(5, 10, 10), **own)
    assert loss(epsilon=5, **projected) == loss(noise=sigma2_for_eps_projected(5, 10), **projected)
    assert loss(epsilon=0.1, **own) > loss(epsilon=5, **own) > loss(**own)


def test_a_simulation_that_diverged_is_a_result(
    simulated: ExperimentDescription, tmp_path: Path
) -> None:
    wild = replace(simulated.curves[1], settings={"alpha": 1.0, "noise": 1e60})
    chosen_figure = replace(simulated, curves=[simulated.curves[0], wild])
    runs = train(chosen_figure, tmp_path, seeds=range(10), engine=INLINE)
    assert [run.diverged for run in runs[:4]] == [False, False, False, True]
    results = ExperimentResults(experiment=chosen_figure, full=False, runs=runs)
    assert results.findings()[0].verdict == YES
    last = summary(results)["tables"][0]["rows"][-1]
    assert last[:3] == ["NA (diverged: 10)", "20", "diverged"]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('metrics = ["loss"]', 'metrics = ["value"]', "metrics = 'value'"),
        ('metric = "loss"', 'metric = "value"', "claim R1: metric = 'value': expected loss"),
        ('metric = "loss"', "", "claim R1: metric = 'accuracy': expected loss"),
        ('data = "paper"', 'data = "papre"', "data = 'papre'.*nearest: 'paper'"),
        ("alpha = 0.5", "alhpa = 0.5", "setting = 'alhpa'.*nearest: 'alpha'"),
        ("alpha = 0.5", "epsilon = 1", "noise = 10: expected no noise beside epsilon"),
        ("alpha = 0.5", 'encoding = "scfl"', "alpha = 'estimated': expected a number"),
    ],
)
def test_a_bad_simulation_is_refused_by_name(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert SIMULATED.count(old) >= 1
    path = tmp_path / "bad.toml"
    path.write_text(SIMULATED.replace(old, new))
    with pytest.raises(InvalidParameterError, match=text):
        train(files.read(path, "papers/bad"), tmp_path, seeds=[0], engine=INLINE)
