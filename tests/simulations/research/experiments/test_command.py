"""The commands on experiments, and the page of their results."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from experiment_files import STEPS, A, B, trained

from flwr_privacy.simulations.cli import main
from flwr_privacy.simulations.research.experiments import description as experiments
from flwr_privacy.simulations.research.experiments.results import ExperimentResults
from flwr_privacy.simulations.research.experiments.summary import SUMMARY
from flwr_privacy.simulations.research.experiments.tables import more_seeds


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
    assert "no results below runs/experiments and docs/replication/results" in err
    (tmp_path / "a" / "figures").mkdir(parents=True)
    (tmp_path / "a" / "figures" / "steps.toml").write_text(STEPS)
    monkeypatch.setattr(experiments, "RESEARCH", tmp_path)
    code, out, err = command("experiment", "a/steps", "--jobs", "1", "--seeds", "0,1,2")
    assert code == 0, err
    assert "Two step sizes (scaled down, 3 seeds)" in out
    assert "numbers: runs/experiments/a/steps/experiment.json" in out
    assert "1 undecided claim: the next test is after 5 seeds, 2 more (--seeds)" in out
    code, out, err = command("experiment", "a/steps", "--jobs", "1")
    assert code == 0, err
    assert "Two step sizes (scaled down, 5 seeds)" in out
    assert "reproduced, p = " in out.replace("\n", " ")
    assert "undecided" not in out
    code, out, _ = command("replication")
    assert (code, out) == (0, "page: docs/replication.md\npage: docs/replication/a.md\n")
    kept = tmp_path / "docs" / "replication" / "results" / "a" / "steps.json"
    assert kept.read_text() == (tmp_path / "runs/experiments/a/steps" / SUMMARY).read_text()
    front = (tmp_path / "docs" / "replication.md").read_text()
    assert "| [a](replication/a.md) | 1 | 0 | 0 | 0 / 0 / 0 | 0 of 1 | 0 |" in front
    page = (tmp_path / "docs" / "replication" / "a.md").read_text()
    assert "| [Figure 1](#steps) | S1: the larger step is better | reproduced, p " in page
    assert "- `flwr-privacy experiment a/steps --seeds 0,1,2,3,4`: scaled down, " in page
    code, out, _ = command("experiment", "a/steps", "--jobs", "1", "--seeds", "0,1,2")
    code, out, _ = command("replication")
    assert "left: runs/experiments/a/steps/replication.json: " in out
    assert "steps.json has more seeds" in out
    assert (tmp_path / "docs" / "replication" / "a.md").read_text() == page


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        (5, "1 undecided claim: the next test is after 10 seeds, 5 more (--seeds)"),
        (20, "1 undecided claim after the last test (20 seeds)"),
    ],
)
def test_how_many_more_seeds_an_undecided_claim_takes(
    steps: experiments.ExperimentDescription, seeds: int, expected: str
) -> None:
    values = (A * 4)[:seeds]
    runs = [*trained("Large step", values), *trained("Small step", values)]
    assert more_seeds(ExperimentResults(experiment=steps, full=False, runs=runs)) == expected
    runs = [*trained("Large step", A), *trained("Small step", B)]
    assert more_seeds(ExperimentResults(experiment=steps, full=False, runs=runs)) == ""
