"""The commands on experiments, and the page of their results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from experiment_files import STEPS

from flwr_privacy.errors import DataError
from flwr_privacy.simulations.cli import main
from flwr_privacy.simulations.research.experiments import description as experiments
from flwr_privacy.simulations.research.experiments.replication import replication
from tests.shared.imports import ROOT


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
    written = (tmp_path / "docs" / "replication.md").read_text()
    assert "## Two step sizes" in written
    kept = (ROOT / "docs" / "replication.md").read_text(encoding="utf-8")
    assert kept.split("\n| ")[0] == written.split("\n| ")[0]


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
