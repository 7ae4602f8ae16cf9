"""The commands on experiments, and the page of their results."""

from pathlib import Path

import pytest
from commands import Command
from experiment_files import STEPS, A, B, trained

from flwr_privacy.simulations.research.experiments import files
from flwr_privacy.simulations.research.experiments.description import ExperimentDescription
from flwr_privacy.simulations.research.experiments.results import ExperimentResults
from flwr_privacy.simulations.research.experiments.summary import SUMMARY
from flwr_privacy.simulations.research.experiments.tables import more_seeds


def test_the_commands(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = command("experiment", "--list")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == files.names()
    done = command("experiment", "mspdq/figure22")
    assert done.returncode == 2
    assert "experiment = 'mspdq/figure22'" in done.stderr
    assert "nearest: 'mspdq/figure2'" in done.stderr
    done = command("experiment", "mspdq/figure2")
    assert done.returncode == 3
    assert "--data-root DIR" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = command("replication")
    assert done.returncode == 3
    assert "no results below runs/experiments and docs/replication/results" in done.stderr
    (tmp_path / "a" / "figures").mkdir(parents=True)
    (tmp_path / "a" / "figures" / "steps.toml").write_text(STEPS)
    monkeypatch.setattr(files, "RESEARCH", tmp_path)
    done = command("experiment", "a/steps", "--jobs", "1", "--seeds", "0,1,2")
    assert done.returncode == 0, done.stderr
    assert "Two step sizes (scaled down, 3 seeds)" in done.stdout
    assert "numbers: runs/experiments/a/steps/experiment.json" in done.stdout
    assert "1 undecided claim: the next test is after 5 seeds, 2 more (--seeds)" in done.stdout
    done = command("experiment", "a/steps", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert "Two step sizes (scaled down, 5 seeds)" in done.stdout
    assert "reproduced, p = " in done.stdout.replace("\n", " ")
    assert "undecided" not in done.stdout
    done = command("replication")
    assert done.returncode == 0
    assert done.stdout == "page: docs/replication.md\npage: docs/replication/a.md\n"
    kept = tmp_path / "docs" / "replication" / "results" / "a" / "steps.json"
    assert kept.read_text() == (tmp_path / "runs/experiments/a/steps" / SUMMARY).read_text()
    front = (tmp_path / "docs" / "replication.md").read_text()
    assert "| [a](replication/a.md) | 1 | 0 | 0 | 0 / 0 / 0 | 0 of 1 | 0 |" in front
    page = (tmp_path / "docs" / "replication" / "a.md").read_text()
    assert "| [Figure 1](#steps) | S1: the larger step is better | reproduced, p " in page
    assert "- `flwr-privacy experiment a/steps --seeds 0,1,2,3,4`: scaled down, " in page
    command("experiment", "a/steps", "--jobs", "1", "--seeds", "0,1,2")
    done = command("replication")
    assert "left: runs/experiments/a/steps/replication.json: " in done.stdout
    assert "steps.json has more seeds" in done.stdout
    assert (tmp_path / "docs" / "replication" / "a.md").read_text() == page


@pytest.mark.parametrize("seeds", ["", "0,,1", "0,0", "-1", "one"])
def test_bad_seeds_are_refused(command: Command, seeds: str) -> None:
    done = command("experiment", "mspdq/convex", f"--seeds={seeds}")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert f"--seeds = {seeds!r}: expected whole numbers that differ" in said


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        (5, "1 undecided claim: the next test is after 10 seeds, 5 more (--seeds)"),
        (20, "1 undecided claim after the last test (20 seeds)"),
    ],
)
def test_how_many_more_seeds_an_undecided_claim_takes(
    steps: ExperimentDescription, seeds: int, expected: str
) -> None:
    values = (A * 4)[:seeds]
    runs = [*trained("Large step", values), *trained("Small step", values)]
    assert more_seeds(ExperimentResults(experiment=steps, full=False, runs=runs)) == expected
    runs = [*trained("Large step", A), *trained("Small step", B)]
    assert more_seeds(ExperimentResults(experiment=steps, full=False, runs=runs)) == ""
