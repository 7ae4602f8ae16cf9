"""The experiments of UDP's paper: which there are, and their function."""

from pathlib import Path

import pytest
from experiment_files import INLINE, NO, YES

from flwr_privacy.simulations.research.experiments import files
from flwr_privacy.simulations.research.experiments.results import ExperimentResults
from flwr_privacy.simulations.research.experiments.runs import train
from flwr_privacy.simulations.research.experiments.summary import summary

# -- The files in papers/ -----------------------------------------------------------------------


def test_the_figures_of_the_udp_paper_are_there() -> None:
    figures = {name.removeprefix("udp/") for name in files.names()}
    numbers = ("2", "3", "4", "5", "6", "7", "8", "8b", "10", "10b", "11", "12", "13", "14")
    assert figures >= {f"figure{number}" for number in numbers}
    claimed = [
        claim.id.split()[0] for name in files.names() for claim in files.experiment(name).claims
    ]
    assert {*claimed} >= {"F25-a", "F25-b", "F25-c", "F25-d", "F25-e", "Fig8-d", "Fig15"}


# -- Functions ----------------------------------------------------------------------------------


def test_the_bound_of_udp_is_none_for_every_order(tmp_path: Path) -> None:
    chosen_figure = files.experiment("udp/figure2")
    runs = train(chosen_figure, tmp_path, seeds=[0, 1], engine=INLINE)
    assert len(runs) == 600
    values = {(run.curve, run.x): run.values["value"][0] for run in runs}
    # F15: at r = 0.25, q = 0.9 and lambda = 100 the moment is 305.005, above 284.0625.
    assert values["(c) exact", 100] == pytest.approx(305.005, abs=1e-3)
    assert values["(c) bound, q = 0.9, 400 records", 100] == pytest.approx(284.0625)
    results = ExperimentResults(experiment=chosen_figure, full=False, runs=runs)
    findings = results.findings()
    assert [finding.verdict for finding in findings] == [YES, YES, NO]
    fails = [c.second for c in findings[2].comparisons if c.verdict == NO]
    assert fails[0] == "(c) exact @ 28"
    small = summary(results)
    assert (small["rule"], small["size"], small["seeds"]) == ("computed", "computed", [])
    assert small["command"] == "flwr-privacy experiment udp/figure2"
    last = small["claims"][2]
    assert (last["number"], last["counts"], last["p"]) == (100, [27, 73, 0], None)
    (weakest,) = last["comparisons"]
    assert weakest["pair"].endswith("over (c) exact @ 100")
    assert (weakest["mean"], weakest["error"]) == (pytest.approx(-20.94, abs=0.005), 0)
